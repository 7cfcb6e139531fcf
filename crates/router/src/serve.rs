//! Starts and stops the router: its threads and accept loops.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use forebay_api::{BackendUrl, UrlError};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

use crate::backend::Backend;
use crate::config::RouterConfig;
use crate::link::Idle;
use crate::moves;
use crate::pairs::{Duty, faults};
use crate::registry::{Registry, Source};
use crate::service::answer;
use crate::shared::{Fuse, Shared, Worker};
use crate::sources::{end_leases, follow_file, follow_name, read_list};
use crate::watch::watch;

/// The time that connections may take to close after the last request.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that connections may take to close after requests were aborted.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after a failed accept, which usually fails for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The interval at which idle connections are checked.
const PRUNE: Duration = Duration::from_secs(10);
/// The longest wait for the first health checks.
const FIRST_CHECKS: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);

/// The reason why a router does not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// No backends are configured, and none can register.
    #[error(
        "no backends: --backends, --backends-file, --backends-dns or --registration-key is needed"
    )]
    NoBackends,
    /// A configured URL is not the URL of a backend.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The configured servers cannot form pairs.
    #[error("{0}")]
    Pairs(String),
    /// The file of backends cannot be read.
    #[error("the file of backends: {0}")]
    File(String),
    /// The system can't start a thread, or the listener fails.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A running router.
pub struct Router {
    shared: Arc<Shared>,
    stop: watch::Sender<Stage>,
    threads: Vec<std::thread::JoinHandle<()>>,
    /// Runs the router's own requests to backends, such as health checks.
    watching: Runtime,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Serving,
    Closing,
    /// Running requests are aborted.
    Cutting,
}

impl Router {
    /// Starts the threads. Connections are accepted after the first health check of every named
    /// backend.
    ///
    /// # Errors
    /// The configuration is invalid, or the system can't start threads.
    pub fn start(config: RouterConfig, listener: TcpListener) -> Result<Self, StartError> {
        let sources = config.sources.clone();
        let urls: Result<Vec<_>, _> =
            sources.urls.iter().map(|url| BackendUrl::parse(url)).collect();
        let (urls, named) = (urls?, sources.file.is_some() || !sources.dns.is_empty());
        let pairs = config.pairs.named()?;
        if urls.is_empty() && pairs.is_empty() && !named && sources.registration_key.is_none() {
            return Err(StartError::NoBackends);
        }
        let twice = |(at, (url, _)): (usize, &(BackendUrl, Duty))| {
            let before = pairs[..at].iter().any(|(other, _)| other == url);
            before.then(|| StartError::Pairs(format!("{} is named twice", url.url())))
        };
        if let Some(error) = pairs.iter().enumerate().find_map(twice) {
            return Err(error);
        }
        if let Some(file) = &sources.file {
            read_list(file).map_err(StartError::File)?;
        }
        let watching = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("watch")
            .enable_all()
            .build()?;
        let shared = shared(config, watching.handle().clone());
        let whole = urls.into_iter().map(|url| (url, Duty::Whole));
        shared.registry.name(Source::Flags, whole.chain(pairs).collect());
        if let Some(file) = sources.file {
            watching.spawn(fused(&shared, follow_file(Arc::clone(&shared), file)));
        }
        for name in sources.dns {
            watching.spawn(fused(&shared, follow_name(Arc::clone(&shared), name)));
        }
        watching.spawn(fused(&shared, end_leases(Arc::clone(&shared))));
        if shared.moves() {
            watching.spawn(fused(&shared, moves::follow(Arc::clone(&shared))));
        }
        watching.block_on(first_checks(&shared));
        if let Some(fault) = faults(&shared.registry.current()).into_iter().next() {
            return Err(StartError::Pairs(fault));
        }

        listener.set_nonblocking(true)?;
        let stop = watch::Sender::new(Stage::Serving);
        let mut threads = Vec::new();
        for _ in 0..shared.config.threads.max(1) {
            let worker = Arc::new(Worker { shared: Arc::clone(&shared), idle: Idle::default() });
            let (listener, stages) = (listener.try_clone()?, stop.subscribe());
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let fuse = Fuse(Arc::clone(&shared));
            let run = move || {
                let _fuse = fuse;
                if let Err(error) = runtime.block_on(work(&worker, listener, stages)) {
                    tracing::error!(%error, "a thread of the router cannot listen");
                }
            };
            threads.push(std::thread::Builder::new().name("route".into()).spawn(run)?);
        }
        Ok(Self { shared, stop, threads, watching })
    }

    /// Waits until a part of the router has panicked. Panics of the tasks of single requests do not
    /// count.
    pub async fn broken(&self) {
        // The sender is part of `self`, so waiting cannot fail.
        let _ = self.shared.broken.subscribe().wait_for(|&broken| broken).await;
    }

