//! Simulated disk that loses power at every moment of a test.
//!
//! Synced data is on disk: the bytes of a file, the names in a directory. Each write since the
//! last sync may have reached the disk or not, in any order.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

thread_local! {
    static DISK: RefCell<Option<Disk>> = const { RefCell::new(None) };
}

/// Most writes without a sync after them.
const MOST_PENDING: usize = 4;

/// Disk under this thread's outbox, below a directory that survives every power cut.
#[derive(Default)]
struct Disk {
    root: PathBuf,
    /// Names in each directory at its last sync, with their inodes.
    names: HashMap<PathBuf, BTreeMap<OsString, u64>>,
    /// Bytes of each file at its last sync, by inode.
    bytes: HashMap<u64, Vec<u8>>,
    /// Writes since the last sync.
    pending: Vec<(u64, Vec<u8>, u64)>,
    /// Open files, so that no inode is reused.
    held: HashMap<u64, File>,
    /// Possible states of the disk at every moment since they were last taken.
    moments: Vec<Kept>,
}

/// Contents of the disk after a power cut: files below the root, by path.
pub(in super::super) type Kept = BTreeMap<PathBuf, Vec<u8>>;

/// Observes the writes of this thread below `root` from now on.
pub(in super::super) fn observe(root: &Path) {
    DISK.set(Some(Disk {
        root: root.to_owned(),
        ..Disk::default()
    }));
}

/// Returns the possible states of the disk at every moment since the last call, and the current
/// ones.
pub(in super::super) fn moments() -> (Vec<Kept>, Vec<Kept>) {
    DISK.with_borrow_mut(|disk| {
        let disk = disk.as_mut().expect("observed");
        (std::mem::take(&mut disk.moments), disk.possible())
    })
}

/// Writes the contents of a disk into a new directory.
pub(in super::super) fn after(kept: &Kept) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (path, bytes) in kept {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    dir
}

pub(super) fn wrote(file: &File, bytes: &[u8], at: u64) {
    observed(|disk| {
        let inode = disk.hold(file);
        disk.pending.push((inode, bytes.to_vec(), at));
    });
}

pub(super) fn synced(file: &File) {
    observed(|disk| {
        let inode = disk.hold(file);
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        // A file opened for writing only has to be opened by name to be read.
        File::open(format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(file)
        ))
        .unwrap()
        .read_exact_at(&mut bytes, 0)
        .unwrap();
        disk.bytes.insert(inode, bytes);
        disk.pending.retain(|(of, ..)| *of != inode);
    });
}

pub(super) fn synced_directory(directory: &Path) {
    observed(|disk| {
        let mut names = BTreeMap::new();
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let inode = disk.hold(&File::open(entry.path()).unwrap());
            names.insert(entry.file_name(), inode);
        }
        disk.names.insert(directory.to_owned(), names);
    });
}

fn observed(note: impl FnOnce(&mut Disk)) {
    DISK.with_borrow_mut(|disk| {
        if let Some(disk) = disk {
            note(disk);
            let possible = disk.possible();
            disk.moments.extend(possible);
        }
    });
}

// === impl Disk ===

impl Disk {
    fn hold(&mut self, file: &File) -> u64 {
        let inode = file.metadata().unwrap().ino();
        let held = self.held.entry(inode);
        held.or_insert_with(|| file.try_clone().unwrap());
        inode
    }

    /// Returns the possible states of the disk now: with or without each of the pending writes.
    fn possible(&self) -> Vec<Kept> {
        assert!(self.pending.len() <= MOST_PENDING, "never synchronised");
        let some = 0..1_u32 << self.pending.len();
        some.map(|some| {
            let mut bytes = self.bytes.clone();
            for (index, (inode, written, at)) in self.pending.iter().enumerate() {
                if some & 1 << index != 0 {
                    let bytes = bytes.entry(*inode).or_default();
                    let at = usize::try_from(*at).unwrap();
                    let end = at + written.len();
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[at..end].copy_from_slice(written);
                }
            }
            let mut kept = Kept::new();
            self.collect(&self.root, &bytes, &mut kept);
            kept
        })
        .collect()
    }

    fn collect(&self, directory: &Path, bytes: &HashMap<u64, Vec<u8>>, kept: &mut Kept) {
        for (name, inode) in self.names.get(directory).into_iter().flatten() {
            let path = directory.join(name);
            if self.held[inode].metadata().unwrap().is_dir() {
                self.collect(&path, bytes, kept);
            } else {
                let below = path.strip_prefix(&self.root).unwrap().to_owned();
                kept.insert(below, bytes.get(inode).cloned().unwrap_or_default());
            }
        }
    }
}
