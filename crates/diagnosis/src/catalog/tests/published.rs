//! The tables that decide which nodes go out of service, each compared with a second list.
//!
//! The lists here come from other publications, not from `data/*.tsv`: the files
//! `published_*.tsv` have NVIDIA's codes, names, bit patterns and advice, [`RELIED_ON`] is
//! `NVSentinel`'s action table, and the NIC rows are strings of the Linux drivers. Where the
//! catalogue differs, the difference is listed here with its reason.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use contract::ProcessingStrategy;

use super::*;

const XIDS: &str = include_str!("published_xid.tsv");
const NVLINK5: &str = include_str!("published_nvlink5.tsv");
const SXIDS: &str = include_str!("published_sxid.tsv");

/// NVSentinel's actions for XIDs, which policies rely on. The text of an XID 154 decides its
/// action.
const RELIED_ON: [(RecommendedAction, &str); 5] = [
    (
        None,
        "8 11 13-14 25 31-32 37-41 43-44 60 63 66-72 75-77 80 82-86 88-89 92-94 96-108 121 \
         126-135 137 139 141 152-153 157 160-161",
    ),
    (
        ComponentReset,
        "46 48 62 64 95 109-110 119-120 136 140 143 155-156 158",
    ),
    (RestartVm, "151"),
    (RestartBm, "79"),
    (
        ContactSupport,
        "1-7 9-10 12 15-24 26-30 33-36 42 45 47 49-59 61 65 73-74 78 81 87 90-91 111-118 \
         122-125 138 142 144-150 154 159",
    ),
];

/// Codes whose verdict differs, or without a publication to rely on: code, true if fatal,
/// action.
const OUR_OWN: [(u32, bool, RecommendedAction); 13] = [
    // The teardown of a job, which follows any other fault and every killed job.
    (45, false, None),
    // The text of the line decides; the row is never used.
    (154, false, None),
    // The publisher gives no action from here on. Power smoothing: jobs continue.
    (162, false, None),
    (163, false, None),
    (164, false, None),
    (165, false, ContactSupport),
    // Encryption of NVLink may have failed: a reset is not known to help.
    (166, true, ContactSupport),
    // A GPU that PCIe lost, as with 79.
    (167, true, RestartBm),
    // A person must choose: ECC on, or another region.
    (168, true, ContactSupport),
    // A controller that halted, as with 62.
    (169, true, ComponentReset),
    (170, true, ContactSupport),
    // Names the location of the error of a 48.
    (171, true, ComponentReset),
    (172, true, ComponentReset),
];

