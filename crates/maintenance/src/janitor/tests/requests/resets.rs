//! GPU resets by a provider, on a board.

use super::*;
use crate::janitor::{Class, FoundOperation, ProviderAnswer, ProviderFailure, Question};

/// Time after which a provider is asked again.
const AGAIN: SignedDuration = SignedDuration::from_secs(30);

/// Returns a cluster with a provider for resets, and a reset whose signal is on its way.
fn sending() -> World {
    let mut world = World::new();
    world.provider = true;
    world.begin();
    world.ask(&reset("r1"));
    assert_eq!(world.asked, Some(Question::Send));
    // The signal is recorded before it is sent, and no Job is created.
    assert_eq!(world.says("SignalSent"), "Unknown Sending");
    assert_eq!(
        (world.labels()[PLUGIN].as_str(), &world.job),
        ("false", &None)
    );
    world
}

fn sent() -> World {
    let mut world = sending();
    world.answer(ProviderAnswer::Sent(Ok("i-1".to_owned())));
    assert_eq!(world.says("SignalSent"), "True Succeeded");
    assert_eq!(
        world.says("ResetJobCreated"),
        "True ResetJobCreationSucceeded"
    );
    assert_eq!(world.asked, None);
    world.passes(AGAIN);
    assert_eq!(world.asked, Some(Question::Ready("i-1".to_owned())));
    world
}

fn failed(class: Class) -> ProviderFailure {
    ProviderFailure::new(class, "REASON", "what happened")
}

impl World {
    fn answer(&mut self, answer: ProviderAnswer) {
        self.asked = None;
        let key = reset("r1");
        self.take(Input::Answered(key.clone(), key.title(), answer));
    }

    fn passes(&mut self, time: SignedDuration) {
        self.now += time;
        self.take(Input::Time);
    }

    /// Continues with another process. The response to the question is lost.
    fn crash(&mut self) {
        self.process = "p2".to_owned();
        self.asked = None;
        self.begin();
    }

    /// Returns a condition of the reset as `status reason`.
    fn says(&self, kind: &str) -> String {
        let status = &self.objects[&reset("r1")]["status"];
        let conditions = status["conditions"].as_array().into_iter().flatten();
        let mut found = conditions.filter(|one| one["type"] == kind);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let says = |one: &Value| format!("{} {}", text(&one["status"]), text(&one["reason"]));
        found.next().map(says).unwrap_or_default()
    }

    /// Returns the end of the reset, after checking that the services are restored.
    fn end(&self) -> String {
        assert_eq!((self.labels()[PLUGIN].as_str(), &self.job), ("true", &None));
        self.says("AttemptComplete").replace("True ", "")
    }
}

#[test]
fn a_provider_resets_in_the_place_of_the_job() {
    let mut world = sent();
    world.answer(ProviderAnswer::Ready(Ok(false)));
    assert_eq!(world.asked, None);
    world.passes(AGAIN);
    world.answer(ProviderAnswer::Ready(Ok(true)));
    assert_eq!(
        (world.phase(&reset("r1")), world.end().as_str()),
        ("Succeeded", "Succeeded")
    );
    assert_eq!(world.asked, None);
}

#[test]
fn what_its_provider_says_has_failed_is_followed_by_a_reboot() {
    let mut world = sent();
    world.answer(ProviderAnswer::Ready(Err(failed(Class::Permanent))));
    assert_eq!(world.says("ResetJobCompleted"), "False ResetJobFailed");
    assert_eq!(world.end(), "PermanentFailure");
    assert_eq!(world.asked, None);
}

#[test]
fn a_lost_answer_is_asked_for_and_nothing_is_sent_twice() {
    for crash in [false, true] {
        let mut world = sending();
        if crash {
            world.crash();
        } else {
            world.answer(ProviderAnswer::Sent(Err(failed(Class::Ambiguous))));
            assert_eq!(world.says("SignalSent"), "Unknown Unclear");
        }
        assert_eq!(world.asked, Some(Question::Find), "{crash}");
        world.answer(ProviderAnswer::Found(Err(failed(Class::Transient))));
        assert_eq!(world.asked, None);
        world.passes(AGAIN);
        assert_eq!(world.asked, Some(Question::Find));
        world.answer(ProviderAnswer::Found(Ok(FoundOperation::Sent(
            "i-1".to_owned(),
        ))));
        assert_eq!(world.says("SignalSent"), "True Succeeded");
        world.passes(AGAIN);
        world.answer(ProviderAnswer::Ready(Ok(true)));
        assert_eq!(world.end(), "Succeeded");
        // The signal was not sent, so it is sent again.
        let mut world = sending();
        world.crash();
        world.answer(ProviderAnswer::Found(Ok(FoundOperation::NotSent)));
        assert_eq!(world.asked, Some(Question::Send));
    }
}

