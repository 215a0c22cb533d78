//! Programs of the machine, such as `nvidia-smi`: where they are, and how one is run within bounds of time
//! and size. In a container the machine's own are those below the directory where its root is mounted.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use std::{fs, io};

use rustix::process::{Pid, Resource, Rlimit, Signal};
use tokio::process::{Child, Command};

/// The directories in which programs are looked for behind those of `PATH`, and the `PATH` of a machine
/// below another root.
pub const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Longest wait for a process that was killed. One that is still there waits within the kernel, and is left
/// behind.
const KILLED_WAIT: Duration = Duration::from_secs(5);

/// The bounds within which a program runs.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// A program that runs longer is killed, with all that it has started.
    pub time: Duration,
    /// Most bytes of a file that it writes; at more the system ends the writer.
    pub file_bytes: u64,
}

/// The end of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It has ended by itself.
    Exited(ExitStatus),
    /// Its time was over.
    Killed,
}

/// A process group that a child leads. All who are in it are killed when this is dropped: what a program, or a
/// vendor's library in it, has started does not outlive it. Only who has made a group of its own escapes.
#[derive(Debug)]
pub struct Group(Option<Pid>);

/// Returns where a program is: in a directory of `path`, else of [`STANDARD_PATH`]. Below another root, the
/// path is the one that is seen from there.
pub fn find(name: &str, path: &OsStr, root: Option<&Path>) -> Option<PathBuf> {
    let all = std::env::split_paths(path).chain(std::env::split_paths(STANDARD_PATH));
    let mut places = all
        .filter(|place| place.is_absolute())
        .map(|place| place.join(name));
    places.find(|place| match root {
        // A link is followed from the other root, not from ours.
        Some(root) => below(root, place)
            .symlink_metadata()
            .is_ok_and(|found| !found.is_dir()),
        None => fs::metadata(place)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0),
    })
}

/// Returns the path that an absolute one has where `root` is mounted.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Runs a program to its end or that of its time, without input, as a process group of its own.
///
/// # Errors
///
/// The system's, where it cannot be started.
pub async fn run(command: &mut Command, bounds: Bounds) -> io::Result<Ended> {
    let command = command
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    let mut group = Group::of(&child);
    let most = Rlimit {
        current: Some(bounds.file_bytes),
        maximum: Some(bounds.file_bytes),
    };
    // What it starts inherits the limit. Where there is a lower one already, that one counts.
    if let Err(error) = rustix::process::prlimit(group.0, Resource::Fsize, most) {
        tracing::debug!(%error, "the files of a program are not limited");
    }
    if let Ok(status) = tokio::time::timeout(bounds.time, child.wait()).await {
        group.0 = None;
        return status.map(Ended::Exited);
    }
    drop(group);
    // Whether it is gone changes nothing for us.
    drop(tokio::time::timeout(KILLED_WAIT, child.wait()).await);
    Ok(Ended::Killed)
}

/// Makes this process the program, with `root` as its root; it takes `CAP_SYS_CHROOT`. Returns only where
/// that fails.
pub fn become_below(root: &Path, program: &OsStr, arguments: &[OsString]) -> io::Error {
    let moved = rustix::process::chroot(root).and_then(|()| rustix::process::chdir("/"));
    match moved {
        Ok(()) => std::process::Command::new(program).args(arguments).exec(),
        Err(errno) => errno.into(),
    }
}

/// Ends this process at once, as a kill from outside would: another thread may hang in a driver, which an orderly
/// end would wait for. Where this process leads a group, all who are in that end, too.
pub fn end_now() {
    let killed = if rustix::process::getpgrp() == rustix::process::getpid() {
        rustix::process::kill_current_process_group(Signal::KILL)
    } else {
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL)
    };
    if let Err(error) = killed {
        tracing::error!(%error, "this process cannot be ended");
    }
}

// === impl Group ===

impl Group {
    /// Returns the group of a child that was started with `process_group(0)`.
    pub fn of(child: &Child) -> Self {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        Self(id.and_then(Pid::from_raw))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0
            && let Err(error) = rustix::process::kill_process_group(leader, Signal::KILL)
        {
            tracing::debug!(%error, "a program cannot be killed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    /// Set for a process of the test program that ends itself.
    const ENDS: &str = "GPUWARDEN_TEST_ENDS_NOW";

    /// No test, but the door to a process that has started another and ends itself.
    #[test]
    fn a_process_that_ends_now() {
        if std::env::var_os(ENDS).is_some() {
            // It is left alone on purpose.
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
        // The pipe ends only once nobody has it any more.
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
        // The pipe ends only once nobody has it any more.
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
        // As seen from there; a link leads to something that we do not see.
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
