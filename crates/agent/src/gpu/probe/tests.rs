use tokio::task::JoinHandle;

use super::*;

const HELLO: &str = r#"echo '{"hello":{"protocol":2,"library":"/lib/nvml"}}'"#;
/// Reason in the last message of a child that cannot continue.
const CANNOT: &str = "the driver went away";
const HANGS: &str = r#"echo '{"doing":{"call":"nvmlDeviceGetUUID","gpu":3}}'; exec sleep 1000"#;

/// A watch whose children are shell scripts.
struct Watched {
    seen: mpsc::Receiver<Seen>,
    task: JoinHandle<()>,
}

impl Watched {
    fn new(script: &str) -> Self {
        Self::within(script, DEADLINE)
    }

    fn within(script: &str, deadline: Duration) -> Self {
        let (sender, seen) = mpsc::channel(1);
        let config = ProbeConfig {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            interval: Duration::ZERO,
            deadline,
        };
        let task = tokio::spawn(watch(config, sender));
        Self { seen, task }
    }

    async fn next(&mut self) -> Seen {
        self.seen.recv().await.expect("it goes on")
    }

    /// Returns the reason of the next interruption.
    async fn blind(&mut self) -> String {
        loop {
            if let Seen::Blind {
                reason,
                is_said,
                stuck,
            } = self.next().await
            {
                assert_eq!(stuck, 0);
                assert_eq!(is_said, reason == CANNOT, "{reason}");
                return reason;
            }
        }
    }
}

#[tokio::test]
async fn what_a_child_says_is_handed_on_and_another_follows_it() {
    let readings = r#"echo '{"readings":[{"uuid":"GPU-1","temperature_c":40}]}'"#;
    let cannot = r#"echo '{"cannot":"the driver went away"}'"#;
    let dcgm = r#"echo '{"dcgm":{"is_whole":true}}'"#;
    let mut watched = Watched::new(&format!("{HELLO}; {readings}; {dcgm}; {cannot}"));
    for _ in 0..2 {
        assert_eq!(watched.next().await, Seen::Library("/lib/nvml".to_owned()));
        let Seen::Readings(readings) = watched.next().await else {
            panic!("readings");
        };
        assert_eq!(readings[0].temperature_c, Some(40));
        let Seen::Dcgm(look) = watched.next().await else {
            panic!("a poll of DCGM");
        };
        assert!(look.is_whole);
        assert_eq!(watched.blind().await, CANNOT);
    }
}

#[tokio::test]
async fn a_child_that_hangs_is_ended_and_what_it_did_is_named() {
    let deadline = Duration::from_millis(200);
    let mut watched = Watched::within(&format!("{HELLO}; {HANGS}"), deadline);
    assert_eq!(
        watched.blind().await,
        "no answer for 0.2 s from nvmlDeviceGetUUID of GPU 3"
    );
    // The next child hangs as well.
    assert_eq!(watched.next().await, Seen::Library("/lib/nvml".to_owned()));
}

#[tokio::test]
async fn a_child_that_never_said_anything_hangs_in_its_start() {
    let mut watched = Watched::within("exec sleep 1000", Duration::from_millis(200));
    let expected = "no answer for 0.2 s from the start of the probe";
    assert_eq!(watched.blind().await, expected);
}

#[tokio::test]
async fn events_do_not_hide_that_a_call_hangs() {
    let event = r#"'{"event":{"uuid":null,"kind":"SingleBitEcc"}}'"#;
    let doing = r#"echo '{"doing":{"call":"nvmlDeviceGetUUID","gpu":3}}'"#;
    let script = format!("{doing}; while sleep 0.05; do echo {event}; done");
    let mut watched = Watched::within(&script, Duration::from_millis(500));
    assert_eq!(
        watched.blind().await,
        "no answer for 0.5 s from nvmlDeviceGetUUID of GPU 3"
    );
}

