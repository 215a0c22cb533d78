//! Seeds of a fuzz target, for the tests of the crate under test. The bodies of the targets are
//! in `bodies/`; the fuzzer builds the same files with its own flags.

use std::{fs, path::Path};

/// Runs a target's body on each of its seeds.
pub fn run(target: &str, body: impl Fn(&[u8])) {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus-seed");
    let mut count = 0;
    for seed in fs::read_dir(seeds.join(target)).unwrap() {
        let seed = seed.unwrap().path();
        println!("{}", seed.display());
        body(&fs::read(seed).unwrap());
        count += 1;
    }
    assert!(count > 0, "{target} has no seed");
}
