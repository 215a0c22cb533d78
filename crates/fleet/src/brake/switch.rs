//! The switch of the circuit breaker: NVSentinel's `ConfigMap` `circuit-breaker`.
//!
//! `data.status` is `CLOSED` or `TRIPPED`; `data.cursor` is `RESUME`, or `CREATE` to drop what
//! has accumulated. A person edits it, and the edit takes effect at once. Annotations beside it
//! record when it was tripped, closed and emptied, so that a restart, or another machine, knows
//! it too.

use std::collections::BTreeMap;

use contract::keys;
use jiff::Timestamp;

use model::future::FutureTimes;

/// State of the switch in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switch {
    /// True if the `ConfigMap` exists.
    pub exists: bool,
    /// State of the circuit breaker.
    pub state: BreakerState,
    /// True if a person asks to drop what has accumulated.
    pub drop_asked: bool,
    /// Time when it was tripped, by the window or by a person; kept until [`Switch::settle`]
    /// records that a person has closed it.
    pub tripped_at: Option<Timestamp>,
    /// Time when a person last closed it, or a missing `ConfigMap` was created.
    pub reset_at: Option<Timestamp>,
    /// Time when accumulated faults were last dropped: faults last reported up to then start no
    /// session.
    pub dropped_at: Option<Timestamp>,
    /// Reasons to rewrite its annotations; see [`Switch::following`].
    pub amended: Vec<&'static str>,
}

/// State of the circuit breaker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BreakerState {
    /// New quarantines are allowed.
    #[default]
    Closed,
    /// All new quarantines are held back until a person closes it.
    Tripped,
    /// Any other word. Quarantines are held back, since a person had a reason to write it.
    Other(String),
}

/// A change of the `ConfigMap`, conditional on what was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchChange {
    /// The switch after the change.
    pub wanted: Switch,
    /// Reason, as text for people.
    pub why: String,
}

// === impl Switch ===

impl Switch {
    /// Parses the data and annotations of the `ConfigMap`. A missing status counts as closed, as
    /// NVSentinel begins.
    pub fn read(data: &BTreeMap<String, String>, annotations: &BTreeMap<String, String>) -> Self {
        let word = |key: &str| data.get(key).map(|text| text.trim()).unwrap_or_default();
        let time = |key: &str| annotations.get(key)?.trim().parse().ok();
        let status = word(keys::BREAKER_STATUS);
        let state = if status.is_empty() || status.eq_ignore_ascii_case(keys::BREAKER_CLOSED) {
            BreakerState::Closed
        } else if status.eq_ignore_ascii_case(keys::BREAKER_TRIPPED) {
            BreakerState::Tripped
        } else {
            BreakerState::Other(status.to_owned())
        };
        Self {
            exists: true,
            state,
            drop_asked: word(keys::BREAKER_CURSOR).eq_ignore_ascii_case(keys::CURSOR_CREATE),
            tripped_at: time(keys::TRIPPED_AT),
            reset_at: time(keys::RESET_AT),
            dropped_at: time(keys::DROPPED_AT),
            amended: Vec::new(),
        }
    }

    /// Returns the switch as it follows `before`, the last one read.
    ///
    /// Whoever recreates or replaces the `ConfigMap` writes no annotations of ours: those of
    /// `before` stay valid, so that a tripped switch that comes back closed was closed by a
    /// person. A time in the future counts as the time when it was first observed.
    #[must_use]
    pub fn following(
        mut self,
        before: Option<&Self>,
        times: &mut FutureTimes,
        now: Timestamp,
    ) -> Self {
        let bare =
            |one: &Self| (one.tripped_at, one.reset_at, one.dropped_at) == Default::default();
        if let Some(before) = before.filter(|before| bare(&self) && !bare(before)) {
            self.tripped_at = before.tripped_at;
            self.reset_at = before.reset_at;
            self.dropped_at = before.dropped_at;
            self.amended.push("a person made or replaced the ConfigMap");
        }
        let mut future = false;
        for (key, time) in [
            (keys::TRIPPED_AT, &mut self.tripped_at),
            (keys::RESET_AT, &mut self.reset_at),
            (keys::DROPPED_AT, &mut self.dropped_at),
        ] {
            let counts = times.take_in(key, *time, now);
            future |= counts != *time;
            *time = counts;
        }
        if future {
            self.amended
                .push("a time that lies in the future counts as now");
        }
        self
    }

    /// Returns the change to make after people's edits, and after `trip`, which is true if the
    /// window is full; `None` if nothing is to change. Settling the result again changes
    /// nothing.
    pub fn settle(&self, trip: bool, now: Timestamp) -> Option<SwitchChange> {
        let mut wanted = Self {
            exists: true,
            amended: Vec::new(),
            ..self.clone()
        };
        let mut why = self.amended.clone();
        if !self.exists {
            why.push("the ConfigMap did not exist");
            // Deleting the `ConfigMap` is one of NVSentinel's ways to close the breaker.
            wanted.reset_at = self.reset_at.or(Some(now));
        }
        if self.drop_asked {
            why.push("a person dropped what has accumulated");
            wanted.drop_asked = false;
            wanted.dropped_at = Some(now);
        }
        match (&self.state, self.tripped_at) {
            (BreakerState::Closed, Some(_)) => {
                why.push("a person closed it");
                wanted.tripped_at = None;
                wanted.reset_at = Some(now);
            }
            (BreakerState::Closed, None) if trip => {
                why.push("too many nodes were quarantined within the window");
                wanted.state = BreakerState::Tripped;
                wanted.tripped_at = Some(now);
            }
            (BreakerState::Tripped, None) => {
                why.push("a person tripped it");
                wanted.tripped_at = Some(now);
            }
            _ => {}
        }
        (!why.is_empty()).then(|| SwitchChange {
            wanted,
            why: why.join(", "),
        })
    }
}

