//! Maintenance APIs of clouds: one module for each cloud asks its APIs, and says what they announce
//! as notices about instances.
//!
//! ```text
//! Cloud::poll --> Answer for each API: Told { announced: notice + Instance } or a Failure
//! ```
//!
//! The caller (`controller/maintenance/apis.rs`) finds the node of each instance ([`Instance`]), keeps the
//! time of the last success of each source, and brings the notices into the book of `notices`. A poll
//! that fails says nothing about any maintenance; the next one covers its window.
//!
//! [`metadata`] asks the metadata service of this machine instead, which needs no credentials: the
//! agent of a node does.
//!
//! [`http`] is the client of all clouds, [`environment`] is where credentials are looked for.

pub mod aws;
mod encoding;
pub mod environment;
pub mod gcp;
pub mod http;
pub mod instance;
pub mod metadata;
pub mod oci;
mod rsa;
mod secret_file;

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use notices::{Clouds, Notice};

use aws::Aws;
use gcp::Gcp;
use http::Http;
use oci::Oci;

pub use environment::Environment;
pub use http::Failure;
pub use instance::Instance;

/// A cloud whose APIs are asked.
pub enum Cloud {
    /// AWS.
    Aws(Box<Aws>),
    /// Google Cloud.
    Gcp(Box<Gcp>),
    /// Oracle Cloud Infrastructure.
    Oci(Box<Oci>),
}

/// Time of the last successful poll of each source, by the source's name.
///
/// A source without one is asked for everything that holds now.
pub type Since = BTreeMap<String, Timestamp>;

/// Result of asking one API once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Name of the source, such as `aws-health`; unique among all clouds.
    pub source: &'static str,
    /// Statement of the API, or the reason why there is none.
    pub told: Result<Told, Failure>,
}

/// Statement of one API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Notices, each with its instance.
    pub announced: Vec<Announced>,
    /// True if these are all notices of the API; false for changes.
    pub complete: bool,
    /// Instances about which a complete statement says nothing: theirs cannot be understood now.
    pub unseen: Vec<Instance>,
    /// Number of notices that cannot be understood.
    pub odd: u64,
}

/// A notice about an instance, which may be a node or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announced {
    /// The instance.
    pub instance: Instance,
    /// The notice. Its `node` is empty: the caller finds it.
    pub notice: Notice,
}

// === impl Cloud ===

impl Cloud {
    /// Returns the clouds that are enabled, each with the pause between two polls, without asking
    /// anything.
    pub fn enabled(
        config: &Clouds,
        environment: &Environment,
    ) -> Result<Vec<(Self, SignedDuration)>, Failure> {
        let http = Http::new()?;
        let aws = config.aws.iter().map(|config| {
            let aws = Aws::new(config, http.clone(), environment.clone());
            (Self::Aws(Box::new(aws)), config.poll)
        });
        let gcp = config.gcp.iter().map(|config| {
            let gcp = Gcp::new(config, http.clone(), environment.clone());
            (Self::Gcp(Box::new(gcp)), config.poll)
        });
        let oci = config.oci.iter().map(|config| {
            let oci = Oci::new(config, http.clone(), environment.clone());
            (Self::Oci(Box::new(oci)), config.poll)
        });
        Ok(aws.chain(gcp).chain(oci).collect())
    }

    /// Returns the names of the sources, one for each API.
    pub fn sources(&self) -> &'static [&'static str] {
        match self {
            Self::Aws(_) => &aws::SOURCES,
            Self::Gcp(_) => &gcp::SOURCES,
            Self::Oci(_) => &[oci::SOURCE],
        }
    }

    /// Asks all APIs once. `since` has the time of the last success of each source.
    pub async fn poll(&mut self, since: &Since, now: Timestamp) -> Vec<Answer> {
        match self {
            Self::Aws(aws) => aws.poll(since, now).await,
            Self::Gcp(gcp) => gcp.poll(since, now).await,
            Self::Oci(oci) => oci.poll(now).await,
        }
    }
}

#[cfg(any(test, feature = "test-util"))]
pub mod loopback;

#[cfg(test)]
mod witness;
