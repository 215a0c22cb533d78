//! Writes journal files in systemd's format, as far as a reader depends on it.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use super::super::hash;

const HEADER: usize = 272;
const BUCKETS: usize = 16;

#[derive(Clone, Copy, Debug)]
pub(super) enum Compression {
    Lz4,
    Zstd,
}

/// Journal file that is being written.
pub(super) struct Writer {
    file: File,
    path: PathBuf,
    bytes: Vec<u8>,
    number: u8,
    seqnum: u64,
    compact: bool,
    keyed: bool,
    compression: Option<Compression>,
    data: HashMap<Vec<u8>, usize>,
    entries: Vec<usize>,
}

impl Writer {
    /// Creates a file; `number` identifies its sequence.
    pub(super) fn new(path: &Path, number: u8) -> Self {
        Self::go_on(path, number, 0)
    }

    fn go_on(path: &Path, number: u8, seqnum: u64) -> Self {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap();
        let mut writer = Self {
            file,
            path: path.to_owned(),
            bytes: Vec::new(),
            number,
            seqnum,
            compact: false,
            keyed: true,
            compression: None,
            data: HashMap::new(),
            entries: Vec::new(),
        };
        writer.begin();
        writer
    }

    /// Sets the format of the file, before its first entry.
    pub(super) fn form(&mut self, compact: bool, keyed: bool, compression: Option<Compression>) {
        assert!(self.entries.is_empty());
        (self.compact, self.keyed, self.compression) = (compact, keyed, compression);
        self.begin();
    }

    fn begin(&mut self) {
        self.bytes = vec![0; HEADER];
        self.bytes[..8].copy_from_slice(b"LPKSHHRH");
        let compression = match self.compression {
            None => 0,
            Some(Compression::Lz4) => 2,
            Some(Compression::Zstd) => 8,
        };
        let flags = compression | u32::from(self.keyed) << 2 | u32::from(self.compact) << 4;
        self.bytes[12..16].copy_from_slice(&flags.to_le_bytes());
        // Files of one sequence have different ids, derived from their first sequence number.
        let mut file_id = [self.number; 16];
        file_id[8..].copy_from_slice(&self.seqnum.to_le_bytes());
        self.bytes[24..40].copy_from_slice(&file_id);
        self.bytes[72..88].copy_from_slice(&[self.number; 16]);
        self.put(88, HEADER as u64);
        for (kind, field) in [(5, 120), (4, 104)] {
            let table = self.object(kind, 0, &vec![0; BUCKETS * 16]);
            self.put(field, (table + 16) as u64);
            self.put(field + 8, (BUCKETS * 16) as u64);
        }
        self.flush();
    }

    /// Writes a kernel entry.
    pub(super) fn kernel(&mut self, boot: [u8; 16], monotonic: u64, realtime: u64, text: &str) {
        let message = format!("MESSAGE={text}");
        let fields = ["_TRANSPORT=kernel", "SYSLOG_FACILITY=0", &message];
        self.entry(boot, monotonic, realtime, &fields);
    }

    pub(super) fn entry(&mut self, boot: [u8; 16], monotonic: u64, realtime: u64, fields: &[&str]) {
        let data: Vec<usize> = fields.iter().map(|field| self.field(field)).collect();
        self.seqnum += 1;
        let xor = fields
            .iter()
            // Equal in every file, unlike the hash of the data.
            .fold(0, |xor, field| xor ^ hash::jenkins(field.as_bytes()));
        let mut body = Vec::new();
        for number in [self.seqnum, realtime, monotonic] {
            body.extend(number.to_le_bytes());
        }
        body.extend(boot);
        body.extend(xor.to_le_bytes());
        for (offset, field) in data.iter().zip(fields) {
            if self.compact {
                body.extend(u32::try_from(*offset).unwrap().to_le_bytes());
            } else {
                body.extend((*offset as u64).to_le_bytes());
                body.extend(self.hash(field.as_bytes()).to_le_bytes());
            }
        }
        let entry = self.object(3, 0, &body);
        let count = self.entries.len() as u64;
        self.link(176, count, entry);
        self.entries.push(entry);
        for offset in data {
            let count = self.get(offset + 56);
            if count == 0 {
                self.put(offset + 40, entry as u64);
            } else {
                self.link(offset + 48, count - 1, entry);
            }
            self.put(offset + 56, count + 1);
        }
        if count == 0 {
            self.put(168, self.seqnum);
            self.put(184, realtime);
        }
        self.put(152, count + 1);
        self.put(160, self.seqnum);
        self.put(192, realtime);
        self.put(200, monotonic);
        self.bytes[56..72].copy_from_slice(&boot);
        self.flush();
    }

