//! `cargo xtask image`: builds an image of `Containerfile` without a registry.
//!
//! The stages that need one are replaced: the program is built or given here, the base is made of
//! Debian packages, and for the checks CUDA's runtime and NCCL come from NVIDIA's Python wheels.
//! The result is an archive that podman and containerd load, and a list of its contents.

pub(crate) mod base;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use testkit::components::{Component, sources};

use crate::{
    generate::workspace_root,
    reproduce,
    sbom::{self, Part},
    shell::{output, target_dir},
};

/// Largest size of the product's image, compressed (MB), if the program is a release.
const LIMIT_MB: f64 = 30.0;

/// NVIDIA's libraries in the checks' image: wheel, and path in the directory of wheels.
const CHECKS_LIBRARIES: [(&str, &str); 2] = [
    ("nvidia-cuda-runtime", "nvidia/cu13/lib/libcudart.so.13"),
    ("nvidia-nccl-cu13", "nvidia/nccl/lib/libnccl.so.2"),
];

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask image
  cargo xtask image --target checks --binary target/release/gpuwarden

Needs buildah ('cargo xtask setup'), and Debian's apt-get for the base.")]
pub(crate) struct Args {
    /// Stage of `Containerfile` to build.
    #[arg(long, default_value = "gpuwarden")]
    target: Target,
    /// Program to put into the image [default: a release build of this source].
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Archive (tar) of the root file system below the program [default: made of current Debian
    /// packages]
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Directory for the archive of the image [default: image in cargo's target directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// An image of `Containerfile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Target {
    /// Agent, controller, webhook and commands.
    Gpuwarden,
    /// Preflight checks: also CUDA's runtime and NCCL; no dcgmi, which only NVIDIA's repository has.
    Checks,
}

/// Images in a directory of their own, which this machine's podman does not show.
struct Storage {
    directory: tempfile::TempDir,
}

/// Builds the image. Prints the paths and sizes of the results.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if Component::Buildah.locate()?.is_none() {
        bail!(
            "needs {}: {}",
            Component::Buildah,
            Component::Buildah.hint()
        );
    }
    let target = target_dir()?;
    let out = args.out.clone().unwrap_or_else(|| target.join("image"));
    fs::create_dir_all(&out).with_context(|| format!("make {}", out.display()))?;
    // Buildah takes some of its paths relative to the context of the build.
    let out = fs::canonicalize(out)?;
    let binary = match &args.binary {
        Some(file) => file.clone(),
        None => release(&target)?,
    };
    let made = out.join("base.tar");
    let base = args.base.as_ref().unwrap_or(&made);
    if args.base.is_none() {
        base::make(base).context("make the base of the image")?;
    }
    let storage = Storage::new(&out)?;
    let archive = storage.build(args.target, &binary, base, &out)?;
    let name = args.target.image();
    let list = out.join(format!("{name}.cdx.json"));
    sbom::write(&list, name, &binary, &parts(args.target, base)?)?;
    println!("contents          {}", list.display());
    for (name, file) in [("program", &binary), ("base", base), ("image", &archive)] {
        println!("{name:<8} {:>5.1} MB  {}", megabytes(file)?, file.display());
    }
    let compressed = megabytes(&archive)?;
    if args.target == Target::Gpuwarden && args.binary.is_none() && compressed > LIMIT_MB {
        bail!("the image may have at most {LIMIT_MB} MB compressed");
    }
    Ok(())
}

/// Builds the release as `cargo xtask reproduce` does.
fn release(target: &Path) -> anyhow::Result<PathBuf> {
    let built = reproduce::build(
        &workspace_root(),
        &target.join("reproducible"),
        "release",
        "gpuwarden",
    )?;
    built.into_iter().next().context("no program was built")
}

fn megabytes(file: &Path) -> anyhow::Result<f64> {
    let size = fs::metadata(file).with_context(|| format!("read {}", file.display()))?;
    #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let size = size.len() as f64;
    Ok(size / 1e6)
}

/// Puts a file into a new directory, at a path below it. Nothing is copied if both are on one
/// file system.
fn place(file: &Path, directory: &Path, path: &str) -> anyhow::Result<()> {
    let place = directory.join(path);
    if let Some(parent) = place.parent() {
        fs::create_dir_all(parent)?;
    }
    if fs::hard_link(file, &place).is_err() {
        fs::copy(file, &place).with_context(|| format!("copy {}", file.display()))?;
    }
    Ok(())
}

