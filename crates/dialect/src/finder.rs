//! Finds marks in text that arrives in parts.

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// The mark with index `mark` starts at byte `at`.
    Mark { at: usize, mark: usize },
    /// There is no mark, and no mark can start before byte `safe`.
    Nothing { safe: usize },
}

#[cfg(test)]
thread_local! {
    /// The number of bytes that parsers on this thread have scanned.
    pub(crate) static LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts scanned bytes, for the tests.
fn look_at(bytes: usize) {
    #[cfg(test)]
    LOOKED_AT.set(LOOKED_AT.get() + bytes);
    #[cfg(not(test))]
    let _ = bytes;
}

/// Returns the length in bytes of the white space at the start of `text`.
pub(crate) fn leading_blank(text: &str) -> usize {
    let blank = text.len() - text.trim_start().len();
    look_at(blank);
    blank
}

/// Returns the length of `text` in bytes without the white space at its end.
pub(crate) fn without_trailing_blank(text: &str) -> usize {
    let end = text.trim_end().len();
    look_at(text.len() - end);
    end
}

/// Finds the mark that starts first; of several at the same position, the longest.
pub(crate) fn find<'m>(text: &str, marks: impl Iterator<Item = &'m str> + Clone) -> Found {
    look_at(text.len());
    let mut best: Option<(usize, usize, usize)> = None;
    for (mark, wanted) in marks.clone().enumerate() {
        if wanted.is_empty() {
            continue;
        }
        if let Some(at) = text.find(wanted) {
            let better = best.is_none_or(|(first, length, _)| {
                at < first || at == first && wanted.len() > length
            });
            if better {
                best = Some((at, wanted.len(), mark));
            }
        }
    }
    // A mark that is not complete yet may start earlier.
    let safe = marks.map(|wanted| text.len() - beginning(text, wanted)).min();
    let safe = safe.unwrap_or(text.len());
    match best {
        Some((at, _, mark)) if at <= safe => Found::Mark { at, mark },
        _ => Found::Nothing { safe },
    }
}

/// Returns the length in bytes of the longest proper prefix of `mark` at the end of `text`.
fn beginning(text: &str, mark: &str) -> usize {
    let most = mark.len().saturating_sub(1).min(text.len());
    let start = text.len() - most;
    let first = mark.as_bytes().first();
    let ends = (start..text.len()).filter(|&at| text.as_bytes().get(at) == first);
    let mut ends = ends.filter(|&at| mark.as_bytes().starts_with(&text.as_bytes()[at..]));
    ends.next().map_or(0, |at| text.len() - at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(text: &str) -> Found {
        find(text, ["<a>", "<a>b", "", "\n</b>", "</b>"].into_iter())
    }

    #[test]
    fn the_first_and_longest_wins_and_beginnings_are_waited_for() {
        assert_eq!(look("x<a>b"), Found::Mark { at: 1, mark: 1 });
        assert_eq!(look("x<a>c"), Found::Mark { at: 1, mark: 0 });
        assert_eq!(look("x\n</b>"), Found::Mark { at: 1, mark: 3 });
        assert_eq!(look("x</b>"), Found::Mark { at: 1, mark: 4 });
        assert_eq!(look("x</"), Found::Nothing { safe: 1 });
        assert_eq!(look("x\n</"), Found::Nothing { safe: 1 });
        assert_eq!(look("x<ab"), Found::Nothing { safe: 4 });
        assert_eq!(look(""), Found::Nothing { safe: 0 });
        assert_eq!(find("abc", std::iter::empty()), Found::Nothing { safe: 3 });
    }
}
