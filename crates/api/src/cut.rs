//! Shortens clients' texts for error messages.

/// The longest string that is read where no string is expected. The error shows it.
pub const SHOWN_BYTES: usize = 64;

/// `text`, cut to at most `bytes` bytes. Used to quote clients in errors.
pub fn cut(text: &str, bytes: usize) -> std::borrow::Cow<'_, str> {
    if text.len() <= bytes {
        return text.into();
    }
    let end = (0..=bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}...", &text[..end]).into()
}
