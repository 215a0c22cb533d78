//! The decoder of a kernel log as a whole: applies the catalogue to lines, with the little
//! state that this needs.
//!
//! The decoder tracks which GPU has which PCI address, from [`MachineGpus`] or else from the log,
//! and which GPUs have just fallen off the bus: a driver that prints XID 79 also prints "GPU
//! has fallen off the bus", and the two are one fault, in whichever order. Unknown values are
//! left out of a finding; no line is dropped because of them.

mod dump;
mod fall;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use contract::{ProcessingStrategy, RecommendedAction, keys};
use jiff::{SignedDuration, Timestamp};
use memchr::{memchr, memchr_iter};

use self::dump::Dumps;
use self::fall::{Begun, Fall};
use super::machine::cut_domain;
use super::{
    Cancelled, Fallen, Finding, FindingKind, LogLine, MAX_NICS, MachineGpus, NicLine, Reset,
    SxidLine, XidLine, decode,
};
use crate::catalog::{Catalog, Filter, LineVerdict, Text};
use crate::subject::normalise_pci;
use crate::sympathy::named_cause;

/// Time after an XID about a GPU's fall off the bus during which a "fallen off the bus" line of
/// that GPU adds nothing, and time within which a message about a fall has all its lines.
const SAME_FALL: SignedDuration = SignedDuration::from_mins(5);
/// Time within which two starts of a GPU must fail to count as a fault: a single failure may be
/// due to a driver that is being loaded or a GPU that is being reset.
const SAME_START: SignedDuration = SignedDuration::from_mins(10);
/// XID of a GPU that has fallen off the bus.
const FALLEN_XID: u32 = 79;
/// Most GPUs, XIDs about falls and failed starts that are remembered: far above any machine.
const REMEMBERED: usize = 1024;
/// Longest quotation of a garbled line, in bytes; the start is what matters.
const MAX_QUOTED_BYTES: usize = 200;

/// XID and `SXid` lines that could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Garbled {
    /// Number of lines, the quoted one included.
    pub lines: u64,
    /// Start of the first line, with control characters escaped.
    pub quoted: String,
}

/// Decodes the records of one kernel log in order.
#[derive(Debug)]
pub struct KernelLogDecoder {
    catalog: Arc<Catalog>,
    nic_filter: Filter,
    machine: Option<MachineGpus>,
    /// Names of RDMA devices, by the NIC's PCI address with function, and by network interface.
    nics: BTreeMap<String, String>,
    /// UUIDs of GPUs by PCI address, from lines of the log.
    uuids: HashMap<String, String>,
    /// XIDs that cover a GPU's fall off the bus, so that a line about it adds nothing.
    falls_with_xid: VecDeque<FallWithXid>,
    /// PCI addresses of GPUs whose fall was reported without an XID, until XID 79 arrives.
    reported_falls: VecDeque<String>,
    /// Messages of several lines that are not complete yet.
    begun: Begun,
    dumps: Dumps,
    /// GPUs whose last start failed, with its time; the newest last.
    failed_starts: VecDeque<(String, Timestamp)>,
    garbled: Option<Garbled>,
}

/// An XID that implies that a GPU has fallen off the bus.
#[derive(Debug)]
struct FallWithXid {
    pci: String,
    code: u32,
    at: Timestamp,
}

// === impl KernelLogDecoder ===

impl Default for KernelLogDecoder {
    fn default() -> Self {
        Self::new(Arc::new(Catalog::builtin().clone()))
    }
}

impl KernelLogDecoder {
    /// Returns a decoder with this catalogue.
    pub fn new(catalog: Arc<Catalog>) -> Self {
        Self {
            nic_filter: catalog.nic_filter(),
            catalog,
            machine: None,
            nics: BTreeMap::new(),
            uuids: HashMap::new(),
            falls_with_xid: VecDeque::new(),
            reported_falls: VecDeque::new(),
            begun: Begun::default(),
            dumps: Dumps::default(),
            failed_starts: VecDeque::new(),
            garbled: None,
        }
    }

