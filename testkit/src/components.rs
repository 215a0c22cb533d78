//! Components that tests need beyond Rust, and their locations.
//!
//! `cargo xtask setup` installs them below [`cache_dir`], in directories named after a hash of
//! their sources: clones of the repository share them, and changed sources get a new directory
//! instead of overwriting the old one. Nothing in this module installs.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};

/// Version of kwok that `cargo xtask setup` installs.
pub const KWOK_VERSION: &str = "v0.8.0";

/// Version of Helm that `cargo xtask setup` installs.
pub const HELM_VERSION: &str = "v3.19.2";

/// Version of nfpm that `cargo xtask setup` installs. Newer ones (2.46.3, 2.48.0) need modules that
/// the Go module proxy does not serve.
pub const NFPM_VERSION: &str = "v2.45.0";

/// Debian's release in [`Component::DebianRoot`], and its packages beside the essential ones.
pub const DEBIAN_ROOT: [&str; 2] = ["bookworm", "libgcc-s1,passwd,systemd,systemd-sysv"];

/// Modules of [`Component::GrafanaSchema`], with their versions.
pub const NODE_MODULES: [&str; 2] = ["@grafana/schema@11.6.0", "typescript@5.8.3"];

/// Programs of a control plane that every test with one needs.
pub const ASSETS: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

/// Flags for building the Go programs. They are part of the key: changing one recompiles all of
/// Kubernetes.
pub const GO_FLAGS: [&str; 2] = ["-trimpath", "-ldflags=-s -w"];

/// A minor version of Kubernetes that the test control plane can be built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// Kubernetes 1.35, the oldest version that tests can use.
    V1_35,
    /// Kubernetes 1.36, one minor version before the latest.
    V1_36,
    /// Kubernetes 1.37, which is [`Version::LATEST`].
    V1_37,
}

/// Something that a test may need and a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// Directory of the control plane's programs: of this version or, with `KUBEBUILDER_ASSETS`,
    /// of the version found there.
    ControlPlane(Version),
    /// Program that starts and supervises a control plane.
    Supervise,
    /// Program that keeps fake nodes alive.
    Kwok,
    /// Helm, for the chart.
    Helm,
    /// Program that builds `.deb` and `.rpm` packages.
    Nfpm,
    /// Checker of Debian packages, if the programs that unpack `.rpm` packages exist.
    PackageTools,
    /// Archive of a small Debian with systemd, to install packages in. Needs root, for `chroot`.
    DebianRoot,
    /// Directory with Debian's `prometheus`, `promtool` and `prometheus-alertmanager` in `bin`,
    /// and the templates that the latter reads from `/usr/share`. They are unpacked and not
    /// installed, so that no service of theirs starts.
    Prometheus,
    /// Directory with the npm modules `@grafana/schema` and `typescript`, as `node_modules`.
    GrafanaSchema,
    /// A Chromium browser, for tests of the page.
    Chromium,
    /// A Python interpreter with the packages of `python/requirements.txt`: the stock gRPC client, and clients
    /// and emulators of vendors.
    PythonGrpc,
    /// Directory with the NVML of several drivers, each as `VERSION/libnvidia-ml.so.1`.
    DriverLibraries,
    /// Directory with the headers and libraries of NVIDIA's wheels, as Python installs them.
    VendorWheels,
    /// Go toolchain, which builds the control plane.
    Go,
    /// A C++ compiler, for the fuzzer.
    CxxCompiler,
    /// Program that builds container images, if the process may enter their file systems.
    Buildah,
    /// Archive (tar) of the root file system below the program in a container image.
    ImageBase,
    /// The emulator of a whole machine, if a kernel ([`guest_kernel`]) and busybox for the
    /// machine exist.
    Guest,
    /// A writable kernel log.
    KernelLog,
    /// The program that creates a file system in a file, if the process may mount one.
    FileSystem,
}

