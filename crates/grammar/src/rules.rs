//! All restrictions of one request: its grammar, its reasoning, and forbidden tokens.

use std::fmt;
use std::sync::Arc;

use forebay_engine::{Allowed, Broken, Constraint};
use llguidance::Matcher;

use crate::compile::{Template, brief};
use crate::service::Attic;
use crate::thinking::{Markers, Phase, Start, Thinking};

/// Restrictions that need no grammar. The choices of a request share them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Ids that may come at an end of the grammar: the model's end-of-sequence ids, and the
    /// request's stop ids.
    pub ends: Arc<[i32]>,
    /// The number of tokens before which the answer does not end, unless nothing else can come.
    pub min_tokens: u32,
    /// The only ids that can come, ascending.
    pub allowed: Option<Arc<[i32]>>,
    /// Lists of tokens, none empty. The last token of a list may not follow the others, unless
    /// nothing else can come.
    pub bad_words: Arc<[Box<[i32]>]>,
}

/// The bounds of reasoning before the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reasoning {
    /// The marks around the reasoning.
    pub markers: Markers,
    /// The part of the answer at which the prompt leaves the model.
    pub start: Start,
    /// The largest number of tokens of reasoning; `None`: without a limit.
    pub budget: Option<u32>,
}

/// The constraint of one request.
pub(crate) struct Rules {
    grammar: Option<Follower>,
    thinking: Option<Thinking>,
    bounds: Bounds,
    /// Tokens so far.
    said: u32,
    /// The last tokens, as many as a bad word may need.
    recent: Vec<i32>,
    /// The grammar has come to its end, and the request went on: everything may come.
    over: bool,
}

/// A matcher on its way through an answer.
struct Follower {
    /// Gone only while it is dropped.
    matcher: Option<Matcher>,
    /// The first mask, until a token was said.
    first: Option<Arc<[u32]>>,
    /// The model's end-of-sequence ids.
    eos: Arc<[i32]>,
    /// The queue of matchers that are to be freed. To free a large one takes longer than a step may
    /// wait.
    attic: Attic,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.attic.extend(self.matcher.take());
    }
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (grammar, bounds) = (self.grammar.is_some(), &self.bounds);
        f.debug_struct("Rules")
            .field("grammar", &grammar)
            .field("bounds", bounds)
            .finish_non_exhaustive()
    }
}

impl Rules {
    pub(crate) fn new(
        grammar: Option<(&Template, Attic)>,
        reasoning: Option<Reasoning>,
        bounds: Bounds,
    ) -> Self {
        let follower = |(template, attic): (&Template, Attic)| Follower {
            matcher: Some(template.matcher()),
            first: Some(template.first()),
            eos: template.eos(),
            attic,
        };
        let again = grammar.is_none();
        Self {
            grammar: grammar.map(follower),
            thinking: reasoning.map(|r| Thinking::new(r.markers, r.start, r.budget, again)),
            bounds,
            said: 0,
            recent: Vec::new(),
            over: false,
        }
    }

    fn note(&mut self, token: i32) {
        self.said += 1;
        let longest = self.bounds.bad_words.iter().map(|word| word.len()).max().unwrap_or(0);
        if longest > 1 {
            if self.recent.len() == longest - 1 {
                self.recent.remove(0);
            }
            self.recent.push(token);
        }
    }

    /// Takes bad words out; true: there was one.
    fn without_bad_words(&self, words: &mut [u32]) -> bool {
        let mut removed = Vec::new();
        for word in self.bounds.bad_words.iter() {
            if let Some((&last, before)) = word.split_last()
                && self.recent.ends_with(before)
                && get(words, last)
            {
                clear(words, last);
                removed.push(last);
            }
        }
        if !removed.is_empty() && is_empty(words) {
            removed.iter().for_each(|&token| set(words, token));
        }
        !removed.is_empty()
    }

    /// Takes the ends out of a mask of an answer that is too short; true: there was one.
    fn without_ends(&self, words: &mut [u32]) -> bool {
        let there: Vec<i32> =
            self.bounds.ends.iter().copied().filter(|&id| get(words, id)).collect();
        there.iter().for_each(|&id| clear(words, id));
        if is_empty(words) {
            there.iter().for_each(|&id| set(words, id));
        }
        !there.is_empty()
    }
}

