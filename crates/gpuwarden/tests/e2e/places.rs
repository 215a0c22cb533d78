//! Deletion, move and replacement of the data directory and the socket's file while the product
//! runs.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::{fs, io};

use serde_json::Value;
use testkit::{Launch, Product};

use crate::support::{SOON, event, send};

/// Waits until the product is ready or, with `texts`, not ready for a reason that contains all
/// of them.
async fn ready_or(product: &Product, texts: &[&str]) -> anyhow::Result<()> {
    product
        .wait_for(&format!("{texts:?}"), SOON, || async {
            let text = product.get("/api/v1/status").await;
            let text = text.map_err(|error| error.to_string())?;
            let status: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            let reasons = status["notReady"].to_string();
            let ready = product.get("/readyz").await;
            let ready = ready.map_err(|error| error.to_string())? == "ready\n";
            if texts.iter().all(|text| reasons.contains(text)) && ready == texts.is_empty() {
                Ok(())
            } else {
                Err(reasons)
            }
        })
        .await
}

#[tokio::test]
async fn a_socket_that_is_deleted_is_made_again_and_one_of_another_is_left_alone()
-> anyhow::Result<()> {
    let launch = Launch::new()?.node_name("n1");
    let mut product = launch.arg("--socket-mode").arg("660").start().await?;
    let socket = product.socket().to_owned();
    let mode = || fs::metadata(&socket).map(|found| found.permissions().mode() & 0o777);
    ready_or(&product, &[]).await?;
    assert_eq!(mode()?, 0o660);
    fs::remove_file(&socket)?;
    product
        .wait_for("the socket", SOON, || async {
            let sent = send(&socket, vec![event("n1", "0")]).await;
            sent.map_err(|error| format!("{error:#}"))
        })
        .await?;
    ready_or(&product, &[]).await?;
    assert_eq!(mode()?, 0o660);

    fs::remove_file(&socket)?;
    let another = UnixListener::bind(&socket)?;
    ready_or(&product, &["deleted or replaced", "another process serves"]).await?;
    let (status, _) = product.terminate().await?;
    assert_eq!(status.code(), Some(0));
    assert!(socket.exists(), "the socket of another was deleted");
    drop(another);
    Ok(())
}

#[tokio::test]
async fn the_sockets_of_devices_are_made_again_and_gone_at_the_end() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let gate = directory.path().join("gate.sock");
    let launch = Launch::new()?.node_name("n1").option("--job-gate", &gate);
    let mut product = launch.start().await?;
    let api = product.data_dir().join("device-api.sock");
    ready_or(&product, &[]).await?;
    fs::remove_file(&api)?;
    fs::remove_file(&gate)?;
    product
        .wait_for("both sockets", SOON, || async {
            let data_dir = product.data_dir().display().to_string();
            let listed = product.command(["devices", "--data-dir", &data_dir]).await;
            let listed = listed.map_err(|error| format!("{error:#}"))?;
            (listed.code == Some(0) && gate.exists())
                .then_some(())
                .ok_or(listed.stderr)
        })
        .await?;
    product.terminate().await?;
    assert!(!api.exists() && !gate.exists());
    Ok(())
}

#[tokio::test]
async fn a_data_directory_that_is_gone_is_told_and_what_comes_back_counts() -> anyhow::Result<()> {
    let mut product = Launch::new()?.node_name("n1").start().await?;
    let data_dir = product.data_dir();
    let aside = data_dir.with_extension("aside");
    ready_or(&product, &[]).await?;
    fs::rename(&data_dir, &aside)?;
    let told = ["data directory", "deleted, moved or replaced", "restart"];
    ready_or(&product, &told).await?;
    assert!(!data_dir.exists());
    let place = data_dir.to_str().unwrap_or_default();
    let injected = product.command(["inject", "xid", "79", "--data-dir", place]);
    assert_eq!(injected.await?.code, Some(2));
    fs::rename(&aside, &data_dir)?;
    ready_or(&product, &[]).await?;

    fs::remove_dir_all(&data_dir)?;
    ready_or(&product, &told).await?;
    let (status, _) = product.terminate().await?;
    assert_eq!(status.code(), Some(0));
    let found = fs::metadata(&data_dir).map_err(|error| error.kind());
    assert_eq!(found.err(), Some(io::ErrorKind::NotFound));
    Ok(())
}
