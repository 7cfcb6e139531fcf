//! All restrictions of one request: its grammar, its reasoning, and forbidden tokens.

use std::fmt;
use std::sync::Arc;

use forebay_engine::{Allowed, Constraint, ConstraintError};
use llguidance::toktrie::SimpleVob;

use crate::attic::Attic;
use crate::compile::{CountedMatcher, Template, brief};
use crate::growth::{Grown, Growth};
use crate::thinking::{Markers, Phase, Start, Thinking};

/// Restrictions that need no grammar. The choices of a request share them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Ids that may follow where the grammar can end: the model's end-of-sequence ids, and the
    /// request's stop ids.
    pub ends: Arc<[i32]>,
    /// The answer has at least this many tokens, unless nothing else than an end is possible.
    pub min_tokens: u32,
    /// The only allowed ids, ascending.
    pub allowed: Option<Arc<[i32]>>,
    /// Lists of tokens, none empty. The last token of a list may not follow the others, unless
    /// nothing else is possible.
    pub bad_words: Arc<[Box<[i32]>]>,
}

/// The bounds of reasoning before the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reasoning {
    /// The marks around the reasoning.
    pub markers: Markers,
    /// Whether generation starts in the reasoning or the answer.
    pub start: Start,
    /// The largest number of reasoning tokens; `None`: unlimited.
    pub budget: Option<u32>,
}

/// The constraint of one request.
pub(crate) struct Rules {
    grammar: Option<Follower>,
    attic: Attic,
    thinking: Option<Thinking>,
    bounds: Bounds,
    /// Tokens so far.
    said: u32,
    /// The last tokens, as many as bad words need.
    recent: Vec<i32>,
    /// True if the grammar has ended but the request continued; now any token is allowed.
    over: bool,
}

/// Follows an answer through a template's grammar.
///
/// The matcher takes most of a request's memory, so it is created only when it is needed. A choice
/// in the queue has none, and the first mask comes from the template.
struct Follower {
    template: Arc<Template>,
    growth: Arc<Growth>,
    /// The matcher, once a second mask was needed.
    running: Option<Box<RunningMatcher>>,
    /// The tokens of the answer so far.
    said: Vec<u32>,
    /// True if the first of them were generated elsewhere.
    elsewhere: bool,
}

/// The matcher of one request.
struct RunningMatcher {
    counted: CountedMatcher,
    /// Tokens that it has followed.
    followed: usize,
    /// Bytes of the lexer when the matcher was created.
    begin: usize,
    grown: Grown,
}

