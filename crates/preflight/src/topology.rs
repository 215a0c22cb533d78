//! NCCL's topology files of machines in clouds: which instance type has which, and those that we have ourselves.
//!
//! A virtual machine often shows GPUs and network cards as if they hung at no switch. A topology file says to
//! NCCL which of them are near to each other. Ours are made of what is publicly known of the machines: the
//! addresses of the devices and their switches, with the place where each was found. What is not said, such as
//! the processors of a NUMA node, NCCL reads from the machine.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::rendezvous::Topology;

/// Variable of a check: the name of the topology file, where it is the same for all machines.
pub const VARIABLE: &str = "GPUWARDEN_NCCL_TOPOLOGY";
/// The place of topology files in an image (ADR-026); one that is there goes before ours.
pub const DIRECTORY: &str = "/opt/nvsentinel/nccl-topologies";

/// Label of a node: its instance type.
const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";

/// The files by instance type where nothing else is configured: those of ADR-026, and the other types of the
/// same machines. BM.GPU4.8 is none of them: its devices have other addresses.
const BY_TYPE: [(&str, &str); 9] = [
    ("Standard_ND96amsr_A100_v4", "azure-ndv4.xml"),
    ("Standard_ND96asr_v4", "azure-ndv4.xml"),
    ("Standard_ND96isr_H100_v5", "azure-ndv5.xml"),
    ("Standard_ND96isr_H200_v5", "azure-ndv5.xml"),
    ("p5.48xlarge", "aws-p5.48xlarge.xml"),
    // We have none: where its devices are is not known well enough. An image may have it.
    ("a3-megagpu-8g", "gcp-a3-mega.xml"),
    ("BM.GPU.A100-v2.8", "oci-bm-gpu-a100.xml"),
    ("BM.GPU.B4.8", "oci-bm-gpu-a100.xml"),
    ("BM.GPU.GM4.8", "oci-bm-gpu-a100.xml"),
];

/// Which topology file the machines of an instance type have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topologies {
    /// The label of a node that says its instance type.
    pub label: String,
    /// File by instance type, in lower case.
    by_type: BTreeMap<String, String>,
    /// NCCL looks for itself where there is no file; otherwise nothing is measured.
    fallback: bool,
}

/// The keys of ADR-026.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Keys {
    instance_type_label: String,
    instance_type_mapping: BTreeMap<String, String>,
    enable_fallback: bool,
}

/// A machine: what its file says.
struct Machine {
    file: &'static str,
    /// Vendor, family and model of the processor.
    processor: (&'static str, u32, u32),
    /// The speed of the links of the devices, and of those of the switches, as NCCL knows it.
    links: (&'static str, &'static str),
    /// The class of a network card: Ethernet, or InfiniBand.
    card: &'static str,
    switches: &'static [Switch],
}

/// A switch: the NUMA node that it is at, its bus, and the buses of the GPUs and of the network cards behind it.
/// A bus stands with its domain, and each device is the first of its bus.
type Switch = (u32, &'static str, &'static str, &'static str);

const GEN_4: &str = "16.0 GT/s PCIe";
const GEN_5: &str = "32.0 GT/s PCIe";
const ETHERNET: &str = "0x020000";
const INFINIBAND: &str = "0x020700";

const MACHINES: [Machine; 4] = [
    // Azure ND A100 v4, from Azure's own images (Azure/azhpc-images, `topology/`). The switches are not shown to
    // the virtual machine, so their addresses are free.
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
    // Azure ND H100 v5, from the same place. ND H200 v5 is run with the same file.
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
    // Amazon p5.48xlarge: switches, and four cards (EFA) behind each, from Amazon's plugin (aws/aws-ofi-nccl
    // before 1.11, `topology/`); the addresses of the GPUs as DCGM's exporter shows them there, each among those of
    // its switch. The plugin has one card stand for its four, so that its link has to carry what all of them do.
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
    // Oracle BM.GPU.A100-v2.8, BM.GPU.B4.8 and BM.GPU.GM4.8: the devices of each by Oracle's health checks
    // (oci-dr-hpc, `shapes.json`), where they are the same; switches and NUMA nodes of BM.GPU.B4.8 by its cluster
    // stack (oracle-quickstart/oci-hpc). Each card has two ports, which NCCL takes together.
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

/// Returns the topology file of this name, if we have one.
pub fn file(name: &str) -> Option<String> {
    let machine = MACHINES.iter().find(|machine| machine.file == name)?;
    Some(machine.xml())
}

/// Returns the file that a shape of the configuration means; the error says which there are.
pub(crate) fn of_shape(shape: &str) -> Result<String, String> {
    match shape {
        "ndv4" | "ndv5" => Ok(format!("azure-{shape}.xml")),
        _ => Err(format!("{shape:?} is no shape; write ndv4 or ndv5")),
    }
}

/// Returns whether a text is the name of a file, without a directory.
pub fn is_name(text: &str) -> bool {
    !text.is_empty() && !text.contains('/') && text != "." && text != ".."
}

// === impl Topologies ===

impl Topologies {
    /// Returns what a machine of an instance type has; `None` where NCCL is to look for itself. `unknown` says
    /// why the type is not known.
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
    pub(crate) fn read(self) -> Result<Topologies, String> {
        let ours = BY_TYPE.map(|(name, file)| (name.to_owned(), file.to_owned()));
        let mut by_type = BTreeMap::new();
        for (name, file) in ours.into_iter().chain(self.instance_type_mapping) {
            if !is_name(&file) {
                return Err(format!(
                    "ncclTopology.instanceTypeMapping: {file:?} of {name} is no name of a file; write one without \
                     a directory, such as azure-ndv5.xml"
                ));
            }
            by_type.insert(name.to_ascii_lowercase(), file);
        }
        Ok(Topologies {
            label: self.instance_type_label,
            by_type,
            fallback: self.enable_fallback,
        })
    }
}

// === impl Machine ===

impl Machine {
    /// Returns the file, in the form that NCCL reads.
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

/// Returns the beginning of what says of a device where it is and how it is linked.
fn device(bus: &str, class: &str, speed: &str) -> String {
    format!("<pci busid=\"{bus}:00.0\" class=\"{class}\" link_speed=\"{speed}\" link_width=\"16\"")
}

#[cfg(test)]
mod tests;
