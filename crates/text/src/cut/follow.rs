//! Finds which characters can be adjacent in a match of a pattern.

use std::collections::BTreeSet;

use regex_syntax::hir::{Class, Hir, HirKind};

/// A substitute for `(?!\S)` in a parsed pattern. It is a noncharacter, which patterns do not
/// contain.
const LOOKAHEAD: char = '\u{10fffe}';

/// A set of characters, as sorted ranges.
type Set = Vec<(char, char)>;

/// The pairs of neighbours in the matches of a pattern (the position automaton of Glushkov, 1961).
///
/// Every two characters that can be adjacent in a match are neighbours here. Some other pairs are
/// included too, because lookaheads are assumed to match. If a pair is missing, a backtracking
/// matcher can never step from the first character to the second.
#[derive(Debug)]
pub(crate) struct Follow {
    sets: Vec<Set>,
    /// The pairs of positions that can follow each other, by index in `sets`.
    pairs: BTreeSet<(usize, usize)>,
    /// The positions whose character alone is a match, whatever follows.
    alone: Vec<usize>,
}

/// The properties of a part of a pattern.
#[derive(Debug, Default, Clone)]
struct Part {
    first: Vec<usize>,
    last: Vec<usize>,
    alone: Vec<usize>,
    /// True if the part can match the empty string.
    nullable: bool,
    /// True if the part can match the empty string whatever follows.
    surely_nullable: bool,
    /// True if the part is a lookahead.
    is_lookahead: bool,
}

impl Follow {
    /// Parses a pattern; `None` if it is not supported. The only supported lookaround is `(?!\S)`
    /// after a space. Anchors, possessive or atomic parts, and patterns that can match the empty
    /// string are not supported.
    pub(crate) fn new(pattern: &str) -> Option<Self> {
        if has_possessive(pattern) {
            return None;
        }
        let plain = pattern.replace(r"(?!\S)", &LOOKAHEAD.to_string());
        let hir = regex_syntax::parse(&plain).ok()?;
        let mut follow = Self { sets: Vec::new(), pairs: BTreeSet::new(), alone: Vec::new() };
        let whole = follow.part(&hir)?;
        follow.alone = whole.alone;
        (!whole.nullable).then_some(follow)
    }

    /// True if a match can contain `right` directly after a given character. `left` returns, for a
    /// set of characters, whether the given character may be in the set.
    pub(crate) fn joins(&self, left: impl Fn(&[(char, char)]) -> bool, right: char) -> bool {
        self.pairs.iter().any(|&(a, b)| contains(&self.sets[b], right) && left(&self.sets[a]))
    }

    /// True if a match starts at `character` whenever matching reaches it.
    pub(crate) fn starts_at(&self, character: char) -> bool {
        self.alone.iter().any(|&set| contains(&self.sets[set], character))
    }

    fn part(&mut self, hir: &Hir) -> Option<Part> {
        match hir.kind() {
            HirKind::Empty => {
                Some(Part { nullable: true, surely_nullable: true, ..Part::default() })
            }
            HirKind::Look(_) => None,
            HirKind::Literal(literal) => {
                let text = std::str::from_utf8(&literal.0).ok()?;
                if text.chars().eq([LOOKAHEAD]) {
                    return Some(Part { nullable: true, is_lookahead: true, ..Part::default() });
                }
                if text.contains(LOOKAHEAD) {
                    return None;
                }
                let parts = text.chars().map(|c| self.position(vec![(c, c)])).collect();
                self.sequence(parts)
            }
            HirKind::Class(Class::Unicode(class)) => {
                let set: Set = class.iter().map(|range| (range.start(), range.end())).collect();
                // In the parsed pattern `LOOKAHEAD` stands for `(?!\S)`, so the parser may have
                // merged `x|(?!\S)` into one class.
                let has_lookahead =
                    set.iter().any(|&(start, end)| start == LOOKAHEAD && end == LOOKAHEAD);
                (!has_lookahead).then(|| self.position(set))
            }
            HirKind::Class(Class::Bytes(class)) => {
                let set =
                    class.iter().map(|range| (char::from(range.start()), char::from(range.end())));
                let set = class.is_ascii().then(|| set.collect())?;
                Some(self.position(set))
            }
            HirKind::Capture(capture) => self.part(&capture.sub),
            HirKind::Repetition(repetition) => {
                let mut part = self.part(&repetition.sub)?;
                if repetition.max != Some(1) {
                    self.join(&part.last, &part.first);
                }
                if repetition.min == 0 {
                    (part.nullable, part.surely_nullable) = (true, true);
                } else if repetition.min > 1 {
                    part.alone.clear();
                }
                Some(part)
            }
            HirKind::Concat(parts) => {
                let parts = parts.iter().map(|part| self.part(part)).collect::<Option<_>>()?;
                self.sequence(parts)
            }
            HirKind::Alternation(parts) => {
                let mut any = Part::default();
                for part in parts {
                    let part = self.part(part)?;
                    if part.is_lookahead {
                        return None;
                    }
                    any.first.extend(part.first);
                    any.last.extend(part.last);
                    any.alone.extend(part.alone);
                    any.nullable |= part.nullable;
                    any.surely_nullable |= part.surely_nullable;
                }
                Some(any)
            }
        }
    }

    /// Adds the position of one character of `set`.
    fn position(&mut self, set: Set) -> Part {
        let index = self.sets.len();
        self.sets.push(set);
        let only = vec![index];
        Part { first: only.clone(), last: only.clone(), alone: only, ..Part::default() }
    }

