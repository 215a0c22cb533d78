//! Explanation of refusals by NCCL: variables that request what is not available, and pods that
//! share a GPU. NCCL's own message names neither, and reads as if a link were broken.

use std::collections::BTreeMap;

use crate::environment::Environment;
use crate::worker::WorkerFailure;

/// Codes of `ncclResult_t` for refusals by NCCL itself: `ncclSystemError`, `ncclInternalError`,
/// `ncclInvalidArgument` and `ncclInvalidUsage`. The other codes are errors of CUDA, and echoes
/// of another rank's failure.
const REFUSALS: std::ops::RangeInclusive<u32> = 2..=5;
/// Refusals of an impossible request.
const MISUSES: [u32; 2] = [4, 5];
/// Words in NCCL's message, in lower case, and the prefixes of variables that may then be the
/// cause.
const REASONS: [(&[&str], &[&str]); 3] = [
    (
        &["bootstrap", "socket interface", "connect", "nccl_comm_id"],
        &[
            "NCCL_COMM_ID",
            "NCCL_OOB_NET",
            "NCCL_SOCKET_FAMILY",
            "NCCL_SOCKET_IFNAME",
        ],
    ),
    (
        &["network", "net plugin", "net/", "ibv_"],
        &["NCCL_IB_", "NCCL_NET", "NCCL_SOCKET_"],
    ),
    (
        &["algorithm", "protocol"],
        &[
            "NCCL_ALGO",
            "NCCL_COLLNET_ENABLE",
            "NCCL_NVLS_ENABLE",
            "NCCL_PROTO",
        ],
    ),
];
/// Prefixes of variables that prevent nothing: log settings, a version recorded by an image,
/// and settings of the check.
const INNOCENT: [&str; 4] = [
    "NCCL_ALLREDUCE_THRESHOLD_GBPS",
    "NCCL_DEBUG",
    "NCCL_REDUCE_OP",
    "NCCL_VERSION",
];
/// Most variables that are named, and most characters of each value.
const NAMED: usize = 8;
const MOST_VALUE: usize = 64;

/// Variables for NCCL in this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Variables(BTreeMap<String, String>);

// === impl Variables ===

impl Variables {
    /// Returns NCCL's variables of an environment.
    pub(crate) fn of(environment: &Environment) -> Self {
        Self(environment.beginning_with("NCCL_"))
    }

    /// Adds the possible causes to a failure that is a refusal of NCCL. `pod` names the pod of
    /// this process.
    pub(crate) fn explain(&self, failure: WorkerFailure, pod: &str) -> WorkerFailure {
        match failure {
            WorkerFailure::Nccl { code, text } if REFUSALS.contains(&code) => {
                let text = match self.reason(code, &text, pod) {
                    Some(reason) => format!("{text}; {reason}"),
                    None => text,
                };
                WorkerFailure::Nccl { code, text }
            }
            failure => failure,
        }
    }

    fn reason(&self, code: u32, text: &str, pod: &str) -> Option<String> {
        let text = text.to_ascii_lowercase();
        if text.contains("duplicate gpu detected") {
            let reason =
                "two ranks have the same GPU: give each pod GPUs of its own, without time-slicing";
            return Some(reason.to_owned());
        }
        let mut reasons = REASONS.iter();
        let known = reasons.find(|(words, _)| words.iter().any(|word| text.contains(word)));
        let begins = |name: &str, all: &[&str]| all.iter().any(|begin| name.starts_with(begin));
        let is_suspect = |name: &str| match known {
            Some((_, variables)) => begins(name, variables),
            None => MISUSES.contains(&code) && !begins(name, &INNOCENT),
        };
        let suspects = self.0.iter().filter(|(name, _)| is_suspect(name));
        let suspects = suspects.take(NAMED).map(|(name, value)| {
            let value: String = value.chars().take(MOST_VALUE).collect();
            format!("{name}={value}")
        });
        let suspects: Vec<String> = suspects.collect();
        let named = suspects.join(", ");
        (!named.is_empty()).then(|| format!("{named} of {pod} may be why"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the explanation of a failure in a pod with these variables.
    fn explained(code: u32, text: &str, variables: &[(&str, &str)]) -> String {
        let variables = variables.iter();
        let environment: Environment = variables
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let failure = WorkerFailure::Nccl {
            code,
            text: text.to_owned(),
        };
        Variables::of(&environment)
            .explain(failure, "w-1")
            .to_string()
    }

    #[test]
    fn the_variables_that_may_be_why_nccl_refuses_are_named() {
        let variables = [
            ("NCCL_SOCKET_IFNAME", "ib9"),
            ("NCCL_SOCKET_FAMILY", "AF_INET6"),
            ("NCCL_IB_HCA", "mlx9"),
            ("NCCL_NET", "Socket"),
            ("NCCL_ALGO", "Star"),
            ("NCCL_BUFFSIZE", "1"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_VERSION", "2.28.3"),
            ("NCCL_REDUCE_OP", "max"),
            ("OMPI_COMM", "1"),
        ];
        let socket = "NCCL_SOCKET_FAMILY=AF_INET6, NCCL_SOCKET_IFNAME=ib9";
        for (code, text, named) in [
            (5, "Bootstrap : no socket interface found", socket),
            (2, "Call to connect to 10.0.0.9<4000> timed out", socket),
            (4, "Invalid NCCL_COMM_ID, please use format", socket),
            (
                5,
                "Failed to initialize any NET plugin",
                "NCCL_IB_HCA=mlx9, NCCL_NET=Socket, NCCL_SOCKET_FAMILY=AF_INET6, NCCL_SOCKET_IFNAME=ib9",
            ),
            (
                3,
                "Error : no algorithm/protocol available for function AllReduce",
                "NCCL_ALGO=Star",
            ),
            (
                5,
                "something of next year",
                "NCCL_ALGO=Star, NCCL_BUFFSIZE=1, NCCL_IB_HCA=mlx9, NCCL_NET=Socket, \
                 NCCL_SOCKET_FAMILY=AF_INET6, NCCL_SOCKET_IFNAME=ib9",
            ),
        ] {
            let explanation = explained(code, text, &variables);
            assert_eq!(explanation, format!("{text}; {named} of w-1 may be why"));
            // A pod without such variables is not blamed.
            let innocent = variables.get(6..).unwrap();
            assert_eq!(explained(code, text, innocent), text);
        }
        // Other failures are not attributed to variables.
        for (code, text) in [
            (1, "Cuda failure 700 'an illegal memory access'"),
            (2, "something of next year"),
            (6, "connection closed by remote peer"),
        ] {
            assert_eq!(explained(code, text, &variables), text);
        }
    }

    #[test]
    fn two_ranks_on_one_gpu_are_said_plainly() {
        let text = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000";
        let explanation = explained(5, text, &[("NCCL_ALGO", "Ring")]);
        assert!(
            explanation.ends_with(
                "; two ranks have the same GPU: give each pod GPUs of its own, without time-slicing"
            ),
            "{explanation}"
        );
    }

    #[test]
    fn what_is_named_is_bounded() {
        let names: Vec<String> = (0..20).map(|number| format!("NCCL_X{number:02}")).collect();
        let long = "v".repeat(100);
        let variables: Vec<(&str, &str)> = names
            .iter()
            .map(|name| (name.as_str(), long.as_str()))
            .collect();
        let explanation = explained(5, "no", &variables);
        assert_eq!(explanation.matches("NCCL_X").count(), 8, "{explanation}");
        assert_eq!(explanation.matches('v').count(), 8 * 64, "{explanation}");
    }
}
