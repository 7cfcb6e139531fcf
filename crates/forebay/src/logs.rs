//! The destinations of log lines and spans.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::{Context, Result};
use forebay_server::Guard;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::warn;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use crate::flags::{LineFlags, LogFormat, visible_keys};
use crate::lines::Lines;

/// Keeps the span exporter running. Dropping this sends the last spans and writes the last lines.
pub(crate) struct Logs {
    spans: Option<SdkTracerProvider>,
    lines: Lines,
}

impl Logs {
    /// The queue of lines, for text that has to appear in order with log lines.
    pub(crate) fn lines(&self) -> &Lines {
        &self.lines
    }

    /// The number of lines that were dropped because the log thread was too slow.
    pub(crate) fn dropped(&self) -> Arc<AtomicU64> {
        self.lines.dropped()
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        if let Some(provider) = &self.spans
            && let Err(error) = provider.shutdown()
        {
            tracing::warn!("the last spans were not sent: {error}");
        }
        self.lines.finish();
    }
}

/// Logs only warnings and errors, for commands that print their results themselves.
pub(crate) fn init_warnings() -> Result<()> {
    let lines = fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(ansi());
    let lines = lines.without_time().compact().with_filter(LevelFilter::WARN);
    let subscriber = tracing_subscriber::registry().with(lines);
    subscriber.try_init().context("cannot install the log subscriber")
}

/// Logs from level `info` on, with times, for a process that keeps running.
pub(crate) fn init_plain() -> Result<()> {
    let lines = fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(ansi());
    let lines = lines.compact().with_filter(LevelFilter::INFO);
    let subscriber = tracing_subscriber::registry().with(lines);
    subscriber.try_init().context("cannot install the log subscriber")
}

fn ansi() -> bool {
    std::io::stderr().is_terminal()
}

/// Installs the process's subscriber, and writes panics as log lines. Spans are sent to `endpoint`;
/// `guard` supervises the writing thread.
pub(crate) fn init(flags: &LineFlags, endpoint: Option<&str>, guard: &Guard) -> Result<Logs> {
    let filter = EnvFilter::try_new(&flags.log_level).context("--log-level")?;
    let ansi = ansi();
    let (written, _) = Lines::start(std::io::stderr(), guard)?;
    written.take_panics();
    let lines = fmt::layer().with_writer(written.clone()).with_target(false).with_ansi(ansi);
    let lines = match flags.log_format {
        LogFormat::Text => lines.compact().boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let spans = match endpoint {
        None => None,
        Some(endpoint) => {
            let exporter = SpanExporter::builder()
                .with_http()
                .with_endpoint(endpoint)
                .build()
                .context("--otlp-traces-endpoint")?;
            Some(
                SdkTracerProvider::builder()
                    .with_batch_exporter(exporter)
                    .with_resource(Resource::builder().with_service_name("forebay").build())
                    .build(),
            )
        }
    };
    let export = spans.as_ref().map(|provider| {
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("forebay"));
        layer.with_filter(LevelFilter::INFO)
    });
    tracing_subscriber::registry()
        .with(export)
        .with(lines.with_filter(filter))
        .try_init()
        .context("cannot install the log subscriber")?;
    Ok(Logs { spans, lines: written })
}

/// Warns about keys that other users of the machine can read.
pub(crate) fn warn_of_visible_keys() {
    let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let visible = visible_keys(arguments);
    if !visible.is_empty() {
        let flags = visible.join(", ");
        warn!("{flags}: the list of processes shows the key; a file or the environment does not");
    }
}
