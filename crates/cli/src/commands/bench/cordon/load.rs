//! Load of other events of the same node, as its monitors send them during a fault.

use std::time::{Duration, Instant};

use contract::HealthEvent;
use contract::proto::platform_connector_client::PlatformConnectorClient;
use jiff::Timestamp;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::{event, send};

/// Time from one event to the next: 200 per second.
const EVERY: Duration = Duration::from_millis(5);
/// Most events without an answer; further events wait.
const UNANSWERED: usize = 64;
/// Number of GPUs in the events. Each GPU has one open fault, which does not quarantine the node.
const GPUS: u32 = 16;

/// Sends events until [`Load::stop`].
pub(super) struct Load {
    began: Instant,
    cancel: CancellationToken,
    sending: JoinHandle<anyhow::Result<u32>>,
}

// === impl Load ===

impl Load {
    /// Starts sending events of `node`.
    pub(super) fn start(
        connector: PlatformConnectorClient<Channel>,
        node: &str,
    ) -> anyhow::Result<Self> {
        let cancel = CancellationToken::new();
        let sending = keep_sending(connector, events(node)?, cancel.clone());
        Ok(Self {
            began: Instant::now(),
            cancel,
            sending: tokio::spawn(sending),
        })
    }

    /// Stops, and returns the accepted events per second, or an error if one was rejected.
    pub(super) async fn stop(self) -> anyhow::Result<f64> {
        self.cancel.cancel();
        let taken = self.sending.await??;
        Ok(f64::from(taken) / self.began.elapsed().as_secs_f64())
    }
}

/// Sends until `cancel`. Returns the number of accepted events.
async fn keep_sending(
    connector: PlatformConnectorClient<Channel>,
    events: Vec<HealthEvent>,
    cancel: CancellationToken,
) -> anyhow::Result<u32> {
    // The interval makes up for missed ticks, so that the rate is constant.
    let mut turns = tokio::time::interval(EVERY);
    let mut unanswered = JoinSet::new();
    let mut taken = 0;
    for event in events.iter().cycle() {
        tokio::select! {
            () = cancel.cancelled() => break,
            _ = turns.tick() => {}
        }
        while unanswered.len() >= UNANSWERED
            && let Some(done) = unanswered.join_next().await
        {
            taken += done??;
        }
        let (mut connector, mut event) = (connector.clone(), event.clone());
        event.generated_timestamp = Some(contract::json::proto_timestamp(Timestamp::now()));
        unanswered.spawn(async move { send(&mut connector, event).await.map(|()| 1) });
    }
    while let Some(done) = unanswered.join_next().await {
        taken += done??;
    }
    Ok(taken)
}

/// Returns application faults, one for each GPU.
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
