//! The data that a router and a brain exchange beside a client's request: request headers, response
//! headers, and comments in streams.
//!
//! A brain sends these only to peers that send a [`ROUTER_HEADER`].

use std::io::Write;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The request header that identifies a router and its dispatch: [`RouterTag`].
pub const ROUTER_HEADER: &str = "x-forebay-router";
/// The request header with a router's key. A brain with a router key reveals its load and blocks
/// only to senders of the key.
pub const ROUTER_KEY_HEADER: &str = "x-forebay-router-key";
/// The response header with the number of backends that died while they computed the request. The
/// request must not be sent again.
pub const DEATHS_HEADER: &str = "x-forebay-deaths";
/// The header of RFC 9218 that sets a request's priority, with the urgency that the RFC reserves
/// for background work.
pub const BACKGROUND: (&str, &str) = ("priority", "u=7");
/// The request header that names the prefill server from which a decode server is to get the
/// prompt's blocks. As a response header it contains the outcome: [`PREFILL_CAME`] or
/// [`PREFILL_FAILED`]. It is absent if the prefill server was not used.
pub const PREFILL_HEADER: &str = "x-forebay-prefill";
/// The value of [`PREFILL_HEADER`] if blocks of the prompt came from the prefill server.
pub const PREFILL_CAME: &str = "came";
/// The value of [`PREFILL_HEADER`] if the prefill server failed.
pub const PREFILL_FAILED: &str = "failed";
/// The response header with a [`LoadReport`].
pub const LOAD_HEADER: &str = "x-forebay-load";
/// The response header with the id of a stored response, which clients can continue.
pub const RESPONSE_HEADER: &str = "x-forebay-response";
/// The header with the name of a stream. In a response: another brain can continue this stream. In
/// a request: continue this stream.
pub const STREAM_HEADER: &str = "x-forebay-stream";
/// The request header of a continued stream: the number of bytes of token ids that precede the
/// client's body.
pub const RESUME_HEADER: &str = "x-forebay-resume";
/// The response header with the names of some blocks of the prompt: [`sample_blocks`].
pub const BLOCKS_HEADER: &str = "x-forebay-blocks";
/// The prefix of a comment in a stream.
pub const COMMENT: &[u8] = b": forebay ";
/// The largest number of names in [`BLOCKS_HEADER`].
pub const MAX_SAMPLED_BLOCKS: usize = 32;

/// The error for a header or comment that is missing or malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("`{0}` is missing or malformed")]
pub struct PeerError(pub &'static str);

/// `key=value` pairs joined with semicolons.
struct Pairs<'a>(&'a str);

impl Pairs<'_> {
    fn get<T: FromStr>(&self, name: &'static str) -> Result<T, PeerError> {
        self.find(name).and_then(|value| value.parse().ok()).ok_or(PeerError(name))
    }

    fn find(&self, name: &str) -> Option<&str> {
        let mut pairs = self.0.split(';').filter_map(|pair| pair.split_once('='));
        pairs.find_map(|(key, value)| (key == name).then_some(value))
    }
}

/// The data that a router sends with each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterTag {
    /// The router's random id, chosen at its start.
    pub router: u64,
    /// The sequence number of this dispatch to this backend, from 1.
    pub seq: u64,
    /// The sequence number of the first dispatch that may still be in transit. All earlier
    /// dispatches have arrived, or never will.
    pub floor: u64,
    /// The seed for requests that have none, so that another brain samples the same tokens.
    pub seed: u64,
    /// True if the response should name the prompt's blocks.
    pub blocks: bool,
}

impl RouterTag {
    /// Formats the value of [`ROUTER_HEADER`].
    #[must_use]
    pub fn encode(&self) -> String {
        let Self { router, seq, floor, seed, blocks } = self;
        let blocks = u8::from(*blocks);
        format!("router={router};seq={seq};floor={floor};seed={seed};blocks={blocks}")
    }

    /// Parses the value of [`ROUTER_HEADER`].
    ///
    /// # Errors
    /// A field is missing, or is not a number.
    pub fn decode(text: &str) -> Result<Self, PeerError> {
        let pairs = Pairs(text);
        Ok(Self {
            router: pairs.get("router")?,
            seq: pairs.get("seq")?,
            floor: pairs.get("floor")?,
            seed: pairs.get("seed")?,
            blocks: pairs.get::<u8>("blocks")? != 0,
        })
    }
}

