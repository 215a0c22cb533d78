//! AWS Health: which instances have a scheduled change.
//!
//! `DescribeEvents` lists the events, `DescribeEventDetails` has their text, `DescribeAffectedEntities` their
//! instances. A poll asks for everything that is open or upcoming, so that nothing that holds now can be
//! missed, and for events closed since the last poll that succeeded. The API needs a paid support plan; without
//! it, it answers `SubscriptionRequiredException`.
//!
//! Reference: AWS Health API Reference, 2016-08-04.

mod meaning;

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::client::{Client, Refused, Service};
use crate::http::Response;
use crate::{Failure, Told};

/// Name of the source.
pub(super) const SOURCE: &str = "aws-health";
/// Prefix of the header with the operation.
const TARGET: &str = "AWSHealth_20160804.";
/// Error code of an account without a paid support plan.
const UNSUBSCRIBED: &str = "SubscriptionRequiredException";
/// Most events in a request for details or entities: a limit of the API.
const BATCH: usize = 10;
/// Most items of a page: a limit of the API.
const PAGE: usize = 100;
/// Most pages of a list: 20,000 items.
const MOST_PAGES: usize = 200;
/// Time by which the window of closed events reaches back before the last poll: the API may show a change late, and
/// clocks differ.
const OVERLAP: SignedDuration = SignedDuration::from_mins(5);

/// Codes of the events that announce maintenance, as in NVSentinel. The API takes ten at most.
const CODES: [&str; 10] = [
    "AWS_EC2_INSTANCE_NETWORK_MAINTENANCE_SCHEDULED",
    "AWS_EC2_INSTANCE_POWER_MAINTENANCE_SCHEDULED",
    "AWS_EC2_INSTANCE_REBOOT_MAINTENANCE_SCHEDULED",
    "AWS_EC2_MAINTENANCE_SCHEDULED",
    "AWS_EC2_DEDICATED_HOST_MAINTENANCE_SCHEDULED",
    "AWS_EC2_DEDICATED_HOST_NETWORK_MAINTENANCE_SCHEDULED",
    "AWS_EC2_DEDICATED_HOST_POWER_MAINTENANCE_SCHEDULED",
    "AWS_EC2_ULTRASERVER_MAINTENANCE_INITIATED",
    "AWS_EC2_ULTRASERVER_CAPACITY_REDUCED",
    "AWS_EC2_ULTRASERVER_MAINTENANCE_COMPLETED",
];

/// An event.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Event {
    arn: String,
    #[serde(rename = "eventTypeCode")]
    type_code: String,
    status_code: String,
    /// Seconds since 1970, as the other times.
    start_time: Option<f64>,
    end_time: Option<f64>,
    last_updated_time: Option<f64>,
}

/// An instance that an event is about.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Entity {
    #[serde(rename = "entityArn")]
    arn: String,
    event_arn: String,
    #[serde(rename = "entityValue")]
    instance: String,
    aws_account_id: String,
    status_code: String,
    last_updated_time: Option<f64>,
}

/// Everything that the API said in one poll.
#[derive(Debug, Default)]
pub struct Found {
    /// Events by ARN.
    events: BTreeMap<String, Event>,
    /// Description of each event, by its ARN.
    texts: BTreeMap<String, String>,
    entities: Vec<Entity>,
    /// Number of items that cannot be understood.
    odd: u64,
}

// === impl Found ===

impl Found {
    /// Reads a page of `DescribeEvents`. Returns the token of the next page, null after the last one. Fails with a
    /// description of what the page is instead.
    pub fn read_events(&mut self, mut page: Value) -> Result<Value, String> {
        let events: Vec<Event> = items(&mut page, "events", &mut self.odd)?;
        let events = events.into_iter().filter(|event| !event.arn.is_empty());
        let by_arn = events.map(|event| (event.arn.clone(), event));
        self.events.extend(by_arn);
        Ok(page["nextToken"].take())
    }

    /// Reads a response of `DescribeEventDetails`.
    pub fn read_details(&mut self, response: &Value) {
        for one in response["successfulSet"].as_array().into_iter().flatten() {
            let text = &one["eventDescription"]["latestDescription"];
            if let (Some(arn), Some(text)) = (one["event"]["arn"].as_str(), text.as_str()) {
                self.texts.insert(arn.to_owned(), text.to_owned());
            }
        }
    }

    /// Reads a page of `DescribeAffectedEntities`, like one of events.
    pub fn read_entities(&mut self, mut page: Value) -> Result<Value, String> {
        let entities: Vec<Entity> = items(&mut page, "entities", &mut self.odd)?;
        self.entities.extend(entities);
        Ok(page["nextToken"].take())
    }

