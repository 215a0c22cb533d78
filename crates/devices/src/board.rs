//! The GPUs of this machine and what is said of them, as one state with a version.
//!
//! Everybody says something about the part that is theirs: our own sources ([`Own`]) and
//! providers from outside ([`Provider`]). A condition is kept with the one who said it, so nobody
//! overwrites or erases what another has said. What consumers see of a GPU follows from all of it
//! ([`record`]). Each change of that is one version, and is kept in the [`history`] for a while.
//! Does no I/O and reads no clock.

mod history;
mod inventory;
mod limits;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use contract::device::{Condition, ConditionStatus, Gpu, GpuSpec, GpuStatus, WatchEventType};
use jiff::Timestamp;

use history::History;
use record::{Record, Registration, Told};

pub use history::{Change, Forgotten};
pub use limits::{
    MAX_CONDITIONS, MAX_GPUS, MAX_MESSAGE, MAX_OF_PROVIDERS, MAX_PROVIDERS, MAX_WORD,
};

/// The time after which a provider that says nothing is no longer believed: six times the pause
/// between two heartbeats that are usual.
pub const HEARTBEAT: Duration = Duration::from_secs(60);

/// The condition that sums up all others.
pub const READY: &str = "Ready";
/// The source of that condition.
const SUM: &str = "gpuwarden";

/// The sources of this process. Their types of conditions, and their names, are nobody else's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// The driver, by NVML.
    Nvml,
    /// DCGM.
    Dcgm,
    /// The health events that gpuwarden has accepted.
    Health,
}

/// A source outside this process, which registers GPUs and writes their conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// The name that it gives itself.
    pub id: String,
    /// The user that it runs as. Another user's provider cannot take its name.
    pub uid: u32,
    /// True if that user administers the machine: others have a share of the room.
    pub is_operator: bool,
}

/// The condition of a GPU, as one of our own sources says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// `True` if all is well.
    pub status: ConditionStatus,
    /// A word in `CamelCase`.
    pub reason: String,
    /// The text for people.
    pub message: String,
}

/// The reason why something is not written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BoardError {
    /// There is no such GPU.
    #[error("there is no GPU {name:?} here; ListGpus names those that there are")]
    NoSuchGpu {
        /// The name that was asked for.
        name: String,
    },
    /// The provider has not registered the GPU.
    #[error("{provider:?} has not registered GPU {name:?}: call RegisterGpu first")]
    NotRegistered {
        /// The GPU.
        name: String,
        /// The provider.
        provider: String,
    },
    /// The type of condition is another's.
    #[error("conditions of type {kind:?} are written by {owner:?}: choose another type")]
    Owned {
        /// The type.
        kind: String,
        /// Whose it is.
        owner: String,
    },
    /// The provider's name is another's.
    #[error("the provider_id {id:?} belongs to {owner}: choose another")]
    Taken {
        /// The name.
        id: String,
        /// Whose it is.
        owner: String,
    },
    /// A field has a value that it cannot have.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// The trouble, and what to do.
        problem: String,
    },
    /// There is no room for more of users who do not administer the machine.
    #[error(
        "there are too many {what} of users who do not administer the machine: one of them can have \
         {one}, and all of them {all}"
    )]
    TooManyOfOthers {
        /// The things of which there are too many.
        what: &'static str,
        /// The highest number of them that one such user can have.
        one: usize,
        /// The highest number of them that all such users can have.
        all: usize,
    },
    /// There is no room for more.
    #[error("there are {limit} {what} already, and no more are taken")]
    TooMany {
        /// The things of which there are too many.
        what: &'static str,
        /// The highest number of them that there can be.
        limit: usize,
    },
}

/// A place in the sequence of changes, as a consumer names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// A version of this board.
    At(u64),
    /// A version of a board before this one, or one that is not yet.
    Elsewhere,
}

/// The state.
pub struct Board {
    /// The text that tells the versions of this board from those of others.
    epoch: String,
    version: u64,
    /// By name in lower case.
    gpus: BTreeMap<String, Record>,
    /// Each provider that has a GPU registered, by its name.
    providers: BTreeMap<String, Provider>,
    /// The provider of each type of condition, by the type in lower case: one that differs in case alone
    /// would pass for it.
    types: BTreeMap<String, String>,
    /// The number of GPUs that the driver shows and for which there is no room.
    left_out: usize,
    history: History,
}

// === impl Own ===

impl Own {
    const ALL: [Self; 3] = [Self::Nvml, Self::Dcgm, Self::Health];

