//! Data URLs (RFC 2397) in base64, and plain base64.

use base64_simd::{STANDARD, forgiving_decode_to_vec};

use crate::error::ImageError;

/// A data URL, split but not decoded. Both fields are slices of the URL's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataUrl<'a> {
    /// The media type, such as `image/png`; empty if the URL has none.
    pub media_type: &'a str,
    /// The file, encoded in base64.
    pub base64: &'a str,
}

impl<'a> DataUrl<'a> {
    /// Splits `url`; `None`: it is not a data URL.
    ///
    /// # Errors
    /// The URL has no data, is not in base64, or its media type is not an image's.
    pub fn parse(url: &'a str) -> Result<Option<Self>, ImageError> {
        let url = url.trim_matches(|c: char| c.is_ascii_whitespace());
        let Some((scheme, rest)) = url.split_at_checked(5) else { return Ok(None) };
        if !scheme.eq_ignore_ascii_case("data:") {
            return Ok(None);
        }
        // Media type, parameters and the word `base64` are short, so a later comma belongs to the
        // data.
        let head = rest.as_bytes();
        let comma = head[..head.len().min(256)].iter().position(|byte| *byte == b',');
        let comma = comma.ok_or(ImageError::DataUrl)?;
        let (head, base64) = (&rest[..comma], &rest[comma + 1..]);
        let mut words = head.split(';').map(str::trim);
        let media_type = words.next().unwrap_or_default();
        if !words.next_back().is_some_and(|word| word.eq_ignore_ascii_case("base64")) {
            return Err(ImageError::DataUrl);
        }
        let is_image = media_type.get(..6).is_some_and(|kind| kind.eq_ignore_ascii_case("image/"));
        // Clients that do not know the type send no type, or that of plain bytes.
        let is_unknown = media_type.is_empty() || media_type == "application/octet-stream";
        if !is_image && !is_unknown {
            return Err(ImageError::MediaType(media_type.to_owned()));
        }
        Ok(Some(Self { media_type, base64 }))
    }

    /// An upper bound for the size of the decoded file.
    pub fn most_bytes(&self) -> usize {
        STANDARD.estimated_decoded_length(self.base64.len())
    }

    /// Decodes the file, which may have at most `limit` bytes.
    ///
    /// # Errors
    /// The file is larger, or the data is not base64.
    pub fn decode(&self, limit: usize) -> Result<Vec<u8>, ImageError> {
        if self.base64.contains('%') {
            return decode_base64(&unescaped(self.base64), limit);
        }
        decode_base64(self.base64, limit)
    }
}

/// Decodes `%XX` escapes. Other percent signs stay.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('%');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..2).and_then(|code| u8::from_str_radix(code, 16).ok());
        match code.filter(u8::is_ascii) {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[2..]);
            }
            None => {
                plain.push('%');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// Decodes `text` from base64 into a file of at most `limit` bytes. The alphabet is the standard
/// one, padding is optional, and white space is skipped.
///
/// # Errors
/// The file is larger, or the text is not base64.
pub fn decode_base64(text: &str, limit: usize) -> Result<Vec<u8>, ImageError> {
    let bytes = STANDARD.estimated_decoded_length(text.len());
    // With padding, the estimate is up to two bytes too high; white space makes it higher still. So
    // the exact size is only computed if the estimate is above the limit.
    if bytes > limit {
        let digits = text.bytes().filter(|byte| !byte.is_ascii_whitespace() && *byte != b'=');
        let bytes = digits.count() / 4 * 3;
        if bytes > limit {
            return Err(ImageError::TooManyBytes { bytes, limit });
        }
    }
    let file = STANDARD
        .decode_to_vec(text)
        .or_else(|_| forgiving_decode_to_vec(text.as_bytes()))
        .map_err(|_| ImageError::Base64)?;
    if file.len() > limit {
        return Err(ImageError::TooManyBytes { bytes: file.len(), limit });
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_url_is_cut_where_it_lies() {
        let text = "DATA:Image/PNG;charset=x;Base64,aGk=";
        let url = DataUrl::parse(text).unwrap().unwrap();
        assert_eq!((url.media_type, url.base64), ("Image/PNG", "aGk="));
        assert!(text.as_bytes().as_ptr_range().contains(&url.base64.as_ptr()));
        assert_eq!(url.decode(2).unwrap(), b"hi");
        for text in ["data:;base64,aGk", "data:application/octet-stream;base64,aGk="] {
            let url = DataUrl::parse(text).unwrap().unwrap();
            assert_eq!(url.decode(url.most_bytes()).unwrap(), b"hi");
        }
    }

    #[test]
    fn other_urls_and_bad_ones() {
        assert_eq!(DataUrl::parse("https://example.com/a,b"), Ok(None));
        assert_eq!(DataUrl::parse("dat"), Ok(None));
        assert_eq!(DataUrl::parse("datä:image/png;base64,"), Ok(None));
        assert_eq!(DataUrl::parse("data:image/png;base64"), Err(ImageError::DataUrl));
        assert_eq!(DataUrl::parse("data:image/png,abc"), Err(ImageError::DataUrl));
        let text = DataUrl::parse("data:text/plain;base64,aGk=");
        assert_eq!(text, Err(ImageError::MediaType("text/plain".into())));
        let far = format!("data:{},x", "a".repeat(300));
        assert_eq!(DataUrl::parse(&far), Err(ImageError::DataUrl));
    }

    #[test]
    fn blanks_and_percent_signs_are_read() {
        for text in [
            " data:image/png;base64,/+8=\n",
            "data:image/png;base64, /+ 8=",
            "data: image/png ; base64,/+8=",
            "data:image/png;base64,%2F%2b8%3D",
            "data:image/png;base64,%2f+8%3d%0A%20",
        ] {
            let url = DataUrl::parse(text).unwrap().unwrap();
            assert_eq!(url.decode(url.most_bytes()), Ok(vec![0xff, 0xef]), "{text:?}");
        }
        for text in ["data:image/png;base64,%", "data:image/png;base64,aGk%3", "data:;base64,%zz"] {
            let url = DataUrl::parse(text).unwrap().unwrap();
            assert_eq!(url.decode(100), Err(ImageError::Base64), "{text:?}");
        }
    }

    #[test]
    fn base64_that_is_none() {
        for bad in ["a", "aGk=aGk=", "a!k=", "aGk-", "aG%3D", "ä"] {
            assert_eq!(decode_base64(bad, 100), Err(ImageError::Base64), "{bad}");
        }
        assert_eq!(decode_base64("aG\r\nk =\n", 2).unwrap(), b"hi");
        let long = decode_base64("aGkh", 2);
        assert_eq!(long, Err(ImageError::TooManyBytes { bytes: 3, limit: 2 }));
        assert_eq!(decode_base64("aGk", 1), Err(ImageError::TooManyBytes { bytes: 2, limit: 1 }));
    }

    proptest! {
        #[test]
        fn what_was_encoded_comes_back(file in prop::collection::vec(any::<u8>(), 0..200)) {
            let text = STANDARD.encode_to_string(&file);
            prop_assert_eq!(decode_base64(&text, file.len()).unwrap(), file.clone());
            prop_assert_eq!(decode_base64(text.trim_end_matches('='), file.len()).unwrap(), file);
        }

        #[test]
        fn no_text_panics(text in ".{0,80}") {
            let _ = decode_base64(&text, 50);
            let _ = DataUrl::parse(&format!("data:{text}"));
        }
    }
}