/// NIC patterns: name, driver, substrings of the line (in the notation of `data/README.md`),
/// use of the events, true if fatal, and a line as the driver prints it.
#[rustfmt::skip]
const NICS: [(&str, NicDriver, &str, Setting, bool, &str); 16] = [
    ("cmd_exec_timeout", Mlx5, "timeout. Will cause a leak of a command resource", Stored, true,
     "mlx5_core 0000:9a:00.0: wait_func:1194:(pid 1): ACCESS_REG(0x805) timeout. Will cause a leak of a command resource"),
    ("health_poll_failed", Mlx5, "device's health compromised ... reached miss count", Stored, true,
     "mlx5_core 0000:9a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count"),
    ("unrecoverable_err", Mlx5, "unrecoverable hardware error", Stored, true,
     "mlx5_core 0000:9a:00.0: print_health_info:432:(pid 0): synd 0x8: unrecoverable hardware error"),
    ("netdev_watchdog", Mlx5, "NETDEV WATCHDOG ... transmit queue ... timed out", Stored, false,
     "mlx5_core 0000:9a:00.0 eth0: NETDEV WATCHDOG: CPU: 5: transmit queue 0 timed out 5032 ms"),
    ("mlx5_tx_timeout_detected", Mlx5, "TX timeout detected", Stored, false,
     "mlx5_core 0000:9a:00.0 ens1f0: TX timeout detected"),
    ("mlx5_rx_timeout_detected", Mlx5, "RX timeout on channel", Stored, false,
     "mlx5_core 0000:9a:00.0 ens1f0: RX timeout on channel: 3, ICOSQ: 0x1, RQ: 0x2, CQ: 0x3"),
    ("pci_power_insufficient", Mlx5, "Detected insufficient power on the PCIe slot", Stored, false,
     "mlx5_core 0000:9a:00.0: mlx5_pcie_event:301:(pid 5): Detected insufficient power on the PCIe slot (27W)."),
    ("port_module_high_temp", Mlx5, "Port module event ... High Temperature", Stored, false,
     "mlx5_core 0000:9a:00.0: Port module event[error]: module 0, Cable error, High Temperature"),
    ("access_reg_failed", Mlx5, "mlx5_cmd_out_err ... ACCESS_REG ... failed", Off, false,
     "mlx5_core 0000:9a:00.0: mlx5_cmd_out_err:816:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3)"),
    ("module_unplugged", Mlx5, "Port module event ... Cable unplugged", Stored, false,
     "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged"),
    ("pci_slot_unavailable", Mlx5, "PCI slot is unavailable", Stored, true,
     "mlx5_core 0000:9a:00.0: print_health_info:423:(pid 0): PCI slot is unavailable"),
    ("efa_admin_cmd_timeout", Efa,
     "Wait for completion (polling) timeout || The device didn't send any completion for admin cmd", Stored, true,
     "infiniband efa_0: The device didn't send any completion for admin cmd ALLOC_PD(9) status 1"),
    ("efa_admin_queue_closed", Efa, "Admin queue is closed", Stored, true,
     "infiniband rdmap0s6: Admin queue is closed"),
    ("efa_admin_cmd_failed", Efa, "Failed to process command || Failed to submit command", Stored, false,
     "infiniband rdmap0s6: Failed to process command CREATE_QP (opcode 1) comp_status 2 err -5"),
    ("efa_device_reset_failed", Efa,
     "Reset indication didn't turn on || Reset indication didn't turn off || Device isn't ready, can't reset device",
     Stored, true, "efa 0000:00:06.0: Device isn't ready, can't reset device"),
    ("efa_device_not_ready", Efa, "Device isn't ready, abort com init", Stored, true,
     "efa 0000:00:06.0: Device isn't ready, abort com init"),
];

use NicDriver::{Efa, Mlx5};
use Setting::{Off, Stored};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Stored,
    Off,
}

/// Row of the publisher's table of XID 144 to 150, with one of its patterns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decode {
    pub(super) code: u32,
    pub(super) unit: &'static str,
    pub(super) before_r575: &'static str,
    pub(super) from_r575: &'static str,
    pub(super) status: &'static str,
    pub(super) action: RecommendedAction,
}

fn lines(text: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split('\t').collect())
}

/// Parses a list of codes such as `1-7 9 12`.
fn codes(list: &str) -> impl Iterator<Item = u32> {
    list.split_ascii_whitespace().flat_map(|part| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        from.parse().unwrap()..=to.parse().unwrap()
    })
}

/// Returns the expected verdicts of the XIDs: true if fatal, and the action.
fn verdicts() -> BTreeMap<u32, (bool, RecommendedAction)> {
    let mut all = BTreeMap::new();
    for (action, list) in RELIED_ON {
        for code in codes(list) {
            assert_eq!(all.insert(code, (action != None, action)), Option::None);
        }
    }
    for (code, fatal, action) in OUR_OWN {
        all.insert(code, (fatal, action));
    }
    all
}

/// Maps the publisher's action to ours; `None` if the cell is empty.
fn action_of(advice: &str) -> Option<RecommendedAction> {
    Some(match advice {
        "IGNORE" | "RESTART_APP" | "XID_154_EVAL" => None,
        "RESET_GPU" | "WORKFLOW_XID_48" => ComponentReset,
        "RESTART_VM" => RestartVm,
        "RESTART_BM" => RestartBm,
        // Not solvable by a machine.
        "CONTACT_SUPPORT"
        | "CHECK_MECHANICALS"
        | "CHECK_UVM"
        | "UPDATE_SWFW"
        | "WORKFLOW_NVLINK_ERR"
        | "WORKFLOW_NVLINK5_ERR"
        | "WORKFLOW_XID_45"
        | "XID_154" => ContactSupport,
        "-" => return Option::None,
        other => panic!("{other}"),
    })
}

