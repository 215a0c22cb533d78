//! Tests of `dcgm-diag` with a fake `dcgmi`: a script whose output comes from files of the
//! test.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use contract::RecommendedAction;
use fakes::Scenario;
use gpuwarden_checks::CheckName;
use rustix::process::{Pid, Signal, kill_process};

use super::support::{Container, wait_for};

const DIAG: CheckName = CheckName::DcgmDiag;

/// Difference between the host engine's numbers and those of the container: 0 there is 10 here.
const OFFSET: u32 = 10;

/// Script that records its arguments, and prints the GPUs, or the file for the attempt, or the
/// last such file.
const SCRIPT: &str = r#"#!/bin/sh
here=$(dirname "$0")
# Before the call is noted: who waits for the note may send the signal at once.
if [ -e "$here/hang" ]; then trap 'echo stopped > "$here/stopped"; exit 1' TERM; fi
echo "$@" >> "$here/calls"
case "$1" in
discovery)
    if [ -e "$here/silent" ]; then exec sleep 60; fi
    cat "$here/discovery"; exit 0 ;;
esac
while [ -e "$here/hold" ]; do sleep 0.05; done
attempt=$(grep -c '^diag' "$here/calls")
while [ -e "$here/hang" ]; do sleep 0.05; done
if [ -e "$here/diag.$attempt" ]; then cat "$here/diag.$attempt"; else cat "$here/diag"; fi
exit 226
"#;

/// Container with some of the eight GPUs of its host engine.
struct Diagnosed {
    container: Container,
    uuids: Vec<String>,
}

impl Diagnosed {
    fn new(gpus: u32) -> Self {
        let mut scenario = Scenario::healthy(gpus);
        let uuid = |number| format!("GPU-00000000-0000-0000-0000-{number:012}");
        for index in 0..gpus {
            scenario.gpu_mut(index).uuid = Some(uuid(index + OFFSET));
        }
        let mut container = Container::new(&scenario);
        let mut table = "8 GPUs found.\n".to_owned();
        for number in 8..16 {
            let uuid = uuid(number);
            table.push_str(&format!(
                "| {number} | Name: NVIDIA H100 |\n| | Device UUID: {uuid} |\n+---+---+\n"
            ));
        }
        fs::write(container.file("discovery"), table).unwrap();
        let script = container.file("dcgmi");
        fs::write(&script, SCRIPT).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        container.set("GPUWARDEN_DCGMI", script.to_str().unwrap());
        container.set("DCGM_HOSTENGINE_ADDR", "dcgm.example:5555");
        container.set("DCGM_DIAG_STATUS_RETRY_INTERVAL_SECONDS", "0");
        Self {
            container,
            uuids: (0..gpus).map(|index| uuid(index + OFFSET)).collect(),
        }
    }

    fn says(&self, file: &str, text: &str) -> &Self {
        fs::write(self.container.file(file), text).unwrap();
        self
    }

    /// Returns the arguments of all calls of `dcgmi`.
    fn calls(&self) -> Vec<String> {
        calls(self.container.directory.path())
    }
}

fn calls(directory: &Path) -> Vec<String> {
    let calls = fs::read_to_string(directory.join("calls")).unwrap_or_default();
    calls.lines().map(str::to_owned).collect()
}

/// Returns DCGM 4's output for a test.
fn fourth(test: &str, results: &[&str]) -> String {
    let results = results.join(",");
    format!(
        r#"{{"DCGM Diagnostic": {{"metadata": {{"version": "4.6.0"}}, "test_categories": [
            {{"category": "Any", "tests": [{{"name": "{test}", "results": [{results}]}}]}}]}}}}"#
    )
}

fn of_gpu(number: u32, status: &str, warnings: &str) -> String {
    format!(
        r#"{{"entity_group": "GPU", "entity_group_id": 1, "entity_id": {number}, "status": "{status}",
            "warnings": [{warnings}]}}"#
    )
}

