//! The number of devices of a node in each class.

use model::node::NodeView;
use policy::Inventory;
use serde_json::Value;

use crate::classes::Class;
use crate::slices::Slices;

/// Reason why the number of devices of a node is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Skip {
    /// The expression has no number as result.
    Evaluation(String),
    /// There are no slices that the expression can read.
    MissingSource,
}

/// Returns the number of a node's devices in each class, or why it is not known.
pub(crate) fn counts(
    classes: &[Class],
    node: &NodeView,
    slices: &Slices,
) -> Vec<Result<u32, Skip>> {
    let object = node.object();
    let inventory = |slices: &[Value]| Inventory::new(object.clone(), slices);
    // Most classes read no slices, and share their variables.
    let without_slices = std::cell::LazyCell::new(|| inventory(&[]));
    let count = |class: &Class| {
        let counted = if class.expression.reads_slices {
            let slices = slices.of_node(&node.name, class.driver.as_deref());
            let slices = slices.ok_or(Skip::MissingSource)?;
            class.expression.count(&inventory(&slices))
        } else {
            class.expression.count(&without_slices)
        };
        counted.map_err(Skip::Evaluation)
    };
    classes.iter().map(count).collect()
}
