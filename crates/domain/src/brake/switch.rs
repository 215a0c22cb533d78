//! The switch of the circuit breaker: NVSentinel's `ConfigMap` `circuit-breaker`.
//!
//! `data.status` is `CLOSED` or `TRIPPED`; `data.cursor` is `RESUME`, or `CREATE` to drop
//! what has accumulated. A person edits it, and it takes effect at once. When it was
//! tripped, closed again and emptied is kept beside it in annotations, so that whoever
//! looks next, after a restart or on another machine, knows it too.

use std::collections::BTreeMap;

use contract::keys;
use jiff::Timestamp;

/// The switch as it stands in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switch {
    /// Whether the `ConfigMap` exists.
    pub exists: bool,
    /// The state.
    pub state: State,
    /// Whether a person asks to drop what has accumulated.
    pub drop_asked: bool,
    /// When it was tripped, by the window or by hand; kept until the next look after a
    /// person has closed it.
    pub tripped_at: Option<Timestamp>,
    /// When it was last closed by a person.
    pub reset_at: Option<Timestamp>,
    /// When what had accumulated was last dropped: faults last reported up to then start
    /// no session.
    pub dropped_at: Option<Timestamp>,
}

/// The state of the circuit breaker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// New quarantines go on.
    #[default]
    Closed,
    /// All new quarantines are held back until a person closes it.
    Tripped,
    /// A word that is neither; held back, as nobody writes it without a reason.
    Odd(String),
}

/// What to write into the `ConfigMap`, conditional on what was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchChange {
    /// What was seen.
    pub seen: Switch,
    /// What to make of it.
    pub wanted: Switch,
    /// Why, for people.
    pub why: String,
}

// === impl Switch ===

impl Switch {
    /// Reads the `ConfigMap`'s data and annotations. What is missing counts as NVSentinel's
    /// beginning: closed.
    pub fn read(data: &BTreeMap<String, String>, annotations: &BTreeMap<String, String>) -> Self {
        let word = |key: &str| data.get(key).map(|text| text.trim()).unwrap_or_default();
        let time = |key: &str| annotations.get(key)?.trim().parse().ok();
        let status = word(keys::BREAKER_STATUS);
        let state = if status.is_empty() || status.eq_ignore_ascii_case(keys::BREAKER_CLOSED) {
            State::Closed
        } else if status.eq_ignore_ascii_case(keys::BREAKER_TRIPPED) {
            State::Tripped
        } else {
            State::Odd(status.to_owned())
        };
        Self {
            exists: true,
            state,
            drop_asked: word(keys::BREAKER_CURSOR).eq_ignore_ascii_case(keys::CURSOR_CREATE),
            tripped_at: time(keys::TRIPPED_AT),
            reset_at: time(keys::RESET_AT),
            dropped_at: time(keys::DROPPED_AT),
        }
    }

    /// What follows from what people have set, and from `trip`, that the window is full.
    /// `None`: nothing. Calling it again on what is wanted changes nothing.
    pub fn settle(&self, trip: bool, now: Timestamp) -> Option<SwitchChange> {
        let mut wanted = Self {
            exists: true,
            ..self.clone()
        };
        let mut why = Vec::new();
        if !self.exists {
            why.push("the ConfigMap did not exist");
            // Deleting it is one of the reference's ways to close it.
            wanted.reset_at = self.reset_at.or(Some(now));
        }
        if self.drop_asked {
            why.push("a person dropped what has accumulated");
            wanted.drop_asked = false;
            wanted.dropped_at = Some(now);
        }
        match (&self.state, self.tripped_at) {
            (State::Closed, Some(_)) => {
                why.push("a person closed it");
                wanted.tripped_at = None;
                wanted.reset_at = Some(now);
            }
            (State::Closed, None) if trip => {
                why.push("too many nodes were quarantined within the window");
                wanted.state = State::Tripped;
                wanted.tripped_at = Some(now);
            }
            (State::Tripped, None) => {
                why.push("a person tripped it");
                wanted.tripped_at = Some(now);
            }
            _ => {}
        }
        (!why.is_empty()).then(|| SwitchChange {
            seen: self.clone(),
            wanted,
            why: why.join(", "),
        })
    }
}

// === impl State ===

impl State {
    /// The word as it stands in the `ConfigMap`.
    pub fn name(&self) -> &str {
        match self {
            Self::Closed => keys::BREAKER_CLOSED,
            Self::Tripped => keys::BREAKER_TRIPPED,
            Self::Odd(word) => word,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn switch(status: &str, cursor: &str) -> Switch {
        let data = [("status", status), ("cursor", cursor)];
        let data = data.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Switch::read(&data.into(), &BTreeMap::new())
    }

    #[test]
    fn words_are_read_as_people_write_them() {
        for (word, state) in [
            ("CLOSED", State::Closed),
            (" closed\n", State::Closed),
            ("", State::Closed),
            ("TRIPPED", State::Tripped),
            ("Tripped", State::Tripped),
            ("OPEN", State::Odd("OPEN".into())),
        ] {
            assert_eq!(switch(word, "").state, state, "{word:?}");
        }
        assert!(switch("CLOSED", "create").drop_asked);
        assert!(!switch("CLOSED", "RESUME").drop_asked && !switch("CLOSED", "x").drop_asked);
    }

    #[test]
    fn a_missing_one_is_made_closed() {
        let change = Switch::default().settle(false, at(5)).unwrap();
        assert_eq!(change.wanted.state, State::Closed);
        assert_eq!(change.wanted.settle(false, at(6)), None);
        // And trips in its own time: it has to be there first.
        assert!(change.wanted.settle(true, at(6)).is_some());
    }

    #[test]
    fn tripped_closed_and_emptied_are_each_taken_in_once() {
        let tripped = switch("CLOSED", "RESUME").settle(true, at(10)).unwrap();
        assert_eq!(tripped.wanted.state, State::Tripped);
        assert_eq!(tripped.wanted.tripped_at, Some(at(10)));
        assert_eq!(tripped.wanted.settle(true, at(11)), None);
        // A person closes it and asks to drop what has accumulated.
        let by_hand = Switch {
            state: State::Closed,
            drop_asked: true,
            ..tripped.wanted
        };
        let reset = by_hand.settle(false, at(20)).unwrap().wanted;
        assert_eq!(
            (reset.tripped_at, reset.reset_at, reset.dropped_at),
            (None, Some(at(20)), Some(at(20)))
        );
        assert!(!reset.drop_asked);
        assert_eq!(reset.settle(false, at(21)), None);
        // Dropping by itself closes nothing.
        let tripped = switch("TRIPPED", "CREATE")
            .settle(false, at(30))
            .unwrap()
            .wanted;
        assert_eq!(
            (tripped.state, tripped.dropped_at, tripped.reset_at),
            (State::Tripped, Some(at(30)), None)
        );
    }

    #[test]
    fn tripped_by_hand_is_remembered_so_that_closing_it_is_seen() {
        let by_hand = switch("TRIPPED", "RESUME")
            .settle(false, at(1))
            .unwrap()
            .wanted;
        assert_eq!(by_hand.tripped_at, Some(at(1)));
        let closed = Switch {
            state: State::Closed,
            ..by_hand
        };
        assert_eq!(
            closed.settle(false, at(2)).unwrap().wanted.reset_at,
            Some(at(2))
        );
    }

    #[test]
    fn an_odd_word_is_left_as_it_is() {
        assert_eq!(switch("OPEN", "RESUME").settle(true, at(1)), None);
    }
}