/// The reference implementation passes the container's numbers, which are other GPUs of the
/// node.
#[tokio::test]
async fn the_gpus_of_the_container_are_asked_for_by_the_host_engines_numbers() {
    let diagnosed = Diagnosed::new(2);
    diagnosed.says(
        "diag",
        &fourth(
            "memory",
            &[&of_gpu(10, "Pass", ""), &of_gpu(11, "Pass", "")],
        ),
    );
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    assert_eq!(
        diagnosed.calls(),
        [
            "discovery --host dcgm.example:5555 -l",
            "diag --host dcgm.example:5555 -r 2 -i 10,11 -j"
        ]
    );
    assert!(
        ended
            .out
            .contains("dcgm-diag: passed: 2 GPUs pass level 2 of the diagnosis, DCGM 4.6.0"),
        "{}",
        ended.out
    );
    let checks: Vec<_> = ended
        .events
        .iter()
        .map(|event| event.check_name.as_str())
        .collect();
    assert_eq!(checks, ["DcgmDiagnosticMemory", "DcgmDiagnostic"]);
    for event in &ended.events {
        assert!(event.is_healthy, "{event:#?}");
        assert_eq!(
            (event.agent.as_str(), event.component_class.as_str()),
            ("preflight-dcgm-diag", "GPU")
        );
        model::event::validate(event).unwrap();
    }
    let passed = ended.events[0]
        .entities_impacted
        .iter()
        .map(|entity| &entity.entity_value);
    assert!(passed.eq(&diagnosed.uuids), "{ended:#?}");
}

#[tokio::test]
async fn a_host_engine_that_does_not_know_a_gpu_is_another_nodes() {
    let diagnosed = Diagnosed::new(7);
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    assert!(
        ended.out.starts_with("dcgm-diag: not tested: "),
        "{ended:#?}"
    );
    let event = ended.event();
    assert_eq!(event.error_code, ["DCGM_WRONG_HOSTENGINE"]);
    assert!(
        !event.is_fatal && event.message.contains("it is that of another node"),
        "{event:#?}"
    );
    assert_eq!(diagnosed.calls().len(), 1, "nothing is diagnosed");
}

#[tokio::test]
async fn what_dcgmi_writes_steers_no_terminal() {
    let diagnosed = Diagnosed::new(1);
    let warning =
        r#"{"error_id": 52, "warning": "faulty \u001b]0;gone\u0007\u001b[2Jmemory\u202e"}"#;
    let report = fourth("memory", &[&of_gpu(10, "Fail", warning)]);
    for (report, words) in [
        (report.as_str(), "faulty"),
        ("no\x1b[2J \u{9b}report", "report"),
    ] {
        diagnosed.says("diag", report);
        let ended = diagnosed.container.run(DIAG).await;
        for text in [&ended.out, &ended.termination] {
            assert!(text.contains(words), "{text:?}");
            let steers = |c: char| c.is_control() || c == '\u{202e}';
            assert!(!text.lines().any(|line| line.contains(steers)), "{text:?}");
        }
    }
}

#[tokio::test]
async fn each_gpu_that_fails_a_test_is_one_event_and_what_passed_is_one() {
    let diagnosed = Diagnosed::new(3);
    let memory =
        r#"{"error_category": 1, "error_id": 52, "error_severity": 2, "warning": "faulty memory"}"#;
    let width = r#"{"error_id": 46, "error_severity": 5, "warning": "narrow"}"#;
    diagnosed.says(
        "diag",
        &fourth(
            "memory",
            &[
                &of_gpu(10, "Fail", memory),
                &of_gpu(11, "Pass", ""),
                &of_gpu(12, "Fail", &format!("{width},{memory}")),
            ],
        ),
    );
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!(ended.code, 1, "{ended:#?}");
    assert!(
        ended.termination.starts_with("DCGM_FR_FAULTY_MEMORY: GPU-"),
        "{}",
        ended.termination
    );
    let found: Vec<_> = ended
        .events
        .iter()
        .map(|event| {
            let uuids: Vec<_> = event
                .entities_impacted
                .iter()
                .map(|entity| &entity.entity_value)
                .collect();
            (
                event.is_healthy,
                event.is_fatal,
                event.error_code.clone(),
                uuids,
            )
        })
        .collect();
    let code = vec!["DCGM_FR_FAULTY_MEMORY".to_owned()];
    let uuids = &diagnosed.uuids;
    assert_eq!(
        found,
        [
            (false, true, code.clone(), vec![&uuids[0]]),
            (false, true, code, vec![&uuids[2]]),
            (true, false, vec![], vec![&uuids[1]]),
        ]
    );
    assert_eq!(
        ended.events[0].recommended_action,
        RecommendedAction::ContactSupport as i32
    );
}

