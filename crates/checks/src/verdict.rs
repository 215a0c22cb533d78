//! Interpretation of a failure of NCCL or of the layers below: action and severity by the
//! preflight ADR's table. A failure that is not certainly one of the hardware recommends no
//! action.

use contract::RecommendedAction;

use crate::outcome::{CheckOutcome, Finding};
use crate::worker::{SeenGpu, WorkerFailure};

/// Errors of CUDA (`cudaError`) that mean that this container has no GPU, no driver, or not the
/// one that CUDA needs: `StubLibrary`, `InsufficientDriver`, `CallRequiresNewerDriver`,
/// `NoDevice`, `SystemNotReady` (the fabric is not set up), `SystemDriverMismatch` and
/// `CompatNotSupportedOnDevice`.
const NO_GPU: [u32; 7] = [34, 35, 36, 100, 802, 803, 804];
/// Errors of CUDA that mean that the container lacks something else: memory or a GPU that
/// others hold (`MemoryAllocation`, `DevicesUnavailable`, those of MPS), a permission or a
/// licence (`DeviceNotLicensed`, `OperatingSystem`, `NotPermitted`, `NotSupported`), or a
/// program built for this GPU (`InvalidDeviceFunction`, `InvalidKernelImage`,
/// `NoKernelImageForDevice`, `JitCompilerNotFound`, `UnsupportedPtxVersion`, `SharedObject...`,
/// `SymbolNotFound`).
const CONTAINER_LACKS: [u32; 20] = [
    2, 46, 98, 102, 200, 209, 221, 222, 302, 303, 304, 500, 800, 801, 805, 806, 807, 808, 809, 810,
];
/// Messages of the libraries if the container lacks something, such as a large enough
/// `/dev/shm`; in lower case.
const LACKS: [&str; 7] = [
    "no space left",
    "out of memory",
    "cannot allocate memory",
    "shared memory",
    "too many open files",
    "operation not permitted",
    "permission denied",
];
/// Messages of NCCL about impossible settings, which some versions report as internal errors.
const MISUSED: [&str; 3] = [
    "duplicate gpu detected",
    "no algorithm/protocol available",
    "no socket interface found",
];
/// Messages of NCCL about errors of CUDA without a number, as before version 2.18.
const LACKS_GPU: [&str; 4] = [
    "driver version is insufficient",
    "no cuda-capable device",
    "busy or unavailable",
    "system not yet initialized",
];
/// Metadata key for the row of the ADR's table.
const NCCL_ERROR: &str = "nccl_error";

/// Meaning of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FailureVerdict {
    /// Row of the ADR's table; gpuwarden's own name if there is none.
    pub(crate) error: &'static str,
    pub(crate) fatal: bool,
    pub(crate) action: RecommendedAction,
}

/// Returns the meaning of a failure.
pub(crate) fn of(failure: &WorkerFailure) -> FailureVerdict {
    match failure {
        WorkerFailure::Nccl { text, .. } | WorkerFailure::Cuda { text, .. }
            if has_one_of(text, &LACKS) =>
        {
            harmless("CONTAINER_LACKS_RESOURCES")
        }
        WorkerFailure::Nccl { text, .. } if has_one_of(text, &MISUSED) => {
            harmless("NCCL_INVALID_USAGE")
        }
        WorkerFailure::Cuda { code, .. } => of_cuda(*code),
        WorkerFailure::Nccl { code: 1, text } => match cuda_in(text) {
            Some(code) => of_cuda(code),
            None if has_one_of(text, &LACKS_GPU) => harmless("NO_GPU"),
            None => fatal("CUDA_ERROR", RecommendedAction::ContactSupport),
        },
        // Codes of `ncclResult_t`.
        WorkerFailure::Nccl { code, .. } => match code {
            2 => fatal("NCCL_SYSTEM_ERROR", RecommendedAction::ContactSupport),
            3 => fatal("NCCL_INTERNAL_ERROR", RecommendedAction::RunDcgmeud),
            4 | 5 => harmless("NCCL_INVALID_USAGE"),
            6 => fatal("NCCL_REMOTE_ERROR", RecommendedAction::ContactSupport),
            _ => harmless("NCCL_UNKNOWN_ERROR"),
        },
        WorkerFailure::Wrong { .. } => fatal("WRONG_RESULT", RecommendedAction::ContactSupport),
        WorkerFailure::Late { .. } => harmless("NCCL_TIMEOUT"),
        WorkerFailure::Crashed(_) => harmless("CRASHED"),
        WorkerFailure::Nvml(_) => harmless("NVML_ERROR"),
        WorkerFailure::Library(_) => harmless("NO_LIBRARY"),
    }
}

fn of_cuda(code: u32) -> FailureVerdict {
    if NO_GPU.contains(&code) {
        harmless("NO_GPU")
    } else if CONTAINER_LACKS.contains(&code) {
        harmless("CONTAINER_LACKS_RESOURCES")
    } else {
        fatal("CUDA_ERROR", RecommendedAction::ContactSupport)
    }
}

/// Returns the number of CUDA's error in a message of NCCL, such as `Cuda failure 2 'out of
/// memory'`.
fn cuda_in(text: &str) -> Option<u32> {
    let (_, number) = text.split_once("Cuda failure ")?;
    number.split(' ').next()?.parse().ok()
}

fn has_one_of(text: &str, all: &[&str]) -> bool {
    let text = text.to_ascii_lowercase();
    all.iter().any(|one| text.contains(one))
}

