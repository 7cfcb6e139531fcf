//! Finds the events of a stream in the bytes as they arrive.

use memchr::memchr;

/// Splits a stream of server-sent events, and passes on the payload of each `data:` line.
///
/// A line within one chunk is not copied. The measured servers send one `data:` line per event, so
/// lines are not joined; other fields and comments are skipped. Older llama.cpp servers send
/// failures as `error:` lines, which also count as payloads.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    /// Adds the next chunk of bytes, and calls `payload` for each line that is now complete.
    pub(crate) fn feed(&mut self, mut piece: &[u8], mut payload: impl FnMut(&[u8])) {
        while let Some(end) = memchr(b'\n', piece) {
            let (line, rest) = (&piece[..end], &piece[end + 1..]);
            if self.partial.is_empty() {
                field(line, &mut payload);
            } else {
                self.partial.extend_from_slice(line);
                field(&self.partial, &mut payload);
                self.partial.clear();
            }
            piece = rest;
        }
        self.partial.extend_from_slice(piece);
    }
}

fn field(line: &[u8], payload: &mut impl FnMut(&[u8])) {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if let Some(data) = line.strip_prefix(b"data:").or_else(|| line.strip_prefix(b"error:")) {
        payload(data.trim_ascii_start());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut found = Vec::new();
        for piece in pieces {
            lines.feed(piece, |data| found.push(data.to_vec()));
        }
        found
    }

    #[test]
    fn only_payloads_are_given() {
        let stream = b": hello\r\nevent: x\ndata: {\"a\":1}\r\n\r\nid: 3\ndata:two\n\ndata: [DONE]\n\ndata: cut";
        assert_eq!(split(&[stream]), [&b"{\"a\":1}"[..], b"two", b"[DONE]"]);
    }

    proptest! {
        #[test]
        fn where_the_stream_is_cut_makes_no_difference(
            lines in proptest::collection::vec("(data: ?|: |event: |)[a-z\"{}: é]{0,12}\r?\n", 0..20),
            mut cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..12),
        ) {
            let whole = lines.concat().into_bytes();
            let mut at: Vec<usize> = cuts.drain(..).map(|cut| cut.index(whole.len() + 1)).collect();
            at.sort_unstable();
            at.insert(0, 0);
            at.push(whole.len());
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &whole[pair[0]..pair[1]]).collect();
            prop_assert_eq!(split(&pieces), split(&[&whole]));
        }
    }
}