#[tokio::test]
async fn the_form_of_dcgm_3_is_read_too() {
    let diagnosed = Diagnosed::new(2);
    diagnosed.says(
        "diag",
        r#"{"DCGM GPU Diagnostic": {"version": "3.3.9", "test_categories": [
            {"category": "Deployment", "tests": [{"name": "Denylist", "results": [{"gpu_ids": "10,11", "status": "PASS"}]}, null]},
            {"category": "Stress", "tests": [{"name": "Targeted Stress", "results": [
                {"gpu_ids": "10", "status": "Fail", "warnings": ["too slow"]},
                {"gpu_ids": "11", "status": "Pass"}]}]}]}}"#,
    );
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!(ended.code, 1, "{ended:#?}");
    let event = &ended.events[0];
    assert_eq!(event.check_name, "DcgmDiagnosticTargetedStress");
    assert_eq!(
        event.recommended_action,
        RecommendedAction::RunDcgmeud as i32
    );
    assert!(
        event.is_fatal && event.message.contains("too slow"),
        "{event:#?}"
    );
    assert_eq!(event.entities_impacted[0].entity_value, diagnosed.uuids[0]);
}

/// DCGM issue 284: the memory test reports a pass when it could not allocate memory.
#[tokio::test]
async fn a_pass_with_an_error_is_no_pass_and_blames_nobody() {
    let diagnosed = Diagnosed::new(1);
    let error = r#"{"error_id": 56, "error_severity": 4, "warning": "could not allocate"}"#;
    diagnosed.says("diag", &fourth("memory", &[&of_gpu(10, "Pass", error)]));
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    let event = ended.event();
    assert_eq!(event.error_code, ["DCGM_FR_MEMORY_ALLOC"]);
    assert!(!event.is_healthy && !event.is_fatal, "{event:#?}");
    assert_eq!(event.recommended_action, RecommendedAction::None as i32);
    assert!(
        ended.out.contains("dcgm-diag: not tested: "),
        "{}",
        ended.out
    );
}

/// NVSentinel issue 1363: a resource in use was reported as a fatal failure of the GPU.
#[tokio::test]
async fn a_busy_host_engine_is_asked_again_and_never_blamed() {
    let busy = "Error: Unable to complete diagnostic. Return: (-42) The requested operation could not be \
                completed because the affected resource is in use.";
    let running =
        r#"{"DCGM Diagnostic": {"runtime_error": "A DCGM diagnostic is already running"}}"#;
    let mut diagnosed = Diagnosed::new(1);
    diagnosed.says("diag.1", busy).says("diag.2", running);
    diagnosed.says("diag", &fourth("memory", &[&of_gpu(10, "Pass", "")]));
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!((ended.code, diagnosed.calls().len()), (0, 6), "{ended:#?}");
    assert!(
        ended.events.iter().all(|event| event.is_healthy),
        "{ended:#?}"
    );

    diagnosed
        .container
        .set("DCGM_DIAG_STATUS_RETRY_MAX_ATTEMPTS", "3");
    for (text, code) in [
        (busy, "DCGM_ST_IN_USE"),
        (running, "DCGM_ST_DIAG_ALREADY_RUNNING"),
    ] {
        fs::remove_file(diagnosed.container.file("calls")).unwrap();
        diagnosed
            .says("diag", text)
            .says("diag.1", text)
            .says("diag.2", text);
        let ended = diagnosed.container.run(DIAG).await;
        assert_eq!((ended.code, diagnosed.calls().len()), (0, 6), "{ended:#?}");
        let event = ended.event();
        assert_eq!(
            (event.check_name.as_str(), &event.error_code[..]),
            ("DcgmDiagnostic", &[code.to_owned()][..])
        );
        assert!(
            !event.is_fatal && !event.is_healthy && event.message.contains("(3 attempts)"),
            "{event:#?}"
        );
        assert_eq!(event.recommended_action, RecommendedAction::None as i32);
    }
}

