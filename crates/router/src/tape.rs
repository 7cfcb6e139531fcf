//! Decides which part of a brain's stream may be forwarded, so that another brain can continue
//! after it.
//!
//! A comment marks that all bytes before it are complete, and lists their tokens
//! ([`forebay_api::peer::Comment`]). So bytes are forwarded up to a comment, and held back after
//! it. A brain writes an event and its comment at once, so nothing is delayed. After the last
//! events there is no comment; they are forwarded at the end of the stream.
//!
//! The held bytes are limited, both per stream and for all streams of a backend together.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use forebay_api::peer::{COMMENT, LoadReport, read_comment};
use memchr::memmem;

use crate::budget::{Budget, Held};

/// The largest number of bytes of a stream that are held after its last comment. The same limit
/// applies to its token ids.
pub(crate) const MAX_HELD: usize = 8 << 20;
/// The number of bytes that a stream may always hold, whatever other streams of its backend hold.
/// Its token ids may take as many bytes too.
pub(crate) const FREE: usize = 64 << 10;

/// Reads the stream of one client, from all brains that write it in turn.
#[derive(Debug)]
pub(crate) struct Tape {
    /// The token ids so far. `None`: there were too many, so no other brain can continue the
    /// stream.
    ids: Option<Ids>,
    /// The bytes after the last comment.
    held: BytesMut,
    /// The share of the backend's memory budget for unfinished parts.
    share: Held,
    search: Search,
    /// True if something was forwarded.
    begun: bool,
    /// True if more bytes followed a comment than may be held back.
    full: bool,
    report: Option<LoadReport>,
}

/// The ids of all tokens whose text was forwarded to the client.
#[derive(Debug)]
struct Ids {
    /// The ids in decimal, each followed by a comma.
    text: Vec<u8>,
    /// The number of bytes of `text` that come from earlier brains.
    inherited: usize,
    share: IdShare,
}

/// The memory that token ids take, charged to the brains that wrote them. The newest brain comes
/// first.
#[derive(Debug)]
pub(crate) struct IdShare {
    held: Held,
    _inherited: Option<Arc<IdShare>>,
}

impl Ids {
    /// Adds ids. Returns false if there are too many.
    fn push(&mut self, ids: &str) -> bool {
        self.text.extend_from_slice(ids.as_bytes());
        self.text.push(b',');
        let own = self.text.len() - self.inherited;
        self.text.len() <= MAX_HELD && self.share.held.hold(own.saturating_sub(FREE))
    }
}

impl Tape {
    /// Creates a tape for a new stream of a backend with this memory budget.
    pub(crate) fn new(memory: &Arc<Budget>) -> Self {
        Self::after(Vec::new(), None, memory)
    }

    /// Creates a tape that continues after these token ids, whose text was already forwarded.
    pub(crate) fn after(
        ids: Vec<u8>,
        inherited: Option<Arc<IdShare>>,
        memory: &Arc<Budget>,
    ) -> Self {
        let share = IdShare { held: Held::new(memory), _inherited: inherited };
        Self {
            ids: Some(Ids { inherited: ids.len(), text: ids, share }),
            held: BytesMut::new(),
            share: Held::new(memory),
            search: Search::default(),
            begun: false,
            full: false,
            report: None,
        }
    }

    /// Reads a chunk of the stream. Returns the bytes that may be forwarded now, perhaps none.
    pub(crate) fn push(&mut self, piece: &Bytes) -> Bytes {
        if self.held.is_empty()
            && let Some(events) = self.whole(piece)
        {
            return events;
        }
        self.held.extend_from_slice(piece);
        let mut out = BytesMut::new();
        while let Some((start, end)) = self.search.next(&self.held) {
            out.extend_from_slice(&self.held[..start]);
            let line = self.held.split_to(end);
            self.note(&line[start..end - 1]);
        }
        self.begun |= !out.is_empty();
        let held = self.held.len();
        self.full |= held > MAX_HELD || !self.share.hold(held.saturating_sub(FREE));
        out.freeze()
    }

    /// Handles the usual case without a copy: a chunk of events with one comment at the end.
    fn whole(&mut self, piece: &Bytes) -> Option<Bytes> {
        let (start, end) = Search::default().next(piece)?;
        if end != piece.len() {
            return None;
        }
        self.note(&piece[start..end - 1]);
        self.begun |= start > 0;
        Some(piece.slice(..start))
    }

    fn note(&mut self, line: &[u8]) {
        let Some(comment) = read_comment(line) else { return };
        if !comment.ids.is_empty()
            && let Some(ids) = &mut self.ids
            && !ids.push(comment.ids)
        {
            self.ids = None;
        }
        self.report = comment.report.or(self.report.take());
    }

