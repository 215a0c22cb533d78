//! `gpuwarden replay`: decisions of a policy about past events, or the difference of two policies or
//! sets of rules.

mod input;
mod objects;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, bail};
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::node::NodeView;
use policy::Policy;
use serde::Serialize;
use serde_json::Value;
use trial::replay::{Decided, Decision, Replay, Summary};
use trial::rules::conclude::Conclusions;

use crate::args::{Format, ReplayArgs};
use crate::output::{self, Colour, StreamedList, plural, say};
use crate::{EXIT_FAILED, exit_code};
use crate::{policy_source, rules_source};
pub(super) use input::Inputs;

/// Names of what is compared, in the order of the arguments.
const NAMES: [&str; 2] = ["A", "B"];
/// Largest list of nodes (bytes): 5,000 nodes of 50 KiB.
const MAX_NODES_BYTES: u64 = 256 * 1024 * 1024;

/// A policy, with the rules whose conclusions it gets.
pub(super) struct Side {
    /// Name of what is compared: of the policy, or of the rules.
    name: String,
    replay: Replay,
    conclusions: Option<Conclusions>,
}

/// Decision, and the policies that make it.
#[derive(Serialize)]
struct DecisionView<'a> {
    /// `A`, `B`, or both.
    policies: Vec<&'static str>,
    #[serde(flatten)]
    decision: &'a Decision,
}

/// Returns the value of one policy in a row of the summary.
type Cell = fn(&Summary) -> String;

/// Writes decisions as they are made, in the requested format.
struct Writer {
    format: Format,
    two: bool,
    list: StreamedList,
    written: u64,
    /// True once a decision was made.
    found: bool,
    /// Decisions of only one policy.
    only: [u64; 2],
    /// Decisions of both policies.
    both: u64,
}

pub(super) fn execute(args: &ReplayArgs) -> anyhow::Result<u8> {
    let nodes = args.nodes.as_deref().map(read_nodes).transpose()?;
    for (flag, given) in [("--policy", &args.policies), ("--rules", &args.rules)] {
        if given.len() > NAMES.len() {
            bail!(
                "{flag} is given {} times; one or two can be replayed",
                given.len()
            );
        }
    }
    if args.policies.len() > 1 && args.rules.len() > 1 {
        bail!("--policy and --rules are both given twice; compare either policies or rules");
    }
    let listed = nodes.as_deref().unwrap_or_default();
    let count = args.policies.len().max(args.rules.len()).max(1);
    let mut sides = Vec::new();
    for index in 0..count {
        let policy = args.policies.get(index).or(args.policies.first());
        let policy = policy.map_or_else(|| Ok(Policy::builtin()), |it| policy_source::load(it))?;
        let rules = args.rules.get(index).or(args.rules.first());
        let mut side = Side::new(policy, nodes.clone());
        if let Some(rules) = rules {
            let loaded = rules_source::load(rules)?;
            side.conclusions = Some(Conclusions::new(loaded, listed));
            if args.rules.len() > 1 {
                side.name.clone_from(rules);
            }
        }
        sides.push(side);
    }
    let mut inputs = Inputs::open(&args.files, &args.catalog)?;
    run(&mut sides, &mut inputs, args.output.output)
}

/// Replays all inputs. Returns the exit code: failed if a record could not be read, unhealthy if a
/// node would have been taken out or, with two sides, they differ.
pub(super) fn run(sides: &mut [Side], inputs: &mut Inputs, format: Format) -> anyhow::Result<u8> {
    let mut writer = Writer {
        format,
        two: sides.len() > 1,
        list: StreamedList::default(),
        written: 0,
        found: false,
        only: [0, 0],
        both: 0,
    };
    output::even_if_unread(write(sides, inputs, &mut writer))?;
    let late = sides.iter().filter_map(|side| side.conclusions.as_ref());
    warn_of_late(late.map(Conclusions::late).max());
    if let Some(error) = unread(inputs) {
        output::error(&error);
        return Ok(EXIT_FAILED);
    }
    let found = if writer.two {
        writer.only != [0, 0]
    } else {
        writer.found
    };
    Ok(exit_code(!found))
}

/// Warns of nodes with events that came too late for rules.
pub(super) fn warn_of_late(nodes: Option<usize>) {
    if let Some(count) = nodes.filter(|count| *count > 0) {
        output::warning(&format!(
            "events of {} came too late for the rules, which need them in the order of their times",
            plural(count as u64, "node")
        ));
    }
}

/// Returns the error for records that could not be read, if there are any.
pub(super) fn unread(inputs: &Inputs) -> Option<anyhow::Error> {
    (inputs.problems() > 0).then(|| {
        anyhow::anyhow!(
            "{} could not be read beside {}, and are missing in the result",
            plural(inputs.problems(), "record"),
            plural(inputs.events, "event")
        )
    })
}

