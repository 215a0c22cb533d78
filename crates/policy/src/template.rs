//! Templates of custom resources, in the language of Go's `text/template`, executed by the crate
//! `gotmpl`.
//!
//! Loading renders a template once with sample data that has a value for every field. Conditions are
//! removed for this trial, so that all branches are evaluated (`tree.rs`). Unknown fields, variables
//! and functions are therefore errors of the file, and not of the first fault that needs a branch.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use contract::nearest::nearest;
use gotmpl::parse::{Expr, ListNode, Node, Pos};
use gotmpl::{MissingKey, Template as GoTemplate, TemplateError as GoError, Value};

use functions::{FUNCTIONS, with_functions};

mod data;
mod functions;
mod tree;

pub use data::{DrainVariables, ValidationVariables, Variables};

/// Largest template, in bytes.
pub const MAX_TEMPLATE_BYTES: usize = 64 * 1024;
/// Largest rendered text, in bytes. A custom resource has a hundredth of it.
pub const MAX_OUTPUT_BYTES: usize = 128 * 1024;
/// Most iterations of all loops of a template together.
const MAX_ROUNDS: u64 = 1_000;
/// Error about a template that is divided into several.
const NO_NAMED_TEMPLATES: &str = "named templates are not supported: write it in one piece";
/// Name of the template within `gotmpl`.
const NAME: &str = "resource";
/// Function that replaces all others in the trial: nothing is known about their results.
const ANY_FUNCTION: &str = "any";

/// A template that was loaded and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    source: Arc<str>,
}

/// Error in a template. Formatted as `line:column: what`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {what}")]
pub struct TemplateError {
    /// Line in the template, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Description of the error, for the author of the template.
    pub what: String,
}

/// A text of bounded size.
struct Output(String);

// === impl Template ===

impl Template {
    /// Loads a template of a remediation.
    pub fn parse(source: &str) -> Result<Self, TemplateError> {
        Self::load(source, data::sample)
    }

    /// Loads a template of a custom drain.
    pub fn parse_drain(source: &str) -> Result<Self, TemplateError> {
        Self::load(source, data::drain_sample)
    }

    /// Loads a template of a test of nodes.
    pub fn parse_validation(source: &str) -> Result<Self, TemplateError> {
        Self::load(source, data::validation_sample)
    }

    /// Loads a template whose data has the fields of `sample`.
    fn load(source: &str, sample: fn(&BTreeSet<String>) -> Value) -> Result<Self, TemplateError> {
        let at = |offset: usize, what: &str| TemplateError::at(source, offset, what);
        if source.len() > MAX_TEMPLATE_BYTES {
            let found = source.len();
            let what = format!("it has {found} bytes, at most {MAX_TEMPLATE_BYTES} are taken");
            return Err(at(0, &what));
        }
        let parsed = parsed(source)?;
        if parsed.templates().iter().any(|name| *name != NAME) {
            let mut words = ["define", "block"].iter();
            let place = words.find_map(|word| source.find(word));
            return Err(at(place.unwrap_or_default(), NO_NAMED_TEMPLATES));
        }
        check_blocks(source)?;
        try_out(source, nodes(&parsed), sample)?;
        Ok(Self {
            source: source.into(),
        })
    }

    /// Renders a template of a remediation.
    pub fn render(&self, variables: &Variables<'_>) -> Result<String, TemplateError> {
        self.render_data(&variables.value())
    }

    /// Renders a template of a custom drain.
    pub fn render_drain(&self, variables: &DrainVariables<'_>) -> Result<String, TemplateError> {
        self.render_data(&variables.value())
    }

    /// Renders a template of a test of nodes.
    pub fn render_validation(
        &self,
        variables: &ValidationVariables<'_>,
    ) -> Result<String, TemplateError> {
        self.render_data(&variables.value())
    }

    fn render_data(&self, data: &Value) -> Result<String, TemplateError> {
        let source = self.source.as_ref();
        let nodes = nodes(&parsed(source)?);
        let run = |nodes: &[Node]| execute(with_functions(GoTemplate::new(NAME)), nodes, data);
        run(&nodes).map_err(|error| {
            let fails = |nodes: &[Node]| run(nodes).is_err();
            let offset = tree::first_failing(&nodes, &fails).map_or(0, |at| at.offset);
            TemplateError::at(source, offset, &described(&error))
        })
    }
}

// === impl TemplateError ===

impl TemplateError {
    /// Creates an error at a byte offset in the template.
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

/// Parses a template with `gotmpl`.
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
            other => TemplateError::at(source, 0, &described(&other)),
        })
}