pub(super) fn decodes() -> Vec<Decode> {
    let mut rows = Vec::new();
    for fields in lines(NVLINK5) {
        let [
            code,
            unit,
            before,
            from,
            status,
            action,
            before2,
            from2,
            action2,
        ] = fields.try_into().unwrap();
        let row = Decode {
            code: code.parse().unwrap(),
            unit,
            before_r575: before,
            from_r575: from,
            status,
            action: action_of(action).unwrap(),
        };
        rows.push(row);
        if let Some(action) = action_of(action2) {
            rows.push(Decode {
                before_r575: before2,
                from_r575: from2,
                action,
                ..row
            });
        }
    }
    rows
}

/// Expected columns of an XID row.
pub(super) struct Expected {
    /// Publisher's name: the first if there are two.
    mnemonic: &'static str,
    pub(super) fatal: bool,
    pub(super) action: RecommendedAction,
    /// True if the publisher calls the code unused: it needs a person, and nothing else.
    unused: bool,
}

pub(super) static EXPECTED: LazyLock<BTreeMap<u32, Expected>> = LazyLock::new(|| {
    let mut verdicts = verdicts();
    // In the publisher's sheet these need a person, and are used; 108 is to be ignored, and is
    // not used.
    let used = "45 54 74 78 142 144-150 154 159";
    let mut unused: Vec<u32> = codes(RELIED_ON[4].1).chain([108]).collect();
    unused.retain(|code| codes(used).all(|used| used != *code));
    lines(XIDS)
        .map(|row| {
            let code = row[0].parse().unwrap();
            let (fatal, action) = verdicts.remove(&code).unwrap();
            let expected = Expected {
                mnemonic: row[1].split(" / ").next().unwrap(),
                fatal,
                action,
                unused: unused.contains(&code),
            };
            (code, expected)
        })
        .collect()
});

/// Class and name, by `SXid` code.
static SXID_CLASSES: LazyLock<BTreeMap<u32, (&str, &str)>> = LazyLock::new(|| {
    lines(SXIDS)
        .map(|row| (row[0].parse().unwrap(), (row[1], row[2])))
        .collect()
});

/// Returns true if an XID row agrees with the lists.
pub(super) fn is_right_xid(row: &Xid) -> bool {
    EXPECTED.get(&row.code).is_some_and(|expected| {
        row.mnemonic == expected.mnemonic
            && (row.fatal, row.action) == (expected.fatal, expected.action)
            && (row.scope == "unused") == expected.unused
    })
}

/// Returns true if a row of XID 144 to 150 agrees with the publisher's.
fn is_right_nvlink5(row: &Nvlink5, of: &Decode) -> bool {
    let status: Vec<u32> = words(of.status).collect();
    row.code == of.code
        && row.unit == of.unit
        && row.before_r575.to_string() == of.before_r575
        && row.from_r575.to_string() == of.from_r575
        && row.status == status
        && (row.fatal, row.action) == (of.action != None, of.action)
}

pub(super) fn words(status: &'static str) -> impl Iterator<Item = u32> {
    status
        .split('/')
        .filter(|word| *word != "-")
        .map(|word| u32::from_str_radix(&word[2..], 16).unwrap())
}

fn is_right_sxid(row: &Sxid) -> bool {
    let class = match row.class {
        SxidClass::NonFatal => "non-fatal",
        SxidClass::PotentiallyFatal => "potentially-fatal",
        SxidClass::AlwaysFatal => "always-fatal",
    };
    SXID_CLASSES.get(&row.code) == Some(&(class, &*row.name))
}

fn is_right_nic(
    row: &Nic,
    (name, driver, pattern, setting, fatal, _): &(&str, NicDriver, &str, Setting, bool, &str),
) -> bool {
    let action = if *fatal {
        RecommendedAction::ReplaceVm
    } else {
        None
    };
    // Events that are only stored open no fault.
    let (enabled, strategy) = match setting {
        Stored => (true, ProcessingStrategy::StoreOnly),
        Off => (false, ProcessingStrategy::ExecuteRemediation),
    };
    row.name == *name
        && row.driver == *driver
        && row.pattern.to_string() == *pattern
        && (row.enabled, row.strategy) == (enabled, strategy)
        && (row.fatal, row.action) == (*fatal, action)
}

#[test]
fn the_publishers_advice_and_what_is_relied_on_differ_where_we_know_it() {
    let verdicts = verdicts();
    assert_eq!(verdicts.len(), 172);
    for row in lines(XIDS) {
        let code = row[0].parse().unwrap();
        let by_advice = action_of(row[2]).map(|action| (action != None, action));
        let is_ours = OUR_OWN.iter().any(|own| own.0 == code);
        assert_eq!(
            by_advice == verdicts.get(&code).copied(),
            !is_ours,
            "XID {code}: {by_advice:?}"
        );
    }
}

