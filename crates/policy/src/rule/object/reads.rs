//! Finds which fields of objects an expression reads, from its text alone.
//!
//! Each part of an expression has sources: the places in an object that its value may come from.
//! A value that is compared, or passed to a function, is read as a whole; selecting a field or
//! looping over elements leads on to a part of it. What cannot be followed counts as read.

use std::collections::BTreeMap;

use cel::common::ast::{CallExpr, ComprehensionExpr, Expr, IdedExpr, LiteralValue, operators};

use super::fields::{Fields, Step};
use super::{LOOKUP, RESOURCE, check};

/// Object that an expression reads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Root {
    /// The variable `resource`.
    Resource,
    /// Objects of a kind that are looked up.
    Lookup {
        /// Group and version, such as `apps/v1`.
        api_version: String,
        /// Kind, such as `Pod`.
        kind: String,
    },
}

/// Place in an object that a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    root: Root,
    path: Vec<Step>,
    /// Number of lists that the expression itself has put around the value.
    inside: usize,
}

type Sources = Vec<Source>;

#[derive(Default)]
struct Reader<'a> {
    reads: BTreeMap<Root, Fields>,
    /// Variables of the enclosing loops, innermost last.
    bound: Vec<(&'a str, Sources)>,
}

/// Returns the fields that an expression reads. The error is for its author.
pub(super) fn reads(at: &IdedExpr) -> Result<BTreeMap<Root, Fields>, String> {
    let mut reader = Reader::default();
    reader.consume(at)?;
    Ok(reader.reads)
}

// === impl Reader ===

impl<'a> Reader<'a> {
    /// Records that the value of an expression is read as a whole.
    fn consume(&mut self, at: &'a IdedExpr) -> Result<(), String> {
        let sources = self.of(at)?;
        self.note(&sources, true);
        Ok(())
    }

    fn note(&mut self, sources: &[Source], whole: bool) {
        for source in sources {
            let fields = self.reads.entry(source.root.clone()).or_default();
            fields.add(&source.path, whole);
        }
    }

    /// Returns the sources of the value of an expression.
    fn of(&mut self, at: &'a IdedExpr) -> Result<Sources, String> {
        match &at.expr {
            Expr::Ident(name) => Ok(self.of_name(name)),
            Expr::Select(select) => {
                let from = self.of(&select.operand)?;
                let sources = self.step(from, &Step::Field(select.field.clone()));
                if select.test {
                    self.note(&sources, false);
                    return Ok(Sources::new());
                }
                Ok(sources)
            }
            Expr::Call(call) => self.of_call(call),
            Expr::List(list) => {
                let mut all = Sources::new();
                for element in &list.elements {
                    all.extend(self.of(element)?);
                }
                for source in &mut all {
                    source.inside += 1;
                }
                Ok(all)
            }
            Expr::Comprehension(inner) => self.of_loop(inner),
            Expr::Map(_) | Expr::Struct(_) => self.consume_all(check::parts(at)),
            Expr::Literal(_) | Expr::Unspecified => Ok(Sources::new()),
        }
    }

    fn of_name(&self, name: &str) -> Sources {
        let name = name.trim_start_matches('.');
        let mut bound = self.bound.iter().rev();
        if let Some((_, sources)) = bound.find(|(known, _)| *known == name) {
            return sources.clone();
        }
        if name != RESOURCE {
            return Sources::new();
        }
        vec![Source {
            root: Root::Resource,
            path: Vec::new(),
            inside: 0,
        }]
    }

