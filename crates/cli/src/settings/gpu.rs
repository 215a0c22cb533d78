//! The settings of a node's GPUs.

use std::path::PathBuf;
use std::time::Duration;

use super::{SettingsError, amount};
use crate::args::GpuArgs;

/// Default root of the driver: that of NVIDIA's GPU operator, from the contract.
const DRIVER_ROOT: &str = "/run/nvidia/driver";
/// Default time between two readings, from the contract.
const INTERVAL: &str = "5";
/// Shortest time between two readings: each makes some forty calls per GPU.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// Default deadline of a call. A driver under load took 45 s for a call that returns at once on an
/// idle machine.
const DEADLINE: &str = "60s";
/// Default port of a host engine of DCGM.
const DCGM_PORT: u16 = 5555;
/// Most fake GPUs: twice the number of the largest machines.
const MAX_FAKE_GPUS: u32 = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSettings {
    /// True if the driver's library is used.
    pub enabled: bool,
    /// Root directory of the driver, as this process sees it.
    pub driver_root: PathBuf,
    /// XIDs that do not change a GPU's condition, beside the built-in ones.
    pub ignored_xids: Vec<u32>,
    /// Time between two readings.
    pub interval: Duration,
    /// Time after which a call of the driver counts as hanging.
    pub deadline: Duration,
    /// Number of GPUs of the node; `None`: unknown.
    pub expected: Option<u32>,
    /// Address of the host engine of DCGM, in the form of its library; `None`: DCGM is not used.
    pub dcgm: Option<String>,
    /// Fake GPUs for tests.
    pub fake: Option<FakeGpus>,
}

/// Fake GPUs for tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FakeGpus {
    /// A number of healthy GPUs.
    Number(u32),
    /// The GPUs of a scenario file, which is read again when it changes.
    Scenario(PathBuf),
}

// === impl GpuSettings ===

impl GpuSettings {
    pub(super) fn resolve(args: GpuArgs) -> Result<Self, SettingsError> {
        let interval_text = args.nvml_health_interval.as_deref().unwrap_or(INTERVAL);
        let interval = seconds("--nvml-health-interval", interval_text)?;
        if interval < SHORTEST_INTERVAL {
            let what = "is less than a second, and each reading loads the driver";
            return Err(SettingsError::value(
                "--nvml-health-interval",
                interval_text,
                what,
            ));
        }
        let deadline = args.nvml_deadline.as_deref().unwrap_or(DEADLINE);
        Ok(Self {
            enabled: args.enable_nvml_provider.unwrap_or(true),
            driver_root: args.nvml_driver_root.unwrap_or_else(|| DRIVER_ROOT.into()),
            ignored_xids: args.nvml_ignored_xids.unwrap_or_default(),
            interval,
            deadline: seconds("--nvml-deadline", deadline)?,
            expected: args.expected_gpus,
            dcgm: args.dcgm_addr.map(dcgm).transpose()?,
            fake: args.fake_gpus.as_deref().map(fake).transpose()?,
        })
    }
}

/// Parses a duration, or a number of seconds.
fn seconds(name: &'static str, text: &str) -> Result<Duration, SettingsError> {
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    Ok(amount::duration(name, text)?.unsigned_abs())
}

/// Checks the form of the address of a host engine. DCGM's library resolves names.
fn dcgm(text: String) -> Result<String, SettingsError> {
    if host_engine(&text).is_some() {
        return Ok(text);
    }
    let what = "is not HOST or HOST:PORT, such as localhost:5555";
    Err(SettingsError::value("--dcgm-addr", text, what))
}

/// Returns host and port of the address of a host engine; `None` for an invalid address.
fn host_engine(address: &str) -> Option<(&str, u16)> {
    // An IPv6 address has brackets if a port follows.
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, port.parse()),
        _ => (address, Ok(DCGM_PORT)),
    };
    let is_name = |letter: u8| letter.is_ascii_alphanumeric() || b"-._:[]%".contains(&letter);
    let is_host = !host.is_empty() && host.bytes().all(is_name);
    let port = port.ok().filter(|port| *port > 0 && is_host)?;
    Some((host.trim_matches(['[', ']']), port))
}

