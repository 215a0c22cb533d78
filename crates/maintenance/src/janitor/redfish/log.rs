//! The log of a machine (IPMI's SEL, or the vendor's), as evidence of boots and of critical
//! errors.

use jiff::Timestamp;
use serde_json::Value;

/// Supported logs, best first, by a lower-case part of their names: the SEL; HPE's Integrated
/// Management Log; `OpenBMC`'s.
const LOGS: [&str; 3] = ["sel", "iml", "eventlog"];
/// Sensor type of IPMI 2.0 (table 42-3, 1Dh) in Redfish's `LogEntry`, which has two spellings.
const BOOT_SENSOR: &str = "system boot";
/// Ids of boot messages without a sensor type, by suffix: `OpenBMC`'s, and Dell's SYS1000
/// (turning on) and SYS1003 (processor resets).
const BOOT_MESSAGES: [&str; 4] = ["DCPowerOn", "HostPowerOn", "SYS1000", "SYS1003"];
/// Texts of boot messages without other marks, in lower case: HPE's, and `ipmitool`'s for the
/// sensor type.
const BOOT_WORDS: [&str; 3] = [
    "server reset",
    "system boot initiated",
    "initiated by power up",
];
/// Severity of reported entries.
const CRITICAL: &str = "Critical";
/// Most critical entries that are reported.
const TOLD: usize = 3;
/// Longest text of a reported entry (characters): part of a log line, and written by the BMC.
const LONGEST: usize = 200;

/// Evidence from a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// Time of the last boot in the log.
    pub last_boot: Option<Timestamp>,
    /// Newest critical entries with their times, newest first.
    pub critical: Vec<(Timestamp, String)>,
}

// === impl Log ===

impl Log {
    /// Reads a page of entries. Entries without a time and time zone are ignored.
    pub fn read(&mut self, page: &Value) {
        for entry in page["Members"].as_array().into_iter().flatten() {
            let created = entry["Created"].as_str().and_then(|text| text.parse().ok());
            let Some(created) = created else {
                continue;
            };
            if is_boot(entry) {
                self.last_boot = self.last_boot.max(Some(created));
            }
            if entry["Severity"] == CRITICAL {
                let message = entry["Message"].as_str().unwrap_or_default();
                let message = message.chars().take(LONGEST).collect();
                self.critical.push((created, message));
            }
        }
        self.critical.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        self.critical.truncate(TOLD);
    }
}

/// Returns the log to read among all `paths`.
pub fn log_of(paths: &[String]) -> Option<&String> {
    let name = |path: &str| {
        path.rsplit('/')
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase()
    };
    let named = |part: &&str| paths.iter().find(|path| name(path).contains(*part));
    LOGS.iter().find_map(named)
}

/// Returns the path of the entries of a log.
pub fn entries_of(log: &Value) -> Option<&str> {
    log["Entries"]["@odata.id"].as_str()
}

fn is_boot(entry: &Value) -> bool {
    let text = |key: &str| entry[key].as_str().unwrap_or_default();
    let id = text("MessageId");
    let (sensor, message) = (
        text("SensorType").to_ascii_lowercase(),
        text("Message").to_ascii_lowercase(),
    );
    sensor.starts_with(BOOT_SENSOR)
        || BOOT_MESSAGES.iter().any(|end| id.ends_with(end))
        || BOOT_WORDS.iter().any(|words| message.contains(words))
}
