//! Shortens text from clients for error messages.

/// The largest length in bytes of text from a client that an error quotes: a name, or a string
/// where another type is expected.
pub const SHOWN_BYTES: usize = 64;

/// Cuts `text` to at most `bytes` bytes, so that an error can quote it.
pub fn cut(text: &str, bytes: usize) -> std::borrow::Cow<'_, str> {
    if text.len() <= bytes {
        return text.into();
    }
    let end = (0..=bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}...", &text[..end]).into()
}
