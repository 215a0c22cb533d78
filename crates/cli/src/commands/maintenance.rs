//! `gpuwarden maintenance`: the announced maintenances of nodes, and what became of them.

use anyhow::bail;
use console::api::MaintenancesView;
use jiff::Timestamp;
use notices::Record;

use crate::EXIT_OK;
use crate::args::MaintenanceArgs;
use crate::client::Client;
use crate::output::{self, plain, say};

pub(super) async fn execute(args: &MaintenanceArgs) -> anyhow::Result<u8> {
    let client = Client::remote(&args.remote).await?;
    let mut view: MaintenancesView = client.get("/api/v1/maintenance").await?;
    if let Some(id) = &args.id {
        view.maintenances.retain(|record| record.id == *id);
        if view.maintenances.is_empty() {
            bail!("no maintenance {id:?} is known; `gpuwarden maintenance` lists them");
        }
    }
    if output::structured(args.output.output, &view)? {
        return Ok(EXIT_OK);
    }
    if args.id.is_some() {
        for record in &view.maintenances {
            details(record)?;
        }
    } else {
        list(&view)?;
    }
    Ok(EXIT_OK)
}

fn list(view: &MaintenancesView) -> anyhow::Result<()> {
    if view.maintenances.is_empty() {
        say!("no maintenance is announced")?;
        return Ok(());
    }
    let row = |record: &Record| {
        vec![
            plain(&record.id),
            plain(&record.node),
            plain(&record.provider),
            record.kind.name().to_owned(),
            time(record.start),
            record.state.name().to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = view.maintenances.iter().map(row).collect();
    let heads = ["ID", "NODE", "PROVIDER", "KIND", "START", "STATE"];
    output::table(&heads, &rows)?;
    Ok(())
}

fn details(record: &Record) -> anyhow::Result<()> {
    say!("maintenance  {}", plain(&record.id))?;
    say!("node         {}", plain(&record.node))?;
    let (provider, word) = (plain(&record.provider), plain(&record.word));
    say!("provider     {provider}, which says {word}")?;
    say!("kind         {}", record.kind.name())?;
    say!(
        "scheduled    {} to {}",
        time(record.start),
        time(record.end)
    )?;
    say!("announced    {}", output::time(record.received))?;
    for (name, at) in [
        ("out since", record.out_since),
        ("begun", record.began),
        ("over", record.ended),
        ("notice gone", record.vanished),
    ] {
        if let Some(at) = at {
            say!("{name:<12} {}", output::time(at))?;
        }
    }
    let asks = if record.state.asks_a_person() {
        ": look at the node, and return it by `gpuwarden release`"
    } else {
        ""
    };
    say!("state        {}{asks}", record.state.name())?;
    Ok(())
}

fn time(at: Option<Timestamp>) -> String {
    at.map_or_else(|| "unknown".to_owned(), output::time)
}
