//! The evidence as one page without links to other files.

use console::api::{EventView, TimelineKind};
use jiff::Timestamp;
use model::attempt::Attempt;

use super::evidence::{Evidence, Ticket};
use crate::output;

const STYLE: &str = "body{font:14px/1.5 sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:#222}\
table{border-collapse:collapse;width:100%;margin:1em 0}\
th,td{border:1px solid #bbb;padding:.3em .5em;text-align:left;vertical-align:top}\
th{background:#eee}td.text{white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace}\
pre{white-space:pre-wrap;overflow-wrap:anywhere}";

/// Returns the page. It ends with the whole report as JSON, for programs.
pub(super) fn page(evidence: &Evidence) -> anyhow::Result<String> {
    let subject = escaped(&evidence.subject);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Evidence: {subject}</title>\
         <style>{STYLE}</style></head><body>\n<h1>Evidence: {subject}</h1>\n\
         <p>Written at {} UTC by gpuwarden {}. All times are UTC.</p>\n",
        output::time(evidence.written_at),
        escaped(&evidence.gpuwarden_version)
    );
    for remark in &evidence.remarks {
        page.push_str(&format!("<p>Note: {}.</p>\n", escaped(remark)));
    }
    places(evidence, &mut page);
    page.push_str("<h2>Tickets</h2>\n");
    if evidence.tickets.is_empty() {
        page.push_str("<p>No fault is known.</p>\n");
    }
    for ticket in &evidence.tickets {
        page.push_str(&ticket_table(ticket));
    }
    let events = evidence.events.iter().map(event_row);
    let heads = [
        "Observed", "Accepted", "Node", "Check", "Message", "Metadata",
    ];
    section("Log lines and readings", &heads, events, &mut page);
    let journal = evidence.journal.iter().map(|line| {
        let kind = match line.entry.kind {
            TimelineKind::Journal(kind) => kind.name(),
            TimelineKind::Line | TimelineKind::Decoded | TimelineKind::Event => "event",
        };
        let at = output::time(line.entry.at);
        vec![
            at,
            line.node.clone(),
            kind.to_owned(),
            line.entry.text.clone(),
        ]
    });
    let heads = ["Time", "Node", "Kind", "Text"];
    section("Decisions and requests", &heads, journal, &mut page);
    let json = escaped(&serde_json::to_string_pretty(evidence)?);
    page.push_str(&format!(
        "<h2>Data</h2>\n<details><summary>The whole report as JSON</summary><pre>{json}</pre></details>\n\
         </body></html>"
    ));
    Ok(page)
}

fn places(evidence: &Evidence, page: &mut String) {
    let Some(gpu) = evidence
        .ledger
        .as_ref()
        .and_then(|entry| entry.gpu.as_ref())
    else {
        return;
    };
    let row = &gpu.row;
    let uuids: Vec<&str> = row.uuids.iter().map(String::as_str).collect();
    let serial = row.serial.as_deref().unwrap_or("unknown");
    page.push_str(&format!(
        "<h2>GPU</h2>\n<p>Serial number {}; UUID {}.</p>\n",
        escaped(serial),
        escaped(&uuids.join(", "))
    ));
    if let Some(mark) = &row.mark {
        page.push_str(&format!(
            "<p>Marked as {} at {} by {}: {}</p>\n",
            mark.kind.name(),
            output::time(mark.at),
            escaped(&mark.by),
            escaped(&mark.reason)
        ));
    }
    let rows = row.places.iter().map(|place| {
        vec![
            place.node.clone(),
            place.slot.clone(),
            place.provider_id.clone(),
            output::time(place.from),
            output::time(place.to),
        ]
    });
    let heads = [
        "Node",
        "PCI address",
        "Provider id",
        "First seen",
        "Last seen",
    ];
    section("Places", &heads, rows, page);
    let repairs = row.history.repairs.iter().map(|repair| {
        let result = if repair.succeeded {
            "succeeded"
        } else {
            "failed"
        };
        vec![
            output::time(repair.at),
            repair.node.clone(),
            repair.kind.text().to_owned(),
            result.to_owned(),
        ]
    });
    let heads = ["Time", "Node", "Repair", "Result"];
    section("Repairs that the machine reported", &heads, repairs, page);
}

