//! Compares our structures, constants and signatures with a vendor's header, by means of a C
//! compiler.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A vendor's header and its include directories.
pub(crate) struct Header {
    name: &'static str,
    places: Vec<PathBuf>,
}

/// A function: name, return type and parameter types, as written in Rust.
pub(crate) type Signature = (&'static str, &'static str, &'static [&'static str]);

/// Returns the size of a structure and the offsets of its fields, each as a C expression with
/// our value.
macro_rules! layout {
    ($ours:ty, $theirs:literal { $($field:ident: $their_field:literal),* $(,)? }) => {
        vec![
            (concat!("sizeof(", $theirs, ")").to_owned(), $crate::c_header::number(size_of::<$ours>())),
            $((
                concat!("offsetof(", $theirs, ", ", $their_field, ")").to_owned(),
                $crate::c_header::number(std::mem::offset_of!($ours, $field)),
            )),*
        ]
    };
    // Fields that have the header's names.
    ($ours:ty, $theirs:literal { $($field:ident),* ; }) => {
        vec![
            (concat!("sizeof(", $theirs, ")").to_owned(), $crate::c_header::number(size_of::<$ours>())),
            $((
                concat!("offsetof(", $theirs, ", ", stringify!($field), ")").to_owned(),
                $crate::c_header::number(std::mem::offset_of!($ours, $field)),
            )),*
        ]
    };
}
pub(crate) use layout;

/// Converts a size or an offset to the integer type that the C program prints.
pub(crate) fn number(of: usize) -> i64 {
    i64::try_from(of).unwrap()
}

impl Header {
    /// Returns NVML's header from the downloaded wheels.
    pub(crate) fn nvml(wheels: &Path) -> Self {
        let places = vec![wheels.join("nvidia/cu13/include")];
        Self {
            name: "nvml.h",
            places,
        }
    }

    /// Returns NVML's header of CUDA 12 from the downloaded wheels.
    pub(crate) fn nvml_12(wheels: &Path) -> Self {
        let places = vec![wheels.join("nvidia/nvml_dev/include")];
        Self {
            name: "nvml.h",
            places,
        }
    }

    /// Returns the CUDA runtime's header from the downloaded wheels.
    pub(crate) fn cuda(wheels: &Path) -> Self {
        Self {
            name: "cuda_runtime_api.h",
            ..Self::nvml(wheels)
        }
    }

    /// Returns NCCL's header from the downloaded wheels.
    pub(crate) fn nccl(wheels: &Path) -> Self {
        let mut header = Self::nvml(wheels);
        header.name = "nccl.h";
        header.places.push(wheels.join("nvidia/nccl/include"));
        header
    }

    /// Asserts that each C expression has our value under the header.
    pub(crate) fn assert_numbers(&self, ours: &[(String, i64)]) {
        let mut source = "int main(void) {\n".to_owned();
        for (expression, _) in ours {
            writeln!(source, "printf(\"%lld\\n\", (long long)({expression}));").unwrap();
        }
        source += "return 0; }\n";
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("numbers");
        self.compile(&source, &["-o", program.to_str().unwrap()]);
        let output = Command::new(program).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let theirs: Vec<i64> = text.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(theirs.len(), ours.len(), "{text}");
        let differ = ours.iter().zip(theirs);
        let differ: Vec<_> = differ
            .filter(|((_, ours), theirs)| ours != theirs)
            .collect();
        assert!(
            differ.is_empty(),
            "ours and those of {}: {differ:?}",
            self.name
        );
    }

    /// Asserts that the header declares these functions with the same types. `types` maps Rust
    /// types to C types. The compiler accepts an enumeration in place of its integer type.
    pub(crate) fn assert_signatures(&self, ours: &[Signature], types: &[(&str, &str)]) {
        let c = |rust: &str| {
            let form = types.iter().find(|(ours, _)| *ours == rust);
            form.unwrap_or_else(|| panic!("no C form of {rust}")).1
        };
        let mut source = String::new();
        for (name, answer, takes) in ours {
            let mut takes = takes
                .iter()
                .map(|rust| c(rust))
                .collect::<Vec<_>>()
                .join(", ");
            if takes.is_empty() {
                takes += "void";
            }
            let answer = c(answer);
            writeln!(source, "{answer} (*our_{name})({takes}) = {name};").unwrap();
        }
        self.compile(&source, &["-c", "-o", "/dev/null"]);
    }

    fn compile(&self, source: &str, arguments: &[&str]) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ours.c");
        let name = self.name;
        let head = format!("#include <stddef.h>\n#include <stdio.h>\n#include <{name}>\n");
        std::fs::write(&file, head + source).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-Werror", "-Wno-deprecated-declarations"]);
        // Not needed here, and NVIDIA's FP16 and BF16 headers need more than a C compiler.
        cc.args(["-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__"]);
        for place in &self.places {
            cc.arg("-isystem").arg(place);
        }
        let output = cc.arg(&file).args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
    }
}