    /// Returns the XID and `SXid` lines that could not be parsed since the last call.
    pub fn take_garbled(&mut self) -> Option<Garbled> {
        self.garbled.take()
    }

    /// Sets the description of the machine; `None` if only the log describes it.
    pub fn set_machine(&mut self, machine: Option<MachineGpus>) {
        self.machine = machine;
    }

    /// Returns the description of the machine, if set.
    pub fn machine(&self) -> Option<&MachineGpus> {
        self.machine.as_ref()
    }

    /// Sets the NICs of the machine: the name of the RDMA device (`mlx5_0`) by PCI address with
    /// function (`0000:9a:00.0`, lower case), and by network interface if known. At most
    /// [`MAX_NICS`] are kept.
    pub fn set_nics(&mut self, nics: BTreeMap<String, String>) {
        self.nics = nics.into_iter().take(MAX_NICS).collect();
    }

    /// Returns the findings in a record of one or more lines. `at` is the record's own time, or
    /// else the latest known time.
    pub fn record(&mut self, text: &[u8], at: Timestamp) -> Vec<Finding> {
        if !super::may_match(text) {
            return Vec::new();
        }
        if memchr(b'\n', text).is_none() {
            // A log daemon may have added such a prefix to a line of the GPU driver.
            let is_ordinary = super::is_of_a_nic(text)
                && !self.nic_filter.passes(text)
                && super::next_mark(text).is_none();
            if is_ordinary {
                return Vec::new();
            }
            let found: Vec<Finding> = self.line(text, at).into_iter().collect();
            self.remember_falls(&found);
            return found;
        }
        let mut found = Vec::new();
        let mut from = 0;
        for end in memchr_iter(b'\n', text).chain([text.len()]) {
            let line = text.get(from..end).unwrap_or_default();
            found.extend(self.line(line, at).map(|mut finding| {
                finding
                    .lines
                    .get_or_insert_with(|| String::from_utf8_lossy(line).into_owned());
                finding
            }));
            from = end + 1;
        }
        // An XID after the line about the fall may report the same.
        let fell_with_xid: Vec<String> = found
            .iter()
            .filter(|finding| finding.tells_of_a_fall())
            .filter_map(|finding| finding.pci.clone())
            .collect();
        found.retain(|finding| {
            !matches!(finding.kind, FindingKind::FallenOffBus { .. })
                || !fell_with_xid
                    .iter()
                    .any(|pci| finding.pci.as_ref() == Some(pci))
        });
        self.remember_falls(&found);
        found
    }

    /// Remembers falls that were reported without an XID, so that a later XID 79 ends them.
    fn remember_falls(&mut self, found: &[Finding]) {
        let falls = found
            .iter()
            .filter(|finding| matches!(finding.kind, FindingKind::FallenOffBus { .. }));
        for pci in falls.filter_map(|finding| finding.pci.clone()) {
            self.reported_falls.retain(|reported| *reported != pci);
            if self.reported_falls.len() >= REMEMBERED {
                self.reported_falls.pop_front();
            }
            self.reported_falls.push_back(pci);
        }
    }

    fn line(&mut self, line: &[u8], at: Timestamp) -> Option<Finding> {
        match decode(line)? {
            LogLine::GpuName { pci, uuid } => {
                self.record_name(normalise_pci(pci), uuid);
                None
            }
            LogLine::Xid(xid) => Some(self.xid(&xid, at)),
            LogLine::Rpc(line) => {
                self.dumps.add(line);
                None
            }
            LogLine::Sxid(sxid) => Some(self.sxid(&sxid)),
            LogLine::Fallen(part) => self.fallen(part, line, at),
            LogLine::InitFailed { pci } => self.init_failed(pci, at),
            LogLine::Reset(reset) => Some(self.reset(reset)),
            LogLine::Nic(nic) => self.nic(&nic),
            LogLine::Garbled => {
                self.garbled(line);
                None
            }
        }
    }