/// A brain's load at one moment, as reported to one router.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// A random number chosen at the brain's start. Sequence numbers of another epoch are
    /// meaningless.
    pub epoch: u64,
    /// The sequence number of this report; a later report has a larger one.
    pub at: u64,
    /// The sequence number of a dispatch. This router's dispatches up to this number are counted in
    /// the report, or have ended.
    pub seen: u64,
    /// Requests of this router that have not ended.
    pub own: u32,
    /// Running requests of all clients, streamed or not.
    pub requests: u32,
    /// Choices that have a slot.
    pub running: u32,
    /// Choices that wait for a slot.
    pub waiting: u32,
    /// The remaining work in tokens: prompt tokens to compute, and an estimate of the tokens to
    /// generate.
    pub tokens: u64,
    /// Hot pages that no request uses: free pages, and pages with cached blocks.
    pub pages_free: u64,
    /// Prompt tokens that are computed before those of a new request, averaged over the replicas.
    #[serde(default)]
    pub ahead: u64,
    /// An id of the brain's hash for block names. Brains with the same id give equal names to equal
    /// content.
    #[serde(default)]
    pub names: u64,
}

impl LoadReport {
    /// Appends the report in the format of [`LOAD_HEADER`] and of comments.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let Self { epoch, at, seen, own, requests, running, waiting, tokens, .. } = self;
        let Self { pages_free, ahead, names, .. } = self;
        // Writing to a Vec cannot fail.
        let _ = write!(
            out,
            "epoch={epoch};at={at};seen={seen};own={own};requests={requests};running={running};\
             waiting={waiting};tokens={tokens};pages={pages_free};ahead={ahead};names={names}"
        );
    }

    /// Parses the output of [`LoadReport::encode`].
    ///
    /// # Errors
    /// A field is missing, or is not a number.
    pub fn decode(text: &str) -> Result<Self, PeerError> {
        let pairs = Pairs(text);
        Ok(Self {
            epoch: pairs.get("epoch")?,
            at: pairs.get("at")?,
            seen: pairs.get("seen")?,
            own: pairs.get("own")?,
            requests: pairs.get("requests")?,
            running: pairs.get("running")?,
            waiting: pairs.get("waiting")?,
            tokens: pairs.get("tokens")?,
            pages_free: pairs.get("pages")?,
            // Older brains do not send these fields.
            ahead: pairs.get("ahead").unwrap_or(0),
            names: pairs.get("names").unwrap_or(0),
        })
    }
}

/// A router's dispatch that waits in a brain's queue. It was not admitted yet, so the router can
/// send it elsewhere without loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedDispatch {
    /// The sequence number of the dispatch.
    pub seq: u64,
    /// The number of tokens of its prompts.
    pub tokens: u64,
}

/// A comment in a stream. The stream is complete up to the comment. Another brain can continue the
/// stream from these bytes and the token ids of all comments so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comment<'a> {
    /// The token ids since the last comment, in decimal, joined with commas.
    pub ids: &'a str,
    /// The brain's load; `None` in most comments, because the load is only reported every few
    /// milliseconds.
    pub report: Option<LoadReport>,
}

/// Appends a comment, with its line end.
pub fn write_comment(ids: &[i32], report: Option<&LoadReport>, out: &mut Vec<u8>) {
    out.extend_from_slice(COMMENT);
    write_ids(ids, out);
    if let Some(report) = report {
        out.push(b' ');
        report.encode(out);
    }
    out.push(b'\n');
}

/// Parses a line that begins with [`COMMENT`]. `line` has no line end.
#[must_use]
pub fn read_comment(line: &[u8]) -> Option<Comment<'_>> {
    let text = std::str::from_utf8(line.strip_prefix(COMMENT)?).ok()?;
    let (ids, report) = match text.split_once(' ') {
        None => (text, None),
        Some((ids, report)) => (ids, LoadReport::decode(report).ok()),
    };
    Some(Comment { ids, report })
}

fn write_ids(ids: &[i32], out: &mut Vec<u8>) {
    for (index, id) in ids.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        // Writing to a Vec cannot fail.
        let _ = write!(out, "{id}");
    }
}

/// Parses ids in decimal, joined with commas.
///
/// # Errors
/// An id is not a number.
pub fn read_ids(text: &str) -> Result<Vec<i32>, PeerError> {
    let ids = text.split(',').filter(|part| !part.is_empty());
    ids.map(|id| id.parse().map_err(|_| PeerError(RESUME_HEADER))).collect()
}