impl Drop for Rules {
    fn drop(&mut self) {
        if let Some(grammar) = self.grammar.take() {
            self.attic.free(grammar);
        }
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
    /// The rules of an answer whose first tokens are `said`. The matcher is created later, and
    /// these tokens are only checked then.
    pub(crate) fn new(
        template: Option<&Arc<Template>>,
        reasoning: Option<Reasoning>,
        bounds: Bounds,
        said: &[i32],
        attic: Attic,
    ) -> Self {
        let again = template.is_none();
        let mut rules = Self {
            grammar: template.map(|template| Follower {
                template: Arc::clone(template),
                growth: Arc::clone(&attic.growth),
                running: None,
                said: Vec::new(),
                elsewhere: !said.is_empty(),
            }),
            attic,
            thinking: reasoning.map(|r| Thinking::new(r.markers, r.start, r.budget, again)),
            bounds,
            said: 0,
            recent: Vec::new(),
            over: false,
        };
        for &token in said {
            if let Some(grammar) = rules.advance(token) {
                grammar.said.push(token.cast_unsigned());
            }
        }
        rules
    }

    /// Records a token of the answer. Returns the grammar if the token is subject to it.
    fn advance(&mut self, token: i32) -> Option<&mut Follower> {
        self.note(token);
        if let Some(thinking) = &mut self.thinking {
            let first = self.grammar.as_ref().and_then(Follower::first);
            let answers = first.is_some_and(|first| get(first, token));
            if thinking.accept(token, answers) {
                return None;
            }
        }
        let grammar = self.grammar.as_mut().filter(|_| !self.over)?;
        if self.bounds.ends.contains(&token) {
            self.over = true;
            return None;
        }
        Some(grammar)
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

    /// Removes forbidden words from a mask; true if any was removed.
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

    /// Removes end tokens from the mask of an answer that is too short; true if any was removed.
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

/// The state of the rules before drafts, except the matcher's.
struct Before {
    thinking: Option<Thinking>,
    said: u32,
    recent: Vec<i32>,
    over: bool,
    /// Tokens of the grammar.
    of_grammar: usize,
}

impl Constraint for Rules {
    fn accept(&mut self, token: i32) -> Result<(), ConstraintError> {
        self.advance(token).map_or(Ok(()), |grammar| grammar.accept(token))
    }

    fn walk(
        &mut self,
        drafts: &[i32],
        masks: &mut [&mut [u32]],
    ) -> Result<Vec<Allowed>, ConstraintError> {
        let Some((mut last, others)) = masks.split_first_mut() else { return Ok(Vec::new()) };
        let mut made = vec![self.next(last)?];
        let before = (!drafts.is_empty()).then(|| self.before());
        for (&draft, words) in drafts.iter().zip(others) {
            if made.last() == Some(&Allowed::Some) && !get(last, draft) {
                break;
            }
            // A draft that can't be continued only matters for the row that begins there, if any
            // does.
            let Ok(allowed) = self.accept(draft).and_then(|()| self.next(words)) else { break };
            made.push(allowed);
            last = words;
        }
        before.into_iter().for_each(|before| self.go_back(before));
        Ok(made)
    }

    fn restrict(&mut self, most: usize, drafts: &mut Vec<i32>) -> Result<usize, ConstraintError> {
        drafts.truncate(most);
        let forced = self.forced(most)?;
        if drafts.starts_with(&forced) {
            self.keep_possible(drafts)?;
        } else {
            drafts.clone_from(&forced);
        }
        Ok(forced.len())
    }
}

impl Rules {
    fn before(&self) -> Before {
        Before {
            thinking: self.thinking.clone(),
            said: self.said,
            recent: self.recent.clone(),
            over: self.over,
            of_grammar: self.grammar.as_ref().map_or(0, |grammar| grammar.said.len()),
        }
    }

    fn go_back(&mut self, before: Before) {
        let Before { thinking, said, recent, over, of_grammar } = before;
        (self.thinking, self.said, self.recent, self.over) = (thinking, said, recent, over);
        if let Some(dropped) = self.grammar.as_mut().and_then(|it| it.go_back(of_grammar)) {
            self.attic.free(dropped);
        }
    }

    fn phase(&self) -> Phase {
        self.thinking.as_ref().map_or(Phase::Answer, Thinking::phase)
    }

    /// The matcher for the next token, if it was created already.
    fn matcher(&mut self) -> Result<Option<&mut RunningMatcher>, ConstraintError> {
        let follows = self.phase() == Phase::Answer && !self.over;
        let grammar = self.grammar.as_mut().filter(|grammar| follows && grammar.first().is_none());
        match grammar {
            Some(grammar) if grammar.running.is_some() => grammar.running().map(Some),
            _ => Ok(None),
        }
    }

    /// Up to `most` tokens that must come next because no others are allowed.
    fn forced(&mut self, most: usize) -> Result<Vec<i32>, ConstraintError> {
        let mut thinking = self.thinking.clone();
        let mut forced = Vec::new();
        while let Some(thinking) = &mut thinking
            && let Phase::Forced(token) = thinking.phase()
        {
            if forced.len() == most {
                return Ok(forced);
            }
            forced.push(token);
            thinking.accept(token, false);
        }
        // If other bounds may exclude a token, the masks decide.
        let free = self.bounds.allowed.is_none() && self.bounds.bad_words.is_empty();
        if !forced.is_empty() || !free || self.matcher()?.is_none() {
            return Ok(forced);
        }
        let before = self.grammar.as_ref().map_or(0, |grammar| grammar.said.len());
        // A token is only certain if the one before it is: several tokenisations may be possible.
        while forced.len() < most
            && let Ok(Some(running)) = self.matcher()
            && let Some(&token) = running.counted.matcher.compute_ff_tokens().first()
        {
            let token = token.cast_signed();
            forced.push(token);
            // After the end any token is allowed.
            let ends = self.bounds.ends.contains(&token);
            if ends || self.grammar.as_mut().is_some_and(|it| it.accept(token).is_err()) {
                break;
            }
        }
        if let Some(dropped) = self.grammar.as_mut().and_then(|it| it.go_back(before)) {
            self.attic.free(dropped);
        }
        Ok(forced)
    }

    /// Truncates drafts before the first one that the grammar does not allow.
    fn keep_possible(&mut self, drafts: &mut Vec<i32>) -> Result<(), ConstraintError> {
        let ends = Arc::clone(&self.bounds.ends);
        let Some(running) = self.matcher()? else { return Ok(()) };
        let end = drafts.iter().position(|draft| ends.contains(draft)).unwrap_or(drafts.len());
        let known = running.counted.tokens();
        let tokens: Vec<u32> = drafts[..end]
            .iter()
            .map(|draft| draft.cast_unsigned())
            .take_while(|&token| (token as usize) < known)
            .collect();
        let possible = running.counted.matcher.validate_tokens(&tokens).map_err(broken)?;
        // No token follows the end.
        drafts.truncate(if possible == end { end + 1 } else { possible });
        Ok(())
    }

    /// Writes the tokens that may come next.
    fn next(&mut self, words: &mut [u32]) -> Result<Allowed, ConstraintError> {
        let phase = self.phase();
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
            return Err(ConstraintError(why.to_owned()));
        }
        Ok(if masked { Allowed::Some } else { Allowed::Everything })
    }
}

impl Follower {
    /// The first mask, if it is the next one.
    fn first(&self) -> Option<&[u32]> {
        self.said.is_empty().then(|| self.template.first())
    }

    fn accept(&mut self, token: i32) -> Result<(), ConstraintError> {
        match self.first() {
            Some(first) if get(first, token) => {
                self.said.push(token.cast_unsigned());
                Ok(())
            }
            Some(_) => {
                Err(ConstraintError(format!("the grammar: the token {token} is not allowed")))
            }
            None => {
                self.said.push(token.cast_unsigned());
                self.running().map(|_| ())
            }
        }
    }

    /// The matcher after the tokens so far.
    fn running(&mut self) -> Result<&mut RunningMatcher, ConstraintError> {
        let Self { template, growth, running, said, elsewhere } = self;
        let fresh = running.is_none();
        let running = running.get_or_insert_with(|| {
            let counted = template.matcher();
            let (begin, grown) = (counted.bytes(), growth.matcher());
            Box::new(RunningMatcher { counted, followed: 0, begin, grown })
        });
        let RunningMatcher { counted, followed, .. } = &mut **running;
        let new = &said[std::mem::replace(followed, said.len())..];
        counted.matcher.consume_tokens(new).map_err(|error| {
            let ConstraintError(error) = broken(error);
            let resumed = fresh && *elsewhere;
            ConstraintError(if resumed {
                format!("the tokens so far do not fit: {error}")
            } else {
                error
            })
        })?;
        Ok(running)
    }

    /// Rolls back to the state after `tokens` tokens. Returns the matcher if it cannot roll back
    /// and has to be replaced.
    fn go_back(&mut self, tokens: usize) -> Option<Box<RunningMatcher>> {
        self.said.truncate(tokens);
        let running = self.running.as_mut()?;
        let back = running.followed.saturating_sub(tokens);
        running.followed -= back;
        let went = running.counted.matcher.rollback(back);
        if went.is_ok() { None } else { self.running.take() }
    }

    /// Writes the tokens that the grammar allows. Where it can end, these include all of `ends`.
    fn mask(&mut self, words: &mut [u32], ends: &[i32]) -> Result<(), ConstraintError> {
        words.fill(0);
        let copy = |from: &[u32], words: &mut [u32]| {
            let both = from.len().min(words.len());
            words[..both].copy_from_slice(&from[..both]);
        };
        match self.first() {
            Some(first) => copy(first, words),
            None => {
                let mask = self.running()?.mask()?;
                copy(mask.as_slice(), words);
            }
        }
        // An end token that the client chose may also be part of the answer. Only the model's own
        // end tokens show that it is complete.
        if self.template.eos().iter().any(|&id| get(words, id)) {
            ends.iter().for_each(|&id| set(words, id));
        }
        Ok(())
    }
}

impl RunningMatcher {
    fn mask(&mut self) -> Result<SimpleVob, ConstraintError> {
        let mask = self.counted.matcher.compute_mask_or_eos().map_err(broken)?;
        let grown = self.counted.bytes().saturating_sub(self.begin);
        if !self.grown.note(grown) {
            let why = "all that run have grown to their limit (--grammar-cache-bytes)";
            return Err(ConstraintError(format!(
                "the grammar: {why}, and this one by {grown} bytes"
            )));
        }
        Ok(mask)
    }
}

/// An error of a matcher.
fn broken(error: impl fmt::Display) -> ConstraintError {
    ConstraintError(format!("the grammar: {}", brief(&error.to_string())))
}

/// A token's word and bit in a mask; `None`: it is outside the mask.
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

/// Of the set bits, keeps only `ids`, which are ascending.
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