    fn of_call(&mut self, call: &'a CallExpr) -> Result<Sources, String> {
        let arguments: Vec<&IdedExpr> = (call.target.as_deref().into_iter())
            .chain(&call.args)
            .collect();
        match (call.func_name.as_str(), arguments.as_slice()) {
            (operators::INDEX, [map, key]) => {
                let from = self.of(map)?;
                let step = if let Some(name) = text(key) {
                    Step::Field(name)
                } else {
                    self.consume(key)?;
                    Step::Each
                };
                Ok(self.step(from, &step))
            }
            (operators::IN, [key, map]) => {
                let Some(name) = text(key) else {
                    return self.consume_all(arguments);
                };
                let from = self.of(map)?;
                let sources = self.step(from, &Step::Field(name));
                self.note(&sources, false);
                Ok(Sources::new())
            }
            (operators::CONDITIONAL, [condition, one, other]) => {
                self.consume(condition)?;
                let mut either = self.of(one)?;
                join(&mut either, self.of(other)?);
                Ok(either)
            }
            (operators::ADD, [one, other]) => {
                let mut both = self.of(one)?;
                join(&mut both, self.of(other)?);
                if both.iter().any(|source| source.inside > 0) {
                    return Ok(both);
                }
                self.note(&both, true);
                Ok(Sources::new())
            }
            ("size", [list]) => {
                let mut sources = self.of(list)?;
                sources.retain(|source| source.inside == 0);
                let each = self.step(sources, &Step::Each);
                self.note(&each, false);
                Ok(Sources::new())
            }
            (LOOKUP, [api_version, kind, namespace, name]) => {
                let (Some(api_version), Some(kind)) = (text(api_version), text(kind)) else {
                    return Err(format!(
                        "{LOOKUP}() with an apiVersion or a kind that is put together or read from an \
                         object; write both as texts, so that the kind can be watched"
                    ));
                };
                self.consume(namespace)?;
                self.consume(name)?;
                Ok(vec![Source {
                    root: Root::Lookup { api_version, kind },
                    path: Vec::new(),
                    inside: 0,
                }])
            }
            (LOOKUP, _) => Err(format!(
                "{LOOKUP}() is called as {LOOKUP}(apiVersion, kind, namespace, name)"
            )),
            _ => self.consume_all(arguments),
        }
    }

    fn of_loop(&mut self, inner: &'a ComprehensionExpr) -> Result<Sources, String> {
        let range = self.of(&inner.iter_range)?;
        let element = self.step(range, &Step::Each);
        // All elements take part, even if nothing of them is read.
        self.note(&element, false);
        let mut result = self.of(&inner.accu_init)?;
        let outer = self.bound.len();
        // What a turn adds to the result may be read in the next one.
        for _ in 0..2 {
            self.bound.push((&inner.iter_var, element.clone()));
            if let Some(second) = &inner.iter_var2 {
                self.bound.push((second, element.clone()));
            }
            self.bound.push((&inner.accu_var, result.clone()));
            self.consume(&inner.loop_cond)?;
            let step = self.of(&inner.loop_step)?;
            join(&mut result, step);
            self.bound.truncate(outer);
        }
        self.bound.push((&inner.accu_var, result));
        let sources = self.of(&inner.result);
        self.bound.truncate(outer);
        sources
    }

    fn consume_all(&mut self, parts: Vec<&'a IdedExpr>) -> Result<Sources, String> {
        for part in parts {
            self.consume(part)?;
        }
        Ok(Sources::new())
    }

    /// Returns the sources of a part of a value.
    fn step(&mut self, from: Sources, step: &Step) -> Sources {
        let mut parts = Sources::new();
        for mut source in from {
            match (source.inside, step) {
                (0, step) => source.path.push(step.clone()),
                (_, Step::Each) => source.inside -= 1,
                // A list has no fields, so the evaluation fails.
                (_, Step::Field(_)) => self.note(std::slice::from_ref(&source), true),
            }
            parts.push(source);
        }
        parts
    }
}

fn join(into: &mut Sources, other: Sources) {
    for source in other {
        if !into.contains(&source) {
            into.push(source);
        }
    }
}

fn text(at: &IdedExpr) -> Option<String> {
    match &at.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner().to_owned()),
        _ => None,
    }
}
