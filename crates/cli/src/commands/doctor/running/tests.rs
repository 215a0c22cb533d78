use serde_json::{Value, json};

use super::*;
use crate::commands::doctor::Severity;

fn status(edit: impl FnOnce(&mut Value)) -> StatusView {
    let mut status = json!({
        "version": VERSION,
        "nodeName": "n1",
        "mode": "quarantine",
        "startedAt": "2026-01-01T00:00:00Z",
        "now": "2026-01-01T00:00:00Z",
        "dataDir": "/data",
        "socket": "/data/gpuwarden.sock",
        "policy": {"source": "built in", "ruleSets": [], "warnings": []},
        "fleet": {"applied": 0, "ready": true, "nodes": [], "cluster": null,
            "brake": {"enabled": true, "state": "CLOSED", "limits": [], "held": 0, "notes": []}},
        "sources": [source("following", 0)],
        "store": {"events": 7, "bytes": 1, "latest": 7},
        "ready": true,
        "notReady": [],
    });
    edit(&mut status);
    serde_json::from_value(status).unwrap()
}

fn source(state: &str, lost: u64) -> Value {
    json!({"name": "kernel-log", "state": state, "detail": "kmsg", "aliveAt": "2026-01-01T00:00:00Z",
        "lastRecordAt": null, "records": 1, "faults": 0, "lost": lost, "malformed": 0})
}

#[test]
fn each_trouble_of_the_running_one_is_told_once() {
    type Edit = fn(&mut Value);
    let table: [(Edit, &str, Severity); 13] = [
        (
            |it| {
                let another = json!({"who": "the gpuwarden on n1 itself", "end": "e"});
                let session = json!({"id": "s", "phase": "quarantined", "failures": 0,
                    "since": "2026-01-01T00:00:00Z", "awaits": "", "another": another});
                it["fleet"]["nodes"] = json!([{"name": "n1", "state": "quarantined",
                    "session": session, "inCluster": true, "unschedulable": true, "faults": [],
                    "notes": []}]);
            },
            "session",
            Severity::Warning,
        ),
        (
            |it| it["version"] = json!("0.0.0"),
            "server",
            Severity::Warning,
        ),
        (
            |it| it["sources"] = json!([source("following", 3)]),
            "source",
            Severity::Warning,
        ),
        (
            |it| it["store"]["notes"] = json!(["moved aside"]),
            "store-history",
            Severity::Warning,
        ),
        (
            |it| it["policy"]["error"] = json!("p.toml:1: wrong"),
            "policy-in-use",
            Severity::Problem,
        ),
        (
            |it| {
                it["policy"]["error"] = json!("p.toml:1: wrong");
                not_ready(it, "no policy from p.toml: p.toml:1: wrong");
            },
            "ready",
            Severity::Problem,
        ),
        (
            |it| it["fleet"]["brake"]["state"] = json!("TRIPPED"),
            "circuit-breaker",
            Severity::Problem,
        ),
        (
            |it| it["fleet"]["brake"]["state"] = json!("what"),
            "circuit-breaker",
            Severity::Problem,
        ),
        (
            |it| it["fleet"]["brake"]["enabled"] = json!(false),
            "circuit-breaker",
            Severity::Warning,
        ),
        (
            |it| it["fleet"]["brake"]["paused"] = json!("paused by ops: roll-out"),
            "pause",
            Severity::Warning,
        ),
        (
            |it| it["fleet"]["brake"]["held"] = json!(3),
            "held",
            Severity::Warning,
        ),
        (
            |it| not_ready(it, "no connection to the cluster at https://c: refused"),
            "ready",
            Severity::Problem,
        ),
        (
            |it| {
                it["leadership"] = leadership("", false);
                not_ready(it, "standby: nobody leads yet");
            },
            "ready",
            Severity::Problem,
        ),
    ];
    let given = Given::default();
    let standby = status(|it| {
        it["leadership"] = leadership("b", false);
        not_ready(it, "standby: b leads");
    });
    for well in [status(|_| ()), standby] {
        let found = of_status(&well, &given);
        assert!(
            found.iter().all(|it| it.result == Severity::Ok),
            "{found:?}"
        );
        assert_eq!(found.iter().filter(|it| it.check == "ready").count(), 1);
    }
    for (edit, check, expected) in table {
        let found = of_status(&status(edit), &given);
        let told: Vec<_> = found
            .iter()
            .filter(|it| it.result != Severity::Ok)
            .collect();
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!(
            (told[0].check, told[0].result),
            (check, expected),
            "{told:?}"
        );
    }
}

fn not_ready(status: &mut Value, reason: &str) {
    status["ready"] = json!(false);
    status["notReady"] = json!([reason]);
}

fn leadership(leader: &str, leads: bool) -> Value {
    json!({"lease": "gw/l", "identity": "a", "leader": leader, "leads": leads})
}

#[test]
fn a_tripped_breaker_is_told_with_the_command_that_closes_it() {
    let given = Given::default();
    let close = "kubectl -n gw patch configmap circuit-breaker";
    let status = status(|it| {
        it["fleet"]["brake"]["state"] = json!("TRIPPED");
        it["fleet"]["brake"]["notes"] = json!([format!("to go on: {close}")]);
    });
    let found = of_status(&status, &given);
    let breaker = found.iter().find(|it| it.check == "circuit-breaker");
    assert_eq!(breaker.unwrap().fix.as_deref(), Some(close));
}
