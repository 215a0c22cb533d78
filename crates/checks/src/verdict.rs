//! What a failure of NCCL, or of what it stands on, means: the action and the gravity of the preflight
//! ADR's table. What nobody can call broken hardware asks for nothing.

use contract::RecommendedAction;

use crate::outcome::{Finding, Outcome};
use crate::worker::{Failure, SeenGpu};

/// `cudaErrorMemoryAllocation`: somebody else holds the memory.
const NO_MEMORY: u32 = 2;
/// `cudaErrorInsufficientDriver` and `cudaErrorNoDevice`: this container has no driver, or no GPU.
const NOT_THERE: [u32; 2] = [35, 100];
/// Texts of the libraries where the container lacks something, such as a large enough `/dev/shm`.
const LACKS: [&str; 4] = [
    "no space left",
    "out of memory",
    "cannot allocate memory",
    "shared memory",
];
/// The key under which an event names the row of the ADR's table.
const NCCL_ERROR: &str = "nccl_error";

/// The meaning of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The row of the ADR's table; our own word where it has none.
    pub(crate) error: &'static str,
    pub(crate) fatal: bool,
    pub(crate) action: RecommendedAction,
}

/// Returns the meaning of a failure.
pub(crate) fn of(failure: &Failure) -> Verdict {
    let lacks = |text: &str| {
        let text = text.to_ascii_lowercase();
        LACKS.iter().any(|lacking| text.contains(lacking))
    };
    match failure {
        Failure::Nccl { text, .. } | Failure::Cuda { text, .. } if lacks(text) => {
            harmless("CONTAINER_LACKS_RESOURCES")
        }
        Failure::Cuda { code, .. } if *code == NO_MEMORY => harmless("CONTAINER_LACKS_RESOURCES"),
        Failure::Cuda { code, .. } if NOT_THERE.contains(code) => harmless("NO_GPU"),
        Failure::Cuda { .. } => fatal("CUDA_ERROR", RecommendedAction::ContactSupport),
        // The codes of `ncclResult_t`.
        Failure::Nccl { code, .. } => match code {
            1 => fatal("CUDA_ERROR", RecommendedAction::ContactSupport),
            2 => fatal("NCCL_SYSTEM_ERROR", RecommendedAction::ContactSupport),
            3 => fatal("NCCL_INTERNAL_ERROR", RecommendedAction::RunDcgmeud),
            4 | 5 => harmless("NCCL_INVALID_USAGE"),
            6 => fatal("NCCL_REMOTE_ERROR", RecommendedAction::ContactSupport),
            _ => harmless("NCCL_UNKNOWN_ERROR"),
        },
        Failure::Wrong { .. } => fatal("WRONG_RESULT", RecommendedAction::ContactSupport),
        Failure::Late { .. } => harmless("NCCL_TIMEOUT"),
        Failure::Crashed(_) => harmless("CRASHED"),
        Failure::Nvml(_) => harmless("NVML_ERROR"),
        Failure::Library(_) => harmless("NO_LIBRARY"),
    }
}

/// Returns whether nothing could be tested because the container lacks something: that says nothing of the node.
pub(crate) fn is_of_container(failure: &Failure) -> bool {
    ["CONTAINER_LACKS_RESOURCES", "NO_GPU", "NVML_ERROR"].contains(&of(failure).error)
}

/// Returns the outcome of a failure for a check with this code.
pub(crate) fn outcome(check: &str, code: &str, failure: &Failure, gpus: &[SeenGpu]) -> Outcome {
    if let Failure::Library(text) = failure {
        return Outcome::misconfigured(text.clone());
    }
    let verdict = of(failure);
    let mut finding = Finding {
        check: check.to_owned(),
        fatal: verdict.fatal,
        action: verdict.action,
        code: code.to_owned(),
        message: failure.to_string(),
        metadata: vec![(NCCL_ERROR.to_owned(), verdict.error.to_owned())],
        ..Finding::default()
    };
    let one = match failure {
        Failure::Wrong { pci, .. } => gpus.iter().find(|gpu| gpu.pci == *pci),
        _ => None,
    };
    finding = match one {
        Some(gpu) => finding.about_gpu(&gpu.uuid),
        None => finding.about_gpus(gpus),
    };
    Outcome::failed(finding)
}

fn fatal(error: &'static str, action: RecommendedAction) -> Verdict {
    Verdict {
        error,
        fatal: true,
        action,
    }
}

fn harmless(error: &'static str) -> Verdict {
    Verdict {
        error,
        fatal: false,
        action: RecommendedAction::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nccl(code: u32, text: &str) -> Failure {
        Failure::Nccl {
            code,
            text: text.to_owned(),
        }
    }

    /// The rows of the ADR, "Error to Recommended Action Mapping", and "isFatal determination".
    #[test]
    fn an_nccl_error_has_the_action_and_gravity_of_the_adr() {
        let late = Failure::Late {
            seconds: 300,
            doing: String::new(),
        };
        let rows = [
            (
                nccl(2, ""),
                "NCCL_SYSTEM_ERROR",
                true,
                RecommendedAction::ContactSupport,
            ),
            (
                nccl(3, ""),
                "NCCL_INTERNAL_ERROR",
                true,
                RecommendedAction::RunDcgmeud,
            ),
            (
                nccl(5, ""),
                "NCCL_INVALID_USAGE",
                false,
                RecommendedAction::None,
            ),
            (late, "NCCL_TIMEOUT", false, RecommendedAction::None),
            (
                nccl(6, ""),
                "NCCL_REMOTE_ERROR",
                true,
                RecommendedAction::ContactSupport,
            ),
        ];
        for (failure, error, fatal, action) in rows {
            let expected = Verdict {
                error,
                fatal,
                action,
            };
            assert_eq!(of(&failure), expected);
        }
    }

    #[test]
    fn what_the_container_lacks_is_no_fault_of_the_node() {
        let shm = "ncclCommInitRank answered ncclSystemError: Error while creating shared memory \
                   segment /dev/shm/nccl-x (size 33030528), error: No space left on device (28)";
        let cuda = |code| Failure::Cuda {
            code,
            text: String::new(),
        };
        for failure in [
            nccl(2, shm),
            nccl(1, "Cuda failure 2 'out of memory'"),
            cuda(2),
            cuda(100),
        ] {
            assert!(!of(&failure).fatal, "{failure:?}");
        }
        assert!(of(&cuda(214)).fatal);
    }
}
