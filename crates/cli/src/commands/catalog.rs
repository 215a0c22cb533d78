//! `gpuwarden catalog`: the meaning of fault codes, and the changes of an operator's file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use contract::RecommendedAction;
use diagnosis::catalog::{Catalog, Change, Dcgm, Nic, Nvlink5, Overrides, Sxid, SxidClass, Xid};
use serde::Serialize;

use crate::args::{CatalogArgs, CatalogCommand, CatalogDiffArgs, CatalogKind, Format};
use crate::output::{self, say};
use crate::{EXIT_FAILED, EXIT_OK};

/// Row of any kind; fields that its kind lacks are left out.
#[derive(Default, Serialize)]
struct CatalogRow<'a> {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<u32>,
    #[serde(skip_serializing_if = "str::is_empty")]
    mnemonic: &'a str,
    /// Name of the row within its kind, for the text table.
    #[serde(skip)]
    title: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    before_r575: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from_r575: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lines: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    looked_for: Option<String>,
    meaning: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<&'static str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    severity: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    fatal: Option<bool>,
    #[serde(skip_serializing_if = "str::is_empty")]
    recommended_action: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    scope: &'a str,
    note: &'a str,
    confidence: &'static str,
    source: &'a str,
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
    let text = std::fs::read_to_string(file)
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
    let row = |change: &Change| {
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

fn rows(kind: CatalogKind) -> Vec<CatalogRow<'static>> {
    let catalog = Catalog::builtin();
    match kind {
        CatalogKind::Xid => catalog.xids().map(CatalogRow::xid).collect(),
        CatalogKind::Sxid => catalog.sxids().map(CatalogRow::sxid).collect(),
        CatalogKind::Nvlink5 => catalog.nvlink5().iter().map(CatalogRow::nvlink5).collect(),
        CatalogKind::Dcgm => catalog.dcgms().iter().map(CatalogRow::dcgm).collect(),
        CatalogKind::Nic => catalog.nics().iter().map(CatalogRow::nic).collect(),
    }
}