    /// Archives the file under another name and starts the next one.
    pub(super) fn rotate(mut self, archived: &Path, next: &Path) -> Self {
        self.bytes[16] = 2;
        self.flush();
        fs::rename(&self.path, archived).unwrap();
        Self::go_on(next, self.number, self.seqnum)
    }

    /// Truncates the file before its `index`th entry, as a full disk or a crash does.
    pub(super) fn cut_at_entry(&self, index: usize) {
        self.file.set_len(self.entries[index] as u64).unwrap();
    }

    /// Marks the file as archived, which means that nothing more will be written to it.
    pub(super) fn archive(&self) {
        self.file.write_all_at(&[2], 16).unwrap();
    }

    /// Returns the bytes of the file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn hash(&self, data: &[u8]) -> u64 {
        if self.keyed {
            hash::keyed(data, self.bytes[24..40].try_into().unwrap())
        } else {
            hash::jenkins(data)
        }
    }

    fn field(&mut self, field: &str) -> usize {
        if let Some(offset) = self.data.get(field.as_bytes()) {
            return *offset;
        }
        let hash = self.hash(field.as_bytes());
        let mut body = hash.to_le_bytes().to_vec();
        body.extend([0; 40]);
        if self.compact {
            body.extend([0; 8]);
        }
        let (flags, payload) = match self.compression.filter(|_| field.len() >= 512) {
            None => (0, field.as_bytes().to_vec()),
            Some(Compression::Lz4) => {
                let mut payload = (field.len() as u64).to_le_bytes().to_vec();
                payload.extend(lz4_flex::block::compress(field.as_bytes()));
                (2, payload)
            }
            Some(Compression::Zstd) => {
                let level = ruzstd::encoding::CompressionLevel::Fastest;
                let payload = ruzstd::encoding::compress_to_vec(field.as_bytes(), level);
                (4, payload)
            }
        };
        body.extend(payload);
        let offset = self.object(1, flags, &body);
        let table = usize::try_from(self.get(104)).unwrap();
        let bucket = table + usize::try_from(hash).unwrap() % BUCKETS * 16;
        let tail = usize::try_from(self.get(bucket + 8)).unwrap();
        self.put(if tail == 0 { bucket } else { tail + 24 }, offset as u64);
        self.put(bucket + 8, offset as u64);
        let count = self.get(208);
        self.put(208, count + 1);
        self.data.insert(field.as_bytes().to_vec(), offset);
        offset
    }

    /// Adds an entry to the chain of arrays whose first offset is stored at `head`.
    fn link(&mut self, head: usize, mut index: u64, entry: usize) {
        let item = if self.compact { 4 } else { 8 };
        let (mut at, mut room) = (head, 4);
        loop {
            let array = usize::try_from(self.get(at)).unwrap();
            if array == 0 {
                let new = self.object(6, 0, &vec![0; 8 + room * item]);
                self.put(at, new as u64);
                continue;
            }
            if index < room as u64 {
                let place = array + 24 + usize::try_from(index).unwrap() * item;
                if self.compact {
                    let offset = u32::try_from(entry).unwrap();
                    self.bytes[place..place + 4].copy_from_slice(&offset.to_le_bytes());
                } else {
                    self.put(place, entry as u64);
                }
                return;
            }
            index -= room as u64;
            (at, room) = (array + 16, room * 2);
        }
    }

    fn object(&mut self, kind: u8, flags: u8, body: &[u8]) -> usize {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let offset = self.bytes.len();
        self.bytes.extend([kind, flags, 0, 0, 0, 0, 0, 0]);
        self.bytes.extend((16 + body.len() as u64).to_le_bytes());
        self.bytes.extend(body);
        let objects = self.get(144);
        self.put(144, objects + 1);
        self.put(136, offset as u64);
        offset
    }

    fn get(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    fn put(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn flush(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        self.put(96, (self.bytes.len() - HEADER) as u64);
        self.file.write_all_at(&self.bytes, 0).unwrap();
    }
}
