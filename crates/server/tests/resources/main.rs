//! What requests take, counted: bytes that are allocated, and work that is done without letting
//! others run.
//!
//! The cases are made from the table of limits (`forebay_api::limits`): every parameter of every
//! route gets values of every shape, large ones. A body may take four times its bytes and 8 MiB
//! until its prompt is tokenised, then 160 times, and never more than the budget.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

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
mod work;

use tokio::sync::{Mutex, MutexGuard};

/// Bytes a body may take beyond its multiple.
pub(crate) const SLACK: usize = 8 << 20;

/// Held by the test that measures: the allocator counts the whole process.
pub(crate) async fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::const_new(());
    ALONE.lock().await
}
