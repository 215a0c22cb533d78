//! `gpuwarden catalog`: the meaning of fault codes, and the changes of an operator's file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use contract::findings::MAX_FILE_BYTES;
use contract::{RecommendedAction, keys};
use diagnosis::catalog::{
    Catalog, CatalogChange, Confidence, DcgmCode, Nic, Nvlink5, Overrides, Sxid, SxidClass, Xid,
};
use diagnosis::sympathy;
use runtime::text_file;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::args::{CatalogArgs, CatalogCommand, CatalogDiffArgs, CatalogKind, Format};
use crate::output::{self, say};
use crate::{EXIT_FAILED, EXIT_OK};

/// Labels of the text fields of a row, in the order of the text.
const LABELS: [(&str, &str); 10] = [
    ("meaning", "meaning"),
    ("scope", "scope"),
    ("also", "alias"),
    ("class", "class"),
    ("severity", "severity"),
    ("driver", "driver"),
    ("lines", "lines"),
    ("looked for", "looked_for"),
    ("< R575", "before_r575"),
    (">= R575", "from_r575"),
];

/// Note, confidence and source of a row.
type Origin<'a> = (&'a str, Confidence, &'a str);

/// Row of any kind.
struct Row {
    kind: CatalogKind,
    /// Name of the row within its kind, for the text table.
    title: String,
    /// Fields in the order of the JSON document, without those that the kind lacks.
    fields: Vec<(&'static str, Value)>,
}

pub(super) fn execute(args: &CatalogArgs) -> anyhow::Result<u8> {
    if let Some(CatalogCommand::Diff(args)) = &args.command {
        return diff(args);
    }
    let (Some(kind), Some(code)) = (args.kind, &args.code) else {
        list(args.kind, args.output.output)?;
        return Ok(EXIT_OK);
    };
    let rows = rows_of(kind, code)?;
    if rows.is_empty() {
        output::line(&unknown(kind, code))?;
        return Ok(EXIT_FAILED);
    }
    let structured = match rows.as_slice() {
        // A single object for kinds with one row per code.
        [row] if kind != CatalogKind::Nvlink5 => output::structured(args.output.output, row)?,
        rows => output::structured(args.output.output, &rows)?,
    };
    if structured {
        return Ok(EXIT_OK);
    }
    for row in &rows {
        row.show()?;
    }
    Ok(EXIT_OK)
}

/// Returns the built-in catalogue with the changes of these files; a later file has precedence.
pub fn load(files: &[PathBuf]) -> anyhow::Result<Catalog> {
    let mut catalog = Catalog::builtin().clone();
    for file in files {
        catalog = catalog.with(&read(file)?);
    }
    Ok(catalog)
}

fn read(file: &Path) -> anyhow::Result<Overrides> {
    let shown = file.display().to_string();
    let text = text_file::read(file, MAX_FILE_BYTES)
        .with_context(|| format!("cannot read the catalogue file {shown}"))?;
    Ok(Overrides::parse(&text, &shown)?)
}

fn diff(args: &CatalogDiffArgs) -> anyhow::Result<u8> {
    let changes = Catalog::builtin().changes_to(&load(&args.files)?);
    if output::structured(args.output.output, &changes)? {
        return Ok(EXIT_OK);
    }
    if changes.is_empty() {
        output::line("nothing is changed")?;
        return Ok(EXIT_OK);
    }
    let shown = |text: &str| match text {
        "" => "-".to_owned(),
        text => output::plain(text),
    };
    let row = |change: &CatalogChange| {
        vec![
            change.kind.to_owned(),
            output::plain(&change.key),
            change.field.to_owned(),
            shown(&change.before),
            shown(&change.after),
            output::plain(&change.by),
        ]
    };
    let rows: Vec<_> = changes.iter().map(row).collect();
    let heads = ["KIND", "ROW", "FIELD", "BEFORE", "AFTER", "BY"];
    output::table(&heads, &rows)?;
    Ok(EXIT_OK)
}

fn rows(kind: CatalogKind) -> Vec<Row> {
    let catalog = Catalog::builtin();
    match kind {
        CatalogKind::Xid => catalog.xids().map(Row::xid).collect(),
        CatalogKind::Sxid => catalog.sxids().map(Row::sxid).collect(),
        CatalogKind::Nvlink5 => catalog.nvlink5().iter().map(Row::nvlink5).collect(),
        CatalogKind::Dcgm => catalog.dcgms().iter().map(Row::dcgm).collect(),
        CatalogKind::Nic => catalog.nics().iter().map(Row::nic).collect(),
    }
}

/// Returns the rows of a code. A code of DCGM has a number and names, a NIC pattern only a name.
fn rows_of(kind: CatalogKind, code: &str) -> anyhow::Result<Vec<Row>> {
    let number = code.parse::<u32>().ok();
    let has_names = matches!(kind, CatalogKind::Dcgm | CatalogKind::Nic);
    if number.is_none() && !has_names {
        bail!(
            "'{code}' is not a code of kind {}: a code is a number",
            kind.name()
        );
    }
    let mut rows = rows(kind);
    rows.retain(|row| {
        let is_named = has_names && [row.text("name"), row.text("alias")].contains(&code);
        is_named || (number.is_some() && row.code() == number.map(u64::from))
    });
    Ok(rows)
}

fn unknown(kind: CatalogKind, code: &str) -> String {
    match kind {
        CatalogKind::Xid => format!(
            "XID {code} is not in the catalogue. Its events have the action UNKNOWN: they are stored and \
             shown, and take no node out of service."
        ),
        CatalogKind::Sxid => format!(
            "SXid {code} is not in the catalogue. Its events have the severity that the driver prints."
        ),
        CatalogKind::Nvlink5 => format!("there are no NVLink 5 rows for XID {code}"),
        CatalogKind::Dcgm => format!(
            "DCGM code {code} is not in the catalogue. Its events have the action UNKNOWN: they are stored \
             and shown, and take no node out of service."
        ),
        CatalogKind::Nic => format!("there is no NIC pattern '{code}'"),
    }
}

fn list(kind: Option<CatalogKind>, format: Format) -> anyhow::Result<()> {
    let kinds = match &kind {
        Some(kind) => std::slice::from_ref(kind),
        None => CatalogKind::value_variants(),
    };
    let rows: Vec<_> = kinds.iter().flat_map(|kind| rows(*kind)).collect();
    if output::structured(format, &rows)? {
        return Ok(());
    }
    let shown = |row: &&Row| format == Format::Wide || row.text("scope") != "unused";
    let cells = |row: &Row| {
        let fatal = match row.fatal() {
            Some(true) => "fatal",
            Some(false) => "",
            None => "by the line",
        };
        let (action, meaning) = (row.text("recommended_action"), row.text("meaning"));
        let cells = [row.kind.name(), &row.title, fatal, action, meaning];
        cells.map(str::to_owned).to_vec()
    };
    let rows: Vec<_> = rows.iter().filter(shown).map(cells).collect();
    output::table(&["KIND", "ROW", "FATAL", "ACTION", "MEANING"], &rows)?;
    Ok(())
}

/// Returns the faults that explain an XID, with the reason and the source; null without any.
fn follows(xid: u32) -> Value {
    let rows = sympathy::sympathies().iter();
    let rows = rows.filter(|row| row.follower.is(keys::CHECK_XID, &xid.to_string()));
    let primaries: Vec<String> = rows.map(ToString::to_string).collect();
    if primaries.is_empty() {
        return Value::Null;
    }
    json!(primaries)
}

fn described(action: RecommendedAction) -> &'static str {
    match action {
        RecommendedAction::None => "no action is needed",
        RecommendedAction::ComponentReset => "reset the GPU",
        RecommendedAction::ContactSupport => {
            "a person has to investigate, with the vendor's support"
        }
        RecommendedAction::RunFielddiag => "run the vendor's field diagnostics",
        RecommendedAction::RestartVm => "restart the virtual machine",
        RecommendedAction::RestartBm => "restart the machine",
        RecommendedAction::ReplaceVm => "replace the machine",
        RecommendedAction::RunDcgmeud => "run the DCGM extended diagnostics",
        RecommendedAction::Custom => "named by the monitor",
        RecommendedAction::Unknown => "unknown",
    }
}