impl Constraint for Rules {
    fn accept(&mut self, token: i32) -> Result<(), Broken> {
        self.note(token);
        if let Some(thinking) = &mut self.thinking {
            let first = self.grammar.as_ref().and_then(|grammar| grammar.first.as_deref());
            let answers = first.is_some_and(|first| get(first, token));
            if thinking.accept(token, answers) {
                return Ok(());
            }
        }
        let Some(grammar) = self.grammar.as_mut().filter(|_| !self.over) else { return Ok(()) };
        if self.bounds.ends.contains(&token) {
            self.over = true;
            return Ok(());
        }
        grammar.first = None;
        let consumed =
            grammar.matcher.as_mut().map(|matcher| matcher.consume_token(token.cast_unsigned()));
        consumed
            .transpose()
            .map_err(|error| Broken(format!("the grammar: {}", brief(&error.to_string()))))?;
        Ok(())
    }

    fn mask(&mut self, words: &mut [u32]) -> Result<Allowed, Broken> {
        let phase = self.thinking.as_ref().map_or(Phase::Answer, Thinking::phase);
        if let Phase::Forced(token) = phase {
            words.fill(0);
            set(words, token);
            return Ok(Allowed::Some);
        }
        let grammar = self.grammar.as_mut().filter(|_| !self.over && phase != Phase::Free);
        let mut masked = grammar.is_some();
        match grammar {
            Some(grammar) => {
                grammar.mask(words, &self.bounds.ends)?;
                if let Phase::Either(open) = phase {
                    set(words, open);
                }
            }
            None => words.fill(u32::MAX),
        }
        if let Some(allowed) = &self.bounds.allowed {
            keep(words, allowed);
            masked = true;
        }
        masked |= self.without_bad_words(words);
        let reasons = phase == Phase::Free && self.grammar.is_some();
        if self.said < self.bounds.min_tokens || reasons {
            masked |= self.without_ends(words);
        }
        if is_empty(words) {
            let why = "no token that `allowed_token_ids` names can come next";
            return Err(Broken(why.to_owned()));
        }
        Ok(if masked { Allowed::Some } else { Allowed::Everything })
    }
}

impl Follower {
    /// Writes the tokens that the grammar allows. At an allowed end these include all of `ends`.
    fn mask(&mut self, words: &mut [u32], ends: &[i32]) -> Result<(), Broken> {
        words.fill(0);
        let copy = |from: &[u32], words: &mut [u32]| {
            let both = from.len().min(words.len());
            words[..both].copy_from_slice(&from[..both]);
        };
        let Some(matcher) = &mut self.matcher else { return Ok(()) };
        match &self.first {
            Some(first) => copy(first, words),
            None => {
                let mask = matcher.compute_mask_or_eos();
                let mask = mask.map_err(|error| {
                    Broken(format!("the grammar: {}", brief(&error.to_string())))
                })?;
                copy(mask.as_slice(), words);
            }
        }
        // An end that the client has named may as well be a part of the answer: only the model's
        // own tell that it is complete.
        if self.eos.iter().any(|&id| get(words, id)) {
            ends.iter().for_each(|&id| set(words, id));
        }
        Ok(())
    }
}

/// Index of a token's word, and its bit; `None`: it is outside of the mask.
fn place(words: &[u32], token: i32) -> Option<(usize, u32)> {
    let token = usize::try_from(token).ok()?;
    (token / 32 < words.len()).then_some((token / 32, 1 << (token % 32)))
}

fn get(words: &[u32], token: i32) -> bool {
    place(words, token).is_some_and(|(at, bit)| words[at] & bit != 0)
}

fn set(words: &mut [u32], token: i32) {
    if let Some((at, bit)) = place(words, token) {
        words[at] |= bit;
    }
}

fn clear(words: &mut [u32], token: i32) {
    if let Some((at, bit)) = place(words, token) {
        words[at] &= !bit;
    }
}

/// Keeps only `ids`, which ascend, of the set bits.
fn keep(words: &mut [u32], ids: &[i32]) {
    let mut rest = ids.iter().peekable();
    for (at, word) in words.iter_mut().enumerate() {
        let mut kept = 0;
        let end = (at as i64 + 1) * 32;
        while let Some(&id) = rest.next_if(|&&id| i64::from(id) < end) {
            if id >= 0 {
                kept |= 1 << (id % 32);
            }
        }
        *word &= kept;
    }
}

fn is_empty(words: &[u32]) -> bool {
    words.iter().all(|&word| word == 0)
}
