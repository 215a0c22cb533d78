//! Check that a deliberate fault of a CUDA program is reported as an error of the application.

use serde_json::Value;

use super::{Verdict, enumeration::pci};

/// Jobs that fault, and the XID of each: a store to an unmapped address faults in the memory
/// management unit, and a misaligned one in the compute engine (NVIDIA's XID catalogue). Our
/// catalogue has both as errors of the application, not fatal and without an action.
pub(super) const FAULTS: [(&str, &str); 2] = [("null-store", "31"), ("misaligned-store", "13")];

/// Condition of a GPU that must stay true after an application's XIDs.
const CONDITION: &str = "NVMLReady";

/// Judges the reports on a fault of the GPU at a PCI address: events and GPUs as printed by
/// `gpuwarden events` and `gpuwarden devices`.
pub(super) fn judge(events: &[Value], devices: &[Value], xid: &str, at: &str) -> (Verdict, String) {
    let wrong = |said: String| (Verdict::Wrong, said);
    for event in events {
        if event["event"]["isFatal"] != false {
            return wrong(format!("{} is fatal", text(event)));
        }
        let action = &event["event"]["recommendedAction"];
        if is_xid(event, xid, at) && action != "NONE" {
            return wrong(format!("{} asks for {action}", text(event)));
        }
    }
    let device = |device: &&Value| device["pci"].as_str().map(pci) == Some(pci(at));
    let conditions = devices.iter().find(device).map(|it| &it["conditions"]);
    let mut conditions = conditions.and_then(Value::as_array).into_iter().flatten();
    match conditions.find(|condition| condition["type"] == CONDITION) {
        Some(condition) if condition["status"] == "True" => {}
        Some(bad) => {
            let (status, message) = (&bad["status"], &bad["message"]);
            return wrong(format!("{CONDITION} is {status}: {message}"));
        }
        None => return wrong(format!("the GPU at {at} has no {CONDITION}")),
    }
    match events.iter().find(|event| is_xid(event, xid, at)) {
        Some(event) => (Verdict::Right, text(event)),
        None => (Verdict::NotSeen, format!("no XID {xid} of {at}")),
    }
}

/// Returns true if an event is an XID of a GPU. The kernel log names a GPU without the function
/// of its PCI address.
pub(super) fn is_xid(event: &Value, xid: &str, at: &str) -> bool {
    let slot = |address: &str| pci(address).split('.').next().map(str::to_owned);
    let event = &event["event"];
    let list = |key: &str| event[key].as_array().into_iter().flatten();
    let names = |entity: &Value| {
        let place = entity["entityValue"].as_str().unwrap_or_default();
        entity["entityType"] == "PCI" && slot(place) == slot(at)
    };
    event["checkName"] == "SysLogsXIDError"
        && list("errorCode").any(|code| code == xid)
        && list("entitiesImpacted").any(names)
}

/// Returns a short description of an event.
pub(super) fn text(event: &Value) -> String {
    let event = &event["event"];
    let word = |key: &str| event[key].as_str().unwrap_or_default();
    let codes = &event["errorCode"];
    format!("{} {codes} of {}", word("checkName"), word("agent"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const AT: &str = "0000:0A:00.0";

    fn event(code: &str, fatal: bool, action: &str, place: &str) -> Value {
        json!({"seq": 4, "event": {
            "agent": "gpu-health-monitor", "checkName": "SysLogsXIDError", "errorCode": [code],
            "isFatal": fatal, "recommendedAction": action,
            "entitiesImpacted": [{"entityType": "GPU", "entityValue": "0"},
                                 {"entityType": "PCI", "entityValue": place}]}})
    }

    fn judged(events: &[Value], status: &str) -> Verdict {
        let conditions = json!([{"type": "NVMLReady", "status": status}]);
        let devices = [json!({"pci": "0000:0a:00.0", "conditions": conditions})];
        judge(events, &devices, "31", AT).0
    }

    #[test]
    fn the_xid_of_an_application_is_right_where_nothing_follows_from_it() {
        let ours = event("31", false, "NONE", "0000:0a:00");
        let beside = event("43", false, "NONE", AT);
        assert_eq!(judged(&[ours.clone(), beside], "True"), Verdict::Right);
        let grave = event("48", true, "RESTART_VM", AT);
        assert_eq!(judged(&[ours.clone(), grave], "True"), Verdict::Wrong);
        assert_eq!(judged(&[ours], "False"), Verdict::Wrong);
        let asks = event("31", false, "CONTACT_SUPPORT", AT);
        assert_eq!(judged(&[asks], "True"), Verdict::Wrong);
    }

    #[test]
    fn an_xid_that_did_not_come_or_is_of_another_gpu_was_not_seen() {
        let of_another = event("31", false, "NONE", "0000:0b:00");
        let other = event("13", false, "NONE", AT);
        for events in [vec![], vec![of_another], vec![other]] {
            assert_eq!(judged(&events, "True"), Verdict::NotSeen, "{events:?}");
        }
        assert_eq!(judged(&[], "Unknown"), Verdict::Wrong);
    }
}
