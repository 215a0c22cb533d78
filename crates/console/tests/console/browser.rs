//! Headless Chromium, driven over its remote debugging pipe: file descriptors 3 and 4, with NUL
//! bytes between the JSON messages.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Longest wait for one response of the browser, including its start.
const ENOUGH: Duration = Duration::from_secs(60);

pub(crate) struct Browser {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    last_id: u64,
    session: String,
    /// Exceptions of the page, and errors in its console.
    pub(crate) complaints: Vec<String>,
    _profile: tempfile::TempDir,
}

// === impl Browser ===

impl Browser {
    /// Starts a browser with an empty page of 1280 by 900.
    pub(crate) async fn start(program: &Path) -> Self {
        let profile = tempfile::tempdir().unwrap();
        // The shell moves the pipes to the descriptors that the browser expects.
        let mut child = Command::new("sh")
            .args([
                "-c",
                "exec \"$@\" 3<&0 4>&1 >/dev/null 2>&1 </dev/null",
                "sh",
            ])
            .arg(program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        let mut browser = Self {
            child,
            to,
            from,
            last_id: 0,
            session: String::new(),
            complaints: Vec::new(),
            _profile: profile,
        };
        let target = browser
            .call("Target.createTarget", json!({"url": "about:blank"}))
            .await;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach).await;
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({})).await;
        }
        browser.size(1280, 900).await;
        browser
    }

    pub(crate) async fn open(&mut self, url: &str) {
        let answer = self.call("Page.navigate", json!({"url": url})).await;
        assert!(answer["errorText"].is_null(), "{answer}");
        self.wait_until("document.readyState === 'complete'").await;
    }

    pub(crate) async fn size(&mut self, width: u32, height: u32) {
        let metrics = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600,
        });
        self.call("Emulation.setDeviceMetricsOverride", metrics)
            .await;
    }

    /// Sets the preferred colour scheme: `light` or `dark`.
    pub(crate) async fn colours(&mut self, scheme: &str) {
        let feature = json!({"name": "prefers-color-scheme", "value": scheme});
        self.call("Emulation.setEmulatedMedia", json!({"features": [feature]}))
            .await;
    }

    /// Evaluates an expression in the page.
    pub(crate) async fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", parameters).await;
        assert!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {answer}"
        );
        answer["result"]["value"].clone()
    }

    /// Waits until an expression in the page is true.
    pub(crate) async fn wait_until(&mut self, expression: &str) {
        let start = std::time::Instant::now();
        while self.evaluate(expression).await != true {
            if start.elapsed() > ENOUGH {
                let text = self.evaluate("document.body.innerText").await;
                panic!(
                    "{expression} is not true of this page: {text:#} {:?}",
                    self.complaints
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Writes a screenshot of the whole page, as PNG in base64.
    pub(crate) async fn screenshot(&mut self, file: &Path) {
        let parameters = json!({"format": "png", "captureBeyondViewport": true});
        let answer = self.call("Page.captureScreenshot", parameters).await;
        std::fs::write(file, answer["data"].as_str().unwrap()).unwrap();
    }

    pub(crate) async fn close(mut self) {
        self.call("Browser.close", json!({})).await;
        drop((self.to, self.from));
        tokio::time::timeout(ENOUGH, self.child.wait())
            .await
            .unwrap()
            .unwrap();
    }

    async fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let id = self.last_id;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() && !method.starts_with("Browser.") {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).await.unwrap();
        let answer = tokio::time::timeout(ENOUGH, self.answer(id));
        answer
            .await
            .unwrap_or_else(|_| panic!("no answer to {method}"))
    }

    async fn answer(&mut self, id: u64) -> Value {
        loop {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).await.unwrap();
            assert_eq!(bytes.pop(), Some(0), "the browser hung up");
            let mut message: Value = serde_json::from_slice(&bytes).unwrap();
            if message["id"] == id {
                assert!(message["error"].is_null(), "{message}");
                return message["result"].take();
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let parameters = &message["params"];
        let complaint = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => &parameters["exceptionDetails"],
            Some("Log.entryAdded") if parameters["entry"]["level"] == "error" => {
                &parameters["entry"]
            }
            _ => return,
        };
        self.complaints.push(complaint.to_string());
    }
}
