//! Templates of custom resources, in the language of Go's `text/template`.
//!
//! The crate `gotmpl` reads and runs them. What a repair needs no more than is refused when the file is
//! read: named templates, assignments in loops, functions beyond [`FUNCTIONS`], and fields that the
//! data does not have. So a template that loads also renders, within [`MAX_OUTPUT_BYTES`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use contract::{HealthEvent, effective_action_name};
use gotmpl::parse::{BranchNode, CommandNode, Expr, ListNode, Node, PipeNode, Pos, SmolStr};
use gotmpl::{Template as GoTemplate, TemplateError as GoError, Value};
use serde_json::Value as Json;

use model::node::Taint;

use fields::Type;

mod fields;

/// Largest template, in bytes.
pub const MAX_TEMPLATE_BYTES: usize = 64 * 1024;
/// Largest text that a template may come to, in bytes. A custom resource takes a hundredth of it.
pub const MAX_OUTPUT_BYTES: usize = 128 * 1024;
/// Most rounds of all loops of a template together.
const MAX_ROUNDS: u64 = 1_000;
/// Most bytes that the functions of a template may make together.
const MAX_MADE_BYTES: usize = 1024 * 1024;
/// Functions that a template may call: Go's, and `quote` of NVSentinel's lifecycle manager.
const FUNCTIONS: [&str; 14] = [
    "and", "eq", "ge", "gt", "index", "le", "len", "lt", "ne", "not", "or", "print", "printf",
    "quote",
];
/// Name of the template within the crate.
const NAME: &str = "resource";

/// A template that has been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    source: Arc<str>,
}

/// The trouble with a template, and where it is. Displayed as `line:column: what`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {what}")]
pub struct TemplateError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The trouble.
    pub what: String,
}

/// The values that a template sees.
#[derive(Clone, Debug)]
pub struct Variables<'a> {
    /// The event that stands for the fault.
    pub event: &'a HealthEvent,
    /// The id that makes the resource's name its own.
    pub id: &'a str,
    /// Value of the entity that alone is repaired; empty: the node as a whole.
    pub entity: &'a str,
    /// Group of the resource.
    pub group: &'a str,
    /// Its version.
    pub version: &'a str,
    /// Its kind.
    pub kind: &'a str,
    /// Its namespace; empty where it has none.
    pub namespace: &'a str,
}

/// The values that a template of a drain sees.
#[derive(Clone, Debug)]
pub struct DrainVariables<'a> {
    /// The event that stands for the fault.
    pub event: &'a HealthEvent,
    /// Its id.
    pub id: &'a str,
    /// The pods that are to leave, by namespace.
    pub pods: &'a BTreeMap<String, Vec<String>>,
    /// Group of the resource.
    pub group: &'a str,
    /// Its version.
    pub version: &'a str,
    /// Its kind.
    pub kind: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
}

/// The values that a template of a test of nodes sees.
#[derive(Clone, Debug)]
pub struct ValidationVariables<'a> {
    /// The name of the request.
    pub request: &'a str,
    /// The name of the group of tests.
    pub group: &'a str,
    /// The namespace of the object.
    pub namespace: &'a str,
    /// The time for the tests.
    pub timeout_seconds: i64,
    /// The nodes.
    pub nodes: &'a [String],
    /// The tests.
    pub tests: &'a [String],
    /// The image of the first test.
    pub image: &'a str,
    /// Its command.
    pub command: &'a [String],
    /// Its environment.
    pub env: &'a [(String, String)],
    /// The taints that pods tolerate; one without a value is tolerated with any.
    pub tolerated: &'a [Taint],
}

/// A text of bounded size.
struct Output(String);

// === impl Template ===

impl Template {
    /// Reads a template of a repair.
    pub fn parse(source: &str) -> Result<Self, TemplateError> {
        Self::parse_as(source, Type::Root)
    }

    /// Reads a template of a drain.
    pub fn parse_drain(source: &str) -> Result<Self, TemplateError> {
        Self::parse_as(source, Type::Drain)
    }

    /// Reads a template of a test of nodes.
    pub fn parse_validation(source: &str) -> Result<Self, TemplateError> {
        Self::parse_as(source, Type::Validation)
    }

