//! `gpuwarden events`: the stored events.

use console::api::EventView;
use contract::{HealthEvent, json, keys};
use diagnosis::fold::Sightings;
use jiff::{SignedDuration, Timestamp};
use model::fault::Ignored;
use model::position::Position;

use crate::EXIT_OK;
use crate::args::{EventsArgs, Format};
use crate::client::Client;
use crate::output::{self, Colour, StreamedList, say};

/// Least delay between observation and acceptance of an event whose time of observation is shown too.
/// Lines that are read at once, and events that are delivered at once, take less.
const LATE: SignedDuration = SignedDuration::from_secs(10);

pub(super) async fn execute(args: &EventsArgs) -> anyhow::Result<u8> {
    let client = Client::remote(&args.remote).await?;
    let node = args
        .node
        .as_deref()
        .map(|node| format!("&node={}", query(node)))
        .unwrap_or_default();
    let limit = if args.all { 1 } else { args.limit };
    let mut newest: Vec<EventView> = client
        .get(&format!("/api/v1/events?limit={limit}{node}"))
        .await?;
    newest.reverse();
    if let (Some(name), true, false) = (&args.node, newest.is_empty(), args.follow) {
        // An unknown name gives an error with the nearest known name.
        let known = format!("/api/v1/nodes/{}/explain", query(name));
        client.get_bytes(&known).await?;
    }
    let format = args.output.output;
    if let (true, Some(newest)) = (args.all, newest.first()) {
        return all(&client, args.node.as_deref(), newest.seq, format).await;
    }
    if !args.follow {
        if !output::structured(format, &newest)? {
            if newest.is_empty() {
                output::line(&nothing(args.node.as_deref()))?;
            }
            for event in &newest {
                write(event, format)?;
            }
        }
        return Ok(EXIT_OK);
    }
    let after = match newest.last() {
        Some(last) => format!("&after={}", last.seq),
        None => String::new(),
    };
    for event in &newest {
        write_followed(event, format)?;
    }
    let mut lines = client
        .lines(&format!("/api/v1/events?follow=true{after}{node}"))
        .await?;
    while let Some(line) = lines.next().await? {
        if !line.is_empty() {
            write_followed(&serde_json::from_str(&line)?, format)?;
        }
    }
    anyhow::bail!("gpuwarden has ended the stream")
}

/// Writes all events up to position `last` of the feed.
///
/// Reads the events of all nodes even for a single node: the retention may delete the newest event of
/// a node meanwhile, but not the newest of all.
async fn all(
    client: &Client,
    node: Option<&str>,
    last: Position,
    format: Format,
) -> anyhow::Result<u8> {
    let mut list = StreamedList::default();
    let take = |event: EventView| {
        let of_node = |name: &str| event.event["nodeName"].as_str() == Some(name);
        if !node.is_none_or(of_node) {
            return Ok(());
        }
        match format {
            Format::Text | Format::Wide => write(&event, format),
            Format::Json | Format::Yaml => list.item(format, &event),
        }
    };
    each(client, last, take).await?;
    list.end(format)?;
    Ok(EXIT_OK)
}

/// Passes all events up to position `last` of the feed to `take`. Follows the feed, which sends a page
/// at a time, so that neither side holds all events.
pub(super) async fn each(
    client: &Client,
    last: Position,
    mut take: impl FnMut(EventView) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut lines = client.lines("/api/v1/events?follow=true&after=0").await?;
    while let Some(line) = lines.next().await? {
        if line.is_empty() {
            continue;
        }
        let event: EventView = serde_json::from_str(&line)?;
        let seq = event.seq;
        if seq <= last {
            take(event)?;
        }
        if seq >= last {
            return Ok(());
        }
    }
    anyhow::bail!("gpuwarden has ended the stream before the last event")
}

/// Returns the text for an empty list.
fn nothing(node: Option<&str>) -> String {
    match node {
        Some(name) => format!("No event matches --node {}.", output::plain(name)),
        None => "No event yet.".to_owned(),
    }
}

/// Writes one event of an endless stream: one document each.
fn write_followed(event: &EventView, format: Format) -> anyhow::Result<()> {
    if !output::document(format, event)? {
        write(event, format)?;
    }
    Ok(())
}