#[tokio::test]
async fn what_says_nothing_of_the_gpus_blames_none_and_stops_no_pod() {
    let known = "| 10 | Device UUID: GPU-00000000-0000-0000-0000-000000000010 |";
    for (discovery, diag) in [
        (known, ""),
        (known, "Segmentation fault"),
        (known, "{\"DCGM Diagnostic\": {}}"),
        (known, "{\"DCGM Diagnostic\": {\"test_categories\": 7}}"),
        (
            known,
            "{\"DCGM Diagnostic\": {\"test_categories\": [{\"tests\": [{\"name\": \"memory\"",
        ),
        ("no table", "{}"),
    ] {
        let mut diagnosed = Diagnosed::new(1);
        diagnosed
            .container
            .set("DCGM_DIAG_STATUS_RETRY_MAX_ATTEMPTS", "2");
        diagnosed.says("discovery", discovery).says("diag", diag);
        let ended = diagnosed.container.run(DIAG).await;
        let event = ended.event();
        assert_eq!(ended.code, 0, "{ended:#?}");
        assert_eq!(event.error_code, ["DCGM_DIAG_ERROR"], "{ended:#?}");
        assert!(
            !event.is_fatal && event.recommended_action == 0,
            "{event:#?}"
        );
    }
}

/// NVSentinel reports this as a fatal fault of the node.
#[tokio::test]
async fn a_host_engine_that_is_away_stops_no_pod_and_is_named() {
    let refused =
        "Error: unable to establish a connection to the specified host: dcgm.example:5555";
    for (is_silent, text) in [(false, "unable to establish"), (true, "no answer in time")] {
        let mut diagnosed = Diagnosed::new(1);
        diagnosed
            .container
            .set("DCGM_DIAG_STATUS_RETRY_MAX_ATTEMPTS", "2");
        diagnosed.says("discovery", refused);
        if is_silent {
            diagnosed.says("silent", "");
            diagnosed.container.set("CHECK_TIMEOUT_SECONDS", "2");
        }
        let ended = diagnosed.container.run(DIAG).await;
        assert_eq!(ended.code, 0, "{ended:#?}");
        let expected =
            "dcgm-diag: not tested: the host engine at dcgm.example:5555 does not answer: ";
        assert!(
            ended.out.starts_with(expected) && ended.out.contains(text),
            "{ended:#?}"
        );
        let event = ended.event();
        assert_eq!(event.error_code, ["DCGM_CONNECTIVITY_ERROR"]);
        assert!(!event.is_healthy && !event.is_fatal, "{event:#?}");
        assert_eq!(event.recommended_action, RecommendedAction::None as i32);
        assert!(event.message.contains("dcgm.example:5555"), "{event:#?}");
    }
}

#[tokio::test]
async fn what_tests_nothing_fails_where_that_is_asked_for_and_blames_no_gpu() {
    let mut diagnosed = Diagnosed::new(1);
    let container = &mut diagnosed.container;
    container.set("DCGM_DIAG_STATUS_RETRY_MAX_ATTEMPTS", "1");
    container.set("GPUWARDEN_UNTESTED_FAILS", "true");
    diagnosed.says("discovery", "Error: unable to establish a connection");
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!(ended.code, 1, "{ended:#?}");
    let expected = "dcgm-diag: failed: GPUWARDEN_UNTESTED_FAILS is set, and it tested nothing: ";
    assert!(ended.out.starts_with(expected), "{ended:#?}");
    assert!(!ended.event().is_fatal, "{ended:#?}");
}

#[tokio::test]
async fn a_bad_setting_or_no_dcgmi_is_a_configuration_error() {
    for (name, value, text) in [
        (
            "DCGM_DIAG_LEVEL",
            "5",
            "DCGM_DIAG_LEVEL is \"5\"; it must be a whole number from 1 to 4, such as 2",
        ),
        ("DCGM_DIAG_LEVEL", "deep", "DCGM_DIAG_LEVEL is \"deep\""),
        (
            "GPUWARDEN_DCGMI",
            "/nowhere/dcgmi",
            "cannot run /nowhere/dcgmi: ",
        ),
        (
            "DCGM_DIAG_STATUS_RETRY_MAX_ATTEMPTS",
            "0",
            "DCGM_DIAG_STATUS_RETRY_MAX_ATTEMPTS is \"0\"",
        ),
    ] {
        let mut diagnosed = Diagnosed::new(1);
        diagnosed.container.set(name, value);
        let ended = diagnosed.container.run(DIAG).await;
        assert_eq!(ended.code, 2, "{ended:#?}");
        assert!(ended.out.contains(text), "{}", ended.out);
        // The problem is reported, and recommends no action.
        let event = ended.event();
        assert_eq!(event.check_name, "DcgmDiagnostic");
        assert_eq!(event.error_code, ["CONFIGURATION"]);
        assert!(event.message.contains(text), "{event:#?}");
        assert!(!event.is_fatal && !event.is_healthy, "{event:#?}");
        assert_eq!(event.recommended_action, RecommendedAction::None as i32);
    }
}

