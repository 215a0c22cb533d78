//! Rules that read nothing but bits of registers. An XID 74 meets a dozen of them, so they are evaluated
//! without CEL's interpreter and without the variable.

use cel::common::ast::{Expr, IdedExpr, LiteralValue, operators};
use contract::HealthEvent;

use super::RuleKind;

/// Bits, one of which has to be set.
pub(super) struct Bits(Vec<(String, usize)>);

// === impl Bits ===

impl Bits {
    /// Returns the bits of `event.bit(register, n) || event.bit(register, n) ...`. `None` for any other
    /// expression.
    pub(super) fn of(expression: &IdedExpr) -> Option<Self> {
        let mut bits = Vec::new();
        collect(expression, &mut bits)?;
        Some(Self(bits))
    }

    pub(super) fn hold_for(&self, event: &HealthEvent) -> bool {
        self.0.iter().any(|(register, number)| {
            let mut entities = event.entities_impacted.iter();
            let entity = entities.find(|entity| entity.entity_type == *register);
            entity.is_some_and(|entity| is_set(&entity.entity_value, *number))
        })
    }
}

/// Returns true if a bit is set in a register, whose value is a binary number.
pub(super) fn is_set(register: &str, number: usize) -> bool {
    register.bytes().nth_back(number) == Some(b'1')
}

fn collect(at: &IdedExpr, bits: &mut Vec<(String, usize)>) -> Option<()> {
    let Expr::Call(call) = &at.expr else {
        return None;
    };
    match (
        call.func_name.as_str(),
        call.target.as_deref(),
        call.args.as_slice(),
    ) {
        (operators::LOGICAL_OR, None, [left, right]) => {
            collect(left, bits)?;
            collect(right, bits)
        }
        ("bit", Some(target), [register, number]) => {
            let (Expr::Ident(name), Expr::Literal(LiteralValue::String(register))) =
                (&target.expr, &register.expr)
            else {
                return None;
            };
            let Expr::Literal(LiteralValue::Int(number)) = &number.expr else {
                return None;
            };
            let number = usize::try_from(*number.inner()).ok()?;
            bits.push((register.inner().to_owned(), number));
            (name == RuleKind::HealthEvent.variable()).then_some(())
        }
        _ => None,
    }
}