#[test]
fn of_a_provider_that_cannot_tell_nobody_knows_and_a_person_is_asked() {
    let mut world = sending();
    world.crash();
    world.answer(ProviderAnswer::Found(Ok(FoundOperation::CannotTell)));
    assert_eq!(world.asked, None);
    world.passes(SignedDuration::from_mins(29));
    assert_eq!(world.phase(&reset("r1")), "InProgress");
    world.passes(SignedDuration::from_mins(1));
    world.passes(SignedDuration::from_mins(2));
    assert_eq!(world.says("Complete"), "False ResetSignalUnclear");
    assert_eq!(
        (world.end().as_str(), &world.asked),
        ("AmbiguousFailure", &None)
    );
    // A provider that accepts the signal and never reports its completion.
    let mut world = sent();
    for _ in 0..62 {
        world.answer(ProviderAnswer::Ready(Ok(false)));
        world.passes(AGAIN);
    }
    assert_eq!(world.says("Complete"), "False ResetTimeoutExceeded");
    assert_eq!(world.end(), "AmbiguousFailure");
}

#[test]
fn what_is_refused_ends_as_the_provider_says() {
    let mut world = sending();
    world.answer(ProviderAnswer::Sent(Err(failed(Class::Permanent))));
    assert_eq!(world.says("Complete"), "False ResetJobCreationFailed");
    assert_eq!(world.end(), "PermanentFailure");
    let mut world = sending();
    for _ in 0..5 {
        let wait = SignedDuration::from_secs(17);
        world.answer(ProviderAnswer::Sent(Err(
            failed(Class::Transient).after(wait)
        )));
        assert_eq!(
            (world.says("SignalSent").as_str(), &world.asked),
            ("Unknown Retrying", &None)
        );
        world.passes(wait - SignedDuration::from_secs(1));
        assert_eq!(world.asked, None);
        world.passes(SignedDuration::from_secs(1));
        assert_eq!(world.asked, Some(Question::Send));
    }
    world.answer(ProviderAnswer::Sent(Err(failed(Class::Transient))));
    assert_eq!(world.says("Complete"), "False ResetSignalNotTaken");
    assert_eq!(
        (world.end().as_str(), &world.asked),
        ("TransientFailure", &None)
    );
}

#[test]
fn one_that_is_deleted_waits_for_the_provider_and_then_no_longer() {
    for answers in [true, false] {
        let mut world = sent();
        let key = reset("r1");
        let now = json!(world.now);
        world.objects.get_mut(&key).unwrap()["metadata"]["deletionTimestamp"] = now;
        world.see(&key);
        assert_eq!(world.labels()[PLUGIN], "false");
        if answers {
            world.answer(ProviderAnswer::Ready(Ok(true)));
        } else {
            world.passes(SignedDuration::from_mins(2));
        }
        assert_eq!(world.labels()[PLUGIN], "true", "{answers}");
        assert!(!world.objects.contains_key(&key), "{answers}");
    }
}

#[test]
fn whoever_has_begun_a_reset_ends_it_whatever_the_configuration_says_then() {
    let mut world = World::new();
    world.ask(&reset("r1"));
    world.provider = true;
    world.crash();
    assert_eq!(world.asked, None);
    world.job_is("Complete");
    assert_eq!(world.phase(&reset("r1")), "Succeeded");
    let mut world = sending();
    world.provider = false;
    world.crash();
    assert_eq!((&world.asked, &world.job), (&None, &None));
    assert_eq!(world.phase(&reset("r1")), "InProgress");
}

#[test]
fn the_job_of_a_provider_is_known_by_its_operation_and_says_how_it_ended() {
    use crate::gpu_reset::ResetGpus;
    use crate::janitor::generic::{is_of, is_reset, reset_job};
    let gpus = ResetGpus {
        uuids: vec!["GPU-1".to_owned()],
        pci_bus_ids: vec!["0000:01:00.0".to_owned()],
    };
    let mut job = reset_job("n1", "op", &gpus, &settings());
    assert_eq!((is_of(&job, "op"), is_of(&job, "other")), (true, false));
    assert!(job["metadata"].get("ownerReferences").is_none());
    let pod = &job["spec"]["template"]["spec"];
    let env = &pod["containers"][0]["env"][0]["value"];
    assert_eq!(
        (&pod["nodeName"], env),
        (&json!("n1"), &json!("GPU-1,0000:01:00.0"))
    );
    assert_eq!(is_reset(&job, None), Ok(false));
    let condition =
        |kind: &str| json!({"conditions": [{"type": kind, "status": "True", "reason": "R"}]});
    job["status"] = condition("Complete");
    assert_eq!(is_reset(&job, None), Ok(true));
    job["status"] = condition("Failed");
    let failure = is_reset(&job, Some("it is held by x (pid 1)")).unwrap_err();
    assert_eq!(
        (failure.class, failure.message.as_str()),
        (Class::Permanent, "R: it is held by x (pid 1)")
    );
    job["status"] = Value::Null;
    job["metadata"]["deletionTimestamp"] = json!("2026-11-24T00:00:00Z");
    assert_eq!(is_reset(&job, None).unwrap_err().class, Class::Ambiguous);
}
