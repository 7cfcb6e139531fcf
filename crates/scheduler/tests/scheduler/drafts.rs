//! Drafts, step by step, and a proposer that is right with a given probability.

use std::collections::BTreeMap;

use forebay_protocol::{Row, StepPlan, Want};
use forebay_scheduler::{
    DraftMatch, DraftSource, Drafts, Finish, History, Lookup, MAX_DRAFTED, Proposer, Request,
    SchedulerConfig,
};

use crate::device::next_token;
use crate::harness::{Harness, alone, config, request};

/// Proposes the right token with a given probability, and otherwise a wrong one.
#[derive(Debug, Clone)]
pub(crate) struct Hostile {
    tokens: Vec<i32>,
    /// Percentage of proposed tokens that are right.
    right: u64,
    adapter: Option<u32>,
    source: DraftSource,
}

impl Hostile {
    fn new(request: &Request, right: u64) -> Self {
        let tokens = [&request.prompt[..], &request.generated].concat();
        Self { tokens, right, adapter: request.adapter, source: DraftSource::Own }
    }

    /// Creates a proposer whose share of right drafts depends on the request's id.
    pub(crate) fn boxed(request: &Request) -> Box<dyn Proposer> {
        Box::new(Self::new(request, [0, 40, 80, 100][request.id as usize % 4]))
    }
}

impl Proposer for Hostile {
    fn push(&mut self, token: i32) {
        self.tokens.push(token);
    }

