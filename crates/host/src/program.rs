//! Finds and runs programs of the machine, such as `nvidia-smi`, with bounds on time and file
//! size. In a container the machine's programs are below the directory where its root is
//! mounted.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use std::{fs, io};

use rustix::process::{Pid, Resource, Rlimit, Signal};
use tokio::process::{Child, Command};

/// Directories that are searched after those of `PATH`, and the `PATH` of a machine below
/// another root.
pub const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Longest wait for a process that was killed. A process that still exists then is blocked
/// within the kernel, and is left behind.
const KILLED_WAIT: Duration = Duration::from_secs(5);

/// Limits on a running program.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Time after which the program is killed, with all processes that it started.
    pub time: Duration,
    /// Largest file that the program may write, in bytes; the system kills a process that
    /// exceeds it.
    pub file_bytes: u64,
}

/// Outcome of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The program ended by itself.
    Exited(ExitStatus),
    /// The program ran out of time and was killed.
    Killed,
}

/// A process group that a child leads. Dropping it kills all members, so that nothing that a
/// program, or a vendor's library in it, has started outlives it. Only a process that made a
/// group of its own escapes.
#[derive(Debug)]
pub struct ProcessGroup(Option<Pid>);

/// Returns the path of a program, searched in `path` and then in [`STANDARD_PATH`]. Below
/// another root, the path is relative to that root.
pub fn find(name: &str, path: &OsStr, root: Option<&Path>) -> Option<PathBuf> {
    let all = std::env::split_paths(path).chain(std::env::split_paths(STANDARD_PATH));
    let mut places = all
        .filter(|place| place.is_absolute())
        .map(|place| place.join(name));
    places.find(|place| match root {
        // The target of a link is relative to the other root, so it is not followed here.
        Some(root) => below(root, place)
            .symlink_metadata()
            .is_ok_and(|found| !found.is_dir()),
        None => fs::metadata(place)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0),
    })
}

/// Returns an absolute path's location below the mounted `root`.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Runs a program to its end or its timeout, without input, in a process group of its own.
///
/// # Errors
///
/// Operating system's error, if the program cannot be started.
pub async fn run(command: &mut Command, bounds: Bounds) -> io::Result<Ended> {
    let command = command
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    let mut group = ProcessGroup::of(&child);
    let most = Rlimit {
        current: Some(bounds.file_bytes),
        maximum: Some(bounds.file_bytes),
    };
    // Inherited by the program's children. If a lower limit already applies, that one counts.
    if let Err(error) = rustix::process::prlimit(group.0, Resource::Fsize, most) {
        tracing::debug!(%error, "cannot limit the file size of a program");
    }
    if let Ok(status) = tokio::time::timeout(bounds.time, child.wait()).await {
        group.0 = None;
        return status.map(Ended::Exited);
    }
    drop(group);
    // A process that does not end in time changes nothing here.
    drop(tokio::time::timeout(KILLED_WAIT, child.wait()).await);
    Ok(Ended::Killed)
}

/// Replaces this process with the program, with `root` as its root; needs `CAP_SYS_CHROOT`.
/// Returns only if that fails.
pub fn become_below(root: &Path, program: &OsStr, arguments: &[OsString]) -> io::Error {
    let moved = rustix::process::chroot(root).and_then(|()| rustix::process::chdir("/"));
    match moved {
        Ok(()) => std::process::Command::new(program).args(arguments).exec(),
        Err(errno) => errno.into(),
    }
}

/// Kills this process at once: another thread may hang in a driver, and an orderly exit would
/// wait for it. If this process leads a group, all members are killed too.
pub fn end_now() {
    let killed = if rustix::process::getpgrp() == rustix::process::getpid() {
        rustix::process::kill_current_process_group(Signal::KILL)
    } else {
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL)
    };
    if let Err(error) = killed {
        tracing::error!(%error, "cannot kill this process");
    }
}

// === impl ProcessGroup ===

