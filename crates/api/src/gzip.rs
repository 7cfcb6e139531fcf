//! Decompresses request bodies.

use std::fmt;
use std::io::{self, Write};

use flate2::write::MultiGzDecoder;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;

use crate::cut::{SHOWN_BYTES, cut};
use crate::error::ApiError;

/// The number of compressed bytes to inflate at a time. Gzip inflates them to at most about a
/// thousand times as many.
const STEP: usize = 256;
/// The largest number of bytes by which the compressed input may exceed the output. Valid input
/// exceeds its output by little more than a header; endless empty blocks would never produce
/// output.
const IDLE: usize = 64 << 10;

/// Inflates a gzip body step by step, so that the size of the output can be limited.
pub struct Inflater {
    decoder: MultiGzDecoder<Vec<u8>>,
    read: usize,
    written: usize,
}

impl fmt::Debug for Inflater {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {}", self.written, self.read)
    }
}

impl Inflater {
    /// Creates the inflater for a body with these headers, or returns `None` if the body is not
    /// compressed.
    ///
    /// # Errors
    /// The content encoding is not supported.
    pub fn of(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let mut inflater = None;
        for value in headers.get_all(CONTENT_ENCODING) {
            let value = value.to_str().unwrap_or("?");
            for encoding in value.split(',').map(|name| name.trim().to_ascii_lowercase()) {
                match encoding.as_str() {
                    "" | "identity" => {}
                    "gzip" | "x-gzip" if inflater.is_none() => inflater = Some(Self::new()),
                    other => {
                        let encoding = cut(other, SHOWN_BYTES).into_owned();
                        return Err(ApiError::UnsupportedEncoding { encoding });
                    }
                }
            }
        }
        Ok(inflater)
    }

    fn new() -> Self {
        Self { decoder: MultiGzDecoder::new(Vec::new()), read: 0, written: 0 }
    }

    /// Inflates the first bytes of `input` and removes them from `input`. The output is less than a
    /// megabyte.
    pub fn step(&mut self, input: &mut &[u8]) -> Result<Vec<u8>, ApiError> {
        let (now, later) = input.split_at(input.len().min(STEP));
        let used = self.decoder.write(now).map_err(broken)?;
        if used == 0 && !now.is_empty() {
            return Err(broken(io::ErrorKind::InvalidData.into()));
        }
        *input = if used < now.len() { &input[used..] } else { later };
        self.read += used;
        let out = std::mem::take(self.decoder.get_mut());
        self.written += out.len();
        if self.read > self.written.saturating_add(IDLE) {
            let reason = "its compressed data is longer than the text".to_owned();
            return Err(ApiError::BrokenBody { reason });
        }
        Ok(out)
    }

    /// Returns the rest of the output, after all input was read.
    pub fn finish(&mut self) -> Result<Vec<u8>, ApiError> {
        self.decoder.try_finish().map_err(broken)?;
        Ok(std::mem::take(self.decoder.get_mut()))
    }
}

fn broken(error: io::Error) -> ApiError {
    ApiError::BrokenBody { reason: format!("it is not whole gzip: {error}") }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use http::HeaderValue;

    use super::*;

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(data).expect("memory");
        encoder.finish().expect("memory")
    }

    /// Inflates `data` in chunks of `piece` bytes. Returns the output, and the size of the largest
    /// step's output.
    fn inflate(data: &[u8], piece: usize) -> Result<(Vec<u8>, usize), ApiError> {
        let (mut inflater, mut all, mut most) = (Inflater::new(), Vec::new(), 0);
        for mut piece in data.chunks(piece) {
            while !piece.is_empty() {
                let out = inflater.step(&mut piece)?;
                most = most.max(out.len());
                all.extend(out);
            }
        }
        all.extend(inflater.finish()?);
        Ok((all, most))
    }

    #[test]
    fn what_was_compressed_comes_back_however_it_is_cut() {
        let text = "{\"prompt\": \"a b c d\"}".repeat(3000);
        let whole = gzip(text.as_bytes());
        for piece in [1, 7, 4096] {
            assert_eq!(inflate(&whole, piece).map(|(all, _)| all), Ok(text.clone().into()));
        }
        let twice = [whole.clone(), whole].concat();
        assert_eq!(inflate(&twice, 100).map(|(all, _)| all.len()), Ok(2 * text.len()));
    }

    #[test]
    fn a_bomb_comes_out_in_small_pieces() {
        let bomb = gzip(&vec![0; 64 << 20]);
        assert!(bomb.len() < 1 << 17, "{}", bomb.len());
        let (all, most) = inflate(&bomb, 1 << 20).expect("zeros");
        assert!(all.len() == 64 << 20 && most < 1 << 20, "{most}");
    }

    #[test]
    fn what_is_no_gzip_is_an_error() {
        let whole = gzip(b"{\"a\": 1}");
        let cut = &whole[..whole.len() - 5];
        let mut wrong = whole.clone();
        let last = wrong.len() - 6;
        wrong[last] ^= 1;
        for bad in [b"{\"a\": 1}".as_slice(), cut, &wrong] {
            assert!(matches!(inflate(bad, 64), Err(ApiError::BrokenBody { .. })), "{bad:?}");
        }
        // Empty stored blocks, which inflate to nothing.
        let mut idle = whole[..10].to_vec();
        idle.extend([0, 0, 0, 0xff, 0xff].repeat(20_000));
        assert!(inflate(&idle, 4096).is_err());
    }

    #[test]
    fn encodings_are_read_or_refused_by_name() {
        let of = |value: &'static str| {
            let headers =
                HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static(value))]);
            Inflater::of(&headers).map(|found| found.is_some())
        };
        assert_eq!(Inflater::of(&HeaderMap::new()).map(|found| found.is_some()), Ok(false));
        for (value, found) in [("gzip", true), ("X-GZIP", true), ("identity", false), ("", false)] {
            assert_eq!(of(value), Ok(found), "{value}");
        }
        for value in ["br", "deflate", "gzip, gzip", "zstd"] {
            assert_eq!(of(value).map_err(|error| error.status()), Err(415), "{value}");
        }
    }
}
