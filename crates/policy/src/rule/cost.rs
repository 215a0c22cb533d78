//! Upper bound of the work of a rule, computed when the rule is loaded. The CEL library neither
//! counts steps nor can be stopped, so a rule with too expensive a worst case is refused before
//! it ever runs.
//!
//! The worst case is that of the largest possible event or node. A loop costs as much as its
//! body for each of the most possible elements; copying, comparing and searching cost in
//! proportion to size.

mod size;

use std::rc::Rc;

use cel::Program;
use cel::common::ast::{CallExpr, ComprehensionExpr, Expr, IdedExpr, LiteralValue, operators};

use self::size::{BYTES_A_STEP, Size, count, sum};
use super::{RuleKind, check};

pub(super) use size::too_large;
pub use size::{MAX_NODE_BYTES, MAX_NODE_ITEMS};

/// Most steps of one evaluation of a rule. A step is an evaluated node of the expression, or
/// [`BYTES_A_STEP`] bytes that are copied or compared, and takes some 50 ns. The limit is
/// therefore a tenth of a second and, since results are copied, some 100 MiB of memory. Two
/// nested loops over the codes of an event stay below; three cost hundreds of times more.
pub const MAX_COST: u64 = 2_000_000;
/// Steps of one iteration of a loop, in addition to its parts, for binding variables by name.
const TURN: u64 = 4;
/// Cost of compiling a pattern, which happens at every evaluation: a constant, and one step for
/// this many bytes of the compiled program.
const PATTERN: u64 = 1_000;
const PATTERN_BYTES_A_STEP: u64 = 8;

/// Estimate for an expression.
struct Estimate {
    size: Size,
    cost: u64,
}

/// State of the estimation.
struct Sum<'a> {
    kind: RuleKind,
    /// Variables of the enclosing loops, innermost last.
    bound: Vec<(&'a str, Size)>,
    /// Loops and calls by expression id, with the total cost of all their evaluations, inner
    /// ones first.
    parts: Vec<(u64, u64)>,
}

/// Returns the upper bound of the steps of one evaluation. An error if it is above
/// [`MAX_COST`].
pub(super) fn cost(program: &Program, kind: RuleKind) -> Result<u64, String> {
    let mut sum = Sum {
        kind,
        bound: Vec::new(),
        parts: Vec::new(),
    };
    let cost = sum.of(program.expression(), 1).cost;
    if cost <= MAX_COST {
        return Ok(cost);
    }
    let most = sum.parts.iter().find(|(_, part)| *part > cost / 2);
    let place = most.map_or_else(String::new, |(id, _)| check::place(program, *id));
    Err(format!(
        "can take {} steps on the largest {}, at most {MAX_COST} are taken, and most of them are \
         for the part{place}; loop over less, or not inside a loop",
        if cost == u64::MAX {
            "any number of".to_owned()
        } else {
            cost.to_string()
        },
        kind.variable(),
    ))
}

// === impl Sum ===

impl<'a> Sum<'a> {
    /// Returns the cost of one evaluation of `at`, and the size of its value. `times` is the
    /// number of evaluations.
    fn of(&mut self, at: &'a IdedExpr, times: u64) -> Estimate {
        let Estimate { size, cost } = match &at.expr {
            Expr::Literal(literal) => Estimate {
                size: Size::of_literal(literal),
                cost: 0,
            },
            Expr::Ident(name) => Estimate {
                size: self.of_name(name),
                cost: 0,
            },
            Expr::Select(select) => {
                if let Some(size) = self.of_field(at) {
                    Estimate { size, cost: 1 }
                } else {
                    let from = self.of(&select.operand, times);
                    Estimate {
                        size: from.size.part(),
                        cost: from.cost,
                    }
                }
            }
            Expr::Call(call) => self.of_call(call, times),
            Expr::Comprehension(inner) => self.of_loop(inner, times),
            Expr::List(_) | Expr::Map(_) | Expr::Struct(_) => self.of_literal_list(at, times),
            Expr::Unspecified => Estimate {
                size: Size::text(0),
                cost: 0,
            },
        };
        let cost = cost.saturating_add(1);
        if matches!(at.expr, Expr::Call(_) | Expr::Comprehension(_)) {
            self.parts.push((at.id, cost.saturating_mul(times)));
        }
        Estimate { size, cost }
    }

    fn of_name(&self, name: &str) -> Size {
        match self.bound.iter().rev().find(|(known, _)| *known == name) {
            Some((_, size)) => size.clone(),
            None if name == self.kind.variable() => Size::of_variable(self.kind),
            // The name of a type.
            None => Size::text(0),
        }
    }

