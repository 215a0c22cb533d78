//! Collections with fake programs, a fake kernel log and a fake server.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::args::{OutputArgs, ServerArgs};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// Kernel log with a fault.
const LOG: &str = "[    3.000000] NVRM: Xid (PCI:0000:b3:00): 48, pid=77, name=my train, DBE\n";
/// Beginning of a script that stores the path of its report in `$out` and other arguments in `$rest`.
const REPORT: &str = "while [ $# -gt 0 ]; do case $1 in --output-file) out=$2; shift 2;; \
                      *) rest=\"$rest $1\"; shift;; esac; done\n";
/// Script that waits until the size of files is limited.
const LIMITED: &str = "while [ \"$(ulimit -f)\" = unlimited ]; do :; done\n";

/// Paths and contents of uploads.
type Uploads = Vec<(String, Vec<u8>)>;

struct Scene {
    programs: TempDir,
    directory: TempDir,
    args: CollectArgs,
}

/// Server that answers all requests with the same status, and the uploads to it.
struct Server {
    url: String,
    uploads: Arc<Mutex<Uploads>>,
}

// === impl Scene ===

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        fs::write(&log, LOG).unwrap();
        let args = CollectArgs {
            node_name: Some("gpu-7".to_owned()),
            directory: directory.path().join("collected"),
            upload: None,
            full: false,
            timeout: 60,
            host_root: None,
            kernel_log: log.display().to_string(),
            server: ServerArgs {
                // Nothing listens there.
                server: Some("http://127.0.0.1:1".to_owned()),
                ..ServerArgs::default()
            },
            output: OutputArgs::default(),
        };
        let scene = Self {
            programs: tempfile::tempdir().unwrap(),
            directory,
            args,
        };
        // Hide the machine's own programs.
        for name in ["nvidia-smi", "nvidia-bug-report.sh"] {
            scene.program(name, "exit 1");
        }
        scene
    }

    /// Creates a fake program.
    fn program(&self, name: &str, script: &str) {
        let path = self.programs.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs a collection with a limit for the bytes of all files.
    async fn collect(&self, room: u64) -> (SummaryView, PathBuf) {
        let mut collection = Collection::begin(&self.args).unwrap();
        let mut path = self.programs.path().as_os_str().to_owned();
        path.push(":/usr/bin:/bin");
        (collection.path, collection.room) = (path, room);
        let summary = collection.collect().await.unwrap();
        (summary, collection.directory)
    }
}

// === impl Server ===

impl Server {
    async fn start(status: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let uploads = Arc::<Mutex<Uploads>>::default();
        let shared = uploads.clone();
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                tokio::spawn(Self::serve(connection, status, shared.clone()));
            }
        });
        Self { url, uploads }
    }

    async fn serve(mut connection: TcpStream, status: &'static str, uploads: Arc<Mutex<Uploads>>) {
        let mut read = Vec::new();
        loop {
            let head = read.windows(4).position(|four| four == b"\r\n\r\n");
            let Some(head) = head.map(|end| end + 4) else {
                if connection.read_buf(&mut read).await.unwrap_or(0) == 0 {
                    return;
                }
                continue;
            };
            let text = String::from_utf8_lossy(&read[..head]).to_lowercase();
            let length = text.split("content-length: ").nth(1);
            let length = length.map_or(0, |it| it.lines().next().unwrap().parse().unwrap());
            while read.len() < head + length {
                assert!(connection.read_buf(&mut read).await.unwrap() > 0);
            }
            let body: Vec<u8> = read.drain(..head + length).skip(head).collect();
            let mut words = text.split(' ');
            let answer = match (words.next(), words.next().unwrap()) {
                (Some("put"), path) => {
                    uploads.lock().unwrap().push((path.to_owned(), body));
                    String::new()
                }
                (_, path) => format!("{{\"asked\":\"{path}\"}}"),
            };
            let length = answer.len();
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{answer}");
            connection.write_all(answer.as_bytes()).await.unwrap();
        }
    }
}

fn view<'a>(summary: &'a SummaryView, source: &str) -> &'a SourceView {
    let mut sources = summary.sources.iter();
    sources.find(|one| one.source == source).unwrap()
}

