//! EC2's scheduled events of instances, by `DescribeInstanceStatus`. Every account has them.
//!
//! Reference: Amazon EC2 API Reference, 2016-11-15; "Scheduled events for your instances" of its user guide. An
//! event that is over is shown for up to a week, with a prefix of its description.

use jiff::Timestamp;
use notices::words::ec2_kind;
use notices::{Notice, Phase};

use super::client::{Client, Refused, Service};
use super::xml::Element;
use super::{PROVIDER, RESOURCE};
use crate::encoding::form;
use crate::{Announced, Failure, Instance, Told};

/// Name of the source.
pub(super) const SOURCE: &str = "aws-ec2";
/// Codes of events that announce maintenance.
const CODES: [&str; 5] = [
    "instance-reboot",
    "system-reboot",
    "system-maintenance",
    "instance-retirement",
    "instance-stop",
];
/// Most instances of a page: a limit of the API.
const PAGE: &str = "1000";
/// Most pages of a list.
const MOST_PAGES: usize = 200;
/// Word of an event that is to come or going on, as the metadata service of an instance says it. The
/// API has none.
const ACTIVE: &str = "active";

/// Asks for the events of all instances of a region.
pub(super) async fn poll(client: &mut Client, service: &Service) -> Result<Told, Failure> {
    ask(client, service)
        .await
        .map_err(|refused| refused.failure)
}

async fn ask(client: &mut Client, service: &Service) -> Result<Told, Refused> {
    let mut told = Told {
        complete: true,
        ..Told::default()
    };
    let mut next = String::new();
    for _ in 0..MOST_PAGES {
        let kind = "application/x-www-form-urlencoded".to_owned();
        let response = client
            .ask(service, &[("content-type", kind)], request(&next))
            .await?;
        let token = read(&response.body, &mut told).map_err(|what| response.failure(&what))?;
        if token.is_empty() {
            return Ok(told);
        }
        if token == next {
            return Err(response
                .failure("the list does not end: a page names itself as the next")
                .into());
        }
        next = token;
    }
    let what = format!("DescribeInstanceStatus: the list has more than {MOST_PAGES} pages");
    Err(Failure::new(what).into())
}

/// Reads a page into `told`. Returns the token of the next page, which is empty after the last one. Fails
/// with a description of what the page is instead.
pub fn read(body: &[u8], told: &mut Told) -> Result<String, String> {
    let page = Element::parse(body).map_err(|error| error.to_string())?;
    if page.name() != "DescribeInstanceStatusResponse" {
        return Err(format!("the response is a {:?}", page.name()));
    }
    for status in page.items("instanceStatusSet") {
        add(status, told);
    }
    Ok(page.text_of("nextToken").to_owned())
}

/// Returns the body of the request for a page.
fn request(next: &str) -> String {
    let mut parts = vec![
        ("Action".to_owned(), "DescribeInstanceStatus"),
        ("Version".to_owned(), "2016-11-15"),
        ("IncludeAllInstances".to_owned(), "true"),
        ("MaxResults".to_owned(), PAGE),
        ("Filter.1.Name".to_owned(), "event.code"),
    ];
    let codes = CODES.iter().enumerate();
    parts.extend(codes.map(|(at, code)| (format!("Filter.1.Value.{}", at + 1), *code)));
    if !next.is_empty() {
        parts.push(("NextToken".to_owned(), next));
    }
    let pairs: Vec<(&str, &str)> = (parts.iter())
        .map(|(key, value)| (key.as_str(), *value))
        .collect();
    form(&pairs)
}

/// Adds the events of an instance. If one cannot be understood, nothing is known about the instance.
fn add(status: &Element, told: &mut Told) {
    let id = status.text_of("instanceId");
    let events: Vec<Result<Notice, Odd>> = (status.items("eventsSet"))
        .map(|event| notice(id, event))
        .collect();
    let odd = events.iter().filter(|event| event.is_err()).count();
    if odd > 0 || id.is_empty() {
        told.odd += odd.max(1) as u64;
        told.unseen.push(Instance::aws(id));
        told.complete &= !id.is_empty();
        return;
    }
    told.announced
        .extend(events.into_iter().flatten().map(|notice| Announced {
            instance: Instance::aws(id),
            notice,
        }));
}

/// Reads an event.
fn notice(instance: &str, event: &Element) -> Result<Notice, Odd> {
    let description = event.text_of("description");
    let (word, text) = match description
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'))
    {
        Some((word, text)) => (word, text),
        None => (ACTIVE, description),
    };
    let phase = match word.to_ascii_lowercase().as_str() {
        "completed" => Phase::Completed,
        "canceled" | "cancelled" => Phase::Cancelled,
        _ => Phase::Scheduled,
    };
    let code = event.text_of("code");
    let kind = ec2_kind(code, text);
    let id = event.text_of("instanceEventId");
    let start = time(event.text_of("notBefore"))?;
    // An event of old has no id; the code and the begin distinguish it.
    let id = match (id, start) {
        ("", Some(start)) => format!("{code}-{instance}-{start}"),
        ("", None) => format!("{code}-{instance}"),
        _ => id.to_owned(),
    };
    Ok(Notice {
        node: String::new(),
        event: id,
        provider: PROVIDER.to_owned(),
        resource: (RESOURCE.to_owned(), instance.to_owned()),
        kind,
        phase,
        word: word.to_owned(),
        start,
        end: time(event.text_of("notAfter"))?,
        emergency: false,
        updated: None,
    })
}

/// A time that cannot be understood: it would take a node out at once.
struct Odd;

/// Reads a time, which may be absent.
fn time(text: &str) -> Result<Option<Timestamp>, Odd> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| Odd)
}

#[cfg(test)]
mod tests;
