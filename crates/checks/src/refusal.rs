//! Why NCCL may refuse to work: variables that have it use what is not there, and pods that share a GPU. What it
//! says itself names neither, and reads as if a link were broken.

use std::collections::BTreeMap;

use crate::environment::Environment;
use crate::worker::Failure;

/// The codes of `ncclResult_t` by which NCCL itself refuses: `ncclSystemError`, `ncclInternalError`,
/// `ncclInvalidArgument` and `ncclInvalidUsage`. The others are errors of CUDA, and echoes of another rank's.
const REFUSALS: std::ops::RangeInclusive<u32> = 2..=5;
/// The codes among them that say that it was asked for what cannot be.
const MISUSES: [u32; 2] = [4, 5];
/// Words of what NCCL says, in small letters, and the beginnings of the variables that then may be why.
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
/// The beginnings of variables that keep NCCL from nothing: what it logs, the version that an image notes, and
/// settings of the check.
const INNOCENT: [&str; 4] = [
    "NCCL_ALLREDUCE_THRESHOLD_GBPS",
    "NCCL_DEBUG",
    "NCCL_REDUCE_OP",
    "NCCL_VERSION",
];
/// Most variables that are named, and most characters of the value of each.
const NAMED: usize = 8;
const MOST_VALUE: usize = 64;

/// The variables for NCCL of this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Variables(BTreeMap<String, String>);

// === impl Variables ===

impl Variables {
    /// Returns the variables of an environment.
    pub(crate) fn of(environment: &Environment) -> Self {
        Self(environment.beginning_with("NCCL_"))
    }

    /// Says in a failure what may be why, where NCCL has refused. `pod` names the pod of this process.
    pub(crate) fn explain(&self, failure: Failure, pod: &str) -> Failure {
        match failure {
            Failure::Nccl { code, text } if REFUSALS.contains(&code) => {
                let text = match self.reason(code, &text, pod) {
                    Some(reason) => format!("{text}; {reason}"),
                    None => text,
                };
                Failure::Nccl { code, text }
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

    /// Returns what is said of a failure of a pod with these variables.
    fn explained(code: u32, text: &str, variables: &[(&str, &str)]) -> String {
        let variables = variables.iter();
        let environment: Environment = variables
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let failure = Failure::Nccl {
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
            let told = explained(code, text, &variables);
            assert_eq!(told, format!("{text}; {named} of w-1 may be why"));
            // Who has set nothing is not pointed at.
            let innocent = variables.get(6..).unwrap();
            assert_eq!(explained(code, text, innocent), text);
        }
        // What NCCL does not refuse is no variable's doing as far as anybody knows.
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
        let told = explained(5, text, &[("NCCL_ALGO", "Ring")]);
        assert!(
            told.ends_with(
                "; two ranks have the same GPU: give each pod GPUs of its own, without time-slicing"
            ),
            "{told}"
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
        let told = explained(5, "no", &variables);
        assert_eq!(told.matches("NCCL_X").count(), 8, "{told}");
        assert_eq!(told.matches('v').count(), 8 * 64, "{told}");
    }
}
