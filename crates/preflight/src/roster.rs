//! Roster of a gang: the `ConfigMap` that lists its members. Name and data have NVSentinel's
//! format.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use crate::gang::MAX_MEMBERS;

/// Prefix of the names of all gang `ConfigMap`s. No other `ConfigMap` is ever touched.
pub const PREFIX: &str = "preflight-";
/// Label with the gang's id, shortened to fit a label.
pub const GANG_ID_LABEL: &str = "nvsentinel.nvidia.com/gang-id";
/// Label that marks the owner of the `ConfigMap`; its value is [`MANAGED_BY`].
pub const MANAGED_BY_LABEL: &str = "nvsentinel.nvidia.com/managed-by";
/// Value of [`MANAGED_BY_LABEL`], as in NVSentinel.
pub const MANAGED_BY: &str = "preflight";
/// Longest name and longest label value, in bytes.
const MAX_NAME_BYTES: usize = 63;
/// Length of the suffix of a shortened name: a dash and 8 digits.
const CUT_BYTES: usize = 9;

const EXPECTED_COUNT: &str = "expected_count";
const PEERS: &str = "peers";
const MASTER_ADDR: &str = "master_addr";
const MASTER_PORT: &str = "master_port";
const GANG_ID: &str = "gang_id";
/// Key: a member that has completed the gang's checks. A later pod has nobody to test with.
pub const STARTED: &str = "started";
/// Key: the reason why the gang cannot be tested, if its size cannot be determined.
pub const UNTESTABLE: &str = "untestable";
/// Keys that ADR-026 has beside those of the configuration document: ranks by pod, and the
/// size.
const RANK: &str = "rank";
const WORLD_SIZE: &str = "world_size";

/// Member of a gang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name of the pod.
    pub pod: String,
    /// Address of the pod.
    pub address: IpAddr,
    /// Names of its checks, separated by commas; `None` in the older forms of the `ConfigMap`.
    pub checks: Option<String>,
}

/// Members of a gang, ordered by rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roster {
    /// Id of the gang.
    pub gang_id: String,
    /// Number of members needed; 0 until it is known.
    pub expected: u32,
    /// TCP port of rank 0.
    pub master_port: u16,
    /// Members; the index is the rank.
    pub members: Vec<Member>,
    /// Name of a member that has completed the gang's checks and will not run them again.
    pub started: Option<String>,
    /// Reason why the number of members cannot be determined.
    pub untestable: Option<String>,
}

/// Error for a `ConfigMap` that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the gang's `{key}` is {value:?}: {what}")]
pub struct RosterError {
    /// Key of the data.
    pub key: &'static str,
    /// Value under the key, or the line of it that is wrong.
    pub value: String,
    /// Description of the problem.
    pub what: &'static str,
}

/// Returns the name of a gang's `ConfigMap`.
pub fn config_map_name(gang_id: &str) -> String {
    let mut name = PREFIX.to_owned();
    for character in gang_id.chars() {
        let character = character.to_ascii_lowercase();
        if character.is_ascii_lowercase() || character.is_ascii_digit() {
            name.push(character);
        } else if !name.ends_with('-') {
            name.push('-');
        }
    }
    let name = name.trim_end_matches('-');
    if name.len() <= MAX_NAME_BYTES {
        return name.to_owned();
    }
    let cut = name.get(..MAX_NAME_BYTES - CUT_BYTES).unwrap_or(name);
    format!("{}-{}", cut.trim_end_matches('-'), digest(gang_id))
}

/// Returns a gang's id as a label value.
pub fn gang_label(gang_id: &str) -> String {
    let name = config_map_name(gang_id);
    name.strip_prefix(PREFIX).unwrap_or(&name).to_owned()
}

/// Returns the first 8 hex digits of the SHA-256 hash.
fn digest(text: &str) -> String {
    let hash = Sha256::digest(text.as_bytes());
    let digits = hash.iter().take(4);
    let digits = digits.fold(0_u32, |digits, byte| digits << 8 | u32::from(*byte));
    format!("{digits:08x}")
}

// === impl Roster ===

impl Roster {
    /// Returns the data of the `ConfigMap`.
    pub fn data(&self) -> BTreeMap<String, String> {
        let (mut peers, mut ranks) = (String::new(), String::new());
        for (rank, member) in self.members.iter().enumerate() {
            let checks = member.checks.as_deref().unwrap_or_default();
            let (pod, address) = (&member.pod, member.address);
            peers.push_str(&format!("{pod};{address};{rank};{checks}\n"));
            ranks.push_str(&format!("{pod};{rank}\n"));
        }
        let master = self.members.first();
        let master = master.map(|first| first.address.to_string());
        let entries = [
            (EXPECTED_COUNT, self.expected.to_string()),
            (PEERS, peers.trim_end().to_owned()),
            (MASTER_ADDR, master.unwrap_or_default()),
            (MASTER_PORT, self.master_port.to_string()),
            (GANG_ID, self.gang_id.clone()),
            (RANK, ranks.trim_end().to_owned()),
            (WORLD_SIZE, self.expected.to_string()),
        ];
        let started = self.started.clone().map(|pod| (STARTED, pod));
        let untestable = self.untestable.clone().map(|why| (UNTESTABLE, why));
        let entries = entries.into_iter().chain(started).chain(untestable);
        entries
            .map(|(key, value)| (key.to_owned(), value))
            .collect()
    }

