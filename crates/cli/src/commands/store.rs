//! `gpuwarden store inspect`: the contents of the event store's file, without a server.

use store::{Count, Inspection, NODES, Position, StoreUrl};

use crate::args::{StoreArgs, StoreCommand};
use crate::exit_code;
use crate::output::{self, say};
use crate::settings::{ClientSettings, default_data_dir};

pub(super) fn execute(args: &StoreArgs) -> anyhow::Result<u8> {
    let StoreCommand::Inspect {
        config,
        data_dir,
        output,
    } = &args.what;
    let file = ClientSettings::read(config.as_deref())?;
    let named = data_dir.clone().or(file.data_dir);
    let dir = named.map_or_else(default_data_dir, Ok)?;
    let named = "--data-dir names the data directory of another gpuwarden";
    let url = StoreUrl::in_data_dir(&dir);
    if let Some(file) = url.file().filter(|file| !file.exists()) {
        anyhow::bail!("there is no {}; {named}", file.display());
    }
    let found = url
        .inspect()
        .map_err(|error| anyhow::Error::from(error).context(format!("cannot inspect {url}")))?;
    if !output::structured(output.output, &found)? {
        text(&found)?;
    }
    let sound = found.damage.is_empty() && found.unreadable == 0;
    Ok(exit_code(sound))
}

fn text(found: &Inspection) -> anyhow::Result<()> {
    say!(
        "{}: schema {}, {}, of that {} log and {} free",
        found.path.display(),
        found.schema_version,
        size(found.bytes),
        size(found.log_bytes),
        size(found.free_bytes)
    )?;
    let history = match found.history_up_to {
        Position::START => String::new(),
        seq => format!(", events up to position {seq} are history"),
    };
    say!("store    {}{history}", output::plain(&found.id))?;
    let sound = match found.damage.as_slice() {
        [] => "sound".to_owned(),
        damage => format!(
            "DAMAGED: keep a copy of the file and its -wal, then move both away\n  {}",
            damage.join("\n  ")
        ),
    };
    say!("check    {sound}")?;
    let span = match (found.oldest, found.newest) {
        (Some(oldest), Some(newest)) => format!(", received {oldest} to {newest}"),
        _ => String::new(),
    };
    say!(
        "events   {}{span}, newest position {}",
        found.events,
        found.newest_position
    )?;
    unreadable(found)?;
    say!("journal  {} entries", found.journal_entries)?;
    for consumer in &found.consumers {
        say!(
            "reader   {} is done up to {}, {} behind, keeps {}",
            consumer.name,
            consumer.token,
            consumer.behind,
            size(consumer.state_bytes)
        )?;
    }
    counts("CHECK", &found.checks)?;
    counts("NODE", &found.nodes)?;
    if found.nodes.len() == NODES {
        say!("  (the {NODES} nodes with the most events)")?;
    }
    Ok(())
}

/// Writes the events that cannot be read.
fn unreadable(found: &Inspection) -> anyhow::Result<()> {
    if found.unreadable == 0 {
        return Ok(());
    }
    say!(
        "         {} cannot be read and are skipped",
        found.unreadable
    )?;
    for event in &found.unreadable_events {
        say!(
            "           position {}, id {}: {}",
            event.position,
            output::plain(&event.id),
            output::plain(&event.error)
        )?;
    }
    Ok(())
}

fn counts(of: &str, counts: &[Count]) -> anyhow::Result<()> {
    if counts.is_empty() {
        return Ok(());
    }
    output::line("")?;
    let row = |count: &Count| vec![output::plain(&count.name), count.events.to_string()];
    let rows: Vec<_> = counts.iter().map(row).collect();
    output::table(&[of, "EVENTS"], &rows)?;
    Ok(())
}

/// Returns a size in its largest unit.
fn size(bytes: u64) -> String {
    let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{}.{} {name}", bytes / unit, bytes % unit * 10 / unit),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_said_in_the_unit_that_fits() {
        for (bytes, said) in [
            (0, "0 bytes"),
            (1_023, "1023 bytes"),
            (1_536, "1.5 KiB"),
            (5 << 20, "5.0 MiB"),
            (u64::MAX, "17179869183.9 GiB"),
        ] {
            assert_eq!(size(bytes), said);
        }
    }
}
