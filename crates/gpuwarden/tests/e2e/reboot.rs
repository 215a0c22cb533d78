//! A real reboot: a guest in qemu is the machine of a node, and reboots because of a fault. The
//! test plays its kubelet, and reports its boot id.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use ::janitor::{Provider, Signal};
use async_trait::async_trait;
use maintenance::janitor::{Class, FoundOperation, ProviderFailure};
use testkit::components::{find_program, guest_kernel};
use testkit::{Component, ControlPlane, Version};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{Mutex, watch};

use crate::machines::{self, boots};
use crate::support::{SOON, Scene, install_crds, xid};

/// Longest time for the boot of the guest: seconds on an idle machine, without KVM.
const BOOT: Duration = Duration::from_secs(300);
/// Init of the guest: it prints its boot id on the console, and runs the commands that it reads
/// there.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
exec </dev/ttyS0 >/dev/ttyS0 2>&1
echo boot-id $(/bin/busybox cat /proc/sys/kernel/random/boot_id)
while read -r line; do
    test \"$line\" = reboot && /bin/busybox reboot -f
done
";

/// Packs a directory into the archive that a kernel unpacks as its root.
pub(crate) fn pack(root: &Path, image: &Path) -> anyhow::Result<()> {
    let mut packing = std::process::Command::new("sh");
    let packed = packing
        .args(["-c", "find . | busybox cpio -o -H newc"])
        .current_dir(root)
        .stdout(std::fs::File::create(image)?)
        .stderr(Stdio::null())
        .status()?;
    anyhow::ensure!(packed.success(), "busybox cpio: {packed}");
    Ok(())
}

/// Returns the command of a machine with the console on standard input and output. The command ends
/// with the machine's power, and on drop.
pub(crate) fn machine(qemu: &Path, image: &Path, megabytes: &str) -> Command {
    let mut machine = Command::new(qemu);
    machine
        .args(["-machine", "pc,accel=tcg", "-m", megabytes])
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-serial", "stdio"])
        .args([
            "-append",
            "console=ttyS0 quiet panic=-1 systemd.show_status=false",
        ])
        .arg("-kernel")
        .arg(guest_kernel().unwrap_or_default())
        .arg("-initrd")
        .arg(image)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    machine
}

/// A running machine, and its console.
struct Guest {
    console: Mutex<ChildStdin>,
    boots: watch::Receiver<Vec<String>>,
    /// Operations received, each with the boot id before it.
    told: Mutex<Vec<(String, String)>>,
    _machine: Child,
}

impl Guest {
    fn start(qemu: &Path, directory: &Path) -> anyhow::Result<Self> {
        let busybox = find_program("busybox").unwrap_or_default();
        let root = directory.join("root");
        std::fs::create_dir_all(root.join("bin"))?;
        std::fs::copy(&busybox, root.join("bin/busybox"))?;
        let init = root.join("init");
        std::fs::write(&init, INIT)?;
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&init, executable)?;
        let image = directory.join("initramfs");
        pack(&root, &image)?;
        let mut machine = machine(qemu, &image, "256").stdin(Stdio::piped()).spawn()?;
        let console = Mutex::new(machine.stdin.take().unwrap());
        let mut lines = BufReader::new(machine.stdout.take().unwrap()).lines();
        let (said, boots) = watch::channel(Vec::new());
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some((_, id)) = line.split_once("boot-id ") {
                    said.send_modify(|boots| boots.push(id.trim().to_owned()));
                }
            }
        });
        Ok(Self {
            console,
            boots,
            told: Mutex::default(),
            _machine: machine,
        })
    }

    /// Waits until the guest has booted `times` times. Returns the id of the last boot.
    async fn booted(&self, times: usize) -> anyhow::Result<String> {
        let mut boots = self.boots.clone();
        let boots = boots.wait_for(|boots| boots.len() >= times);
        let boots = tokio::time::timeout(BOOT, boots).await??;
        Ok(boots.last().cloned().unwrap_or_default())
    }
}

#[async_trait]
impl Provider for Guest {
    fn name(&self) -> &'static str {
        "guest"
    }

    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        let mut told = self.told.lock().await;
        if let Some((_, before)) = told.iter().find(|(known, _)| *known == signal.operation) {
            return Ok(before.clone());
        }
        let before = self.boots.borrow().last().cloned().unwrap_or_default();
        told.push((signal.operation.clone(), before.clone()));
        let written = self.console.lock().await.write_all(b"reboot\n").await;
        let failed = |error: std::io::Error| {
            ProviderFailure::new(Class::Ambiguous, "AMBIGUOUS_RESULT", error.to_string())
        };
        written.map_err(failed)?;
        Ok(before)
    }

    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure> {
        let told = self.told.lock().await;
        let known = told.iter().find(|(known, _)| *known == signal.operation);
        Ok(known.map_or(FoundOperation::NotSent, |(_, before)| {
            FoundOperation::Sent(before.clone())
        }))
    }

    async fn is_ready(&self, _: &Signal, request_id: &str) -> Result<bool, ProviderFailure> {
        Ok(self
            .boots
            .borrow()
            .last()
            .is_some_and(|id| id != request_id))
    }
}

#[tokio::test]
async fn a_machine_boots_anew_because_of_a_fault() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let Some(qemu) = testkit::require(Component::Guest) else {
        return Ok(());
    };
    install_crds(&plane.client().await?).await?;
    let directory = tempfile::tempdir()?;
    let guest = Arc::new(Guest::start(&qemu, directory.path())?);
    let config = directory.path().join("janitor.yaml");
    let _guard = machines::serve(Arc::clone(&guest) as Arc<dyn Provider>, &config).await?;
    let before = guest.booted(1).await?;
    let scene = Scene::new(
        &plane,
        |node| node,
        |launch| {
            let launch = launch.arg("--drain").arg("--remediate").arg("--janitor");
            launch.option("--janitor-config", config)
        },
    )
    .await?;
    boots(&scene.nodes, &scene.node, &before).await?;
    let line = xid(79, "GPU has fallen off the bus.");
    scene.product.append_kernel_log(&line)?;
    let after = guest.booted(2).await?;
    assert_ne!(after, before, "it is another boot");
    boots(&scene.nodes, &scene.node, &after).await?;
    scene
        .product
        .wait_for("a repair that has succeeded", SOON, || async {
            let shown = scene.shown().await.map_err(|error| error.to_string())?;
            match shown["session"]["phase"].as_str() {
                Some("remediated") => Ok(()),
                _ => Err(shown.to_string()),
            }
        })
        .await?;
    let recovered = scene.product.client(["inject", "recovery"]).await?;
    recovered.expect(0)?;
    scene.restored().await?;
    assert_eq!(guest.told.lock().await.len(), 1);
    Ok(())
}
