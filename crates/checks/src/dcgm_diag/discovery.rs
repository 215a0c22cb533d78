//! Table of `dcgmi discovery -l`, which maps the host engine's numbers to GPUs.
//!
//! ```text
//! | 0      | Name: NVIDIA H100 80GB HBM3                                          |
//! |        | PCI Bus ID: 00000000:18:00.0                                         |
//! |        | Device UUID: GPU-8c5f2a4e-1df4-4b07-9a8f-0c2b7d1e5f60                |
//! +--------+----------------------------------------------------------------------+
//! ```

use super::KnownGpu;

/// Parses the table; entries other than GPUs (switches, CPUs) are left out.
pub(super) fn read(table: &str) -> Vec<KnownGpu> {
    let mut number = None;
    let mut gpus = Vec::new();
    for line in table.lines() {
        if !line.trim_start().starts_with('|') {
            // End of an entry of the table.
            number = None;
            continue;
        }
        let mut cells = line.split('|').skip(1).map(str::trim);
        let (Some(first), Some(second)) = (cells.next(), cells.next()) else {
            continue;
        };
        if let Ok(parsed) = first.parse() {
            number = Some(parsed);
        }
        let uuid = second.strip_prefix("Device UUID:").map(str::trim);
        if let (Some(number), Some(uuid)) = (number, uuid)
            && uuid.starts_with("GPU-")
        {
            gpus.push(KnownGpu {
                uuid: uuid.to_owned(),
                number,
            });
        }
    }
    gpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_the_host_engine_are_read_by_uuid() {
        let table = "\
2 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 3      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:1B:00.0                                         |
|        | Device UUID: GPU-00000000-0000-0000-0000-000000000003                |
+--------+----------------------------------------------------------------------+
| 11     | Name: NVIDIA H100 80GB HBM3                                          |
|        | Device UUID: GPU-00000000-0000-0000-0000-00000000000b                |
+--------+----------------------------------------------------------------------+
1 NvSwitches found.
+-----------+
| Switch ID |
+-----------+
| 0         |
+-----------+
";
        let gpu = |number, end: &str| KnownGpu {
            uuid: format!("GPU-00000000-0000-0000-0000-0000000000{end}"),
            number,
        };
        assert_eq!(read(table), [gpu(3, "03"), gpu(11, "0b")]);
        for garbled in [
            "",
            "|",
            "||||",
            "| x | Device UUID: GPU-1 |",
            "| 1 | Device UUID: |",
        ] {
            assert_eq!(read(garbled), [], "{garbled}");
        }
    }
}
