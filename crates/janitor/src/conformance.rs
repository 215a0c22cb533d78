//! Conformance tests for providers.
//!
//! A test of a provider implements [`World`], which creates machines and makes calls fail, and
//! runs [`all`]. Parts that a world does not support are skipped.

// Test code: a failure is a panic.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::SignedDuration;
use maintenance::gpu_reset::ResetGpus;
use maintenance::janitor::{Action, Class, FoundOperation};

use crate::provider::{Provider, Signal};

/// Result of the next signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Signals succeed with an immediate response.
    Fine,
    /// Signals are refused with "too many requests", with this retry delay if given.
    Throttled(Option<SignedDuration>),
    /// Signals are refused, permanently.
    Forbidden,
    /// Signals succeed, with a delayed response.
    Slow(Duration),
    /// Signals succeed, but the response is lost.
    AnswerLost,
    /// Signals reach nobody, and nobody responds.
    Away,
}

/// Machines of a provider, controlled by a test.
#[async_trait]
pub trait World: Send + Sync {
    /// Returns the provider under test.
    fn provider(&self) -> Arc<dyn Provider>;

    /// Creates a machine that has booted, with a node in the cluster, and returns its name.
    async fn machine(&self) -> String;

    /// Sets the result of the next signals. Returns false if that is not supported.
    async fn set(&self, weather: Weather) -> bool;

    /// Completes a reboot of a machine: it has a new boot, and its node is ready.
    async fn boots(&self, machine: &str);

    /// Makes the reboot of a machine fail permanently, as the provider sees it. Returns false
    /// if that is not supported.
    async fn fails(&self, machine: &str) -> bool;

    /// Completes a reset of a machine's GPUs, with success or failure. Returns false if that is
    /// not supported.
    async fn resets(&self, _machine: &str, _well: bool) -> bool {
        false
    }

    /// Returns the number of signals that a machine has received.
    async fn signals(&self, machine: &str) -> usize;
}

/// Runs all conformance tests.
pub async fn all(world: &dyn World) {
    sends_once_and_knows_it_again(world).await;
    says_when_a_machine_is_back(world).await;
    says_when_it_will_not_be(world).await;
    classes_what_goes_wrong(world).await;
    takes_slow_answers(world).await;
    finds_what_was_sent_when_the_answer_was_lost(world).await;
    knows_no_machine_that_is_not_there(world).await;
    terminates_or_says_that_it_cannot(world).await;
    resets_or_says_that_it_cannot(world).await;
}

/// Creates a signal with an operation of its own.
fn signal(action: Action, node: &str, operation: &str) -> Signal {
    Signal::new(action, node, &format!("{operation}-of-{node}"))
}

/// Repeated sends deliver one signal to the machine.
pub async fn sends_once_and_knows_it_again(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let first = signal(Action::Reboot, &machine, "first");
    assert_eq!(
        provider.find(&first).await.unwrap(),
        FoundOperation::NotSent
    );
    let request = provider.send(&first).await.unwrap();
    assert!(!request.is_empty());
    assert_eq!(provider.send(&first).await.unwrap(), request);
    assert_eq!(
        provider.find(&first).await.unwrap(),
        FoundOperation::Sent(request.clone())
    );
    assert_eq!(world.signals(&machine).await, 1);
    let other = signal(Action::Reboot, &machine, "other");
    assert_eq!(
        provider.find(&other).await.unwrap(),
        FoundOperation::NotSent
    );
}

/// A machine is ready after it has booted, and not because it was ready before.
pub async fn says_when_a_machine_is_back(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let signal = signal(Action::Reboot, &machine, "reboot");
    let request = provider.send(&signal).await.unwrap();
    // The machine has not booted, so it is not ready.
    for _ in 0..3 {
        assert!(!provider.is_ready(&signal, &request).await.unwrap());
    }
    world.boots(&machine).await;
    assert!(provider.is_ready(&signal, &request).await.unwrap());
}

/// A reboot that failed permanently is reported as such.
pub async fn says_when_it_will_not_be(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let signal = signal(Action::Reboot, &machine, "reboot");
    let request = provider.send(&signal).await.unwrap();
    if world.fails(&machine).await {
        let failure = provider.is_ready(&signal, &request).await.unwrap_err();
        assert_eq!(failure.class, Class::Permanent, "{failure:?}");
    }
}

/// The class of a failure is right about whether the machine may have received the signal.
pub async fn classes_what_goes_wrong(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let wait = Some(SignedDuration::from_secs(17));
    for (weather, class, retry_after) in [
        (Weather::Throttled(wait), Some(Class::Transient), wait),
        (Weather::Throttled(None), Some(Class::Transient), None),
        (Weather::Forbidden, Some(Class::Permanent), None),
        // Depending on the provider, it is known whether the signal was sent.
        (Weather::Away, None, None),
    ] {
        if !world.set(weather).await {
            continue;
        }
        let signal = signal(Action::Reboot, &machine, "refused");
        let failure = provider.send(&signal).await.unwrap_err();
        match class {
            Some(class) => assert_eq!(failure.class, class, "{weather:?}: {failure:?}"),
            None => assert_ne!(failure.class, Class::Permanent, "{weather:?}: {failure:?}"),
        }
        assert_eq!(failure.retry_after, retry_after, "{weather:?}: {failure:?}");
        assert!(!failure.text().is_empty());
        if weather == Weather::Away {
            // An unreachable service cannot confirm that the signal was not sent, unless the
            // provider has its own record.
            match provider.find(&signal).await {
                Ok(found) => assert_eq!(found, FoundOperation::NotSent),
                Err(unknown) => assert_ne!(unknown.class, Class::Permanent, "{unknown:?}"),
            }
        }
        assert!(world.set(Weather::Fine).await);
        assert_eq!(
            provider.find(&signal).await.unwrap(),
            FoundOperation::NotSent
        );
        assert_eq!(world.signals(&machine).await, 0, "{weather:?}");
    }
    // A refusal is not permanent.
    let signal = signal(Action::Reboot, &machine, "refused");
    provider.send(&signal).await.unwrap();
    assert_eq!(world.signals(&machine).await, 1);
}

