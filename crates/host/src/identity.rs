//! Identity of this process: the machine's host name and the process's user.

use std::ffi::CStr;

/// Returns the kernel's host name (`uname -n`), the default for a node's name.
///
/// `None` if it is empty or not UTF-8, since a node cannot have such a name.
pub fn host_name() -> Option<String> {
    readable_name(rustix::system::uname().nodename())
}

/// Returns the effective user id of this process; 0 is root.
pub fn effective_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns a random UUID from the kernel.
pub fn fresh_id() -> std::io::Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(text.trim_end().to_owned())
}

fn readable_name(name: &CStr) -> Option<String> {
    let name = name.to_str().ok()?;
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_name_is_what_the_kernel_says() {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(host_name().as_deref(), Some(kernel.trim_end()));
    }

    #[test]
    fn effective_uid_owns_new_files() {
        use std::os::unix::fs::MetadataExt;

        let file = tempfile::tempfile().unwrap();
        assert_eq!(effective_uid(), file.metadata().unwrap().uid());
    }

    #[test]
    fn fresh_ids_differ() {
        let (one, other) = (fresh_id().unwrap(), fresh_id().unwrap());
        assert!(one.len() == 36 && one != other, "{one} {other}");
    }

    #[test]
    fn a_name_that_no_node_can_have_is_none() {
        assert_eq!(readable_name(c"gpu-7"), Some("gpu-7".to_owned()));
        assert_eq!(readable_name(c""), None);
        assert_eq!(readable_name(c"gpu-\xff"), None);
    }
}
