//! Tests that a log which cannot be read shows as failing, and not as one without faults.

use super::*;

#[tokio::test]
async fn a_source_that_cannot_be_opened_is_shown_and_tried_again() {
    let mut bench = Bench::new();
    std::fs::create_dir(bench.log()).unwrap();
    let running = bench.start();
    running
        .status(|status| {
            // The problem is short, and the advice is separate.
            let advice = status.advice.as_deref().unwrap_or_default();
            status.state == SourceState::Failing
                && status.detail.ends_with("is a directory")
                && advice.starts_with("name a file")
        })
        .await;
    std::fs::remove_dir(bench.log()).unwrap();
    bench.append("");
    running
        .status(|status| status.state == SourceState::Following && status.advice.is_none())
        .await;
    running.end().await;
}

#[tokio::test]
async fn a_file_that_is_not_there_is_waited_for_and_nothing_passes_for_seen() {
    let mut bench = Bench::new();
    let running = bench.start();
    let waiting = format!("{} does not exist; waiting for it", bench.log().display());
    running
        .status(|status| status.state == SourceState::Failing && status.detail == waiting)
        .await;
    bench.append("");
    running
        .status(|status| {
            status.state == SourceState::Following
                && status.detail == bench.log().display().to_string()
        })
        .await;
    bench.append(&at(1, 10, XID_79));
    bench.stored_at_least(1).await;
    // A file that was rotated away is still read, and is not reported as missing.
    std::fs::remove_file(bench.log()).unwrap();
    running.following().await;
    running.end().await;
}
