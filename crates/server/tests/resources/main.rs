//! The resources of requests: the bytes that are allocated, and the work that is done without
//! yielding to other tasks.
//!
//! The cases come from the table of limits (`forebay_api::limits`): every parameter of every route
//! gets large values of every type. A body may use four times its bytes until its prompt is
//! tokenised, and 160 times its bytes after that, with a tolerance of 8 MiB. All requests together
//! may use the budget.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod answers;
mod bytes;
mod cases;
#[path = "../http/client.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod client;
mod counting;
#[path = "../http/fake.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod fake;
mod grammars;
#[path = "../http/memory.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod memory;
mod pixels;
mod shares;
mod work;

use tokio::sync::{Mutex, MutexGuard};

/// Bytes that a body may use beyond its multiple.
pub(crate) const SLACK: usize = 8 << 20;

/// Returns the bytes that are charged for requests at present.
pub(crate) async fn charged(server: &fake::TestServer) -> usize {
    let metrics = server.get("/metrics").await.1;
    let line = metrics.lines().find(|line| line.starts_with("forebay:request_bytes_in_flight{"));
    let number: f64 = line.unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    number as usize
}

/// Locks out other tests while one measures, because the allocator counts the whole process.
pub(crate) async fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::const_new(());
    ALONE.lock().await
}