    fn garbled(&mut self, line: &[u8]) {
        let garbled = self.garbled.get_or_insert_with(|| {
            let begins = line.get(..MAX_QUOTED_BYTES).unwrap_or(line);
            let mark = if begins.len() < line.len() { "..." } else { "" };
            Garbled {
                lines: 0,
                quoted: format!("{}{mark}", begins.escape_ascii()),
            }
        });
        garbled.lines = garbled.lines.saturating_add(1);
    }

    /// Records a GPU's UUID, which changes when the GPU is replaced.
    fn record_name(&mut self, pci: String, uuid: &str) {
        if self.uuids.len() >= REMEMBERED && !self.uuids.contains_key(&pci) {
            // No machine has that many. The driver names a GPU again before its next XID.
            self.uuids.clear();
        }
        self.uuids.insert(pci, uuid.to_owned());
    }

    /// Returns the finding of an XID that was reported `at`, from the log or from another
    /// source.
    pub fn xid(&mut self, xid: &XidLine<'_>, at: Timestamp) -> Finding {
        let pci = normalise_pci(xid.pci);
        let report = xid.nvlink5();
        let branch = self.machine.as_ref().and_then(MachineGpus::driver_branch);
        let verdict = match &report {
            Some(report) => self.catalog.judge_nvlink5(xid.code, report, branch),
            None if xid.is_nvlink5() => self
                .catalog
                .judge_unread_nvlink5(xid.code, xid.nvlink5_severity()),
            None => self.catalog.judge_xid(xid.code, xid.message),
        };
        let kind = FindingKind::Xid {
            code: xid.code,
            unit: report.map(|report| report.unit.to_owned()),
        };
        let mut finding = self.finding(kind, verdict);
        if finding.tells_of_a_fall() {
            if self.falls_with_xid.len() >= REMEMBERED {
                self.falls_with_xid.pop_front();
            }
            self.falls_with_xid.push_back(FallWithXid {
                pci: pci.clone(),
                code: xid.code,
                at,
            });
        } else if finding.healthy {
            // The driver withdraws the XID, so a later fall is a new fault.
            self.falls_with_xid
                .retain(|known| known.pci != pci || known.code != xid.code);
        }
        if xid.code == FALLEN_XID {
            // XID 79 replaces the earlier fault without an XID, so that one recovery ends both.
            let reported = self.reported_falls.len();
            self.reported_falls.retain(|reported| *reported != pci);
            if self.reported_falls.len() < reported {
                finding.cancels.push(Cancelled {
                    check: keys::CHECK_GPU_FALLEN_OFF,
                    code: keys::CODE_GPU_FALLEN_OFF.to_owned(),
                });
            }
        }
        finding.dump = self.dumps.take(xid, &pci, at);
        finding.gpu_uuid = self.uuid_at(&pci);
        finding.pci = Some(pci);
        finding.mig = xid.mig;
        finding.pid = xid.pid;
        finding.process = xid.process.map(str::to_owned);
        finding.parts = parts(xid);
        finding.caused_by = named_cause(xid.message).filter(|cause| *cause != xid.code);
        if let Some(code) = finding.code() {
            let cancelled = self.catalog.cancelled_by(&code).iter();
            finding.cancels.extend(cancelled.map(|code| Cancelled {
                check: keys::CHECK_XID,
                code: code.clone(),
            }));
        }
        finding
    }