fn fake(text: &str) -> Result<FakeGpus, SettingsError> {
    match text.parse::<u32>() {
        Ok(number @ 1..=MAX_FAKE_GPUS) => Ok(FakeGpus::Number(number)),
        Ok(_) => Err(SettingsError::value(
            "--fake-gpus",
            text,
            format!("is not a number from 1 to {MAX_FAKE_GPUS}"),
        )),
        Err(_) => Ok(FakeGpus::Scenario(PathBuf::from(text))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_providers_design() {
        let settings = GpuSettings::resolve(GpuArgs::default()).unwrap();
        assert!(settings.enabled);
        assert_eq!(settings.driver_root, PathBuf::from("/run/nvidia/driver"));
        assert_eq!(settings.interval, Duration::from_secs(5));
        assert_eq!(settings.ignored_xids, [0; 0]);
        assert_eq!(settings.fake, None);
    }

    #[test]
    fn the_provider_is_switched_off_and_told_what_to_ignore_by_its_flags() {
        let settings = GpuSettings::resolve(GpuArgs {
            enable_nvml_provider: Some(false),
            nvml_driver_root: Some("/driver".into()),
            nvml_ignored_xids: Some(vec![63, 94]),
            ..GpuArgs::default()
        });
        let settings = settings.unwrap();
        assert!(!settings.enabled);
        assert_eq!(settings.driver_root, PathBuf::from("/driver"));
        assert_eq!(settings.ignored_xids, [63, 94]);
    }

    #[test]
    fn a_host_engine_is_asked_only_where_one_is_named() {
        assert_eq!(GpuSettings::resolve(GpuArgs::default()).unwrap().dcgm, None);
        let with = |address: &str| {
            let args = GpuArgs {
                dcgm_addr: Some(address.to_owned()),
                ..GpuArgs::default()
            };
            GpuSettings::resolve(args).map(|settings| settings.dcgm)
        };
        for address in [
            "localhost",
            "nvidia-dcgm.gpu-operator.svc:5555",
            "10.0.0.7:5555",
            "[fe80::1%eth0]:5555",
            "::1",
        ] {
            assert_eq!(with(address).unwrap().as_deref(), Some(address));
        }
        assert_eq!(host_engine("localhost"), Some(("localhost", 5555)));
        assert_eq!(host_engine("[::1]:7"), Some(("::1", 7)));
        assert_eq!(host_engine("::1"), Some(("::1", 5555)));
        for address in [
            "",
            ":5555",
            "localhost:0",
            "localhost:",
            "a b",
            "http://a:5555",
        ] {
            let error = with(address).unwrap_err().to_string();
            let named = format!("--dcgm-addr {address:?}");
            assert!(error.contains(&named), "{error}");
        }
    }

    #[test]
    fn intervals_and_fakes_are_read_or_refused_by_name() {
        let with = |interval: &str, fake: &str| {
            GpuSettings::resolve(GpuArgs {
                nvml_health_interval: Some(interval.to_owned()),
                fake_gpus: Some(fake.to_owned()),
                ..GpuArgs::default()
            })
        };
        let settings = with("1m", "8").unwrap();
        assert_eq!(settings.interval, Duration::from_secs(60));
        assert_eq!(settings.fake, Some(FakeGpus::Number(8)));
        let scenario = with("7", "./gpus.toml").unwrap().fake;
        assert_eq!(scenario, Some(FakeGpus::Scenario("./gpus.toml".into())));
        for (interval, fake, named) in [
            ("soon", "8", "--nvml-health-interval \"soon\""),
            ("0", "8", "--nvml-health-interval \"0\""),
            ("5", "0", "--fake-gpus \"0\""),
            ("5", "33", "--fake-gpus \"33\""),
        ] {
            let error = with(interval, fake).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
