//! The API server or etcd is away for a while.

use std::time::Duration;

use testkit::{ControlPlane, Options, Program, Version};

use crate::support::{Scene, xid};

#[tokio::test]
async fn an_api_server_that_was_away_gets_the_cordon_and_the_release() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let mut scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    plane.kill(Program::ApiServer)?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    scene
        .product
        .wait_line("it is tried again", Duration::from_secs(60))
        .await?;
    assert_eq!(scene.product.client(["status"]).await?.code, Some(1));
    plane.restart(Program::ApiServer)?;
    plane.wait_ready().await?;
    scene.cordoned().await?;
    scene.condition("SysLogsXIDError", "True").await?;

    // Recovered while it is away again: given back when it returns.
    plane.kill(Program::ApiServer)?;
    scene
        .product
        .client(["inject", "recovery"])
        .await?
        .expect(0)?;
    plane.restart(Program::ApiServer)?;
    plane.wait_ready().await?;
    scene.restored().await?;
    scene.condition("SysLogsXIDError", "False").await?;
    scene.condition("GPUHealthy", "True").await.map(drop)
}

#[tokio::test]
async fn an_etcd_that_hangs_for_twenty_seconds_delays_and_loses_nothing() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    plane.stop(Program::Etcd)?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    scene.taken_in(1).await?;
    tokio::time::sleep(Duration::from_secs(20)).await;
    plane.cont(Program::Etcd)?;
    plane.wait_ready().await?;
    scene.cordoned().await?;
    scene
        .product
        .client(["inject", "recovery"])
        .await?
        .expect(0)?;
    scene.restored().await
}
