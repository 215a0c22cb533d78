//! NCCL topology files of cloud machines: which instance type uses which file, and the files of
//! our own.
//!
//! A virtual machine often presents its GPUs and network cards without the switches between
//! them. A topology file describes to NCCL which devices are close to each other. Ours are
//! built from public data: the addresses of the devices and switches, with the source noted at
//! each machine. NCCL reads the rest from the machine, such as the processors of a NUMA node.

use std::collections::{BTreeMap, BTreeSet};

use contract::findings::Findings;
use contract::names;
use serde::Deserialize;

use crate::rendezvous::Topology;

/// Variable of a check: name of the topology file, if it is the same for all machines.
pub const VARIABLE: &str = "GPUWARDEN_NCCL_TOPOLOGY";
/// Directory of topology files in an image (ADR-026). A file there wins over one of ours.
pub const DIRECTORY: &str = "/opt/nvsentinel/nccl-topologies";

/// Default label of a node that holds its instance type.
const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";

/// Default file of each instance type: the types of ADR-026, and other types of the same
/// machines. BM.GPU4.8 is left out, since its devices have other addresses.
const BY_TYPE: [(&str, &str); 9] = [
    ("Standard_ND96amsr_A100_v4", "azure-ndv4.xml"),
    ("Standard_ND96asr_v4", "azure-ndv4.xml"),
    ("Standard_ND96isr_H100_v5", "azure-ndv5.xml"),
    ("Standard_ND96isr_H200_v5", "azure-ndv5.xml"),
    ("p5.48xlarge", "aws-p5.48xlarge.xml"),
    // Not one of ours: the addresses of its devices are not published. An image may have the
    // file.
    ("a3-megagpu-8g", "gcp-a3-mega.xml"),
    ("BM.GPU.A100-v2.8", "oci-bm-gpu-a100.xml"),
    ("BM.GPU.B4.8", "oci-bm-gpu-a100.xml"),
    ("BM.GPU.GM4.8", "oci-bm-gpu-a100.xml"),
];

/// Topology file of each instance type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topologies {
    /// Label of a node that holds its instance type.
    pub label: String,
    /// File names, by instance type in lower case.
    by_type: BTreeMap<String, String>,
    /// True if NCCL may detect the topology itself when there is no file; false if nothing is
    /// measured then.
    fallback: bool,
}

/// The keys below `ncclTopology` (ADR-026).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Keys {
    instance_type_label: String,
    instance_type_mapping: BTreeMap<String, String>,
    enable_fallback: bool,
}

