//! A task without a cluster, and its store.

use std::path::Path;

use super::*;

pub(in crate::quarantine) fn open(directory: &Path) -> Arc<dyn EventStore> {
    Arc::new(SqliteStore::open(directory).unwrap())
}

/// Creates a quarantine that only records events.
pub(in crate::quarantine) fn quarantine(store: &Arc<dyn EventStore>) -> (Quarantine, Handles) {
    quarantine_that(Mode::Observe, store)
}

pub(in crate::quarantine) fn quarantine_that(
    mode: Mode,
    store: &Arc<dyn EventStore>,
) -> (Quarantine, Handles) {
    Quarantine::new(config(mode, store), &Metrics::default())
}

pub(in crate::quarantine) fn config(mode: Mode, store: &Arc<dyn EventStore>) -> QuarantineConfig {
    QuarantineConfig {
        store: Arc::clone(store),
        cluster: None,
        policy: watch::channel(None).1,
        rules: None,
        mode,
        owns: Owns::All,
        sources: Sources::default(),
        brake: false,
        drain: None,
        remediation: None,
        analysed: None,
        gpu_label: NodeLabel::parse("gpu=true").unwrap(),
        namespace: "gpuwarden".to_owned(),
        board: None,
        events: false,
        retention: jiff::SignedDuration::from_hours(30 * 24),
        clock: now,
    }
}

pub(in crate::quarantine) fn fault(node: &str, code: u32) -> NewEvent {
    let mut event = HealthEvent {
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: "Check".into(),
        node_name: node.into(),
        error_code: vec![code.to_string()],
        is_fatal: true,
        ..HealthEvent::default()
    };
    normalise(&mut event, now());
    NewEvent {
        event,
        received_at: now(),
    }
}

pub(in crate::quarantine) fn damage(directory: &Path, sql: &str) {
    let connection = rusqlite::Connection::open(directory.join("events.db")).unwrap();
    connection.execute_batch(sql).unwrap();
}
