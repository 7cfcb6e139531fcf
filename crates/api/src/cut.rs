//! Texts of clients, in the form in which errors show them.

/// The longest string that is accepted where no string is expected. The error shows it.
pub const SHOWN_BYTES: usize = 64;

/// `text`, cut to at most `bytes` bytes. Errors show the client's words with it.
pub fn cut(text: &str, bytes: usize) -> std::borrow::Cow<'_, str> {
    if text.len() <= bytes {
        return text.into();
    }
    let end = (0..=bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}...", &text[..end]).into()
}