/// Returns true if nothing could be tested because the container lacks something, which is no
/// evidence about the node.
pub(crate) fn is_of_container(failure: &WorkerFailure) -> bool {
    ["CONTAINER_LACKS_RESOURCES", "NO_GPU", "NVML_ERROR"].contains(&of(failure).error)
}

/// Returns the outcome of a failure for a check, with this code.
pub(crate) fn outcome(
    check: &str,
    code: &str,
    failure: &WorkerFailure,
    gpus: &[SeenGpu],
) -> CheckOutcome {
    if let WorkerFailure::Library(text) = failure {
        return CheckOutcome::misconfigured(text.clone());
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
        WorkerFailure::Wrong { pci, .. } => gpus.iter().find(|gpu| gpu.pci == *pci),
        _ => None,
    };
    finding = match one {
        Some(gpu) => finding.about_gpu(&gpu.uuid),
        None => finding.about_gpus(gpus),
    };
    CheckOutcome::failed(finding)
}

fn fatal(error: &'static str, action: RecommendedAction) -> FailureVerdict {
    FailureVerdict {
        error,
        fatal: true,
        action,
    }
}

fn harmless(error: &'static str) -> FailureVerdict {
    FailureVerdict {
        error,
        fatal: false,
        action: RecommendedAction::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nccl(code: u32, text: &str) -> WorkerFailure {
        WorkerFailure::Nccl {
            code,
            text: text.to_owned(),
        }
    }

    /// Rows of the ADR, "Error to Recommended Action Mapping", and "isFatal determination".
    #[test]
    fn an_nccl_error_has_the_action_and_gravity_of_the_adr() {
        let late = WorkerFailure::Late {
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
            let expected = FailureVerdict {
                error,
                fatal,
                action,
            };
            assert_eq!(of(&failure), expected);
        }
    }

    fn cuda(code: u32) -> WorkerFailure {
        WorkerFailure::Cuda {
            code,
            text: String::new(),
        }
    }

    #[test]
    fn what_the_adr_has_no_row_for_has_one_of_ours() {
        let contact = (true, RecommendedAction::ContactSupport);
        let nothing = (false, RecommendedAction::None);
        for (failure, error, (fatal, action)) in [
            (nccl(1, ""), "CUDA_ERROR", contact),
            (
                nccl(
                    1,
                    "Cuda failure 700 'an illegal memory access was encountered'",
                ),
                "CUDA_ERROR",
                contact,
            ),
            (nccl(4, ""), "NCCL_INVALID_USAGE", nothing),
            (nccl(7, ""), "NCCL_UNKNOWN_ERROR", nothing),
            (nccl(99, ""), "NCCL_UNKNOWN_ERROR", nothing),
            (WorkerFailure::Crashed(String::new()), "CRASHED", nothing),
            (WorkerFailure::Nvml(String::new()), "NVML_ERROR", nothing),
            (WorkerFailure::Library(String::new()), "NO_LIBRARY", nothing),
        ] {
            let expected = FailureVerdict {
                error,
                fatal,
                action,
            };
            assert_eq!(of(&failure), expected, "{failure:?}");
        }
        // An ECC error, an illegal address, a failed launch, and an error unknown to CUDA
        // itself.
        for code in [3, 214, 700, 719, 999] {
            assert_eq!(
                of(&cuda(code)),
                of(&nccl(1, "")),
                "{code} is the hardware's"
            );
        }
    }

    #[test]
    fn what_the_container_lacks_is_no_fault_of_the_node() {
        let no_gpu = [34, 35, 36, 100, 802, 803, 804];
        let lacks = [
            2, 46, 98, 102, 200, 209, 221, 222, 302, 303, 304, 500, 800, 801, 805, 806, 807, 808,
            809, 810,
        ];
        let codes = no_gpu.map(|code| (code, "NO_GPU")).into_iter();
        let codes = codes.chain(lacks.map(|code| (code, "CONTAINER_LACKS_RESOURCES")));
        for (code, error) in codes {
            let of_nccl = nccl(1, &format!("Cuda failure {code} 'some words'"));
            for failure in [cuda(code), of_nccl] {
                assert_eq!(of(&failure), harmless(error), "{failure:?}");
                assert!(is_of_container(&failure));
            }
        }
        for text in [
            "Error while creating shared memory segment /dev/shm/nccl-x (size 33030528)",
            "Call to posix_fallocate failed : No space left on device",
            "Cuda failure 'out of memory'",
            "Call to ibv_reg_mr failed with error Cannot allocate memory",
            "socketStartConnect: socket creation failed : Too many open files",
            "Call to ibv_create_qp failed with error Operation not permitted",
            "open of /dev/infiniband/uverbs0 failed: Permission denied",
        ] {
            for code in 1..=6 {
                let failure = nccl(code, &format!("ncclCommInitRank answered x: {text}"));
                assert_eq!(
                    of(&failure),
                    harmless("CONTAINER_LACKS_RESOURCES"),
                    "{failure:?}"
                );
            }
        }
        for text in [
            "Bootstrap : no socket interface found",
            "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3000",
            "Error : no algorithm/protocol available for function AllReduce",
        ] {
            for code in 2..=6 {
                let failure = nccl(code, text);
                assert_eq!(of(&failure), harmless("NCCL_INVALID_USAGE"), "{failure:?}");
                assert!(!is_of_container(&failure));
            }
        }
        for text in [
            "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
            "Cuda failure 'no CUDA-capable device is detected'",
            "Cuda failure 'all CUDA-capable devices are busy or unavailable'",
            "Cuda failure 'system not yet initialized'",
        ] {
            assert_eq!(of(&nccl(1, text)), harmless("NO_GPU"), "{text}");
        }
    }
}