#[tokio::test]
async fn each_source_is_a_file_and_all_are_uploaded() {
    let server = Server::start("201 Created").await;
    let mut scene = Scene::new();
    scene.args.server.server = Some(server.url.clone());
    scene.args.upload = Some(format!("{}/upload/", server.url));
    scene.program("nvidia-smi", "echo \"asked $*\"; env");
    let script = format!("{REPORT}echo \"asked$rest\" > \"$out.gz\"");
    scene.program("nvidia-bug-report.sh", &script);
    let (summary, directory) = scene.collect(MAX_TOTAL).await;
    assert_eq!(summary.exit_code(true), EXIT_OK);

    let stamp = directory.file_name().unwrap().to_str().unwrap();
    let stamp = stamp.strip_prefix("gpu-7-").unwrap();
    let report = format!("nvidia-bug-report-gpu-7-{stamp}.log.gz");
    let read = |file: &str| fs::read_to_string(directory.join(file)).unwrap();
    assert!(read("explain.json").contains("/api/v1/nodes/gpu-7/explain"));
    assert!(read("events.json").contains("&node=gpu-7"));
    assert!(read("kernel.log").contains("NVRM: Xid (PCI:0000:b3:00): 48"));
    assert_eq!(read(&report), "asked --safe-mode\n");
    let smi = read("nvidia-smi.txt");
    assert!(smi.starts_with("asked -q\n"), "{smi}");
    assert!(
        std::env::var_os("CARGO_MANIFEST_DIR").is_some() && !smi.contains("CARGO_"),
        "{smi}"
    );

    let files = [
        "explain.json",
        "events.json",
        "kernel.log",
        "nvidia-smi.txt",
        &report,
        SUMMARY,
    ];
    let uploads = server.uploads.lock().unwrap().clone();
    let expected: Vec<_> = files
        .iter()
        .map(|file| {
            (
                format!("/upload/gpu-7/{stamp}/{file}"),
                fs::read(directory.join(file)).unwrap(),
            )
        })
        .collect();
    assert_eq!(uploads, expected);
    // No other file is left, and only the owner may read the files.
    assert_eq!(fs::read_dir(&directory).unwrap().count(), files.len());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (mode(&directory), mode(&directory.join(SUMMARY))),
        (0o700, 0o600)
    );
    let told: serde_json::Value = serde_json::from_str(&read(SUMMARY)).unwrap();
    for one in told["sources"].as_array().unwrap() {
        assert!(
            one["bytes"].as_u64() > Some(0) && one["uploaded"] == true,
            "{told}"
        );
        assert!(
            one.get("problem").is_none() && one.get("cut").is_none(),
            "{told}"
        );
    }
}

#[tokio::test]
async fn all_is_asked_for_only_where_it_is_wanted() {
    let mut scene = Scene::new();
    scene.args.full = true;
    let script = format!("{REPORT}echo \"asked$rest\" > \"$out\"");
    scene.program("nvidia-bug-report.sh", &script);
    let (summary, directory) = scene.collect(MAX_TOTAL).await;
    // The script has no gzip.
    let file = view(&summary, "nvidia-bug-report").file.clone().unwrap();
    assert_eq!(Path::new(&file).extension().unwrap(), "log");
    assert_eq!(fs::read_to_string(directory.join(file)).unwrap(), "asked\n");
}

