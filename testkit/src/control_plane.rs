//! A real Kubernetes control plane for a test.
//!
//! [`ControlPlane::shared`] is shared by the tests of all test processes: a test uses unique
//! names ([`crate::unique`]) and must not disrupt the control plane. [`ControlPlane::private`]
//! is for tests that stop and kill its programs.

use std::{
    ops::Deref,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Config,
    api::{ObjectMeta, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::{
    components::{Component, Version},
    skip::require,
    supervisor::{Owned, Programs, Settings, Shared, State, shared_dir},
    wait::wait_for,
};

/// Time for the API server to become ready after a restart.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// A program of a control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// etcd, the store of the API server.
    Etcd,
    /// kube-apiserver, the Kubernetes API server.
    ApiServer,
    /// kube-controller-manager, the standard controllers of Kubernetes.
    ControllerManager,
    /// kube-scheduler, which assigns pods to nodes.
    Scheduler,
    /// kwok, which takes the place of the kubelets.
    Kwok,
}

/// Options of a private control plane.
#[derive(Clone, Debug, Default)]
pub struct Options {
    settings: Settings,
}

/// A running control plane. It ends with its last user: on drop, or when the user's process ends
/// in any other way.
pub struct ControlPlane {
    state: State,
    kubectl: PathBuf,
    _shared: Option<Shared>,
}

/// A control plane for one test. Its programs can be stopped and killed.
///
/// Its directory is removed on drop. If the test panics, the directory is kept, and its path
/// printed.
pub struct Private {
    plane: ControlPlane,
    owned: Mutex<Owned>,
}

// === impl Program ===

impl Program {
    /// Returns the name of the program's file, of its log and of its entry in the state.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Kwok => "kwok",
        }
    }
}

// === impl Options ===

impl Options {
    /// Adds a flag to a program, such as `--goaway-chance=0.02`.
    #[must_use]
    pub fn arg(mut self, program: Program, flag: impl Into<String>) -> Self {
        self.settings
            .args
            .push((program.name().to_owned(), flag.into()));
        self
    }

    /// Lets etcd sync to disk. By default it does not: no test outlives the machine.
    #[must_use]
    pub fn fsync(mut self) -> Self {
        self.settings.fsync = true;
        self
    }
}

// === impl ControlPlane ===

impl ControlPlane {
    /// Returns the control plane of this version that all tests share, and starts it if needed.
    /// Returns `None` if the calling test must return; the skip is then already reported.
    ///
    /// # Panics
    ///
    /// With `CI=true` if the control plane is not set up, as [`require`] does.
    #[track_caller]
    pub fn shared(version: Version) -> impl Future<Output = anyhow::Result<Option<Self>>> {
        let programs = required(version);
        async move {
            let Some(programs) = programs? else {
                return Ok(None);
            };
            let kubectl = programs.kubectl();
            let join = move || Shared::join(&programs, &shared_dir(&programs, version)?);
            let shared = tokio::task::spawn_blocking(join).await??;
            Ok(Some(Self {
                state: shared.state().clone(),
                kubectl,
                _shared: Some(shared),
            }))
        }
    }

    /// Returns a control plane for one test, which may disrupt it. Returns `None` as
    /// [`ControlPlane::shared`] does.
    ///
    /// # Panics
    ///
    /// As [`ControlPlane::shared`].
    #[track_caller]
    pub fn private(
        version: Version,
        options: Options,
    ) -> impl Future<Output = anyhow::Result<Option<Private>>> {
        let programs = required(version);
        async move {
            let Some(programs) = programs? else {
                return Ok(None);
            };
            // The supervisor removes the directory, so that it is also removed if this process
            // is killed.
            let dir = tempfile::Builder::new()
                .prefix("gpuwarden-control-plane-")
                .tempdir()?
                .keep();
            let start = move || Owned::start(&programs, &dir, &options.settings);
            let owned = tokio::task::spawn_blocking(start).await??;
            let plane = Self {
                state: owned.state().clone(),
                kubectl: owned.kubectl().to_owned(),
                _shared: None,
            };
            Ok(Some(Private {
                plane,
                owned: Mutex::new(owned),
            }))
        }
    }

    /// Returns the API server's address, `https://127.0.0.1:PORT`.
    pub fn server(&self) -> &str {
        &self.state.server
    }

