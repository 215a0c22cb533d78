//! The parts of an event whose faults are still open.
//!
//! A node lists the events of its quarantine. If an event about two GPUs stayed listed as a
//! whole, a reader of the list would reopen the fault of the GPU that has recovered. Each event
//! is therefore reduced to its open parts: one element if they form a set of entities with one
//! set of codes, and several otherwise.

use contract::{Entity, HealthEvent};

use model::fault::{Fault, Subject};

/// Returns the parts of `event` that are covered by `open`, its open faults. Returns the event
/// itself if all of it is open.
pub(super) fn remaining(event: &HealthEvent, open: &[&Fault]) -> Vec<HealthEvent> {
    let subjects = Subject::of_entities(&event.entities_impacted);
    let codes: &[String] = if event.error_code.is_empty() {
        &[String::new()]
    } else {
        &event.error_code
    };
    // Subjects with the same set of open codes, in the order of the event.
    let mut groups: Vec<(Vec<&String>, Vec<&Subject>)> = Vec::new();
    for subject in &subjects {
        let of_subject: Vec<&str> = open
            .iter()
            .filter(|fault| fault.subject.same(subject))
            .map(|fault| fault.code.as_str())
            .collect();
        let open_codes: Vec<&String> = codes
            .iter()
            .filter(|code| of_subject.contains(&code.as_str()))
            .collect();
        if open_codes.is_empty() {
            continue;
        }
        match groups.iter_mut().find(|(known, _)| *known == open_codes) {
            Some((_, members)) => members.push(subject),
            None => groups.push((open_codes, vec![subject])),
        }
    }
    let whole = |(open_codes, members): &(Vec<&String>, Vec<&Subject>)| {
        open_codes.len() == codes.len() && members.len() == subjects.len()
    };
    if groups.is_empty() || groups.first().is_some_and(whole) {
        return vec![event.clone()];
    }
    groups
        .into_iter()
        .map(|(open_codes, members)| {
            let mut part = event.clone();
            if !event.error_code.is_empty() {
                part.error_code = open_codes.into_iter().cloned().collect();
            }
            part.entities_impacted
                .retain(|entity| belongs(entity, &members, &subjects));
            part
        })
        .collect()
}

/// Returns whether an entity names one of `members`, or describes the event without naming any
/// subject.
fn belongs(entity: &Entity, members: &[&Subject], all: &[Subject]) -> bool {
    members.iter().any(|subject| subject.is_named_by(entity))
        || !all.iter().any(|subject| subject.is_named_by(entity))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use model::event::{EventRecord, normalise};
    use model::fault::FaultBook;

    type Names<'a> = &'a [(&'a str, &'a str)];
    /// Entities and codes of the fault, those of the recovery, and the expected rest.
    type Case<'a> = (Names<'a>, &'a [&'a str], Names<'a>, &'a [&'a str], &'a str);

    fn event(entities: Names<'_>, codes: &[&str], healthy: bool) -> HealthEvent {
        HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "c".into(),
            node_name: "n1".into(),
            is_fatal: !healthy,
            is_healthy: healthy,
            error_code: codes.iter().map(|code| (*code).to_owned()).collect(),
            entities_impacted: entities
                .iter()
                .map(|(kind, value)| Entity {
                    entity_type: (*kind).into(),
                    entity_value: (*value).into(),
                })
                .collect(),
            ..HealthEvent::default()
        }
    }

    #[test]
    fn what_is_closed_is_not_listed_any_more() {
        let two: Names<'_> = &[("GPU", "0"), ("GPU", "1"), ("GPC", "3")];
        let one_gpu: Names<'_> = &[("PCI", "0000:B3:00.0"), ("GPU", "0")];
        let table: [Case<'_>; 6] = [
            (two, &[], &[("GPU", "7")], &[], "GPU 0,GPU 1,GPC 3 []"),
            (two, &[], &[("GPU", "0")], &[], "GPU 1,GPC 3 []"),
            (two, &["48", "95"], &[], &["48"], "GPU 0,GPU 1,GPC 3 [95]"),
            (
                two,
                &["48", "95"],
                &[("GPU", "1")],
                &["95"],
                "GPU 0,GPC 3 [48,95]; GPU 1,GPC 3 [48]",
            ),
            // Like NVSentinel, with the address in the sender's form.
            (
                one_gpu,
                &["48", "95"],
                &[("GPU", "0")],
                &["95"],
                "PCI 0000:B3:00.0,GPU 0 [48]",
            ),
            (&[], &["a", "b"], &[], &["a"], " [b]"),
        ];
        for (entities, codes, healed, healed_codes, expected) in table {
            let mut book = FaultBook::default();
            let now = Timestamp::from_second(1_000).unwrap();
            let mut first = event(entities, codes, false);
            for (seq, event) in [(1, &mut first), (2, &mut event(healed, healed_codes, true))] {
                normalise(event, now);
                book.record(&EventRecord {
                    seq: seq.into(),
                    id: event.id.clone(),
                    created_at: now,
                    event: event.clone(),
                });
            }
            let open: Vec<&Fault> = book.faults("n1").iter().collect();
            let left: Vec<String> = remaining(&first, &open)
                .iter()
                .map(|part| {
                    let names: Vec<String> = part
                        .entities_impacted
                        .iter()
                        .map(|entity| format!("{} {}", entity.entity_type, entity.entity_value))
                        .collect();
                    format!("{} [{}]", names.join(","), part.error_code.join(","))
                })
                .collect();
            assert_eq!(left.join("; "), expected);
        }
    }
}