    /// Returns the size of the value at a path from the variable, if known.
    fn of_field(&self, at: &IdedExpr) -> Option<Size> {
        let path = check::path(at)?;
        let (root, fields) = path.split_first()?;
        let shadowed = self.bound.iter().any(|(known, _)| known == root);
        (!shadowed && *root == self.kind.variable())
            .then(|| Size::of_path(self.kind, fields))
            .flatten()
    }

    fn of_literal_list(&mut self, at: &'a IdedExpr, times: u64) -> Estimate {
        let parts: Vec<Estimate> = check::parts(at)
            .into_iter()
            .map(|part| self.of(part, times))
            .collect();
        let each = parts.iter().map(|part| part.size.clone());
        let each = each.reduce(|one, other| one.or(&other));
        let size = Size {
            items: count(parts.len()),
            bytes: sum(parts.iter().map(|part| part.size.bytes)).saturating_add(BYTES_A_STEP),
            key: None,
            each: Some(Rc::new(each.unwrap_or_else(|| Size::text(0)))),
        };
        Estimate {
            cost: sum(parts.iter().map(|part| part.cost)).saturating_add(size.steps()),
            size,
        }
    }

    fn of_loop(&mut self, inner: &'a ComprehensionExpr, times: u64) -> Estimate {
        let range = self.of(&inner.iter_range, times);
        let init = self.of(&inner.accu_init, times);
        let turns = range.size.items;
        let element = range.size.key.as_deref().or(range.size.each.as_deref());
        let all = times.saturating_mul(turns);
        let (turn, made, beside) = if let Some(element) = element {
            let turn = self.of_turn(inner, &init.size, element.clone(), all);
            let made = Size::list(turns, turn.size.part());
            (turn, made, element.steps().saturating_mul(turns))
        } else {
            // The elements share the size of the whole: they may have equal parts, or one may
            // have all of it.
            let part = Size::of(turns, range.size.bytes / turns.max(1));
            let one = self.of_turn(inner, &init.size, range.size.clone(), times);
            let many = self.of_turn(inner, &init.size, part, all);
            let bytes = many.size.bytes.saturating_mul(turns);
            let made = Size::of(turns, bytes.saturating_add(one.size.bytes));
            (many, made, one.cost.saturating_add(range.size.steps()))
        };
        let turns = turn.cost.saturating_add(TURN).saturating_mul(turns);
        Estimate {
            cost: sum([range.cost, init.cost, beside, turns].into_iter()),
            // `map` and `filter` append the result of each iteration; the other loops end with
            // one value.
            size: match &inner.accu_init.expr {
                Expr::List(_) => made,
                _ => Size::text(0),
            },
        }
    }

    /// Returns the estimate of one iteration. Its value is what `map` and `filter` append.
    fn of_turn(
        &mut self,
        inner: &'a ComprehensionExpr,
        init: &Size,
        element: Size,
        times: u64,
    ) -> Estimate {
        let outer = self.bound.len();
        self.bound.push((&inner.accu_var, init.clone()));
        self.bound.push((&inner.iter_var, element.clone()));
        if let Some(second) = &inner.iter_var2 {
            self.bound.push((second, element));
        }
        let condition = self.of(&inner.loop_cond, times);
        let step = self.of(&inner.loop_step, times);
        let result = self.of(&inner.result, times);
        self.bound.truncate(outer);
        Estimate {
            size: step.size,
            cost: condition
                .cost
                .saturating_add(step.cost)
                .saturating_add(result.cost),
        }
    }

    fn of_call(&mut self, call: &'a CallExpr, times: u64) -> Estimate {
        let operands = call.target.as_deref().into_iter().chain(&call.args);
        let parts: Vec<Estimate> = operands.map(|part| self.of(part, times)).collect();
        let cost = sum(parts.iter().map(|part| part.cost));
        let sizes: Vec<&Size> = parts.iter().map(|part| &part.size).collect();
        let (size, own) = applied(call, &sizes);
        Estimate {
            size,
            cost: cost.saturating_add(own),
        }
    }
}