    /// Combines parts that match one after the other.
    fn sequence(&mut self, parts: Vec<Part>) -> Option<Part> {
        let mut whole = Part { nullable: true, surely_nullable: true, ..Part::default() };
        for part in parts {
            if part.is_lookahead {
                let after_space = whole.last.iter().all(|&set| is_space(&self.sets[set]));
                if whole.nullable || !after_space {
                    return None;
                }
                whole.alone.clear();
                continue;
            }
            self.join(&whole.last, &part.first);
            let alone = match (whole.surely_nullable, part.surely_nullable) {
                (true, true) => [whole.alone, part.alone].concat(),
                (true, false) => part.alone,
                (false, true) => whole.alone,
                (false, false) => Vec::new(),
            };
            whole.alone = alone;
            if whole.nullable {
                whole.first.extend(&part.first);
            }
            if !part.nullable {
                whole.last.clear();
            }
            whole.last.extend(&part.last);
            whole.nullable &= part.nullable;
            whole.surely_nullable &= part.surely_nullable;
        }
        Some(whole)
    }

    fn join(&mut self, left: &[usize], right: &[usize]) {
        self.pairs.extend(left.iter().flat_map(|&a| right.iter().map(move |&b| (a, b))));
    }
}

/// True if the pattern has a possessive quantifier, which this parser would read as two greedy
/// ones.
fn has_possessive(pattern: &str) -> bool {
    let (mut classes, mut after_quantifier) = (0_u32, false);
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => _ = characters.next(),
            '[' => classes += 1,
            ']' => classes = classes.saturating_sub(1),
            '+' if classes == 0 && after_quantifier => return true,
            _ => {}
        }
        after_quantifier = matches!(character, '+' | '*' | '?');
    }
    false
}

/// True if `set` contains `character`.
pub(crate) fn contains(set: &[(char, char)], character: char) -> bool {
    let after = set.partition_point(|&(start, _)| start <= character);
    after.checked_sub(1).is_some_and(|at| character <= set[at].1)
}

/// True if `set` contains only spaces.
pub(crate) fn is_space(set: &[(char, char)]) -> bool {
    set.iter().all(|&(start, end)| (start..=end).all(char::is_whitespace))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn joins(follow: &Follow, left: char, right: char) -> bool {
        follow.joins(|set| contains(set, left), right)
    }

    #[test]
    fn neighbours_of_known_patterns() {
        let gpt2 = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
        let follow = Follow::new(gpt2).expect("understood");
        for (left, right) in
            [('a', 'b'), (' ', 'a'), ('\'', 's'), (' ', ' '), (' ', '.'), ('1', '2')]
        {
            assert!(joins(&follow, left, right), "{left:?} {right:?}");
        }
        for (left, right) in
            [('a', ' '), ('a', '1'), ('.', 'a'), ('a', '.'), ('\n', 'a'), ('.', '\n')]
        {
            assert!(!joins(&follow, left, right), "{left:?} {right:?}");
        }
        assert!(['a', '1', ' ', '\n', '.', '字'].into_iter().all(|c| follow.starts_at(c)));
    }

    #[test]
    fn what_does_not_match_alone_starts_nothing() {
        let follow = Follow::new(r"ab|\s+(?!\S)|c?d|e{2}|(?:f|g)+").expect("understood");
        let starts: String = "abcdefg ".chars().filter(|&c| follow.starts_at(c)).collect();
        assert_eq!(starts, "dfg");
    }

    #[test]
    fn plus_signs_that_possess_nothing() {
        for pattern in ["[*+]", r"a\++", r"[\[*+]b", "a{2}+", "a+b+"] {
            assert!(Follow::new(pattern).is_some(), "{pattern}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for pattern in [
            "a*",
            "a|",
            r"\ba",
            "^a",
            "(?<=a)b",
            "(?=a)b",
            "a(?!b)",
            "a++",
            r"[+\]]?+a",
            "(?>a)",
            r"a(?!\S)|b",
            r"(?!\S)a",
            r"\s?(?!\S)|a",
        ] {
            assert!(Follow::new(pattern).is_none(), "{pattern}");
        }
    }

    /// Generates patterns over a few letters.
    fn pattern() -> impl Strategy<Value = String> {
        let leaf = prop::sample::select(vec!["a", "b", "c", "[ab]", "[^a]", "ab", "(?i:b)"]);
        let leaf = leaf.prop_map(str::to_owned);
        leaf.prop_recursive(4, 24, 3, |inner| {
            let quantifier = prop::sample::select(vec!["*", "+", "?", "{2}", "{1,3}", "{0,2}"]);
            prop_oneof![
                prop::collection::vec(inner.clone(), 2..4).prop_map(|parts| parts.concat()),
                prop::collection::vec(inner.clone(), 2..4)
                    .prop_map(|parts| format!("(?:{})", parts.join("|"))),
                (inner, quantifier)
                    .prop_map(|(part, quantifier)| format!("(?:{part}){quantifier}")),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn no_match_has_two_characters_that_are_not_joined(pattern in pattern(), text in "[abcB]{0,12}") {
            let Some(follow) = Follow::new(&pattern) else {
                let whole = regex_automata::meta::Regex::new(&pattern).expect("a pattern");
                prop_assert!(whole.find("").is_some(), "{} was refused", pattern);
                return Ok(());
            };
            let regex = regex_automata::meta::Regex::new(&pattern).expect("a pattern");
            for found in regex.find_iter(&text) {
                let inside: Vec<char> = text[found.range()].chars().collect();
                for pair in inside.windows(2) {
                    prop_assert!(joins(&follow, pair[0], pair[1]), "{} in {:?}", pattern, inside);
                }
            }
            for character in "abcB".chars().filter(|&c| follow.starts_at(c)) {
                let alone = character.to_string();
                prop_assert!(regex.find(&alone).is_some(), "{} does not match {}", pattern, alone);
            }
        }
    }
}
