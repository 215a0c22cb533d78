//! Other events of the same node, as its monitors send them while a fault comes in.

use std::time::{Duration, Instant};

use contract::HealthEvent;
use contract::proto::platform_connector_client::PlatformConnectorClient;
use jiff::Timestamp;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::{event, send};

/// Senders that take turns.
const SENDERS: u32 = 4;
/// One of them sends this often: 200 events a second.
const EVERY: Duration = Duration::from_millis(5);
/// GPUs that the events name in turns; each is one open fault, which takes no node out.
const GPUS: u32 = 16;

/// Events that are being sent.
pub(super) struct Load {
    began: Instant,
    cancel: CancellationToken,
    senders: JoinSet<anyhow::Result<u32>>,
}

// === impl Load ===

impl Load {
    /// Begins to send events of `node`.
    pub(super) fn start(
        connector: &PlatformConnectorClient<Channel>,
        node: &str,
    ) -> anyhow::Result<Self> {
        let events = events(node)?;
        let (began, cancel) = (Instant::now(), CancellationToken::new());
        let mut senders = JoinSet::new();
        for sender in 0..SENDERS {
            let sending = keep_sending(connector.clone(), events.clone(), sender, cancel.clone());
            senders.spawn(sending);
        }
        Ok(Self {
            began,
            cancel,
            senders,
        })
    }

    /// Ends it; how many events a second were taken. An error where one was refused.
    pub(super) async fn stop(mut self) -> anyhow::Result<f64> {
        let took = self.began.elapsed();
        self.cancel.cancel();
        let mut sent = 0;
        while let Some(done) = self.senders.join_next().await {
            sent += done??;
        }
        Ok(f64::from(sent) / took.as_secs_f64())
    }
}

async fn keep_sending(
    mut connector: PlatformConnectorClient<Channel>,
    events: Vec<HealthEvent>,
    sender: u32,
    cancel: CancellationToken,
) -> anyhow::Result<u32> {
    let first = tokio::time::Instant::now() + EVERY * sender;
    let mut turns = tokio::time::interval_at(first, EVERY * SENDERS);
    let mut sent = 0;
    for event in events.iter().cycle() {
        tokio::select! {
            () = cancel.cancelled() => break,
            _ = turns.tick() => {}
        }
        let mut event = event.clone();
        event.generated_timestamp = Some(contract::json::proto_timestamp(Timestamp::now()));
        send(&mut connector, event).await?;
        sent += 1;
    }
    Ok(sent)
}

/// Faults of applications, one for each GPU.
fn events(node: &str) -> anyhow::Result<Vec<HealthEvent>> {
    let line = |gpu| {
        format!(
            "NVRM: Xid (PCI:0000:{gpu:02x}:00): 31, pid=48213, name=python3, Ch 00000008, intr \
             00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f2c_41bd4000"
        )
    };
    (0..GPUS).map(|gpu| event(&line(gpu), node)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_other_events_take_no_node_out() {
        let events = events("n").unwrap();
        let subjects: BTreeSet<String> = events
            .iter()
            .map(|event| format!("{:?}", event.entities_impacted))
            .collect();
        assert_eq!(subjects.len(), GPUS as usize);
        for event in events {
            assert!(!event.is_fatal);
            assert_ne!(
                event.recommended_action,
                contract::RecommendedAction::ReplaceVm as i32
            );
        }
    }
}
