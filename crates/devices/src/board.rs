//! State of the GPUs of this machine, as one board with a version.
//!
//! Each source writes only its own part: this process's sources ([`Own`]) and providers outside
//! ([`Provider`]). A condition is stored with its source, so no source overwrites or deletes a
//! condition of another. The state that consumers see is derived from all of them ([`record`]).
//! Each change of that state is one version, and stays in the [`history`] for a while. Does no
//! I/O and reads no clock.

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
use record::{GpuRecord, Registration, SourceCondition};

pub use history::{Forgotten, GpuChange};
pub use limits::{
    MAX_CONDITIONS, MAX_GPUS, MAX_MESSAGE, MAX_OF_PROVIDERS, MAX_PROVIDERS, MAX_WORD,
};

/// Time without a report after which a provider's conditions become unknown: six times the
/// usual heartbeat interval.
pub const HEARTBEAT: Duration = Duration::from_secs(60);

/// Type of the condition that summarises all others.
pub const READY: &str = "Ready";
/// Source of the [`READY`] condition.
const SUM: &str = "gpuwarden";

/// Sources within this process. No provider can use their condition types or names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// The driver, through NVML.
    Nvml,
    /// DCGM, through its health watches.
    Dcgm,
    /// Health events that gpuwarden has accepted.
    Health,
}

/// A source outside this process, which registers GPUs and writes their conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Name that the provider chose, its `provider_id`.
    pub id: String,
    /// User id of the provider's process. A provider of another user cannot take the name.
    pub uid: u32,
    /// True if that user administers the machine; other users are limited to a share of each
    /// limit.
    pub is_operator: bool,
}

/// Condition of a GPU, from a source within this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// `True` if the GPU is healthy.
    pub status: ConditionStatus,
    /// Reason, a word in `CamelCase`.
    pub reason: String,
    /// Message for operators; may be empty.
    pub message: String,
}

/// Reason why a write was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BoardError {
    /// The GPU does not exist.
    #[error("there is no GPU {name:?} here; ListGpus names those that there are")]
    NoSuchGpu {
        /// Requested name of the GPU.
        name: String,
    },
    /// The provider has not registered the GPU.
    #[error("{provider:?} has not registered GPU {name:?}: call RegisterGpu first")]
    NotRegistered {
        /// Name of the GPU.
        name: String,
        /// Name of the provider.
        provider: String,
    },
    /// Another source owns the type of condition.
    #[error("conditions of type {kind:?} are written by {owner:?}: choose another type")]
    Owned {
        /// Type of the condition.
        kind: String,
        /// Source that owns the type.
        owner: String,
    },
    /// Another provider owns the name.
    #[error("the provider_id {id:?} belongs to {owner}: choose another")]
    Taken {
        /// Name that was requested.
        id: String,
        /// Owner of the name.
        owner: String,
    },
    /// A field has an invalid value.
    #[error("{field}: {problem}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// Description of the problem, and what to do.
        problem: String,
    },
    /// The users who do not administer the machine have used up their share.
    #[error(
        "there are too many {what} of users who do not administer the machine: one of them can have \
         {one}, and all of them {all}"
    )]
    TooManyOfOthers {
        /// Kind of the limited resource.
        what: &'static str,
        /// Limit for one such user.
        one: usize,
        /// Limit for all such users together.
        all: usize,
    },
    /// The limit is reached.
    #[error("there are {limit} {what} already, which is the limit")]
    TooMany {
        /// Kind of the limited resource.
        what: &'static str,
        /// Highest number of them.
        limit: usize,
    },
}

/// A place in the sequence of changes, as given by a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// A version of this board.
    At(u64),
    /// A version of another board, or one in the future.
    Elsewhere,
}

