//! Comparison of gpuwarden's list of GPUs with that of `nvidia-smi`.

use std::process::Command;

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;

const MIB: u64 = 1024 * 1024;
/// Properties to query from `nvidia-smi` (`nvidia-smi --help-query-gpu`), with their keys in
/// `gpuwarden devices` or in `gpu_metadata.json`.
const FIELDS: [(&str, &str); 7] = [
    ("index", "index"),
    ("uuid", "name"),
    ("name", "product"),
    ("pci.bus_id", "pci"),
    ("memory.total", "memoryBytes"),
    ("serial", "serial_number"),
    ("driver_version", "driver_version"),
];

/// A GPU in the list of `nvidia-smi`; a property without a value is `None`.
#[derive(Debug)]
pub(super) struct Listed {
    values: [Option<String>; FIELDS.len()],
    mig_devices: usize,
}

/// A property of a GPU, from both.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    gpu: String,
    field: &'static str,
    nvidia_smi: Option<String>,
    gpuwarden: Option<String>,
    pub(super) is_same: bool,
}

/// Returns the GPUs that `nvidia-smi` lists. Without GPUs, returns its message as the error.
pub(super) fn nvidia_smi() -> anyhow::Result<Vec<Listed>> {
    let query = format!("--query-gpu={}", FIELDS.map(|(field, _)| field).join(","));
    parse(
        &run(&[&query, "--format=csv,noheader,nounits"])?,
        &run(&["-L"])?,
    )
}

/// Returns the output of `nvidia-smi`, which prints errors on its standard output as well.
fn run(args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("nvidia-smi").args(args).output();
    let output = output.context("nvidia-smi cannot be run")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let status = output.status;
    anyhow::ensure!(status.success(), "nvidia-smi, {status}: {}", said.trim());
    Ok(said)
}

/// Parses the CSV output, and the list that names the MIG devices below their GPU.
fn parse(csv: &str, list: &str) -> anyhow::Result<Vec<Listed>> {
    let mut gpus = Vec::new();
    for line in csv.lines().filter(|line| !line.trim().is_empty()) {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let cells = <[&str; FIELDS.len()]>::try_from(cells);
        let cells = cells.map_err(|_| anyhow::anyhow!("nvidia-smi says: {line}"))?;
        gpus.push(Listed {
            // "[N/A]" and "[Not Supported]" are missing values.
            values: cells.map(|cell| (!cell.starts_with('[')).then(|| cell.to_owned())),
            mig_devices: 0,
        });
    }
    let mut at = None;
    for line in list.lines() {
        if line.starts_with("GPU ") {
            at = gpus.iter_mut().find(|gpu| line.contains(gpu.uuid()));
        } else if let (true, Some(gpu)) = (line.trim_start().starts_with("MIG "), &mut at) {
            gpu.mig_devices += 1;
        }
    }
    anyhow::ensure!(!gpus.is_empty(), "nvidia-smi lists none");
    Ok(gpus)
}

/// Returns the properties of each GPU from both. Those without a value in `nvidia-smi` are
/// omitted.
pub(super) fn compare(listed: &[Listed], devices: &[Value], metadata: &Value) -> Vec<Row> {
    let counts = [listed.len(), devices.len()].map(|count| Some(count.to_string()));
    let mut rows = vec![row("all", "GPUs", counts)];
    for gpu in listed {
        let device = devices.iter().find(|device| device["name"] == gpu.uuid());
        let mut entries = metadata["gpus"].as_array().into_iter().flatten();
        let entry = entries.find(|entry| entry["uuid"] == gpu.uuid());
        for ((field, key), said) in FIELDS.into_iter().zip(&gpu.values) {
            let mut places = [device, entry, Some(metadata)].into_iter().flatten();
            let ours = places.find_map(|place| shown(&place[key], field));
            rows.push(row(gpu.uuid(), field, [said.clone(), ours]));
        }
        let ours = device.and_then(|device| device["migDevices"].as_array());
        let counts = [Some(gpu.mig_devices), ours.map(Vec::len)];
        let counts = counts.map(|count| count.map(|count| count.to_string()));
        rows.push(row(gpu.uuid(), "MIG devices", counts));
    }
    rows
}

/// Returns one of our values in the unit of `nvidia-smi`.
fn shown(value: &Value, field: &str) -> Option<String> {
    match value.as_u64() {
        Some(bytes) if field == "memory.total" => Some((bytes / MIB).to_string()),
        Some(number) => Some(number.to_string()),
        None => value.as_str().map(str::to_owned),
    }
}

