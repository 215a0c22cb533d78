//! Interfaces to the outside world: protobuf messages, the JSON forms of a health event, names
//! on Kubernetes nodes, and configuration files.
//!
//! This crate decides nothing and does no I/O. Names and numbers are those of NVSentinel, so
//! that its monitors, dashboards and scripts keep working; gpuwarden's own names start with
//! `gpuwarden.dev/`.

mod accepted;
mod action;
pub mod findings;
pub mod json;
pub mod keys;
pub mod names;
pub mod nearest;

/// Protobuf messages and the gRPC service of package `datamodels`.
///
/// Generated from `proto/health_event.proto` by `cargo xtask generate`. Enumerations
/// are open: their fields are `i32`, so that an unknown number survives a round trip.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod proto {
    include!("generated/datamodels.rs");
}

/// Protobuf messages and gRPC services of the Device API, package `gpuwarden.device.v1alpha1`.
///
/// Generated from `proto/device.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod device {
    include!("generated/gpuwarden.device.v1alpha1.rs");
}

/// Protobuf messages and the gRPC service of `NVSentinel`'s GPU API, package
/// `nvidia.nvsentinel.v1alpha1`.
///
/// Generated from `proto/nvsentinel_device.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod nvsentinel_device {
    include!("generated/nvidia.nvsentinel.v1alpha1.rs");
}

/// Protobuf messages and the gRPC service that lets job launchers query the health of a node,
/// package `nvhcd`.
///
/// Generated from `proto/nvhcd.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod nvhcd {
    include!("generated/nvhcd.rs");
}

/// Protobuf messages and the gRPC service of the kubelet that reports the devices of its pods,
/// package `v1` (podresources).
///
/// Generated from `proto/podresources.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod pod_resources {
    include!("generated/v1.rs");
}

/// Protobuf messages and the gRPC service of the controller that receives the state of nodes
/// from agents, package `gpuwarden.node.v1alpha1`.
///
/// Generated from `proto/node.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod node {
    include!("generated/gpuwarden.node.v1alpha1.rs");
}

/// Protobuf messages and the gRPC service that counts preflight checks, package `gpuwarden.v1`.
///
/// Generated from `proto/preflight.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod preflight {
    include!("generated/gpuwarden.v1.rs");
}

/// Protobuf messages and the gRPC service of a janitor's provider, which acts on nodes, package
/// `nvidia.nvsentinel.janitor.v1alpha1`.
///
/// Generated from `proto/janitor_provider.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod janitor_provider {
    include!("generated/nvidia.nvsentinel.janitor.v1alpha1.rs");
}

/// Protobuf messages with the details of a gRPC error, package `google.rpc`.
///
/// Generated from `proto/google_rpc.proto` by `cargo xtask generate`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::restriction,
    clippy::derive_partial_eq_without_eq
)]
#[rustfmt::skip]
pub mod google_rpc {
    include!("generated/google.rpc.rs");
}

/// Descriptors of all protobuf files, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("generated/descriptors.bin");

pub use accepted::{accepted, mark_accepted};
pub use action::{action_name, effective_action_name, parse_action, parse_strategy, strategy_name};
pub use proto::{
    BehaviourOverrides, Entity, HealthEvent, HealthEvents, ProcessingStrategy, RecommendedAction,
};

/// Version of the event contract that gpuwarden's monitors send (`HealthEvent.version`).
pub const EVENT_VERSION: u32 = 1;
/// Longest metadata key or value (bytes).
pub const MAX_METADATA_BYTES: usize = 4 * 1024;