/// The state of all GPUs, with the history of its changes.
pub struct Board {
    /// Text that distinguishes versions of this board from those of others.
    epoch: String,
    version: u64,
    /// GPUs by name in lower case.
    gpus: BTreeMap<String, GpuRecord>,
    /// Providers that have a GPU registered, by name.
    providers: BTreeMap<String, Provider>,
    /// Provider that owns each type of condition, by type in lower case, so that types cannot
    /// be imitated by a difference in case.
    types: BTreeMap<String, String>,
    /// Number of GPUs that the driver shows beyond the limit.
    left_out: usize,
    history: History,
}

// === impl Own ===

impl Own {
    const ALL: [Self; 3] = [Self::Nvml, Self::Dcgm, Self::Health];

    /// Returns the type of the source's condition.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Nvml => "NVMLReady",
            Self::Dcgm => "DCGMHealth",
            Self::Health => "NVSentinelHealth",
        }
    }

    /// Returns the name that conditions have as their source.
    pub fn source(self) -> &'static str {
        match self {
            Self::Nvml => "nvml-provider",
            Self::Dcgm => "dcgm-exporter",
            Self::Health => "nvsentinel",
        }
    }

    /// Returns true if `source` is a source within this process.
    pub fn is_source(source: &str) -> bool {
        let sources = Self::ALL.into_iter().map(Self::source);
        sources
            .chain([SUM])
            .any(|own| own.eq_ignore_ascii_case(source))
    }
}

// === impl Board ===

impl Board {
    /// Creates a board without GPUs. `epoch` consists of letters and digits, and must differ
    /// from the epoch of every earlier board.
    pub fn new(epoch: String) -> Self {
        Self::with_history(epoch, history::MAX_BYTES)
    }

    /// Creates a board that keeps up to `bytes` bytes of changes.
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

    /// Formats a version for consumers.
    pub fn name_of(&self, version: u64) -> String {
        format!("{}-{version}", self.epoch)
    }

