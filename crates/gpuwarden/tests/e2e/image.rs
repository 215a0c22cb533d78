//! The images of `Containerfile`, as `cargo xtask image` builds them: their contents, and the
//! program in them as their user.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;
use testkit::{Component, ControlPlane, Launch, Version, binary, get, require, wait_for};

use crate::support::SOON;

/// Data directory in the container, as in the examples for Kubernetes.
const DATA: &str = "/var/lib/gpuwarden";

/// User of the product's image.
const USER: u32 = 65532;

/// Name of the node.
const NODE: &str = "gpu-7";

/// Directory of the repository.
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// An image, and a container that was made of its archive.
struct Image {
    home: TempDir,
    name: &'static str,
}

/// The product, running in a container.
struct Running {
    child: Child,
    address: String,
}

/// Returns the components that each test needs, or `None` if the test must return.
#[track_caller]
fn base() -> Option<PathBuf> {
    require(Component::Buildah)?;
    require(Component::ImageBase)
}

/// Returns the program without its symbols, which would be most of a debug build's image.
fn stripped(directory: &Path) -> anyhow::Result<PathBuf> {
    let file = directory.join("gpuwarden");
    output(Command::new("strip").arg("-o").arg(&file).arg(binary()?))?;
    Ok(file)
}

/// Runs the command. Returns its output; fails if the command fails.
fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}\n{errors}", output.status);
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Makes a directory whose files the image's user may write.
fn owned(directory: &Path) -> anyhow::Result<()> {
    fs::create_dir(directory)?;
    chown(directory, Some(USER), Some(USER))?;
    Ok(())
}

// === impl Image ===

impl Image {
    /// Builds the image `name`, the stage `target` of `Containerfile`.
    fn build(
        target: &str,
        name: &'static str,
        program: &Path,
        base: &Path,
    ) -> anyhow::Result<Self> {
        let home = tempfile::Builder::new()
            .prefix("gpuwarden-image-")
            .tempdir()?;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.current_dir(REPOSITORY);
        build.args(["run", "--quiet", "--package", "xtask", "--", "image"]);
        build.args(["--target", target]);
        build.arg("--binary").arg(program).arg("--base").arg(base);
        output(build.arg("--out").arg(home.path()))?;
        Ok(Self { home, name })
    }

    /// Returns the path of a file of the build.
    fn file(&self, extension: &str) -> PathBuf {
        self.home.path().join(format!("{}.{extension}", self.name))
    }

    /// Returns the digest of the image.
    fn digest(&self) -> anyhow::Result<String> {
        let mut tar = Command::new("tar");
        tar.arg("--extract").arg("--to-stdout");
        let archive = self.file("oci.tar");
        let index = output(tar.arg("--file").arg(archive).arg("index.json"))?;
        let index: Value = serde_json::from_str(&index)?;
        let digest = index["manifests"][0]["digest"].as_str();
        Ok(digest.context("an archive without an image")?.to_owned())
    }

    fn buildah(&self) -> Command {
        let mut command = Command::new("buildah");
        command.args(["--storage-driver", "vfs", "--root"]);
        command.arg(self.home.path().join("layers"));
        command.arg("--runroot").arg(self.home.path().join("run"));
        command
    }

    /// Makes a container of the archive. Returns its configuration and its root directory.
    fn open(&self) -> anyhow::Result<(Value, PathBuf)> {
        let archive = format!("oci-archive:{}", self.file("oci.tar").display());
        let from = ["from", "--quiet", "--pull-never", "--name", self.name];
        output(self.buildah().args(from).arg(archive))?;
        let inspect = ["inspect", "--type", "container", self.name];
        let found: Value = serde_json::from_str(&output(self.buildah().args(inspect))?)?;
        let root = output(self.buildah().args(["mount", self.name]))?;
        Ok((found["OCIv1"]["config"].clone(), root.trim().into()))
    }

    /// Returns the command that runs the image's entry point with these directories and files
    /// (`OUTSIDE:INSIDE`), variables and arguments.
    fn run(&self, mounts: &[String], variables: &[&str], args: &[&str]) -> Command {
        let mut run = self.buildah();
        run.args(["run", "--isolation", "chroot"]);
        for mount in mounts {
            run.args(["--volume", mount]);
        }
        for variable in variables {
            run.args(["--env", variable]);
        }
        run.args([self.name, "--", "/usr/local/bin/gpuwarden"]);
        run.args(args).stdin(Stdio::null());
        run
    }
}

// === impl Running ===

impl Running {
    /// Starts the product, and waits for its address in the data directory.
    async fn start(mut command: Command, data: &Path) -> anyhow::Result<Self> {
        let log = data.join("log");
        command
            .stderr(fs::File::create(&log)?)
            .stdout(Stdio::null());
        // A group of its own, so that all processes of the container end together.
        let child = command.process_group(0).spawn()?;
        let mut running = Self {
            child,
            address: String::new(),
        };
        let endpoint = data.join("endpoint.json");
        running.address = wait_for("the product's address", SOON, || async {
            let text = fs::read(&endpoint).map_err(|error| error.to_string())?;
            let found: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
            Ok::<_, String>(found["server"].as_str().unwrap_or_default().to_owned())
        })
        .await
        .with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
        Ok(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// Returns the files below a directory, with their modes and owners.
fn files(directory: &Path) -> anyhow::Result<Vec<(PathBuf, fs::Metadata)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            found.extend(files(&entry.path())?);
        }
        found.push((entry.path(), metadata));
    }
    Ok(found)
}

