use contract::findings::MAX_FILE_BYTES;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn secs(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

fn pod(namespace: &str) -> PodView {
    PodView {
        namespace: namespace.to_owned(),
        name: "p".to_owned(),
        uid: "u".to_owned(),
        ..PodView::default()
    }
}

const BEGUN: Drain = Drain {
    since: Timestamp::UNIX_EPOCH,
    force: false,
};

fn config() -> DrainConfig {
    let text = r#"
        evictionTimeoutInSeconds = "60"
        deleteAfterTimeoutMinutes = 10
        [[userNamespaces]]
        name = "web-*"
        mode = "Immediate"
        [[userNamespaces]]
        name = "batch"
        mode = "DeleteAfterTimeout"
        [[userNamespaces]]
        name = "training"
        mode = "AllowCompletion"
        [[userNamespaces]]
        name = "web-late"
        mode = "AllowCompletion"
    "#;
    DrainConfig::parse(text, "drain.toml").unwrap()
}

#[test]
fn without_a_file_times_are_those_of_the_documentation() {
    let config = DrainConfig::default();
    let minutes = [
        config.eviction_grace,
        config.delete_after,
        config.unready_after,
        config.ask_after,
        config.checkpoint_limit,
    ];
    assert_eq!(minutes.map(|time| time.as_mins()), [5, 60, 5, 1440, 10]);
    assert_eq!(config.stuck_after, None);
}

#[test]
fn each_pod_is_decided_about_for_itself() {
    use DrainMode::{AllowCompletion, DeleteAfterTimeout, Immediate};
    let config = config();
    let pods = [
        (pod("web-1"), Fate::Leaves(Immediate, Next::Evict(secs(30)))),
        // The first entry that matches counts.
        (
            pod("web-late"),
            Fate::Leaves(Immediate, Next::Evict(secs(30))),
        ),
        (
            pod("training"),
            Fate::Leaves(AllowCompletion, Next::Wait(None)),
        ),
        (
            pod("batch"),
            Fate::Leaves(DeleteAfterTimeout, Next::Wait(Some(at(600)))),
        ),
        (pod("other"), Fate::Stays(Stay::NoMode)),
        (pod("kube-system"), Fate::Stays(Stay::System)),
        (
            PodView {
                of_daemon_set: true,
                ..pod("web-1")
            },
            Fate::Stays(Stay::DaemonSet),
        ),
        (
            PodView {
                is_static: true,
                ..pod("web-1")
            },
            Fate::Stays(Stay::Static),
        ),
        (
            PodView {
                finished: true,
                ..pod("web-1")
            },
            Fate::Stays(Stay::Finished),
        ),
    ];
    for (pod, expected) in pods {
        assert_eq!(fate(&pod, BEGUN, &config, at(100)), expected, "{pod:?}");
    }
    let forced = Drain {
        force: true,
        ..BEGUN
    };
    for namespace in ["training", "batch"] {
        let expected = Fate::Leaves(Immediate, Next::Evict(secs(30)));
        assert_eq!(fate(&pod(namespace), forced, &config, at(100)), expected);
    }
    // Force is no weaker than the configured mode: a pod that may be deleted is, once it has had
    // its time.
    for (namespace, next) in [("training", Next::Evict(secs(30))), ("batch", Next::Delete)] {
        let fate = fate(&pod(namespace), forced, &config, at(120));
        assert_eq!(fate, Fate::Leaves(Immediate, next));
    }
    let evicted = Next::Evict(secs(30));
    let wake = wake_at(&pod("batch"), evicted, &Gangs::default(), forced, &config);
    assert_eq!(wake, Some(at(120)));
    // Force does not reach pods that never leave.
    assert_eq!(
        fate(&pod("other"), forced, &config, at(100)),
        Fate::Stays(Stay::NoMode)
    );
}

#[test]
fn the_pods_own_grace_holds_up_to_the_limit() {
    for (own, expected) in [(None, 30), (Some(5), 5), (Some(0), 0), (Some(3600), 60)] {
        let pod = PodView {
            grace: own.map(secs),
            ..pod("web-1")
        };
        let next = Fate::Leaves(DrainMode::Immediate, Next::Evict(secs(expected)));
        assert_eq!(fate(&pod, BEGUN, &config(), at(0)), next);
    }
}

#[test]
fn without_a_configuration_a_pod_gets_300_seconds_at_most() {
    let text = "[[userNamespaces]]\nname = \"*\"\nmode = \"Immediate\"\n";
    let config = DrainConfig::parse(text, "c").unwrap();
    assert_eq!(config.eviction_grace, DrainConfig::default().eviction_grace);
    for (own, expected) in [(301, 300), (86_400, 300), (299, 299)] {
        let pod = PodView {
            grace: Some(secs(own)),
            ..pod("web-1")
        };
        let next = Fate::Leaves(DrainMode::Immediate, Next::Evict(secs(expected)));
        assert_eq!(fate(&pod, BEGUN, &config, at(0)), next);
    }
}

#[test]
fn who_is_deleted_at_last_was_asked_to_end_before() {
    let (config, pod) = (config(), pod("batch"));
    let next = |pod: &PodView, second| match fate(pod, BEGUN, &config, at(second)) {
        Fate::Leaves(_, next) => next,
        stays @ Fate::Stays(_) => panic!("{stays:?}"),
    };
    assert_eq!(next(&pod, 599), Next::Wait(Some(at(600))));
    assert_eq!(next(&pod, 600), Next::Evict(secs(30)));
    // The eviction was always refused.
    assert_eq!(next(&pod, 719), Next::Evict(secs(30)));
    assert_eq!(next(&pod, 720), Next::Delete);
    let ending = PodView {
        ends_by: Some(at(630)),
        ..pod.clone()
    };
    assert_eq!(next(&ending, 689), Next::Ends(at(690)));
    assert_eq!(next(&ending, 690), Next::Stuck);
    assert_eq!(next(&ending, 720), Next::Delete);
    // The next wake-up is just when something changes.
    let wake =
        |pod: &PodView, second| wake_at(pod, next(pod, second), &Gangs::default(), BEGUN, &config);
    assert_eq!(wake(&pod, 0), Some(at(600)));
    assert_eq!(wake(&pod, 600), Some(at(720)));
    assert_eq!(wake(&ending, 630), Some(at(690)));
    assert_eq!(wake(&ending, 690), Some(at(720)));
    assert_eq!(wake(&pod, 720), None);
}

#[test]
fn a_pod_that_somebody_deletes_counts_as_gone_when_it_is_gone() {
    let config = config();
    let ending = PodView {
        ends_by: Some(at(50)),
        ..pod("training")
    };
    let fate = |second| fate(&ending, BEGUN, &config, at(second));
    let mode = DrainMode::AllowCompletion;
    assert_eq!(fate(0), Fate::Leaves(mode, Next::Ends(at(110))));
    // The pod may still write: only a person knows.
    assert_eq!(fate(110), Fate::Leaves(mode, Next::Stuck));
    assert_eq!(fate(1_000_000), Fate::Leaves(mode, Next::Stuck));
}

/// As on a node whose kubelet is gone for good: nothing there ends a pod.
#[test]
fn a_pod_that_is_stuck_is_deleted_where_that_is_asked_for() {
    let text =
        "deleteStuckAfterMinutes = 5\n[[userNamespaces]]\nname = \"*\"\nmode = \"AllowCompletion\"";
    let config = DrainConfig::parse(text, "d").unwrap();
    let ending = PodView {
        ends_by: Some(at(100)),
        ..pod("training")
    };
    for (second, next) in [
        (0, Next::Ends(at(160))),
        (160, Next::Stuck),
        (459, Next::Stuck),
        (460, Next::Delete),
    ] {
        let fate = fate(&ending, BEGUN, &config, at(second));
        assert_eq!(fate, Fate::Leaves(DrainMode::AllowCompletion, next));
    }
    let gangs = Gangs::default();
    assert_eq!(
        wake_at(&ending, Next::Stuck, &gangs, BEGUN, &config),
        Some(at(460))
    );
    let negative = DrainConfig::parse("deleteStuckAfterMinutes = -1", "d");
    assert!(negative.is_err_and(|error| error.to_string().contains("deleteStuckAfterMinutes")));
}

#[test]
fn a_pod_that_does_no_work_is_not_waited_for() {
    let config = config();
    for namespace in ["training", "batch"] {
        let pod = PodView {
            unready_since: Some(at(10)),
            ..pod(namespace)
        };
        let fate = |second| fate(&pod, BEGUN, &config, at(second));
        let Fate::Leaves(_, next @ Next::Wait(_)) = fate(309) else {
            panic!("{:?}", fate(309));
        };
        let gangs = Gangs::default();
        assert_eq!(wake_at(&pod, next, &gangs, BEGUN, &config), Some(at(310)));
        let Fate::Leaves(_, Next::Evict(_)) = fate(310) else {
            panic!("{:?}", fate(310));
        };
    }
}

#[test]
fn only_pods_with_gpus_leave_where_that_is_asked_for() {
    let config = DrainConfig::parse(
        "drainGPUPods = true\n[[userNamespaces]]\nname = \"*\"\nmode = \"Immediate\"",
        "d",
    )
    .unwrap();
    assert_eq!(
        fate(&pod("a"), BEGUN, &config, at(0)),
        Fate::Stays(Stay::NoGpu)
    );
    let with = PodView {
        has_gpus: true,
        ..pod("a")
    };
    assert!(matches!(
        fate(&with, BEGUN, &config, at(0)),
        Fate::Leaves(..)
    ));
}

#[test]
fn the_charts_configuration_of_nvsentinel_loads() {
    // As its chart renders it, custom drain off.
    let text = r#"
        evictionTimeoutInSeconds = "60"
        systemNamespaces = "^(nvsentinel|kube-system|gpu-operator|gmp-system|network-operator|skyhook)$"
        deleteAfterTimeoutMinutes = 60
        notReadyTimeoutMinutes = 5
        drainGPUPods = false
        partialDrainEnabled = false
        [[userNamespaces]]
        name = "*"
        mode = "AllowCompletion"
        [customDrain]
        enabled = false
        timeout = "30m"
    "#;
    let config = DrainConfig::parse(text, "c").unwrap();
    assert_eq!(config.eviction_grace, secs(60));
    assert_eq!(
        config.mode_of(&pod("any")),
        Some(DrainMode::AllowCompletion)
    );
    assert!(config.is_system("skyhook") && !config.is_system("gpuwarden"));
    // An empty file names the same namespaces as no file.
    let silent = DrainConfig::parse("", "c").unwrap();
    assert_eq!(
        silent.mode_of(&pod("any")),
        Some(DrainMode::AllowCompletion)
    );
    let none = DrainConfig::parse("userNamespaces = []", "c").unwrap();
    assert_eq!(none.mode_of(&pod("any")), None);
    let default = DrainConfig::default();
    assert!(default.is_system("gpuwarden") && !default.is_system("default"));
}

#[test]
fn what_is_wrong_is_said_all_at_once_with_its_line() {
    let table = [
        (
            "evictionTimeoutInSeconds = \"30m\"\ndeleteAfterTimeoutMinutes = -1\n\
             systemNamespaces = \"(\"\n\
             [[userNamespaces]]\nname = \"*\"\nmode = \"Gently\"",
            &[
                "d:1: evictionTimeoutInSeconds is \"30m\"; write a whole number of seconds from 1 to 1000000",
                "d:2: deleteAfterTimeoutMinutes is -1; write a whole number of minutes from 0 to 1000000",
                "d:3: systemNamespaces: is not a regular expression",
                "d:6: userNamespaces[0].mode is \"Gently\"; write Immediate, AllowCompletion or DeleteAfterTimeout",
            ][..],
        ),
        (
            "evictionTimeout = 3",
            &["d:1: unknown key 'evictionTimeout'; there is evictionTimeoutInSeconds, "],
        ),
        (
            "\ndrainGPUPods = \"yes\"",
            &["d:2: drainGPUPods is \"yes\"; write true or false"],
        ),
        (
            "[[userNamespaces]]\nname = \"*\"",
            &["d:1: userNamespaces[0]: the key 'mode' is missing"],
        ),
        (
            "deleteAfterTimeoutMinutes = 99999999999",
            &["d:1: deleteAfterTimeoutMinutes is 99999999999; write a whole"],
        ),
    ];
    for (text, expected) in table {
        let error = DrainConfig::parse(text, "d").unwrap_err();
        assert_eq!(error.findings.len(), expected.len(), "{error}");
        for (finding, expected) in error.findings.iter().zip(expected) {
            assert!(finding.starts_with(expected), "{finding}\n{expected}");
        }
    }
    let large = " ".repeat(MAX_FILE_BYTES + 1);
    let error = DrainConfig::parse(&large, "d").unwrap_err().to_string();
    assert!(error.starts_with("d:1: it has 1048577 bytes"), "{error}");
}

#[test]
fn pods_of_one_namespace_leave_by_their_labels() {
    use DrainMode::{AllowCompletion, DeleteAfterTimeout, Immediate};
    let text = r#"
        [[podDrainPolicies]]
        name = "protected"
        namespace = "train-*"
        podSelector = "app in (trainer,worker),checkpoint,!disposable"
        mode = "AllowCompletion"
        [[podDrainPolicies]]
        name = "replaceable"
        podSelector = "app=worker"
        mode = "Immediate"
        [[podDrainPolicies]]
        name = "bounded"
        podSelector = "app notin (worker),deadline"
        mode = "DeleteAfterTimeout"
    "#;
    let config = DrainConfig::parse(text, "drain.toml").unwrap();
    let labelled = |namespace: &str, labels: &[&str]| PodView {
        labels: (labels.iter())
            .map(|label| {
                let (key, value) = label.split_once('=').unwrap_or((label, ""));
                (key.to_owned(), value.to_owned())
            })
            .collect(),
        ..pod(namespace)
    };
    for (namespace, labels, mode) in [
        (
            "train-1",
            &["app=worker", "checkpoint"][..],
            Some(AllowCompletion),
        ),
        (
            "train-1",
            &["app=worker", "checkpoint", "disposable"],
            Some(Immediate),
        ),
        ("web", &["app=worker", "checkpoint"], Some(Immediate)),
        (
            "web",
            &["app=db", "deadline=soon"],
            Some(DeleteAfterTimeout),
        ),
        ("web", &["app=db"], None),
        ("web", &[], None),
        ("kube-system", &["app=worker"], None),
    ] {
        let found = match fate(&labelled(namespace, labels), BEGUN, &config, at(0)) {
            Fate::Leaves(mode, _) => Some(mode),
            Fate::Stays(_) => None,
        };
        assert_eq!(found, mode, "{namespace} {labels:?}");
    }
}

#[test]
fn policies_of_pods_that_are_wrong_are_refused_with_their_place() {
    let policy = |name: &str, selector: &str, mode: &str| {
        format!(
            "[[podDrainPolicies]]\nname = \"{name}\"\npodSelector = \"{selector}\"\nmode = \"{mode}\"\n"
        )
    };
    let good = policy("a", "app", "Immediate");
    let namespaces = "[[userNamespaces]]\nname = \"*\"\nmode = \"Immediate\"\n";
    for (text, says) in [
        (
            good.clone() + &good,
            "d:6: podDrainPolicies[1].name: the name \"a\" is empty or taken",
        ),
        (policy(" ", "app", "Immediate"), "is empty or taken"),
        (
            policy("a", "", "Immediate"),
            "d:3: podDrainPolicies[0].podSelector: a requirement is empty",
        ),
        (policy("a", "app=(", "Immediate"), "podSelector"),
        (
            policy("a", "app", "Later"),
            "podDrainPolicies[0].mode is \"Later\"; write Immediate, ",
        ),
        (good.clone() + namespaces, "exclude each other"),
        (
            good.replace("podSelector", "labelSelector"),
            "labelSelector",
        ),
    ] {
        let error = DrainConfig::parse(&text, "d").unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}
