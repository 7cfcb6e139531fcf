//! Reads lines of files of any size, with bounded memory per line.

use std::io::{BufRead, ErrorKind, Result};

/// Reads lines. If a line exceeds the bound, only its length is returned.
pub(crate) struct Lines<R> {
    reader: R,
    buffer: Vec<u8>,
    longest: usize,
    number: u64,
}

/// A line.
pub(crate) struct Text<'a> {
    /// The number of the line, from 1.
    pub(crate) number: u64,
    /// The line without its line break; `None`: it is too long.
    pub(crate) bytes: Option<&'a [u8]>,
    /// The length of the line in the file, in bytes.
    pub(crate) length: u64,
    /// True if the line is terminated by a line break.
    pub(crate) ended: bool,
}

impl<R: BufRead> Lines<R> {
    /// Creates a reader of lines of at most `longest` bytes each.
    pub(crate) fn new(reader: R, longest: usize) -> Self {
        Self { reader, buffer: Vec::new(), longest, number: 0 }
    }

    /// Reads the next line; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Text<'_>>> {
        self.buffer.clear();
        let (mut length, mut ended) = (0, false);
        while !ended {
            let part = match self.reader.fill_buf() {
                Ok(part) => part,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if part.is_empty() {
                break;
            }
            let end = part.iter().position(|&byte| byte == b'\n');
            let content = &part[..end.unwrap_or(part.len())];
            ended = end.is_some();
            let taken = content.len() + usize::from(ended);
            length += taken as u64;
            if length - u64::from(ended) <= self.longest as u64 {
                self.buffer.extend_from_slice(content);
            } else {
                self.buffer = Vec::new();
            }
            self.reader.consume(taken);
        }
        if length == 0 {
            return Ok(None);
        }
        self.number += 1;
        let fits = length - u64::from(ended) <= self.longest as u64;
        let bytes = fits.then_some(&self.buffer[..]);
        Ok(Some(Text { number: self.number, bytes, length, ended }))
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lines_are_those_of_the_file(
            text in prop::collection::vec(prop::sample::select(&b"ab\n"[..]), 0..60),
            longest in 0..8_usize,
            capacity in 1..9_usize,
        ) {
            let mut lines = Lines::new(BufReader::with_capacity(capacity, &text[..]), longest);
            for (number, part) in (1..).zip(text.split_inclusive(|&byte| byte == b'\n')) {
                let line = lines.next().unwrap().expect("a line");
                let content = part.strip_suffix(b"\n").unwrap_or(part);
                prop_assert_eq!(line.bytes, (content.len() <= longest).then_some(content));
                prop_assert_eq!((line.number, line.length), (number, part.len() as u64));
                prop_assert_eq!(line.ended, part.ends_with(b"\n"));
                prop_assert!(lines.buffer.len() <= longest);
            }
            prop_assert!(lines.next().unwrap().is_none());
        }
    }
}