    /// Returns the held bytes, because the stream has ended normally.
    pub(crate) fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).freeze()
    }

    /// True if anything was forwarded.
    pub(crate) fn begun(&self) -> bool {
        self.begun
    }

    /// True if more bytes followed a comment than may be held back. The stream is then not read any
    /// further.
    pub(crate) fn is_full(&self) -> bool {
        self.full
    }

    /// Returns the token ids with which another brain continues the stream, and their share of the
    /// memory budget. `None`: there were too many ids to keep.
    pub(crate) fn into_ids(self) -> Option<(Vec<u8>, Arc<IdShare>)> {
        self.ids.map(|ids| (ids.text, Arc::new(ids.share)))
    }

    /// Returns the newest load report since the last call.
    pub(crate) fn take_report(&mut self) -> Option<LoadReport> {
        self.report.take()
    }
}

/// Searches for complete comment lines in a growing buffer. It examines each byte once, except for
/// bytes that may begin a comment.
#[derive(Debug, Default)]
struct Search {
    /// The position up to which the buffer was searched.
    at: usize,
    /// The start of a comment whose end has not arrived yet.
    comment: Option<usize>,
    #[cfg(test)]
    examined: usize,
}

impl Search {
    /// Returns the range of the first complete comment line, including its line end. The next
    /// search starts after it.
    fn next(&mut self, bytes: &[u8]) -> Option<(usize, usize)> {
        loop {
            let rest = &bytes[self.at..];
            if let Some(start) = self.comment {
                let found = memchr::memchr(b'\n', rest);
                self.count(found.map_or(rest.len(), |end| end + 1));
                let Some(end) = found else {
                    self.at = bytes.len();
                    return None;
                };
                let end = self.at + end + 1;
                (self.at, self.comment) = (0, None);
                return Some((start, end));
            }
            let found = memmem::find(rest, COMMENT);
            self.count(found.map_or(rest.len(), |at| at + COMMENT.len()));
            let Some(at) = found else {
                // The last bytes may be the beginning of a comment mark.
                self.at = self.at.max(bytes.len().saturating_sub(COMMENT.len() - 1));
                return None;
            };
            let at = self.at + at;
            // Comment marks do not overlap.
            self.at = at + COMMENT.len();
            // JSON text contains no raw line ends, so a comment mark at the start of a line always
            // begins a comment.
            self.comment = (at == 0 || bytes[at - 1] == b'\n').then_some(at);
        }
    }

    #[cfg(test)]
    fn count(&mut self, bytes: usize) {
        self.examined += bytes;
    }

    #[cfg(not(test))]
    fn count(&self, _: usize) {}
}

#[cfg(test)]
mod tests {
    use forebay_api::peer::write_comment;
    use proptest::prelude::*;

    use super::*;

    fn event(text: &str) -> Vec<u8> {
        format!("data: {}\n\n", serde_json::json!({ "text": text })).into_bytes()
    }

    fn tape() -> Tape {
        Tape::new(&Budget::new(usize::MAX))
    }

    fn ids(tape: Tape) -> Vec<u8> {
        tape.into_ids().unwrap().0
    }

    #[test]
    fn the_usual_piece_is_not_copied() {
        let mut piece = event("a");
        let events = piece.len();
        write_comment(&[7, 8], None, &mut piece);
        let piece = Bytes::from(piece);
        let mut tape = tape();
        let out = tape.push(&piece);
        assert_eq!(out.as_ptr(), piece.as_ptr());
        assert_eq!((out.len(), ids(tape)), (events, b"7,8,".to_vec()));
    }

    /// Chunks that the test repeats to a stream. Only the last one makes complete comments.
    const ENDLESS: [&[u8]; 5] =
        [b"x", b": forebay", b"\n", b"x: forebay 1\nx: forebay 2", b"\n: forebay 1,2"];

    #[test]
    fn what_is_held_and_what_is_searched_is_bounded() {
        for pattern in ENDLESS {
            let memory = Budget::new(usize::MAX);
            let mut tape = Tape::new(&memory);
            let piece = Bytes::from(pattern.repeat(1 + 4000 / pattern.len()));
            let (mut sent, mut passed) = (0, 0);
            while !tape.is_full() && sent < 2 * MAX_HELD {
                passed += tape.push(&piece).len();
                sent += piece.len();
                assert!(tape.held.len() <= MAX_HELD + piece.len());
                assert!(tape.search.examined <= sent + 16 * COMMENT.len() * (sent / piece.len()));
            }
            let endless = !pattern.starts_with(b"\n: ");
            assert_eq!(tape.is_full(), endless, "{pattern:?}");
            assert!(!endless || passed == 0 && sent <= MAX_HELD + piece.len());
            assert!(memory.taken() <= 2 * MAX_HELD + piece.len());
        }
    }