/// Returns the rows of a code. A code of DCGM has a number and names, a NIC pattern only a name.
fn rows_of(kind: CatalogKind, code: &str) -> anyhow::Result<Vec<CatalogRow<'static>>> {
    let number = code.parse::<u32>().ok();
    let has_names = matches!(kind, CatalogKind::Dcgm | CatalogKind::Nic);
    if number.is_none() && !has_names {
        bail!(
            "'{code}' is no code of kind {}: a code is a number",
            kind.name()
        );
    }
    let mut rows = rows(kind);
    rows.retain(|row| {
        let is_named = has_names && [row.name, row.alias].contains(&Some(code));
        is_named || (number.is_some() && row.code == number)
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
    let shown = |row: &&CatalogRow<'_>| format == Format::Wide || row.scope != "unused";
    let cells = |row: &CatalogRow<'_>| {
        let fatal = match row.fatal {
            Some(true) => "fatal",
            Some(false) => "",
            None => "by the line",
        };
        [
            row.kind,
            &row.title,
            fatal,
            row.recommended_action,
            row.meaning,
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let rows: Vec<_> = rows.iter().filter(shown).map(cells).collect();
    output::table(&["KIND", "ROW", "FATAL", "ACTION", "MEANING"], &rows)?;
    Ok(())
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
        RecommendedAction::Unknown => "not known",
    }
}

// === impl CatalogRow ===

impl<'a> CatalogRow<'a> {
    fn xid(row: &'a Xid) -> Self {
        Self {
            kind: "xid",
            title: row.code.to_string(),
            code: Some(row.code),
            mnemonic: &row.mnemonic,
            meaning: &row.meaning,
            fatal: Some(row.fatal),
            recommended_action: row.action.as_str_name(),
            scope: &row.scope,
            note: &row.note,
            confidence: row.confidence.as_str(),
            source: &row.source,
            ..Self::default()
        }
    }

    fn sxid(row: &'a Sxid) -> Self {
        Self {
            kind: "sxid",
            title: row.code.to_string(),
            code: Some(row.code),
            name: Some(&row.name),
            meaning: &row.meaning,
            class: Some(row.class.as_str()),
            // The line's own word decides; without one, only the class "always fatal" is fatal.
            fatal: None,
            recommended_action: match row.class {
                SxidClass::NonFatal => RecommendedAction::None.as_str_name(),
                _ => RecommendedAction::ContactSupport.as_str_name(),
            },
            note: &row.note,
            confidence: row.confidence.as_str(),
            source: &row.source,
            ..Self::default()
        }
    }

    fn nvlink5(row: &'a Nvlink5) -> Self {
        Self {
            kind: "nvlink5",
            title: row.key(),
            code: Some(row.code),
            name: Some(&row.unit),
            before_r575: Some(row.before_r575.to_string()),
            from_r575: Some(row.from_r575.to_string()),
            status: Some(
                row.status
                    .iter()
                    .map(|word| format!("{word:#010x}"))
                    .collect(),
            ),
            meaning: &row.meaning,
            fatal: Some(row.fatal),
            recommended_action: row.action.as_str_name(),
            note: &row.note,
            confidence: row.confidence.as_str(),
            source: &row.source,
            ..Self::default()
        }
    }

    fn dcgm(row: &'a Dcgm) -> Self {
        Self {
            kind: "dcgm",
            title: row.name.to_string(),
            code: row.code,
            name: Some(&row.name),
            alias: row.alias.as_deref(),
            severity: &row.severity,
            meaning: &row.meaning,
            fatal: Some(row.fatal),
            recommended_action: row.action.as_str_name(),
            note: &row.note,
            confidence: row.confidence.as_str(),
            source: &row.source,
            ..Self::default()
        }
    }

    fn nic(row: &'a Nic) -> Self {
        Self {
            kind: "nic",
            title: row.name.to_string(),
            name: Some(&row.name),
            driver: Some(row.driver.as_str()),
            lines: Some(row.pattern.to_string()),
            looked_for: Some(row.shown()),
            meaning: &row.meaning,
            fatal: Some(row.fatal),
            recommended_action: row.action.as_str_name(),
            note: &row.note,
            confidence: row.confidence.as_str(),
            source: &row.source,
            ..Self::default()
        }
    }

    fn show(&self) -> anyhow::Result<()> {
        let line = |key: &str, value: &str| say!("  {key:<11}{value}");
        let names = [self.mnemonic, self.name.unwrap_or_default()];
        let code = self.code.map(|code| format!(" {code}")).unwrap_or_default();
        let names: Vec<&str> = names.into_iter().filter(|name| !name.is_empty()).collect();
        let kind = match self.kind {
            "xid" => "XID",
            "sxid" => "SXid",
            "nvlink5" => "NVLink 5, XID",
            "dcgm" => "DCGM",
            _ => "NIC",
        };
        say!("{kind}{code} {}", names.join(" "))?;
        line("meaning", self.meaning)?;
        for (key, value) in [
            ("scope", Some(self.scope).filter(|scope| !scope.is_empty())),
            ("also", self.alias),
            ("class", self.class),
            (
                "severity",
                Some(self.severity).filter(|word| !word.is_empty()),
            ),
            ("driver", self.driver),
            ("lines", self.lines.as_deref()),
            ("looked for", self.looked_for.as_deref()),
            ("< R575", self.before_r575.as_deref()),
            (">= R575", self.from_r575.as_deref()),
        ] {
            if let Some(value) = value {
                line(key, value)?;
            }
        }
        if let Some(status) = &self.status {
            let any = status.is_empty().then(|| "any".to_owned());
            line("status", &any.unwrap_or_else(|| status.join(" or ")))?;
        }
        if let Some(fatal) = self.fatal {
            line("fatal", if fatal { "yes" } else { "no" })?;
        }
        let action = RecommendedAction::from_str_name(self.recommended_action);
        if let Some(action) = action.filter(|_| self.kind != "sxid") {
            let what = described(action);
            line("action", &format!("{}: {what}", action.as_str_name()))?;
        }
        line("gpuwarden", self.effect())?;
        if !self.note.is_empty() {
            line("note", self.note)?;
        }
        line("confidence", self.confidence)?;
        line("source", self.source)?;
        Ok(())
    }

    /// Returns what gpuwarden does about an event of the row.
    fn effect(&self) -> &'static str {
        match (self.kind, self.code, self.fatal) {
            ("xid", Some(154), _) => {
                "follows the action in the line: a reset or reboot is fatal, None ends the fault"
            }
            ("xid", Some(144..=150), _) => {
                "follows the words of the line, see gpuwarden catalog nvlink5; this row is for a line \
                 without them"
            }
            ("sxid", ..) => {
                "follows the word of the line: Fatal recommends CONTACT_SUPPORT, Non-fatal no action; \
                 without a word only 'always fatal' is fatal"
            }
            ("nic", ..) if self.looked_for.as_deref() == Some("no") => {
                "ignores these lines unless a catalogue file enables them"
            }
            ("nic", ..) if self.looked_for.as_deref() != Some("yes") => {
                "stores and shows the event; it opens no fault unless a catalogue file enables it"
            }
            ("dcgm", ..) if self.name == Some("GPU_TEMP_HW_SLOWDOWN_VIOLATION") => {
                "stores the event; it opens no fault"
            }
            (_, _, Some(true)) => {
                "records a fatal event; the built-in policy takes the node out until it recovers"
            }
            _ => "records a non-fatal event; the built-in policy leaves the node in service",
        }
    }
}