/// Returns the directory of the components: `$XDG_CACHE_HOME/gpuwarden`, else `~/.cache/gpuwarden`.
pub fn cache_dir() -> anyhow::Result<PathBuf> {
    let absolute = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .map(|cache| cache.join("gpuwarden"))
        .context("no place for the test components: set HOME or XDG_CACHE_HOME")
}

/// Returns the directory of this crate's files in other languages than Rust.
pub fn sources() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the path of a program on the `PATH`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| is_program(file))
}

/// Returns a kernel that a guest can boot: the last by name of this machine's kernels.
pub fn guest_kernel() -> Option<PathBuf> {
    let files = fs::read_dir("/boot").ok()?;
    let files = files.filter_map(|entry| Some(entry.ok()?.path()));
    let name = |file: &PathBuf| {
        file.file_name()?
            .to_str()?
            .strip_prefix("vmlinuz-")
            .map(str::to_owned)
    };
    files.filter(|file| name(file).is_some()).max()
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    fs::metadata(file).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Returns a short hash of named files below a directory, in the given order, and of one line.
fn content_key(dir: &Path, files: &[PathBuf], line: &str) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    hash.update(line);
    for file in files {
        let content = fs::read(dir.join(file))
            .with_context(|| format!("read {}", dir.join(file).display()))?;
        let name = file.to_string_lossy();
        hash.update(format!("\n{name} {}\n", content.len()));
        hash.update(content);
    }
    Ok(short(hash))
}

/// Returns a short form of a hash.
fn short(hash: Sha256) -> String {
    let mut name = format!("{:x}", hash.finalize());
    name.truncate(12);
    name
}

/// Returns a short hash of these paths.
pub(crate) fn path_key<'a>(paths: impl IntoIterator<Item = &'a Path>) -> String {
    let mut hash = Sha256::new();
    for path in paths {
        hash.update(path.as_os_str().as_encoded_bytes());
        hash.update([0]);
    }
    short(hash)
}

// === impl Version ===

impl Version {
    /// Version for tests that do not compare versions.
    pub const LATEST: Self = Self::V1_37;

    /// All versions, newest first.
    pub const ALL: [Self; 3] = [Self::V1_37, Self::V1_36, Self::V1_35];

    /// Returns the version in the form `1.37`.
    pub const fn minor(self) -> &'static str {
        match self {
            Self::V1_35 => "1.35",
            Self::V1_36 => "1.36",
            Self::V1_37 => "1.37",
        }
    }

    /// Returns the name of the file, beside `main.go`, that pins the Go modules of this version.
    pub fn module_file(self) -> String {
        match self {
            Self::V1_37 => "go.mod".to_owned(),
            older => format!("go-{}.mod", older.minor()),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.minor())
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|version| version.minor() == text)
            .ok_or_else(|| format!("no Kubernetes {text} here; there are 1.35, 1.36 and 1.37"))
    }
}

// === impl Component ===