    fn sxid(&self, sxid: &SxidLine<'_>) -> Finding {
        let kind = FindingKind::Sxid {
            code: sxid.code,
            switch: sxid.switch,
        };
        let mut finding = self.finding(kind, self.catalog.judge_sxid(sxid.code, sxid.fatal));
        let pci = normalise_pci(sxid.pci);
        if let Some(link) = sxid.link {
            finding.parts = vec![(keys::ENTITY_NVLINK, link.to_string())];
            let machine = self.machine.as_ref();
            if let Some(gpu) = machine.and_then(|machine| machine.gpu_linked_to(&pci, link)) {
                finding.gpu_index = gpu.index;
                finding.gpu_uuid.clone_from(&gpu.uuid);
            }
        }
        // In the driver's form. The fault's identity does not depend on the PCI address.
        finding.pci = Some(match sxid.pci.rsplit_once('.') {
            Some((_, function)) => format!("{pci}.{}", function.to_ascii_lowercase()),
            None => pci,
        });
        finding
    }

    fn fallen(&mut self, part: Fallen<'_>, line: &[u8], at: Timestamp) -> Option<Finding> {
        let fall = self.begun.add(part, line, at)?;
        let is_known = self
            .falls_with_xid
            .iter()
            .any(|known| known.pci == fall.pci && at.duration_since(known.at).abs() <= SAME_FALL);
        if is_known {
            return None;
        }
        let Fall {
            pci, pci_id, lines, ..
        } = fall;
        let kind = FindingKind::FallenOffBus { pci_id };
        let mut finding = self.finding(
            kind,
            fatal(
                RecommendedAction::RestartBm,
                "The GPU no longer answers on the PCIe bus",
            ),
        );
        finding.gpu_uuid = self.uuid_at(&pci);
        finding.pci = Some(pci);
        finding.lines =
            (!lines.is_empty()).then(|| format!("{lines}{}", String::from_utf8_lossy(line)));
        Some(finding)
    }

    /// Records that a start of a GPU failed. The first such line makes no finding.
    fn init_failed(&mut self, pci: &str, at: Timestamp) -> Option<Finding> {
        let pci = normalise_pci(pci);
        let known = self.failed_starts.iter().position(|(gpu, _)| *gpu == pci);
        let before = known.and_then(|index| self.failed_starts.remove(index));
        if self.failed_starts.len() >= REMEMBERED {
            self.failed_starts.pop_front();
        }
        self.failed_starts.push_back((pci.clone(), at));
        let (_, before) = before?;
        if at.duration_since(before).abs() > SAME_START {
            return None;
        }
        let verdict = fatal(
            RecommendedAction::ComponentReset,
            "The driver cannot start the GPU",
        );
        let mut finding = self.finding(FindingKind::InitFailed, verdict);
        finding.gpu_uuid = self.uuid_at(&pci);
        finding.pci = Some(pci);
        Some(finding)
    }

    fn reset(&mut self, reset: Reset<'_>) -> Finding {
        let verdict = if reset.succeeded {
            let meaning = "The GPU was reset".into();
            let verdict = LineVerdict::of((false, RecommendedAction::None), &meaning, None);
            LineVerdict {
                healthy: true,
                ..verdict
            }
        } else {
            fatal(
                RecommendedAction::RestartVm,
                "The reset of the GPU failed; the machine is restarted instead",
            )
        };
        let mut finding = self.finding(FindingKind::Reset, verdict);
        let gpu = self
            .machine
            .as_ref()
            .and_then(|machine| machine.gpu_with_uuid(reset.uuid));
        let of_log = || {
            self.uuids
                .iter()
                .find(|(_, uuid)| uuid.eq_ignore_ascii_case(reset.uuid))
                .map(|(pci, _)| pci.clone())
        };
        // In the machine's spelling, so that the UUID matches that of the fault.
        let uuid = gpu.and_then(|gpu| gpu.uuid.clone());
        let of_machine = gpu.and_then(|gpu| gpu.pci.clone());
        finding.pci = match (of_machine, of_log()) {
            // The log has the whole domain.
            (Some(cut), Some(whole)) if cut_domain(&whole).as_ref() == Some(&cut) => Some(whole),
            (of_machine, of_log) => of_machine.or(of_log),
        };
        finding.gpu_uuid = Some(uuid.unwrap_or_else(|| reset.uuid.to_owned()));
        if let (true, Some(pci)) = (finding.healthy, &finding.pci) {
            // The reset ends the XIDs about a fall, so a later fall is a new fault.
            self.falls_with_xid.retain(|known| known.pci != *pci);
        }
        finding
    }