#[tokio::test]
async fn a_child_that_crashes_is_told_with_how_and_where() {
    let doing = r#"echo '{"doing":{"call":"nvmlInit_v2","gpu":null}}'"#;
    let mut watched = Watched::new(&format!("{HELLO}; {doing}; kill -SEGV $$"));
    let reason = watched.blind().await;
    assert!(reason.contains("signal: 11"), "{reason}");
    assert!(reason.ends_with("from nvmlInit_v2"), "{reason}");
}

#[tokio::test]
async fn a_child_that_says_nonsense_is_not_believed() {
    for (script, expected) in [
        (
            "echo 'NVRM: oops'; exec sleep 1000",
            r#"the probe sent "NVRM: oops""#,
        ),
        (
            r#"echo '{"hello":{"protocol":3,"library":""}}'; exec sleep 1000"#,
            "the probe has protocol version 3, this gpuwarden 2: restart gpuwarden",
        ),
        (
            "head -c 5000000 /dev/zero; exec sleep 1000",
            "cannot read from the probe: a line is longer than 4194304 bytes",
        ),
        (
            "echo -n '{\"readings\"'",
            r#"the probe sent "{\"readings\"""#,
        ),
    ] {
        let mut watched = Watched::new(script);
        assert_eq!(watched.blind().await, expected);
    }
}

#[tokio::test]
async fn a_program_that_cannot_be_started_is_said() {
    let (sender, mut seen) = mpsc::channel(1);
    let config = ProbeConfig {
        program: "/nowhere/gpuwarden".into(),
        arguments: Vec::new(),
        interval: Duration::ZERO,
        deadline: DEADLINE,
    };
    tokio::spawn(watch(config, sender));
    let Some(Seen::Blind { reason, .. }) = seen.recv().await else {
        panic!("blind");
    };
    assert!(
        reason.starts_with("cannot start /nowhere/gpuwarden: "),
        "{reason}"
    );
}

#[tokio::test]
async fn it_ends_its_child_when_nobody_listens() {
    let directory = tempfile::tempdir().unwrap();
    let alive = directory.path().join("pid");
    let script = format!("echo $$ > {}; {HELLO}; exec sleep 1000", alive.display());
    let mut watched = Watched::new(&script);
    watched.next().await;
    let pid = std::fs::read_to_string(&alive).unwrap();
    drop(watched.seen);
    watched.task.await.unwrap();
    let process = PathBuf::from("/proc").join(pid.trim());
    assert!(!process.exists(), "{}", process.display());
}

#[tokio::test]
async fn what_a_library_starts_ends_with_the_child() {
    let directory = tempfile::tempdir().unwrap();
    let started = directory.path().join("pid");
    for (then, messages) in [("exec sleep 1000", 1), ("exit 1", 2)] {
        let script = format!(
            "sleep 1000 & echo $! > {}; {HELLO}; {then}",
            started.display()
        );
        let mut watched = Watched::new(&script);
        for _ in 0..messages {
            watched.next().await;
        }
        let pid = std::fs::read_to_string(&started).unwrap();
        drop(watched.seen);
        watched.task.await.unwrap();
        let stat = PathBuf::from("/proc").join(pid.trim()).join("stat");
        let gone = async {
            // A zombie counts as ended.
            while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let gone = timeout(Duration::from_secs(60), gone).await;
        assert!(gone.is_ok(), "{then}: it is still there");
    }
}

#[tokio::test]
async fn no_third_child_is_started_while_two_cannot_be_ended() {
    let sleeping = || {
        let child = Command::new("sleep").arg("1000").kill_on_drop(true).spawn();
        child.unwrap()
    };
    let mut stuck = Stuck::default();
    let first = sleeping();
    let pid = first.id().unwrap().to_string();
    stuck.keep(first);
    assert!(stuck.has_room());
    stuck.keep(sleeping());
    assert!(!stuck.has_room());
    // The child ends after all.
    Command::new("kill").arg(pid).status().await.unwrap();
    while !stuck.has_room() {
        tokio::task::yield_now().await;
    }
    assert_eq!(stuck.count(), 1);
}