/// The name of a stream. A brain that continues the stream uses this name in its chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamName {
    /// The response's id.
    pub id: String,
    /// When the stream was created, in seconds since 1970.
    pub created: u64,
}

impl StreamName {
    /// Formats the value of [`STREAM_HEADER`].
    #[must_use]
    pub fn encode(&self) -> String {
        format!("{};{}", self.created, self.id)
    }

    /// Parses the value of [`STREAM_HEADER`].
    ///
    /// # Errors
    /// The creation time is missing.
    pub fn decode(text: &str) -> Result<Self, PeerError> {
        let (created, id) = text.split_once(';').ok_or(PeerError(STREAM_HEADER))?;
        let created = created.parse().map_err(|_| PeerError(STREAM_HEADER))?;
        Ok(Self { id: id.to_owned(), created })
    }
}

/// Samples a chain of block names: at most [`MAX_SAMPLED_BLOCKS`] of them, evenly spaced, including
/// the last. So half a kilobyte of header shows how much of a prompt is cached.
#[must_use]
pub fn sample_blocks(names: &[u64]) -> Vec<u64> {
    let count = names.len().min(MAX_SAMPLED_BLOCKS);
    (1..=count).map(|part| names[part * names.len() / count - 1]).collect()
}

/// Formats the value of [`BLOCKS_HEADER`]: hexadecimal names joined with commas.
#[must_use]
pub fn encode_blocks(names: &[u64]) -> String {
    names.iter().map(|name| format!("{name:x}")).collect::<Vec<_>>().join(",")
}

/// Parses the value of [`BLOCKS_HEADER`].
///
/// # Errors
/// A name is not a hexadecimal number.
pub fn decode_blocks(text: &str) -> Result<Vec<u64>, PeerError> {
    let names = text.split(',').filter(|part| !part.is_empty());
    names.map(|name| u64::from_str_radix(name, 16).map_err(|_| PeerError(BLOCKS_HEADER))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(
            numbers in prop::array::uniform7(any::<u64>()),
            small in prop::array::uniform4(any::<u32>()),
            ids in prop::collection::vec(any::<i32>(), 0..9),
            blocks: bool,
            with_report: bool,
            id in "[ -~]{0,20}",
        ) {
            let [epoch, at, seen, tokens, pages_free, ahead, names] = numbers;
            let [own, requests, running, waiting] = small;
            let tag = RouterTag { router: epoch, seq: at, floor: seen, seed: tokens, blocks };
            prop_assert_eq!(RouterTag::decode(&tag.encode()), Ok(tag));
            let report = LoadReport { epoch, at, seen, own, requests, running, waiting, ..LoadReport::default() };
            let report = LoadReport { tokens, pages_free, ahead, names, ..report };
            let report = with_report.then_some(report);
            let mut line = Vec::new();
            write_comment(&ids, report.as_ref(), &mut line);
            prop_assert_eq!(line.pop(), Some(b'\n'));
            let comment = read_comment(&line).unwrap();
            prop_assert_eq!(comment.report, report);
            prop_assert_eq!(read_ids(comment.ids), Ok(ids));
            let name = StreamName { id, created: at };
            prop_assert_eq!(StreamName::decode(&name.encode()), Ok(name));
            prop_assert_eq!(decode_blocks(&encode_blocks(&numbers)), Ok(numbers.to_vec()));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            let _ = (RouterTag::decode(&text), LoadReport::decode(&text), StreamName::decode(&text));
            let _ = (read_comment(text.as_bytes()), read_ids(&text), decode_blocks(&text));
        }

        #[test]
        fn samples_are_in_order_and_reach_the_end(length in 0usize..200) {
            let names: Vec<u64> = (0..length as u64).collect();
            let sampled = sample_blocks(&names);
            prop_assert_eq!(sampled.len(), length.min(MAX_SAMPLED_BLOCKS));
            prop_assert!(sampled.is_sorted_by(|a, b| a < b));
            prop_assert_eq!(sampled.last(), names.last());
        }
    }

    #[test]
    fn keys_that_a_newer_peer_adds_are_skipped() {
        let tag = RouterTag::decode("router=1;new=x;seq=2;floor=1;seed=3;blocks=0").unwrap();
        assert_eq!((tag.seq, tag.blocks), (2, false));
        assert_eq!(RouterTag::decode("router=1;seq=x"), Err(PeerError("seq")));
    }
}
