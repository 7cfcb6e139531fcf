//! Drafting is never slower than not drafting: texts with misleading matches, on a simulated
//! machine with noisy times.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use forebay_protocol::{ROW_OK, StepPlan, StepResult};
use forebay_scheduler::{
    DraftMatch, DraftSource, Drafts, Event, History, Lookup, Proposer, Request, Scheduler,
    SchedulerConfig,
};

use crate::harness::{config, request};

/// Microseconds of a step of one position: Coder-0.5B on two cores (ADR 86).
const STEP_US: f64 = 21_200.0;
/// Times of a step by its number of positions, relative to a step of one position.
const COSTS: [(u32, f64); 9] = [
    (1, 1.0),
    (2, 1.09),
    (4, 1.15),
    (5, 1.32),
    (6, 1.51),
    (8, 2.36),
    (12, 3.10),
    (16, 3.65),
    (64, 13.0),
];
/// Microseconds from a result to the start of the next step, if that step was not planned before
/// the result.
const TURN_US: f64 = 600.0;
const ANSWER: u32 = 300;

fn step_us(positions: u32) -> f64 {
    let above = COSTS.partition_point(|&(size, _)| size < positions).clamp(1, COSTS.len() - 1);
    let ((low, cheap), (high, dear)) = (COSTS[above - 1], COSTS[above]);
    let share = (f64::from(positions) - f64::from(low)) / f64::from(high - low);
    STEP_US * (cheap + (dear - cheap) * share)
}

/// A pseudo-random number from 0 to 1.
fn draw(seed: u64, at: u64) -> f64 {
    let mut z = ((seed << 32) ^ at).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) as f64 / u64::MAX as f64
}

/// The kind of text that is generated.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Text {
    /// Words with the frequencies of a natural language, in random order: short matches are
    /// frequent, and hardly any draft is right.
    Words,
    /// The same words, with a proposer that finds long matches everywhere. This share of its drafts
    /// is right.
    Likely(f64),
    /// The same forty words, repeated.
    Repeated,
}

impl Text {
    fn token(self, id: u64, position: u64) -> i32 {
        let position = if self == Self::Repeated { position % 40 } else { position };
        100 + (draw(id, position) * 3000_f64.ln()).exp() as i32
    }

    fn proposer(self, id: u64, prompt: &[i32]) -> Box<dyn Proposer> {
        match self {
            Self::Likely(right) => Box::new(Tempting { id, right, next: prompt.len() as u64 }),
            _ => Box::new(Lookup::new(Arc::new(History::new(&[], prompt)))),
        }
    }
}

/// Proposes drafts as if they followed matches of 12 tokens. The share `right` of the drafts is
/// right.
#[derive(Debug, Clone)]
struct Tempting {
    id: u64,
    right: f64,
    next: u64,
}

impl Proposer for Tempting {
    fn push(&mut self, _: i32) {
        self.next += 1;
    }

    fn propose(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch> {
        drafts.clear();
        drafts.extend((self.next..).take(most).map(|at| {
            let right = draw(self.id + 7, at + 1000 * self.next) < self.right;
            Text::Words.token(self.id, at) + i32::from(!right)
        }));
        Some(DraftMatch { length: 12, source: DraftSource::Own })
    }

    fn boxed_clone(&self) -> Box<dyn Proposer> {
        Box::new(self.clone())
    }
}

/// The difference of measured times from the true ones.
#[derive(Debug, Clone, Copy)]
enum Noise {
    None,
    /// By up to 30 %, independently in each step.
    Steps,
    /// By 30 % in every other block of 100 steps, and by up to 10 % in each step.
    Phases,
}

impl Noise {
    fn factor(self, step: u64) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Steps => 0.7 + 0.6 * draw(5, step),
            Self::Phases => [1.0, 1.3][(step / 100 % 2) as usize] * (0.9 + 0.2 * draw(5, step)),
        }
    }
}

