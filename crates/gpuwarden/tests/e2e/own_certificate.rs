//! A controller that issues its certificate itself: agents that mount the published authorities
//! stay connected while the authority is replaced, and while another controller takes over.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Api, DeleteParams, PostParams};
use runtime::tls::ClientTls;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    Authority, ControlPlane, Launch, Options, Private, Purpose, Version, unique, wait_for,
};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::apart::pod_token;
use crate::doctor::one;
use crate::support::{SOON, own_port, taken_in, xid};

const NAMESPACE: &str = "gpuwarden";
const SECRET: &str = "gpuwarden-controller-tls";
const CA: &str = "gpuwarden-ca";
/// Lifetime of the certificates and of the first authority, which is renewed when a third of that
/// is left.
const LIFETIME: Duration = Duration::from_secs(1_800);
/// Time after which the first authority is renewed.
const RENEWED: Duration = Duration::from_secs(40);
/// Time that agents have for the renewed one before it is served, long before the first one ends.
const PROPAGATION: Duration = Duration::from_secs(120);

/// Directory of a mounted `ConfigMap`, updated as a kubelet does.
struct Mount {
    directory: TempDir,
    versions: u32,
}

impl Mount {
    fn ca(&self) -> PathBuf {
        self.directory.path().join("ca.crt")
    }

    /// Replaces the symbolic link to the directory of the mounted version.
    fn publish(&mut self, text: &str) -> anyhow::Result<()> {
        let at = |name: &str| self.directory.path().join(name);
        self.versions += 1;
        let version = format!("..{}", self.versions);
        std::fs::create_dir(at(&version))?;
        std::fs::write(at(&version).join("ca.crt"), text)?;
        std::os::unix::fs::symlink(&version, at("..data_tmp"))?;
        std::fs::rename(at("..data_tmp"), at("..data"))?;
        if self.versions == 1 {
            std::os::unix::fs::symlink("..data/ca.crt", self.ca())?;
        }
        Ok(())
    }
}

/// Creates the Secret as a controller has left it, with an authority and a certificate that are
/// renewed soon. Returns the authority.
async fn almost_over(plane: &ControlPlane) -> anyhow::Result<String> {
    let end = SystemTime::now() + LIFETIME / 3 + RENEWED;
    // The start is set back by an hour, the allowed lag of clocks.
    let times = Some((end - LIFETIME - Duration::from_secs(3600), end));
    let authority = Authority::valid("gpuwarden controller", times)?;
    let names = ["localhost", "localhost.gpuwarden"];
    let names = [
        &names[..],
        &[
            "localhost.gpuwarden.svc",
            "localhost.gpuwarden.svc.cluster.local",
        ],
    ];
    let names = names.concat();
    let signed = authority.sign_valid(Purpose::Server, "localhost", &names, times)?;
    let data = [
        ("ca.crt", authority.pem()),
        ("ca.key", &authority.key()),
        ("tls.crt", &signed.certificate),
        ("tls.key", &signed.key),
    ];
    let data = data.map(|(key, text)| (key, ByteString(text.into())));
    let secret = json!({
        "metadata": {
            "name": SECRET,
            "annotations": {"gpuwarden.dev/certificate-names": names.join(",")},
        },
        "data": std::collections::BTreeMap::from(data),
    });
    let secrets: Api<Secret> = Api::namespaced(plane.client().await?, NAMESPACE);
    secrets
        .create(&PostParams::default(), &serde_json::from_value(secret)?)
        .await?;
    Ok(authority.pem().to_owned())
}

/// Returns the published authorities once there are as many as `count`.
async fn published(maps: &Api<ConfigMap>, count: usize) -> anyhow::Result<String> {
    wait_for("the published authorities", RENEWED + SOON, || async {
        let map = maps.get(CA).await.map_err(|error| error.to_string())?;
        let data = map.data.unwrap_or_default();
        let text = data.get("ca.crt").cloned().unwrap_or_default();
        match text.matches("END CERTIFICATE").count() {
            found if found == count => Ok(text),
            found => Err(format!("{found} authorities")),
        }
    })
    .await
}