/// Writes the decisions, and the summary.
fn write(sides: &mut [Side], inputs: &mut Inputs, writer: &mut Writer) -> anyhow::Result<()> {
    let format = writer.format;
    let mut names = BTreeSet::new();
    let mut times: Option<(Timestamp, Timestamp)> = None;
    while let Some(item) = inputs.next()? {
        if names.len() < model::fault::MAX_FAULTY_NODES {
            names.insert(item.event.node_name.clone());
        }
        times = Some((times.map_or(item.at, |(first, _)| first), item.at));
        let record = item.record();
        let decisions: Vec<Vec<Decision>> = (sides.iter_mut())
            .map(|side| side.take(record.clone()))
            .collect();
        if decisions.iter().any(|made| !made.is_empty()) {
            inputs.clear_progress();
            writer.write(&decisions)?;
        }
    }
    inputs.clear_progress();
    let decisions: Vec<Vec<Decision>> = (sides.iter_mut())
        .map(|side| side.replay.finish())
        .collect();
    writer.write(&decisions)?;
    writer.list.end(format)?;
    inputs.warn_of_garbled();
    let left_out = left_out(sides).filter(|_| times.is_some());
    if matches!(format, Format::Text | Format::Wide) {
        summary(sides, inputs, writer, names.len(), times)?;
        if let Some(text) = left_out {
            output::line(&text)?;
        }
    } else if let Some(text) = left_out {
        output::warning(&text);
    }
    Ok(())
}

/// Reads nodes in the form of `kubectl get nodes -o json`.
pub(super) fn read_nodes(path: &Path) -> anyhow::Result<Vec<NodeView>> {
    let shown = path.display();
    let size = std::fs::metadata(path)
        .with_context(|| format!("cannot read the nodes {shown}"))?
        .len();
    if size > MAX_NODES_BYTES {
        bail!("{shown} has {size} bytes, more than {MAX_NODES_BYTES}");
    }
    let text = std::fs::read(path).with_context(|| format!("cannot read the nodes {shown}"))?;
    let hint = || format!("{shown} is not a list of nodes from `kubectl get nodes -o json`");
    let mut list: Value = serde_json::from_slice(&text).with_context(hint)?;
    let items = match list.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => items,
        _ => vec![list],
    };
    items
        .into_iter()
        .map(|node| NodeView::from_object(node).with_context(hint))
        .collect()
}

fn summary(
    sides: &[Side],
    inputs: &Inputs,
    writer: &Writer,
    nodes: usize,
    times: Option<(Timestamp, Timestamp)>,
) -> anyhow::Result<()> {
    if writer.written > 0 {
        output::line("")?;
    }
    let Some((first, last)) = times else {
        output::line("No event and no fault was found.")?;
        return Ok(());
    };
    let problems = inputs.problems();
    say!(
        "{} of {}, {} to {}",
        plural(inputs.events, "event"),
        plural(nodes as u64, "node"),
        shown_time(first),
        shown_time(last)
    )?;
    for (count, what) in [
        (inputs.repeats, "were there twice, and count once"),
        (problems, "could not be read; they are named above"),
        (
            inputs.backwards(),
            "are older than the one before in the same file, and count at its time",
        ),
    ] {
        if count > 0 {
            say!("{count} {what}")?;
        }
    }
    let summaries: Vec<Summary> = sides.iter().map(|side| side.replay.summary()).collect();
    table(sides, &summaries)?;
    for (side, summary) in sides.iter().zip(&summaries) {
        if let Some(at) = summary.tripped_at {
            say!(
                "the circuit breaker of {} tripped at {}: no node was taken out from then on, since in \
                 a replay nobody closes it",
                output::plain(&side.name),
                shown_time(at)
            )?;
        }
    }
    if let Some(unlisted) = summaries
        .first()
        .map(|summary| summary.unlisted)
        .filter(|n| *n > 0)
    {
        let nodes = plural(unlisted as u64, "node");
        say!("{nodes} of the events are not in the list of nodes: nothing is done to them")?;
    }
    if writer.two {
        say!(
            "{} the same, {} only by A, {} only by B",
            plural(writer.both, "decision"),
            writer.only[0],
            writer.only[1]
        )?;
    }
    Ok(())
}