    /// Reads a template that sees data of this type.
    fn parse_as(source: &str, root: Type) -> Result<Self, TemplateError> {
        let at = |offset: usize, what: &str| TemplateError::at(source, offset, what);
        if source.len() > MAX_TEMPLATE_BYTES {
            let found = source.len();
            let what = format!("it has {found} bytes, at most {MAX_TEMPLATE_BYTES} are taken");
            return Err(at(0, &what));
        }
        let parsed = parsed(source)?;
        if parsed.templates().iter().any(|name| *name != NAME) {
            let place = ["define", "block"]
                .iter()
                .find_map(|word| source.find(word));
            return Err(at(
                place.unwrap_or_default(),
                "named templates are not supported: write it in one piece",
            ));
        }
        blocks_fit(source)?;
        if let Some(tree) = parsed.lookup(NAME) {
            let mut check = Check {
                source,
                variables: vec![("$".into(), root)],
            };
            check.list(tree, root)?;
        }
        Ok(Self {
            source: source.into(),
        })
    }

    /// Returns the text that it comes to.
    pub fn render(&self, variables: &Variables<'_>) -> Result<String, TemplateError> {
        self.render_data(&variables.value())
    }

    /// Returns the text that it comes to, of a template of a drain.
    pub fn render_drain(&self, variables: &DrainVariables<'_>) -> Result<String, TemplateError> {
        self.render_data(&variables.value())
    }

    /// Returns the text that it comes to, of a template of a test of nodes.
    pub fn render_validation(
        &self,
        variables: &ValidationVariables<'_>,
    ) -> Result<String, TemplateError> {
        self.render_data(&variables.value())
    }

    fn render_data(&self, data: &Value) -> Result<String, TemplateError> {
        let source = self.source.as_ref();
        let parsed = parsed(source)?;
        let Some(tree) = parsed.lookup(NAME).cloned() else {
            return Ok(String::new());
        };
        let tree = plain(tree);
        let run = |nodes: &[Node]| {
            let part = ListNode {
                pos: tree.pos,
                nodes: nodes.to_vec(),
            };
            let mut output = Output(String::new());
            let bounded = with_functions(GoTemplate::new(NAME)).max_range_iters(MAX_ROUNDS);
            let ran =
                bounded
                    .add_parse_tree(NAME, part)
                    .execute_template_fmt(&mut output, NAME, data);
            ran.map(|()| output.0)
        };
        let error = match run(&tree.nodes) {
            Ok(text) => return Ok(text),
            Err(error) => said(&error),
        };
        // The crate does not say where: the first part with which it goes wrong does.
        let bad = (0..tree.nodes.len())
            .find(|upto| run(tree.nodes.get(..=*upto).unwrap_or_default()).is_err());
        let node = bad.and_then(|index| tree.nodes.get(index));
        let offset = node.map_or(0, |node| place(node).offset);
        Err(TemplateError::at(source, offset, &error))
    }
}

// === impl TemplateError ===

impl TemplateError {
    /// Returns the trouble at a byte of the template.
    fn at(source: &str, offset: usize, what: &str) -> Self {
        let before = source.get(..offset).unwrap_or(source);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let line = before.get(line_start..).unwrap_or_default();
        Self {
            line: 1 + before.matches('\n').count(),
            column: 1 + line.chars().count(),
            what: what.to_owned(),
        }
    }
}

// === impl Variables ===

impl Variables<'_> {
    fn value(&self) -> Value {
        let text = |text: &str| Value::String(text.into());
        let action = effective_action_name(self.event);
        fields::map([
            ("NodeName", text(&self.event.node_name)),
            ("ImpactedEntityScopeValue", text(self.entity)),
            ("HealthEventID", text(self.id)),
            ("RecommendedAction", fields::action(self.event)),
            ("RecommendedActionName", text(&action)),
            // Spans are none of ours: a template may name them.
            ("TraceID", text("")),
            ("SpanID", text("")),
            ("HealthEvent", fields::event(self.event)),
            ("ApiGroup", text(self.group)),
            ("Version", text(self.version)),
            ("Kind", text(self.kind)),
            ("Namespace", text(self.namespace)),
        ])
    }
}

// === impl DrainVariables ===

impl DrainVariables<'_> {
    fn value(&self) -> Value {
        let text = |text: &str| Value::String(text.into());
        let names = |names: &Vec<String>| Value::List(names.iter().map(|one| text(one)).collect());
        let pods = self.pods.iter();
        let pods: Fields = pods
            .map(|(namespace, pods)| (namespace.as_str().into(), names(pods)))
            .collect();
        fields::map([
            ("HealthEvent", fields::event(self.event)),
            ("EventID", text(self.id)),
            ("PodsToDrain", Value::Map(pods.into())),
            ("ApiGroup", text(self.group)),
            ("Version", text(self.version)),
            ("Kind", text(self.kind)),
            ("Namespace", text(self.namespace)),
        ])
    }
}

