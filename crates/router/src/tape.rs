//! The part of a brain's stream that may be passed on, so that another brain can continue the rest.
//!
//! A comment reports that all bytes before it are complete, and has their tokens
//! ([`forebay_api::peer::Comment`]). So bytes are passed on up to a comment, and held back after
//! it. A brain writes an event and its comment at once, so nothing waits. The last events have no
//! comment, and the end follows them.

use bytes::{Bytes, BytesMut};
use forebay_api::peer::{COMMENT, LoadReport, read_comment};
use memchr::memmem;

/// Reads one client's stream, over all brains that write it.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    /// Ids of all tokens whose text was passed on, in decimal, each with a comma.
    ids: Vec<u8>,
    /// The bytes after the last comment.
    held: BytesMut,
    /// Something was passed on.
    begun: bool,
    report: Option<LoadReport>,
}

impl Tape {
    /// Goes on after tokens that were passed on before.
    pub(crate) fn after(ids: Vec<u8>) -> Self {
        Self { ids, ..Self::default() }
    }

    /// Reads a piece of the stream; gives what may be passed on now, which may be nothing.
    pub(crate) fn push(&mut self, piece: &Bytes) -> Bytes {
        if self.held.is_empty()
            && let Some(events) = self.whole(piece)
        {
            return events;
        }
        // Whole lines have been searched before.
        let mut search = memchr::memrchr(b'\n', &self.held).map_or(0, |end| end + 1);
        self.held.extend_from_slice(piece);
        let mut out = BytesMut::new();
        while let Some((start, end)) = next_comment(&self.held, search) {
            out.extend_from_slice(&self.held[..start]);
            let line = self.held.split_to(end);
            self.note(&line[start..end - 1]);
            search = 0;
        }
        self.begun |= !out.is_empty();
        out.freeze()
    }

    /// The usual case, without a copy: events, and one comment at the end.
    fn whole(&mut self, piece: &Bytes) -> Option<Bytes> {
        let (start, end) = next_comment(piece, 0)?;
        if end != piece.len() {
            return None;
        }
        self.note(&piece[start..end - 1]);
        self.begun |= start > 0;
        Some(piece.slice(..start))
    }

    fn note(&mut self, line: &[u8]) {
        let Some(comment) = read_comment(line) else { return };
        if !comment.ids.is_empty() {
            self.ids.extend_from_slice(comment.ids.as_bytes());
            self.ids.push(b',');
        }
        self.report = comment.report.or(self.report.take());
    }

    /// Gives the held bytes, because the stream has ended properly.
    pub(crate) fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).freeze()
    }

    /// True if anything was passed on.
    pub(crate) fn begun(&self) -> bool {
        self.begun
    }

    /// The token ids with which another brain continues.
    pub(crate) fn into_ids(self) -> Vec<u8> {
        self.ids
    }

    /// The last report since this was asked last.
    pub(crate) fn take_report(&mut self) -> Option<LoadReport> {
        self.report.take()
    }
}

/// The range of the first whole comment line at or after `from`, its line end included.
fn next_comment(bytes: &[u8], from: usize) -> Option<(usize, usize)> {
    let mut at = from;
    loop {
        at += memmem::find(&bytes[at..], COMMENT)?;
        // JSON has no line ends, so what looks like a comment at the start of a line is one.
        if at == 0 || bytes[at - 1] == b'\n' {
            let end = at + memchr::memchr(b'\n', &bytes[at..])? + 1;
            return Some((at, end));
        }
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use forebay_api::peer::write_comment;
    use proptest::prelude::*;

    use super::*;

    fn event(text: &str) -> Vec<u8> {
        format!("data: {}\n\n", serde_json::json!({ "text": text })).into_bytes()
    }

    #[test]
    fn the_usual_piece_is_not_copied() {
        let mut piece = event("a");
        let events = piece.len();
        write_comment(&[7, 8], None, &mut piece);
        let piece = Bytes::from(piece);
        let mut tape = Tape::default();
        let out = tape.push(&piece);
        assert_eq!(out.as_ptr(), piece.as_ptr());
        assert_eq!((out.len(), tape.into_ids()), (events, b"7,8,".to_vec()));
    }

    proptest! {
        /// However the stream is cut into pieces and wherever it breaks, what was passed on belongs
        /// to the ids that were noted, no more and no less.
        #[test]
        fn events_and_ids_go_together(
            steps in prop::collection::vec(("[a:\n ]{0,6}|: forebay 9", prop::collection::vec(any::<u16>(), 1..4), any::<bool>()), 1..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            broken in any::<prop::sample::Index>(),
        ) {
            let report = LoadReport { at: 3, ..LoadReport::default() };
            let mut stream = Vec::new();
            // After each comment: bytes of the stream, of its events, and of the ids as text.
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
            let mut tape = Tape::default();
            let mut out = Vec::new();
            for pair in cuts.windows(2) {
                out.extend(tape.push(&Bytes::copy_from_slice(&stream[pair[0]..pair[1]])));
            }
            let (_, event_bytes, id_bytes) =
                *complete.iter().rfind(|(end, _, _)| *end <= broken).unwrap();
            prop_assert_eq!(&out, &events[..event_bytes]);
            prop_assert_eq!(&tape.ids, &ids[..id_bytes]);
            prop_assert_eq!(tape.begun(), event_bytes > 0);
            if broken == stream.len() {
                prop_assert_eq!(&tape.finish()[..], b"data: [DONE]\n\n");
            }
        }
    }
}
