//! Meaning of AWS Health's events: effect, progress and times, as notices.

use std::collections::BTreeMap;

use jiff::Timestamp;
use notices::{Kind, Notice, Phase};

use super::{Entity, Event, Found};
use crate::aws::{PROVIDER, RESOURCE};
use crate::{Announced, Instance, Told};

/// Heading in a description, in lower case, after which it says what to do.
const ADVICE: &str = "what do i need to do";
/// Code of an event that says that an earlier one, [`INITIATED`], is over.
const COMPLETED: &str = "AWS_EC2_ULTRASERVER_MAINTENANCE_COMPLETED";
const INITIATED: &str = "AWS_EC2_ULTRASERVER_MAINTENANCE_INITIATED";
/// Status of an instance whose part of an event is over.
const RESOLVED: &str = "RESOLVED";

/// An event that cannot be understood: a time of it, or its instance.
struct Odd;

/// Returns what the API has said as notices. `account` is the number of the account whose instances
/// count; empty for all.
pub(super) fn told(found: &Found, account: &str, now: Timestamp) -> Told {
    let mut told = Told {
        odd: found.odd,
        ..Told::default()
    };
    let mut codes = Vec::new();
    for entity in &found.entities {
        let is_ours = [account, ""].contains(&entity.aws_account_id.as_str()) || account.is_empty();
        // An entity of an event that was not listed is of no interest.
        let Some(event) = found.events.get(&entity.event_arn).filter(|_| is_ours) else {
            continue;
        };
        let text = found.texts.get(&event.arn).map_or("", String::as_str);
        match notice(event, entity, text, now) {
            Ok(notice) => {
                codes.push(event.type_code.as_str());
                told.announced.push(Announced {
                    instance: Instance::aws(&entity.instance),
                    notice,
                });
            }
            Err(Odd) => told.odd += 1,
        }
    }
    end_initiated(&mut told.announced, &codes);
    // What cannot be understood may be the end of something, or that it goes on.
    told.complete = told.odd == 0;
    told
}

fn notice(event: &Event, entity: &Entity, text: &str, now: Timestamp) -> Result<Notice, Odd> {
    // Nobody knows which instance this is.
    if entity.instance.is_empty() {
        return Err(Odd);
    }
    let start = time(event.start_time)?;
    let is_before = start.is_some_and(|start| start > now);
    let is_resolved = entity.status_code == RESOLVED;
    let phase = match event.status_code.as_str() {
        _ if event.type_code == COMPLETED || is_resolved => Phase::Completed,
        "closed" if is_before => Phase::Cancelled,
        "closed" => Phase::Completed,
        "open" if !is_before => Phase::Ongoing,
        _ => Phase::Scheduled,
    };
    let word = if is_resolved {
        &entity.status_code
    } else {
        &event.status_code
    };
    Ok(Notice {
        node: String::new(),
        event: entity.arn.clone(),
        provider: PROVIDER.to_owned(),
        resource: (RESOURCE.to_owned(), entity.instance.clone()),
        kind: kind(&event.type_code, text),
        phase,
        word: word.clone(),
        start,
        end: time(event.end_time)?,
        emergency: false,
        updated: time(event.last_updated_time)?.max(time(entity.last_updated_time)?),
    })
}

/// Returns the effect: what the description advises, else what the code says.
fn kind(code: &str, text: &str) -> Kind {
    let text = text.to_lowercase();
    let advice = text.split_once(ADVICE).map_or("", |(_, advice)| advice);
    let advises = |words: &[&str]| words.iter().any(|word| advice.contains(word));
    if advises(&["replace the instance", "launch a new"]) {
        return Kind::Replacement;
    }
    if advises(&["reset", "stop and start", "reboot"]) {
        return Kind::Reboot;
    }
    match code {
        "AWS_EC2_ULTRASERVER_CAPACITY_REDUCED" => Kind::Replacement,
        _ if code.contains("_NETWORK_") => Kind::Network,
        _ => Kind::Reboot,
    }
}

/// Ends the maintenances of `UltraServers` that another event of the same instance says to be over.
/// `codes` are the codes of the notices' events.
fn end_initiated(announced: &mut [Announced], codes: &[&str]) {
    let mut ends: BTreeMap<Instance, (Option<Timestamp>, Option<Timestamp>)> = BTreeMap::new();
    for (one, _) in announced
        .iter()
        .zip(codes)
        .filter(|(_, code)| **code == COMPLETED)
    {
        let end = (one.notice.start, one.notice.updated);
        let held = ends.entry(one.instance.clone()).or_insert(end);
        *held = (*held).max(end);
    }
    for (one, _) in announced
        .iter_mut()
        .zip(codes)
        .filter(|(_, code)| **code == INITIATED)
    {
        let Some((end, updated)) = ends
            .get(&one.instance)
            .filter(|(end, _)| *end >= one.notice.start)
        else {
            continue;
        };
        one.notice.phase = Phase::Completed;
        one.notice.end = (*end).or(one.notice.end);
        one.notice.updated = one.notice.updated.max(*updated);
    }
}

/// Reads a time in seconds since 1970. One that cannot be understood would take a node out at once.
fn time(seconds: Option<f64>) -> Result<Option<Timestamp>, Odd> {
    let Some(seconds) = seconds else {
        return Ok(None);
    };
    let span = jiff::SignedDuration::try_from_secs_f64(seconds).map_err(|_| Odd)?;
    Timestamp::from_duration(span).map(Some).map_err(|_| Odd)
}

#[cfg(test)]
mod tests;