    /// Returns the path of the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> &Path {
        &self.state.kubeconfig
    }

    /// Returns the directory of certificates, data and logs (`log/PROGRAM.log`, and the API
    /// server's audit log in `log/audit.json`).
    pub fn dir(&self) -> &Path {
        &self.state.dir
    }

    /// Returns the path of kubectl, of the version of the API server.
    pub fn kubectl_path(&self) -> &Path {
        &self.kubectl
    }

    /// Returns the state at the start, with the process ids by program.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns true if this program was started. With `KUBEBUILDER_ASSETS`, the controller
    /// manager and the scheduler may be missing; without kwok set up, kwok is.
    pub fn has(&self, program: Program) -> bool {
        self.state.pids.contains_key(program.name())
    }

    /// Returns a client with the administrator's rights.
    pub async fn client(&self) -> anyhow::Result<Client> {
        let kubeconfig = Kubeconfig::read_from(self.kubeconfig())?;
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
        Ok(Client::try_from(config)?)
    }

    /// Returns the path of kubectl.
    pub fn kubectl_program(&self) -> &Path {
        &self.kubectl
    }

    /// Runs kubectl as administrator and returns its standard output.
    ///
    /// Fails with kubectl's output if kubectl fails.
    pub async fn kubectl<S: AsRef<std::ffi::OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<String> {
        Ok(String::from_utf8(self.run_kubectl(args).await?.stdout)?)
    }

    /// Runs kubectl as administrator and returns its warnings, and those of the API server.
    ///
    /// Fails with kubectl's output if kubectl fails.
    pub async fn kubectl_warnings<S: AsRef<std::ffi::OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<String> {
        Ok(String::from_utf8(self.run_kubectl(args).await?.stderr)?)
    }

    async fn run_kubectl<S: AsRef<std::ffi::OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<Output> {
        let mut command = tokio::process::Command::new(&self.kubectl);
        command
            .arg("--kubeconfig")
            .arg(self.kubeconfig())
            .args(args)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = command.output().await.context("run kubectl")?;
        if !output.status.success() {
            bail!(
                "kubectl: {}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(output)
    }

    /// Creates a namespace and waits until pods may be created in it.
    pub async fn namespace(&self, name: &str) -> anyhow::Result<()> {
        self.labelled_namespace(name, []).await
    }

    /// Creates a namespace with labels, and waits until pods may be created in it. The API server
    /// learns with a delay of labels that are added later.
    pub async fn labelled_namespace<const N: usize>(
        &self,
        name: &str,
        labels: [(&str, &str); N],
    ) -> anyhow::Result<()> {
        let client = self.client().await?;
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(labels.into()),
            ..ObjectMeta::default()
        };
        let namespace = Namespace {
            metadata,
            ..Namespace::default()
        };
        Api::all(client.clone())
            .create(&PostParams::default(), &namespace)
            .await?;
        if !self.has(Program::ControllerManager) {
            return Ok(());
        }
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(client, name);
        wait_for("the default service account", READY_LIMIT, || {
            accounts.get("default")
        })
        .await
        .map(drop)
    }

    /// Waits until the API server reports that it is ready.
    pub async fn wait_ready(&self) -> anyhow::Result<()> {
        let client = self.client().await?;
        wait_for("the API server", READY_LIMIT, || async {
            let ready = http_get(&client, "/readyz").await?;
            if ready == "ok" {
                Ok(())
            } else {
                Err(anyhow::anyhow!("readyz says {ready}"))
            }
        })
        .await
    }
}

/// Returns the programs, or `None` if one is missing; the skip is then already reported.
#[track_caller]
fn required(version: Version) -> anyhow::Result<Option<Programs>> {
    if require(Component::ControlPlane(version)).is_none()
        || require(Component::Supervise).is_none()
    {
        return Ok(None);
    }
    Programs::locate(version)
}

async fn http_get(client: &Client, path: &str) -> anyhow::Result<String> {
    Ok(client
        .request_text(http::Request::get(path).body(Vec::new())?)
        .await?)
}

// === impl Private ===

impl Deref for Private {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        &self.plane
    }
}

impl Private {
    /// Kills a program with SIGKILL. Returns once the process is gone.
    pub fn kill(&self, program: Program) -> anyhow::Result<()> {
        self.command("kill", program)
    }

    /// Stops a program with SIGSTOP: it keeps its connections and does not respond. Returns once
    /// all its threads have stopped.
    pub fn stop(&self, program: Program) -> anyhow::Result<()> {
        self.command("stop", program)
    }

    /// Resumes a stopped program.
    pub fn cont(&self, program: Program) -> anyhow::Result<()> {
        self.command("cont", program)
    }

    /// Starts a program again with the same flags, data and port, after killing it if it still
    /// runs. Does not wait until it is ready: see [`ControlPlane::wait_ready`].
    pub fn restart(&self, program: Program) -> anyhow::Result<()> {
        self.command("start", program)
    }

    /// Returns the process id of a running program.
    pub fn pid(&self, program: Program) -> Option<i32> {
        self.lock().state().pids.get(program.name()).copied()
    }

    fn command(&self, verb: &str, program: Program) -> anyhow::Result<()> {
        self.lock().command(verb, program.name())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Owned> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if std::thread::panicking() && self.lock().command("keep", "").is_ok() {
            use std::io::Write as _;
            let dir = self.dir().display();
            let _ = writeln!(std::io::stderr(), "control plane's logs kept in {dir}");
        }
    }
}
