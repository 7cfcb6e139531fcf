//! The web page at `/` and the transport of its feed, for a server or a router.
//!
//! [`page`] serves the page's files, which are built from `web/` and are part of the binary.
//! [`Watchers`] opens feeds: streams of named events that end when their client disconnects.

mod feed;
mod page;

pub use feed::{Feed, FeedBody, INTERVAL, Watchers};
pub use page::page;