    /// Parses a version that a consumer has given.
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
                problem: "give one that ListGpus or WatchGpus has returned, or none".to_owned(),
            }),
        }
    }

    /// Returns all GPUs, sorted by name.
    pub fn gpus(&self) -> impl Iterator<Item = &Arc<Gpu>> {
        self.gpus.values().map(GpuRecord::shown)
    }

    /// Returns the number of GPUs that the driver shows beyond the limit.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Returns one GPU; names are not case-sensitive.
    pub fn gpu(&self, name: &str) -> Result<&Arc<Gpu>, BoardError> {
        let record = self.gpus.get(&key(name)).ok_or_else(|| no_such(name))?;
        Ok(record.shown())
    }

    /// Returns the change after a version; `None` if there is none yet.
    pub fn after(&self, version: u64) -> Result<Option<&GpuChange>, Forgotten> {
        self.history.after(version)
    }

    /// Sets the condition of a source within this process on a GPU.
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
        registration.set(own.kind(), SourceCondition::from(said));
        self.refresh(&key(name), now);
        Ok(())
    }

    /// Makes all conditions of a source within this process unknown, because the source cannot
    /// observe GPUs at present.
    pub fn own_away(&mut self, own: Own, reason: &str, message: &str, now: Timestamp) {
        let unknown = SourceCondition::unknown(reason, message.to_owned());
        self.silence(now, |source, _| {
            (source == own.source()).then(|| unknown.clone())
        });
    }

    /// Registers a GPU for a provider, with its conditions if given. Returns the GPU, and true
    /// if it is new.
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
                (entry.insert(GpuRecord::new(name.to_owned(), spec)), true)
            }
        };
        let registration = record.registration(&provider.id, Some(now));
        if !conditions.is_empty() {
            registration.replace(&conditions);
        }
        self.providers.insert(provider.id.clone(), provider.clone());
        self.claim(&provider.id, &conditions);
        Ok((self.record_report(&provider.id, &key(name), now)?, created))
    }

    /// Removes a provider's registration of a GPU, with its conditions.
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

    /// Replaces a provider's conditions of a GPU.
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
        self.record_report(&provider.id, &key(name), now)
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
        for (kind, condition) in conditions.clone() {
            registration.set(&kind, condition);
        }
        self.claim(&provider.id, &conditions);
        self.record_report(&provider.id, &key(name), now)
    }

    /// Records a heartbeat of a provider for some GPUs, or for all of its own if `names` is
    /// empty. Returns those that it has not registered.
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
                // Fails for GPUs of other providers, which are skipped.
                let _ = self.record_report(&provider.id, &key, now);
            }
            return Ok(Vec::new());
        }
        let mut unknown = Vec::new();
        for name in names {
            if self.record_report(&provider.id, &key(name), now).is_err() {
                unknown.push(name.clone());
            }
        }
        Ok(unknown)
    }

    /// Makes conditions unknown of providers without a report for [`HEARTBEAT`].
    pub fn expire(&mut self, now: Timestamp) {
        self.silence(now, |source, registration| {
            let silent = now.duration_since(registration.last_report?).unsigned_abs();
            (silent >= HEARTBEAT && registration.silence.is_none()).then(|| {
                let seconds = HEARTBEAT.as_secs();
                let message = format!("no report from {source} for {seconds} s");
                SourceCondition::unknown("ProviderSilent", message)
            })
        });
    }

    /// Returns the number of registrations whose provider is silent.
    pub fn silent(&self) -> usize {
        let registrations = (self.gpus.values()).flat_map(|gpu| gpu.registrations.values());
        registrations
            .filter(|one| one.last_report.is_some() && one.silence.is_some())
            .count()
    }

    /// Marks each registration as silent if `why` returns a condition for it.
    fn silence(
        &mut self,
        now: Timestamp,
        why: impl Fn(&str, &Registration) -> Option<SourceCondition>,
    ) {
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

    /// Checks that a provider may use its name.
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

    /// Checks the limit on GPUs that only providers have registered. GPUs that the driver shows
    /// have a limit of their own.
    fn room_for(&self, provider: &Provider) -> Result<(), BoardError> {
        let of_providers = self.gpus.values().filter(|gpu| !gpu.is_of_driver());
        let holders = of_providers.map(|gpu| {
            let ids = gpu.registrations.keys();
            ids.filter_map(|id| self.providers.get(id)).collect()
        });
        limits::room(provider, "GPUs of providers", MAX_OF_PROVIDERS, holders)
    }

    /// Checks that the types of conditions are owned by the provider or free, and within the
    /// limit.
    fn may_write(
        &self,
        provider: &str,
        conditions: &BTreeMap<String, SourceCondition>,
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

    fn claim(&mut self, provider: &str, conditions: &BTreeMap<String, SourceCondition>) {
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

    /// Records that a provider has just reported on a GPU, and returns the GPU as consumers see
    /// it.
    fn record_report(
        &mut self,
        provider: &str,
        key: &str,
        now: Timestamp,
    ) -> Result<Arc<Gpu>, BoardError> {
        let record = self.gpus.get_mut(key).ok_or_else(|| no_such(key))?;
        let registration = record.registrations.get_mut(provider);
        let registration = registration.ok_or_else(|| no_such(key))?;
        registration.last_report = Some(now);
        registration.silence = None;
        self.refresh(key, now);
        self.gpu(key).cloned()
    }

    /// Updates a GPU as consumers see it from its conditions. A change makes a new version.
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
        self.history.push(GpuChange { kind, gpu });
    }

    fn remove(&mut self, key: &str) {
        let Some(record) = self.gpus.remove(key) else {
            return;
        };
        self.version += 1;
        let mut gpu = Gpu::clone(record.shown());
        gpu.resource_version = self.name_of(self.version);
        self.history.push(GpuChange {
            kind: WatchEventType::Deleted,
            gpu: Arc::new(gpu),
        });
    }
}

/// Returns the key of a name, of a GPU or a condition type.
fn key(name: &str) -> String {
    name.to_ascii_lowercase()
}

fn no_such(name: &str) -> BoardError {
    BoardError::NoSuchGpu {
        name: name.to_owned(),
    }
}
