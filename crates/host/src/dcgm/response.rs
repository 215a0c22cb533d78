//! The response of `dcgmHealthCheck`, laid out as in `dcgm_structs.h`: version, overall health,
//! number of incidents, and for each incident watch, health, text, code, and the kind and
//! number of its device.
//!
//! Versions of DCGM differ in the version number, the number of incidents, and the length of
//! their texts.

use diagnosis::gpu::dcgm::{DcgmEntity, DcgmIncident};

/// Layout of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Version number of the structure.
    pub(super) number: u32,
    /// Number of incidents that fit.
    pub(super) incidents: usize,
    /// Length of each text, in words.
    pub(super) text: usize,
}

/// Known layouts, the newest first.
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
/// Words of an incident besides its text.
const BESIDE: usize = 5;
/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// A response and its layout.
#[derive(Debug)]
pub(super) struct Response {
    layout: Layout,
    /// Words rather than bytes, so that the library gets aligned memory.
    words: Vec<u32>,
}

/// Returns a layout whose texts have `bytes` bytes.
const fn layout(number: u32, incidents: usize, bytes: usize) -> Layout {
    Layout {
        number,
        incidents,
        text: bytes / WORD,
    }
}

// === impl Layout ===

impl Layout {
    /// Returns the length of one incident, in words.
    fn incident(self) -> usize {
        self.text + BESIDE
    }

    /// Returns the length of the response, in words.
    fn words(self) -> usize {
        HEAD + self.incidents * self.incident()
    }

    /// Returns the version that DCGM composes of the size and the version number.
    #[allow(clippy::cast_possible_truncation, reason = "a million bytes at most")]
    fn version(self) -> u32 {
        (self.words() * WORD) as u32 | self.number << 24
    }
}

// === impl Response ===

impl Response {
    /// Returns an empty response that the library can fill in.
    pub(super) fn new(layout: Layout) -> Self {
        let mut response = Self {
            layout,
            words: vec![0; layout.words()],
        };
        response.clear();
        response
    }

    /// Empties the response for the next call.
    pub(super) fn clear(&mut self) {
        self.words.fill(0);
        if let Some(first) = self.words.first_mut() {
            *first = self.layout.version();
        }
    }

    pub(super) fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    /// Returns the incidents, and true if all of them fitted.
    pub(super) fn read(&self) -> (Vec<DcgmIncident>, bool) {
        let count = self.words.get(2).copied().unwrap_or_default();
        let count = usize::try_from(count).unwrap_or(usize::MAX);
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
        for count in [64, u32::MAX] {
            response.words_mut()[2] = count;
            let (incidents, is_whole) = response.read();
            assert_eq!((incidents.len(), is_whole), (64, false));
        }
    }
}
