//! Failed checks of a pod, read from the statuses that the kubelet writes.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::field;

/// Most bytes of a termination message that are passed on: an Event has room for 1,024.
const MAX_MESSAGE_BYTES: usize = 900;
/// Exit code after SIGTERM: the pod was going away, so its check found nothing.
const TERMINATED: i64 = 143;

/// Failed check of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedCheck {
    /// Name of the check's container.
    pub check: String,
    /// Number of failed runs.
    pub runs: u64,
    /// Exit code and reason, in one line.
    pub message: String,
    /// End of the last run, in RFC 3339; empty if the status has none.
    pub at: String,
}

/// Returns the `checks` that failed in a pod. A check that has passed since is left out.
pub fn failed_checks(pod: &Value, checks: &BTreeSet<String>) -> Vec<FailedCheck> {
    let statuses = field::list(pod, "/status/initContainerStatuses").iter();
    let ours = statuses.filter(|status| checks.contains(field::name(status)));
    ours.filter_map(failed).collect()
}

fn failed(status: &Value) -> Option<FailedCheck> {
    let restarts = status.get("restartCount").and_then(Value::as_u64);
    let restarts = restarts.unwrap_or_default();
    let (ended, runs) = match status.pointer("/state/terminated") {
        Some(ended) => (ended, restarts.saturating_add(1)),
        None => (status.pointer("/lastState/terminated")?, restarts),
    };
    let code = ended.get("exitCode").and_then(Value::as_i64)?;
    if [0, TERMINATED].contains(&code) {
        return None;
    }
    let reasons = [
        field::text(ended, "/message"),
        field::text(ended, "/reason"),
    ];
    let mut reasons = reasons.into_iter().flatten().map(str::trim);
    let reason = reasons.find(|text| !text.is_empty()).unwrap_or("no reason");
    let mut message = format!("exit code {code}: {}", reason.replace(['\n', '\r'], " "));
    while message.len() > MAX_MESSAGE_BYTES {
        message.pop();
    }
    Some(FailedCheck {
        check: field::name(status).to_owned(),
        runs: runs.max(1),
        message,
        at: field::text(ended, "/finishedAt")
            .unwrap_or_default()
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(status: &Value) -> Vec<(u64, String)> {
        let pod = json!({"status": {"initContainerStatuses": [status, {"name": "users", "state": {
            "terminated": {"exitCode": 1}}}]}});
        let checks = BTreeSet::from(["preflight-dcgm-diag".to_owned()]);
        let failed = failed_checks(&pod, &checks).into_iter();
        failed.map(|one| (one.runs, one.message)).collect()
    }

    #[test]
    fn a_check_that_has_failed_is_told_with_its_own_words_and_how_often() {
        let status = |restarts: u64, states: Value| {
            let mut status = json!({"name": "preflight-dcgm-diag", "restartCount": restarts});
            for (key, state) in states.as_object().unwrap() {
                status[key] = state.clone();
            }
            status
        };
        let ended = |code: i64| {
            json!({"terminated": {"exitCode": code, "reason": "Error",
            "message": "DCGM_FR_FAULTY_MEMORY: GPU-1 fails\n"}})
        };
        let said = "exit code 1: DCGM_FR_FAULTY_MEMORY: GPU-1 fails".to_owned();
        for (status, expected) in [
            (
                status(0, json!({"state": ended(1)})),
                vec![(1, said.clone())],
            ),
            (
                status(2, json!({"state": ended(1)})),
                vec![(3, said.clone())],
            ),
            // The check runs again, or waits for its next run.
            (
                status(2, json!({"state": {"waiting": {}}, "lastState": ended(1)})),
                vec![(2, said)],
            ),
            // The check was killed before it could write a termination message.
            (
                status(
                    0,
                    json!({"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}),
                ),
                vec![(1, "exit code 137: OOMKilled".to_owned())],
            ),
            (
                status(1, json!({"state": ended(0), "lastState": ended(1)})),
                vec![],
            ),
            (status(0, json!({"state": ended(143)})), vec![]),
            (status(0, json!({"state": {"running": {}}})), vec![]),
            (
                status(0, json!({"state": {"terminated": {"exitCode": "1"}}})),
                vec![],
            ),
            (
                json!({"name": "preflight-dcgm-diag", "state": 7, "restartCount": -1}),
                vec![],
            ),
        ] {
            assert_eq!(of(&status), expected, "{status}");
        }
        for pod in [
            json!({}),
            json!({"status": 7}),
            json!({"status": {"initContainerStatuses": [7, null]}}),
        ] {
            assert_eq!(failed_checks(&pod, &BTreeSet::new()), []);
        }
    }
}