/// Checks that every block is closed, and that no `end` is left over. `gotmpl` accepts a block
/// that is still open at the end of the text, and drops everything after a surplus `end`.
fn check_blocks(source: &str) -> Result<(), TemplateError> {
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
    let offset = last.map_or(0, |node| tree::place(node).offset);
    let what = "a block that starts here has no end, or there is a surplus end after it";
    Err(TemplateError::at(source, offset, what))
}

/// Evaluates all expressions of a template with sample data. Functions are not called: with other
/// data their arguments may fit. Bodies of `with` and `range` over a function's result are
/// skipped, since nothing is known about the result.
fn try_out(
    source: &str,
    mut nodes: Vec<Node>,
    sample: fn(&BTreeSet<String>) -> Value,
) -> Result<(), TemplateError> {
    let mut names = BTreeSet::new();
    let mut unknown = None;
    tree::visit(&mut nodes, &mut |expr| {
        if let Expr::Identifier(at, name) = expr {
            if !FUNCTIONS.contains(&name.as_str()) && unknown.is_none() {
                unknown = Some((at.offset, name.to_string()));
            }
            *name = ANY_FUNCTION.into();
        }
        let fields = tree::fields(expr).into_iter().flatten();
        names.extend(fields.map(|name| name.to_string()));
    });
    if let Some((offset, name)) = unknown {
        let known = FUNCTIONS.join(", ");
        let what = format!("the function {name} is not supported; there are {known}");
        return Err(TemplateError::at(source, offset, &what));
    }
    let nodes = tree::without_choices(nodes);
    let data = sample(&names);
    let run = |nodes: &[Node]| {
        let template = GoTemplate::new(NAME)
            .missing_key(MissingKey::Error)
            .func(ANY_FUNCTION, |_| Ok(Value::Nil));
        match execute(template, nodes, &data) {
            // Branches that exclude each other share the limit in the trial.
            Ok(_) | Err(GoError::RangeIterLimit) => Ok(()),
            Err(error) => Err(error),
        }
    };
    run(&nodes).map_err(|error| {
        let fails = |nodes: &[Node]| run(nodes).is_err();
        let offset = tree::first_failing(&nodes, &fails).map_or(0, |at| at.offset);
        let what = match &error {
            GoError::MissingKey { key } => {
                let known = data::field_names(&sample(&BTreeSet::new()));
                let hint = match nearest(key, known.iter().map(AsRef::as_ref), 1).first() {
                    Some(meant) => format!("; did you mean {meant}?"),
                    None => String::new(),
                };
                format!("there is no field {key} here{hint}")
            }
            error => described(error),
        };
        TemplateError::at(source, offset, &what)
    })
}

/// Returns the nodes of a parsed template. Texts of enumerations (`.RecommendedAction.String`) are
/// replaced by the enumeration, which is a text here.
fn nodes(parsed: &GoTemplate) -> Vec<Node> {
    let mut nodes = parsed
        .lookup(NAME)
        .cloned()
        .map_or(Vec::new(), |tree| tree.nodes);
    tree::visit(&mut nodes, &mut |expr| {
        let Some(names) = tree::fields(expr) else {
            return;
        };
        let is_enum =
            |name: &str| name.ends_with("RecommendedAction") || name.ends_with("Strategy");
        if let [.., name, text] = names.as_slice()
            && is_enum(name)
            && text == "String"
        {
            names.pop();
        }
    });
    nodes
}

/// Executes nodes within the limits on output and iterations.
fn execute(template: GoTemplate, nodes: &[Node], data: &Value) -> Result<String, GoError> {
    let tree = ListNode {
        pos: nodes.first().map_or(Pos::new(0, 1), tree::place),
        nodes: nodes.to_vec(),
    };
    let mut output = Output(String::new());
    template
        .max_range_iters(MAX_ROUNDS)
        .add_parse_tree(NAME, tree)
        .execute_template_fmt(&mut output, NAME, data)?;
    Ok(output.0)
}

/// Returns the description of an error, for people.
fn described(error: &GoError) -> String {
    match error {
        GoError::Write => format!("it renders to more than {MAX_OUTPUT_BYTES} bytes"),
        GoError::RangeIterLimit => format!("its loops have more than {MAX_ROUNDS} iterations"),
        GoError::UndefinedTemplate(_) => NO_NAMED_TEMPLATES.to_owned(),
        GoError::Exec(what) => what.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
