//! An engine on a simulated device, and requests with constraints.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_engine::{
    Allowed, Constraint, ConstraintError, DraftMatch, DraftSource, EngineConfig, EngineRequest,
    FinishReason, Proposer, Request,
};
use forebay_sim::testing::{self, Hook, RigParts, Story, VOCAB, text};
use forebay_sim::{DeviceModel, SimClock, SimConfig, Timing, next_token};

/// A constraint that usually allows only three tokens, which depend on all tokens before. Sometimes
/// it allows every token.
#[derive(Debug)]
pub(crate) struct Few {
    pub(crate) said: Vec<i32>,
    /// Fails when the mask after this many tokens is requested; `None`: never.
    pub(crate) breaks_at: Option<usize>,
    /// The number of masks that were requested.
    pub(crate) asked: Arc<AtomicU64>,
}

/// The tokens that may follow `said`; `None` if all may.
pub(crate) fn allowed(said: &[i32]) -> Option<[i32; 3]> {
    let mix =
        said.iter().fold(7_u64, |mix, &token| mix.wrapping_mul(31).wrapping_add(token as u64 + 1));
    (mix % 5 != 0).then(|| [mix % 1000, mix / 7 % 1000, mix / 49 % 1000].map(|id| id as i32))
}

impl Constraint for Few {
    fn accept(&mut self, token: i32) -> Result<(), ConstraintError> {
        if allowed(&self.said).is_some_and(|ids| !ids.contains(&token)) {
            return Err(ConstraintError(format!("{token} after {:?}", self.said)));
        }
        self.said.push(token);
        Ok(())
    }

    fn walk(
        &mut self,
        drafts: &[i32],
        masks: &mut [&mut [u32]],
    ) -> Result<Vec<Allowed>, ConstraintError> {
        let mut made = Vec::new();
        let said = self.said.len();
        for (nth, words) in masks.iter_mut().enumerate() {
            if nth > 0 && self.accept(drafts[nth - 1]).is_err() {
                break;
            }
            match self.next(words) {
                Ok(allowed) => made.push(allowed),
                Err(broken) if nth == 0 => return Err(broken),
                Err(_) => break,
            }
        }
        self.said.truncate(said);
        Ok(made)
    }

    fn restrict(&mut self, most: usize, drafts: &mut Vec<i32>) -> Result<usize, ConstraintError> {
        let mut said = self.said.clone();
        said.extend(drafts.iter().take(most));
        let fits = |end: &usize| allowed(&said[..*end]).is_none_or(|ids| ids.contains(&said[*end]));
        drafts.truncate((self.said.len()..said.len()).take_while(fits).count());
        Ok(0)
    }
}

impl Few {
    fn next(&mut self, words: &mut [u32]) -> Result<Allowed, ConstraintError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if self.breaks_at == Some(self.said.len()) {
            return Err(ConstraintError("it breaks here".into()));
        }
        assert_eq!(words.len(), 32);
        let Some(ids) = allowed(&self.said) else { return Ok(Allowed::Everything) };
        words.fill(0);
        for id in ids {
            words[id as usize / 32] |= 1 << (id % 32);
        }
        Ok(Allowed::Some)
    }
}

/// A proposer that drafts the tokens of a known answer, some of them replaced by wrong ones.
#[derive(Debug, Clone)]
struct Knows {
    answer: Vec<i32>,
    said: usize,
    /// The percentage of drafts that are right.
    right: usize,
}

impl Proposer for Knows {
    fn push(&mut self, _: i32) {
        self.said += 1;
    }

    fn propose(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch> {
        let expected = self.answer.iter().enumerate().skip(self.said).take(most);
        let drafted =
            expected.map(
                |(at, &token)| {
                    if at * 37 % 100 < self.right { token } else { (token + 1) % 1000 }
                },
            );
        drafts.clear();
        drafts.extend(drafted);
        let source = DraftSource::Own;
        (!drafts.is_empty()).then_some(DraftMatch { length: 4, source })
    }

    fn boxed_clone(&self) -> Box<dyn Proposer> {
        Box::new(self.clone())
    }
}

/// An engine, and the number of masks that were requested.
pub(crate) struct Rig {
    rig: testing::Rig,
    pub(crate) asked: Arc<AtomicU64>,
}

impl Deref for Rig {
    type Target = testing::Rig;

