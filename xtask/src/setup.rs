//! `cargo xtask setup`: installs the components that tests need beyond Rust.
//!
//! A component is built beside its place and then renamed, so that an interrupted build leaves
//! nothing that looks complete. A lock excludes a second set-up. [`testkit::components`] defines
//! the place of each component, and finds the installed ones.

use std::{
    env,
    fs::{self, File, TryLockError},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context as _, bail};
use testkit::components::{
    Component, DEBIAN_ROOT, GO_FLAGS, HELM_VERSION, KWOK_VERSION, NFPM_VERSION, Version, cache_dir,
    find_program, sources,
};

use crate::{image::base, shell};

mod packages;
mod vendors;

/// Programs in the multi-call binary.
const CONTROL_PLANE_PROGRAMS: [&str; 5] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
];

/// Packages that hold the version reported by Kubernetes' programs.
const VERSION_PACKAGES: [&str; 2] = [
    "k8s.io/component-base/version",
    "k8s.io/client-go/pkg/version",
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only report the present and the missing components.
    #[arg(long)]
    check: bool,
    /// Kubernetes versions to set up: 1.35, 1.36 or 1.37.
    #[arg(long, value_name = "VERSION", default_values_t = DEFAULT_VERSIONS)]
    kubernetes: Vec<Version>,
}

/// Versions that the tests run on. The older ones are for a few tests and take ten minutes each
/// to build: without them, these tests are skipped, except under CI.
const DEFAULT_VERSIONS: [Version; 3] = [Version::LATEST, Version::V1_36, Version::V1_35];

/// Result of finding or installing a component.
enum Outcome {
    Present(PathBuf),
    Installed(PathBuf, f64),
    Missing(String),
}

/// Debian packages of the emulator and of the guest's programs.
const GUEST_PACKAGES: [&str; 3] = ["qemu-system-x86", "busybox-static", "linux-image-amd64"];

/// Debian packages that check and unpack packages.
const PACKAGE_TOOLS: [&str; 4] = ["lintian", "rpm", "rpm2cpio", "cpio"];

/// Sets up the components, or checks them. Fails if one is still missing.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let missing = set_up(with_fuzzer(&args.kubernetes), !args.check)?;
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "missing: {}; the tests that need them are skipped, or fail with CI=true",
        missing.join(", ")
    )
}

/// Sets up the components that tests need; under CI also those for a few tests. Returns the
/// names of the missing ones.
pub(crate) fn for_tests() -> anyhow::Result<Vec<String>> {
    let versions = if in_ci() {
        &DEFAULT_VERSIONS[..]
    } else {
        &[Version::LATEST]
    };
    set_up(components(versions), true)
}

/// Sets up the components for the soak. Returns the names of the missing ones.
pub(crate) fn for_soak() -> anyhow::Result<Vec<String>> {
    set_up(with_fuzzer(&[Version::LATEST]), true)
}

/// Returns the components that tests with these versions need.
fn components(versions: &[Version]) -> Vec<Component> {
    let planes = versions.iter().copied().map(Component::ControlPlane);
    let rest = [
        Component::Supervise,
        Component::Kwok,
        Component::Helm,
        Component::Nfpm,
        Component::PackageTools,
        Component::DebianRoot,
        Component::PythonGrpc,
        Component::Prometheus,
        Component::GrafanaSchema,
        Component::DriverLibraries,
        Component::VendorWheels,
        Component::Chromium,
        Component::Guest,
        Component::Go,
        Component::KernelLog,
        Component::FileSystem,
        Component::Buildah,
        Component::ImageBase,
    ];
    // Components that take long to build come last: most tests do not wait for them.
    rest.into_iter().chain(planes).collect()
}

/// Returns [`components`] and those of the fuzzer.
fn with_fuzzer(versions: &[Version]) -> Vec<Component> {
    let mut all = components(versions);
    all.push(Component::CxxCompiler);
    all
}

/// Finds the components, and installs missing ones if permitted. Returns the names of those
/// still missing.
fn set_up(components: Vec<Component>, install_missing: bool) -> anyhow::Result<Vec<String>> {
    let mut held = None;
    for component in &components {
        if install_missing && held.is_none() && component.locate()?.is_none() {
            held = Some(lock()?);
        }
    }
    let mut missing = Vec::new();
    for component in components {
        let outcome = match component.locate()? {
            Some(path) => Outcome::Present(path),
            None if install_missing => install(component)?,
            None => Outcome::Missing(component.hint().to_owned()),
        };
        let name = component.to_string();
        match outcome {
            Outcome::Present(path) => println!("{name:<26} ready      {}", path.display()),
            Outcome::Installed(path, seconds) => {
                println!("{name:<26} installed  {} ({seconds:.0} s)", path.display());
            }
            Outcome::Missing(reason) => {
                println!("{name:<26} MISSING    {reason}");
                missing.push(name);
            }
        }
    }
    Ok(missing)
}

/// Waits for the lock: one set-up runs at a time for all clones.
fn lock() -> anyhow::Result<File> {
    let dir = cache_dir()?;
    fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    let path = dir.join("setup.lock");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            println!("another set-up is at work: waiting for it");
            file.lock()?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("lock {}", path.display()));
        }
    }
    Ok(file)
}