/// Checks that the image has one program, so no shell, and nothing that another user than root
/// owns. Removes the right of others to write to directories such as `/tmp`, so that the root is
/// as good as read-only.
fn check_contents(root: &Path) -> anyhow::Result<()> {
    let mut programs = Vec::new();
    for (path, metadata) in files(root)? {
        let shown = path.display();
        assert_eq!((metadata.uid(), metadata.gid()), (0, 0), "{shown}");
        let mode = metadata.permissions().mode();
        let lends = metadata.is_file() && mode & 0o6000 != 0;
        assert!(!lends, "{shown} lends its owner's rights");
        if metadata.is_dir() && mode & 0o022 != 0 {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        let inside = path.strip_prefix(root)?.to_owned();
        let library = path.to_string_lossy().contains(".so");
        // Buildah makes these for its own mounts.
        let mounted = ["etc/hosts", "etc/hostname", "etc/resolv.conf"];
        let mounted = mounted.iter().any(|name| inside == Path::new(name));
        if metadata.is_file() && mode & 0o111 != 0 && !library && !mounted {
            programs.push(inside);
        }
    }
    assert_eq!(programs, [Path::new("usr/local/bin/gpuwarden")]);
    Ok(())
}

#[tokio::test]
async fn the_product_runs_in_its_image_as_its_user_and_writes_to_its_volume_only()
-> anyhow::Result<()> {
    let Some(base) = base() else { return Ok(()) };
    let Some(plane) = ControlPlane::shared(Version::LATEST).await? else {
        return Ok(());
    };
    let work = tempfile::tempdir()?;
    let program = stripped(work.path())?;
    let image = Image::build("gpuwarden", "gpuwarden", &program, &base)?;
    let (config, root) = image.open()?;
    assert_eq!(config["User"], format!("{USER}:{USER}"), "{config}");
    assert_eq!(config["Entrypoint"][0], "/usr/local/bin/gpuwarden");
    check_contents(&root)?;

    // The driver's library where a container runtime puts it, found by its name.
    let gpus = work.path().join("gpus");
    fakes::install(&gpus, &fakes::Scenario::healthy(2))?;
    let data = work.path().join("data");
    owned(&data)?;
    fs::write(data.join("kernel.log"), "")?;
    let libraries = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let mut mounts = vec![format!("{}:{DATA}", data.display())];
    for name in [fakes::LIBRARY, fakes::SCENARIO] {
        mounts.push(format!(
            "{}:{libraries}/{name}:ro",
            gpus.join(name).display()
        ));
    }
    let log = format!("{DATA}/kernel.log");
    let args = ["run", "--node-name", NODE, "--listen", "127.0.0.1:0"];
    let args = [&args[..], &["--kernel-log", &log]].concat();
    let running = Running::start(image.run(&mounts, &[], &args), &data).await?;
    wait_for("readiness", SOON, || async {
        match get(&running.address, "/readyz").await {
            Ok(ready) if ready == "ready\n" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    wait_for("the GPUs", SOON, || async {
        let status = get(&running.address, "/api/v1/status").await;
        let status = status.map_err(|error| format!("{error:#}"))?;
        let status: Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
        match status["gpus"].as_array().map(Vec::len) {
            Some(2) => Ok(()),
            _ => Err(status["sources"].to_string()),
        }
    })
    .await?;
    assert_eq!(fs::metadata(data.join("events.db"))?.uid(), USER);
    drop(running);
    trusts_its_roots(&plane, &image, &root, work.path())
}

/// Returns the finding of `doctor` about a cluster whose kubeconfig names no authority.
fn cluster(image: &Image, data: &Path) -> anyhow::Result<String> {
    let mounts = [format!("{}:{DATA}", data.display())];
    let kubeconfig = format!("{DATA}/kubeconfig");
    let args = ["doctor", "-o", "json", "--kubeconfig", &kubeconfig];
    // Doctor fails: this is no node of the cluster.
    let output = image.run(&mounts, &[], &args).output()?;
    let findings: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let findings = findings.as_array().context("no list of findings")?;
    let cluster = findings.iter().find(|one| one["check"] == "cluster");
    Ok(cluster.context("nothing about the cluster")?.to_string())
}

/// Checks that the program trusts the root certificates of the image, and no other.
fn trusts_its_roots(
    plane: &ControlPlane,
    image: &Image,
    root: &Path,
    work: &Path,
) -> anyhow::Result<()> {
    let data = work.join("client");
    owned(&data)?;
    let text = fs::read_to_string(plane.kubeconfig())?;
    let mut kubeconfig: Value = serde_saphyr::from_str(&text)?;
    let named = kubeconfig["clusters"][0]["cluster"].as_object_mut();
    let authority = named
        .and_then(|cluster| cluster.remove("certificate-authority-data"))
        .context("the kubeconfig has no authority")?;
    let file = data.join("kubeconfig");
    fs::write(&file, kubeconfig.to_string())?;
    chown(&file, Some(USER), Some(USER))?;

    // Not "No CA certificates were loaded": the image has Mozilla's, and this is none of them.
    let found = cluster(image, &data)?;
    assert!(found.contains("UnknownIssuer"), "{found}");
    let roots = root.join("etc/ssl/certs/ca-certificates.crt");
    let count = fs::read_to_string(&roots)?
        .matches("BEGIN CERTIFICATE")
        .count();
    assert!(count > 100, "{count} roots");
    let encoded = work.join("authority");
    fs::write(&encoded, authority.as_str().unwrap_or_default())?;
    let decoded = output(Command::new("base64").arg("--decode").arg(encoded))?;
    let before = fs::read_to_string(&roots)?;
    fs::write(&roots, before + &decoded)?;
    let found = cluster(image, &data)?;
    assert!(found.contains("answers: Kubernetes v1."), "{found}");
    Ok(())
}

/// Runs the loopback check in the container. Returns its exit code and all of its output.
fn check(image: &Image, data: &Path, gpus: Option<&Path>) -> anyhow::Result<(Option<i32>, String)> {
    let mut mounts = vec![format!("{}:{DATA}", data.display())];
    let socket = format!("PLATFORM_CONNECTOR_SOCKET=unix://{DATA}/gpuwarden.sock");
    let node = format!("NODE_NAME={NODE}");
    let mut variables = vec![node.as_str(), &socket, "TEST_SIZE_MB=1"];
    let libraries = [
        format!("GPUWARDEN_NVML_LIBRARY=/gpus/{}", fakes::LIBRARY),
        format!("GPUWARDEN_CUDA_LIBRARY=/gpus/{}", fakes::CUDA_LIBRARY),
        format!("GPUWARDEN_NCCL_LIBRARY=/gpus/{}", fakes::NCCL_LIBRARY),
    ];
    if let Some(gpus) = gpus {
        mounts.push(format!("{}:/gpus", gpus.display()));
        variables.extend(libraries.iter().map(String::as_str));
    }
    let mut run = image.run(&mounts, &variables, &["check", "nccl-loopback"]);
    let output = run.output()?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok((output.status.code(), text.into_owned()))
}

#[tokio::test]
async fn a_check_runs_in_the_image_of_the_checks() -> anyhow::Result<()> {
    let Some(base) = base() else { return Ok(()) };
    if require(Component::VendorWheels).is_none() {
        return Ok(());
    }
    let product = Launch::new()?.node_name(NODE).start().await?;
    let work = tempfile::tempdir()?;
    let program = stripped(work.path())?;
    let image = Image::build("checks", "gpuwarden-checks", &program, &base)?;
    image.open()?;
    let gpus = work.path().join("gpus");
    fakes::install(&gpus, &fakes::Scenario::healthy(2))?;
    let data = product.data_dir();
    let (code, text) = check(&image, &data, Some(&gpus))?;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("passed"), "{text}");
    // NVIDIA's own libraries, found by their names, report that there is no driver.
    let (code, text) = check(&image, &data, None)?;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("not tested"), "{text}");
    Ok(())
}

#[test]
fn equal_inputs_make_equal_images_and_a_valid_list_of_their_contents() -> anyhow::Result<()> {
    let Some(base) = base() else { return Ok(()) };
    let Some(python) = require(Component::PythonGrpc) else {
        return Ok(());
    };
    // Any file does as the program here.
    let program = Path::new(REPOSITORY).join("LICENSE");
    let build = || Image::build("gpuwarden", "gpuwarden", &program, &base);
    let (one, other) = (build()?, build()?);
    assert_eq!(one.digest()?, other.digest()?);
    let list = fs::read_to_string(one.file("cdx.json"))?;
    assert_eq!(list, fs::read_to_string(other.file("cdx.json"))?);
    let validate = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/sbom.py");
    output(Command::new(python).arg(validate).arg(one.file("cdx.json")))?;

    let list: Value = serde_json::from_str(&list)?;
    let components = list["components"].as_array().context("no components")?;
    let (_, root) = one.open()?;
    for entry in fs::read_dir(root.join("var/lib/dpkg/status.d"))? {
        let entry = entry?;
        let fields = fs::read_to_string(entry.path())?;
        let version = fields
            .lines()
            .find_map(|line| line.strip_prefix("Version: "));
        let name = entry.file_name();
        let listed = components
            .iter()
            .find(|one| one["name"] == name.to_str().unwrap());
        let listed = listed.and_then(|one| one["version"].as_str());
        assert!(
            version.is_some() && listed == version,
            "{name:?}: {listed:?}"
        );
    }
    for name in ["libc6", "gpuwarden", "tokio", "rusqlite"] {
        assert!(components.iter().any(|one| one["name"] == name), "{name}");
    }
    Ok(())
}
