//! The answer of `dcgmHealthCheck`, as `dcgm_structs.h` lays it out: version, health of all, number of
//! incidents, and for each of them watch, health, text, code, kind and number of what it is about.
//!
//! Between versions of DCGM it differs in its number, in how many incidents have room, and in how
//! long their texts may be.

use diagnosis::gpu::dcgm::{DcgmEntity, DcgmIncident};

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Number of its version.
    pub(super) number: u32,
    /// Number of incidents that have room.
    pub(super) incidents: usize,
    /// Words of each text.
    pub(super) text: usize,
}

/// The forms that are tried, the newest first.
pub(super) const LAYOUTS: [Layout; 8] = [
    layout(5, 1024, 1024),
    layout(5, 1024, 512),
    layout(5, 64, 1024),
    layout(5, 64, 512),
    layout(4, 64, 1024),
    layout(4, 64, 512),
    layout(4, 1024, 1024),
    layout(4, 1024, 512),
];

/// Words before the first incident.
const HEAD: usize = 3;
/// Words of an incident beside its text.
const BESIDE: usize = 5;
/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// An answer, and its form.
#[derive(Debug)]
pub(super) struct Response {
    layout: Layout,
    /// Words, so that the library finds it aligned.
    words: Vec<u32>,
}

/// Returns a form whose texts have so many bytes.
const fn layout(number: u32, incidents: usize, bytes: usize) -> Layout {
    Layout {
        number,
        incidents,
        text: bytes / WORD,
    }
}

// === impl Layout ===

impl Layout {
    /// Returns the words of one incident.
    fn incident(self) -> usize {
        self.text + BESIDE
    }

    /// Returns the words of the whole.
    fn words(self) -> usize {
        HEAD + self.incidents * self.incident()
    }

    /// Returns its version, as DCGM forms it from its size and its number.
    #[allow(clippy::cast_possible_truncation, reason = "a million bytes at most")]
    fn version(self) -> u32 {
        (self.words() * WORD) as u32 | self.number << 24
    }
}

// === impl Response ===

impl Response {
    /// Returns an empty answer of a form, to be filled in.
    pub(super) fn new(layout: Layout) -> Self {
        let mut response = Self {
            layout,
            words: vec![0; layout.words()],
        };
        response.clear();
        response
    }

    /// Makes it empty again.
    pub(super) fn clear(&mut self) {
        self.words.fill(0);
        if let Some(first) = self.words.first_mut() {
            *first = self.layout.version();
        }
    }

    pub(super) fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    /// Returns its incidents, and whether all had room.
    pub(super) fn read(&self) -> (Vec<DcgmIncident>, bool) {
        let told = self.words.get(2).copied().unwrap_or_default();
        let count = usize::try_from(told).unwrap_or(usize::MAX);
        let body = self.words.get(HEAD..).unwrap_or_default();
        let incidents = body.chunks_exact(self.layout.incident()).take(count);
        let incidents = incidents.filter_map(incident).collect();
        (incidents, count < self.layout.incidents)
    }
}

fn incident(words: &[u32]) -> Option<DcgmIncident> {
    let [system, health, text @ .., code, group, id] = words else {
        return None;
    };
    let bytes = text.iter().flat_map(|word| word.to_ne_bytes());
    let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
    Some(DcgmIncident {
        system: *system,
        health: *health,
        code: *code,
        message: String::from_utf8_lossy(&bytes).into_owned(),
        entity: DcgmEntity {
            group: *group,
            id: *id,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_say_the_sizes_of_the_header_and_differ() {
        let versions = LAYOUTS.map(Layout::version);
        assert_eq!(versions[0], 1_069_068 + (5 << 24));
        assert_eq!(versions[5], 34_060 + (4 << 24));
        for version in versions {
            let same = versions.iter().filter(|other| **other == version);
            assert_eq!(same.count(), 1, "{version}");
        }
    }

    #[test]
    fn a_number_of_incidents_that_has_no_room_is_no_end_of_any() {
        let mut response = Response::new(layout(4, 64, 512));
        assert_eq!(response.read(), (Vec::new(), true));
        for told in [64, u32::MAX] {
            response.words_mut()[2] = told;
            let (incidents, is_whole) = response.read();
            assert_eq!((incidents.len(), is_whole), (64, false));
        }
    }
}