    fn propose(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch> {
        drafts.clear();
        let mut tokens = self.tokens.clone();
        for nth in 0..most as u64 {
            let right = next_token(self.adapter, &tokens)?;
            let draw = (tokens.len() as u64 * 31 + nth * 17) % 100;
            let token = if draw < self.right { right } else { (right + 1) % 8 };
            drafts.push(token);
            tokens.push(token);
        }
        Some(DraftMatch { length: 2 + tokens.len() as u32 % 9, source: self.source })
    }

    fn boxed_clone(&self) -> Box<dyn Proposer> {
        Box::new(self.clone())
    }
}

fn drafting(most: u32) -> SchedulerConfig {
    SchedulerConfig { drafts: Some(Drafts { most, priced: false }), pages: 64, ..config() }
}

fn with(right: u64, request: Request) -> Request {
    Request { proposer: Some(Box::new(Hostile::new(&request, right))), ..request }
}

/// Runs until all requests have ended; returns the total number of steps.
fn drained(harness: &mut Harness) -> u64 {
    harness.drain();
    harness.scheduler.stats().steps
}

/// Creates a request whose answer has `max_tokens` tokens.
fn long(id: u64, max_tokens: u32) -> Request {
    let fits = |seed: &i32| {
        let request = request(id, vec![*seed, 3, 5], max_tokens);
        alone(&request).1 == Finish::Length && alone(&request).0.len() == max_tokens as usize
    };
    let seed = (1..500).find(fits).expect("a prompt with a long answer");
    request(id, vec![seed, 3, 5], max_tokens)
}

#[test]
fn right_drafts_save_steps_and_wrong_ones_save_none() {
    for (most, right, steps) in [(3, 100, 6), (8, 100, 4), (1, 100, 11), (3, 0, 21)] {
        for depth in [1, 2] {
            let mut harness = Harness::new(drafting(most), depth);
            harness.submit(with(right, long(0, 21)));
            // The prompt's row returns the first token. At depth 2, the second plan is made before
            // the scheduler has that token, so it has no drafts.
            let steps = steps + u64::from(depth == 2 && right > 0);
            assert_eq!(drained(&mut harness), steps, "{most} {right}");
            let stats = harness.scheduler.stats().drafts;
            let accepted = if right == 100 { 21 - steps } else { 0 };
            assert_eq!(stats.accepted, accepted);
            assert!(stats.drafted >= stats.accepted && stats.rows > 0);
            assert_eq!(stats.accepted_at.0.iter().sum::<u64>(), accepted);
        }
    }
}

/// Returns the encoded plans of a run.
fn plans(config: SchedulerConfig, prepare: fn(Request) -> Request) -> Vec<Vec<u8>> {
    let mut harness = Harness::new(config, 2);
    for id in 0..6 {
        harness.submit(prepare(request(id, vec![id as i32 + 1; 5 + 3 * id as usize], 9)));
    }
    let mut plans = Vec::new();
    let encoded = |plan: &StepPlan| {
        let mut bytes = Vec::new();
        plan.encode(&mut bytes).expect("within the limit");
        bytes
    };
    loop {
        while harness.plan() {
            plans.push(encoded(&harness.plan));
        }
        if !harness.apply() {
            return plans;
        }
    }
}

#[test]
fn without_drafts_each_plan_is_the_same_to_the_bit() {
    #[derive(Debug, Clone)]
    struct Silent;
    impl Proposer for Silent {
        fn push(&mut self, _: i32) {}
        fn propose(&self, _: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch> {
            drafts.clear();
            None
        }
        fn boxed_clone(&self) -> Box<dyn Proposer> {
            Box::new(self.clone())
        }
    }
    let off = plans(config(), |request| request);
    let drafts = Some(Drafts { most: 8, priced: true });
    let on = SchedulerConfig { drafts, ..config() };
    assert_eq!(plans(on.clone(), |request| request), off, "no proposer");
    let silent = |request| Request { proposer: Some(Box::new(Silent)), ..request };
    assert_eq!(plans(on, silent), off, "no draft");
}

#[test]
fn nobody_gives_way_for_a_draft() {
    // In the end the three requests together need all pages, or more pages than there are.
    for (right, pages) in [(0, 9), (100, 9), (0, 7), (100, 7), (100, 40)] {
        let drafts = Some(Drafts { most: 8, priced: false });
        let config = SchedulerConfig { drafts, pages, fair: false, ..config() };
        let mut harness = Harness::new(config, 2);
        for id in 0..3 {
            harness.submit(with(right, long(id, 8)));
        }
        let mut for_drafts = 0;
        while harness.plan() || harness.apply() {
            let ahead = |(slot, index, page): (u32, u32, Option<u32>)| {
                let mut rows = harness.plan.rows().filter(|row| row.slot == slot);
                let most = |row: Row| row.want != Want::TOKEN && 4 * index > row.start;
                page.is_some() && rows.any(most) && harness.plan.new_slots().next().is_none()
            };
            if harness.plan.page_writes().any(ahead) {
                for_drafts += 1;
                let stats = harness.scheduler.stats();
                assert!(stats.pages_free >= stats.running, "{stats:?}");
            }
            harness.plan.begin(0);
        }
        assert!(for_drafts > 0 || pages < 40);
        assert!(harness.scheduler.stats().drafts.rows > 0);
        harness.drain();
    }
}

#[test]
fn drafts_come_last_and_within_what_a_step_has() {
    let config = SchedulerConfig { token_budget: 8, ..drafting(8) };
    let mut harness = Harness::new(config, 1);
    harness.submit(with(100, long(0, 30)));
    harness.plan();
    harness.apply();
    harness.submit(request(1, vec![2; 40], 1));
    let mut both = 0;
    while harness.clients[&1].end.is_none() {
        assert!(harness.plan());
        let plan = &harness.plan;
        let rows: u32 = plan.rows().map(|row| row.length).sum();
        let drafts: usize = plan.drafts().map(<[i32]>::len).sum();
        assert!(rows + drafts as u32 <= 8 || drafts == 0, "{rows} and {drafts} drafts");
        both += u32::from(rows > 1);
        harness.apply();
    }
    assert!(both >= 5, "the prompt takes the rest of the budget");
    harness.drain();
}

#[test]
fn plans_wait_only_while_drafts_are_there() {
    let mut harness = Harness::new(drafting(4), 2);
    harness.submit(with(100, long(0, 30)));
    harness.plan();
    harness.plan();
    harness.apply();
    harness.apply();
    assert!(harness.plan() && !harness.plan(), "the result decides where the next row begins");
    harness.submit(request(1, vec![2; 6], 3));
    assert!(!harness.plan(), "all requests wait, or the batch would stay split");
    harness.apply();
    harness.drain();
    let mut harness = Harness::new(drafting(4), 2);
    harness.submit(request(0, vec![1; 4], 8));
    assert!(harness.plan() && harness.plan(), "no request has drafts");
    harness.drain();
}

#[test]
fn blocks_are_those_of_tokens_that_were_generated() {
    for right in [0, 60, 100] {
        let mut harness = Harness::new(drafting(8), 2);
        let asked = long(0, 24);
        harness.submit(with(right, asked.clone()));
        let mut guesses = Vec::new();
        while harness.plan() || harness.apply() {
            let known = [&asked.prompt[..], &harness.clients[&0].tokens].concat();
            let drafts = harness.plan.drafts().next().unwrap_or_default();
            if !drafts.is_empty() {
                guesses.push([&known[..], drafts].concat());
            }
        }
        let whole = [&asked.prompt[..], &harness.clients[&0].tokens].concat();
        assert!(guesses.len() > 2);
        guesses.push(whole.clone());
        for (id, guess) in (1..).zip(guesses) {
            harness.submit(request(id, [&guess[..], &[1]].concat(), 2));
            harness.plan();
            let equal = guess.iter().zip(&whole).take_while(|(one, other)| one == other).count();
            // The last token was never computed.
            let computed = equal.min(whole.len() - 1) as u32;
            assert_eq!(
                harness.clients[&id].cached_tokens,
                computed / 4 * 4,
                "{guess:?} of {whole:?}"
            );
            while harness.apply() || harness.plan() {}
        }
        harness.drain();
    }
}

#[test]
fn a_step_of_many_rows_has_no_drafts_and_plans_run_ahead() {
    let rows = MAX_DRAFTED;
    let config = SchedulerConfig {
        slots: 2 * rows,
        max_running: rows,
        pages: 16 * rows,
        token_budget: 4 * rows,
        ..drafting(4)
    };
    let mut harness = Harness::new(config, 2);
    for id in 0..u64::from(rows) {
        harness.submit(with(100, long(id, 6)));
    }
    while harness.plan() {}
    harness.apply();
    assert!(harness.plan() && harness.scheduler.in_flight() == 2, "no request waits for a result");
    harness.drain();
    assert_eq!(harness.scheduler.stats().drafts.rows, 0);
}

#[test]
fn a_predicted_answer_is_told_of() {
    let asked = long(0, 12);
    let (answer, _) = alone(&asked);
    for (predicted, least) in [(answer.clone(), 7), (answer.iter().map(|it| it + 900).collect(), 0)]
    {
        let history = History::new(&predicted, &asked.prompt);
        let proposer: Box<dyn Proposer> = Box::new(Lookup::new(history.into()));
        let mut harness = Harness::new(drafting(4), 2);
        harness.submit(Request { proposer: Some(proposer), ..asked.clone() });
        harness.drain();
        let told = &harness.predicted;
        let (accepted, _) = told.get(&0).copied().unwrap_or_default();
        assert!(accepted >= least && (least > 0 || accepted == 0), "{told:?}");
    }
}

#[test]
fn the_device_learns_of_no_draft_it_cannot_use() {
    // The drafts reach the end of the request, and the end of its pages.
    let mut harness = Harness::new(SchedulerConfig { pages: 4, ..drafting(8) }, 1);
    harness.submit(with(100, long(0, 9)));
    let mut most = BTreeMap::new();
    while harness.plan() {
        for row in harness.plan.rows() {
            if let Want::Tokens(tokens) = row.want {
                most.insert(row.start, tokens);
                assert!(row.start + row.length + tokens <= 12, "its last token needs no compute");
            }
        }
        harness.apply();
    }
    assert!(most.values().any(|&tokens| tokens > 1), "{most:?}");
    harness.drain();
}
