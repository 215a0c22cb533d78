//! Polling for a state.

use std::{
    fmt::Display,
    future::Future,
    time::{Duration, Instant},
};

use anyhow::bail;

/// Interval between two polls.
const INTERVAL: Duration = Duration::from_millis(20);

/// Polls until `probe` returns `Ok`, and returns its value.
///
/// `probe` returns the observed state as `Err`. On timeout, the error names the awaited state
/// and the last observed one. A poll that does not return also runs into the timeout.
pub async fn wait_for<T, S, F>(
    what: &str,
    timeout: Duration,
    mut probe: impl FnMut() -> F,
) -> anyhow::Result<T>
where
    S: Display,
    F: Future<Output = Result<T, S>>,
{
    let start = Instant::now();
    let mut last = None;
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        match tokio::time::timeout(left, probe()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(state)) => last = Some(format!("{state:#}")),
            Err(_) => {}
        }
        if start.elapsed() >= timeout {
            let last = last
                .as_deref()
                .unwrap_or("nothing: the first look did not come back");
            bail!("waited {timeout:?} for {what}; last seen: {last}");
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn returns_the_value_once_it_is_there() {
        let mut looks = 0;
        let value = wait_for("three looks", Duration::from_secs(5), || {
            looks += 1;
            let seen = looks;
            async move {
                if seen == 3 {
                    Ok(seen)
                } else {
                    Err(format!("{seen} looks"))
                }
            }
        });
        assert_eq!(value.await.unwrap(), 3);
    }

    #[tokio::test]
    async fn says_what_it_saw_last() {
        let never = || async { Err::<(), _>("still closed") };
        let error = wait_for("the door", Duration::from_millis(50), never)
            .await
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "waited 50ms for the door; last seen: still closed"
        );
    }

    #[tokio::test]
    async fn a_look_that_hangs_runs_out_of_time() {
        let hang = || pending::<Result<(), String>>();
        let error = wait_for("an answer", Duration::from_millis(50), hang)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("did not come back"), "{error}");
    }
}
