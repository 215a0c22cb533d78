//! `gpuwarden decode`: faults in kernel log text.

use domain::decode::{Finding, KernelLogDecoder};
use host::kernel_log::{Event, Spec};
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{DecodeArgs, Format};
use crate::output::{self, Colour};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// Records read at once.
const BATCH: usize = 1_024;

#[derive(Serialize)]
struct Found {
    /// Line number in the input, from 1.
    line: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<Timestamp>,
    check: &'static str,
    code: String,
    pci: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_uuid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    fatal: bool,
    recommended_action: String,
    meaning: &'static str,
    message: String,
}

pub(super) async fn execute(args: &DecodeArgs) -> anyhow::Result<u8> {
    let spec = match args.file.as_str() {
        "-" => Spec::Stdin,
        path => Spec::FileOnce(path.into()),
    };
    let mut source = host::kernel_log::open(&spec, None)?;
    let mut decoder = KernelLogDecoder::default();
    let (mut fatal, mut newest) = (false, Timestamp::UNIX_EPOCH);
    let mut all = Vec::new();
    let mut events = Vec::new();
    'input: loop {
        source.next_batch(&mut events, BATCH).await?;
        for event in events.drain(..) {
            match event {
                Event::End => break 'input,
                Event::Record(record) => {
                    newest = record.wall.unwrap_or(newest);
                    let Some(finding) = decoder.line(record.text.as_bytes(), newest) else {
                        continue;
                    };
                    fatal |= finding.fatal;
                    let found =
                        Found::of(finding, record.line.unwrap_or(0), record.wall, record.text);
                    match args.output.output {
                        Format::Text | Format::Wide => {
                            output::line(&found.text(args.output.output))?;
                        }
                        Format::Json => output::line(&serde_json::to_string(&found)?)?,
                        Format::Yaml => all.push(found),
                    }
                }
                _ => {}
            }
        }
    }
    if args.output.output == Format::Yaml {
        output::structured(Format::Yaml, &all)?;
    }
    Ok(if fatal { EXIT_UNHEALTHY } else { EXIT_OK })
}

// === impl Found ===

impl Found {
    fn of(finding: Finding, line: u64, time: Option<Timestamp>, message: String) -> Self {
        Self {
            line,
            time,
            check: finding.check(),
            code: finding.code(),
            recommended_action: finding.action_name(),
            pci: finding.pci,
            gpu_uuid: finding.gpu_uuid,
            process: finding.process,
            pid: finding.pid,
            fatal: finding.fatal,
            meaning: finding.meaning,
            message,
        }
    }

    fn text(&self, format: Format) -> String {
        let word = if self.fatal {
            output::colour("FATAL", Colour::Red)
        } else {
            output::colour("minor", Colour::Grey)
        };
        let code = if self.check == contract::keys::CHECK_XID {
            format!("XID {}", self.code)
        } else {
            self.code.clone()
        };
        let mut text = format!(
            "{}: {word} {code} on {}: {} ({})",
            self.line, self.pci, self.meaning, self.recommended_action
        );
        if let Some(uuid) = &self.gpu_uuid {
            text.push_str(&format!(", {uuid}"));
        }
        if let Some(process) = &self.process {
            text.push_str(&format!(", process {}", output::plain(process)));
        }
        if let Some(pid) = self.pid {
            text.push_str(&format!(", pid {pid}"));
        }
        if format == Format::Wide {
            text.push_str(&format!("\n    {}", output::plain(&self.message)));
        }
        text
    }
}
