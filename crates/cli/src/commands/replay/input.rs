//! The inputs of a replay: kernel logs and exported events, read one record at a time and merged in
//! the order of time.

mod log;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use contract::{HealthEvent, json};
use diagnosis::catalog::Catalog;
use jiff::Timestamp;
use model::event::{EventRecord, normalise, validate};
use model::position::Position;
use serde_json::Value;

use self::log::Log;
use super::objects::Objects;
use crate::commands::garbled::GarbledLines;
use crate::commands::no_text::no_text;
use crate::commands::progress::{BytesRead, Counted, Progress};
use crate::output;

/// Most inputs, since each is an open file.
const MAX_INPUTS: usize = 1_000;
/// Most remembered ids of events; a repeated event counts once.
const REMEMBERED: usize = 1_000_000;
/// Most unreadable records that are named one by one.
const NAMED: u64 = 20;
/// Size of the read buffers (bytes).
const BUFFER: usize = 64 * 1024;

/// All inputs, read as one.
pub(crate) struct Inputs {
    files: Vec<InputFile>,
    /// Time of the next item of each file, the earliest on top.
    next: BinaryHeap<Reverse<(Timestamp, usize)>>,
    seen: RecentIds,
    problems: Problems,
    progress: Progress,
    read: BytesRead,
    /// Number of events so far.
    pub(crate) events: u64,
    /// Number of repeated events.
    pub(crate) repeats: u64,
}

/// Event, and the time of its acceptance.
pub(crate) struct Item {
    pub(crate) at: Timestamp,
    pub(crate) event: HealthEvent,
}

/// A kernel log or an export of events.
struct InputFile {
    name: String,
    form: Form,
    /// Items that were read and not yet returned.
    waiting: VecDeque<Item>,
    newest: Option<Timestamp>,
    /// Number of items that are older than the one before.
    backwards: u64,
}

enum Form {
    Log(Box<Log>),
    Events(Objects<Box<dyn BufRead>>),
}

/// Ids of the newest events.
#[derive(Default)]
struct RecentIds {
    ids: HashSet<String>,
    order: VecDeque<String>,
}

#[derive(Default)]
struct Problems {
    count: u64,
    /// Texts that are not written yet.
    texts: Vec<String>,
}

// === impl Item ===

impl Item {
    /// Returns the event as a store would have it, without its position.
    pub(crate) fn record(self) -> EventRecord {
        EventRecord {
            seq: Position::START, // A replay assigns the position.
            id: self.event.id.clone(),
            created_at: self.at,
            event: self.event,
        }
    }
}

// === impl Inputs ===

impl Inputs {
    /// Opens the files; each is `FILE`, `-` or, for a kernel log, `NODE=FILE`.
    pub(crate) fn open(files: &[String], catalog: &[PathBuf]) -> anyhow::Result<Self> {
        let sizes: Option<Vec<u64>> = files.iter().map(|file| size(file)).collect();
        let total = sizes.map(|sizes| sizes.iter().sum());
        Self::with(files, catalog, Progress::new(total))
    }

    fn with(files: &[String], catalog: &[PathBuf], progress: Progress) -> anyhow::Result<Self> {
        let catalog = Arc::new(crate::load_catalog(catalog)?);
        if files.len() > MAX_INPUTS {
            bail!(
                "{} files, at most {MAX_INPUTS} can be replayed at once",
                files.len()
            );
        }
        let mut opened = Self {
            files: Vec::new(),
            next: BinaryHeap::new(),
            seen: RecentIds::default(),
            problems: Problems::default(),
            progress,
            read: BytesRead::default(),
            events: 0,
            repeats: 0,
        };
        for file in files {
            let input = InputFile::open(file, &catalog, &opened.read)?;
            opened.files.push(input);
        }
        for index in 0..opened.files.len() {
            opened.refill(index)?;
        }
        Ok(opened)
    }

    /// Reads the next event in the order of time; events of the same time in the order of the files.
    pub(crate) fn next(&mut self) -> anyhow::Result<Option<Item>> {
        while let Some(Reverse((_, index))) = self.next.pop() {
            let item = self
                .files
                .get_mut(index)
                .and_then(|input| input.waiting.pop_front());
            self.refill(index)?;
            let Some(item) = item else { continue };
            if !self.seen.insert(&item.event.id) {
                self.repeats += 1;
                continue;
            }
            self.events += 1;
            return Ok(Some(item));
        }
        Ok(None)
    }

