//! The plan or the result of an uninstallation, for people and programs.

use serde::Serialize;

use super::object::Verdict;
use super::survey::Survey;
use crate::output::{self, Colour, say};

/// Plan or result of an uninstallation.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    /// True if nothing was changed.
    plan: bool,
    /// Changes made, or planned ones if `plan` is true.
    changes: Vec<Change>,
    /// Remaining objects, each with the reason.
    left: Vec<Left>,
    /// Kinds that could not be listed, each with the error.
    unread: Vec<String>,
    /// Reasons not to change anything yet.
    pub(super) obstacles: Vec<String>,
    /// Changes that failed, each with the error.
    pub(super) failed: Vec<String>,
}

/// A change of an object.
#[derive(Debug, Serialize)]
struct Change {
    /// Kind, and namespace and name.
    object: String,
    /// Action, such as `delete`.
    action: String,
    /// Faults of a node that was quarantined.
    #[serde(skip_serializing_if = "Option::is_none")]
    faults: Option<String>,
}

/// An object that remains in the cluster.
#[derive(Debug, Serialize)]
struct Left {
    /// Kind, and namespace and name.
    object: String,
    /// Reason, and the command or advice for a person.
    why: String,
}

// === impl Report ===

impl Report {
    /// Creates the report of a survey.
    pub(super) fn of(survey: &Survey, plan: bool, obstacles: Vec<String>) -> Self {
        let (mut changes, mut left) = (Vec::new(), Vec::new());
        for node in &survey.nodes {
            let object = format!("Node {}", node.view.name);
            let mut parts = vec![node.change.summary()];
            if !node.conditions.is_empty() {
                parts.push(format!("remove conditions {}", node.conditions.join(", ")));
            }
            parts.retain(|part| !part.is_empty());
            if parts.is_empty() && node.faults.is_some() {
                parts.push("decided by --nodes".to_owned());
            }
            if !parts.is_empty() {
                changes.push(Change {
                    object: object.clone(),
                    action: parts.join(", "),
                    faults: node.faults.clone(),
                });
            }
            left.extend(node.left.iter().map(|why| Left {
                object: object.clone(),
                why: why.clone(),
            }));
        }
        for one in &survey.objects {
            let (action, why) = match &one.verdict {
                Verdict::Delete(_) => (Some("delete"), None),
                Verdict::Unmark(_, why) => (Some("remove gpuwarden's marks"), why.clone()),
                Verdict::Left(why) => (None, Some(why.clone())),
            };
            changes.extend(action.map(|action| Change {
                object: one.title(),
                action: action.to_owned(),
                faults: None,
            }));
            left.extend(why.map(|why| Left {
                object: one.title(),
                why,
            }));
        }
        Self {
            plan,
            changes,
            left,
            unread: survey.unread.clone(),
            obstacles,
            failed: Vec::new(),
        }
    }

    /// Returns whether everything was read, and can be or was done.
    pub(super) fn is_clean(&self) -> bool {
        self.unread.is_empty() && self.obstacles.is_empty() && self.failed.is_empty()
    }

    /// Writes the report as text.
    pub(super) fn text(&self) -> anyhow::Result<()> {
        let done = if self.plan { "Would change" } else { "Changed" };
        if self.changes.is_empty() {
            say!("Nothing of gpuwarden is to be removed.")?;
        } else {
            let failed = if self.failed.is_empty() {
                ""
            } else {
                ", except for those that failed"
            };
            say!("{done} {} objects{failed}:", self.changes.len())?;
        }
        for Change {
            object,
            action,
            faults,
        } in &self.changes
        {
            let faults = faults.as_ref();
            let faults = faults.map_or_else(String::new, |text| format!(" (quarantined: {text})"));
            say!(
                "  {}",
                output::plain(&format!("{object}: {action}{faults}"))
            )?;
        }
        if !self.left.is_empty() {
            say!("\nStays:")?;
        }
        for Left { object, why } in &self.left {
            say!("  {}", output::plain(&format!("{object}: {why}")))?;
        }
        for (head, lines) in [
            ("Not read, so something may be left there", &self.unread),
            ("First", &self.obstacles),
            ("Failed; a second run tries again", &self.failed),
        ] {
            if !lines.is_empty() {
                say!("\n{}:", output::colour(head, Colour::Red))?;
            }
            for line in lines.iter().flat_map(|text| text.lines()) {
                say!("  {}", output::plain(line))?;
            }
        }
        Ok(())
    }
}
