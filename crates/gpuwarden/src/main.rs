//! The `gpuwarden` binary: parses the arguments and wires the crates together for each role.

mod act;
mod agent;
mod controller;
mod gpus;
mod janitor_provider;
mod lead;
mod metric_reference;
mod parts;
mod places;
mod run;
mod tasks;
mod webhook;

use std::process::ExitCode;

use cli::Parsed;

/// jemalloc, because the C library's allocator keeps the memory of a burst of faults in an arena
/// per thread, and a burst takes a quarter more CPU time with it. Other architectures keep the C
/// library's: jemalloc is built for one page size, and arm64 kernels have several. The options
/// of jemalloc are in `.cargo/config.toml`.
#[cfg(target_arch = "x86_64")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    match cli::parse() {
        Parsed::Done(code) => code,
        Parsed::Run(settings) => start(true, run::run(*settings)),
        Parsed::Agent(settings) => start(true, agent::run(*settings)),
        Parsed::Controller(settings) => start(true, controller::run(*settings)),
        Parsed::Webhook(settings) => start(true, webhook::run(*settings)),
        Parsed::JanitorProvider(settings) => start(true, janitor_provider::run(*settings)),
        Parsed::GpuProbe(settings) => match host::gpu_probe::run(&settings) {
            Ok(()) => ExitCode::SUCCESS,
            // The parent process is gone, and with it the reader of any message.
            Err(_) => ExitCode::FAILURE,
        },
        Parsed::CheckWorker => match checks::worker::run() {
            Ok(()) => ExitCode::SUCCESS,
            // As above.
            Err(_) => ExitCode::FAILURE,
        },
        Parsed::MetricReference => cli::report(metric_reference::print()),
        Parsed::Client(client) => start(false, async { Ok(cli::execute(*client).await) }),
    }
}

/// Runs a future to completion. The server roles get a thread per core, up to four: more only
/// add memory. A client runs on the calling thread.
fn start(threads: bool, future: impl Future<Output = anyhow::Result<ExitCode>>) -> ExitCode {
    let mut builder = if threads {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        builder
            .worker_threads(cores.min(4))
            // Policy rules are evaluated recursively. Only the used part of a stack takes
            // memory.
            .thread_stack_size(8 * 1024 * 1024)
            .max_blocking_threads(16);
        builder
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    let ended = match builder.enable_all().build() {
        Ok(runtime) => runtime.block_on(future),
        Err(error) => Err(anyhow::Error::new(error).context("start the runtime")),
    };
    cli::report(ended)
}