    /// Removes the progress line, before other output.
    pub(crate) fn clear_progress(&mut self) {
        self.progress.clear();
    }

    /// Returns the number of records that could not be read.
    pub(crate) fn problems(&self) -> u64 {
        self.problems.count
    }

    /// Warns of XID lines that could not be parsed, if there are any.
    pub(crate) fn warn_of_garbled(&self) {
        GarbledLines::warn(self.files.iter().filter_map(|input| match &input.form {
            Form::Log(log) => Some(&log.garbled),
            Form::Events(_) => None,
        }));
    }

    /// Returns the number of events that are older than the one before in the same file.
    pub(crate) fn backwards(&self) -> u64 {
        self.files.iter().map(|input| input.backwards).sum()
    }

    fn refill(&mut self, index: usize) -> anyhow::Result<()> {
        let Some(input) = self.files.get_mut(index) else {
            return Ok(());
        };
        input.fill(&mut self.problems, &mut self.progress, &self.read)?;
        if let Some(item) = input.waiting.front() {
            self.next.push(Reverse((item.at, index)));
        }
        Ok(())
    }
}

// === impl Form ===

impl Form {
    /// Returns the number of the current line.
    fn lines(&self) -> u64 {
        match self {
            Self::Log(log) => log.line,
            Self::Events(objects) => objects.line(),
        }
    }
}

// === impl InputFile ===

impl InputFile {
    fn open(argument: &str, catalog: &Arc<Catalog>, read: &BytesRead) -> anyhow::Result<Self> {
        let (node, path) = node_and_path(argument);
        let (name, mut reader): (&str, Box<dyn BufRead>) = if path == "-" {
            let stdin = BufReader::with_capacity(BUFFER, io::stdin());
            ("standard input", Box::new(stdin))
        } else {
            let file = File::open(path).with_context(|| format!("cannot open {path}"))?;
            if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
                bail!("{path} is a directory; name the files in it");
            }
            (path, Box::new(BufReader::with_capacity(BUFFER, file)))
        };
        let begin = reader
            .fill_buf()
            .with_context(|| format!("cannot read {path}"))?;
        if let Some(what) = no_text(begin, "gpuwarden replay NODE=-") {
            bail!("{name} is {what}");
        }
        let holds_events = holds_events(begin);
        let reader: Box<dyn BufRead> = Box::new(Counted::new(reader, read.clone()));
        let form = if holds_events {
            Form::Events(Objects::new(reader))
        } else {
            let node = node.map_or_else(|| node_of(path), str::to_owned);
            Form::Log(Box::new(Log::new(reader, node, catalog)))
        };
        Ok(Self {
            name: name.to_owned(),
            form,
            waiting: VecDeque::new(),
            newest: None,
            backwards: 0,
        })
    }

    /// Reads until an item is waiting, or to the end.
    fn fill(
        &mut self,
        problems: &mut Problems,
        progress: &mut Progress,
        bytes: &BytesRead,
    ) -> anyhow::Result<()> {
        while self.waiting.is_empty() {
            progress.step(bytes.get(), || self.form.lines());
            let read = match &mut self.form {
                Form::Log(log) => log.read(&self.name, self.newest, problems),
                Form::Events(objects) => read_event(objects, &self.name, self.newest, problems),
            };
            problems.write(progress);
            let Some(items) = read.with_context(|| format!("cannot read {}", self.name))? else {
                return Ok(());
            };
            for mut item in items {
                let newest = self.newest.map_or(item.at, |newest| newest.max(item.at));
                self.backwards += u64::from(item.at < newest);
                item.at = newest;
                self.newest = Some(newest);
                self.waiting.push_back(item);
            }
        }
        Ok(())
    }
}

/// Splits an argument into node and path. A path may contain `=`; a node's name contains no slash.
fn node_and_path(argument: &str) -> (Option<&str>, &str) {
    match argument.split_once('=') {
        Some((node, path)) if !node.is_empty() && !node.contains('/') => (Some(node), path),
        _ => (None, argument),
    }
}

