//! Label provider: asks the owner of a machine by a label of its node. The owner's automation
//! acts, and removes the label.
//!
//! The patch that sets the label is the signal. `maintenance` defines the request, and the board
//! takes back what is left of it when its resource ends.

use std::sync::Arc;

use async_trait::async_trait;
use cluster::Cluster;
use maintenance::janitor::label::{LabelConfig, LabelRequest};
use maintenance::janitor::{Action, Class, FoundOperation, ProviderFailure};
use model::node::NodeView;
use serde_json::Value;

use crate::node::{boot_of, failure, is_ready, known_boot, node};
use crate::provider::{Provider, Signal};

/// Provider that asks owners of machines by labels.
#[derive(Debug)]
pub struct Label {
    cluster: Arc<Cluster>,
    config: LabelConfig,
}

// === impl Label ===

impl Label {
    /// Creates the provider.
    pub fn new(cluster: Arc<Cluster>, config: LabelConfig) -> Self {
        Self { cluster, config }
    }

    /// Reads a node, as an object and as a view.
    async fn node(&self, name: &str) -> Result<(Value, NodeView), ProviderFailure> {
        let object = node(&self.cluster, name).await?;
        let view = NodeView::from_object(object.clone());
        let view = view.unwrap_or_else(|| NodeView::unknown(name));
        Ok((object, view))
    }
}

#[async_trait]
impl Provider for Label {
    fn name(&self) -> &'static str {
        "label"
    }

    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        let Some(key) = self.config.key(signal.action) else {
            let what = format!("no label asks for a {}", signal.action.name());
            let class = Class::Permanent;
            return Err(ProviderFailure::new(class, "UNSUPPORTED_OPERATION", what));
        };
        let (object, view) = self.node(&signal.node).await?;
        let before = LabelRequest::read(&view);
        if let Some(own) = before.as_ref().filter(|one| is_of(one, signal)) {
            return Ok(own.boot_id.clone());
        }
        let other = before.filter(|other| other.is_open(&view));
        let other = other.map(|other| other.key);
        let taken = other.or_else(|| view.labels.contains_key(key).then(|| key.to_owned()));
        if let Some(key) = taken {
            let what = format!("the node has the label {key} already, for another request");
            let class = Class::Transient;
            return Err(ProviderFailure::new(class, "RESOURCE_BUSY", what));
        }
        let boot_id = match signal.action {
            Action::Reboot => known_boot(&object)?,
            _ => boot_of(&object),
        };
        let request = LabelRequest {
            operation: signal.operation.clone(),
            boot_id: boot_id.to_owned(),
            key: key.to_owned(),
        };
        let asked = self.cluster.apply(&view, &request.ask()).await;
        asked.map_err(|error| failure(&error))?;
        Ok(request.boot_id)
    }

    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure> {
        let (_, view) = self.node(&signal.node).await?;
        let request = LabelRequest::read(&view).filter(|one| is_of(one, signal));
        Ok(request.map_or(FoundOperation::NotSent, |one| {
            FoundOperation::Sent(one.boot_id)
        }))
    }

    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, ProviderFailure> {
        let (node, view) = self.node(&signal.node).await?;
        let boot_id = boot_of(&node);
        let open = LabelRequest::read(&view).is_some_and(|one| one.is_open(&view));
        // A label that is gone proves nothing: an owner may remove it before the machine is down.
        Ok(!open && is_ready(&node) && !boot_id.is_empty() && boot_id != request_id)
    }
}

fn is_of(request: &LabelRequest, signal: &Signal) -> bool {
    request.operation == signal.operation
}