// === impl ValidationVariables ===

impl ValidationVariables<'_> {
    fn value(&self) -> Value {
        let text = |text: &str| Value::String(text.into());
        let texts = |texts: &[String]| Value::List(texts.iter().map(|one| text(one)).collect());
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|name| fields::map([("NodeName", text(name))]));
        let env = self.env.iter();
        let env =
            env.map(|(name, value)| fields::map([("Name", text(name)), ("Value", text(value))]));
        let tolerations = self.tolerated.iter().map(|taint| {
            let operator = if taint.value.is_empty() {
                "Exists"
            } else {
                "Equal"
            };
            fields::map([
                ("Key", text(&taint.key)),
                ("Value", text(&taint.value)),
                ("Operator", text(operator)),
                ("Effect", text(&taint.effect)),
            ])
        });
        fields::map([
            ("ValidationRequestName", text(self.request)),
            ("TestGroupName", text(self.group)),
            ("Namespace", text(self.namespace)),
            ("TimeoutSeconds", Value::Int(self.timeout_seconds)),
            ("Nodes", Value::List(nodes.collect())),
            ("Tests", texts(self.tests)),
            ("Image", text(self.image)),
            ("Command", texts(self.command)),
            ("Env", Value::List(env.collect())),
            ("Tolerations", Value::List(tolerations.collect())),
        ])
    }
}

// === impl Output ===

impl fmt::Write for Output {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > MAX_OUTPUT_BYTES {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// Returns the template as the crate reads it.
fn parsed(source: &str) -> Result<GoTemplate, TemplateError> {
    with_functions(GoTemplate::new(NAME))
        .parse(source)
        .map_err(|error| match error {
            GoError::Parse {
                line, col, message, ..
            }
            | GoError::Lex {
                line, col, message, ..
            } => TemplateError {
                line,
                column: col,
                what: message,
            },
            other => TemplateError::at(source, 0, &said(&other)),
        })
}

/// Checks that each block has its end, and each end its block: the crate takes a block that is open at the
/// end of the text, and leaves out what follows an end too many.
fn blocks_fit(source: &str) -> Result<(), TemplateError> {
    const LAST: &str = "the end of the text";
    let marked = parsed(&format!("{source}{{{{ {LAST:?} }}}}"))?;
    let last = marked.lookup(NAME).and_then(|tree| tree.nodes.last());
    let is_last = |one: &Expr| matches!(one, Expr::String(_, text) if text.as_ref() == LAST);
    let fits = match last {
        Some(Node::Action(action)) => {
            let mut args = action.pipe.commands.iter().flat_map(|one| &one.args);
            args.next().is_some_and(is_last)
        }
        _ => false,
    };
    if fits {
        return Ok(());
    }
    let offset = last.map_or(0, |node| place(node).offset);
    let what = "a block that begins here has no end, or there is an end too many behind it";
    Err(TemplateError::at(source, offset, what))
}

/// Returns what went wrong, for people.
fn said(error: &GoError) -> String {
    match error {
        GoError::Write => {
            format!("it comes to more than {MAX_OUTPUT_BYTES} bytes")
        }
        GoError::RangeIterLimit => format!("its loops have more than {MAX_ROUNDS} rounds"),
        other => other.to_string(),
    }
}

/// Gives a template functions whose results are bounded, in the place of those that grow texts.
fn with_functions(template: GoTemplate) -> GoTemplate {
    let made = Arc::new(AtomicUsize::new(0));
    let bounded = move |text: String| {
        let before = made.fetch_add(text.len(), Ordering::Relaxed);
        if before + text.len() > MAX_MADE_BYTES {
            let what = format!("its functions make more than {MAX_MADE_BYTES} bytes");
            return Err(GoError::Exec(what));
        }
        Ok(Value::String(text.into()))
    };
    let (also, quoted) = (bounded.clone(), bounded.clone());
    template
        .func("print", move |args| bounded(print(args)))
        .func("printf", move |args| also(printf(args)?))
        .func("quote", move |args| {
            let texts: Vec<String> = args.iter().map(|one| quote(&one.to_string())).collect();
            quoted(texts.join(" "))
        })
}

/// Prints values as Go's `print` does: a space stands between two that are no texts.
fn print(args: &[Value]) -> String {
    let mut text = String::new();
    let mut before = true;
    for (index, arg) in args.iter().enumerate() {
        let is_text = matches!(arg, Value::String(_));
        if index > 0 && !is_text && !before {
            text.push(' ');
        }
        text.push_str(&arg.to_string());
        before = is_text;
    }
    text
}

/// Prints values as Go's `printf` does, by the verbs `%s`, `%v`, `%d`, `%t`, `%q` and `%%`.
fn printf(args: &[Value]) -> Result<String, GoError> {
    let wrong = |what: String| GoError::Exec(format!("printf: {what}"));
    let Some((Value::String(format), rest)) = args.split_first() else {
        return Err(wrong("its first argument is no text".to_owned()));
    };
    let mut rest = rest.iter();
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(one) = chars.next() {
        if one != '%' {
            text.push(one);
            continue;
        }
        let verb = chars.next();
        if verb == Some('%') {
            text.push('%');
            continue;
        }
        let verb = verb.filter(|verb| "svdtq".contains(*verb));
        let Some(verb) = verb else {
            let what = "only %s, %v, %d, %t, %q and %% are supported";
            return Err(wrong(what.to_owned()));
        };
        let Some(value) = rest.next() else {
            return Err(wrong(format!("%{verb} has no argument")));
        };
        let fits = match verb {
            'd' => matches!(value, Value::Int(_) | Value::Uint(_)),
            't' => matches!(value, Value::Bool(_)),
            'q' => matches!(value, Value::String(_)),
            _ => true,
        };
        if !fits {
            return Err(wrong(format!("%{verb} does not fit {value}")));
        }
        match verb {
            'q' => text.push_str(&quote(&value.to_string())),
            _ => text.push_str(&value.to_string()),
        }
    }
    if rest.next().is_some() {
        return Err(wrong("it has more arguments than verbs".to_owned()));
    }
    Ok(text)
}

/// Returns a text in quotes, as YAML and JSON have it.
fn quote(text: &str) -> String {
    Json::from(text).to_string()
}

/// What is looked at when a template is read.
struct Check<'a> {
    source: &'a str,
    /// Variables by their names, the innermost last.
    variables: Vec<(SmolStr, Type)>,
}

// === impl Check ===

impl Check<'_> {
    fn wrong<T>(&self, at: Pos, what: &str) -> Result<T, TemplateError> {
        Err(TemplateError::at(self.source, at.offset, what))
    }

