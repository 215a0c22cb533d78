//! The ways to reach the GPUs of a machine, as in docs/gpu.md, for `status` and `doctor`.

use std::fmt;
use std::path::Path;

/// Variable that tells NVIDIA's container runtimes which GPUs to pass in.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// Value of the variable in a container with GPUs from a claim, so that the runtime passes in
/// none.
const BY_CLAIM: &str = "void";

/// Way to the driver's library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// On the machine itself, outside of containers.
    Machine,
    /// In the mounted directory of the driver.
    DriverRoot,
    /// Through the container runtime, as with the `RuntimeClass` `nvidia`.
    Runtime,
    /// Through a claim (dynamic resource allocation).
    Claim,
    /// In a container, by none of the known ways.
    Container,
}

// === impl Way ===

impl Way {
    /// Returns the way that leads this process to a library.
    pub fn of(library: &str, driver_root: &Path) -> Self {
        let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        Self::choose(
            library,
            driver_root,
            in_pod,
            std::env::var(VISIBLE).ok().as_deref(),
        )
    }

    fn choose(library: &str, driver_root: &Path, in_pod: bool, visible: Option<&str>) -> Self {
        if Path::new(library).starts_with(driver_root) && driver_root != Path::new("/") {
            return Self::DriverRoot;
        }
        match (in_pod, visible) {
            (false, _) => Self::Machine,
            (true, Some(BY_CLAIM)) => Self::Claim,
            (true, Some(_)) => Self::Runtime,
            (true, None) => Self::Container,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machine => "of this machine",
            Self::DriverRoot => "by the driver's directory",
            Self::Runtime => "by the container runtime",
            Self::Claim => "by a claim",
            Self::Container => "of the container",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_follows_from_where_the_library_is_and_what_the_runtime_was_told() {
        let root = Path::new("/run/nvidia/driver");
        let below = "/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1";
        let name = "libnvidia-ml.so.1";
        for (library, in_pod, visible, expected) in [
            (below, false, None, Way::DriverRoot),
            (below, true, Some("all"), Way::DriverRoot),
            (
                "/run/nvidia/drivers/libnvidia-ml.so.1",
                false,
                None,
                Way::Machine,
            ),
            (name, false, Some("all"), Way::Machine),
            (name, true, Some("all"), Way::Runtime),
            (name, true, Some("void"), Way::Claim),
            (name, true, None, Way::Container),
        ] {
            assert_eq!(
                Way::choose(library, root, in_pod, visible),
                expected,
                "{library} {visible:?}"
            );
        }
        // If the root is the machine's, every path is below it.
        assert_eq!(
            Way::choose("/usr/lib64/x.so", Path::new("/"), false, None),
            Way::Machine
        );
    }
}
