//! A veto: a person holds back the next drain or remediation of an out-of-service node, without
//! ending its session. It is an annotation of the node ([`keys::VETO`]), and ends by itself.

use std::fmt;

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use model::event::floor_char_boundary;
use model::node::NodeView;
use serde::{Deserialize, Serialize};

use crate::brake::pause::Pause;

/// Longest veto that counts, from now on: a node that is needed for longer is handed over
/// ([`keys::HANDED_OVER_LABEL`]), and a forgotten veto does not block its remediation for ever.
pub const LONGEST: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Longest name and reason that are shown, in bytes.
const SHOWN_BYTES: usize = 253;

/// A person's veto, the value of [`keys::VETO`]. Displayed for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Veto {
    /// Name of the person.
    #[serde(default)]
    pub by: String,
    /// Reason, as text for people.
    #[serde(default)]
    pub reason: String,
    /// End of the veto.
    pub until: Timestamp,
}

// === impl Veto ===

impl From<&Pause> for Veto {
    /// Returns the veto that a pause of remediation puts on each node.
    fn from(pause: &Pause) -> Self {
        Self {
            by: pause.by.clone(),
            reason: format!("all repairs are paused: {}", pause.reason),
            until: pause.until.unwrap_or(Timestamp::MAX),
        }
    }
}

impl Veto {
    /// Returns when the veto ends by itself; `None` if never.
    pub(crate) fn ends_at(&self) -> Option<Timestamp> {
        (self.until < Timestamp::MAX).then_some(self.until)
    }

    /// Returns the veto on each node while the pause cannot be read, for the reason `why`.
    pub(crate) fn while_unread(why: &str) -> Self {
        Self {
            by: "gpuwarden".to_owned(),
            reason: format!("it is not known yet whether repairs are paused: {why}"),
            until: Timestamp::MAX,
        }
    }

    /// Parses the veto on a node; `None` without one, or after its end. The error says why the
    /// annotation does not count.
    pub fn of(node: &NodeView, now: Timestamp) -> Result<Option<Self>, String> {
        let Some(text) = node.annotations.get(keys::VETO) else {
            return Ok(None);
        };
        let wrong = |why: String| {
            format!(
                "the annotation {} does not count: {why}; `gpuwarden veto` writes it",
                keys::VETO
            )
        };
        let mut veto: Self =
            serde_json::from_str(text.trim()).map_err(|why| wrong(format!("{why}")))?;
        if veto.until.duration_since(now) > LONGEST {
            let (until, most) = (veto.until, LONGEST.as_hours());
            return Err(wrong(format!(
                "it ends at {until:.0}, and {most} hours from now are the most"
            )));
        }
        for field in [&mut veto.by, &mut veto.reason] {
            field.truncate(floor_char_boundary(field, SHOWN_BYTES));
        }
        if veto.by.is_empty() {
            "somebody".clone_into(&mut veto.by);
        }
        Ok((now < veto.until).then_some(veto))
    }
}

impl fmt::Display for Veto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the veto of {}", self.by)?;
        if let Some(until) = self.ends_at() {
            write!(f, " until {until:.0}")?;
        }
        match self.reason.as_str() {
            "" => Ok(()),
            reason => write!(f, ": {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, now: i64) -> Result<Option<String>, String> {
        let mut node = NodeView::unknown("n1");
        node.annotations.insert(keys::VETO.into(), text.into());
        let now = Timestamp::from_second(now).unwrap();
        Veto::of(&node, now).map(|veto| veto.map(|veto| veto.to_string()))
    }

    #[test]
    fn a_veto_holds_up_to_its_end_and_no_longer_than_a_week() {
        let text = r#"{"by":"anna","reason":"looking at the link","until":"1970-01-10T00:00:00Z"}"#;
        let end = 9 * 86_400;
        let holds = "the veto of anna until 1970-01-10T00:00:00Z: looking at the link";
        assert_eq!(read(text, end - 1), Ok(Some(holds.to_owned())));
        assert_eq!(read(text, end), Ok(None));
        assert_eq!(read(text, end - 7 * 86_400), Ok(Some(holds.to_owned())));
        let why = read(text, end - 7 * 86_400 - 1).unwrap_err();
        assert!(why.contains("168 hours from now are the most"), "{why}");
        let bare = r#"{"until":"1970-01-10T00:00:00Z"}"#;
        let shown = read(bare, end - 1).unwrap().unwrap();
        assert_eq!(shown, "the veto of somebody until 1970-01-10T00:00:00Z");
    }

    #[test]
    fn what_cannot_be_read_is_no_veto_and_says_so() {
        for text in ["", "yes", "{}", r#"{"until":"tomorrow"}"#, r#"{"until":7}"#] {
            let why = read(text, 0).unwrap_err();
            assert!(
                why.contains("gpuwarden.dev/veto does not count"),
                "{text}: {why}"
            );
        }
    }
}