    /// Returns the type of its condition.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Nvml => "NVMLReady",
            Self::Dcgm => "DCGMHealth",
            Self::Health => "NVSentinelHealth",
        }
    }

    /// Returns its name as the source of conditions.
    pub fn source(self) -> &'static str {
        match self {
            Self::Nvml => "nvml-provider",
            Self::Dcgm => "dcgm-exporter",
            Self::Health => "nvsentinel",
        }
    }

    /// Returns whether a source of conditions is one of this process.
    pub fn is_source(source: &str) -> bool {
        let sources = Self::ALL.into_iter().map(Self::source);
        sources
            .chain([SUM])
            .any(|own| own.eq_ignore_ascii_case(source))
    }
}

// === impl Board ===

impl Board {
    /// Returns a board without GPUs. No board before it may have had the same `epoch`, which is
    /// of letters and digits.
    pub fn new(epoch: String) -> Self {
        Self::with_history(epoch, history::MAX_BYTES)
    }

    /// Returns one that keeps so many bytes of changes.
    pub(crate) fn with_history(epoch: String, bytes: usize) -> Self {
        Self {
            epoch,
            version: 0,
            gpus: BTreeMap::new(),
            providers: BTreeMap::new(),
            types: BTreeMap::new(),
            left_out: 0,
            history: History::new(bytes),
        }
    }

    /// Returns the number of the last change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns a version as consumers see it.
    pub fn name_of(&self, version: u64) -> String {
        format!("{}-{version}", self.epoch)
    }

    /// Returns where a version is that a consumer has named.
    pub fn position(&self, version: &str) -> Result<Position, BoardError> {
        let parsed = version.split_once('-').and_then(|(epoch, number)| {
            let number: u64 = number.parse().ok()?;
            Some((epoch, number))
        });
        match parsed {
            Some((epoch, number)) if epoch == self.epoch && number <= self.version => {
                Ok(Position::At(number))
            }
            Some(_) => Ok(Position::Elsewhere),
            None => Err(BoardError::Invalid {
                field: "resource_version",
                problem: "give one that ListGpus or WatchGpus has told, or none".to_owned(),
            }),
        }
    }

    /// Returns all GPUs, in the order of their names.
    pub fn gpus(&self) -> impl Iterator<Item = &Arc<Gpu>> {
        self.gpus.values().map(Record::shown)
    }

    /// Returns the number of GPUs that the driver shows and for which there is no room.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Returns one GPU; the case of its name does not count.
    pub fn gpu(&self, name: &str) -> Result<&Arc<Gpu>, BoardError> {
        let record = self.gpus.get(&key(name)).ok_or_else(|| no_such(name))?;
        Ok(record.shown())
    }

    /// Returns the change after a version; `None`: there is none yet.
    pub fn after(&self, version: u64) -> Result<Option<&Change>, Forgotten> {
        self.history.after(version)
    }

    /// Takes what one of our own sources says of a GPU.
    pub fn set_own(
        &mut self,
        own: Own,
        name: &str,
        said: Said,
        now: Timestamp,
    ) -> Result<(), BoardError> {
        let record = self.gpus.get_mut(&key(name)).ok_or_else(|| no_such(name))?;
        let registration = record.registration(own.source(), None);
        registration.silence = None;
        registration.tell(own.kind(), Told::from(said));
        self.refresh(&key(name), now);
        Ok(())
    }

    /// Makes all that one of our own sources has said unknown, because it sees nothing any more.
    pub fn own_away(&mut self, own: Own, reason: &str, message: &str, now: Timestamp) {
        let unknown = Told::unknown(reason, message.to_owned());
        self.silence(now, |source, _| {
            (source == own.source()).then(|| unknown.clone())
        });
    }

    /// Registers a GPU for a provider, with its conditions if it has any. Returns it, and whether
    /// it is new.
    pub fn register(
        &mut self,
        provider: &Provider,
        name: &str,
        spec: GpuSpec,
        status: Option<GpuStatus>,
        now: Timestamp,
    ) -> Result<(Arc<Gpu>, bool), BoardError> {
        limits::name("name", name)?;
        let spec = limits::spec(name, spec)?;
        let conditions = limits::conditions(status.unwrap_or_default().conditions)?;
        self.admit(provider)?;
        self.may_write(&provider.id, &conditions)?;
        let room = self.room_for(provider);
        let (record, created) = match self.gpus.entry(key(name)) {
            Entry::Occupied(entry) => (entry.into_mut(), false),
            Entry::Vacant(entry) => {
                room?;
                (entry.insert(Record::new(name.to_owned(), spec)), true)
            }
        };
        let registration = record.registration(&provider.id, Some(now));
        if !conditions.is_empty() {
            registration.replace(&conditions);
        }
        self.providers.insert(provider.id.clone(), provider.clone());
        self.claim(&provider.id, &conditions);
        Ok((self.heard(&provider.id, &key(name), now)?, created))
    }

