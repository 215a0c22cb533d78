//! The product as a pod of the chart would run it: the arguments, environment and files of a pod
//! that the cluster has, and the token of its `ServiceAccount`, in a mount namespace.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use testkit::{ControlPlane, Launch, Output, binary};

use super::NAMESPACE;
use crate::support::SOON;

/// Directory of the token that pods have for the API server.
const ACCOUNT: &str = "var/run/secrets/kubernetes.io/serviceaccount";

/// Files of a pod of the release, and what its container has.
pub(crate) struct Pod {
    name: String,
    namespace: String,
    container: Value,
    /// False if the data directory goes with the pod.
    keeps_data: bool,
    directory: tempfile::TempDir,
}

impl Pod {
    /// Returns the first pod of a part of the release, such as `controller`, with its files.
    pub(crate) async fn of(plane: &ControlPlane, part: &str) -> anyhow::Result<Self> {
        let label = format!("app=gpuwarden-{part}");
        let pod = testkit::wait_for("a pod that has a node", SOON, || async {
            let list = ["-n", NAMESPACE, "get", "pods", "-l", &label, "-o", "json"];
            let list = plane
                .kubectl(list)
                .await
                .map_err(|error| error.to_string())?;
            let list: Value = serde_json::from_str(&list).map_err(|error| error.to_string())?;
            let mut pods = list["items"].as_array().into_iter().flatten();
            // The agent is that of one node; a controller may be on any.
            let pod = pods.find(|pod| {
                let node = &pod["spec"]["nodeName"];
                let may = node == "gpu-1" || (part != "agent" && node.is_string());
                may && pod["metadata"]["deletionTimestamp"].is_null()
            });
            pod.cloned().ok_or_else(|| list.to_string())
        });
        let pod = pod.await?;
        let text = |path: &str| pod.pointer(path).and_then(Value::as_str);
        let directory = tempfile::tempdir()?;
        let volumes = pod["spec"]["volumes"].as_array().context("volumes")?;
        let made = Self {
            name: text("/metadata/name").context("a name")?.to_owned(),
            namespace: NAMESPACE.to_owned(),
            container: pod["spec"]["containers"][0].clone(),
            keeps_data: volumes
                .iter()
                .any(|it| it["name"] == "data" && it["emptyDir"].is_null()),
            directory,
        };
        for volume in volumes {
            made.fill(plane, &pod, volume).await?;
        }
        Ok(made)
    }

    /// Returns whether the next pod finds the data of this one.
    pub(crate) fn keeps_data(&self) -> bool {
        self.keeps_data
    }

    /// Returns the place of a path in the container: below the mount that it belongs to.
    pub(crate) fn place(&self, path: &str) -> Option<PathBuf> {
        let mounts = self.container["volumeMounts"].as_array()?;
        let mut mounts: Vec<(&str, &str)> = mounts
            .iter()
            .filter_map(|mount| Some((mount["mountPath"].as_str()?, mount["name"].as_str()?)))
            .collect();
        mounts.sort_by_key(|(at, _)| std::cmp::Reverse(at.len()));
        let (at, name) = mounts.into_iter().find(|(at, _)| path.starts_with(at))?;
        let rest = path.strip_prefix(at)?.trim_start_matches('/');
        Some(self.directory.path().join(name).join(rest))
    }

    /// Writes the files of a volume, as a kubelet does.
    async fn fill(&self, plane: &ControlPlane, pod: &Value, volume: &Value) -> anyhow::Result<()> {
        let name = volume["name"].as_str().context("a volume without a name")?;
        let place = self.directory.path().join(name);
        std::fs::create_dir_all(&place)?;
        if let Some(map) = volume["configMap"]["name"].as_str() {
            return self.write_map(plane, map, &place).await;
        }
        for source in volume["projected"]["sources"]
            .as_array()
            .into_iter()
            .flatten()
        {
            if let Some(path) = source["serviceAccountToken"]["path"].as_str() {
                let audience = source["serviceAccountToken"]["audience"].as_str();
                let token = self.token(plane, pod, audience).await?;
                std::fs::write(place.join(path), token)?;
            } else if let Some(map) = source["configMap"]["name"].as_str() {
                self.write_map(plane, map, &place).await?;
            } else if source.get("downwardAPI").is_some() {
                std::fs::write(place.join("namespace"), &self.namespace)?;
            }
        }
        Ok(())
    }

    /// Writes the data of a `ConfigMap` as soon as the cluster has it: the pod would wait, too.
    async fn write_map(&self, plane: &ControlPlane, map: &str, to: &Path) -> anyhow::Result<()> {
        let get = ["-n", NAMESPACE, "get", "configmap", map, "-o", "json"];
        let wanted = format!("the ConfigMap {map}");
        let found = testkit::wait_for(&wanted, SOON, || async {
            plane.kubectl(get).await.map_err(|error| error.to_string())
        });
        let found: Value = serde_json::from_str(&found.await?)?;
        for (file, text) in found["data"].as_object().into_iter().flatten() {
            std::fs::write(to.join(file), text.as_str().unwrap_or_default())?;
        }
        Ok(())
    }