/// Returns the size of the file of an argument; `None` for standard input and the like.
fn size(argument: &str) -> Option<u64> {
    let (_, path) = node_and_path(argument);
    let metadata = std::fs::metadata(path).ok()?;
    metadata.is_file().then_some(metadata.len())
}

/// Returns true if a file with this beginning contains events as JSON. A kernel log may begin with
/// `[` too, but a number follows.
fn holds_events(begin: &[u8]) -> bool {
    let mut bytes = begin.iter().filter(|byte| !byte.is_ascii_whitespace());
    match bytes.next() {
        Some(b'{') => true,
        Some(b'[') => matches!(bytes.next(), Some(b'{' | b']') | None),
        _ => false,
    }
}

/// Returns the default node of a log: the file's name up to its first dot; for standard input, this
/// machine.
fn node_of(path: &str) -> String {
    let file = std::path::Path::new(path)
        .file_name()
        .map(|name| name.to_string_lossy());
    let stem = file
        .as_deref()
        .and_then(|name| name.split('.').find(|part| !part.is_empty()));
    match stem {
        Some(stem) if path != "-" => stem.to_owned(),
        _ => host::identity::host_name().unwrap_or_else(|| "localhost".to_owned()),
    }
}

/// Reads the next event of an export; `None` at the end.
fn read_event(
    objects: &mut Objects<Box<dyn BufRead>>,
    name: &str,
    newest: Option<Timestamp>,
    problems: &mut Problems,
) -> io::Result<Option<Vec<Item>>> {
    let Some(object) = objects.next()? else {
        return Ok(None);
    };
    let item = object
        .text
        .map_err(str::to_owned)
        .and_then(|text| event_of(&text, newest));
    match item {
        Ok(item) => Ok(Some(vec![item])),
        Err(what) => {
            problems.name(name, object.line, &what);
            Ok(Some(Vec::new()))
        }
    }
}

/// Parses an event in the form of the API (`seq`, `createdAt`, `event`), in its public form alone, or
/// in that of `NVSentinel`'s logs and store.
fn event_of(text: &[u8], newest: Option<Timestamp>) -> Result<Item, String> {
    let mut value: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let created_at = value
        .get("createdAt")
        .map(created_at)
        .transpose()?
        .flatten();
    if value.get("__CURSOR").is_some() {
        return Err(
            "is an entry of `journalctl -o json`; write the kernel log with `journalctl -k -o \
             short-iso-precise`"
                .to_owned(),
        );
    }
    if value.get("event").is_some_and(Value::is_object) {
        value = value.get_mut("event").map(Value::take).unwrap_or_default();
    } else if let Some(stored) = json::stored::take_event(&mut value) {
        value = stored;
    }
    let mut event = json::stored::from_value(value).map_err(|error| error.to_string())?;
    validate(&event).map_err(|error| error.to_string())?;
    let own = event.generated_timestamp.and_then(json::timestamp);
    let at = created_at
        .or(own)
        .or(newest)
        .unwrap_or(Timestamp::UNIX_EPOCH);
    normalise(&mut event, at);
    Ok(Item { at, event })
}

/// Parses the time of storage: RFC 3339, or the form of `MongoDB` exports, `{"$date": ...}`.
fn created_at(value: &Value) -> Result<Option<Timestamp>, String> {
    let date = value.get("$date").unwrap_or(value);
    let millis = match date.get("$numberLong").and_then(Value::as_str) {
        Some(text) => text.parse().ok(),
        None => date.as_i64(),
    };
    if let Some(millis) = millis {
        let read = Timestamp::from_millisecond(millis);
        return read
            .map(Some)
            .map_err(|error| format!("createdAt: {error}"));
    }
    let read = date.as_str().map(str::parse).transpose();
    read.map_err(|error| format!("createdAt: {error}"))
}

// === impl RecentIds ===

impl RecentIds {
    /// Remembers an id. Returns false if it is known already.
    fn insert(&mut self, id: &str) -> bool {
        if !self.ids.insert(id.to_owned()) {
            return false;
        }
        self.order.push_back(id.to_owned());
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        true
    }
}

// === impl Problems ===

