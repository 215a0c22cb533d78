//! AWS on loopback: Health, EC2 and an agent of credentials, with pages. Each request must have a signature,
//! which is computed from the request as it arrived.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use notices::AwsConfig;
use ring::{digest, hmac};
use serde_json::{Value, json};

use crate::Environment;
use crate::aws::Aws;
use crate::http::Http;
use crate::loopback::{Asked, Reply, Server};

/// AWS in a state.
pub(super) struct Fake {
    pub(super) server: Server,
    state: Arc<Mutex<State>>,
}

/// State of the fake.
pub(super) struct State {
    /// Events, with their description in `text` and their entities in `entities`.
    pub(super) events: Vec<Value>,
    /// Instances: id, and XML of its events.
    pub(super) instances: Vec<(String, String)>,
    /// Number of items of a page.
    pub(super) page: usize,
    /// Answers in place of those of the next requests, by a word in the request's target header or
    /// body.
    pub(super) scripted: VecDeque<(&'static str, Reply)>,
    /// Number of credentials that were fetched.
    pub(super) fetched: u64,
    /// Credentials that are refused as expired, by number.
    pub(super) expired: BTreeSet<u64>,
    /// Secret of all keys, as the fake knows it.
    pub(super) secret: &'static str,
}

// === impl Fake ===

impl Fake {
    pub(super) async fn start() -> Self {
        let state = State {
            events: Vec::new(),
            instances: Vec::new(),
            page: 100,
            scripted: VecDeque::new(),
            fetched: 0,
            expired: BTreeSet::new(),
            secret: "secret",
        };
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        let server = Server::start(move |asked| shared.lock().unwrap().answer(asked)).await;
        Self { server, state }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns the client of an account, which fetches its credentials from the fake.
    pub(super) fn client(&self) -> Aws {
        let config = AwsConfig {
            account_id: String::new(),
            region: "eu-west-1".to_owned(),
            poll: jiff::SignedDuration::from_mins(1),
            endpoint: self.server.url.clone(),
        };
        let agent = "AWS_CONTAINER_CREDENTIALS_FULL_URI".to_owned();
        let variables = BTreeMap::from([(agent, format!("{}/keys", self.server.url))]);
        Aws::new(&config, Http::new().unwrap(), Environment::of(variables))
    }

    /// Returns the operations that were asked, in order.
    pub(super) fn operations(&self) -> Vec<String> {
        let asked = self.server.asked();
        let named = asked
            .iter()
            .filter(|asked| asked.target == "/")
            .map(|asked| {
                let target = asked.header("x-amz-target");
                target
                    .strip_prefix("AWSHealth_20160804.")
                    .unwrap_or("DescribeInstanceStatus")
                    .to_owned()
            });
        named.collect()
    }
}

// === impl State ===

impl State {
    fn answer(&mut self, asked: &Asked) -> Reply {
        if asked.target == "/keys" {
            let body = json!({
                "AccessKeyId": format!("K{}", self.fetched), "SecretAccessKey": "secret", "Token": "t",
                "Expiration": "2999-01-01T00:00:00Z",
            });
            self.fetched += 1;
            return Reply::new(200, body.to_string());
        }
        let target = asked.header("x-amz-target").to_owned();
        let is_due = |word: &&'static str| target.contains(*word) || asked.text().contains(*word);
        if let Some((word, _)) = self.scripted.front()
            && is_due(word)
        {
            return self.scripted.pop_front().unwrap().1;
        }
        let scope = if target.is_empty() {
            "eu-west-1/ec2"
        } else {
            "us-east-1/health"
        };
        let id = match signed_by(asked, self.secret, scope) {
            Ok(id) => id,
            Err(why) => return refusal(&target, 403, "SignatureDoesNotMatch", &why),
        };
        let number: u64 = id.trim_start_matches('K').parse().unwrap();
        if self.expired.contains(&number) {
            return refusal(
                &target,
                400,
                "ExpiredTokenException",
                "the token has expired",
            );
        }
        match target.as_str() {
            "" => self.instance_status(asked.text()),
            target => self.health(target, &serde_json::from_slice(&asked.body).unwrap()),
        }
    }

    fn health(&self, target: &str, request: &Value) -> Reply {
        let body = match target.trim_start_matches("AWSHealth_20160804.") {
            "DescribeEvents" => {
                let filter = &request["filter"];
                assert_eq!(filter["regions"], json!(["eu-west-1"]));
                assert_eq!(filter["eventTypeCodes"].as_array().unwrap().len(), 10);
                let from = filter["lastUpdatedTimes"][0]["from"]
                    .as_f64()
                    .unwrap_or_default();
                let statuses = filter["eventStatusCodes"].as_array().unwrap();
                let is_wanted = |event: &&Value| {
                    statuses.contains(&event["statusCode"])
                        && event["lastUpdatedTime"].as_f64().unwrap_or(f64::MAX) >= from
                };
                let events = self.events.iter().filter(is_wanted).map(bare);
                self.paged(events.collect(), request, "events")
            }
            "DescribeEventDetails" => {
                let set = self.named(&request["eventArns"]).into_iter().map(|event| {
                    let text = json!({"latestDescription": event["text"]});
                    json!({"event": bare(event), "eventDescription": text})
                });
                json!({"successfulSet": set.collect::<Vec<_>>(), "failedSet": []})
            }
            "DescribeAffectedEntities" => {
                let events = self.named(&request["filter"]["eventArns"]).into_iter();
                let entities = events.flat_map(|event| event["entities"].as_array().unwrap());
                self.paged(entities.cloned().collect(), request, "entities")
            }
            other => panic!("{other}"),
        };
        Reply::new(200, body.to_string())
    }

