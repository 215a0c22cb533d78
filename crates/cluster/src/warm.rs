//! A connection kept ready beside the watch's own.
//!
//! The watch occupies its connection, and an idle one is closed after
//! [`SILENCE_TIMEOUT`](crate::connect::SILENCE_TIMEOUT). The first patch after a quiet hour
//! would have to wait for a new one, with its TLS handshake: tens of milliseconds that the
//! next job may need to land on the broken node. One small request every
//! [`EVERY`] keeps one open.

use std::time::Duration;

use http::Request;

use crate::Cluster;

/// Below the silence after which a connection is closed.
const EVERY: Duration = Duration::from_secs(25);
/// An answer that takes longer is not waited for.
const LIMIT: Duration = Duration::from_secs(10);

impl Cluster {
    /// Keeps a connection to the API server open. Never returns; the caller drops it.
    /// A failure is the watch's to report.
    pub async fn keep_warm(&self) {
        loop {
            // Everybody who is logged in may ask for the version, and it reads no object.
            if let Ok(request) = Request::get("/version").body(Vec::new()) {
                let asked = tokio::time::timeout(LIMIT, self.client.request_text(request)).await;
                tracing::trace!(ok = matches!(asked, Ok(Ok(_))), "connection kept open");
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}