#[tokio::test]
async fn a_source_that_hangs_fails_or_is_missing_costs_itself_only() {
    let mut scene = Scene::new();
    scene.args.timeout = 1;
    scene.args.kernel_log = "/nowhere/kern.log".to_owned();
    scene.program("nvidia-smi", "echo 'no device' >&2; exit 9");
    let script = format!("{REPORT}echo half > \"$out\"; sleep 1000");
    scene.program("nvidia-bug-report.sh", &script);
    let (summary, directory) = scene.collect(MAX_TOTAL).await;
    assert_eq!(summary.exit_code(false), EXIT_OK);
    for (source, text) in [
        ("explain", "no gpuwarden answers at http://127.0.0.1:1"),
        ("events", "no gpuwarden answers at http://127.0.0.1:1"),
        ("kernel-log", "there is no /nowhere/kern.log"),
        (
            "nvidia-smi",
            "it ended with exit status: 9, with the output: no device",
        ),
    ] {
        let view = view(&summary, source);
        assert_eq!(view.file, None);
        let problem = view.problem.as_deref().unwrap();
        assert!(problem.starts_with(text), "{problem}");
    }
    let report = view(&summary, "nvidia-bug-report");
    assert_eq!(report.problem.as_deref(), Some("it was killed after 1 s"));
    assert_eq!(report.cut.as_deref(), Some("written until it was killed"));
    let half = fs::read_to_string(directory.join(report.file.as_ref().unwrap())).unwrap();
    assert_eq!(half, "half\n");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);

    // A collection without any file has a summary.
    scene.args.host_root = Some(scene.programs.path().to_owned());
    scene.args.directory = scene.directory.path().join("other");
    let (summary, directory) = scene.collect(MAX_TOTAL).await;
    let report = view(&summary, "nvidia-bug-report");
    assert!(
        report
            .problem
            .as_ref()
            .unwrap()
            .starts_with("there is no nvidia-bug-report.sh")
    );
    assert_eq!(summary.exit_code(false), EXIT_UNHEALTHY);
    assert!(directory.join(SUMMARY).exists());
}

#[tokio::test]
async fn what_is_too_large_is_cut_and_the_whole_is_bounded() {
    const ROOM: u64 = 300_000;
    let scene = Scene::new();
    let script = format!("{LIMITED}i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done");
    scene.program("nvidia-smi", &script);
    let script = format!("{LIMITED}{REPORT}yes > \"$out\"; exit 0");
    scene.program("nvidia-bug-report.sh", &script);
    let (summary, directory) = scene.collect(ROOM).await;
    assert_eq!(view(&summary, "nvidia-smi").cut, None);
    let report = view(&summary, "nvidia-bug-report");
    let cut = format!("the first {} bytes", report.bytes);
    assert_eq!((report.cut.as_ref(), &report.problem), (Some(&cut), &None));
    let bytes: u64 = summary.sources.iter().map(|one| one.bytes).sum();
    assert_eq!(bytes, ROOM);
    let file = report.file.as_ref().unwrap();
    assert_eq!(size(&directory.join(file)), report.bytes);

    // One file uses up the bytes of all.
    let mut again = Scene::new();
    again.args.kernel_log = scene.args.kernel_log.clone();
    again.program("nvidia-smi", &format!("{LIMITED}exec yes"));
    again.program("nvidia-bug-report.sh", &script);
    let (summary, _) = again.collect(5_000).await;
    let (smi, report) = (
        view(&summary, "nvidia-smi"),
        view(&summary, "nvidia-bug-report"),
    );
    assert!(smi.cut.is_some() && smi.problem.is_some() && smi.bytes < 5_000);
    assert!(
        report
            .problem
            .as_ref()
            .unwrap()
            .starts_with("the other files have used up")
    );
}

#[tokio::test]
async fn a_server_that_takes_nothing_is_told_and_is_a_failure() {
    let server = Server::start("507 Insufficient Storage").await;
    let mut scene = Scene::new();
    scene.args.upload = Some(server.url.clone());
    let (summary, directory) = scene.collect(MAX_TOTAL).await;
    let log = view(&summary, "kernel-log");
    assert!(!log.uploaded && directory.join("kernel.log").exists());
    let problem = log.upload_problem.as_deref();
    assert_eq!(problem, Some("the server answers 507 Insufficient Storage"));
    assert_eq!(summary.exit_code(true), EXIT_UNHEALTHY);
    assert_eq!(summary.exit_code(false), EXIT_OK);
}

#[test]
fn an_address_that_cannot_be_meant_is_refused_and_not_repeated() {
    for address in [
        "files.example/upload",
        "https://files.example",
        "http://me:hush@files.example",
        "http://files.example/?key=hush",
        "http://",
    ] {
        let error = Uploader::new(address)
            .err()
            .map(|error| format!("{error:#}"));
        let error = error.unwrap();
        assert!(
            error.starts_with("--upload") && !error.contains("hush"),
            "{error}"
        );
    }
}