    fn list(&mut self, list: &ListNode, dot: Type) -> Result<(), TemplateError> {
        let known = self.variables.len();
        for node in &list.nodes {
            match node {
                Node::Text(_) | Node::Break(_) | Node::Continue(_) => {}
                Node::List(list) => self.list(list, dot)?,
                Node::Action(action) => {
                    let kind = self.pipe(&action.pipe, dot)?;
                    self.declare(&action.pipe, &[kind]);
                }
                Node::If(branch) => {
                    self.pipe(&branch.pipe, dot)?;
                    self.branches(branch, dot, dot, &[])?;
                }
                Node::With(branch) => {
                    let kind = self.pipe(&branch.pipe, dot)?;
                    self.branches(branch, kind, dot, &[kind])?;
                }
                Node::Range(branch) => {
                    let kind = self.pipe(&branch.pipe, dot)?;
                    let item = kind.item();
                    let kinds = match branch.pipe.decl.len() {
                        1 => vec![item],
                        _ => vec![Type::Scalar, item],
                    };
                    self.branches(branch, item, dot, &kinds)?;
                }
                Node::Template(node) => {
                    return self.wrong(node.pos, "named templates are not supported");
                }
                Node::Define(node) => {
                    return self.wrong(node.pos, "named templates are not supported");
                }
            }
        }
        self.variables.truncate(known);
        Ok(())
    }

    fn branches(
        &mut self,
        branch: &BranchNode,
        dot: Type,
        outside: Type,
        declared: &[Type],
    ) -> Result<(), TemplateError> {
        let known = self.variables.len();
        self.declare(&branch.pipe, declared);
        self.list(&branch.body, dot)?;
        self.variables.truncate(known);
        match &branch.else_body {
            Some(body) => self.list(body, outside),
            None => Ok(()),
        }
    }

    fn declare(&mut self, pipe: &PipeNode, kinds: &[Type]) {
        for (index, name) in pipe.decl.iter().enumerate() {
            let kind = kinds.get(index).copied().unwrap_or(Type::Unknown);
            self.variables.push((name.clone(), kind));
        }
    }

