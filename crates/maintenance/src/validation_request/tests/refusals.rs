//! Refusals: invalid files, tests that cannot run, objects of others, and conflicts.

use super::*;

#[test]
fn an_object_that_the_api_server_refuses_is_a_failed_attempt() {
    let mut world = World::new(&["a"]);
    world.refuses = Some("no such image");
    world.ask("r", &["a"], &[]);
    world.run(usize::MAX);
    let status = world.status("r");
    assert_eq!(status.phase, Some(Phase::Failed));
    let message = status.test_groups[0].attempts[1].message.as_deref();
    assert_eq!(message, Some("its object cannot be made: no such image"));
}

#[test]
fn too_few_nodes_leave_a_test_out_or_fail_it() {
    let mut world = World::new(&["a"]);
    world.ask("ignores", &["a"], &["allreduce"]);
    world.ask("strict", &["a"], &["strict"]);
    world.ask("unknown", &["a"], &["diag", "no-such"]);
    world.run(usize::MAX);
    let status = world.status("ignores");
    assert_eq!(status.phase, Some(Phase::Succeeded));
    assert_eq!(status.skipped.tests, ["allreduce"]);
    for (name, why) in [
        ("strict", "a test has too few nodes"),
        (
            "unknown",
            "there is no test no-such; there are allreduce, diag, loopback, strict",
        ),
    ] {
        let status = world.status(name);
        assert_eq!(status.phase, Some(Phase::Failed));
        assert_eq!(status.message.as_deref(), Some(why));
    }
    assert_eq!(world.made, 0);
}

#[test]
fn what_still_ends_is_waited_for() {
    let mut world = World::new(&["a"]);
    world.lingers = true;
    world.ask("r", &["a"], &["diag", "loopback"]);
    world.run(usize::MAX);
    // A retry of the group, another group of the node, and the end.
    for (before, passes) in [false, true, true].into_iter().enumerate() {
        assert_eq!(world.made, before + 1);
        world.end(passes);
        world.run(usize::MAX);
        let waits = world.status("r").message.unwrap();
        assert!(
            waits.ends_with("the object of its last attempt is not gone"),
            "{waits}"
        );
        assert_eq!(world.node("a").2, Some("validating"));
        world.objects.clear();
        world.run(usize::MAX);
    }
    assert_eq!(world.status("r").phase, Some(Phase::Succeeded));
    world.ask("s", &["a"], &[]);
    world.run(usize::MAX);
    world.delete("s");
    world.ask("t", &["a"], &[]);
    world.run(usize::MAX);
    assert!(world.requests.contains_key("s"));
    assert_eq!((world.node("a").2, world.made), (Some("validating"), 4));
    world.objects.clear();
    world.run(usize::MAX);
    assert!(!world.requests.contains_key("s"));
}

#[test]
fn a_test_that_was_left_out_makes_up_for_nothing() {
    let mut world = World::new(&["a", "b"]);
    world.ask("f", &["a", "b"], &["allreduce"]);
    world.run(usize::MAX);
    world.end(false);
    world.run(usize::MAX);
    assert_eq!(world.status("f").phase, Some(Phase::Failed));
    let why = "allreduce-group-1: R: said";
    assert_eq!(world.status("f").message.as_deref(), Some(why));
    world.ask("r", &["a"], &["allreduce"]);
    world.run(usize::MAX);
    assert_eq!(world.status("r").phase, Some(Phase::Succeeded));
    assert_eq!(world.node("a").2, Some("validation-failed"));
    // A malformed request still holds its node.
    world.requests.remove("f");
    world.unreadable.insert("f".to_owned());
    world.ask("q", &["a"], &["loopback"]);
    world.run(usize::MAX);
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.node("a").2, Some("validation-failed"));
    // Another party removes its finalizer: the next request finds a record without a request.
    world.unreadable.clear();
    world.ask("s", &["a"], &["loopback"]);
    world.run(usize::MAX);
    world.end(true);
    world.run(usize::MAX);
    assert_eq!(world.node("a"), LET_IN);
}

