//! Finds stop strings in streamed text, and cuts the text there.

use std::sync::Arc;

/// The stop strings of a request, prepared for searching. A request builds one table, which all its
/// choices share. Each choice searches with its own [`StopStrings`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct StopTable {
    /// The stop strings, in the client's order.
    texts: Vec<String>,
    stops: Vec<Stop>,
}

#[derive(Debug, PartialEq, Eq)]
struct Stop {
    /// The index of the string in `texts`.
    index: usize,
    text: Box<[u8]>,
    /// For each length of a matched prefix, the length of its longest proper suffix that is a
    /// prefix too. This is the next prefix to try after a mismatch.
    fallback: Box<[u32]>,
}

impl StopTable {
    /// Creates a table of `texts`, each shorter than 4 GiB. Empty texts are ignored. The table
    /// takes about six bytes per byte of text.
    pub fn new(texts: Vec<String>) -> Self {
        let indexed = texts.iter().enumerate().filter(|(_, text)| !text.is_empty());
        let stops = indexed.map(|(index, text)| Stop::new(index, text)).collect();
        Self { texts, stops }
    }

    /// Returns the stop strings, in the client's order.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }
}

impl Stop {
    fn new(index: usize, text: &str) -> Self {
        let text: Box<[u8]> = text.as_bytes().into();
        let mut fallback = vec![0; text.len() + 1];
        let mut length = 0;
        for end in 1..text.len() {
            while length > 0 && text[end] != text[length as usize] {
                length = fallback[length as usize];
            }
            if text[end] == text[length as usize] {
                length += 1;
            }
            fallback[end + 1] = length;
        }
        Self { index, text, fallback: fallback.into() }
    }

    /// Reads one byte of the text, after the first `at` bytes of the string have matched. `at` must
    /// be less than the length of the string. Returns the number of leading bytes of the string
    /// that match now.
    fn step(&self, mut at: u32, byte: u8) -> u32 {
        while at > 0 && self.text[at as usize] != byte {
            at = self.fallback[at as usize];
        }
        at + u32::from(self.text[at as usize] == byte)
    }
}

/// Finds the stop strings of one choice in text that arrives in parts. Text that may be the
/// beginning of a stop string is held back.
///
/// The match that ends first in the text wins; among matches with the same end, the longest, then
/// the first in the client's order. The text held back is the longest suffix of the text so far
/// that is a prefix of a stop string. Each byte costs one Knuth-Morris-Pratt step per stop string,
/// amortised.
#[derive(Debug)]
pub struct StopStrings {
    table: Arc<StopTable>,
    /// Per stop string, the number of its leading bytes with which the text so far ends.
    at: Box<[u32]>,
    include_in_output: bool,
    /// Its bytes from `held_from` on are the text that was not returned yet.
    held: String,
    held_from: usize,
    matched: Option<usize>,
}

impl StopStrings {
    /// Creates a search for the strings of `table`. With `include_in_output`, the matched stop
    /// string stays in the text.
    pub fn new(table: Arc<StopTable>, include_in_output: bool) -> Self {
        Self {
            at: vec![0; table.stops.len()].into(),
            table,
            include_in_output,
            held: String::new(),
            held_from: 0,
            matched: None,
        }
    }

    /// Returns the stop string with this index.
    pub fn text(&self, index: usize) -> &str {
        &self.table.texts[index]
    }

    /// Checks `delta` for stop strings, and appends to `out` the text that can no longer be part of
    /// one. The text is cut at the first stop string.
    ///
    /// Returns the index of a stop string as soon as the string has matched. `out` then ends right
    /// before the string, or right after it with `include_in_output`. Later calls append nothing
    /// and return the same index.
    pub fn push(&mut self, delta: &str, out: &mut String) -> Option<usize> {
        if self.matched.is_some() {
            return self.matched;
        }
        if self.at.is_empty() {
            out.push_str(delta);
            return None;
        }
        let before = self.held.len();
        self.held.push_str(delta);
        for (at, &byte) in delta.as_bytes().iter().enumerate() {
            let mut longest: Option<(usize, usize)> = None;
            for (stop, at) in self.table.stops.iter().zip(&mut self.at) {
                *at = stop.step(*at, byte);
                let length = stop.text.len();
                if *at as usize == length && longest.is_none_or(|(most, _)| length > most) {
                    longest = Some((length, stop.index));
                }
            }
            if let Some((length, index)) = longest {
                let end = before + at + 1;
                let end = if self.include_in_output { end } else { end - length };
                out.push_str(&self.held[self.held_from..end]);
                self.held.clear();
                self.held_from = 0;
                self.matched = Some(index);
                return self.matched;
            }
        }
        let hold = self.at.iter().max().map_or(0, |&at| at as usize);
        let end = self.held.len() - hold;
        out.push_str(&self.held[self.held_from..end]);
        self.held_from = end;
        // The rest is moved only after at least as much text was returned, so that the cost of a
        // push is amortised linear in the length of `delta`.
        if self.held_from >= hold {
            self.held.drain(..self.held_from);
            self.held_from = 0;
        }
        None
    }

