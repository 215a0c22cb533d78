use std::collections::BTreeSet;

use super::*;
use crate::config::Config;

/// Link speeds that NCCL accepts; it takes any other for PCIe 3 (`kvDictPciGen` in
/// `graph/topo.cc`).
const SPEEDS: [&str; 2] = ["16.0 GT/s PCIe", "32.0 GT/s PCIe"];
/// Attributes that NCCL requires of each element.
const NEEDED: [(&str, &[&str]); 3] = [
    ("system", &["version"]),
    ("cpu", &["numaid", "arch", "vendor", "familyid", "modelid"]),
    ("pci", &["busid", "class", "link_speed", "link_width"]),
];

/// Start of an element: depth, name and attributes.
type Element = (usize, String, BTreeMap<String, String>);

/// Parses what NCCL parses: elements with attributes, and nothing between them.
fn parsed(xml: &str) -> Vec<Element> {
    let mut open: Vec<String> = Vec::new();
    let mut elements = Vec::new();
    let mut rest = xml.trim();
    while !rest.is_empty() {
        let (tag, behind) = rest
            .strip_prefix('<')
            .and_then(|rest| rest.split_once('>'))
            .expect("an element");
        rest = behind.trim_start();
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "{xml}");
            continue;
        }
        let (tag, is_closed) = tag
            .strip_suffix('/')
            .map_or((tag, false), |tag| (tag, true));
        let (name, attributes) = tag.split_once(' ').expect("attributes");
        let mut parts = attributes.split('"');
        let mut all = BTreeMap::new();
        while let (Some(key), Some(value)) = (parts.next(), parts.next()) {
            let key = key.trim().strip_suffix('=').expect("a key");
            assert!(all.insert(key.to_owned(), value.to_owned()).is_none());
        }
        elements.push((open.len(), name.to_owned(), all));
        if !is_closed {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty(), "{open:?} is not closed");
    elements
}

fn is_address(text: &str) -> bool {
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    let is_hex = |part: &&str| part.chars().all(|it| matches!(it, '0'..='9' | 'a'..='f'));
    lengths == [4, 2, 2, 1] && parts.iter().all(is_hex)
}

#[test]
fn each_file_of_ours_is_one_that_nccl_takes() {
    // Counts of GPUs, network cards and NUMA nodes, as the machines' vendors publish them.
    for (name, gpus, cards, numas) in [
        ("azure-ndv4.xml", 8, 8, 4),
        ("azure-ndv5.xml", 8, 8, 2),
        ("aws-p5.48xlarge.xml", 8, 32, 2),
        ("oci-bm-gpu-a100.xml", 8, 8, 4),
    ] {
        let elements = parsed(&file(name).expect(name));
        let mut addresses = BTreeSet::new();
        let mut count: BTreeMap<&str, u32> = BTreeMap::new();
        for (at, (depth, element, attributes)) in elements.iter().enumerate() {
            let needed = NEEDED.iter().find(|(name, _)| name == element);
            let (_, needed) = needed.expect(element);
            let there: BTreeSet<&str> = attributes.keys().map(String::as_str).collect();
            assert_eq!(there, needed.iter().copied().collect(), "{name}: {element}");
            match element.as_str() {
                "system" => assert_eq!((at, &*attributes["version"]), (0, "1"), "{name}"),
                "cpu" => assert_eq!(*depth, 1, "{name}"),
                _ => {
                    let address = &attributes["busid"];
                    assert!(is_address(address), "{name}: {address}");
                    assert!(addresses.insert(address), "{name}: {address} twice");
                    assert!(SPEEDS.contains(&&*attributes["link_speed"]), "{name}");
                    assert_eq!(attributes["link_width"], "16", "{name}");
                    // A switch is below a processor, and a device below a switch.
                    let is_switch = attributes["class"] == "0x060400";
                    assert_eq!(*depth, if is_switch { 2 } else { 3 }, "{name}");
                }
            }
            let kind = attributes
                .get("class")
                .map_or(element.as_str(), |class| &class[..4]);
            *count.entry(kind).or_default() += 1;
        }
        let counted = ["0x03", "0x02", "cpu"].map(|kind| count[kind]);
        assert_eq!(counted, [gpus, cards, numas], "{name}");
        // Limit of NCCL (`NCCL_TOPO_XML_MAX_NODES`).
        assert!(elements.len() < 256, "{name}");
    }
    assert_eq!(file("gcp-a3-mega.xml"), None);
}

#[test]
fn an_instance_type_has_its_file_in_any_case_and_others_none() {
    let tried = |text: &str| {
        let text = format!(r#"{{"image": "i", "ncclTopology": {text}}}"#);
        Config::parse(&text, "c").map(|config| config.topologies)
    };
    let read = |text: &str| tried(text).expect(text);
    let known = read("{}");
    assert_eq!(known.label, "node.kubernetes.io/instance-type");
    let named = |file: &str, required| {
        let name = file.to_owned();
        Some(Topology::File { name, required })
    };
    // The types of ADR-026, one in another case, and the machine that ADR-026 has a file but no
    // type for.
    for (name, file) in [
        ("Standard_ND96isr_H100_v5", "azure-ndv5.xml"),
        ("Standard_ND96amsr_A100_v4", "azure-ndv4.xml"),
        ("standard_nd96amsr_a100_v4", "azure-ndv4.xml"),
        ("p5.48xlarge", "aws-p5.48xlarge.xml"),
        ("a3-megagpu-8g", "gcp-a3-mega.xml"),
        ("BM.GPU.A100-v2.8", "oci-bm-gpu-a100.xml"),
    ] {
        assert_eq!(known.of(Ok(name)), named(file, false), "{name}");
    }
    assert_eq!(known.of(Ok("BM.GPU4.8")), None);
    assert_eq!(known.of(Err("no answer")), None);

    let own = read(
        r#"{"instanceTypeMapping": {"x1": "x.xml", "P5.48xlarge": "y.xml"}, "enableFallback": false}"#,
    );
    assert_eq!(own.of(Ok("x1")), named("x.xml", true));
    assert_eq!(own.of(Ok("p5.48xlarge")), named("y.xml", true));
    assert_eq!(
        own.of(Ok("BM.GPU.B4.8")),
        named("oci-bm-gpu-a100.xml", true)
    );
    for (asked, why) in [
        (Ok("other"), "for the instance type \"other\""),
        (Err("no answer"), "is not known: no answer"),
    ] {
        let Some(Topology::Missing(text)) = own.of(asked) else {
            panic!("{asked:?}");
        };
        assert!(text.contains(why), "{text}");
    }

    for file in ["", "..", "../secret.xml", "/etc/passwd"] {
        let text = format!(r#"{{"instanceTypeMapping": {{"x1": "{file}"}}}}"#);
        let error = tried(&text).expect_err(file).to_string();
        assert!(error.contains("write the name of a file"), "{error}");
    }
}