/// Writes the summaries side by side.
fn table(sides: &[Side], summaries: &[Summary]) -> anyhow::Result<()> {
    let mut heads = vec![String::new()];
    heads.extend(NAMES.iter().zip(sides).map(|(name, side)| {
        if sides.len() > 1 {
            format!("{name}: {}", side.name)
        } else {
            side.name.clone()
        }
    }));
    let cells: [(&str, Cell); 8] = [
        ("nodes taken out", |summary| summary.taken_out.to_string()),
        ("most at one time", |summary| {
            summary.most_at_once.to_string()
        }),
        ("quarantines", |summary| summary.quarantines.to_string()),
        ("returned", |summary| summary.releases.to_string()),
        ("out at the end", |summary| summary.still_out.to_string()),
        ("nodes held back", |summary| summary.held.to_string()),
        ("held at the end", |summary| summary.still_held.to_string()),
        ("time out, of all", |summary| {
            output::span(SignedDuration::from_secs(summary.seconds_out))
        }),
    ];
    let row = |(title, cell): (&str, Cell)| {
        let mut row = vec![title.to_owned()];
        row.extend(summaries.iter().map(cell));
        row
    };
    let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    output::table(&heads, &cells.map(row))?;
    Ok(())
}

/// Returns the note about limits of the brake that could not be applied.
fn left_out(sides: &[Side]) -> Option<String> {
    let limits: BTreeSet<&str> = sides
        .iter()
        .flat_map(|side| side.replay.left_out())
        .map(String::as_str)
        .collect();
    if limits.is_empty() {
        return None;
    }
    let limits: Vec<&str> = limits.into_iter().collect();
    Some(format!(
        "these limits of the brake were not applied, since the size of the cluster and the labels of \
         its nodes are unknown: {}; name them with --nodes FILE (kubectl get nodes -o json)",
        output::plain(&limits.join(", "))
    ))
}

/// Returns a time for people. Times near the beginning of 1970 are from logs that only have the time
/// since boot.
pub(super) fn shown_time(at: Timestamp) -> String {
    const YEAR: i64 = 365 * 24 * 3_600;
    match at.as_millisecond() {
        since_boot if at.as_second() < YEAR => {
            format!("+{}.{:03} s", since_boot / 1_000, since_boot % 1_000)
        }
        _ => output::time(at),
    }
}

// === impl Side ===

impl Side {
    /// Creates the side of a policy without rules.
    pub(super) fn new(policy: Policy, nodes: Option<Vec<NodeView>>) -> Self {
        Self {
            name: policy.source.clone(),
            replay: Replay::new(policy, nodes).braked(),
            conclusions: None,
        }
    }

    /// Returns the decisions about an event and the conclusions that come with it.
    fn take(&mut self, record: EventRecord) -> Vec<Decision> {
        let records = match &mut self.conclusions {
            Some(conclusions) => conclusions.take(record),
            None => vec![record],
        };
        let decisions = records.iter().map(|record| self.replay.take(record));
        decisions.flatten().collect()
    }
}

// === impl Writer ===

impl Writer {
    /// Writes the decisions of the policies about one event. Equal decisions of both are written once.
    fn write(&mut self, decisions: &[Vec<Decision>]) -> anyhow::Result<()> {
        let [first, rest @ ..] = decisions else {
            return Ok(());
        };
        let second = rest.first().map_or(&[][..], Vec::as_slice);
        let same =
            |among: &[Decision], one: &Decision| among.iter().any(|other| other.does_the_same(one));
        for decision in first {
            let policies = if same(second, decision) {
                &NAMES[..]
            } else {
                &NAMES[..1]
            };
            self.write_one(policies, decision)?;
        }
        for decision in second.iter().filter(|decision| !same(first, decision)) {
            self.write_one(&NAMES[1..], decision)?;
        }
        Ok(())
    }

    fn write_one(&mut self, policies: &[&'static str], decision: &Decision) -> anyhow::Result<()> {
        self.found = true;
        match policies {
            [_, _] => self.both += 1,
            ["A"] => self.only[0] += 1,
            _ => self.only[1] += 1,
        }
        let view = DecisionView {
            policies: policies.to_vec(),
            decision,
        };
        match self.format {
            // A decision of both is no difference.
            Format::Text if self.two && policies.len() == 2 => return Ok(()),
            Format::Text | Format::Wide => output::line(&self.text(policies, decision))?,
            Format::Json | Format::Yaml => self.list.item(self.format, &view)?,
        }
        self.written += 1;
        Ok(())
    }

    fn text(&self, policies: &[&str], decision: &Decision) -> String {
        let mark = match policies {
            _ if !self.two => "",
            ["A"] => "A  ",
            ["B"] => "B  ",
            _ => "=  ",
        };
        let name = decision.decision.name();
        let colour = match decision.decision {
            Decided::Quarantine => Colour::Red,
            Decided::Update | Decided::Held => Colour::Yellow,
            _ => Colour::Green,
        };
        let rule_sets = match decision.rule_sets.as_slice() {
            [] => String::new(),
            names => format!(" by '{}'", output::plain(&names.join("', '"))),
        };
        format!(
            "{mark}{}  {}  {}{rule_sets}: {}: {}",
            shown_time(decision.at),
            output::plain(&decision.node),
            output::colour(name, colour),
            decision.change(),
            output::plain(&decision.because.join("; "))
        )
    }
}
