//! Recovery that a node waits for, and the ways to clear it by hand.

use contract::keys;
use fleet::session::Phase;
use fleet::view::{FaultView, NodeStatus};
use model::shell;

/// Most faults that are listed individually.
const FAULTS_SHOWN: usize = 20;

/// Returns what the node waits for, in a sentence.
pub(super) fn awaits(node: &str, status: Option<&NodeStatus>) -> String {
    let session = status
        .and_then(|status| status.session.as_ref())
        .filter(|s| s.phase != Phase::Idle);
    if let Some(session) = session {
        return session.awaits.clone();
    }
    let open = status.map_or(&[][..], |status| &status.faults);
    let counting: Vec<&FaultView> = open.iter().filter(|fault| !fault.dismissed).collect();
    match (open, counting.as_slice()) {
        ([], _) => format!("nothing: no fault is open on {node}"),
        ([fault], []) => format!(
            "nothing: {} was dismissed by hand; a newer report counts again",
            fault.title()
        ),
        (faults, []) => format!(
            "nothing: its {} open faults were dismissed by hand; a newer report counts again",
            faults.len()
        ),
        (_, [fault]) => format!("the recovery of {}", fault.title()),
        (_, faults) => format!("the recovery of its {} open faults", faults.len()),
    }
}

/// Returns how to clear the open faults, one way per line; empty if there are none. `data_dir`
/// is the server's data directory; `None` if commands find it by default.
pub(super) fn how_to_clear(status: &NodeStatus, data_dir: Option<&str>) -> Vec<String> {
    let node = shell_word(&status.name);
    let place = match data_dir {
        None => Some(String::new()),
        Some(dir) => shell_word(dir).map(|dir| format!(" --data-dir {dir}")),
    };
    let recovery = node
        .as_deref()
        .zip(place.as_deref())
        .map(|(node, place)| format!("gpuwarden inject recovery{place} --node-name {node}"));
    let mut lines: Vec<String> = status
        .faults
        .iter()
        .take(FAULTS_SHOWN)
        .map(|fault| fault_line(recovery.as_deref(), fault))
        .collect();
    if let Some(more) = status
        .faults
        .len()
        .checked_sub(FAULTS_SHOWN)
        .filter(|more| *more > 0)
    {
        lines.push(format!(
            "... and {more} more open faults: `gpuwarden status{} -o wide` lists them",
            place.as_deref().unwrap_or_default()
        ));
    }
    let Some(node) = node else {
        return lines;
    };
    let reported = status.faults.iter().filter(|fault| !fault.is_own_word());
    if let Some(recovery) = recovery.filter(|_| reported.count() > 1) {
        lines.push(format!(
            "All of them, once they are remediated: `{recovery}`"
        ));
    }
    let another = (status.session.as_ref()).and_then(|session| session.another.as_ref());
    if let Some(another) = another {
        lines.push(format!(
            "Where {} is gone for good, this ends its session: `{}`",
            another.who, another.end
        ));
        return lines;
    }
    // During the quarantine there is nothing to uncordon yet.
    let held = (status.session.as_ref()).filter(|session| session.phase.is_out());
    if let Some(session) = held.filter(|_| status.in_cluster != Some(false)) {
        // An uncordon has no effect if another party cordoned the node, or if it would be
        // undone.
        let command = if session.cordoned && session.uncordon_releases {
            format!("kubectl uncordon {node}")
        } else {
            format!("gpuwarden release {node} --reason TEXT")
        };
        lines.push(format!(
            "To release the node by hand: `{command}` (ends the session; the same faults do not \
             start another)"
        ));
    }
    lines
}

fn fault_line(recovery: Option<&str>, fault: &FaultView) -> String {
    let FaultView {
        agent,
        check,
        code,
        subject,
        recommended_action: action,
        ..
    } = fault;
    let with_code = if code.is_empty() {
        String::new()
    } else {
        format!(", code {code}")
    };
    if fault.is_own_word() {
        return format!(
            "{}: {}. No event closes it; gpuwarden closes it once the node has passed",
            fault.title(),
            fault.message
        );
    }
    if let Some(cause) = &fault.explained_by {
        return format!(
            "{}: explained by {} of node {}, and closed when that has recovered",
            fault.title(),
            cause.fault,
            cause.node
        );
    }
    let remediation = match action.as_str() {
        "NONE" => "no action is recommended".to_owned(),
        "UNKNOWN" => "the remediation is not known".to_owned(),
        action => format!("remediated by {action}"),
    };
    let line = format!(
        "{}: {remediation}. Closed by a healthy event of agent {agent}, check {check}{with_code}, for \
         {subject}",
        fault.title()
    );
    match recovery.and_then(|recovery| command(recovery, fault)) {
        Some(command) => format!("{line}; to send one: `{command}`"),
        None => line,
    }
}

/// Narrows `recovery`, the command that closes all faults of the node, down to this fault.
/// Returns `None` if that cannot be quoted safely.
fn command(recovery: &str, fault: &FaultView) -> Option<String> {
    let mut command = recovery.to_owned();
    let pci = fault
        .entities
        .iter()
        .find(|entity| entity.entity_type == keys::ENTITY_PCI);
    for (flag, value) in [
        ("--code", Some(fault.code.as_str())),
        ("--pci", pci.map(|e| e.entity_value.as_str())),
    ] {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            command = format!("{command} {flag} {}", shell_word(value)?);
        }
    }
    Some(command)
}

/// Returns `value` as one shell word; `None` if no quoting makes it safe. Names come from any
/// sender of events, and the result is pasted into terminals.
fn shell_word(value: &str) -> Option<String> {
    let unsafe_quoted = value.is_empty()
        || value.starts_with('-')
        || value.contains(|c: char| !c.is_ascii() || c.is_ascii_control());
    (!unsafe_quoted).then(|| shell::word(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pasted_into_a_shell_is_one_word() {
        for (value, word) in [
            ("gpu-node-7.example.com", Some("gpu-node-7.example.com")),
            ("0000:b3:00", Some("0000:b3:00")),
            ("x; rm -rf /", Some("'x; rm -rf /'")),
            ("$(reboot)", Some("'$(reboot)'")),
            ("it's", Some(r"'it'\''s'")),
            ("--help", None),
            ("a\nreboot\n", None),
            ("a\u{202e}b", None),
            ("", None),
        ] {
            assert_eq!(shell_word(value).as_deref(), word, "{value:?}");
        }
    }
}