    /// Takes a provider's registration of a GPU back, with all that it has said of it.
    pub fn unregister(
        &mut self,
        provider: &Provider,
        name: &str,
        now: Timestamp,
    ) -> Result<(), BoardError> {
        self.registration(provider, name)?;
        let key = key(name);
        if let Some(record) = self.gpus.get_mut(&key) {
            record.registrations.remove(&provider.id);
            if record.is_held() {
                self.refresh(&key, now);
            } else {
                self.remove(&key);
            }
        }
        let has_more = (self.gpus.values()).any(|gpu| gpu.registrations.contains_key(&provider.id));
        if !has_more {
            self.providers.remove(&provider.id);
            self.types.retain(|_, owner| *owner != provider.id);
        }
        Ok(())
    }

    /// Replaces what a provider has said of a GPU.
    pub fn update_status(
        &mut self,
        provider: &Provider,
        name: &str,
        status: GpuStatus,
        now: Timestamp,
    ) -> Result<Arc<Gpu>, BoardError> {
        let conditions = limits::conditions(status.conditions)?;
        self.may_write(&provider.id, &conditions)?;
        self.registration(provider, name)?.replace(&conditions);
        self.claim(&provider.id, &conditions);
        self.heard(&provider.id, &key(name), now)
    }

    /// Sets one condition of a provider on a GPU.
    pub fn update_condition(
        &mut self,
        provider: &Provider,
        name: &str,
        condition: Condition,
        now: Timestamp,
    ) -> Result<Arc<Gpu>, BoardError> {
        let conditions = limits::conditions(vec![condition])?;
        self.may_write(&provider.id, &conditions)?;
        let registration = self.registration(provider, name)?;
        for (kind, told) in conditions.clone() {
            registration.tell(&kind, told);
        }
        self.claim(&provider.id, &conditions);
        self.heard(&provider.id, &key(name), now)
    }

    /// Takes a sign of life of a provider about some GPUs, or all of its own. Returns those that it
    /// has not registered.
    pub fn heartbeat(
        &mut self,
        provider: &Provider,
        names: &[String],
        now: Timestamp,
    ) -> Result<Vec<String>, BoardError> {
        self.admit(provider)?;
        if names.is_empty() {
            let all: Vec<String> = self.gpus.keys().cloned().collect();
            for key in all {
                // The others are not its own.
                let _ = self.heard(&provider.id, &key, now);
            }
            return Ok(Vec::new());
        }
        let mut unknown = Vec::new();
        for name in names {
            if self.heard(&provider.id, &key(name), now).is_err() {
                unknown.push(name.clone());
            }
        }
        Ok(unknown)
    }

    /// Makes unknown what providers have said that have not been heard for [`HEARTBEAT`].
    pub fn expire(&mut self, now: Timestamp) {
        self.silence(now, |source, registration| {
            let silent = now.duration_since(registration.heard?).unsigned_abs();
            (silent >= HEARTBEAT && registration.silence.is_none()).then(|| {
                let seconds = HEARTBEAT.as_secs();
                let message = format!("{source} has not been heard for {seconds} s");
                Told::unknown("ProviderSilent", message)
            })
        });
    }

    /// Returns the number of registrations whose provider is not heard.
    pub fn silent(&self) -> usize {
        let registrations = (self.gpus.values()).flat_map(|gpu| gpu.registrations.values());
        registrations
            .filter(|one| one.heard.is_some() && one.silence.is_some())
            .count()
    }

    /// Silences the registrations for which `why` says why.
    fn silence(&mut self, now: Timestamp, why: impl Fn(&str, &Registration) -> Option<Told>) {
        let mut keys = Vec::new();
        for (key, record) in &mut self.gpus {
            for (source, registration) in &mut record.registrations {
                if let Some(unknown) = why(source, registration) {
                    registration.silence = Some(unknown);
                    keys.push(key.clone());
                }
            }
        }
        for key in keys {
            self.refresh(&key, now);
        }
    }

    /// Checks that a provider may have its name.
    fn admit(&self, provider: &Provider) -> Result<(), BoardError> {
        limits::name("provider_id", &provider.id)?;
        let taken = |owner| BoardError::Taken {
            id: provider.id.clone(),
            owner,
        };
        if Own::is_source(&provider.id) {
            return Err(taken("gpuwarden itself".to_owned()));
        }
        match self.providers.get(&provider.id) {
            Some(known) if known.uid != provider.uid => {
                Err(taken(format!("a provider of user {}", known.uid)))
            }
            Some(_) => Ok(()),
            None => {
                let mut same = self.providers.keys();
                if same.any(|id| id.eq_ignore_ascii_case(&provider.id)) {
                    return Err(taken(
                        "a provider whose name differs in case alone".to_owned(),
                    ));
                }
                let holders = self.providers.values().map(|one| vec![one]);
                limits::room(provider, "providers", MAX_PROVIDERS, holders)
            }
        }
    }

