//! The log of a machine (IPMI's SEL, or the vendor's), as a witness of boots and of what was wrong.

use jiff::Timestamp;
use serde_json::Value;

/// The logs that are looked for, the best first, by a part of their names in lower case: the SEL; HPE's
/// Integrated Management Log; `OpenBMC`'s.
const LOGS: [&str; 3] = ["sel", "iml", "eventlog"];
/// Sensor type of IPMI 2.0 (table 42-3, 1Dh) in Redfish's `LogEntry`, of which there are two spellings.
const BOOT_SENSOR: &str = "system boot";
/// Messages of boots where there is no sensor type, by the end of their ids: `OpenBMC`, and Dell's SYS1000
/// (turning on) and SYS1003 (processor resets).
const BOOT_MESSAGES: [&str; 4] = ["DCPowerOn", "HostPowerOn", "SYS1000", "SYS1003"];
/// Words of messages of boots where nothing else says so, in lower case: HPE's, and `ipmitool`'s for the
/// sensor type.
const BOOT_WORDS: [&str; 3] = [
    "server reset",
    "system boot initiated",
    "initiated by power up",
];
/// Severity of the entries that are told of.
const CRITICAL: &str = "Critical";
/// Most entries that are told of.
const TOLD: usize = 3;
/// Longest text of an entry that is told of (characters): it stands in one line of a log, and a BMC may say
/// anything.
const LONGEST: usize = 200;

/// What a log is a witness of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// The time of the last boot in it.
    pub last_boot: Option<Timestamp>,
    /// The newest critical entries, the newest first, each with its time.
    pub critical: Vec<(Timestamp, String)>,
}

// === impl Log ===

impl Log {
    /// Takes in a page of entries. Those without a time of which a time zone is known are no witnesses.
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

/// Returns the path of the log to read, of the paths of all.
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