    #[test]
    fn a_comment_that_never_ends_is_searched_once() {
        let mut tape = tape();
        tape.push(&Bytes::from_static(COMMENT));
        let piece = Bytes::from(vec![b'1'; 1000]);
        (0..1000).for_each(|_| assert!(tape.push(&piece).is_empty()));
        assert!(tape.search.examined <= 1_000_000 + 10 * COMMENT.len());
        assert!(tape.push(&Bytes::from_static(b"\ndata: 1\n\n: forebay 2\n")).ends_with(b"1\n\n"));
        assert_eq!(ids(tape).len(), 1_000_000 + 3);
    }

    #[test]
    fn too_many_ids_cost_the_stream_its_continuation_alone() {
        let memory = Budget::new(usize::MAX);
        let mut tape = Tape::new(&memory);
        let piece = [event("a"), b": forebay ".to_vec(), vec![b'1'; 1 << 20], b"\n".to_vec()];
        let piece = Bytes::from(piece.concat());
        for _ in 0..20 {
            assert_eq!(tape.push(&piece), event("a"));
            assert!(!tape.is_full() && memory.taken() <= MAX_HELD + (1 << 20));
        }
        assert_eq!(memory.taken(), 0);
        assert!(tape.into_ids().is_none());
    }

    #[test]
    fn streams_that_hold_little_are_not_kept_back_by_those_that_hold_much() {
        let memory = Budget::new(MAX_HELD);
        let mut large: Vec<Tape> = (0..3).map(|_| Tape::new(&memory)).collect();
        let piece = Bytes::from(vec![b'x'; MAX_HELD / 2]);
        let full: Vec<bool> = large
            .iter_mut()
            .map(|tape| {
                tape.push(&piece);
                tape.is_full()
            })
            .collect();
        assert_eq!(full, [false, false, true]);
        let mut small = Tape::new(&memory);
        small.push(&Bytes::from(vec![b'x'; FREE]));
        assert!(!small.is_full());
        drop(large);
        assert_eq!(memory.taken(), 0);
    }

    #[test]
    fn ids_are_charged_to_the_brain_that_wrote_them() {
        let (first, second) = (Budget::new(usize::MAX), Budget::new(0));
        let mut tape = Tape::new(&first);
        let text = vec![b'1'; 2 * FREE];
        tape.push(&Bytes::from([COMMENT, &text, b"\n"].concat()));
        let (ids, share) = tape.into_ids().unwrap();
        let mut next = Tape::after(ids, Some(share), &second);
        next.push(&Bytes::from_static(b"data: 1\n\n: forebay 2\n"));
        assert_eq!((first.taken(), second.taken()), (FREE + 1, 0));
        assert_eq!(self::ids(next).len(), 2 * FREE + 3);
        assert_eq!(first.taken(), 0);
    }

    proptest! {
        /// However a stream is split into chunks, and wherever it breaks off, the ids cover exactly
        /// the text that was forwarded.
        #[test]
        fn events_and_ids_go_together(
            steps in prop::collection::vec(("[a:\n ]{0,6}|: forebay 9", prop::collection::vec(any::<u16>(), 1..4), any::<bool>()), 1..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            broken in any::<prop::sample::Index>(),
        ) {
            let report = LoadReport { at: 3, ..LoadReport::default() };
            let mut stream = Vec::new();
            // After each comment: the number of bytes of the stream, of its events, and of the ids
            // as text.
            let (mut events, mut ids) = (Vec::new(), Vec::new());
            let mut complete = vec![(0, 0, 0)];
            for (text, step, with_report) in &steps {
                stream.extend(event(text));
                events.extend(event(text));
                let step: Vec<i32> = step.iter().map(|&id| i32::from(id)).collect();
                write_comment(&step, with_report.then_some(&report), &mut stream);
                ids.extend(step.iter().flat_map(|id| format!("{id},").into_bytes()));
                complete.push((stream.len(), events.len(), ids.len()));
            }
            stream.extend_from_slice(b"data: [DONE]\n\n");
            let broken = broken.index(stream.len() + 1);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(broken + 1)).collect();
            cuts.extend([0, broken]);
            cuts.sort_unstable();
            let mut tape = tape();
            let mut out = Vec::new();
            for pair in cuts.windows(2) {
                out.extend(tape.push(&Bytes::copy_from_slice(&stream[pair[0]..pair[1]])));
            }
            let (_, event_bytes, id_bytes) =
                *complete.iter().rfind(|(end, _, _)| *end <= broken).unwrap();
            prop_assert_eq!(&out, &events[..event_bytes]);
            prop_assert_eq!(&tape.ids.as_ref().unwrap().text, &ids[..id_bytes]);
            prop_assert_eq!(tape.begun(), event_bytes > 0);
            if broken == stream.len() {
                prop_assert_eq!(&tape.finish()[..], b"data: [DONE]\n\n");
            }
        }
    }
}
