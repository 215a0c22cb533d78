//! `gpuwarden rules explain`: what the groups of a rule hold, and what they lack.

use std::path::Path;

use analysis::{Rule, RulesText};
use console::api::EventView;
use contract::json;
use jiff::Timestamp;
use model::event::EventRecord;
use serde::Serialize;
use trial::rules::conclude::Conclusions;
use trial::rules::explain::{ExplainedGroup, condition, explained};

use super::show::named;
use crate::EXIT_OK;
use crate::args::{ConnectArgs, Format, RemoteArgs};
use crate::client::Client;
use crate::commands::events;
use crate::commands::replay::{self, Inputs, shown_time};
use crate::output::{self, Colour, say};
use crate::rules_source;

/// Question about a rule.
pub(super) struct Question<'a> {
    pub(super) rule: &'a str,
    pub(super) node: Option<&'a str>,
    pub(super) rules: Option<&'a str>,
    /// Files of events; none for the events of the running gpuwarden.
    pub(super) files: &'a [String],
    pub(super) nodes: Option<&'a Path>,
}

#[derive(Serialize)]
struct Explained {
    rule: String,
    /// Condition for people: `5 bursts within 24h`.
    condition: String,
    groups: Vec<ExplainedGroup>,
}

pub(super) async fn execute(
    question: &Question<'_>,
    remote: &RemoteArgs,
    format: Format,
) -> anyhow::Result<u8> {
    let running = match question.files {
        [] => Some(Client::remote(remote).await?),
        _ => None,
    };
    let rules = match (question.rules, &running) {
        (Some(source), _) => {
            let connect = ConnectArgs {
                kubeconfig: remote.kubeconfig.clone(),
                context: remote.context.clone(),
            };
            rules_source::load_from(source, &connect).await?
        }
        (None, Some(client)) => client.get::<RulesText>("/api/v1/rules").await?.parse()?,
        (None, None) => analysis::built_in(),
    };
    let rule = named(&rules, question.rule)?;
    let nodes = question.nodes.map(replay::read_nodes).transpose()?;
    let (records, now) = match &running {
        Some(client) => (of_running(client).await?, Timestamp::now()),
        None => of_files(question.files)?,
    };
    let conclusions = Conclusions::new(vec![rule.clone()], &nodes.unwrap_or_default());
    let mut groups = conclusions.groups(&rule.name, &records, now);
    let of_node = |node: &str| {
        question
            .node
            .is_none_or(|wanted| node.is_empty() || node == wanted)
    };
    // A group that only other faults have made holds nothing.
    groups.retain(|view| of_node(&view.group.node) && view.held.last.is_some());
    let explained = Explained {
        rule: rule.name.clone(),
        condition: condition(rule),
        groups: groups.iter().map(|view| explained(rule, view)).collect(),
    };
    if !output::structured(format, &explained)? {
        text(&explained, rule, question, format)?;
    }
    Ok(EXIT_OK)
}

/// Returns all events of the running gpuwarden.
async fn of_running(client: &Client) -> anyhow::Result<Vec<EventRecord>> {
    let newest: Vec<EventView> = client.get("/api/v1/events?limit=1").await?;
    let mut records = Vec::new();
    if let Some(newest) = newest.first() {
        let take = |view: EventView| {
            let event = json::from_value(view.event)?;
            records.push(EventRecord {
                seq: view.seq,
                id: event.id.clone(),
                created_at: view.created_at,
                event,
            });
            Ok(())
        };
        events::each(client, newest.seq, take).await?;
    }
    Ok(records)
}

/// Returns all events of files, and the time of the last one.
fn of_files(files: &[String]) -> anyhow::Result<(Vec<EventRecord>, Timestamp)> {
    let mut inputs = Inputs::open(files, &[])?;
    let mut records = Vec::new();
    while let Some(item) = inputs.next()? {
        records.push(item.record());
    }
    inputs.clear_progress();
    inputs.warn_of_garbled();
    if let Some(error) = replay::unread(&inputs) {
        return Err(error);
    }
    let last = records.last().map(|record| record.created_at);
    Ok((records, last.unwrap_or(Timestamp::UNIX_EPOCH)))
}

fn text(
    explained: &Explained,
    rule: &Rule,
    question: &Question<'_>,
    format: Format,
) -> anyhow::Result<()> {
    let keys: Vec<String> = rule.group_by.iter().map(ToString::to_string).collect();
    let node = rule.is_of_one_node().then(|| "node".to_owned());
    let each = node
        .into_iter()
        .chain(keys)
        .collect::<Vec<_>>()
        .join(" and ");
    let head = format!(
        "{}: {}, for each {each}",
        explained.rule, explained.condition
    );
    output::line(&output::plain(&head))?;
    for group in &explained.groups {
        say!("\n{}", output::plain(&group.group))?;
        say!("  {}", output::plain(&held(group)))?;
        let state = conclusion(group);
        let state = if group.concluded_since.is_some() {
            output::colour(&state, Colour::Yellow)
        } else {
            output::plain(&state)
        };
        say!("  {state}")?;
        if format == Format::Wide && !group.evidence.is_empty() {
            say!("  events {}", output::plain(&group.evidence.join(", ")))?;
        }
    }
    if explained.groups.is_empty() {
        let on = question
            .node
            .map(|node| format!(" of {}", output::plain(node)));
        say!("\nNo event{} counts for the rule.", on.unwrap_or_default())?;
    }
    if explained.groups.is_empty() || rule.share.is_some() {
        let labels: Vec<String> = rule.labels().cloned().collect();
        if !labels.is_empty() && question.nodes.is_none() {
            say!(
                "\nIt reads {}, which events may lack; --nodes FILE (kubectl get nodes -o json) has the \
                 labels of your nodes{}.",
                output::plain(&labels.join(" or ")),
                rule.share.map_or("", |_| ", and how many a group has")
            )?;
        }
    }
    Ok(())
}

/// Returns what a group holds, and the time of its latest report.
fn held(group: &ExplainedGroup) -> String {
    let last = group
        .last
        .map(|at| format!(", the last at {}", shown_time(at)));
    format!("{}{}", group.holds, last.unwrap_or_default())
}

/// Returns the state of the conclusion, or what it lacks.
fn conclusion(group: &ExplainedGroup) -> String {
    if let Some(since) = group.concluded_since {
        let end = match group.until {
            Some(until) => format!("ends after {} without a further event", shown_time(until)),
            None => "lasts until a repair".to_owned(),
        };
        return format!("concluded since {}; {end}", shown_time(since));
    }
    if group.lacks.is_empty() {
        return "no conclusion so far; the next event makes it".to_owned();
    }
    format!("no conclusion; lacks {}", group.lacks.join(", and "))
}
