//! Output that cannot be written: the disk of the log is full, or its reader is gone or does not
//! read. The product keeps running, and shuts down in order.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use serde_json::Value;
use testkit::{ControlPlane, Launch, Product, Version};
use tokio::net::unix::pipe;

use crate::support::{SOON, Scene, xid};

#[tokio::test]
async fn a_full_disk_under_the_log_changes_nothing() -> anyhow::Result<()> {
    goes_on(dev_full()?, true).await
}

#[tokio::test]
async fn a_reader_of_the_log_that_is_gone_changes_nothing() -> anyhow::Result<()> {
    let (reader, writer) = io::pipe()?;
    drop(reader);
    goes_on(writer, true).await
}

#[tokio::test]
async fn a_reader_of_the_log_that_does_not_read_changes_nothing() -> anyhow::Result<()> {
    let (full, _reader) = full_pipe().await?;
    // Lines that fit in the queue are not lost yet.
    goes_on(full, false).await
}

#[tokio::test]
async fn with_a_full_disk_under_its_log_it_cordons() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let full = dev_full()?;
    let mut scene = Scene::new(&plane, |node| node, |launch| launch.output(full)).await?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    scene.cordoned().await?;
    let (status, _) = scene.product.terminate().await?;
    assert_eq!(status.code(), Some(0));
    Ok(())
}

#[tokio::test]
async fn what_a_process_cannot_start_for_costs_no_more_where_nobody_reads_it() -> anyhow::Result<()>
{
    let (full, _reader) = full_pipe().await?;
    let launch = Launch::new()?.output(full);
    // A file at the path of the data directory.
    File::create(launch.data_dir())?;
    let status = launch.spawn()?.wait_exit(SOON).await?;
    assert_eq!(status.code(), Some(2));
    Ok(())
}

async fn goes_on(output: impl Into<OwnedFd>, loses_lines: bool) -> anyhow::Result<()> {
    let mut product = Launch::new()?.output(output).start().await?;
    product.append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    product
        .wait_for("the fault", SOON, || async {
            let status = status(&product).await.map_err(|error| error.to_string())?;
            let faults = &status["fleet"]["nodes"][0]["faults"];
            if faults[0]["code"] == "79" && status["ready"] == true {
                Ok(())
            } else {
                Err(status.to_string())
            }
        })
        .await?;
    // A task of its own writes the lines.
    let counted = || async {
        let metrics = product.get("/metrics").await;
        let metrics = metrics.map_err(|error| error.to_string())?;
        let none_lost = metrics.contains("\ngpuwarden_log_lines_lost_total 0\n");
        (none_lost != loses_lines).then_some(()).ok_or(metrics)
    };
    product.wait_for("the lost lines", SOON, counted).await?;
    let (status, _) = product.terminate().await?;
    assert_eq!(status.code(), Some(0));
    Ok(())
}

async fn status(product: &Product) -> anyhow::Result<Value> {
    let output = product.client(["status", "-o", "json"]).await?;
    Ok(serde_json::from_str(&output.stdout)?)
}

fn dev_full() -> io::Result<File> {
    File::options().write(true).open("/dev/full")
}

/// Creates a full pipe, which blocks its writers.
async fn full_pipe() -> io::Result<(OwnedFd, pipe::Receiver)> {
    let (sender, receiver) = pipe::pipe()?;
    // Without a check for writability first, the pipe would report that it is full.
    sender.writable().await?;
    loop {
        match sender.try_write(&[b'x'; 4096]) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok((sender.into_blocking_fd()?, receiver))
}