    /// Checks that there is room for a GPU that a provider alone has registered. Those that the driver
    /// shows have a room of their own.
    fn room_for(&self, provider: &Provider) -> Result<(), BoardError> {
        let of_providers = self.gpus.values().filter(|gpu| !gpu.is_of_driver());
        let holders = of_providers.map(|gpu| {
            let ids = gpu.registrations.keys();
            ids.filter_map(|id| self.providers.get(id)).collect()
        });
        limits::room(provider, "GPUs of providers", MAX_OF_PROVIDERS, holders)
    }

    /// Checks that the types of conditions are a provider's, or nobody's yet and not too many.
    fn may_write(
        &self,
        provider: &str,
        conditions: &BTreeMap<String, Told>,
    ) -> Result<(), BoardError> {
        let mut new = 0;
        for kind in conditions.keys() {
            let is = |known: &str| known.eq_ignore_ascii_case(kind);
            let own = Own::ALL.into_iter().find(|own| is(own.kind()));
            let owner = match (own, self.types.get(&key(kind))) {
                (Some(own), _) => own.source(),
                (None, _) if is(READY) => SUM,
                (None, Some(owner)) if owner != provider => owner,
                (None, Some(_)) => continue,
                (None, None) => {
                    new += 1;
                    continue;
                }
            };
            return Err(BoardError::Owned {
                kind: kind.clone(),
                owner: owner.to_owned(),
            });
        }
        let owned = self.types.values().filter(|owner| *owner == provider);
        if owned.count() + new > MAX_CONDITIONS {
            let (what, limit) = ("types of conditions of this provider", MAX_CONDITIONS);
            return Err(BoardError::TooMany { what, limit });
        }
        Ok(())
    }

    fn claim(&mut self, provider: &str, conditions: &BTreeMap<String, Told>) {
        for kind in conditions.keys() {
            self.types.insert(key(kind), provider.to_owned());
        }
    }

    fn registration(
        &mut self,
        provider: &Provider,
        name: &str,
    ) -> Result<&mut Registration, BoardError> {
        self.admit(provider)?;
        let record = self.gpus.get_mut(&key(name)).ok_or_else(|| no_such(name))?;
        let registration = record.registrations.get_mut(&provider.id);
        registration.ok_or_else(|| BoardError::NotRegistered {
            name: name.to_owned(),
            provider: provider.id.clone(),
        })
    }

    /// Notes that a provider has said something about a GPU just now, and returns what is seen of
    /// it.
    fn heard(&mut self, provider: &str, key: &str, now: Timestamp) -> Result<Arc<Gpu>, BoardError> {
        let record = self.gpus.get_mut(key).ok_or_else(|| no_such(key))?;
        let registration = record.registrations.get_mut(provider);
        let registration = registration.ok_or_else(|| no_such(key))?;
        registration.heard = Some(now);
        registration.silence = None;
        self.refresh(key, now);
        self.gpu(key).cloned()
    }

    /// Makes what is seen of a GPU follow what is said of it. Where that changes anything, it is
    /// one version more.
    fn refresh(&mut self, key: &str, now: Timestamp) {
        let Some(record) = self.gpus.get_mut(key) else {
            return;
        };
        let Some(mut gpu) = record.changed(now) else {
            return;
        };
        self.version += 1;
        gpu.resource_version = format!("{}-{}", self.epoch, self.version);
        let gpu = Arc::new(gpu);
        let kind = if record.is_shown() {
            WatchEventType::Modified
        } else {
            WatchEventType::Added
        };
        record.show(Arc::clone(&gpu));
        self.history.push(Change { kind, gpu });
    }

    fn remove(&mut self, key: &str) {
        let Some(record) = self.gpus.remove(key) else {
            return;
        };
        self.version += 1;
        let mut gpu = Gpu::clone(record.shown());
        gpu.resource_version = self.name_of(self.version);
        self.history.push(Change {
            kind: WatchEventType::Deleted,
            gpu: Arc::new(gpu),
        });
    }
}

/// Returns the form of a name under which a GPU, or the owner of a type of condition, is kept.
fn key(name: &str) -> String {
    name.to_ascii_lowercase()
}

fn no_such(name: &str) -> BoardError {
    BoardError::NoSuchGpu {
        name: name.to_owned(),
    }
}