#[test]
fn what_leaves_the_configuration_fails() {
    let mut world = World::new(&["a"]);
    world.ask("r", &["a"], &[]);
    world.run(usize::MAX);
    world.config.providers.remove("jobs");
    world.run(usize::MAX);
    let why = "diag-group-1: the configuration has no provider jobs";
    assert_eq!(world.status("r").message.as_deref(), Some(why));
}

#[test]
fn requests_whose_names_begin_alike_have_objects_of_their_own() {
    let mut world = World::new(&["a", "b"]);
    let long = "a-name-that-goes-on-and-on-and-on-and-on-and-on-and-on-and-on";
    let (one, other) = (format!("{long}-1"), format!("{long}-2"));
    world.ask(&one, &["a"], &[]);
    world.ask(&other, &["b"], &[]);
    world.run(usize::MAX);
    assert_eq!(world.made, 2);
}

#[test]
fn an_object_of_somebody_else_is_left_alone() {
    let mut world = World::new(&["a"]);
    world.ask("r", &["a"], &[]);
    let key = ("jobs".to_owned(), "r-diag-group-1-1".to_owned());
    let theirs = json!({"metadata": {"name": key.1, "uid": "theirs"}});
    world.objects.insert(key.clone(), theirs.clone());
    world.run(usize::MAX);
    let status = world.status("r");
    let message = status.test_groups[0].attempts[0].message.as_deref();
    assert_eq!(message, Some("another object has its name"));
    assert_eq!(world.objects[&key], theirs);
}

#[test]
fn what_is_wrong_in_the_file_is_said() {
    let read = |_: &str| Err(std::io::ErrorKind::NotFound.into());
    for (from, to, why) in [
        (
            "defaultTests: [diag]",
            "defaultTests: [other]",
            "f:14: spec.defaultTests[0]: there is no test \"other\"",
        ),
        (
            "provider: jobs",
            "provider: none",
            "spec.tests.diag: there is no provider \"none\"",
        ),
        (
            "maxConcurrentGroups: 2",
            "maxConcurrentGroups: 0",
            "f:15: spec.maxConcurrentGroups is 0; no test would ever run",
        ),
        (
            "retries: 1,",
            "retries: 1000,",
            "spec.providers.jobs.retries is 1000; write a whole number from 0 to 100",
        ),
        (
            "timeoutSeconds: 600",
            "timeoutSeconds: 0",
            "spec.providers.jobs.timeoutSeconds is 0; write a whole number of seconds from 1 to 604800",
        ),
        ("kind: Gang\n", "kind: Other\n", "is not a Gang of x/v1"),
        ("{{.Image}}", "{{.Picture}}", "there is no field Picture"),
        (
            "templateFile: gang.yaml",
            "templateFile: no.yaml",
            "/no.yaml cannot be read",
        ),
        ("quantity(", "amount(", "there is no function 'amount'"),
        (
            "spec:\n  sched",
            "spec:\n  other: 1\n  sched",
            "unknown key 'spec.other'; there is defaultTests, ",
        ),
        (
            "retries: 1,",
            "retries: some,",
            "spec.providers.jobs.retries is some; write a whole number",
        ),
        (
            "type: Complete",
            "type: ''",
            "spec.providers.jobs.successfulCondition: it lacks its type",
        ),
        (
            "minimumNodesPerBatch: 1,",
            "minimumNodesPerBatch: 0, x: 1,",
            "unknown key 'spec.tests.loopback.x'; there is provider, image, ",
        ),
        (
            "diag: {provider",
            "diag: {minimumNodesPerBatch: 2, provider",
            "spec.tests.diag.minimumNodesPerBatch is 2; that is above 1, and supportsBatchingNodes",
        ),
    ] {
        assert!(CONFIG.contains(from), "{from}");
        let text = CONFIG.replacen(from, to, 1);
        let error = ValidationConfiguration::parse(&text, "f", read).expect_err(to);
        let error = error.to_string();
        assert!(
            error.starts_with("f:") && error.contains(why),
            "{to}: {error}"
        );
    }
    let large = "#".repeat(contract::findings::MAX_FILE_BYTES + 1);
    let error = ValidationConfiguration::parse(&large, "f", read).expect_err("too large");
    assert!(error.to_string().starts_with("f:1: it has 1048577 bytes"));
}