/// Returns the size of a call's value, and the cost in addition to that of its operands.
fn applied(call: &CallExpr, sizes: &[&Size]) -> (Size, u64) {
    if let Some(size) = put_together(call, sizes) {
        let cost = size.steps();
        return (size, cost);
    }
    let small = Size::text(0);
    let all = sum(sizes.iter().map(|size| size.steps()));
    match (call.func_name.as_str(), sizes) {
        (operators::CONDITIONAL, [_, yes, no]) => (yes.or(no), 0),
        (
            operators::LOGICAL_AND
            | operators::LOGICAL_OR
            | operators::LOGICAL_NOT
            | operators::NOT_STRICTLY_FALSE,
            _,
        ) => (small, 0),
        (operators::EQUALS | operators::NOT_EQUALS, [left, right]) => {
            (small, left.steps().min(right.steps()))
        }
        (operators::INDEX | operators::OPT_INDEX | operators::OPT_SELECT, [from, at]) => {
            (from.part(), at.steps())
        }
        // Looking up a key of a map takes constant time.
        (operators::IN, [wanted, within]) if within.key.is_some() => (small, wanted.steps()),
        (operators::IN, [wanted, within]) => {
            let compared = wanted.steps().saturating_mul(within.items);
            let compared = compared.min(within.steps());
            (small, within.items.saturating_add(compared))
        }
        (operators::ADD, [left, right]) => (left.and(right), all),
        ("matches", [text, _]) => {
            let pattern = call.args.last().map(|pattern| &pattern.expr);
            (small, of_pattern(pattern, text))
        }
        ("indexOf" | "lastIndexOf", [text, wanted, ..]) => {
            (small, text.bytes.saturating_mul(wanted.steps()))
        }
        ("startsWith" | "endsWith", [_, part]) => (small, part.steps()),
        ("quote", [text, ..]) => (Size::of(0, text.bytes.saturating_mul(2)), all),
        // Counting the characters of a text takes time.
        ("size", [counted]) if counted.items > 0 => (small, 0),
        ("contains" | "size" | "type" | "int" | "uint" | "double" | "bool", _) => (
            small,
            all.saturating_add(sizes.first().map_or(0, |list| list.items)),
        ),
        // All entities of the event are compared with the register.
        ("bit", _) => (small, all),
        // The value is assembled from the operands.
        _ => {
            let bytes = sum(sizes.iter().map(|size| size.bytes));
            let items = sizes.iter().map(|size| size.items).max();
            (Size::of(items.unwrap_or(0), bytes), all)
        }
    }
}

/// Returns the size of the value of a function that assembles a new text or list. The cost is
/// proportional to it.
fn put_together(call: &CallExpr, sizes: &[&Size]) -> Option<Size> {
    Some(match (call.func_name.as_str(), sizes) {
        ("split", [text, ..]) => {
            // Each character may become a part of its own.
            let most = text.bytes.saturating_sub(BYTES_A_STEP);
            let parts = limit_of(call).map_or(most, |limit| limit.min(most));
            let bytes = parts.saturating_mul(BYTES_A_STEP);
            Size::of(parts, bytes.saturating_add(text.bytes))
        }
        // Each character may be replaced, and an empty text matches between all of them.
        ("replace", [text, _, by, ..]) => Size::of(0, text.bytes.saturating_mul(by.bytes.max(2))),
        ("join", [list, rest @ ..]) => {
            let between = rest.first().map_or(0, |text| text.bytes);
            let between = list.items.saturating_mul(between);
            Size::of(0, between.saturating_add(list.bytes))
        }
        // A number may have up to 410 digits, and a byte two hexadecimal ones.
        ("format", _) => {
            let bytes = sum(sizes.iter().map(|size| size.bytes));
            Size::of(0, bytes.saturating_mul(8))
        }
        _ => return None,
    })
}

/// Returns the limit of a `split` with a constant limit.
fn limit_of(call: &CallExpr) -> Option<u64> {
    match call.args.get(1).map(|limit| &limit.expr) {
        Some(Expr::Literal(LiteralValue::Int(limit))) => u64::try_from(*limit.inner()).ok(),
        _ => None,
    }
}

/// Returns the cost of compiling a pattern and matching it against a text: each byte may meet
/// every state.
fn of_pattern(pattern: Option<&Expr>, text: &Size) -> u64 {
    let Some(Expr::Literal(LiteralValue::String(pattern))) = pattern else {
        return u64::MAX; // Refused by `check`.
    };
    let Some(size) = compiled_bytes(pattern.inner()) else {
        return u64::MAX;
    };
    let tried = text.bytes.saturating_mul(size) >> 16;
    (PATTERN + size / PATTERN_BYTES_A_STEP)
        .saturating_add(tried)
        .saturating_add(text.bytes / 8)
}

/// Returns the size of a compiled pattern, rounded up to a power of two. `None` if it is above
/// the limit.
fn compiled_bytes(pattern: &str) -> Option<u64> {
    let mut bytes = 1024;
    while bytes <= check::MAX_PATTERN_BYTES {
        let mut builder = regex::RegexBuilder::new(pattern);
        if builder.size_limit(bytes).build().is_ok() {
            return Some(count(bytes));
        }
        bytes *= 2;
    }
    None
}