    /// Parses a roster. `value` returns the value of a key, from the data of a `ConfigMap` or
    /// from the files that a pod mounts. Peers have the form `pod;address;rank;checks`, or one
    /// of the older `pod;address;rank` and `pod:address`. Missing keys count as empty.
    pub fn parse(value: impl Fn(&'static str) -> Option<String>) -> Result<Self, RosterError> {
        let value = |key| value(key).unwrap_or_default();
        let text = |key| Some(value(key).trim().to_owned()).filter(|text| !text.is_empty());
        let number = |key, value: String, default, most| {
            if value.trim().is_empty() {
                return Ok(default);
            }
            let read = value.trim().parse().ok().filter(|read| *read <= most);
            read.ok_or(RosterError {
                key,
                value,
                what: "it is not a number, or too large",
            })
        };
        let expected = number(EXPECTED_COUNT, value(EXPECTED_COUNT), 0, MAX_MEMBERS)?;
        let port = number(MASTER_PORT, value(MASTER_PORT), 29500, u16::MAX.into())?;
        Ok(Self {
            gang_id: value(GANG_ID).trim().to_owned(),
            expected,
            master_port: u16::try_from(port).unwrap_or_default(),
            members: members(&value(PEERS))?,
            started: text(STARTED),
            untestable: text(UNTESTABLE),
        })
    }

    /// Returns the rank of a pod, if it is a member.
    pub fn rank(&self, pod: &str) -> Option<usize> {
        self.members.iter().position(|member| member.pod == pod)
    }

    /// Returns true if all needed members are present.
    pub fn is_complete(&self) -> bool {
        self.expected > 0 && self.members.len() >= self.expected as usize
    }

    /// Returns true if the members need not wait: they can begin, are too late, or cannot be
    /// tested.
    pub fn is_settled(&self) -> bool {
        self.is_complete() || self.started.is_some() || self.untestable.is_some()
    }

    /// Returns the first member and another one with different checks, if there is one. Such
    /// members would wait for each other forever.
    pub fn disagreement(&self) -> Option<(&Member, &Member)> {
        let first = self.members.iter().find(|member| member.checks.is_some())?;
        let other = self
            .members
            .iter()
            .find(|member| member.checks.is_some() && member.checks != first.checks)?;
        Some((first, other))
    }

    /// Updates the roster to the pods that exist now. A pod keeps its rank while it exists;
    /// until the roster is complete, ranks follow the pods' names. The second result holds the
    /// pods that came after the roster was complete and got no place.
    pub fn with(mut self, pods: Vec<Member>, expected: u32) -> (Self, Vec<Member>) {
        let was_complete = self.is_complete();
        let changed_size = was_complete && expected != self.expected;
        self.expected = expected;
        let mut there: BTreeMap<String, Member> =
            pods.into_iter().map(|pod| (pod.pod.clone(), pod)).collect();
        let is_same = self
            .members
            .iter()
            .all(|member| there.get(&member.pod) == Some(member));
        if was_complete && is_same && !changed_size {
            for member in &self.members {
                there.remove(&member.pod);
            }
            return (self, there.into_values().collect());
        }
        // Pods that had a rank come first, so that a pod that comes back takes no other pod's
        // rank.
        let known: BTreeSet<&String> = self.members.iter().map(|member| &member.pod).collect();
        let (mut old, new): (Vec<Member>, Vec<Member>) = there
            .values()
            .cloned()
            .partition(|pod| known.contains(&pod.pod));
        old.extend(new);
        let places = usize::try_from(expected).unwrap_or(usize::MAX);
        let surplus = if expected > 0 && old.len() > places {
            old.split_off(places)
        } else {
            Vec::new()
        };
        old.sort_by(|one, other| one.pod.cmp(&other.pod));
        self.members = old;
        (self, surplus)
    }
}

fn members(peers: &str) -> Result<Vec<Member>, RosterError> {
    let mut members: Vec<(usize, Member)> = Vec::new();
    let mut names = BTreeSet::new();
    let lines = peers.lines().map(str::trim).filter(|line| !line.is_empty());
    for (line_number, line) in lines.enumerate() {
        let wrong = |what| RosterError {
            key: PEERS,
            value: line.to_owned(),
            what,
        };
        if line_number >= MAX_MEMBERS as usize {
            return Err(wrong("there are too many members"));
        }
        let (pod, address, rank, checks) = if line.contains(';') {
            let mut fields = line.splitn(4, ';');
            let mut next = || fields.next().map(str::trim);
            (next(), next(), next(), next())
        } else {
            // IPv6 addresses contain colons, pod names do not.
            let (pod, address) = line.split_once(':').unzip();
            (pod, address, None, None)
        };
        let pod = pod.filter(|pod| !pod.is_empty());
        let pod = pod.ok_or_else(|| wrong("a member has the form pod;address;rank;checks"))?;
        let address = address.and_then(|address| address.parse().ok());
        let address = address.ok_or_else(|| wrong("the address is not an IP address"))?;
        let rank = match rank {
            None => line_number,
            Some(rank) => rank
                .parse()
                .map_err(|_| wrong("the rank is not a number"))?,
        };
        if !names.insert(pod.to_owned()) {
            return Err(wrong("the pod is listed twice"));
        }
        let member = Member {
            pod: pod.to_owned(),
            address,
            checks: checks.map(str::to_owned),
        };
        members.push((rank, member));
    }
    members.sort_by_key(|(rank, _)| *rank);
    if members
        .iter()
        .enumerate()
        .any(|(place, (rank, _))| place != *rank)
    {
        return Err(RosterError {
            key: PEERS,
            value: peers.chars().take(200).collect(),
            what: "the ranks are not 0, 1, 2 and so on",
        });
    }
    Ok(members.into_iter().map(|(_, member)| member).collect())
}

#[cfg(test)]
mod tests;
