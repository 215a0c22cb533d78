//! NCCL, NVIDIA's library for communication between GPUs: groups of ranks, and the all-reduce
//! that measures their bandwidth.
//!
//! A call may hang or crash inside the vendor's code, and waits for ranks in other processes,
//! so it belongs in a process that may be killed. Work continues after the call that started
//! it: [`crate::cuda::Stream`] shows when it is done, [`Communicator::check`] whether it
//! failed.

mod error;
mod functions;

use std::path::Path;
use std::sync::Arc;

pub use self::error::{Error, NcclError};
use crate::cuda::{Buffer, Device, Stream};
use crate::library::{LibraryOpenError, LibraryPlaces, Listener};
use functions::{Functions, ID_BYTES, Rank, RawId, Reduced};

/// A loaded library, shared by its handles.
pub struct Nccl {
    functions: Arc<Functions>,
}

/// Identifier of a group of ranks, which all of them need.
#[derive(Clone, Copy)]
pub struct UniqueId(RawId);

/// Membership of a rank in a group.
pub struct Communicator {
    /// `Some` until the communicator is aborted.
    rank: Option<Rank>,
    functions: Arc<Functions>,
}

/// Arithmetic operation of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum of the elements.
    Sum,
    /// Product of the elements.
    Product,
    /// Largest of the elements.
    Max,
    /// Smallest of the elements.
    Min,
    /// Arithmetic mean of the elements.
    Average,
}

/// Part of a rank in an all-reduce.
pub struct RankPart<'a> {
    /// Membership of the rank.
    pub communicator: &'a Communicator,
    /// Elements that the rank contributes.
    pub send: &'a Buffer,
    /// Buffer for the result.
    pub receive: &'a mut Buffer,
    /// Stream of the all-reduce.
    pub stream: &'a Stream,
}

// === impl Nccl ===

impl Nccl {
    /// Opens the library. `listener` is called before every library call.
    pub fn open(places: &LibraryPlaces, listener: Listener) -> Result<Self, LibraryOpenError> {
        Ok(Self {
            functions: Arc::new(Functions::open(places, listener)?),
        })
    }

    /// Returns the path or name that the library was loaded from.
    pub fn found_at(&self) -> &Path {
        self.functions.found_at()
    }

    /// Returns the library's version, such as `2.28.9`.
    pub fn version(&self) -> Result<String, NcclError> {
        self.functions.version().map(version)
    }

    /// Creates an identifier for a new group of ranks.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        self.functions.id().map(UniqueId)
    }

    /// Joins a group of `ranks` ranks with one device for each of `places`. Waits until all
    /// ranks have joined, including those of other processes.
    pub fn join(
        &self,
        id: &UniqueId,
        ranks: u32,
        places: &[(&Device, u32)],
    ) -> Result<Vec<Communicator>, Error> {
        let joined = self.functions.join(&id.0, ranks, places)?;
        let communicator = |rank| Communicator {
            rank: Some(rank),
            functions: Arc::clone(&self.functions),
        };
        Ok(joined.into_iter().map(communicator).collect())
    }

    /// Queues an all-reduce of the first `numbers` 32-bit floats of each part. All ranks of the
    /// group that are in this process must be in one call.
    pub fn all_reduce(
        &self,
        parts: &[RankPart<'_>],
        numbers: usize,
        reduction: Reduction,
    ) -> Result<(), Error> {
        let mut reduced = Vec::new();
        for part in parts {
            let bytes = part.send.bytes().min(part.receive.bytes());
            if bytes / size_of::<f32>() < numbers {
                return Err(Error::Room { numbers, bytes });
            }
            reduced.extend(part.communicator.rank.as_ref().map(|rank| Reduced {
                rank,
                send: part.send.address(),
                receive: part.receive.address(),
                stream: part.stream.handle(),
            }));
        }
        self.functions
            .all_reduce(&reduced, numbers, reduction.number())
    }
}

// === impl UniqueId ===

impl UniqueId {
    /// Returns the identifier as bytes that can be sent to other processes.
    pub fn bytes(&self) -> [u8; ID_BYTES] {
        self.0.bytes
    }
}

impl From<[u8; ID_BYTES]> for UniqueId {
    fn from(bytes: [u8; ID_BYTES]) -> Self {
        Self(RawId { bytes })
    }
}

// === impl Communicator ===

impl Communicator {
    /// Fails if the rank's work has failed.
    pub fn check(&self) -> Result<(), NcclError> {
        self.rank
            .as_ref()
            .map_or(Ok(()), |rank| self.functions.check(rank))
    }

    /// Aborts the communicator and its pending work.
    pub fn abort(mut self) -> Result<(), NcclError> {
        let rank = self.rank.take();
        rank.map_or(Ok(()), |rank| self.functions.abort(rank))
    }
}

impl Drop for Communicator {
    /// Waits for pending work.
    fn drop(&mut self) {
        if let Some(rank) = self.rank.take()
            && let Err(error) = self.functions.destroy(rank)
        {
            tracing::debug!(%error, "cannot destroy a communicator");
        }
    }
}

// === impl Reduction ===

impl Reduction {
    /// Returns the library's number for the operation (`ncclRedOp_t`).
    fn number(self) -> u32 {
        match self {
            Self::Sum => 0,
            Self::Product => 1,
            Self::Max => 2,
            Self::Min => 3,
            Self::Average => 4,
        }
    }
}

/// Formats a version number, which has one more digit since 2.9.
fn version(number: i32) -> String {
    let (major, rest) = if number < 10_000 {
        (number / 1000, number % 1000)
    } else {
        (number / 10_000, number % 10_000)
    };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

#[cfg(test)]
mod tests {
    use testkit::Component;

    use super::*;
    use crate::c_header::Header;

    #[test]
    fn a_version_is_written_as_people_do() {
        for (number, expected) in [(22809, "2.28.9"), (20903, "2.9.3"), (2804, "2.8.4")] {
            assert_eq!(version(number), expected);
        }
    }

    #[test]
    fn the_numbers_are_those_of_the_header() {
        let Some(wheels) = testkit::require(Component::VendorWheels) else {
            return;
        };
        let reductions = [
            ("ncclSum", Reduction::Sum),
            ("ncclProd", Reduction::Product),
            ("ncclMax", Reduction::Max),
            ("ncclMin", Reduction::Min),
            ("ncclAvg", Reduction::Average),
        ];
        let mut ours: Vec<(String, i64)> = vec![
            ("NCCL_VERSION(2, 28, 9)".to_owned(), 22809),
            ("NCCL_VERSION(2, 8, 4)".to_owned(), 2804),
        ];
        ours.extend(reductions.map(|(name, of)| (name.to_owned(), of.number().into())));
        let codes = error::NAMES.iter().zip(0..);
        ours.extend(codes.map(|(name, code)| ((*name).to_owned(), code)));
        Header::nccl(&wheels).assert_numbers(&ours);
    }
}
