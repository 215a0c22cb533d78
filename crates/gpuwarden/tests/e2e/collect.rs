//! `collect` in a container: it uses the programs of the machine, whose root is mounted.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::gpuwarden;

/// A bug report with data that only the machine has.
const REPORT: &str = "#!/bin/sh\nwhile [ \"$1\" != --output-file ]; do shift; done\n\
                      read line < /etc/machine\necho \"$line $PATH\" > \"$2\"\n";

/// Copies a file, with the symbolic links on its path, below another root.
fn copy(path: &str, root: &Path) {
    let to = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    fs::copy(path, to).unwrap();
}

#[test]
fn programs_run_below_the_root_of_the_machine() {
    if !rustix::process::geteuid().is_root() {
        return testkit::skip("the right to change the root directory");
    }
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("host");
    let libraries = Command::new("ldd").arg("/bin/sh").output().unwrap();
    let libraries = String::from_utf8(libraries.stdout).unwrap();
    let libraries = libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'));
    for path in libraries.chain(["/bin/sh"]) {
        copy(path, &root);
    }
    for directory in ["tmp", "etc", "usr/bin"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    fs::write(root.join("etc/machine"), "gpu-7's own\n").unwrap();
    let program = root.join("usr/bin/nvidia-bug-report.sh");
    fs::write(&program, REPORT).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();

    let directory = scratch.path().join("collected").display().to_string();
    let (code, out, err) = gpuwarden(
        &[
            "collect",
            "-o",
            "json",
            "--node-name",
            "gpu-7",
            "--directory",
            &directory,
            "--host-root",
            root.to_str().unwrap(),
            "--kernel-log",
            "/nowhere/kern.log",
            "--server",
            "http://127.0.0.1:1",
        ],
        "",
    );
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    let told: Value = serde_json::from_str(&out).unwrap();
    let source = |name: &str| {
        let mut all = told["sources"].as_array().unwrap().iter();
        all.find(|one| one["source"] == name).unwrap()
    };
    let smi = source("nvidia-smi")["problem"].as_str().unwrap();
    assert!(smi.starts_with("there is no nvidia-smi below"), "{smi}");
    let report = source("nvidia-bug-report")["file"].as_str().unwrap();
    let report = Path::new(told["directory"].as_str().unwrap()).join(report);
    let report = fs::read_to_string(report).unwrap();
    let standard = host::program::STANDARD_PATH;
    assert_eq!(report, format!("gpu-7's own {standard}\n"));
    // No file is left on the machine.
    assert_eq!(fs::read_dir(root.join("tmp")).unwrap().count(), 0);
}
