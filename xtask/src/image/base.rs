//! The root file system below the program, made of a few Debian packages.
//!
//! The packages are those of this machine's release, with its security updates, since a program
//! that is built here needs the C library of this release. No maintainer script runs: the files
//! that scripts would create are written by this module. Scanners read the packages' versions from
//! `/var/lib/dpkg/status.d`, as in distroless images.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use testkit::components::find_program;

use crate::shell::output;

/// User and group of the program, as in distroless images.
pub(crate) const USER: u32 = 65532;

/// C library, libgcc, root certificates, and the directories and licences of a Debian system.
/// NVIDIA's libraries need the C++ library: DCGM's may be mounted, NCCL is in the checks' image.
const PACKAGES: [&str; 5] = [
    "base-files",
    "ca-certificates",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
];

/// Directories that nothing in the image reads. Licences stay, in `usr/share/doc`.
const UNUSED: [&str; 7] = [
    "etc/ca-certificates",
    "etc/update-motd.d",
    "usr/share/base-files",
    "usr/share/gcc",
    "usr/share/gdb",
    "usr/share/lintian",
    "usr/share/man",
];

/// Directory of a file per package, with its fields.
const STATUS: &str = "var/lib/dpkg/status.d";

/// A Debian package in the base.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) architecture: String,
}

/// Writes the root file system as a tar archive, with equal bytes for equal packages.
pub(crate) fn make(archive: &Path) -> anyhow::Result<()> {
    let work = tempfile::tempdir()?;
    let root = work.path().join("root");
    fs::create_dir_all(root.join(STATUS))?;
    for package in download(work.path())? {
        unpack(&package, &root)?;
    }
    for directory in UNUSED {
        let path = root.join(directory);
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    // A script for a shell, which the image does not have.
    fs::remove_file(root.join("usr/sbin/update-ca-certificates"))?;
    // Modules of iconv are most of the C library's size; the program has UTF-8 only.
    for entry in fs::read_dir(root.join("usr/lib"))? {
        let modules = entry?.path().join("gconv");
        if modules.exists() {
            fs::remove_dir_all(modules)?;
        }
    }
    fs::write(
        root.join("etc/ssl/certs/ca-certificates.crt"),
        bundle(&root)?,
    )?;
    let user = format!(
        "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:{USER}:{USER}:nonroot:/:/sbin/nologin\n"
    );
    fs::write(root.join("etc/passwd"), user)?;
    fs::write(
        root.join("etc/group"),
        format!("root:x:0:\nnonroot:x:{USER}:\n"),
    )?;
    fs::write(root.join("etc/nsswitch.conf"), "hosts: files dns\n")?;
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--mtime=@0", "--numeric-owner"]);
    // The umask of the caller must not keep the program's user from reading.
    tar.args(["--owner=0", "--group=0", "--mode=a+rX", "--format=gnu"]);
    tar.args(["--create", "--file"]);
    output(tar.arg(archive).arg("--directory").arg(&root).arg(".")).map(drop)
}

/// Returns the packages of a base.
pub(crate) fn packages(archive: &Path) -> anyhow::Result<Vec<Package>> {
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--to-stdout", "--wildcards", "--file"]);
    let text = output(tar.arg(archive).arg(format!("./{STATUS}/*")))?;
    parse(&text)
}

/// Downloads the packages. Apt verifies them by Debian's keys.
fn download(work: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let (Some(apt), Some(_)) = (find_program("apt-get"), find_program("dpkg-deb")) else {
        bail!("the base is made of Debian packages, and there is no apt-get here: use --base FILE");
    };
    if rustix::process::geteuid().is_root() {
        output(Command::new(&apt).args(["--quiet", "update"]))?;
    }
    let fetch = |packages: &[String]| {
        let mut command = Command::new(&apt);
        // The user that apt has for downloads cannot write here.
        command.args(["--quiet", "-o", "APT::Sandbox::User=", "download"]);
        output(command.args(packages).current_dir(work)).map(drop)
    };
    fetch(&PACKAGES.map(str::to_owned))?;
    // The licence of libgcc is in a package whose name has the version of GCC in it.
    for package in archives(work)? {
        let depends = field(&package, "Depends")?;
        let mut names = depends
            .split([',', ' '])
            .filter(|name| name.starts_with("gcc-") && name.ends_with("-base"));
        if let Some(name) = names.next() {
            fetch(&[name.to_owned()])?;
        }
    }
    archives(work)
}

/// Returns the packages in a directory, by name.
fn archives(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns a field of a package; the empty text if it has none.
fn field(package: &Path, name: &str) -> anyhow::Result<String> {
    let text = output(
        Command::new("dpkg-deb")
            .arg("--field")
            .arg(package)
            .arg(name),
    )?;
    Ok(text.trim().to_owned())
}

/// Unpacks a package, with its licence as its only documentation.
fn unpack(package: &Path, root: &Path) -> anyhow::Result<()> {
    output(
        Command::new("dpkg-deb")
            .arg("--extract")
            .arg(package)
            .arg(root),
    )?;
    let name = field(package, "Package")?;
    let fields = output(Command::new("dpkg-deb").arg("--field").arg(package))?;
    fs::write(root.join(STATUS).join(&name), fields)?;
    let documents = root.join("usr/share/doc").join(&name);
    // The directory of libgcc is a link to that of its licence.
    if documents.is_symlink() || !documents.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(&documents)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else if entry.file_name() != "copyright" {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Returns Mozilla's root certificates as one file, as `update-ca-certificates` writes it.
fn bundle(root: &Path) -> anyhow::Result<String> {
    let directory = root.join("usr/share/ca-certificates/mozilla");
    let mut files = Vec::new();
    for entry in fs::read_dir(&directory).context("ca-certificates has no certificates")? {
        files.push(entry?.path());
    }
    files.sort();
    let mut bundle = String::new();
    for file in files {
        bundle += &fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    }
    Ok(bundle)
}

fn parse(text: &str) -> anyhow::Result<Vec<Package>> {
    let mut packages: Vec<Package> = Vec::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(": ") else {
            continue;
        };
        if key == "Package" {
            packages.push(Package {
                name: value.to_owned(),
                version: String::new(),
                architecture: String::new(),
            });
        }
        match (key, packages.last_mut()) {
            ("Version", Some(package)) => value.clone_into(&mut package.version),
            ("Architecture", Some(package)) => value.clone_into(&mut package.architecture),
            _ => {}
        }
    }
    if packages.is_empty() {
        bail!("the base names no packages in /{STATUS}");
    }
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_read_from_their_fields() {
        let text = "Package: libc6\nVersion: 2.36-9\nArchitecture: amd64\nDescription: C library\n \
                    with: a colon\nPackage: base-files\nVersion: 12.4\nArchitecture: all\n";
        let packages = parse(text).unwrap();
        let names: Vec<_> = packages.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["libc6", "base-files"]);
        assert_eq!(packages[0].version, "2.36-9");
        assert_eq!(packages[1].architecture, "all");
        assert!(parse("").is_err());
    }
}