// === impl Row ===

impl Row {
    fn new(
        kind: CatalogKind,
        title: String,
        fields: &[(&'static str, Value)],
        origin: &Origin<'_>,
    ) -> Self {
        let is_set = |value: &Value| !value.is_null() && value.as_str() != Some("");
        let set = fields.iter().filter(|(_, value)| is_set(value));
        let end = [
            ("note", json!(origin.0)),
            ("confidence", json!(origin.1.as_str())),
            ("source", json!(origin.2)),
        ];
        Self {
            kind,
            title,
            fields: set.cloned().chain(end).collect(),
        }
    }

    fn xid(row: &Xid) -> Self {
        let fields = [
            ("code", json!(row.code)),
            ("mnemonic", json!(row.mnemonic)),
            ("meaning", json!(row.meaning)),
            ("fatal", json!(row.fatal)),
            ("recommended_action", json!(row.action.as_str_name())),
            ("scope", json!(row.scope)),
            ("follows", follows(row.code)),
        ];
        let origin = (&*row.note, row.confidence, &*row.source);
        Self::new(CatalogKind::Xid, row.code.to_string(), &fields, &origin)
    }

    fn sxid(row: &Sxid) -> Self {
        let action = match row.class {
            SxidClass::NonFatal => RecommendedAction::None,
            _ => RecommendedAction::ContactSupport,
        };
        // No `fatal`: the line's own word decides; without one, only the class "always fatal" is.
        let fields = [
            ("code", json!(row.code)),
            ("name", json!(row.name)),
            ("meaning", json!(row.meaning)),
            ("class", json!(row.class.as_str())),
            ("recommended_action", json!(action.as_str_name())),
        ];
        let origin = (&*row.note, row.confidence, &*row.source);
        Self::new(CatalogKind::Sxid, row.code.to_string(), &fields, &origin)
    }

    fn nvlink5(row: &Nvlink5) -> Self {
        let status = row.status.iter().map(|word| format!("{word:#010x}"));
        let fields = [
            ("code", json!(row.code)),
            ("name", json!(row.unit)),
            ("before_r575", json!(row.before_r575.to_string())),
            ("from_r575", json!(row.from_r575.to_string())),
            ("status", json!(status.collect::<Vec<_>>())),
            ("meaning", json!(row.meaning)),
            ("fatal", json!(row.fatal)),
            ("recommended_action", json!(row.action.as_str_name())),
        ];
        let origin = (&*row.note, row.confidence, &*row.source);
        Self::new(CatalogKind::Nvlink5, row.key(), &fields, &origin)
    }

    fn dcgm(row: &DcgmCode) -> Self {
        let fields = [
            ("code", json!(row.code)),
            ("name", json!(row.name)),
            ("alias", json!(row.alias)),
            ("meaning", json!(row.meaning)),
            ("severity", json!(row.severity)),
            ("fatal", json!(row.fatal)),
            ("recommended_action", json!(row.action.as_str_name())),
        ];
        let origin = (&*row.note, row.confidence, &*row.source);
        Self::new(CatalogKind::Dcgm, row.name.to_string(), &fields, &origin)
    }

    fn nic(row: &Nic) -> Self {
        let fields = [
            ("name", json!(row.name)),
            ("driver", json!(row.driver.as_str())),
            ("lines", json!(row.pattern.to_string())),
            ("looked_for", json!(row.shown())),
            ("meaning", json!(row.meaning)),
            ("fatal", json!(row.fatal)),
            ("recommended_action", json!(row.action.as_str_name())),
        ];
        let origin = (&*row.note, row.confidence, &*row.source);
        Self::new(CatalogKind::Nic, row.name.to_string(), &fields, &origin)
    }

    fn field(&self, key: &str) -> Option<&Value> {
        let mut fields = self.fields.iter();
        fields.find(|field| field.0 == key).map(|field| &field.1)
    }

    /// Returns the text of a field; empty if the kind lacks it.
    fn text(&self, key: &str) -> &str {
        self.field(key).and_then(Value::as_str).unwrap_or_default()
    }

    fn code(&self) -> Option<u64> {
        self.field("code").and_then(Value::as_u64)
    }

    fn fatal(&self) -> Option<bool> {
        self.field("fatal").and_then(Value::as_bool)
    }

    fn show(&self) -> anyhow::Result<()> {
        let line = |key: &str, value: &str| match value {
            "" => Ok(()),
            value => say!("  {key:<11}{value}"),
        };
        let code = self.code().map(|code| format!(" {code}"));
        let kind = match self.kind {
            CatalogKind::Xid => "XID",
            CatalogKind::Sxid => "SXid",
            CatalogKind::Nvlink5 => "NVLink 5, XID",
            CatalogKind::Dcgm => "DCGM",
            CatalogKind::Nic => "NIC",
        };
        let (mnemonic, name) = (self.text("mnemonic"), self.text("name"));
        say!("{kind}{} {mnemonic}{name}", code.unwrap_or_default())?;
        for (label, key) in LABELS {
            line(label, self.text(key))?;
        }
        if let Some(status) = self.field("status").and_then(Value::as_array) {
            let words: Vec<&str> = status.iter().filter_map(Value::as_str).collect();
            let any = if words.is_empty() { "any" } else { "" };
            line("status", &format!("{any}{}", words.join(" or ")))?;
        }
        if let Some(fatal) = self.fatal() {
            line("fatal", if fatal { "yes" } else { "no" })?;
        }
        let action = RecommendedAction::from_str_name(self.text("recommended_action"));
        if let Some(action) = action.filter(|_| self.kind != CatalogKind::Sxid) {
            let what = described(action);
            line("action", &format!("{}: {what}", action.as_str_name()))?;
        }
        line("gpuwarden", self.effect())?;
        let follows = self.field("follows").and_then(Value::as_array);
        for primary in follows.into_iter().flatten().filter_map(Value::as_str) {
            line("follows", primary)?;
        }
        for key in ["note", "confidence", "source"] {
            line(key, self.text(key))?;
        }
        Ok(())
    }

    /// Returns what gpuwarden does about an event of the row.
    fn effect(&self) -> &'static str {
        let (looked_for, name) = (self.text("looked_for"), self.text("name"));
        match (self.kind, self.code(), self.fatal()) {
            (CatalogKind::Xid, Some(154), _) => {
                "follows the action in the line: a reset or reboot is fatal, None ends the fault"
            }
            (CatalogKind::Xid, Some(144..=150), _) => {
                "follows the words of the line, see gpuwarden catalog nvlink5; this row is for a line \
                 without them"
            }
            (CatalogKind::Sxid, ..) => {
                "follows the word of the line: Fatal recommends CONTACT_SUPPORT, Non-fatal no action; \
                 without a word only 'always fatal' is fatal"
            }
            (CatalogKind::Nic, ..) if looked_for == "no" => {
                "ignores these lines unless a catalogue file enables them"
            }
            (CatalogKind::Nic, ..) if looked_for != "yes" => {
                "stores and shows the event; it opens no fault unless a catalogue file enables it"
            }
            (CatalogKind::Dcgm, ..) if name == "GPU_TEMP_HW_SLOWDOWN_VIOLATION" => {
                "stores the event; it opens no fault"
            }
            (_, _, Some(true)) => {
                "records a fatal event; the built-in policy takes the node out until it recovers"
            }
            _ => "records a non-fatal event; the built-in policy leaves the node in service",
        }
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let kind = [("kind", json!(self.kind.name()))];
        serializer.collect_map(
            kind.iter()
                .chain(&self.fields)
                .map(|(key, value)| (key, value)),
        )
    }
}