    /// Refuses new requests, and lets running ones finish until the drain timeout or until `hurry`
    /// is ready. Then aborts the rest and stops. Returns false if a part of the router has
    /// panicked.
    pub fn stop(self, hurry: impl Future<Output = ()>) -> bool {
        self.shared.draining.store(true, Ordering::Release);
        let limit = self.shared.config.drain_timeout;
        let stage = self.watching.block_on(async {
            tokio::select! {
                () = self.shared.idle() => Stage::Closing,
                () = sleep(limit) => {
                    tracing::warn!("requests are still running after the drain timeout: ending them");
                    self.shared.cut.send_replace(true);
                    Stage::Closing
                }
                () = hurry => {
                    tracing::warn!("told to stop at once: ending the requests that are still running");
                    self.shared.cut.send_replace(true);
                    Stage::Cutting
                }
            }
        });
        self.stop.send_replace(stage);
        for thread in self.threads {
            // A panicked thread has printed its panic and dropped its fuse.
            let _ = thread.join();
        }
        self.watching.shutdown_timeout(Duration::from_secs(1));
        !*self.shared.broken.borrow()
    }
}

/// Wraps a task without which the router can't run, so that its panic is reported.
fn fused(
    shared: &Arc<Shared>,
    work: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = ()> + Send + 'static {
    let fuse = Fuse(Arc::clone(shared));
    async move {
        let _fuse = fuse;
        work.await;
    }
}

/// Creates the shared state. New backends are watched by tasks of `runtime`.
fn shared(config: RouterConfig, runtime: Handle) -> Arc<Shared> {
    let whole: Arc<OnceLock<Weak<Shared>>> = Arc::default();
    let later = Arc::clone(&whole);
    let added = move |backend: &Arc<Backend>| {
        if let Some(shared) = later.get().and_then(Weak::upgrade) {
            runtime.spawn(fused(&shared.clone(), watch(shared, Arc::clone(backend))));
        }
    };
    let accounting = config.watch.accounting();
    let registry = Registry::new(accounting, config.breaker, Box::new(added));
    let shared = Arc::new(Shared::new(config, registry));
    // `set` can't fail, because this is the only call. The list of backends is filled afterwards.
    let _ = whole.set(Arc::downgrade(&shared));
    shared
}

/// Waits until all listed backends are up or faulty, for a limited time.
async fn first_checks(shared: &Shared) {
    let up = async {
        let is_known = |backend: &Arc<Backend>| backend.is_up() || backend.fault().is_some();
        while !shared.registry.current().iter().all(is_known) {
            sleep(POLL).await;
        }
    };
    if timeout(FIRST_CHECKS, up).await.is_err() {
        tracing::warn!("not all backends are up");
    }
}

/// Serves the connections of one thread.
async fn work(
    worker: &Arc<Worker>,
    listener: TcpListener,
    mut stages: watch::Receiver<Stage>,
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let graceful = GracefulShutdown::new();
    let mut tasks = JoinSet::new();
    let mut pruning = interval(PRUNE);
    loop {
        tokio::select! {
            // The sender lives until this thread has ended.
            _ = stages.wait_for(|&stage| stage != Stage::Serving) => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => match Arc::clone(&worker.shared.places).try_acquire_owned() {
                    Ok(place) => { tasks.spawn(connection(worker, stream, address.ip(), place, &graceful)); }
                    Err(_) => tracing::debug!("a connection was closed: all places are taken"),
                },
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = tasks.join_next() => {}
            _ = pruning.tick() => {
                let backends = worker.shared.registry.current();
                worker.idle.prune(|id| backends.iter().any(|backend| backend.id == id));
            }
        }
    }
    drop(listener);
    let patience = match *stages.borrow() {
        Stage::Cutting => CUT_TIMEOUT,
        Stage::Serving | Stage::Closing => CLOSE_TIMEOUT,
    };
    if timeout(patience, graceful.shutdown()).await.is_err() {
        tracing::warn!("some connections did not end in time and are cut");
    }
    tasks.shutdown().await;
    Ok(())
}

fn connection(
    worker: &Arc<Worker>,
    stream: TcpStream,
    address: IpAddr,
    place: OwnedSemaphorePermit,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + Send + 'static {
    // Events are small and urgent. If this call fails, only latency suffers.
    let _ = stream.set_nodelay(true);
    let header_timeout = worker.shared.config.receive_timeout;
    let worker = Arc::clone(worker);
    let service = service_fn(move |request| {
        let worker = Arc::clone(&worker);
        async move {
            let respond = |request| answer(worker, request, address);
            Ok::<_, Infallible>(forebay_http::answer(respond, request, header_timeout).await)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .serve_connection(TokioIo::new(stream), service);
    let connection = graceful.watch(connection);
    async move {
        let _place = place;
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}
