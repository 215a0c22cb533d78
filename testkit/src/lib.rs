//! Test kit: a real Kubernetes control plane, the product as a process, the kernel log under a
//! lock, and polling that reports the last state.
//!
//! - [`ControlPlane`]: etcd, API server, controller manager and scheduler as separate processes,
//!   shared by all tests or private to one.
//! - [`node`], [`pod`], [`unique`]: objects in the control plane, with unique names.
//! - [`Product`]: the `gpuwarden` binary, started, killed and restarted.
//! - [`Authority`]: certificates for TLS.
//! - [`KernelLog`]: `/dev/kmsg`, used by one test at a time on the whole machine.
//! - [`Log`]: log lines of a test.
//! - [`Network`]: network namespaces as hosts, some slow or cut off.
//! - [`wait_for`]: polling until a state is reached.
//! - [`require`], [`skip`]: components that a test needs beyond Rust, and skips that are
//!   counted.
//!
//! Components come from `cargo xtask setup` (see [`components`]). `cargo xtask test` runs it,
//! and counts the skips.

pub mod components;
mod network;
mod skip;
pub mod supervisor;

#[cfg(feature = "tests")]
mod balancer;
#[cfg(feature = "tests")]
mod certificates;
#[cfg(feature = "tests")]
mod control_plane;
#[cfg(feature = "tests")]
mod kernel_log;
#[cfg(feature = "tests")]
mod log;
#[cfg(feature = "tests")]
mod objects;
#[cfg(feature = "tests")]
mod product;
#[cfg(feature = "tests")]
mod wait;

#[cfg(feature = "tests")]
pub use self::{
    balancer::Balancer,
    certificates::{Authority, Certificate, Purpose},
    control_plane::{ControlPlane, Options, Private, Program},
    kernel_log::KernelLog,
    log::Log,
    objects::{NodeBuilder, PodBuilder, node, pod, unique},
    product::{Launch, Output, Product, binary, get, warning_in},
    wait::wait_for,
};
pub use self::{
    components::{Component, Version},
    network::Network,
    skip::{SKIP_FILE, require, skip},
};