    fn deref(&self) -> &testing::Rig {
        &self.rig
    }
}

pub(crate) fn config(lookahead: u32, mask_threads: usize) -> EngineConfig {
    EngineConfig {
        max_running_requests: 24,
        slots: 36,
        page_size: 4,
        chunked_prefill_size: 48,
        lookahead,
        // The tests assume admission in the order of arrival.
        step_shares: false,
        max_queued_requests: 1000,
        context_length: 256,
        watchdog_timeout: Duration::from_secs(10),
        load_timeout: Duration::ZERO,
        mask_threads,
        ..EngineConfig::default()
    }
}

impl Rig {
    pub(crate) fn start(config: EngineConfig, pages: u32, tokens_a_row: u32, hook: Hook) -> Self {
        let parts = RigParts { hooks: vec![hook], ..RigParts::default() };
        Self::with(config, pages, tokens_a_row, parts)
    }

    pub(crate) fn with(
        config: EngineConfig,
        pages: u32,
        tokens_a_row: u32,
        parts: RigParts,
    ) -> Self {
        let clock = SimClock::virtual_time();
        let sim = SimConfig {
            tokens_a_row,
            clock: clock.clone(),
            timing: Timing {
                model: DeviceModel { step_us: 1000.0, row_us: 10.0, ..DeviceModel::INSTANT },
                ..Timing::default()
            },
            load_us: 1_000_000,
            page_count: pages,
            vocab_size: VOCAB,
            text: text(),
            ..SimConfig::default()
        };
        let rig = testing::Rig::start(config, sim, parts).held();
        Self { rig, asked: Arc::default() }
    }

    pub(crate) fn submit(&self, id: u64, max_tokens: u32, constraint: Option<Few>) {
        let constraint = constraint.map(|few| Box::new(few) as Box<dyn Constraint>);
        self.submit_of(0, id, max_tokens, constraint);
    }

    pub(crate) fn submit_of(
        &self,
        client: u64,
        id: u64,
        max_tokens: u32,
        constraint: Option<Box<dyn Constraint>>,
    ) {
        let prompt = prompt(id).into();
        let request = Request { id, client, prompt, max_tokens, ..Request::default() };
        let request = EngineRequest { request, constraint, ..EngineRequest::default() };
        self.handle.submit(request).expect("room");
    }

    /// Like [`Self::submit_all`], with drafts. Each request has its own proposer, with its own
    /// share of right drafts.
    pub(crate) fn submit_drafted(&self, answers: &HashMap<u64, Story>) {
        for (&id, story) in answers {
            let constraint = (id % 3 != 0).then(|| Box::new(self.few()) as Box<dyn Constraint>);
            let right = [0, 50, 90, 100][id as usize % 4];
            let proposer = Knows { answer: story.tokens.clone(), said: 0, right };
            let request = Request {
                id,
                prompt: prompt(id).into(),
                max_tokens: length(id),
                proposer: Some(Box::new(proposer)),
                ..Request::default()
            };
            let request = EngineRequest { request, constraint, ..EngineRequest::default() };
            self.handle.submit(request).expect("room");
        }
    }

    pub(crate) fn few(&self) -> Few {
        Few { said: Vec::new(), breaks_at: None, asked: Arc::clone(&self.asked) }
    }

    /// Submits requests, two of three with a constraint.
    pub(crate) fn submit_all(&self, count: u64) {
        for id in 0..count {
            self.submit(id, length(id), (id % 3 != 0).then(|| self.few()));
        }
    }
}

pub(crate) fn prompt(id: u64) -> Vec<i32> {
    testing::prompt(id, 0)
}

pub(crate) fn length(id: u64) -> u32 {
    1 + (id as u32 * 13) % 90
}

/// Checks that the tokens obey their constraints, and that requests without a constraint get the
/// same tokens as when they run alone.
pub(crate) fn check(stories: &HashMap<u64, Story>) {
    for (&id, story) in stories {
        assert_eq!(story.end, Some(FinishReason::Length), "request {id}");
        assert_eq!(story.tokens.len(), length(id) as usize, "request {id}");
        let mut all = prompt(id);
        let start = all.len();
        for (at, &token) in story.tokens.iter().enumerate() {
            if id % 3 == 0 {
                assert_eq!(token, next_token(&text(), &all, start), "request {id}");
            } else if let Some(ids) = allowed(&story.tokens[..at]) {
                assert!(ids.contains(&token), "request {id}: {token} at {at}");
            }
            all.push(token);
        }
    }
}
