//! Responses of the maintenance APIs of clouds, in parts separated by a line `---`: a page of Google's
//! log, one of Google's instances and one of OCI's events (JSON), one of EC2's events (XML), a document of a
//! metadata service (JSON), and a page of AWS Health's events, one of their descriptions and one of their
//! instances (JSON).

use clouds::aws::{health, instance_status};
use clouds::gcp::entries::Entries;
use clouds::gcp::instances::Instances;
use clouds::metadata::read::Machine;
use clouds::oci::events::Events;
use clouds::{Announced, Told, metadata};
use jiff::Timestamp;
use notices::{Notice, Phase};
use serde_json::Value;

/// Panics if a parser breaks an invariant on this input.
pub fn run(text: &str) {
    let mut parts = text.split("\n---\n");
    let mut next = || parts.next().unwrap_or_default().as_bytes();
    // Some time of the seeds.
    let now = Timestamp::from_second(1_772_323_200).expect("a time");
    if let Ok(page) = Entries::parse(next(), now) {
        announced(&page.announced, "gcp");
        for one in &page.announced {
            let notice = &one.notice;
            assert!(notice.updated.is_some(), "{notice:?}");
            assert!(!notice.phase.is_open() || notice.end.is_none_or(|end| end >= now));
        }
    }
    if let Ok(page) = Instances::parse(next()) {
        announced(&page.announced, "gcp");
        assert!(page.odd >= page.unseen.len() as u64);
    }
    if let Ok(page) = Events::parse(next()) {
        announced(&page.announced, "oci");
        assert!(page.odd >= page.unseen.len() as u64);
        assert!(
            page.announced
                .iter()
                .all(|one| one.notice.updated.is_none())
        );
    }
    let mut told = Told::default();
    match instance_status::read(next(), &mut told) {
        Ok(_) => {
            announced(&told.announced, "aws");
            assert!(told.odd >= told.unseen.len() as u64);
        }
        Err(what) => assert!(!what.is_empty()),
    }
    let (machine, document) = (
        Machine {
            node: "n",
            id: "vm-1",
        },
        next(),
    );
    let of_gcp = metadata::read::gcp(machine, "NONE", document);
    for read in [
        metadata::read::ec2(machine, document),
        metadata::read::azure(machine, document),
        of_gcp.map(Vec::from_iter),
    ] {
        for notice in read.unwrap_or_default() {
            assert_eq!(notice.node, "n");
            // One without a begin takes its node out at once.
            assert!(
                notice.start.is_some() || notice.phase != Phase::Scheduled || of_azure(&notice)
            );
        }
    }
    of_health([next(), next(), next()], now);
}

/// Reads what AWS Health says of events, their descriptions and their instances.
fn of_health([events, details, entities]: [&[u8]; 3], now: Timestamp) {
    let parse = |body| serde_json::from_slice::<Value>(body).unwrap_or_default();
    let mut found = health::Found::default();
    for read in [
        found.read_events(parse(events)),
        found.read_entities(parse(entities)),
    ] {
        assert!(read.is_ok() || read.is_err_and(|what| !what.is_empty()));
    }
    found.read_details(&parse(details));
    let told = found.told("", now);
    announced(&told.announced, "aws");
    assert_eq!(told.complete, told.odd == 0);
    let ours = found.told("1", now);
    assert!(ours.announced.len() <= told.announced.len());
}

/// Returns whether a notice is Azure's, where an event without a begin is about to take place.
fn of_azure(notice: &Notice) -> bool {
    notice.provider == "azure"
}

/// Checks what holds for the notices of every cloud: the caller finds the node by the instance.
fn announced(announced: &[Announced], provider: &str) {
    for Announced { instance, notice } in announced {
        assert!(!instance.names().is_empty(), "{notice:?}");
        assert_eq!((&*notice.node, &*notice.provider), ("", provider));
        assert!(!notice.resource.1.is_empty(), "{notice:?}");
    }
}
