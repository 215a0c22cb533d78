//! AWS: scheduled changes of AWS Health, and the scheduled events of EC2.
//!
//! ```text
//! Aws::poll -> health.rs, instance_status.rs -> client.rs -> credentials.rs, sign.rs -> http.rs
//! ```
//!
//! AWS Health announces more, and earlier, and needs a paid support plan; EC2's events need none. One maintenance
//! may be told by both; its node returns once both have ended it.

mod client;
mod credentials;
pub mod health;
pub mod instance_status;
mod sign;
mod xml;

use jiff::Timestamp;
use notices::AwsConfig;

use client::{Client, Service};
use credentials::Keys;
use health::Query;

use crate::http::Http;
use crate::{Answer, Environment, Since};

/// Provider of the notices.
const PROVIDER: &str = "aws";
/// Type of the resource of the notices, as EC2's own word for it.
const RESOURCE: &str = "instance";

/// Names of the sources.
pub const SOURCES: [&str; 2] = [health::SOURCE, instance_status::SOURCE];

/// The APIs of one account and region.
pub struct Aws {
    account: String,
    region: String,
    health: Service,
    ec2: Service,
    client: Client,
}

// === impl Aws ===

impl Aws {
    /// Creates the clients, without asking anything.
    pub fn new(config: &AwsConfig, http: Http, environment: Environment) -> Self {
        let partition = Partition::of(&config.region);
        let service = |name: &'static str, region: &str| Service {
            name,
            region: region.to_owned(),
            url: partition.url(name, region, &config.endpoint),
        };
        let sts = partition.url("sts", &config.region, &config.endpoint);
        Self {
            account: config.account_id.clone(),
            region: config.region.clone(),
            health: service("health", partition.health),
            ec2: service("ec2", &config.region),
            client: Client::new(http.clone(), Keys::new(http, environment, sts)),
        }
    }

    /// Asks both APIs. `since` has the time of the last success of each source.
    pub async fn poll(&mut self, since: &Since, now: Timestamp) -> Vec<Answer> {
        let query = Query {
            region: &self.region,
            account: &self.account,
        };
        let last = since.get(health::SOURCE).copied();
        let health = health::poll(&mut self.client, &self.health, &query, last, now).await;
        let events = instance_status::poll(&mut self.client, &self.ec2).await;
        vec![
            Answer {
                source: health::SOURCE,
                told: health,
            },
            Answer {
                source: instance_status::SOURCE,
                told: events,
            },
        ]
    }
}

/// A partition of AWS: regions with hosts and accounts of their own.
struct Partition {
    /// End of the names of hosts.
    suffix: &'static str,
    /// Region of AWS Health.
    health: &'static str,
}

// === impl Partition ===

impl Partition {
    fn of(region: &str) -> Self {
        let (suffix, health) = match region {
            _ if region.starts_with("cn-") => ("amazonaws.com.cn", "cn-northwest-1"),
            _ if region.starts_with("us-gov-") => ("amazonaws.com", "us-gov-west-1"),
            _ => ("amazonaws.com", "us-east-1"),
        };
        Self { suffix, health }
    }

    /// Returns the URL of a service; `endpoint` in place of it, unless empty.
    fn url(&self, service: &str, region: &str, endpoint: &str) -> String {
        match endpoint.trim_end_matches('/') {
            "" => format!("https://{service}.{region}.{}/", self.suffix),
            endpoint => format!("{endpoint}/"),
        }
    }
}

#[cfg(test)]
mod tests;