impl ProcessGroup {
    /// Returns the group of a child that was started with `process_group(0)`.
    pub fn of(child: &Child) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        Self(id.and_then(Pid::from_raw))
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(leader) = self.0
            && let Err(error) = rustix::process::kill_process_group(leader, Signal::KILL)
        {
            tracing::debug!(%error, "cannot kill a program");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    /// Set for a process of the test program that kills itself.
    const ENDS: &str = "GPUWARDEN_TEST_ENDS_NOW";

    /// Not a test, but the entry point of a process that starts another one and kills itself.
    #[test]
    fn a_process_that_ends_now() {
        if std::env::var_os(ENDS).is_some() {
            // Left running on purpose.
            #[allow(clippy::zombie_processes, reason = "this process is killed")]
            let started = std::process::Command::new("sleep").arg("1000").spawn();
            assert!(started.is_ok(), "{started:?}");
            end_now();
        }
    }

    #[tokio::test]
    async fn a_process_that_ends_itself_ends_what_it_has_started() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "program::tests::a_process_that_ends_now"])
            .arg("--nocapture")
            .env(ENDS, "1")
            .stdout(writer)
            .process_group(0);
        let status = command.spawn().unwrap().wait().await.unwrap();
        assert!(!status.success(), "{status}");
        drop(command);
        // The pipe ends only once no process holds it.
        let read = tokio::task::spawn_blocking(move || io::copy(&mut reader, &mut io::sink()));
        tokio::time::timeout(LONG, read)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::null());
        command
    }

    #[tokio::test]
    async fn a_program_that_does_not_end_is_killed_with_all_that_it_has_started() {
        let (mut reader, writer) = io::pipe().unwrap();
        let bounds = Bounds {
            time: Duration::from_millis(200),
            file_bytes: 1,
        };
        let mut command = shell("sleep 1000 & sleep 1000");
        let ended = run(command.stdout(writer), bounds).await.unwrap();
        assert_eq!(ended, Ended::Killed);
        drop(command);
        // The pipe ends only once no process holds it.
        let read = tokio::task::spawn_blocking(move || io::copy(&mut reader, &mut io::sink()));
        let read = tokio::time::timeout(LONG, read).await.unwrap();
        assert_eq!(read.unwrap().unwrap(), 0);
    }

    #[tokio::test]
    async fn a_program_that_writes_too_much_is_ended_by_the_system() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let bounds = Bounds {
            time: LONG,
            file_bytes: 100_000,
        };
        let file = File::create(&path).unwrap();
        let script = "while [ \"$(ulimit -f)\" = unlimited ]; do :; done; exec yes";
        let ended = run(shell(script).stdout(file), bounds).await;
        assert!(
            matches!(ended, Ok(Ended::Exited(status)) if !status.success()),
            "{ended:?}"
        );
        assert_eq!(fs::metadata(&path).unwrap().len(), 100_000);
    }

    #[tokio::test]
    async fn a_program_ends_with_its_status() {
        let bounds = Bounds {
            time: LONG,
            file_bytes: 1,
        };
        let ended = run(&mut shell("exit 7"), bounds).await.unwrap();
        assert!(
            matches!(ended, Ended::Exited(status) if status.code() == Some(7)),
            "{ended:?}"
        );
    }

    #[test]
    fn a_program_is_found_in_the_path_and_below_another_root() {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join("opt");
        for place in ["opt", "usr/bin"] {
            fs::create_dir_all(root.path().join(place)).unwrap();
        }
        let find = |name: &str, root: Option<&Path>| find(name, own.as_os_str(), root);
        fs::write(own.join("gpuwarden-a"), "").unwrap();
        assert_eq!(find("gpuwarden-a", None), None, "it is no program");
        fs::set_permissions(own.join("gpuwarden-a"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find("gpuwarden-a", None), Some(own.join("gpuwarden-a")));
        assert!(find("sh", None).is_some_and(|sh| sh.ends_with("bin/sh")));
        // Relative to the other root; the target of the link does not exist here.
        std::os::unix::fs::symlink(
            "/etc/alternatives/b",
            root.path().join("usr/bin/gpuwarden-b"),
        )
        .unwrap();
        let found = find("gpuwarden-b", Some(root.path()));
        assert_eq!(found.as_deref(), Some(Path::new("/usr/bin/gpuwarden-b")));
        assert_eq!(find("gpuwarden-b", None), None);
        assert_eq!(find("gpuwarden-a", Some(root.path())), None);
    }
}
