//! Images in `data:` URLs (RFC 2397).

use crate::error::ImageError;

/// A `data:` URL in base64, not decoded yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataUrl<'a> {
    base64: &'a str,
}

impl DataUrl<'_> {
    /// Most bytes of the file.
    #[must_use]
    pub fn most_bytes(&self) -> usize {
        self.base64.len() / 4 * 3 + 3
    }

    /// The file. Line feeds and missing padding are taken.
    ///
    /// # Errors
    /// It is no base64, or there is nothing.
    pub fn decode(&self) -> Result<Vec<u8>, ImageError> {
        let text = self.base64.trim_end_matches('=').as_bytes();
        let decode = base64_simd::STANDARD_NO_PAD.decode_to_vec(text);
        let file = decode.or_else(|_| {
            // Rare, and worth a copy: line feeds, as mail has them, and the other alphabet.
            let plain: Vec<u8> = text
                .iter()
                .filter(|byte| !byte.is_ascii_whitespace() && **byte != b'=')
                .map(|&byte| match byte {
                    b'-' => b'+',
                    b'_' => b'/',
                    byte => byte,
                })
                .collect();
            base64_simd::STANDARD_NO_PAD.decode_to_vec(&plain)
        });
        match file {
            Ok(file) if file.is_empty() => Err(ImageError::Url("it has no data")),
            Ok(file) => Ok(file),
            Err(_) => Err(ImageError::Url("its data is not base64")),
        }
    }
}

/// Takes a `data:` URL apart; `None`: it is another URL.
///
/// # Errors
/// It has no data, is not base64, or names a type that is no image.
pub fn data_url(url: &str) -> Option<Result<DataUrl<'_>, ImageError>> {
    let (scheme, rest) = url.split_at_checked("data:".len())?;
    scheme.eq_ignore_ascii_case("data:").then(|| {
        let (head, base64) = rest.split_once(',').ok_or(ImageError::Url("it has no comma"))?;
        let mut parts = head.split(';');
        let media_type = parts.next().unwrap_or_default().trim();
        let image = media_type.get(..6).is_some_and(|prefix| prefix.eq_ignore_ascii_case("image/"));
        // Clients that do not know say nothing, or that it is bytes.
        let unknown = media_type.is_empty() || media_type == "application/octet-stream";
        if !image && !unknown {
            let shown: String = media_type.chars().take(64).collect();
            return Err(ImageError::MediaType(shown));
        }
        if !parts.any(|part| part.trim().eq_ignore_ascii_case("base64")) {
            return Err(ImageError::Url("it is not in base64"));
        }
        Ok(DataUrl { base64 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(url: &str) -> Result<Vec<u8>, ImageError> {
        data_url(url).expect("a data URL").and_then(|url| url.decode())
    }

    #[test]
    fn files_come_out_whoever_wrote_the_url() {
        for url in [
            "data:image/png;base64,aGk+Pw==",
            "DATA:IMAGE/PNG;charset=x;BASE64,aGk+Pw",
            "data:;base64,aGk-Pw",
            "data:application/octet-stream;base64,aGk+\nPw==\r\n",
        ] {
            assert_eq!(decoded(url), Ok(b"hi>?".to_vec()), "{url}");
        }
        assert_eq!(data_url("https://a.b/c.png"), None);
        assert_eq!(data_url("dat\u{e9}"), None);
    }

    #[test]
    fn what_is_no_image_in_base64_is_refused() {
        assert_eq!(decoded("data:image/png;base64,"), Err(ImageError::Url("it has no data")));
        assert_eq!(decoded("data:image/png;base64"), Err(ImageError::Url("it has no comma")));
        assert_eq!(decoded("data:image/png,aGk="), Err(ImageError::Url("it is not in base64")));
        let broken = Err(ImageError::Url("its data is not base64"));
        for data in ["a", "a&k=", "aGk=aGk=x!", "\u{e9}\u{e9}"] {
            assert_eq!(decoded(&format!("data:image/png;base64,{data}")), broken, "{data}");
        }
        let kind = Err(ImageError::MediaType("text/html".into()));
        assert_eq!(decoded("data:text/html;base64,aGk="), kind);
    }
}
