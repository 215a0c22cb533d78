//! Traversal and rewriting of parsed templates.

use gotmpl::parse::{
    ActionNode, BranchNode, CommandNode, Expr, ListNode, Node, PipeNode, Pos, SmolStr,
};

/// Most nested blocks that an error is located in. Each level multiplies the work.
const MAX_BLOCKS: usize = 8;

/// Calls `f` for all expressions of `nodes`, outer ones before inner ones.
pub(super) fn visit(nodes: &mut [Node], f: &mut dyn FnMut(&mut Expr)) {
    for node in nodes {
        match node {
            Node::List(list) => visit(&mut list.nodes, f),
            Node::Action(action) => visit_pipe(&mut action.pipe, f),
            Node::If(branch) | Node::Range(branch) | Node::With(branch) => {
                visit_pipe(&mut branch.pipe, f);
                visit(&mut branch.body.nodes, f);
                if let Some(body) = &mut branch.else_body {
                    visit(&mut body.nodes, f);
                }
            }
            Node::Text(_)
            | Node::Template(_)
            | Node::Define(_)
            | Node::Break(_)
            | Node::Continue(_) => {}
        }
    }
}

fn visit_pipe(pipe: &mut PipeNode, f: &mut dyn FnMut(&mut Expr)) {
    for arg in pipe.commands.iter_mut().flat_map(|one| &mut one.args) {
        visit_expr(arg, f);
    }
}

fn visit_expr(expr: &mut Expr, f: &mut dyn FnMut(&mut Expr)) {
    f(expr);
    match expr {
        Expr::Chain(_, inner, _) => visit_expr(inner, f),
        Expr::Pipe(_, pipe) => visit_pipe(pipe, f),
        _ => {}
    }
}

/// Returns the names of the fields that an expression reads, outermost first.
pub(super) fn fields(expr: &mut Expr) -> Option<&mut Vec<SmolStr>> {
    match expr {
        Expr::Field(_, names) | Expr::Variable(_, _, names) | Expr::Chain(_, _, names) => {
            Some(names)
        }
        _ => None,
    }
}

/// Rewrites a template such that rendering it evaluates every expression once: conditions no
/// longer choose between branches, and nothing leaves a loop early.
pub(super) fn without_choices(nodes: Vec<Node>) -> Vec<Node> {
    let mut all = Vec::new();
    for node in nodes {
        match node {
            Node::List(list) => all.extend(without_choices(list.nodes)),
            Node::Action(_) | Node::Template(_) => all.push(node),
            Node::If(branch) => {
                let (pos, pipe) = (branch.pos, branch.pipe);
                all.push(Node::Action(ActionNode { pos, pipe }));
                all.push(always(branch.body));
                all.extend(branch.else_body.map(always));
            }
            Node::With(mut branch) => {
                let otherwise = branch.else_body.take();
                branch.body.nodes = without_choices(branch.body.nodes);
                all.push(Node::With(branch));
                all.extend(otherwise.map(always));
            }
            Node::Range(mut branch) => {
                let otherwise = branch.else_body.take();
                branch.body.nodes = without_choices(branch.body.nodes);
                all.push(Node::Range(branch));
                all.extend(otherwise.map(always));
            }
            Node::Text(_) | Node::Define(_) | Node::Break(_) | Node::Continue(_) => {}
        }
    }
    all
}

/// Returns an `if true` around the body, which keeps the scope of its variables.
fn always(mut body: ListNode) -> Node {
    let pos = body.pos;
    body.nodes = without_choices(body.nodes);
    let args = vec![Expr::Bool(pos, true)];
    Node::If(BranchNode {
        pos,
        pipe: PipeNode {
            pos,
            decl: Vec::new(),
            commands: vec![CommandNode { pos, args }],
            is_assign: false,
        },
        body,
        else_body: None,
    })
}

/// Returns the position of the first node that makes `fails` return true. If that node is a block,
/// returns the position within its body, down to [`MAX_BLOCKS`] levels.
pub(super) fn first_failing(nodes: &[Node], fails: &dyn Fn(&[Node]) -> bool) -> Option<Pos> {
    first_failing_within(nodes, MAX_BLOCKS, fails)
}

fn first_failing_within(
    nodes: &[Node],
    blocks: usize,
    fails: &dyn Fn(&[Node]) -> bool,
) -> Option<Pos> {
    // Execution stops at the first failure, so all longer beginnings fail as well.
    let indexes: Vec<usize> = (0..nodes.len()).collect();
    let succeeds = |index: &usize| !fails(nodes.get(..=*index).unwrap_or_default());
    let index = indexes.partition_point(succeeds);
    let (before, node) = (nodes.get(..index)?, nodes.get(index)?);
    let with_body = |body: &[Node]| {
        let mut node = node.clone();
        if let Node::If(branch) | Node::Range(branch) | Node::With(branch) = &mut node {
            branch.body.nodes = body.to_vec();
        }
        fails(&[before, &[node]].concat())
    };
    let body = match node {
        Node::If(branch) | Node::Range(branch) | Node::With(branch) => &branch.body.nodes[..],
        _ => &[],
    };
    let is_in_body = blocks > 0 && !body.is_empty() && !with_body(&[]);
    let inner = is_in_body.then(|| first_failing_within(body, blocks - 1, &with_body));
    Some(inner.flatten().unwrap_or_else(|| place(node)))
}

/// Returns where a node begins.
pub(super) fn place(node: &Node) -> Pos {
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