impl Component {
    /// Returns the file or directory that `cargo xtask setup` creates for this component, or
    /// `None` if the component is not built. The name changes with the sources.
    pub fn built_path(self) -> anyhow::Result<Option<PathBuf>> {
        let tools = cache_dir()?.join("tools");
        let path = match self {
            Self::ControlPlane(version) => {
                let module = version.module_file();
                let sum = module.replace(".mod", ".sum");
                let files = ["main.go".into(), module.into(), sum.into()];
                let dir = sources().join("controlplane");
                let key = content_key(&dir, &files, &GO_FLAGS.join(" "))?;
                tools.join(format!("control-plane-{version}-{key}"))
            }
            Self::Supervise => {
                let dir = sources().join("controlplane/supervise");
                let mut files: Vec<PathBuf> = fs::read_dir(&dir)?
                    .map(|entry| Ok(entry?.file_name().into()))
                    .collect::<std::io::Result<_>>()?;
                files.sort();
                let key = content_key(&dir, &files, &GO_FLAGS.join(" "))?;
                tools.join(format!("supervise-{key}/supervise"))
            }
            Self::Kwok => tools.join(format!("kwok-{KWOK_VERSION}/kwok")),
            Self::Helm => tools.join(format!("helm-{HELM_VERSION}/helm")),
            Self::Nfpm => tools.join(format!("nfpm-{NFPM_VERSION}/nfpm")),
            Self::DebianRoot => {
                let mut hash = Sha256::new();
                hash.update(DEBIAN_ROOT.join(" "));
                tools.join(format!("debian-{}/root.tar", short(hash)))
            }
            Self::PythonGrpc => {
                let dir = sources().join("python");
                let key = content_key(&dir, &["requirements.txt".into()], "venv")?;
                tools.join(format!("python-{key}/bin/python"))
            }
            Self::Prometheus => tools.join("prometheus-debian"),
            Self::GrafanaSchema => {
                let key = content_key(sources(), &[], &NODE_MODULES.join(" "))?;
                tools.join(format!("grafana-schema-{key}"))
            }
            Self::DriverLibraries | Self::VendorWheels => {
                let name = self.list().unwrap_or_default();
                let key = content_key(&sources().join("witnesses"), &[name.into()], "")?;
                tools.join(format!("{}-{key}", name.trim_end_matches(".txt")))
            }
            Self::ImageBase => {
                let maker = "xtask/src/image/base.rs";
                let repository = sources().parent().context("testkit is in no repository")?;
                let key = content_key(repository, &[maker.into()], "")?;
                tools.join(format!("image-base-{key}/base.tar"))
            }
            Self::PackageTools
            | Self::Chromium
            | Self::Go
            | Self::CxxCompiler
            | Self::Buildah
            | Self::Guest
            | Self::KernelLog
            | Self::FileSystem => {
                return Ok(None);
            }
        };
        Ok(Some(path))
    }

    /// Returns the name of the file in `witnesses` that lists the vendor's files in this
    /// component.
    pub const fn list(self) -> Option<&'static str> {
        match self {
            Self::DriverLibraries => Some("drivers.txt"),
            Self::VendorWheels => Some("wheels.txt"),
            _ => None,
        }
    }

    /// Returns the path of the component, or `None` if this machine has none.
    ///
    /// Fails for an invalid setting, such as a `KUBEBUILDER_ASSETS` without an API server in it.
    pub fn locate(self) -> anyhow::Result<Option<PathBuf>> {
        match self {
            Self::ControlPlane(_) => {
                if let Some(dir) = env::var_os("KUBEBUILDER_ASSETS").filter(|dir| !dir.is_empty()) {
                    return user_assets(Path::new(&dir)).map(Some);
                }
                let dir = self.built_path()?;
                Ok(dir.filter(|dir| ASSETS.iter().all(|name| is_program(&dir.join(name)))))
            }
            Self::Supervise | Self::Kwok | Self::Helm | Self::Nfpm | Self::PythonGrpc => {
                Ok(self.built_path()?.filter(|file| is_program(file)))
            }
            Self::PackageTools => {
                let unpackers = ["rpm", "rpm2cpio", "cpio"];
                let rest = unpackers.iter().all(|name| find_program(name).is_some());
                Ok(find_program("lintian").filter(|_| rest))
            }
            Self::DebianRoot => {
                let is_root = rustix::process::geteuid().is_root();
                Ok(self.built_path()?.filter(|file| is_root && file.is_file()))
            }
            // The directory is renamed into place once it is complete.
            Self::DriverLibraries | Self::VendorWheels | Self::Prometheus | Self::GrafanaSchema => {
                Ok(self.built_path()?.filter(|dir| dir.is_dir()))
            }
            Self::ImageBase => Ok(self.built_path()?.filter(|file| file.is_file())),
            Self::Chromium => Ok(["chromium", "chromium-browser", "google-chrome"]
                .into_iter()
                .find_map(find_program)),
            Self::Go => Ok(find_program("go")),
            Self::CxxCompiler => Ok(find_program("c++")),
            Self::Buildah => {
                let root = rustix::process::geteuid().is_root();
                Ok(find_program("buildah").filter(|_| root))
            }
            Self::Guest => {
                let rest = find_program("busybox").is_some() && guest_kernel().is_some();
                Ok(find_program("qemu-system-x86_64").filter(|_| rest))
            }
            Self::KernelLog => {
                let path = PathBuf::from("/dev/kmsg");
                Ok(fs::OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .is_ok()
                    .then_some(path))
            }
            Self::FileSystem => {
                let mountable =
                    rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists();
                Ok(find_program("mkfs.ext4").filter(|_| mountable))
            }
        }
    }

    /// Returns an instruction for a person to install the missing component.
    pub const fn hint(self) -> &'static str {
        match self {
            Self::KernelLog => "run as root where /dev/kmsg can be written",
            Self::FileSystem => {
                "run as root where loop devices can be made, with mkfs.ext4 (e2fsprogs)"
            }
            Self::Buildah => "run 'cargo xtask setup' as root",
            Self::DebianRoot => "run 'cargo xtask setup' as root, and the tests too",
            Self::Go => "install Go 1.26 or newer from https://go.dev/dl",
            _ => "run 'cargo xtask setup'",
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ControlPlane(version) => write!(f, "control plane {version}"),
            Self::Supervise => f.write_str("control plane supervisor"),
            Self::Kwok => write!(f, "kwok {KWOK_VERSION}"),
            Self::Helm => write!(f, "helm {HELM_VERSION}"),
            Self::Nfpm => write!(f, "nfpm {NFPM_VERSION}"),
            Self::PackageTools => f.write_str("lintian, rpm and cpio"),
            Self::DebianRoot => f.write_str("Debian with systemd"),
            Self::Chromium => f.write_str("chromium"),
            Self::Prometheus => f.write_str("prometheus, alertmanager"),
            Self::GrafanaSchema => f.write_str("types of Grafana"),
            Self::PythonGrpc => f.write_str("python with its packages"),
            Self::DriverLibraries => f.write_str("NVML of several drivers"),
            Self::VendorWheels => f.write_str("CUDA, NCCL and headers"),
            Self::Go => f.write_str("go"),
            Self::CxxCompiler => f.write_str("C++ compiler"),
            Self::Buildah => f.write_str("buildah"),
            Self::ImageBase => f.write_str("base of the image"),
            Self::Guest => f.write_str("qemu, busybox and a kernel"),
            Self::KernelLog => f.write_str("writable kernel log"),
            Self::FileSystem => f.write_str("ext4 on a loop device"),
        }
    }
}

