//! The source of a monitor, as the process's status and metrics show it: how much was read, and
//! whether it can be read.

use jiff::Timestamp;
use runtime::sources::SourceState;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Reporter;

// === impl Reporter ===

impl<M> Reporter<M>
where
    M: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Records that a record with the time `at` was read.
    pub fn has_read(&self, at: Timestamp) {
        self.metrics.records.inc();
        self.source.update(self.now(), |status| {
            status.records += 1;
            status.last_record_at = Some(at);
        });
    }

    /// Records a successful poll, for a monitor that polls: its source works, and its findings
    /// are of this boot. `detail` describes what is polled.
    pub fn has_looked(&mut self, detail: &str) {
        self.boot_has_begun();
        self.has_read(self.now());
        self.show(SourceState::Following, detail);
    }

    /// Records the loss of records before they could be read.
    pub fn has_lost(&self, count: u64) {
        self.metrics.lost.inc_by(count);
        (self.source).update(self.now(), |status| status.lost += count);
    }

    /// Records that some records cannot be parsed.
    pub fn cannot_read(&self, count: u64) {
        self.metrics.malformed.inc_by(count);
        (self.source).update(self.now(), |status| status.malformed += count);
    }

    /// Shows that the source cannot be read, with the reason; logs it once.
    pub fn cannot_see(&mut self, why: &str) {
        self.cannot_see_with(why, None);
    }

    /// Shows that the source cannot be read, with the reason and advice; logs it once.
    pub fn cannot_see_with(&mut self, why: &str, advice: Option<String>) {
        if self.blind.as_deref() != Some(why) {
            let monitor = self.monitor.name;
            tracing::error!(
                err = why,
                monitor,
                advice,
                "cannot read the source of a monitor; retrying"
            );
            self.blind = Some(why.to_owned());
        }
        self.show(SourceState::Failing, why);
        (self.source).update(self.now(), |status| status.advice = advice);
    }

    /// Shows the state of the monitor's source, with a description or a problem.
    pub fn show(&mut self, state: SourceState, detail: &str) {
        if state.sees() {
            self.blind = None;
        }
        let detail = self.with_trouble(detail);
        self.source.update(self.now(), |status| {
            status.state = state;
            status.detail = detail;
            status.advice = None;
        });
    }

    /// Shows a description of the source; the state does not change.
    pub fn show_detail(&self, detail: &str) {
        let detail = self.with_trouble(detail);
        (self.source).update(self.now(), |status| status.detail = detail);
    }

    /// Adds a note to `detail` if the state cannot be written.
    fn with_trouble(&self, detail: &str) -> String {
        let saving = self.saving.as_ref();
        match saving.and_then(|saving| Some((saving.path(), saving.failed.as_ref()?))) {
            Some((path, why)) => format!("{detail}; {} cannot be written: {why}", path.display()),
            None => detail.to_owned(),
        }
    }
}