    /// Returns the events with these ARNs; the API takes ten at a time.
    fn named(&self, arns: &Value) -> Vec<&Value> {
        let arns = arns.as_array().unwrap();
        assert!((1..=10).contains(&arns.len()));
        self.events
            .iter()
            .filter(|event| arns.contains(&event["arn"]))
            .collect()
    }

    fn paged(&self, mut items: Vec<Value>, request: &Value, key: &str) -> Value {
        let from: usize = request["nextToken"].as_str().map_or(0, position);
        items.drain(..from);
        let mut page = json!({});
        if items.len() > self.page {
            page["nextToken"] = token(from + self.page).into();
            items.truncate(self.page);
        }
        page[key] = items.into();
        page
    }

    fn instance_status(&self, form: &str) -> Reply {
        assert!(form.contains("IncludeAllInstances=true"), "{form}");
        let parameter = |name: &str| {
            form.split('&')
                .find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
        };
        let from = parameter("NextToken").map_or(0, position);
        let until = self.instances.len().min(from + self.page);
        let items = self.instances[from..until].iter().map(|(id, events)| {
            format!("<item><instanceId>{id}</instanceId><eventsSet>{events}</eventsSet></item>")
        });
        let next = match until {
            _ if until < self.instances.len() => format!("<nextToken>{}</nextToken>", token(until)),
            _ => String::new(),
        };
        let body = format!(
            "<?xml version=\"1.0\"?><DescribeInstanceStatusResponse xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\">\
             <requestId>r</requestId><instanceStatusSet>{}</instanceStatusSet>{next}\
             </DescribeInstanceStatusResponse>",
            items.collect::<String>()
        );
        Reply::new(200, body)
    }
}

/// Returns the token of the page that begins here; AWS's have at least four characters.
fn token(position: usize) -> String {
    format!("page-{position}")
}

/// Returns the position of a token.
fn position(token: &str) -> usize {
    let position = token.strip_prefix("page-").unwrap();
    position.parse().unwrap()
}

/// Returns an event without what other operations have of it.
fn bare(event: &Value) -> Value {
    let mut event = event.clone();
    event
        .as_object_mut()
        .unwrap()
        .retain(|key, _| key != "text" && key != "entities");
    event
}

/// Returns an error in the form of the service.
pub(super) fn refusal(target: &str, status: u16, code: &str, message: &str) -> Reply {
    let body = if target.is_empty() {
        format!(
            "<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors></Response>"
        )
    } else {
        json!({"__type": format!("com.amazonaws.health#{code}"), "message": message}).to_string()
    };
    Reply::new(status, body)
}

/// Checks the signature of a request as it arrived, and returns the id of its key.
fn signed_by(asked: &Asked, secret: &str, scope: &str) -> Result<String, String> {
    let authorization = asked.header("authorization");
    let part = |name: &str| {
        let (_, rest) = authorization
            .split_once(name)
            .ok_or_else(|| format!("no {name}"))?;
        Ok::<_, String>(rest.split([',', ' ']).next().unwrap_or_default())
    };
    let (credential, names, signature) = (
        part("Credential=")?,
        part("SignedHeaders=")?,
        part("Signature=")?,
    );
    let (id, signed_scope) = credential.split_once('/').ok_or("no scope")?;
    let date = asked.header("x-amz-date");
    let day = &date[..8];
    if signed_scope != format!("{day}/{scope}/aws4_request") {
        return Err(format!("the scope is {signed_scope}"));
    }
    if !["host", "x-amz-date", "x-amz-security-token"]
        .iter()
        .all(|name| names.contains(name))
    {
        return Err(format!("signed are {names}"));
    }
    let lines = names
        .split(';')
        .map(|name| [name, ":", asked.header(name), "\n"].concat());
    let lines = lines.collect::<Vec<_>>().concat();
    let sha = |bytes: &[u8]| hex(digest::digest(&digest::SHA256, bytes).as_ref());
    let canonical = format!(
        "{}\n{}\n\n{lines}\n{names}\n{}",
        asked.method,
        asked.target,
        sha(&asked.body)
    );
    let text = format!(
        "AWS4-HMAC-SHA256\n{date}\n{signed_scope}\n{}",
        sha(canonical.as_bytes())
    );
    let mut key = format!("AWS4{secret}").into_bytes();
    for part in signed_scope.split('/').chain([text.as_str()]) {
        key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), part.as_bytes())
            .as_ref()
            .to_vec();
    }
    if hex(&key) == signature {
        Ok(id.to_owned())
    } else {
        Err("the signature is another".to_owned())
    }
}

fn hex(bytes: &[u8]) -> String {
    let digits: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.concat()
}