    fn pipe(&mut self, pipe: &PipeNode, dot: Type) -> Result<Type, TemplateError> {
        if pipe.is_assign {
            return self.wrong(
                pipe.pos,
                "a variable cannot be assigned to again: declare it with :=",
            );
        }
        let mut kind = Type::Unknown;
        for command in &pipe.commands {
            kind = self.command(command, dot)?;
        }
        Ok(kind)
    }

    fn command(&mut self, command: &CommandNode, dot: Type) -> Result<Type, TemplateError> {
        let mut kinds = Vec::new();
        for arg in &command.args {
            kinds.push(self.expr(arg, dot)?);
        }
        Ok(match kinds.as_slice() {
            [kind] => *kind,
            _ => Type::Unknown,
        })
    }

    fn expr(&mut self, expr: &Expr, dot: Type) -> Result<Type, TemplateError> {
        match expr {
            Expr::Dot(_) => Ok(dot),
            Expr::Field(at, names) => self.fields(*at, dot, names),
            Expr::Variable(at, name, names) => {
                let mut known = self.variables.iter().rev();
                match known.find(|(one, _)| one == name).map(|(_, kind)| *kind) {
                    Some(kind) => self.fields(*at, kind, names),
                    None => self.wrong(*at, &format!("the variable {name} is not declared")),
                }
            }
            Expr::Identifier(at, name) if !FUNCTIONS.contains(&name.as_str()) => {
                let known = FUNCTIONS.join(", ");
                let what = format!("the function {name} is not supported; there are {known}");
                self.wrong(*at, &what)
            }
            Expr::Identifier(..) => Ok(Type::Unknown),
            Expr::String(..) | Expr::Number(..) | Expr::Bool(..) | Expr::Nil(_) => Ok(Type::Scalar),
            Expr::Pipe(_, pipe) => self.pipe(pipe, dot),
            Expr::Chain(at, inner, names) => {
                let kind = self.expr(inner, dot)?;
                self.fields(*at, kind, names)
            }
        }
    }

    fn fields(&self, at: Pos, from: Type, names: &[SmolStr]) -> Result<Type, TemplateError> {
        let mut kind = from;
        for name in names {
            kind = match kind.field(name) {
                Ok(kind) => kind,
                Err(known) if known.is_empty() => {
                    return self.wrong(at, &format!("there is nothing below .{name}"));
                }
                Err(known) => {
                    let known = known.join(", ");
                    let what = format!("there is no field {name}; there are {known}");
                    return self.wrong(at, &what);
                }
            };
        }
        Ok(kind)
    }
}

/// Returns the tree with fields in the place of Go's getters (`.GetNodeName`) and of what gives an
/// enumeration as text (`.String`).
fn plain(mut list: ListNode) -> ListNode {
    list.nodes.iter_mut().for_each(plain_node);
    list
}

fn plain_node(node: &mut Node) {
    match node {
        Node::List(list) => list.nodes.iter_mut().for_each(plain_node),
        Node::Action(action) => plain_pipe(&mut action.pipe),
        Node::If(branch) | Node::Range(branch) | Node::With(branch) => {
            plain_pipe(&mut branch.pipe);
            branch.body.nodes.iter_mut().for_each(plain_node);
            if let Some(body) = &mut branch.else_body {
                body.nodes.iter_mut().for_each(plain_node);
            }
        }
        Node::Text(_)
        | Node::Template(_)
        | Node::Define(_)
        | Node::Break(_)
        | Node::Continue(_) => {}
    }
}

fn plain_pipe(pipe: &mut PipeNode) {
    for arg in pipe.commands.iter_mut().flat_map(|one| &mut one.args) {
        plain_expr(arg);
    }
}

fn plain_expr(expr: &mut Expr) {
    match expr {
        Expr::Field(_, names) | Expr::Variable(_, _, names) => fields::plain(names),
        Expr::Chain(_, inner, names) => {
            plain_expr(inner);
            fields::plain(names);
        }
        Expr::Pipe(_, pipe) => plain_pipe(pipe),
        _ => {}
    }
}

/// Returns where a node begins.
fn place(node: &Node) -> Pos {
    match node {
        Node::List(list) => list.pos,
        Node::Text(text) => text.pos,
        Node::Action(action) => action.pos,
        Node::If(branch) | Node::Range(branch) | Node::With(branch) => branch.pos,
        Node::Template(node) => node.pos,
        Node::Define(node) => node.pos,
        Node::Break(pos) | Node::Continue(pos) => *pos,
    }
}

/// Values by their names.
pub(super) type Fields = BTreeMap<Arc<str>, Value>;

#[cfg(test)]
mod tests;