fn write(view: &EventView, format: Format) -> anyhow::Result<()> {
    let event = json::from_value(view.event.clone()).unwrap_or_default();
    let word = if event.is_healthy {
        output::colour("healthy", Colour::Green)
    } else if event.is_fatal {
        output::colour("fatal  ", Colour::Red)
    } else {
        output::colour("minor  ", Colour::Yellow)
    };
    let aside = aside(&event, view.created_at);
    say!(
        "{}  {word}  {}  {}{}",
        output::time(view.created_at),
        output::plain(&event.node_name),
        output::plain(&what(&event)),
        output::colour(&aside, Colour::Grey)
    )?;
    if format == Format::Wide {
        let drain = view.status.userpodsevictionstatus.as_ref();
        let status = match &view.status.nodequarantined {
            Some(status) => {
                let drain =
                    drain.map_or_else(String::new, |drain| format!(", pods {}", drain.status));
                format!(" ({})", output::plain(&format!("{status}{drain}")))
            }
            None => String::new(),
        };
        say!(
            "    {}{status} by {}, action {}: {}",
            event.id,
            output::plain(&event.agent),
            output::plain(&contract::effective_action_name(&event)),
            output::plain(&event.message)
        )?;
    }
    Ok(())
}

fn what(event: &HealthEvent) -> String {
    let mut text = event.check_name.clone();
    if !event.error_code.is_empty() {
        text.push_str(&format!(" {}", event.error_code.join(",")));
    }
    let entities: Vec<String> = event
        .entities_impacted
        .iter()
        .map(|entity| format!("{} {}", entity.entity_type, entity.entity_value))
        .collect();
    if !entities.is_empty() {
        text.push_str(&format!(" on {}", entities.join(", ")));
    }
    let count = Sightings::of(event, Timestamp::UNIX_EPOCH).count;
    if count > 1 {
        text.push_str(&format!(" x{count}"));
    }
    text
}

/// Returns the time of observation of a late event, and a note for an event that opens no fault, so
/// that neither is mistaken for a new fault. Empty for all other events.
fn aside(event: &HealthEvent, accepted: Timestamp) -> String {
    let is_receipt = event.metadata.contains_key(keys::META_TIME_OF_RECEIPT);
    let observed = (event.generated_timestamp)
        .and_then(json::timestamp)
        .filter(|at| !is_receipt && accepted.duration_since(*at) >= LATE);
    let mut parts = Vec::new();
    if let Some(at) = observed {
        parts.push(format!("observed {}", output::time(at)));
    }
    match Ignored::by_event(event) {
        Some(Ignored::EarlierInBoot) => {
            parts.push("shown only: older than the history that counts".to_owned());
        }
        Some(_) => parts.push("stored only".to_owned()),
        None => {}
    }
    if parts.is_empty() {
        return String::new();
    }
    format!("  ({})", parts.join("; "))
}

/// Percent-encodes a value for a URL.
pub(super) fn query(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use contract::ProcessingStrategy;

    use super::*;

    #[test]
    fn no_event_at_all_is_told_from_none_that_matches() {
        assert_eq!(nothing(None), "No event yet.");
        assert_eq!(nothing(Some("gpu-7")), "No event matches --node gpu-7.");
    }

    #[test]
    fn an_event_that_stands_for_many_reports_says_for_how_many() {
        let mut event = HealthEvent {
            check_name: keys::CHECK_XID.into(),
            error_code: vec!["95".into()],
            ..HealthEvent::default()
        };
        assert_eq!(what(&event), "SysLogsXIDError 95");
        for (key, value) in [
            (keys::META_COUNT, "812"),
            (keys::META_FIRST_SEEN, "2027-01-15T08:00:02Z"),
            (keys::META_LAST_SEEN, "2027-01-15T08:00:59Z"),
        ] {
            event.metadata.insert(key.into(), value.into());
        }
        assert_eq!(what(&event), "SysLogsXIDError 95 x812");
    }

    #[test]
    fn an_old_line_is_not_shown_as_a_new_fault() {
        let accepted = Timestamp::from_second(1_800_000_000).unwrap();
        let event = |seconds, key: &str, strategy: ProcessingStrategy| {
            let observed = accepted - SignedDuration::from_secs(seconds);
            let mut event = HealthEvent {
                generated_timestamp: Some(json::proto_timestamp(observed)),
                processing_strategy: strategy.into(),
                ..HealthEvent::default()
            };
            event.metadata.insert(key.to_owned(), "true".to_owned());
            event
        };
        let (acts, stored) = (
            ProcessingStrategy::ExecuteRemediation,
            ProcessingStrategy::StoreOnly,
        );
        for (event, expected) in [
            (event(1, "other", acts), ""),
            (event(1_000_000, keys::META_TIME_OF_RECEIPT, acts), ""),
            (
                event(1_950, "other", acts),
                "  (observed 2027-01-15 07:27:30.000)",
            ),
            (
                event(1_950, keys::META_EARLIER_IN_BOOT, stored),
                "  (observed 2027-01-15 07:27:30.000; shown only: older than the history that \
                 counts)",
            ),
            (event(0, "other", stored), "  (stored only)"),
        ] {
            assert_eq!(aside(&event, accepted), expected, "{event:?}");
        }
    }
}