/// Installs one component. Returns an outcome, not an error, on a machine that does not permit
/// it.
fn install(component: Component) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let Some(place) = component.built_path()? else {
        return Ok(match component {
            Component::Chromium => install_from_packages(component, &["chromium"], start)?,
            Component::Buildah => install_from_packages(component, &["buildah"], start)?,
            Component::CxxCompiler => install_from_packages(component, &["g++"], start)?,
            Component::Guest => install_from_packages(component, &GUEST_PACKAGES, start)?,
            Component::PackageTools => install_from_packages(component, &PACKAGE_TOOLS, start)?,
            other => Outcome::Missing(other.hint().to_owned()),
        });
    };
    let built = match component {
        Component::ControlPlane(version) => build_control_plane(version, &place),
        Component::Supervise => into_place(&parent(&place)?, |dir| {
            let mut go = go("build")?;
            go.args(GO_FLAGS).arg("-o").arg(dir.join("supervise"));
            shell::output(go.arg("./supervise")).map(drop)
        }),
        Component::Kwok => install_go("kwok", "sigs.k8s.io/kwok/cmd/kwok", KWOK_VERSION, &place),
        Component::Helm => install_go("helm", "helm.sh/helm/v3/cmd/helm", HELM_VERSION, &place),
        Component::Nfpm => {
            let package = "github.com/goreleaser/nfpm/v2/cmd/nfpm";
            install_go("nfpm", package, NFPM_VERSION, &place)
        }
        Component::DebianRoot => into_place(&parent(&place)?, make_debian_root),
        Component::DriverLibraries => into_place(&place, vendors::fetch_drivers),
        Component::VendorWheels => into_place(&place, vendors::fetch_wheels),
        Component::ImageBase => into_place(&parent(&place)?, |dir| {
            base::make(&dir.join("base.tar")).context("make the base of the image")
        }),
        Component::Prometheus => into_place(&place, packages::unpack_prometheus),
        Component::GrafanaSchema => into_place(&place, packages::install_grafana_schema),
        // The layout is DIR/bin/python.
        _ => into_place(&parent(&parent(&place)?)?, make_python),
    };
    match built {
        Ok(()) => Ok(Outcome::Installed(place, start.elapsed().as_secs_f64())),
        Err(error) => Ok(Outcome::Missing(format!("{error:#}"))),
    }
}

fn parent(path: &Path) -> anyhow::Result<PathBuf> {
    Ok(path
        .parent()
        .with_context(|| format!("{} has no parent", path.display()))?
        .to_owned())
}

/// Fills a directory beside its place, and renames it once it is complete.
fn into_place(place: &Path, fill: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let tools = parent(place)?;
    fs::create_dir_all(&tools).with_context(|| format!("make {}", tools.display()))?;
    // The lock is held: partial directories were left by a killed set-up.
    for entry in fs::read_dir(&tools)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "partial")
        {
            fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    let mut name = place
        .file_name()
        .context("a place without a name")?
        .to_owned();
    name.push(".partial");
    let partial = tools.join(name);
    fs::create_dir(&partial).with_context(|| format!("make {}", partial.display()))?;
    fill(&partial)?;
    if place.exists() {
        // The place holds a component that does not work.
        fs::remove_dir_all(place).with_context(|| format!("remove {}", place.display()))?;
    }
    fs::rename(&partial, place).with_context(|| format!("make {}", place.display()))
}

fn go(verb: &str) -> anyhow::Result<Command> {
    let Some(program) = find_program("go") else {
        bail!(
            "needs go, which is not on the PATH: {}",
            Component::Go.hint()
        );
    };
    let mut go = Command::new(program);
    go.arg(verb).current_dir(sources().join("controlplane"));
    // Avoids the need for a C compiler, and the effect of a go.work above this directory.
    go.env("CGO_ENABLED", "0").env("GOWORK", "off");
    Ok(go)
}

/// Installs a program of a published Go module.
fn install_go(name: &str, package: &str, version: &str, place: &Path) -> anyhow::Result<()> {
    into_place(&parent(place)?, |dir| {
        println!("installing {name} {version} (one to two minutes, once)");
        let mut go = go("install")?;
        let package = format!("{package}@{version}");
        shell::output(go.args(GO_FLAGS).arg(package).env("GOBIN", dir)).map(drop)
    })
}

fn build_control_plane(version: Version, place: &Path) -> anyhow::Result<()> {
    let mut go = go("build")?;
    let module = sources().join("controlplane").join(version.module_file());
    let text = fs::read_to_string(&module).with_context(|| format!("read {}", module.display()))?;
    let release = kubernetes_release(&text)
        .with_context(|| format!("no k8s.io/kubernetes in {}", module.display()))?;
    println!("building Kubernetes {release} (5 to 10 minutes, once)");
    let (major, minor) = version
        .minor()
        .split_once('.')
        .context("a version without a dot")?;
    let [trimpath, linker] = GO_FLAGS;
    // Without the stamp, the API server reports a version that clients cannot parse.
    let stamp = VERSION_PACKAGES.map(|package| {
        format!(
            "-X {package}.gitVersion={release} -X {package}.gitMajor={major} \
             -X {package}.gitMinor={minor}"
        )
    });
    let stamp = stamp.join(" ");
    let module = format!("-modfile={}", version.module_file());
    into_place(place, |dir| {
        go.args([&module, trimpath, &format!("{linker} {stamp}"), "-o"]);
        shell::output(go.arg(dir.join("controlplane")).arg("."))?;
        for program in CONTROL_PLANE_PROGRAMS {
            symlink("controlplane", dir.join(program))?;
        }
        Ok(())
    })
}