/// Connects again and again, as new agents do. Each TLS handshake has to succeed.
fn probe(port: u16, ca: &Path) -> anyhow::Result<(watch::Receiver<Vec<u8>>, JoinHandle<String>)> {
    let tls = ClientTls::load(ca.to_owned(), None)?;
    let (seen, served) = watch::channel(Vec::new());
    let probing = tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            // Between two leaders nobody listens.
            let Ok(stream) = TcpStream::connect(("127.0.0.1", port)).await else {
                continue;
            };
            let Ok(name) = ServerName::try_from("localhost") else {
                return "no name".to_owned();
            };
            match TlsConnector::from(Arc::clone(&tls.config()))
                .connect(name, stream)
                .await
            {
                Ok(connection) => {
                    let chain = connection.get_ref().1.peer_certificates();
                    let first = chain.and_then(|chain| chain.first());
                    seen.send_replace(first.map(|der| der.to_vec()).unwrap_or_default());
                }
                // A controller that ends closes connections.
                Err(error) if error.kind() != std::io::ErrorKind::InvalidData => {}
                Err(error) => return error.to_string(),
            }
        }
    });
    Ok((served, probing))
}

async fn plane() -> anyhow::Result<Option<Private>> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(None);
    };
    plane.namespace(NAMESPACE).await?;
    Ok(Some(plane))
}

#[tokio::test]
async fn an_authority_is_replaced_under_a_running_agent_and_nothing_is_lost() -> anyhow::Result<()>
{
    let Some(plane) = plane().await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let node = unique("issued");
    testkit::node(&node).create(&client).await?;
    let (account, token) = pod_token(&plane, &node).await?;
    let reserved = own_port()?;
    let port = reserved.local_addr()?.port();
    let before = almost_over(&plane).await?;
    let launch = || {
        anyhow::Ok(
            Launch::controller()?
                .kubeconfig(plane.kubeconfig())
                .quarantine()
                .option("--agents", format!("default/{account}"))
                .option("--grpc-listen", format!("127.0.0.1:{port}"))
                .option("--grpc-service", "localhost")
                .option("--certificate-lifetime", format!("{}s", LIFETIME.as_secs())),
        )
    };
    let mut first = launch()?.start().await?;

    let mut mount = Mount {
        directory: tempfile::tempdir()?,
        versions: 0,
    };
    // Deleted by somebody, it is published again.
    assert_eq!(published(&maps, 1).await?.trim(), before.trim());
    maps.delete(CA, &DeleteParams::default()).await?;
    mount.publish(&before)?;
    let token_file = mount.directory.path().join("token");
    std::fs::write(&token_file, token)?;
    let agent = Launch::agent()?
        .node_name(&node)
        .option("--controller", format!("https://localhost:{port}"))
        .option("--tls-ca", mount.ca())
        .option("--token-file", &token_file)
        .start()
        .await?;
    agent.append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    taken_in(&first, 1).await?;
    let (mut served, probing) = probe(port, &mount.ca())?;
    served.wait_for(|der| !der.is_empty()).await?;
    let old = served.borrow_and_update().clone();

    // Published first, and used once agents have it.
    let both = published(&maps, 2).await?;
    assert!(both.trim_end().ends_with(before.trim()), "{both}");
    mount.publish(&both)?;
    let changed = served.wait_for(|der| *der != old);
    tokio::time::timeout(PROPAGATION + SOON, changed).await??;
    agent.append_kernel_log(&xid(119, "Timeout waiting for RPC"))?;
    taken_in(&first, 2).await?;

    // The next leader has the same certificate, and the running agent trusts it.
    let second = launch()?.start().await?;
    let (exit, _) = first.terminate().await?;
    assert!(exit.success(), "{}", first.failure("it failed"));
    agent.append_kernel_log(&xid(48, "DBE (double bit error)"))?;
    taken_in(&second, 3).await?;
    assert_eq!(published(&maps, 2).await?, both);
    let config = plane.kubeconfig().display().to_string();
    let doctor = [
        "doctor",
        "controller",
        "--kubeconfig",
        &config,
        "-o",
        "json",
    ];
    let found: Value = serde_json::from_str(&second.command(doctor).await?.stdout)?;
    // The renewed one is in time.
    let tls = one(&found, "tls");
    let what = tls["what"].as_str().unwrap_or_default();
    assert!(tls["result"] == "ok" && what.contains(SECRET), "{tls}");
    assert!(!probing.is_finished(), "{}", probing.await?);
    probing.abort();
    Ok(())
}