impl Problems {
    fn name(&mut self, file: &str, line: u64, what: &str) {
        self.count += 1;
        match self.count {
            1..=NAMED => self.texts.push(format!("{file}:{line}: {what}")),
            count if count == NAMED + 1 => self.texts.push("further ones are only counted".into()),
            _ => {}
        }
    }

    fn write(&mut self, progress: &mut Progress) {
        for text in self.texts.drain(..) {
            progress.clear();
            output::warning(&text);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use host::kernel_log::LINE_MAX;

    use super::*;
    use crate::commands::progress::Screen;

    #[test]
    fn a_log_without_a_fault_shows_its_progress_and_problems_take_it_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("n1.log");
        let mut text = "[    1.000000] usb 1-1: nothing of interest\n".repeat(20_000);
        text.push_str(&"x".repeat(LINE_MAX + 1));
        std::fs::write(&path, &text).unwrap();
        let screen = Screen::default();
        let progress = Progress::to(Some(Box::new(screen.clone())), Duration::ZERO, None);
        let files = [path.to_str().unwrap().to_owned()];
        let mut inputs = Inputs::with(&files, &[], progress).unwrap();
        assert!(inputs.next().unwrap().is_none());
        let shown = screen.text();
        assert!(shown.matches(" lines").count() >= 2, "{shown:?}");
        assert!(shown.ends_with("\r\x1b[K"), "{shown:?}");
        assert_eq!(inputs.problems(), 1);
    }

    #[test]
    fn events_of_nvsentinels_logs_and_store_are_read() {
        let fields = r#""agent":"gpu-health-monitor","isFatal":true,"recommendedAction":15,"nodeName":"n1",
            "checkName":"GpuMemWatch","componentClass":"GPU","version":1,"processingStrategy":1"#;
        let of_log =
            format!(r#"{{{fields},"generatedTimestamp":{{"seconds":1790000000,"nanos":7000}}}}"#);
        let lower = of_log.to_lowercase().replace("gpumemwatch", "GpuMemWatch");
        let stored = |date: &str| format!(r#"{{"createdAt":{date},"healthevent":{lower}}}"#);
        let generated = "2026-09-21T14:13:20.000007Z";
        for (text, at) in [
            (of_log.clone(), generated),
            (stored("null"), generated),
            (stored(r#""2026-09-22T00:00:00Z""#), "2026-09-22T00:00:00Z"),
            (
                stored(r#"{"$date":"2026-09-22T00:00:00Z"}"#),
                "2026-09-22T00:00:00Z",
            ),
            (
                stored(r#"{"$date":{"$numberLong":"1790035200000"}}"#),
                "2026-09-22T00:00:00Z",
            ),
            (stored(r#"{"$date":1790035200000}"#), "2026-09-22T00:00:00Z"),
        ] {
            let item =
                event_of(text.as_bytes(), None).unwrap_or_else(|what| panic!("{text}: {what}"));
            assert_eq!(item.at.to_string(), at, "{text}");
            assert_eq!(
                (item.event.node_name.as_str(), item.event.recommended_action),
                ("n1", 15)
            );
            assert!(item.event.is_fatal && item.event.check_name == "GpuMemWatch");
            let own = item.event.generated_timestamp.and_then(json::timestamp);
            assert_eq!(own.map(|own| own.to_string()).as_deref(), Some(generated));
        }
        let error = event_of(stored(r#"{"$date":"soon"}"#).as_bytes(), None)
            .err()
            .unwrap();
        assert!(error.starts_with("createdAt: "), "{error}");
    }

    #[test]
    fn logs_and_events_are_told_apart() {
        for (begin, events) in [
            ("[    1.000000] NVRM: Xid", false),
            ("<3>[ 1.0] x", false),
            ("", false),
            ("{\"seq\":1}", true),
            ("[\n  {\n", true),
            ("[]\n", true),
            ("[", true),
        ] {
            assert_eq!(holds_events(begin.as_bytes()), events, "{begin}");
        }
    }

    #[test]
    fn a_log_belongs_to_the_node_of_its_name() {
        assert_eq!(node_of("/logs/gpu-7.log"), "gpu-7");
        assert_eq!(node_of("gpu-7"), "gpu-7");
        assert_eq!(node_of(".hidden.log"), "hidden");
    }
}
