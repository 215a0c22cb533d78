//! `gpuwarden catalog`: what a code means.

use anyhow::bail;
use contract::RecommendedAction;
use domain::catalog::{self, Xid};
use serde::Serialize;

use crate::args::{CatalogArgs, Format};
use crate::output;
use crate::{EXIT_FAILED, EXIT_OK};

#[derive(Serialize)]
struct Row {
    kind: &'static str,
    code: u32,
    mnemonic: &'static str,
    meaning: &'static str,
    fatal: bool,
    recommended_action: &'static str,
    scope: &'static str,
    note: &'static str,
    source: &'static str,
}

pub(super) fn execute(args: &CatalogArgs) -> anyhow::Result<u8> {
    match args.kind.as_deref() {
        None | Some("xid") => {}
        Some(other) => bail!("no codes of kind '{other}' are known; the kind is xid"),
    }
    let Some(code) = args.code else {
        list(args.output.output)?;
        return Ok(EXIT_OK);
    };
    let Some(row) = catalog::xid(code) else {
        output::line(&format!(
            "XID {code} is not in the catalogue. Its lines are events with action UNKNOWN: shown and \
             kept, and they take no node out."
        ))?;
        return Ok(EXIT_FAILED);
    };
    if output::structured(args.output.output, &Row::of(row))? {
        return Ok(EXIT_OK);
    }
    output::line(&format!("XID {} {}", row.code, row.mnemonic))?;
    output::line(&format!("  meaning   {}", row.meaning))?;
    output::line(&format!("  scope     {}", row.scope))?;
    output::line(&format!(
        "  fatal     {}",
        if row.fatal { "yes" } else { "no" }
    ))?;
    output::line(&format!(
        "  action    {}: {}",
        row.action.as_str_name(),
        what_it_is(row.action)
    ))?;
    output::line(&format!("  gpuwarden {}", what_we_do(row)))?;
    if !row.note.is_empty() {
        output::line(&format!("  note      {}", row.note))?;
    }
    output::line(&format!("  source    {}", row.source))?;
    Ok(EXIT_OK)
}

fn list(format: Format) -> anyhow::Result<()> {
    let rows: Vec<Row> = catalog::xids().into_iter().map(Row::of).collect();
    if output::structured(format, &rows)? {
        return Ok(());
    }
    let mut table = vec![
        ["XID", "FATAL", "ACTION", "SCOPE", "MEANING"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for row in rows
        .iter()
        .filter(|row| format == Format::Wide || row.scope != "unused")
    {
        let fatal = if row.fatal { "fatal" } else { "" };
        table.push(
            [
                &row.code.to_string(),
                fatal,
                row.recommended_action,
                row.scope,
                row.meaning,
            ]
            .map(str::to_owned)
            .to_vec(),
        );
    }
    output::table(&table)?;
    Ok(())
}

fn what_it_is(action: RecommendedAction) -> &'static str {
    match action {
        RecommendedAction::None => "nothing needs to be done to the machine",
        RecommendedAction::ComponentReset => "reset the GPU",
        RecommendedAction::ContactSupport => "a person has to look, with the vendor's support",
        RecommendedAction::RunFielddiag => "run the vendor's field diagnostics",
        RecommendedAction::RestartVm => "restart the virtual machine",
        RecommendedAction::RestartBm => "restart the machine",
        RecommendedAction::ReplaceVm => "replace the machine",
        RecommendedAction::RunDcgmeud => "run the DCGM extended diagnostics",
        RecommendedAction::Custom => "named by the monitor",
        RecommendedAction::Unknown => "not known",
    }
}

fn what_we_do(row: &Xid) -> &'static str {
    if row.code == 154 {
        return "follows what the line itself says: a reset or reboot makes it fatal, None does not";
    }
    if row.fatal {
        "records a fatal event; the built-in policy takes the node out until it recovers"
    } else {
        "records a non-fatal event; the built-in policy leaves the node in service"
    }
}

// === impl Row ===

impl Row {
    fn of(row: &Xid) -> Self {
        Self {
            kind: "xid",
            code: row.code,
            mnemonic: row.mnemonic,
            meaning: row.meaning,
            fatal: row.fatal,
            recommended_action: row.action.as_str_name(),
            scope: row.scope,
            note: row.note,
            source: row.source,
        }
    }
}