fn row(gpu: &str, field: &'static str, [nvidia_smi, gpuwarden]: [Option<String>; 2]) -> Row {
    let is_same = match (&nvidia_smi, &gpuwarden) {
        (None, _) => true,
        (Some(said), Some(ours)) if field == "pci.bus_id" => pci(said) == pci(ours),
        (said, ours) => said == ours,
    };
    Row {
        gpu: gpu.to_owned(),
        field,
        nvidia_smi,
        gpuwarden,
        is_same,
    }
}

/// Returns a PCI address with a domain of four digits, as sysfs has it: `nvidia-smi` writes
/// eight.
pub(super) fn pci(address: &str) -> String {
    let address = address.to_ascii_lowercase();
    let is_long = address.find(':') == Some(8);
    let short = address.strip_prefix("0000").filter(|_| is_long);
    short.map_or(address.clone(), str::to_owned)
}

/// Prints the properties as a table.
pub(super) fn print(rows: &[Row]) {
    for row in rows {
        let verdict = match (&row.nvidia_smi, row.is_same) {
            (None, _) => "not told",
            (_, true) => "same",
            (_, false) => "DIFFERS",
        };
        let [said, ours] = [&row.nvidia_smi, &row.gpuwarden];
        let [said, ours] = [said, ours].map(|value| value.as_deref().unwrap_or("-"));
        println!(
            "  {:40}  {:14} {said:40} {ours:40} {verdict}",
            row.gpu, row.field
        );
    }
}

impl Listed {
    fn uuid(&self) -> &str {
        let [_, uuid, ..] = &self.values;
        uuid.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CSV: &str = "\
0, GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f, NVIDIA A100-SXM4-40GB, 00000000:0A:00.0, 40960, 1565020014719, 550.54.15
1, GPU-a3b1c2d4-0000-4000-8000-000000000001, NVIDIA GeForce RTX 4090, 00000000:0B:00.0, 24564, [N/A], 550.54.15
";
    const LIST: &str = "\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA GeForce RTX 4090 (UUID: GPU-a3b1c2d4-0000-4000-8000-000000000001)
";

    /// Returns the properties that differ once a value of the devices or the metadata is
    /// changed.
    fn differing(changed: &str, to: Value) -> Vec<&'static str> {
        let mut ours = json!({
            "devices": [
                {"name": "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "index": 0, "pci": "0000:0a:00.0",
                 "product": "NVIDIA A100-SXM4-40GB", "memoryBytes": 42_949_672_960_u64,
                 "migDevices": ["MIG-1", "MIG-2"]},
                {"name": "GPU-a3b1c2d4-0000-4000-8000-000000000001", "index": 1, "pci": "0000:0b:00.0",
                 "product": "NVIDIA GeForce RTX 4090", "memoryBytes": 25_757_220_864_u64,
                 "migDevices": []}],
            "metadata": {"driver_version": "550.54.15", "gpus": [
                {"uuid": "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f",
                 "serial_number": "1565020014719"}]},
        });
        *ours.pointer_mut(changed).unwrap() = to;
        let devices = ours["devices"].as_array().unwrap();
        let rows = compare(&parse(CSV, LIST).unwrap(), devices, &ours["metadata"]);
        let differing = rows.into_iter().filter(|row| !row.is_same);
        differing.map(|row| row.field).collect()
    }

    #[test]
    fn each_field_that_differs_is_named_and_no_other() {
        assert_eq!(differing("/devices/0/index", json!(0)), [""; 0]);
        let changes = [
            ("/devices/0/index", json!(7), "index"),
            ("/devices/0/product", json!("NVIDIA H100"), "name"),
            ("/devices/0/pci", json!("0001:0a:00.0"), "pci.bus_id"),
            ("/devices/0/memoryBytes", json!(MIB), "memory.total"),
            ("/devices/0/migDevices", json!(["MIG-1"]), "MIG devices"),
            ("/metadata/gpus/0/serial_number", json!("1"), "serial"),
        ];
        for (changed, to, field) in changes {
            assert_eq!(differing(changed, to), [field]);
        }
        let both = differing("/metadata/driver_version", json!("550.90.07"));
        assert_eq!(both, ["driver_version"; 2]);
    }

    #[test]
    fn a_gpu_that_is_missing_or_another_differs() {
        let found = differing("/devices", json!([]));
        assert_eq!(found.len(), 1 + 2 * 6, "{found:?}");
        let found = differing("/devices/1/name", json!("GPU-other"));
        assert!(found.contains(&"uuid"), "{found:?}");
    }

    #[test]
    fn what_is_no_list_of_gpus_is_refused() {
        for csv in ["", "No devices were found\n", "0, GPU-1, NVIDIA A100\n"] {
            assert!(parse(csv, "").is_err(), "{csv}");
        }
    }
}