    /// Returns everything as notices. `account` is the number of the account whose instances count;
    /// empty for all.
    pub fn told(&self, account: &str, now: Timestamp) -> Told {
        meaning::told(self, account, now)
    }
}

/// Takes the items of a list. One that cannot be understood is counted.
fn items<T: DeserializeOwned>(
    page: &mut Value,
    key: &str,
    odd: &mut u64,
) -> Result<Vec<T>, String> {
    let Some(Value::Array(found)) = page.get_mut(key).map(Value::take) else {
        return Err(format!("the response has no list {key:?}"));
    };
    let mut items = Vec::new();
    for item in found {
        match serde_json::from_value(item) {
            Ok(item) => items.push(item),
            Err(_) => *odd += 1,
        }
    }
    Ok(items)
}

/// Asks for everything that holds now, and for events closed since `since`.
pub(super) async fn poll(
    client: &mut Client,
    service: &Service,
    query: &Query<'_>,
    since: Option<Timestamp>,
    now: Timestamp,
) -> Result<Told, Failure> {
    let found = ask(client, service, query, since).await;
    let found = found.map_err(|refused| match refused.code.as_str() {
        UNSUBSCRIBED => Failure {
            what: "AWS Health has no API for this account: it needs a paid support plan (Business or higher); the \
                   scheduled events of EC2 are still read"
                .to_owned(),
            ..refused.failure
        },
        _ => refused.failure,
    })?;
    Ok(found.told(query.account, now))
}

/// Instances that are asked about.
pub(super) struct Query<'a> {
    /// Region of the events.
    pub(super) region: &'a str,
    /// Number of the account whose entities count; empty for all.
    pub(super) account: &'a str,
}

async fn ask(
    client: &mut Client,
    service: &Service,
    query: &Query<'_>,
    since: Option<Timestamp>,
) -> Result<Found, Refused> {
    let filter = json!({
        "services": ["EC2"],
        "eventTypeCategories": ["scheduledChange"],
        "eventTypeCodes": CODES,
        "regions": [query.region],
    });
    let mut filters = vec![with(
        &filter,
        "eventStatusCodes",
        json!(["open", "upcoming"]),
    )];
    if let Some(since) = since {
        let closed = with(&filter, "eventStatusCodes", json!(["closed"]));
        let from = (since - OVERLAP).as_second();
        filters.push(with(&closed, "lastUpdatedTimes", json!([{"from": from}])));
    }
    let mut found = Found::default();
    for filter in filters {
        let request = json!({"filter": filter, "maxResults": PAGE});
        let read = |page| found.read_events(page);
        list(client, service, "DescribeEvents", request, read).await?;
    }
    let arns: Vec<String> = found.events.keys().cloned().collect();
    for arns in arns.chunks(BATCH) {
        let request = json!({"eventArns": arns});
        let details = call(client, service, "DescribeEventDetails", &request).await?;
        found.read_details(&details.json()?);
        let request = json!({"filter": {"eventArns": arns}, "maxResults": PAGE});
        let read = |page| found.read_entities(page);
        list(client, service, "DescribeAffectedEntities", request, read).await?;
    }
    Ok(found)
}

/// Gives all pages of a list to `read`, which returns the token of the next one.
async fn list(
    client: &mut Client,
    service: &Service,
    operation: &str,
    mut request: Value,
    mut read: impl FnMut(Value) -> Result<Value, String>,
) -> Result<(), Refused> {
    for _ in 0..MOST_PAGES {
        let response = call(client, service, operation, &request).await?;
        let token = read(response.json()?).map_err(|what| response.failure(&what))?;
        if token.is_null() {
            return Ok(());
        }
        if token == request["nextToken"] {
            return Err(response
                .failure("the list does not end: a page names itself as the next")
                .into());
        }
        request["nextToken"] = token;
    }
    let what = format!("{operation}: the list has more than {MOST_PAGES} pages");
    Err(Failure::new(what).into())
}

async fn call(
    client: &mut Client,
    service: &Service,
    operation: &str,
    request: &Value,
) -> Result<Response, Refused> {
    let headers = [
        ("content-type", "application/x-amz-json-1.1".to_owned()),
        ("x-amz-target", format!("{TARGET}{operation}")),
    ];
    client.ask(service, &headers, request.to_string()).await
}

/// Returns the filter with one more condition.
fn with(filter: &Value, key: &str, value: Value) -> Value {
    let mut filter = filter.clone();
    filter[key] = value;
    filter
}