fn user_assets(dir: &Path) -> anyhow::Result<PathBuf> {
    for name in ASSETS {
        if !is_program(&dir.join(name)) {
            bail!(
                "KUBEBUILDER_ASSETS={} has no program '{name}'; unset it, or name a directory \
                 with {}",
                dir.display(),
                ASSETS.join(", ")
            );
        }
    }
    Ok(dir.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_changes_with_content_name_and_flags() {
        let dir = tempfile::tempdir().unwrap();
        let files = [PathBuf::from("a"), PathBuf::from("b")];
        fs::write(dir.path().join("a"), "12").unwrap();
        fs::write(dir.path().join("b"), "3").unwrap();
        let key = content_key(dir.path(), &files, "flags").unwrap();
        assert_eq!(key, content_key(dir.path(), &files, "flags").unwrap());
        assert_ne!(key, content_key(dir.path(), &files, "other flags").unwrap());
        fs::write(dir.path().join("a"), "1").unwrap();
        fs::write(dir.path().join("b"), "23").unwrap();
        assert_ne!(key, content_key(dir.path(), &files, "flags").unwrap());
    }

    #[test]
    fn versions_read_as_they_print() {
        for version in Version::ALL {
            assert_eq!(version.to_string().parse(), Ok(version));
            assert!(
                sources()
                    .join("controlplane")
                    .join(version.module_file())
                    .is_file()
            );
        }
        assert!("1.2".parse::<Version>().unwrap_err().contains("1.37"));
    }

    #[test]
    fn assets_without_a_program_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = user_assets(dir.path()).unwrap_err().to_string();
        assert!(error.contains("'etcd'"), "{error}");
    }
}