/// Returns the release that a module file pins, in the form `v1.37.1`.
fn kubernetes_release(module: &str) -> Option<&str> {
    module.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("k8s.io/kubernetes"))
            .then(|| words.next())
            .flatten()
    })
}

/// Creates a virtual environment, which is renamed afterwards. The interpreter supports that.
/// The scripts in its `bin` do not, and are not used.
fn make_python(dir: &Path) -> anyhow::Result<()> {
    let Some(python) = find_program("python3") else {
        bail!("needs python3, which is not on the PATH");
    };
    println!("installing Python clients of vendors (900 MB)");
    let venv = || {
        shell::output(
            Command::new(&python)
                .args(["-m", "venv", "--clear"])
                .arg(dir),
        )
    };
    if let Err(error) = venv() {
        // Debian has virtual environments in a package of their own.
        install_package("python3-venv").with_context(|| format!("{error:#}"))?;
        venv()?;
    }
    let requirements = sources().join("python/requirements.txt");
    let pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        // Thousands of modules, most of them never imported.
        "--no-compile",
        "--only-binary",
        ":all:",
        "--requirement",
    ];
    let mut install = Command::new(dir.join("bin/python"));
    shell::output(install.args(pip).arg(requirements))?;
    let mut works = Command::new(dir.join("bin/python"));
    shell::output(works.args([
        "-c",
        "import grpc, grpc_tools.protoc, google.protobuf, sushy_tools, boto3, googleapiclient, oci, moto.server",
    ]))
    .map(drop)
}

/// Makes the archive of a small Debian, without what only people read.
fn make_debian_root(dir: &Path) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("not root: {}", Component::DebianRoot.hint());
    }
    if find_program("mmdebstrap").is_none() {
        install_package("mmdebstrap")?;
    }
    println!("installing a small Debian (about a minute, once)");
    let [release, packages] = DEBIAN_ROOT;
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        .args(["--quiet", "--variant=essential"])
        .arg(format!("--include={packages}"))
        .arg("--customize-hook=cd \"$1\"/usr/share && rm -r doc/* locale/* man/*")
        .arg(release)
        .arg(dir.join("root.tar"));
    shell::output(&mut mmdebstrap).map(drop)
}

/// Installs a component from Debian packages.
fn install_from_packages(
    component: Component,
    packages: &[&str],
    start: Instant,
) -> anyhow::Result<Outcome> {
    for package in packages {
        if let Err(error) = install_package(package) {
            return Ok(Outcome::Missing(format!("{error:#}")));
        }
    }
    let Some(path) = component.locate()? else {
        let packages = packages.join(", ");
        return Ok(Outcome::Missing(format!(
            "{packages} brought no {component}"
        )));
    };
    Ok(Outcome::Installed(path, start.elapsed().as_secs_f64()))
}

/// Installs a Debian package. Without the rights to do so, returns an instruction.
fn install_package(package: &str) -> anyhow::Result<()> {
    let Some(apt) = find_program("apt-get") else {
        bail!("no apt-get here: install {package} yourself");
    };
    if !rustix::process::geteuid().is_root() {
        bail!("not root: run 'apt-get install {package}' as root");
    }
    println!("installing the package {package}");
    let apt = || {
        let mut command = Command::new(&apt);
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    shell::output(apt().arg("update"))?;
    shell::output(apt().args(["install", "--yes", "--no-install-recommends", package])).map(drop)
}

/// Returns true if skips are failures.
pub(crate) fn in_ci() -> bool {
    env::var("CI").is_ok_and(|ci| ci == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_file_pins_its_own_version() {
        for version in Version::ALL {
            let file = sources().join("controlplane").join(version.module_file());
            let text = fs::read_to_string(file).unwrap();
            let release = kubernetes_release(&text).unwrap();
            assert!(
                release.starts_with(&format!("v{version}.")),
                "{version}: {release}"
            );
        }
    }

    #[test]
    fn a_failed_build_leaves_nothing_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("tools/thing");
        let failed = into_place(&place, |dir| {
            fs::write(dir.join("half"), "")?;
            bail!("broken")
        });
        assert_eq!(failed.unwrap_err().to_string(), "broken");
        assert!(!place.exists());
        into_place(&place, |dir| Ok(fs::write(dir.join("whole"), "")?)).unwrap();
        let names: Vec<_> = fs::read_dir(&place)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names, ["whole"]);
        assert_eq!(fs::read_dir(dir.path().join("tools")).unwrap().count(), 1);
    }
}