/// Returns the true microseconds per token. `running` requests run at a time. As one ends, the next
/// begins, until `running * answers` requests have ended.
fn token_us(
    drafts: Option<Drafts>,
    (text, noise): (Text, Noise),
    running: u32,
    answers: u64,
) -> f64 {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        slots: running + 8,
        max_running: running,
        pages: running * 30,
        page_size: 16,
        token_budget: 256,
        prefix_cache: false,
        block_events: false,
        drafts,
        ..config()
    });
    let new = |id: u64| {
        let prompt: Vec<i32> = vec![id as i32, 1, 2, 3];
        let proposer = Some(text.proposer(id, &prompt));
        Request { proposer, ..request(id, prompt, ANSWER + (id as u32 * 37) % 50) }
    };
    let mut ids = 0..u64::from(running) * answers;
    ids.by_ref().take(running as usize).for_each(|id| scheduler.submit(new(id)));
    let mut slots = BTreeMap::new();
    let mut flights: VecDeque<(StepResult, f64)> = VecDeque::new();
    let (mut plan, mut events) = (StepPlan::default(), Vec::new());
    let (mut us, mut tokens) = (0.0, 0_u64);
    loop {
        while scheduler.next_plan(&mut plan, &mut events) {
            slots.extend(
                plan.new_slots().map(|new| (new.slot, u64::from(new.tokens[0].unsigned_abs()))),
            );
            let mut result = StepResult { step: plan.step(), ..StepResult::default() };
            let mut positions = 0;
            for (row, drafts) in plan.rows().zip(plan.drafts()) {
                positions += row.length + drafts.len() as u32;
                result.row_errors.push(ROW_OK);
                if row.want.samples() {
                    let next = u64::from(row.start + row.length);
                    let right = |&(nth, &draft): &(u64, &i32)| {
                        text.token(slots[&row.slot], next + nth) == draft
                    };
                    let accepted = (0..).zip(drafts).take_while(right).count() as u64;
                    let given = next..=next + accepted;
                    result.token_counts.push(1 + accepted as i32);
                    result.tokens.extend(given.map(|at| text.token(slots[&row.slot], at)));
                }
            }
            let turn = if flights.is_empty() { TURN_US } else { 0.0 };
            let compute = step_us(positions.max(1));
            result.timing.gap_us = turn as u32;
            result.timing.device_us = (compute * noise.factor(plan.step())) as u32;
            flights.push_back((result, turn + compute));
        }
        let Some((result, took)) = flights.pop_front() else { break };
        us += took;
        scheduler.apply(&result, &mut events).expect("the result fits the plan");
        for event in events.drain(..) {
            tokens += u64::from(matches!(event, Event::Token { .. }));
            if matches!(event, Event::Finished { .. }) {
                ids.next().into_iter().for_each(|id| scheduler.submit(new(id)));
            }
        }
    }
    us / tokens as f64
}

/// Tokens per second with drafts, relative to those without.
fn gain(text: (Text, Noise), running: u32, answers: u64) -> f64 {
    let drafts = Some(Drafts { most: 8, priced: true });
    token_us(None, text, running, answers) / token_us(drafts, text, running, answers)
}

#[test]
fn texts_without_repeats_are_not_slower() {
    for noise in [Noise::None, Noise::Steps, Noise::Phases] {
        for text in [Text::Words, Text::Likely(0.0), Text::Likely(0.1), Text::Likely(0.4)] {
            for (running, answers) in [(1, 8), (8, 6), (32, 4)] {
                let gain = gain((text, noise), running, answers);
                assert!(gain >= 0.98, "{text:?}, {noise:?}, {running} at a time: {gain:.3}");
            }
        }
    }
}

#[test]
fn texts_that_repeat_are_quicker_under_noise_too() {
    for noise in [Noise::None, Noise::Steps, Noise::Phases] {
        for (text, running, least) in
            [(Text::Repeated, 1, 2.5), (Text::Repeated, 4, 1.15), (Text::Likely(0.8), 1, 1.5)]
        {
            let gain = gain((text, noise), running, 8);
            assert!(gain >= least, "{text:?}, {noise:?}, {running} at a time: {gain:.3}");
        }
    }
}
