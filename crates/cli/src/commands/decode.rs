//! `gpuwarden decode`: finds faults in kernel log text.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use contract::{ProcessingStrategy, keys};
use diagnosis::catalog::Text;
use diagnosis::decode::{Finding, KernelLogDecoder};
use host::kernel_log::{Event, KernelLogRecord, KernelLogSpec};
use jiff::Timestamp;
use serde::Serialize;

use super::garbled::GarbledLines;
use super::no_text;
use super::progress::Progress;
use crate::args::{DecodeArgs, Format};
use crate::exit_code;
use crate::output::{self, Colour};

/// Records that are read at once.
const BATCH: usize = 1_024;

/// Output of a finding.
#[derive(Serialize)]
struct FindingView {
    /// Line number in the input, from 1.
    line: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<Timestamp>,
    check: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    healthy: bool,
    /// The device, from the line and earlier lines of the log.
    entities: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pci: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_uuid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    fatal: bool,
    recommended_action: String,
    meaning: Text,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<Text>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cancels: Vec<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    store_only: bool,
    message: String,
}

pub(super) async fn execute(args: &DecodeArgs) -> anyhow::Result<u8> {
    let mut fatal = false;
    output::even_if_unread(decode(args, &mut fatal).await)?;
    Ok(exit_code(!fatal))
}

/// Writes all findings. Sets `fatal` if one of them is.
async fn decode(args: &DecodeArgs, fatal: &mut bool) -> anyhow::Result<()> {
    let (spec, name) = match args.file.as_str() {
        "-" => (KernelLogSpec::Stdin, "standard input"),
        path => {
            no_text::refuse(Path::new(path), "gpuwarden decode")?;
            (KernelLogSpec::FileOnce(path.into()), path)
        }
    };
    let mut source = host::kernel_log::open(&spec, None)?;
    let catalog = super::catalog::load(&args.catalog)?;
    let mut decoder = KernelLogDecoder::new(Arc::new(catalog));
    let mut newest = Timestamp::UNIX_EPOCH;
    let mut garbled = GarbledLines::default();
    let mut all = Vec::new();
    let mut events = Vec::new();
    // The source has removed the prefix of each line, which is not counted.
    let (mut bytes, mut lines) = (0, 0);
    let mut progress = Progress::new(None);
    'input: loop {
        source.next_batch(&mut events, BATCH).await?;
        for event in events.drain(..) {
            match event {
                Event::End => break 'input,
                Event::Record(record) => {
                    newest = record.wall.unwrap_or(newest);
                    (bytes, lines) = (bytes + record.text.len() as u64, lines + 1);
                    progress.step(bytes, || lines);
                    super::journal_json::refuse(record.text.as_bytes(), name)?;
                    for finding in decoder.record(record.text.as_bytes(), newest) {
                        *fatal |= finding.fatal;
                        let found = FindingView::of(&finding, &record);
                        progress.clear();
                        match args.output.output {
                            Format::Text | Format::Wide => {
                                output::line(&found.text(args.output.output))?;
                            }
                            Format::Json => output::line(&serde_json::to_string(&found)?)?,
                            Format::Yaml => all.push(found),
                        }
                    }
                    garbled.count(&mut decoder, name, record.line.unwrap_or(0));
                }
                _ => {}
            }
        }
    }
    progress.clear();
    if args.output.output == Format::Yaml {
        output::structured(Format::Yaml, &all)?;
    }
    GarbledLines::warn([&garbled]);
    Ok(())
}

// === impl FindingView ===

impl FindingView {
    fn of(finding: &Finding, record: &KernelLogRecord) -> Self {
        Self {
            line: record.line.unwrap_or(0),
            time: record.wall,
            check: finding.check(),
            code: finding.code(),
            healthy: finding.healthy,
            entities: finding
                .entities()
                .into_iter()
                .map(|entity| (entity.entity_type, entity.entity_value))
                .collect(),
            pci: finding.pci.clone(),
            gpu_uuid: finding.gpu_uuid.clone(),
            process: finding.process.clone(),
            pid: finding.pid,
            fatal: finding.fatal,
            recommended_action: finding.action_name(),
            meaning: finding.meaning.clone(),
            verdict: finding.basis.clone(),
            cancels: (finding.cancels.iter())
                .map(|cancelled| cancelled.code.clone())
                .collect(),
            store_only: finding.strategy == ProcessingStrategy::StoreOnly,
            message: finding.lines.as_ref().unwrap_or(&record.text).clone(),
        }
    }

    fn text(&self, format: Format) -> String {
        let word = match (self.healthy, self.fatal) {
            (true, _) => output::colour("well", Colour::Green),
            (_, true) => output::colour("FATAL", Colour::Red),
            _ => output::colour("minor", Colour::Grey),
        };
        let number = |code: &str| code.starts_with(|first: char| first.is_ascii_digit());
        let code = match (self.check, self.code.as_deref()) {
            (keys::CHECK_XID, Some(code)) if number(code) => format!("XID {code}"),
            (keys::CHECK_SXID, Some(code)) => format!("SXid {code}"),
            (_, Some(code)) => code.to_owned(),
            (_, None) => "all XIDs".to_owned(),
        };
        // The address, if there is one; a NIC may have only a name, and a GPU only its UUID.
        let named = |kind: &str| self.entities.get(kind);
        let device = self
            .pci
            .as_ref()
            .or_else(|| named(keys::ENTITY_NIC))
            .or(self.gpu_uuid.as_ref());
        let mut text = format!(
            "{}: {word} {code} on {}: {} ({})",
            self.line,
            device.map_or("this node", String::as_str),
            self.meaning,
            self.recommended_action
        );
        if let Some(link) = named(keys::ENTITY_NVLINK) {
            text.push_str(&format!(", link {link}"));
        }
        if let Some(uuid) = &self.gpu_uuid
            && Some(uuid) != device
        {
            text.push_str(&format!(", {uuid}"));
        }
        if self.store_only {
            text.push_str(", only stored");
        }
        if let Some(verdict) = &self.verdict {
            text.push_str(&format!("; {}", output::plain(verdict)));
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