    /// Appends the text that was held back, because the text has ended without a stop string.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held[self.held_from..]);
        self.held.clear();
        self.held_from = 0;
        self.at.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn search(stops: &[&str]) -> StopStrings {
        let stops = stops.iter().map(|&stop| stop.to_owned()).collect();
        StopStrings::new(Arc::new(StopTable::new(stops)), false)
    }

    fn run(parts: &[&str], stops: &[&str], include: bool) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut search = StopStrings::new(Arc::new(StopTable::new(stops)), include);
        let mut out = String::new();
        let mut found = None;
        for part in parts {
            found = search.push(part, &mut out);
        }
        search.finish(&mut out);
        (out, found)
    }

    /// A reference implementation: compares every stop string at every position of the whole text.
    fn naive(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let ends_here =
                |stop: &&(usize, &String)| text.as_bytes()[..end].ends_with(stop.1.as_bytes());
            let indexed: Vec<_> =
                stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty()).collect();
            let best = indexed
                .iter()
                .filter(ends_here)
                .max_by_key(|(index, stop)| (stop.len(), usize::MAX - index));
            if let Some((index, stop)) = best {
                let end = if include { end } else { end - stop.len() };
                return (text[..end].to_owned(), Some(*index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn overlapping_beginnings() {
        assert_eq!(run(&["a", "a", "a", "b", "c"], &["aab"], false), ("a".to_owned(), Some(0)));
        assert_eq!(run(&["aaab"], &["aab"], true), ("aaab".to_owned(), Some(0)));
        assert_eq!(run(&["xab", "ab"], &["abac"], false), ("xabab".to_owned(), None));
    }

    #[test]
    fn the_longest_of_those_that_end_first_then_the_first_listed() {
        assert_eq!(run(&["x###y"], &["#", "##"], false), ("x".to_owned(), Some(0)));
        assert_eq!(
            run(&["x\n\nUser:"], &["User:", "\n\nUser:", "\n\nUser:"], false),
            ("x".to_owned(), Some(1))
        );
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        let mut search = search(&["</end>"]);
        let mut out = String::new();
        assert_eq!(search.push("one < two </en", &mut out), None);
        assert_eq!(out, "one < two ");
        assert_eq!(search.push("g", &mut out), None);
        assert_eq!(out, "one < two </eng");
    }

    #[test]
    fn characters_that_share_bytes_with_a_stop() {
        assert_eq!(run(&["è", "é", "x"], &["éé"], false), ("èéx".to_owned(), None));
        assert_eq!(run(&["日本", "語。", "後"], &["語。"], false), ("日本".to_owned(), Some(0)));
    }

    #[test]
    fn after_a_match_nothing_more_comes_out() {
        let mut search = search(&["", "b"]);
        let mut out = String::new();
        assert_eq!(search.push("abc", &mut out), Some(1));
        assert_eq!(search.push("ddd", &mut out), Some(1));
        search.finish(&mut out);
        assert_eq!(out, "a");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_parts_give_what_a_search_of_the_whole_text_gives(
            parts in prop::collection::vec("[abé日]{0,4}", 0..12),
            stops in prop::collection::vec("[abé日]{0,4}", 0..4),
            include: bool,
        ) {
            let table = Arc::new(StopTable::new(stops.clone()));
            let mut search = StopStrings::new(table, include);
            let (mut out, mut found) = (String::new(), None);
            let mut text = String::new();
            for part in &parts {
                text.push_str(part);
                found = search.push(part, &mut out);
                if found.is_some() {
                    break;
                }
                let held = &text[out.len()..];
                prop_assert_eq!(&text[..out.len()], &out);
                let longest = (0..=text.len())
                    .filter(|&at| text.is_char_boundary(at))
                    .map(|at| &text[at..])
                    .find(|end| stops.iter().any(|stop| stop.len() > end.len() && stop.starts_with(end)))
                    .unwrap_or("");
                prop_assert_eq!(held, longest);
            }
            search.finish(&mut out);
            prop_assert_eq!((out, found), naive(&parts.concat(), &stops, include));
        }
    }
}