#[test]
fn every_nvlink5_row_is_as_published() {
    let published = decodes();
    let rows = Catalog::builtin().nvlink5();
    assert_eq!(rows.len(), published.len());
    for (row, of) in rows.iter().zip(&published) {
        assert!(is_right_nvlink5(row, of), "{row:?}\n{of:?}");
    }
}

#[test]
fn every_sxid_is_as_grave_as_published() {
    let catalog = Catalog::builtin();
    assert_eq!(catalog.sxids().count(), SXID_CLASSES.len());
    for row in catalog.sxids() {
        assert!(is_right_sxid(row), "{row:?}");
        let always = SXID_CLASSES[&row.code].0 == "always-fatal";
        // The severity in the line decides; without one, only an always fatal code is fatal.
        for (word, fatal) in [
            (Some(true), true),
            (Some(false), false),
            (Option::None, always),
        ] {
            let verdict = catalog.judge_sxid(row.code, word);
            let action = if fatal { ContactSupport } else { None };
            assert_eq!(
                (verdict.fatal, verdict.action),
                (fatal, action),
                "SXid {} {word:?}",
                row.code
            );
        }
    }
}

#[test]
fn every_nic_pattern_is_as_its_driver_prints_it() {
    let catalog = Catalog::builtin();
    assert_eq!(catalog.nics().len(), NICS.len());
    for (row, expected) in catalog.nics().iter().zip(&NICS) {
        assert!(is_right_nic(row, expected), "{row:?}\n{expected:?}");
        assert!(row.pattern.covers(expected.5.as_bytes()), "{row:?}");
    }
}

/// Checks the tests above: in each row, each deciding field is set to other values of its
/// column that the parser accepts, and a test must notice.
#[test]
fn no_field_that_decides_can_be_changed_unseen() {
    let mut changed = 0;
    let mut seen = |is_right: bool, row: &[&str]| {
        changed += 1;
        assert!(!is_right, "{row:?}");
    };
    for (_, row) in mutants(rows::XID, &[0, 1, 3, 4]) {
        let read = rows::xid(row.clone().try_into().unwrap()).unwrap();
        seen(is_right_xid(&read), &row);
    }
    let published = decodes();
    for (index, row) in mutants(rows::NVLINK5, &[0, 1, 2, 3, 4, 5]) {
        let read = rows::nvlink5(row.clone().try_into().unwrap()).unwrap();
        seen(is_right_nvlink5(&read, &published[index]), &row);
    }
    // Another code of the same class and name is then a duplicate, which another test detects.
    for (_, row) in mutants(rows::SXID, &[1, 3]) {
        let read = rows::sxid(row.clone().try_into().unwrap()).unwrap();
        seen(is_right_sxid(&read), &row);
    }
    for (index, row) in mutants(rows::NIC, &[0, 1, 2, 3, 4, 5]) {
        let read = rows::nic(row.clone().try_into().unwrap()).unwrap();
        seen(is_right_nic(&read, &NICS[index]), &row);
    }
    assert!(changed > 5_000, "{changed}");
}

/// Returns rows with one field replaced by another value of its column, with the row's number.
/// For columns with many values, uses those of the nearest rows.
fn mutants(
    table: rows::Table,
    columns: &[usize],
) -> impl Iterator<Item = (usize, Vec<&'static str>)> {
    const MOST: usize = 6;
    let rows: Vec<Vec<&'static str>> = (table.text.lines().skip(1))
        .map(|line| line.split('\t').collect())
        .collect();
    columns.iter().copied().flat_map(move |column| {
        let rows = rows.clone();
        (0..rows.len()).flat_map(move |index| {
            let row = &rows[index];
            let mut others: Vec<&str> = Vec::new();
            for other in rows[index..].iter().chain(&rows).map(|row| row[column]) {
                if other != row[column] && !others.contains(&other) && others.len() < MOST {
                    others.push(other);
                }
            }
            let changed = |other| {
                let mut row = row.clone();
                row[column] = other;
                (index, row)
            };
            others.into_iter().map(changed).collect::<Vec<_>>()
        })
    })
}