fn ticket_table(ticket: &Ticket) -> String {
    let time = |at: Option<Timestamp>| at.map(output::time).unwrap_or_default();
    let attempts = |attempts: &[Attempt]| {
        let lines: Vec<String> = attempts.iter().map(attempt).collect();
        lines.join("\n")
    };
    let fatal = if ticket.fatal { "fatal" } else { "not fatal" };
    let rows = [
        ("Ticket", ticket.id.clone()),
        ("Hardware", ticket.hardware_id.clone()),
        ("Node", ticket.node.clone()),
        ("Category", ticket.category.clone()),
        ("Fault", format!("{}, {fatal}", ticket.fault)),
        ("Action", ticket.action.clone()),
        ("Fault occurred", time(Some(ticket.fault_at))),
        ("Last reported", time(Some(ticket.last_reported_at))),
        ("Opened: fault detected", time(ticket.opened_at)),
        ("Out of service", time(ticket.out_of_service_at)),
        ("Handed over", time(ticket.handed_over_at)),
        ("Back in service", time(ticket.back_in_service_at)),
        ("Updated", time(Some(ticket.updated_at))),
        ("Closed", time(ticket.closed_at)),
        ("Repairs", attempts(&ticket.repairs)),
        ("Validations", attempts(&ticket.validations)),
        ("Diagnostics", attempts(&ticket.diagnostics)),
    ];
    let rows = rows.iter().filter(|(_, value)| !value.is_empty());
    let rows: Vec<String> = rows
        .map(|(head, value)| {
            format!(
                "<tr><th>{head}</th><td class=\"text\">{}</td></tr>\n",
                escaped(value)
            )
        })
        .collect();
    format!("<table>\n{}</table>\n", rows.concat())
}

fn attempt(attempt: &Attempt) -> String {
    let kind = &attempt.resource.kind;
    let begun = output::time(attempt.since);
    let end = attempt.end.as_ref().map(|end| output::time(end.at));
    let end = end.map(|at| format!(" until {at}")).unwrap_or_default();
    format!(
        "{kind} {}, {begun}{end}: {}",
        attempt.name,
        attempt.ending()
    )
}

fn event_row(view: &EventView) -> Vec<String> {
    let text = |key: &str| view.event[key].as_str().unwrap_or_default().to_owned();
    let health = if view.event["isHealthy"] == true {
        ": healthy"
    } else {
        ""
    };
    let codes = view.event["errorCode"].as_array();
    let codes = codes.map_or_else(String::new, |codes| {
        let codes = codes.iter().filter_map(|code| code.as_str());
        codes
            .map(|code| format!(" {code}"))
            .collect::<Vec<_>>()
            .concat()
    });
    let metadata = view.event["metadata"].as_object();
    let metadata = metadata.map_or_else(Vec::new, |entries| {
        let value = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        entries
            .iter()
            .map(|(key, entry)| format!("{key}: {}", value(entry)))
            .collect()
    });
    vec![
        text("generatedTimestamp"),
        output::time(view.created_at),
        text("nodeName"),
        format!("{}{codes}{health}", text("checkName")),
        text("message"),
        metadata.join("\n"),
    ]
}

/// Adds a section with a table, if the table has a row.
fn section(
    title: &str,
    heads: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
    page: &mut String,
) {
    let rows: Vec<String> = rows
        .map(|row| {
            let cells = row
                .iter()
                .map(|cell| format!("<td class=\"text\">{}</td>", escaped(cell)));
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        })
        .collect();
    if rows.is_empty() {
        return;
    }
    let heads: Vec<String> = heads
        .iter()
        .map(|head| format!("<th>{head}</th>"))
        .collect();
    page.push_str(&format!(
        "<h2>{title}</h2>\n<table>\n<tr>{}</tr>\n{}</table>\n",
        heads.concat(),
        rows.concat()
    ));
}

/// Returns text from outside for HTML, without control characters other than the end of a line.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' => escaped.push('\n'),
            control if control.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}