// === impl BreakerState ===

impl BreakerState {
    /// Returns the word in the `ConfigMap`.
    pub fn name(&self) -> &str {
        match self {
            Self::Closed => keys::BREAKER_CLOSED,
            Self::Tripped => keys::BREAKER_TRIPPED,
            Self::Other(word) => word,
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
            ("CLOSED", BreakerState::Closed),
            (" closed\n", BreakerState::Closed),
            ("", BreakerState::Closed),
            ("TRIPPED", BreakerState::Tripped),
            ("Tripped", BreakerState::Tripped),
            ("OPEN", BreakerState::Other("OPEN".into())),
        ] {
            assert_eq!(switch(word, "").state, state, "{word:?}");
        }
        assert!(switch("CLOSED", "create").drop_asked);
        assert!(!switch("CLOSED", "RESUME").drop_asked && !switch("CLOSED", "x").drop_asked);
    }

    #[test]
    fn a_missing_one_is_made_closed() {
        let change = Switch::default().settle(false, at(5)).unwrap();
        assert_eq!(change.wanted.state, BreakerState::Closed);
        assert_eq!(change.wanted.settle(false, at(6)), None);
        // The trip is a second step: the `ConfigMap` has to exist first.
        assert!(change.wanted.settle(true, at(6)).is_some());
    }

    #[test]
    fn tripped_closed_and_emptied_are_each_taken_in_once() {
        let tripped = switch("CLOSED", "RESUME").settle(true, at(10)).unwrap();
        assert_eq!(tripped.wanted.state, BreakerState::Tripped);
        assert_eq!(tripped.wanted.tripped_at, Some(at(10)));
        assert_eq!(tripped.wanted.settle(true, at(11)), None);
        // A person closes it and asks to drop what has accumulated.
        let by_hand = Switch {
            state: BreakerState::Closed,
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
        // Dropping alone does not close it.
        let tripped = switch("TRIPPED", "CREATE")
            .settle(false, at(30))
            .unwrap()
            .wanted;
        assert_eq!(
            (tripped.state, tripped.dropped_at, tripped.reset_at),
            (BreakerState::Tripped, Some(at(30)), None)
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
            state: BreakerState::Closed,
            ..by_hand
        };
        assert_eq!(
            closed.settle(false, at(2)).unwrap().wanted.reset_at,
            Some(at(2))
        );
    }

    #[test]
    fn one_that_is_made_anew_is_an_edit_of_what_was_there() {
        let before = Switch {
            tripped_at: Some(at(10)),
            dropped_at: Some(at(5)),
            ..switch("TRIPPED", "RESUME")
        };
        let taken_in = |status, cursor| {
            let mut times = FutureTimes::default();
            let switch = switch(status, cursor).following(Some(&before), &mut times, at(20));
            switch.settle(false, at(20)).unwrap().wanted
        };
        let closed = taken_in("CLOSED", "CREATE");
        assert_eq!(
            (closed.tripped_at, closed.reset_at, closed.dropped_at),
            (None, Some(at(20)), Some(at(20)))
        );
        let tripped = taken_in("TRIPPED", "RESUME");
        assert_eq!(
            (tripped.tripped_at, tripped.reset_at, tripped.dropped_at),
            (Some(at(10)), None, Some(at(5)))
        );
        assert_eq!(tripped.settle(false, at(21)), None);
        // A switch with annotations of its own keeps them.
        let ours = Switch {
            reset_at: Some(at(15)),
            ..switch("CLOSED", "RESUME")
        };
        let taken = ours
            .clone()
            .following(Some(&before), &mut FutureTimes::default(), at(20));
        assert_eq!(taken, ours);
    }

    #[test]
    fn times_of_the_future_count_as_when_they_were_first_seen() {
        let future = Timestamp::MAX;
        let read = Switch {
            tripped_at: Some(future),
            reset_at: Some(future),
            dropped_at: Some(future),
            ..switch("TRIPPED", "RESUME")
        };
        let mut times = FutureTimes::default();
        // A change that cannot be written is decided again and again.
        for now in [20, 30] {
            let taken = read.clone().following(None, &mut times, at(now));
            let wanted = taken.settle(false, at(now)).unwrap().wanted;
            assert_eq!(
                (wanted.tripped_at, wanted.reset_at, wanted.dropped_at),
                (Some(at(20)), Some(at(20)), Some(at(20)))
            );
            assert_eq!(wanted.settle(false, at(now)), None);
        }
        assert_eq!(times.notes().count(), 3);
    }

    #[test]
    fn an_odd_word_is_left_as_it_is() {
        assert_eq!(switch("OPEN", "RESUME").settle(true, at(1)), None);
    }
}