/// A delayed response is awaited.
pub async fn takes_slow_answers(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    if world.set(Weather::Slow(Duration::from_millis(300))).await {
        let signal = signal(Action::Reboot, &machine, "slow");
        let request = provider.send(&signal).await.unwrap();
        assert!(world.set(Weather::Fine).await);
        assert_eq!(
            provider.find(&signal).await.unwrap(),
            FoundOperation::Sent(request)
        );
        assert_eq!(world.signals(&machine).await, 1);
    }
}

/// A signal with a lost response is found, and not sent again.
pub async fn finds_what_was_sent_when_the_answer_was_lost(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    if world.set(Weather::AnswerLost).await {
        let signal = signal(Action::Reboot, &machine, "lost");
        let failure = provider.send(&signal).await.unwrap_err();
        assert_eq!(failure.class, Class::Ambiguous, "{failure:?}");
        assert!(world.set(Weather::Fine).await);
        let found = provider.find(&signal).await.unwrap();
        let FoundOperation::Sent(request) = found else {
            panic!("{found:?}");
        };
        assert_eq!(provider.send(&signal).await.unwrap(), request);
        assert_eq!(world.signals(&machine).await, 1);
    }
}

/// An unknown machine is a permanent failure.
pub async fn knows_no_machine_that_is_not_there(world: &dyn World) {
    let signal = signal(Action::Reboot, "no-such-machine", "any");
    let failure = world.provider().send(&signal).await.unwrap_err();
    assert_eq!(failure.class, Class::Permanent, "{failure:?}");
}

/// A termination is carried out once, or is not supported.
pub async fn terminates_or_says_that_it_cannot(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let signal = signal(Action::Terminate, &machine, "terminate");
    match provider.send(&signal).await {
        Ok(request) => {
            assert_eq!(provider.send(&signal).await.unwrap(), request);
            assert_eq!(world.signals(&machine).await, 1);
        }
        Err(failure) => {
            assert_eq!(failure.class, Class::Permanent, "{failure:?}");
            assert_eq!(world.signals(&machine).await, 0);
        }
    }
}

/// GPUs are reset once and the result is reported, or resets are not supported.
pub async fn resets_or_says_that_it_cannot(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let first = reset(&machine, "first");
    let request = match provider.send(&first).await {
        Ok(request) => request,
        Err(failure) => {
            assert_eq!(failure.class, Class::Permanent, "{failure:?}");
            assert_eq!(world.signals(&machine).await, 0);
            return;
        }
    };
    assert_eq!(provider.send(&first).await.unwrap(), request);
    let sent = FoundOperation::Sent(request.clone());
    assert_eq!(provider.find(&first).await.unwrap(), sent);
    let other = provider.find(&reset(&machine, "other")).await.unwrap();
    assert_eq!(other, FoundOperation::NotSent);
    assert_eq!(world.signals(&machine).await, 1);
    assert!(!provider.is_ready(&first, &request).await.unwrap());
    if world.resets(&machine, true).await {
        assert!(provider.is_ready(&first, &request).await.unwrap());
    }
    says_when_a_reset_has_failed(world).await;
    refuses_resets_for_now(world).await;
    finds_a_reset_whose_answer_was_lost(world).await;
}

async fn says_when_a_reset_has_failed(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let signal = reset(&machine, "fails");
    let request = provider.send(&signal).await.unwrap();
    if world.resets(&machine, false).await {
        let failure = provider.is_ready(&signal, &request).await.unwrap_err();
        assert_eq!(failure.class, Class::Permanent, "{failure:?}");
        assert!(!failure.message.is_empty());
    }
}

async fn refuses_resets_for_now(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let signal = reset(&machine, "throttled");
    let wait = Some(SignedDuration::from_secs(17));
    if world.set(Weather::Throttled(wait)).await {
        let failure = provider.send(&signal).await.unwrap_err();
        assert_eq!(
            (failure.class, failure.retry_after),
            (Class::Transient, wait)
        );
        assert!(world.set(Weather::Fine).await);
        assert_eq!(
            provider.find(&signal).await.unwrap(),
            FoundOperation::NotSent
        );
        assert_eq!(world.signals(&machine).await, 0);
        provider.send(&signal).await.unwrap();
        assert_eq!(world.signals(&machine).await, 1);
    }
}

async fn finds_a_reset_whose_answer_was_lost(world: &dyn World) {
    let (provider, machine) = (world.provider(), world.machine().await);
    let signal = reset(&machine, "lost");
    if world.set(Weather::AnswerLost).await {
        let failure = provider.send(&signal).await.unwrap_err();
        assert_eq!(failure.class, Class::Ambiguous, "{failure:?}");
        assert!(world.set(Weather::Fine).await);
        let FoundOperation::Sent(request) = provider.find(&signal).await.unwrap() else {
            panic!("the reset is not known");
        };
        assert_eq!(provider.send(&signal).await.unwrap(), request);
        assert_eq!(world.signals(&machine).await, 1);
    }
}

/// Creates a signal to reset one GPU.
fn reset(node: &str, operation: &str) -> Signal {
    let gpus = ResetGpus {
        uuids: vec!["GPU-1".to_owned()],
        ..ResetGpus::default()
    };
    Signal {
        resource: operation.to_owned(),
        gpus,
        ..signal(Action::Reset, node, operation)
    }
}