/// Returns what the image has beside the program.
fn parts(target: Target, base: &Path) -> anyhow::Result<Vec<Part>> {
    let packages = base::packages(base)?.into_iter().map(|package| Part {
        purl: sbom::purl("deb/debian", &package.name, &package.version)
            + "?arch="
            + &package.architecture,
        name: package.name,
        version: package.version,
    });
    let mut parts: Vec<Part> = packages.collect();
    if target == Target::Checks {
        for (name, _) in CHECKS_LIBRARIES {
            let version = wheel_version(name)?;
            parts.push(Part {
                purl: sbom::purl("pypi", name, &version),
                name: name.to_owned(),
                version,
            });
        }
    }
    Ok(parts)
}

/// Returns the version of a wheel in the list of wheels.
fn wheel_version(name: &str) -> anyhow::Result<String> {
    let file = sources()
        .join("witnesses")
        .join(Component::VendorWheels.list().unwrap_or_default());
    let list = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let mut lines = list.lines();
    let version = lines.find_map(|line| {
        let rest = line.strip_prefix(name)?.strip_prefix("==")?;
        rest.split_whitespace().next()
    });
    let version = version.with_context(|| format!("{} lists no {name}", file.display()))?;
    Ok(version.to_owned())
}

// === impl Target ===

impl Target {
    /// Returns the name of the image.
    const fn image(self) -> &'static str {
        match self {
            Self::Gpuwarden => "gpuwarden",
            Self::Checks => "gpuwarden-checks",
        }
    }
}

// === impl Storage ===

impl Storage {
    fn new(out: &Path) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new().prefix("storage-").tempdir_in(out);
        Ok(Self {
            directory: directory.context("make a directory for layers")?,
        })
    }

    /// Builds the target, and writes it as an archive into `out`.
    fn build(
        &self,
        target: Target,
        binary: &Path,
        base: &Path,
        out: &Path,
    ) -> anyhow::Result<PathBuf> {
        let stage = target
            .to_possible_value()
            .context("a target without a name")?;
        let name = target.image();
        let context = self.directory.path();
        let program = context.join("program");
        place(binary, &program, "src/target/release/gpuwarden")?;
        place(base, &context.join("base"), "base.tar")?;
        self.plain("base", "FROM scratch\nADD base.tar /\n")?;
        let root = workspace_root();
        let mut build = self.buildah();
        build.args(["build", "--isolation", "chroot", "--pull-never"]);
        // Equal inputs make equal images.
        build.args(["--timestamp", "0"]);
        build.args(["--target", stage.get_name(), "--tag", name]);
        build.args(["--build-arg", "BASE=localhost/base"]);
        build.arg(format!("--build-context=build={}", program.display()));
        if target == Target::Checks {
            self.libraries()?;
            build.arg("--build-context=nvidia=container-image://localhost/nvidia");
        }
        output(
            build
                .arg("--file")
                .arg(root.join("Containerfile"))
                .arg(&root),
        )?;
        let archive = out.join(format!("{name}.oci.tar"));
        if archive.exists() {
            // Buildah adds to no archive that exists.
            fs::remove_file(&archive)?;
        }
        let tag = format!("{name}:{}", env!("CARGO_PKG_VERSION"));
        let to = format!("oci-archive:{}:{tag}", archive.display());
        let mut push = self.buildah();
        // A fifth smaller than gzip; containerd and podman have read it since 2021.
        push.args(["push", "--compression-format", "zstd"]);
        output(push.args(["--compression-level", "9", name, &to]))?;
        Ok(archive)
    }

    /// Makes the image with NVIDIA's libraries, from the wheels.
    fn libraries(&self) -> anyhow::Result<()> {
        let Some(wheels) = Component::VendorWheels.locate()? else {
            let hint = Component::VendorWheels.hint();
            bail!("needs {}: {hint}", Component::VendorWheels);
        };
        let mut text = "FROM localhost/base\n".to_owned();
        for (_, path) in CHECKS_LIBRARIES {
            place(
                &wheels.join(path),
                &self.directory.path().join("nvidia"),
                path,
            )?;
            text += &format!(
                "COPY {path} /usr/lib/{}-linux-gnu/\n",
                std::env::consts::ARCH
            );
        }
        self.plain("nvidia", &text)
    }

    /// Builds an image from the directory of its name and from the text of a Containerfile.
    fn plain(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let context = self.directory.path().join(name);
        fs::write(context.join("Containerfile"), text)?;
        let mut build = self.buildah();
        build.args(["build", "--isolation", "chroot", "--pull-never"]);
        build.args(["--timestamp", "0", "--tag", name]);
        output(build.arg(context)).map(drop)
    }

    fn buildah(&self) -> Command {
        let mut command = Command::new("buildah");
        let directory = self.directory.path();
        // The driver that works on every file system and without rights to mount.
        command.args(["--storage-driver", "vfs", "--root"]);
        command.arg(directory.join("layers"));
        command.arg("--runroot").arg(directory.join("run"));
        command
    }
}