    fn nic(&self, line: &NicLine<'_>) -> Option<Finding> {
        let row = self.catalog.nic_pattern(line.driver, line.message)?;
        let pci = line.pci.map(str::to_ascii_lowercase);
        let printed = pci.clone().or(line.device.map(str::to_owned));
        let device = printed.map(|printed| self.nics.get(&printed).cloned().unwrap_or(printed));
        let kind = FindingKind::Nic {
            pattern: row.name.to_string(),
            device,
        };
        let mut finding = self.finding(kind, row.verdict());
        finding.pci = pci;
        finding.strategy = row.strategy;
        Some(finding)
    }

    fn finding(&self, kind: FindingKind, verdict: LineVerdict) -> Finding {
        let chassis = self.machine.as_ref().and_then(MachineGpus::chassis_serial);
        Finding {
            kind,
            healthy: verdict.healthy,
            pci: None,
            gpu_uuid: None,
            gpu_index: None,
            mig: None,
            parts: Vec::new(),
            pid: None,
            process: None,
            fatal: verdict.fatal,
            action: verdict.action,
            meaning: verdict.meaning,
            basis: verdict.basis,
            strategy: ProcessingStrategy::ExecuteRemediation,
            cancels: Vec::new(),
            chassis_serial: chassis.map(str::to_owned),
            caused_by: None,
            dump: None,
            lines: None,
        }
    }

    /// Returns the UUID of the GPU at a normalised PCI address. The machine's description takes
    /// precedence over the log, where a line may predate the replacement of a GPU.
    fn uuid_at(&self, pci: &str) -> Option<String> {
        let of_machine = self
            .machine
            .as_ref()
            .and_then(|machine| machine.gpu_at(pci)?.uuid.clone());
        of_machine.or_else(|| self.uuids.get(pci).cloned())
    }
}

// === impl Finding ===

impl Finding {
    /// Returns true for an XID that makes a "fallen off the bus" line of the same GPU
    /// redundant: 79, or one that takes the machine out of service at least as long.
    fn tells_of_a_fall(&self) -> bool {
        let FindingKind::Xid { code, .. } = self.kind else {
            return false;
        };
        let as_grave = matches!(
            self.action,
            RecommendedAction::RestartBm | RecommendedAction::ReplaceVm
        );
        code == FALLEN_XID || self.fatal && as_grave
    }
}

/// Returns the entities that an XID's text adds: the compute unit of 13, link and registers of
/// 74.
fn parts(xid: &XidLine<'_>) -> Vec<(&'static str, String)> {
    const REGISTERS: [&str; 7] = ["REG0", "REG1", "REG2", "REG3", "REG4", "REG5", "REG6"];
    match xid.code {
        13 => xid.unit().map_or_else(Vec::new, |unit| {
            [("GPC", unit.gpc), ("TPC", unit.tpc), ("SM", unit.sm)]
                .map(|(kind, number)| (kind, number.to_string()))
                .into()
        }),
        74 => xid.link().map_or_else(Vec::new, |(link, registers)| {
            let words = registers.into_iter().flatten();
            [(keys::ENTITY_NVLINK, link.to_string())]
                .into_iter()
                .chain(
                    REGISTERS
                        .into_iter()
                        .zip(words)
                        .map(|(kind, word)| (kind, format!("{word:032b}"))),
                )
                .collect()
        }),
        _ => Vec::new(),
    }
}

fn fatal(action: RecommendedAction, meaning: &'static str) -> LineVerdict {
    LineVerdict::of((true, action), &Text::Borrowed(meaning), None)
}

#[cfg(test)]
mod tests;