#[tokio::test]
async fn the_level_is_the_one_that_was_set_and_the_address_has_a_default() {
    for level in ["1", "2", "3", "4"] {
        let mut diagnosed = Diagnosed::new(1);
        diagnosed.says("diag", &fourth("software", &[&of_gpu(10, "Pass", "")]));
        diagnosed.container.set("DCGM_DIAG_LEVEL", level);
        diagnosed.container.set("DCGM_HOSTENGINE_ADDR", "");
        assert_eq!(diagnosed.container.run(DIAG).await.code, 0);
        assert!(
            diagnosed.calls()[1].contains(&format!(
                "--host nvidia-dcgm.gpu-operator.svc:5555 -r {level} "
            )),
            "{:?}",
            diagnosed.calls()
        );
    }
}

/// Level 3 takes 15 minutes: with the `checkTimeout` of ADR-026's example, 300 s, no pod would
/// ever start.
#[tokio::test]
async fn at_its_deadline_the_diagnosis_is_stopped_and_no_pod() {
    let mut diagnosed = Diagnosed::new(1);
    diagnosed.says("hang", "");
    diagnosed.container.set("DCGM_DIAG_LEVEL", "3");
    diagnosed.container.set("CHECK_TIMEOUT_SECONDS", "3");
    let ended = diagnosed.container.run(DIAG).await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    let event = ended.event();
    assert_eq!(event.error_code, ["DCGM_DIAG_TIMEOUT"]);
    assert!(!event.is_fatal && !event.is_healthy, "{event:#?}");
    assert_eq!(event.recommended_action, RecommendedAction::None as i32);
    let why = "level 3 needs up to 1800 s, and CHECK_TIMEOUT_SECONDS (checkTimeout) gives it 3";
    assert!(ended.termination.ends_with(why), "{ended:#?}");
    assert!(
        diagnosed.container.file("stopped").exists(),
        "dcgmi was not asked to stop"
    );
}

/// A diagnosis of level 1 takes 30 to 60 s. The pod waits for one diagnosis, and for nothing
/// else.
#[tokio::test]
async fn a_pod_waits_for_one_diagnosis_and_for_nothing_behind_it() {
    let mut diagnosed = Diagnosed::new(1);
    diagnosed.says("hold", "");
    diagnosed.says("diag", &fourth("software", &[&of_gpu(10, "Pass", "")]));
    diagnosed.container.set("DCGM_DIAG_LEVEL", "1");
    let mut child = diagnosed.container.command(DIAG).spawn().unwrap();
    let log = diagnosed.container.file("calls");
    let called = || {
        fs::read_to_string(&log)
            .unwrap_or_default()
            .contains("diag --host")
    };
    wait_for(called).await;
    // The diagnosis is in progress, and the check must not end before it.
    assert_eq!(child.try_wait().unwrap(), None);
    assert_eq!(diagnosed.container.witness.events(), []);
    fs::remove_file(diagnosed.container.file("hold")).unwrap();
    assert_eq!(child.wait().await.unwrap().code(), Some(0));
    let events = diagnosed.container.witness.events();
    let passed = |name: &str| {
        events
            .iter()
            .any(|it| it.check_name == name && it.is_healthy)
    };
    assert!(passed("DcgmDiagnosticSoftware"), "{events:#?}");
    let calls = diagnosed.calls();
    assert_eq!(calls.len(), 2, "{calls:?}");
    assert!(calls[1].contains(" -r 1 "), "{calls:?}");
}

#[tokio::test]
async fn a_signal_stops_the_diagnosis_at_the_host_engine() {
    let diagnosed = Diagnosed::new(1);
    diagnosed.says("hang", "");
    let mut command = diagnosed.container.command(DIAG);
    let child = command
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    wait_for(|| diagnosed.calls().len() == 2).await;
    let pid = Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(
        output.status.code(),
        Some(143),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        diagnosed.container.file("stopped").exists(),
        "dcgmi was not asked to stop"
    );
    assert_eq!(diagnosed.container.witness.events(), []);
}