/// Machine with a topology file of ours.
struct Machine {
    file: &'static str,
    /// Processor vendor, family and model.
    processor: (&'static str, u32, u32),
    /// Link speeds of the devices and of the switches, in the form of NCCL.
    links: (&'static str, &'static str),
    /// PCI class of a network card: Ethernet or InfiniBand.
    card: &'static str,
    switches: &'static [Switch],
}

/// PCIe switch: its NUMA node, its bus, the buses of its GPUs, and the buses of its network
/// cards. A bus includes the PCI domain; each device is the first on its bus.
type Switch = (u32, &'static str, &'static str, &'static str);

const GEN_4: &str = "16.0 GT/s PCIe";
const GEN_5: &str = "32.0 GT/s PCIe";
const ETHERNET: &str = "0x020000";
const INFINIBAND: &str = "0x020700";

const MACHINES: [Machine; 4] = [
    // Azure ND A100 v4, from Azure's own images (Azure/azhpc-images, `topology/`). The virtual
    // machine does not see the switches, so their addresses are made up.
    Machine {
        file: "azure-ndv4.xml",
        processor: ("AuthenticAMD", 23, 49),
        links: (GEN_4, GEN_4),
        card: INFINIBAND,
        switches: &[
            (0, "ffff:01", "0003:00 0004:00", "0103:00 0104:00"),
            (1, "ffff:02", "0001:00 0002:00", "0101:00 0102:00"),
            (2, "ffff:03", "000d:00 000e:00", "0107:00 0108:00"),
            (3, "ffff:04", "000b:00 000c:00", "0105:00 0106:00"),
        ],
    },
    // Azure ND H100 v5, from the same source. ND H200 v5 uses the same file.
    Machine {
        file: "azure-ndv5.xml",
        processor: ("GenuineIntel", 6, 143),
        links: (GEN_5, GEN_5),
        card: INFINIBAND,
        switches: &[
            (0, "ffff:01", "0001:00", "0101:00"),
            (0, "ffff:02", "0002:00", "0102:00"),
            (0, "ffff:03", "0003:00", "0103:00"),
            (0, "ffff:04", "0008:00", "0104:00"),
            (1, "ffff:05", "0009:00", "0105:00"),
            (1, "ffff:06", "000a:00", "0106:00"),
            (1, "ffff:07", "000b:00", "0107:00"),
            (1, "ffff:08", "000c:00", "0108:00"),
        ],
    },
    // Amazon p5.48xlarge. The switches, with four cards (EFA) behind each, are from Amazon's
    // plugin (aws/aws-ofi-nccl before 1.11, `topology/`). The addresses of the GPUs are as
    // DCGM's exporter shows them on this machine, assigned to the switch with the neighbouring
    // addresses. The plugin lets one card stand for its four, so that card's link has to carry
    // the traffic of all four.
    Machine {
        file: "aws-p5.48xlarge.xml",
        processor: ("AuthenticAMD", 25, 1),
        links: (GEN_5, GEN_4),
        card: ETHERNET,
        switches: &[
            (0, "0000:45", "0000:53", "0000:4f 0000:50 0000:51 0000:52"),
            (0, "0000:56", "0000:64", "0000:60 0000:61 0000:62 0000:63"),
            (0, "0000:67", "0000:75", "0000:71 0000:72 0000:73 0000:74"),
            (0, "0000:78", "0000:86", "0000:82 0000:83 0000:84 0000:85"),
            (1, "0000:89", "0000:97", "0000:93 0000:94 0000:95 0000:96"),
            (1, "0000:9a", "0000:a8", "0000:a4 0000:a5 0000:a6 0000:a7"),
            (1, "0000:ab", "0000:b9", "0000:b5 0000:b6 0000:b7 0000:b8"),
            (1, "0000:bc", "0000:ca", "0000:c6 0000:c7 0000:c8 0000:c9"),
        ],
    },
    // Oracle BM.GPU.A100-v2.8, BM.GPU.B4.8 and BM.GPU.GM4.8. The devices are from Oracle's
    // health checks (oci-dr-hpc, `shapes.json`) and are the same for all three; the switches
    // and NUMA nodes are those of BM.GPU.B4.8 in Oracle's cluster stack
    // (oracle-quickstart/oci-hpc). Each card has two ports, which NCCL uses together.
    Machine {
        file: "oci-bm-gpu-a100.xml",
        processor: ("AuthenticAMD", 25, 1),
        links: (GEN_4, GEN_4),
        card: ETHERNET,
        switches: &[
            (3, "0000:01", "0000:0f 0000:15", "0000:0c 0000:16"),
            (1, "0000:3f", "0000:50 0000:53", "0000:47 0000:4b"),
            (7, "0000:7e", "0000:8c 0000:91", "0000:89 0000:93"),
            (5, "0000:bb", "0000:d6 0000:da", "0000:c3 0000:d1"),
        ],
    },
];

/// Returns the contents of our topology file with this name, if there is one.
pub fn file(name: &str) -> Option<String> {
    let machine = MACHINES.iter().find(|machine| machine.file == name)?;
    Some(machine.xml())
}

/// Returns the file name for a configured shape. The error lists the known shapes.
pub(crate) fn of_shape(shape: &str) -> Result<String, String> {
    match shape {
        "ndv4" | "ndv5" => Ok(format!("azure-{shape}.xml")),
        _ => Err(format!("{shape:?} is not a shape; write ndv4 or ndv5")),
    }
}

/// Returns true if a text is a file name without a directory.
pub fn is_name(text: &str) -> bool {
    !text.is_empty() && !text.contains('/') && text != "." && text != ".."
}

// === impl Topologies ===

impl Topologies {
    /// Returns the topology of an instance type, or `None` if NCCL is to detect it. The error
    /// of `instance_type` is the reason why the type is not known.
    pub fn of(&self, instance_type: Result<&str, &str>) -> Option<Topology> {
        let missing = match instance_type {
            Ok(name) => match self.by_type.get(&name.to_ascii_lowercase()) {
                Some(file) => {
                    return Some(Topology::File {
                        name: file.clone(),
                        required: !self.fallback,
                    });
                }
                None => format!("there is no topology file for the instance type {name:?}"),
            },
            Err(unknown) => format!("the instance type is not known: {unknown}"),
        };
        (!self.fallback).then_some(Topology::Missing(missing))
    }
}

// === impl Keys ===

impl Default for Keys {
    fn default() -> Self {
        Self {
            instance_type_label: INSTANCE_TYPE.to_owned(),
            instance_type_mapping: BTreeMap::new(),
            enable_fallback: true,
        }
    }
}

impl Keys {
    pub(crate) fn read(self, findings: &mut Findings<'_>) -> Topologies {
        let label = names::label_key(&self.instance_type_label);
        findings.check("ncclTopology.instanceTypeLabel", label);
        let ours = BY_TYPE.map(|(name, file)| (name.to_owned(), file.to_owned()));
        let mut by_type = BTreeMap::new();
        for (name, file) in ours.into_iter().chain(self.instance_type_mapping) {
            if !is_name(&file) {
                let wanted = "write the name of a file without a directory, such as azure-ndv5.xml";
                let path = format!("ncclTopology.instanceTypeMapping.{name}");
                findings.refuse(&path, wanted);
            }
            by_type.insert(name.to_ascii_lowercase(), file);
        }
        Topologies {
            label: self.instance_type_label,
            by_type,
            fallback: self.enable_fallback,
        }
    }
}

// === impl Machine ===

impl Machine {
    /// Returns the file in NCCL's XML format.
    fn xml(&self) -> String {
        let (vendor, family, model) = self.processor;
        let (below, above) = self.links;
        let mut lines = vec!["<system version=\"1\">".to_owned()];
        let numas: BTreeSet<u32> = self.switches.iter().map(|(numa, ..)| *numa).collect();
        for numa in numas {
            lines.push(format!(
                "<cpu numaid=\"{numa}\" arch=\"x86_64\" vendor=\"{vendor}\" familyid=\"{family}\" \
                 modelid=\"{model}\">"
            ));
            let at_node = self.switches.iter().filter(|(at, ..)| *at == numa);
            for (_, bus, gpus, cards) in at_node {
                lines.push(format!("{}>", device(bus, "0x060400", above)));
                let gpus = gpus.split(' ').map(|bus| device(bus, "0x030200", below));
                let cards = cards.split(' ').map(|bus| device(bus, self.card, below));
                lines.extend(gpus.chain(cards).map(|device| format!("{device}/>")));
                lines.push("</pci>".to_owned());
            }
            lines.push("</cpu>".to_owned());
        }
        lines.push("</system>\n".to_owned());
        lines.join("\n")
    }
}

/// Returns the start of a `pci` element, without the closing bracket.
fn device(bus: &str, class: &str, speed: &str) -> String {
    format!("<pci busid=\"{bus}:00.0\" class=\"{class}\" link_speed=\"{speed}\" link_width=\"16\"")
}

#[cfg(test)]
mod tests;
