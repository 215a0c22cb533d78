use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;

use serde_json::{Value, json};

use super::*;
use crate::commands::doctor::Outcome;

fn status(edit: impl FnOnce(&mut Value)) -> Status {
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
    let table: [(Edit, &str, Outcome); 11] = [
        (
            |it| {
                it["leadership"] =
                    json!({"lease": "gw/l", "identity": "a", "leader": "", "leads": false});
            },
            "leader",
            Outcome::Problem,
        ),
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
            Outcome::Warning,
        ),
        (
            |it| it["version"] = json!("0.0.1"),
            "server",
            Outcome::Warning,
        ),
        (
            |it| it["sources"] = json!([source("failing", 0)]),
            "source",
            Outcome::Problem,
        ),
        (
            |it| {
                it["sources"] = json!([source("stuck", 0)]);
                it["notReady"] = json!(["kernel-log is stuck: kmsg"]);
            },
            "source",
            Outcome::Problem,
        ),
        (
            |it| it["sources"] = json!([source("following", 3)]),
            "source",
            Outcome::Warning,
        ),
        (
            |it| it["store"]["error"] = json!("the disk is full"),
            "store",
            Outcome::Problem,
        ),
        (
            |it| {
                let delivery = json!({"controller": "https://c:1", "delivered": 0, "refused": 0,
                    "failing": "no route"});
                it["delivery"] = delivery;
                let reason = "the controller at https://c:1 does not take events, 7 wait: no route";
                it["notReady"] = json!([reason]);
            },
            "delivery",
            Outcome::Problem,
        ),
        (
            |it| it["policy"]["error"] = json!("p.toml:1: wrong"),
            "policy-in-use",
            Outcome::Problem,
        ),
        (
            |it| it["fleet"]["brake"]["held"] = json!(3),
            "held",
            Outcome::Warning,
        ),
        (
            |it| it["notReady"] = json!(["no connection to the cluster at https://c: refused"]),
            "ready",
            Outcome::Problem,
        ),
    ];
    for leads in [true, false] {
        let seen = json!({"lease": "gw/l", "identity": "a", "leader": "b", "leads": leads});
        let seen: LeadershipView = serde_json::from_value(seen).unwrap();
        assert_eq!(of_leadership(&seen).result, Outcome::Ok);
    }
    let well = of_status(&status(|_| ()));
    assert!(well.iter().all(|it| it.result == Outcome::Ok), "{well:?}");
    for (edit, check, expected) in table {
        let found = of_status(&status(edit));
        let told: Vec<_> = found.iter().filter(|it| it.result != Outcome::Ok).collect();
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!(
            (told[0].check, told[0].result),
            (check, expected),
            "{told:?}"
        );
    }
}

#[test]
fn a_policy_is_looked_at_where_it_is() {
    for (source, expected) in [
        ("/etc/p.toml", "gpuwarden policy lint /etc/p.toml"),
        (
            "configmap:ns/name/config.toml",
            "kubectl get configmap name --namespace ns -o yaml",
        ),
    ] {
        let found = of_status(&status(|it| {
            it["policy"]["error"] = json!("wrong");
            it["policy"]["source"] = json!(source);
        }));
        let told = found.iter().find(|it| it.check == "policy-in-use").unwrap();
        assert_eq!(told.fix.as_deref(), Some(expected));
    }
}

#[test]
fn each_reason_not_to_be_ready_has_a_way_out_of_its_own() {
    for (reason, expected) in [
        (
            "no connection to the cluster at https://c: refused",
            "kubectl get nodes",
        ),
        ("no policy from p.toml: it is not read yet", "policy lint"),
        (
            "the event store's writer has not answered for 2 s",
            "df /data",
        ),
        (
            "the events stored before the start are not all taken in",
            "wait",
        ),
        ("the keeper of the fleet's state has ended", "restart"),
    ] {
        let found = of_status(&status(|it| it["notReady"] = json!([reason])));
        let ready = found.iter().find(|it| it.check == "ready").unwrap();
        assert_eq!(ready.what, format!("not ready: {reason}"));
        let fix = ready.fix.as_deref().unwrap();
        assert!(fix.contains(expected), "{reason}: {fix}");
    }
}

#[test]
fn a_socket_is_for_all_who_can_get_to_it() {
    let dir = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir()
        .unwrap();
    let socket = dir.path().join("s.sock");
    assert_eq!(who_may_connect(&socket, "run"), None);
    let _listener = UnixListener::bind(&socket).unwrap();
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    for (socket_mode, dir_mode, expected) in [
        (0o666, 0o755, Outcome::Ok),
        (0o600, 0o755, Outcome::Warning),
        (0o666, 0o700, Outcome::Warning),
    ] {
        mode(&socket, socket_mode);
        mode(dir.path(), dir_mode);
        let found = who_may_connect(&socket, "run").unwrap();
        assert_eq!(found.result, expected, "{found:?}");
        let by_mode = format!("{found:?}").contains("--socket-mode 666");
        assert_eq!(by_mode, socket_mode == 0o600);
    }
    mode(dir.path(), 0o755);
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert_eq!(
        who_may_connect(&file, "run").unwrap().result,
        Outcome::Problem
    );
}
