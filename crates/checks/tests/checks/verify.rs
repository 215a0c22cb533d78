//! Tests of `verify`: gpuwarden's checks follow the contract, and each violation is reported.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Duration;

use fakes::Scenario;
use gpuwarden_checks::CheckName;
use gpuwarden_checks::verify::{VerifySettings, verify};

use super::support::{self, Container};

async fn verified(settings: &VerifySettings) -> (u8, String) {
    let mut out = Vec::new();
    let code = verify(settings, &mut out).await.unwrap();
    (code, String::from_utf8(out).unwrap())
}

/// Returns a check of gpuwarden in a container, as a command.
fn own(container: &Container, check: CheckName) -> VerifySettings {
    let mut arguments: Vec<OsString> = Vec::new();
    for (name, value) in &container.variables {
        arguments.push(format!("{name}={value}").into());
    }
    arguments.retain(|argument| {
        let text = argument.to_string_lossy();
        !text.starts_with("NODE_NAME=") && !text.starts_with("PLATFORM_CONNECTOR_SOCKET=")
    });
    let (variable, program, rest) = support::as_check(check);
    arguments.push(variable);
    arguments.push(program);
    arguments.extend(rest);
    VerifySettings {
        program: "env".into(),
        arguments,
        timeout: Duration::from_secs(120),
    }
}

/// Returns a shell script as a check.
fn script(text: &str, timeout: Duration) -> VerifySettings {
    VerifySettings {
        program: "sh".into(),
        arguments: vec!["-c".into(), text.into()],
        timeout,
    }
}

#[tokio::test]
async fn our_own_checks_keep_the_contract_whether_they_pass_or_fail() {
    for (gb_s, word) in [
        (400.0, "a pass sends a healthy event"),
        (1.0, "a failure sends an event"),
    ] {
        let mut scenario = Scenario::healthy(2);
        scenario.nccl.bandwidth_gb_s = gb_s;
        let mut container = Container::new(&scenario);
        container.set("TEST_SIZE_MB", "1");
        let (code, out) = verified(&own(&container, CheckName::NcclLoopback)).await;
        assert_eq!(code, 0, "{out}");
        assert!(
            out.contains(&format!("ok      EXECUTE_REMEDIATION: {word}")),
            "{out}"
        );
        assert!(
            out.contains("ok      STORE_ONLY: exits 0 whatever it finds"),
            "{out}"
        );
        assert!(
            out.ends_with("env keeps the contract of preflight checks\n"),
            "{out}"
        );
    }
}

#[tokio::test]
async fn each_breach_of_the_contract_is_told() {
    for (text, expected) in [
        (
            "exit 0",
            "sends at least one event to PLATFORM_CONNECTOR_SOCKET: it sent none",
        ),
        (
            "exit 3",
            "exits 0 (passed), 1 (failed) or 2 (wrong settings): it ended with exit status: 3",
        ),
        ("kill -9 $$", "it ended with signal: 9"),
        (
            "exit 1",
            "broken  STORE_ONLY: exits 0 whatever it finds: it ended with exit status: 1",
        ),
        ("sleep 60", "it did not end in time"),
    ] {
        let (code, out) = verified(&script(text, Duration::from_secs(1))).await;
        assert_eq!(code, 1, "{text}: {out}");
        assert!(out.contains(expected), "{text}: {out}");
        assert!(
            out.ends_with("sh breaks the contract of preflight checks\n"),
            "{out}"
        );
    }
}

#[tokio::test]
async fn what_a_check_has_started_ends_with_it() {
    let directory = tempfile::tempdir().unwrap();
    for (name, then, expected) in [
        ("hangs", "sleep 1000", "it did not end in time"),
        ("ends", "exit 3", "it ended with exit status: 3"),
    ] {
        let file = directory.path().join(name);
        let text = format!("sleep 1000 & echo $! >> {}; {then}", file.display());
        let (_, out) = verified(&script(&text, Duration::from_secs(1))).await;
        assert!(out.contains(expected), "{out}");
        let noted = fs::read_to_string(&file).unwrap();
        assert_eq!(noted.lines().count(), 2, "one of each run");
        for pid in noted.lines() {
            let stat = Path::new("/proc").join(pid).join("stat");
            // A zombie counts as gone, too.
            let is_there = || fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
            support::wait_for(|| !is_there()).await;
        }
    }
}

#[tokio::test]
async fn a_check_is_told_the_injected_variables() {
    let text = r#"socket="${PLATFORM_CONNECTOR_SOCKET#unix://}"
                  test "$NODE_NAME" = verify-node && test -S "$socket" || exit 9
                  # A container that mounts it may run as any user.
                  test "$(stat -c %a "$(dirname "$socket")")" = 755 || exit 8
                  test "$PROCESSING_STRATEGY" = STORE_ONLY && exit 0; exit 2"#;
    let (_, out) = verified(&script(text, Duration::from_secs(10))).await;
    assert!(
        out.contains("ok      EXECUTE_REMEDIATION: exits 0 (passed), 1 (failed) or 2"),
        "{out}"
    );
    assert!(out.contains("ok      STORE_ONLY: exits 0"), "{out}");
}

#[tokio::test]
async fn a_check_that_cannot_be_run_is_no_verdict() {
    let settings = VerifySettings {
        program: "/nowhere/check".into(),
        arguments: Vec::new(),
        timeout: Duration::from_secs(1),
    };
    let error = verify(&settings, &mut Vec::new()).await.unwrap_err();
    assert_eq!(error.to_string(), "/nowhere/check cannot be run");
}

/// Example of the documentation, with stubs from the stock generator.
#[tokio::test]
async fn the_example_of_the_documentation_keeps_the_contract() {
    let Some(python) = testkit::require(testkit::Component::PythonGrpc) else {
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/preflight-checks.md")).unwrap();
    let (_, example) = page.split_once("```python\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("check.py"), example).unwrap();
    let made = std::process::Command::new(&python)
        .args([
            "-m",
            "grpc_tools.protoc",
            "--python_out=.",
            "--grpc_python_out=.",
            "-I",
        ])
        .arg(root.join("proto"))
        .arg("health_event.proto")
        .current_dir(directory.path())
        .status();
    assert!(made.unwrap().success());
    // One directory has enough room, the other one has not.
    for (scratch, word) in [
        ("/", "a pass sends a healthy event"),
        ("/proc", "a failure sends an event"),
    ] {
        let settings = VerifySettings {
            program: "env".into(),
            arguments: vec![
                format!("SCRATCH={scratch}").into(),
                "SCRATCH_GB=0.001".into(),
                python.clone().into(),
                directory.path().join("check.py").into(),
            ],
            timeout: Duration::from_secs(60),
        };
        let (code, out) = verified(&settings).await;
        assert_eq!(code, 0, "{out}");
        assert!(out.contains(word), "{out}");
    }
}
