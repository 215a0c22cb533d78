//! The API server or etcd is away for a while.

use testkit::{ControlPlane, Options, Program, Version};

use crate::support::{SOON, Scene, xid};

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
    scene.product.wait_line("it is tried again", SOON).await?;
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
    scene.ready().await?;
    plane.stop(Program::Etcd)?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    // Each attempt is waited for for ten seconds.
    scene
        .session("two attempts that fail", |it| {
            it["failures"]
                .as_u64()
                .is_some_and(|failures| failures >= 2)
        })
        .await?;
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
