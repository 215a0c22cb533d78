//! Metric of the ends of this process's own certificates.
//!
//! The files are read when metrics are scraped, and not when a connection is opened: a rotated
//! certificate shows up although a connection with the previous one stays open.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::Validity;
use crate::file_stamp::FileStamp;
use crate::metrics::{Description, Kind, Metrics};

/// Files of certificates that this process shows to others, with their ends.
static FILES: Mutex<BTreeMap<PathBuf, Expiry>> = Mutex::new(BTreeMap::new());

/// End of a certificate (seconds since 1970), and the stamp of the file that it was read from.
#[derive(Debug, Default)]
struct Expiry {
    stamp: Option<FileStamp>,
    until: Option<f64>,
}

#[derive(Debug)]
struct Certificates;

/// Registers the metric.
pub fn register(metrics: &Metrics) {
    metrics.collect_from(Certificates);
}

/// Adds a certificate that this process shows to others.
pub(super) fn add(certificate: &Path) {
    let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    files.entry(certificate.to_owned()).or_default();
}

/// Returns the description of the metric.
pub(crate) fn described() -> Description {
    Description::new(
        Kind::Gauge,
        "gpuwarden_certificate_expiry_timestamp_seconds",
        &["file"],
        "End of the certificate that this process shows to others; 0 if it cannot be read",
    )
}

// === impl Certificates ===

impl Collector for Certificates {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        if files.is_empty() {
            return Ok(());
        }
        let Description { name, help, .. } = described();
        let mut gauge = encoder.encode_descriptor(&name, &help, None, MetricType::Gauge)?;
        for (path, expiry) in files.iter_mut() {
            expiry.refresh(path);
            let labels = [("file", path.display().to_string())];
            let until = expiry.until.unwrap_or_default();
            gauge.encode_family(&labels)?.encode_gauge(&until)?;
        }
        Ok(())
    }
}

// === impl Expiry ===

impl Expiry {
    fn refresh(&mut self, path: &Path) {
        let stamp = std::fs::metadata(path).ok().as_ref().map(FileStamp::of);
        if stamp.is_none() || stamp != self.stamp {
            let validity = Validity::read(path).ok();
            self.until = validity.map(|it| it.until.as_duration().as_secs_f64());
            self.stamp = stamp;
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::{SignedDuration, Timestamp};
    use testkit::{Authority, Purpose};

    use super::*;

    #[test]
    fn the_end_of_a_new_certificate_is_shown_at_the_next_scrape() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("own.crt");
        let metrics = Metrics::default();
        register(&metrics);
        let authority = Authority::new("test").unwrap();
        let leaf = authority.sign(Purpose::Server, "n1", &["n1"]).unwrap();
        let shown = || {
            let name = "gpuwarden_certificate_expiry_timestamp_seconds";
            let start = format!("{name}{{file=\"{}\"}} ", file.display());
            let text = metrics.encode();
            let value = text.lines().find_map(|line| line.strip_prefix(&start));
            let seconds = |value: &str| SignedDuration::try_from_secs_f64(value.parse().unwrap());
            value.map(|value| (Timestamp::UNIX_EPOCH + seconds(value).unwrap()).to_string())
        };
        assert_eq!(shown(), None);
        add(&file);
        assert_eq!(shown(), Some(Timestamp::UNIX_EPOCH.to_string()));
        leaf.write(dir.path(), "own").unwrap();
        let until = Validity::read(&file).unwrap().until;
        assert_eq!(shown(), Some(until.to_string()));
    }
}