    /// Returns a token of the pod's account, which is bound to the pod.
    async fn token(
        &self,
        plane: &ControlPlane,
        pod: &Value,
        audience: Option<&str>,
    ) -> anyhow::Result<String> {
        let account = pod["spec"]["serviceAccountName"]
            .as_str()
            .context("an account")?;
        let uid = pod["metadata"]["uid"].as_str().context("a uid")?;
        let mut create = vec!["-n", NAMESPACE, "create", "token", account];
        create.extend([
            "--bound-object-kind",
            "Pod",
            "--bound-object-name",
            &self.name,
        ]);
        create.extend(["--bound-object-uid", uid]);
        if let Some(audience) = audience {
            create.extend(["--audience", audience]);
        }
        Ok(plane.kubectl(create).await?.trim().to_owned())
    }

    /// Adds to a launch what the container has. Names of Services lead to `address`.
    pub(crate) fn arrange(
        &self,
        plane: &ControlPlane,
        mut launch: Launch,
        address: &str,
    ) -> anyhow::Result<Launch> {
        let args = self.container["args"].as_array().context("arguments")?;
        for arg in args.iter().skip(1).filter_map(Value::as_str) {
            let placed = arg
                .split_once('=')
                .and_then(|(flag, value)| Some(format!("{flag}={}", self.place(value)?.display())));
            launch = launch.arg(placed.as_deref().unwrap_or(arg));
        }
        for (name, value) in self.environment(plane)? {
            launch = launch.env(name, value);
        }
        Ok(launch.program(self.wrapper(address)?))
    }

    /// Runs a client command of the product in the container.
    pub(crate) async fn run(
        &self,
        plane: &ControlPlane,
        address: &str,
        args: &[&str],
    ) -> anyhow::Result<Output> {
        let mut command = tokio::process::Command::new(self.wrapper(address)?);
        command.args(args).envs(self.environment(plane)?);
        Output::of(&mut command).await
    }

    /// Returns the variables of the container, and those that the kubelet adds.
    fn environment(&self, plane: &ControlPlane) -> anyhow::Result<Vec<(String, String)>> {
        let mut environment = Vec::new();
        for variable in self.container["env"].as_array().into_iter().flatten() {
            let name = variable["name"]
                .as_str()
                .context("a variable without a name")?;
            // The only reference of the chart is to the name of the node.
            let value = match &variable["value"] {
                Value::String(value) => value,
                _ => "gpu-1",
            };
            let place = self.place(value).map(|place| place.display().to_string());
            let value = place.unwrap_or_else(|| value.to_owned());
            environment.push((name.to_owned(), value));
        }
        let server = plane.server().trim_start_matches("https://");
        let (host, port) = server
            .rsplit_once(':')
            .context("an address of the API server")?;
        for (name, value) in [("HOST", host), ("PORT", port)] {
            environment.push((format!("KUBERNETES_SERVICE_{name}"), value.to_owned()));
        }
        Ok(environment)
    }

    /// Writes a program that runs the product with the pod's account and names of Services.
    fn wrapper(&self, address: &str) -> anyhow::Result<PathBuf> {
        let root = self.directory.path();
        let hosts = root.join("hosts");
        let names =
            ["controller", "webhook"].map(|part| format!("gpuwarden-{part}.{NAMESPACE}.svc"));
        std::fs::write(
            &hosts,
            format!("127.0.0.1 localhost\n{address} {}\n", names.join(" ")),
        )?;
        // The volume that the API server adds to each pod with a token.
        let mounted = self.place(&format!("/{ACCOUNT}"));
        let copy = match &mounted {
            Some(place) => format!("mkdir -p /{ACCOUNT}\ncp {}/* /{ACCOUNT}\n", place.display()),
            None => String::new(),
        };
        let script = format!(
            "#!/bin/sh\nset -e\nmount -t tmpfs tmpfs /var/run\nmount --bind {hosts} /etc/hosts\n\
             {copy}unset KUBECONFIG GPUWARDEN_KUBECONFIG\nexec {binary} \"$@\"\n",
            hosts = hosts.display(),
            binary = binary()?.display(),
        );
        let inner = root.join("inner");
        std::fs::write(&inner, script)?;
        let outer = root.join("outer");
        let run = format!(
            "#!/bin/sh\nexec unshare --mount sh {} \"$@\"\n",
            inner.display()
        );
        std::fs::write(&outer, run)?;
        let executable = std::process::Command::new("chmod")
            .arg("+x")
            .arg(&outer)
            .status()?;
        ensure!(executable.success(), "chmod: {executable}");
        Ok(outer)
    }
}
