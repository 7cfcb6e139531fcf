//! Executes a step: a plan in, a result out.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use forebay_kernels::{Given, Wanted};
use forebay_protocol::{
    AdapterOrder, MaskPlace, ROW_NOT_FINITE, ROW_OK, Ready, ReceivedMasks, RowMask as Mask,
    StepPlan, StepResult,
};

use crate::columns::Columns;
use crate::copier::{Copier, check_no_copies};
use crate::drafts::{Run, count};
use crate::prompts::{Wanted as PromptTokens, slice_rows};
use crate::runner::{Executes, HandError, Runner, no_places, timed};
use crate::sampler::{Ask, Sampled, Scratch, sample};
use crate::states::StateSteps;
use crate::tables::{PlanError, Slot, wrong};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Waits for the masks that follow a plan. Returns `None` if the brain has closed the socket.
pub(crate) type MaskSource<'a> = dyn FnMut() -> Result<Option<ReceivedMasks>, HandError> + 'a;

impl Executes for Runner {
    fn facts(&self) -> &Ready {
        &self.facts
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        masks: &mut MaskSource<'_>,
    ) -> Result<Option<StepResult>, HandError> {
        let begun = Instant::now();
        if plan.has_images() {
            return Err(PlanError("images in a plan for a model of text".into()).into());
        }
        self.tables.write(plan, &self.arena)?;
        self.tables.write_drafts(plan)?;
        match &mut self.copier {
            Some(copier) => copier.restore(plan)?,
            None => check_no_copies(plan)?,
        }
        let states = self.read_states(plan)?;
        states.load(&mut self.decoder)?;
        match &mut self.adapters {
            Some(adapters) => adapters.read(plan)?,
            None if names_places(plan) => return Err(no_places()),
            None => {}
        }
        let mut result = StepResult { step: plan.step(), ..StepResult::default() };
        let mut idle = Duration::ZERO;
        if plan.rows().len() > 0 {
            let mut wait = || {
                let since = Instant::now();
                let masks = masks();
                idle += since.elapsed();
                masks
            };
            if !self.rows(plan, &states, &mut wait, &mut result)? {
                return Ok(None);
            }
        }
        states.save(&mut self.decoder)?;
        if let Some(copier) = &mut self.copier {
            copier.save(plan, &states);
        }
        timed(&mut result, begun, &mut self.ended, idle);
        if let Some(adapters) = &mut self.adapters {
            // If page copies are in flight, the plan's wait applies to them, not to adapters.
            let copies = self.copier.as_ref().is_some_and(Copier::is_busy);
            let wait_us = if copies { 0 } else { plan.wait_us() };
            result.placed = adapters.report(wait_us);
        }
        Ok(Some(result))
    }

    fn end_copies(
        &mut self,
        plan: &StepPlan,
        socket: Option<BorrowedFd<'_>>,
        result: &mut StepResult,
    ) {
        let Some(copier) = &mut self.copier else { return };
        if let Some(socket) = socket.filter(|_| plan.wait_us() > 0) {
            copier.wait(plan.wait_us(), socket);
        }
        copier.report(result, self.states.as_mut());
    }

    fn follow(&mut self, order: AdapterOrder) -> Result<(), HandError> {
        match &mut self.adapters {
            Some(adapters) => adapters.follow(order),
            None => return Err(no_places()),
        }
        Ok(())
    }
}

/// True if a plan copies states.
fn copies_states(plan: &StepPlan) -> bool {
    plan.state_loads().len() + plan.state_saves().len() > 0
        || plan.copies().any(|copy| copy.direction.is_of_state())
}

/// True if a plan uses adapter places.
fn names_places(plan: &StepPlan) -> bool {
    !plan.place_writes().is_empty() || plan.new_slots().any(|write| write.place.is_some())
}

impl Runner {
    /// Determines the states from which the plan's rows continue.
    fn read_states(&mut self, plan: &StepPlan) -> Result<StateSteps, PlanError> {
        match &mut self.states {
            Some(states) => states.read(plan),
            None if copies_states(plan) => {
                wrong("copies of states in a plan for a model that has none")
            }
            None => Ok(StateSteps::default()),
        }
    }

    /// Computes a plan's rows, and samples those for which the plan requests a token. Returns false
    /// if the masks were not received.
    fn rows(
        &mut self,
        plan: &StepPlan,
        states: &StateSteps,
        masks: &mut MaskSource<'_>,
        result: &mut StepResult,
    ) -> Result<bool, HandError> {
        if self.pool(plan, states, result)? {
            return Ok(true);
        }
        let columns = Columns::of(plan, &self.tables, false)?;
        let mut columns = Columns { states: states.rows.clone(), ..columns };
        if let Some(adapters) = &self.adapters {
            columns.adapters = adapters.of_rows(&columns.slot)?;
        }
        let (arena, width) = (self.arena.clone(), self.sizes.dtype.bytes());
        let given = columns.given(&self.tables, &arena, (self.sizes.hidden * width, width))?;
        let prompts = self.prompts(plan, &columns)?;
        let wanted = columns.wanted();
        let last = columns.last_tokens();
        result.row_errors = vec![ROW_OK; columns.slot.len()];
        let plain = wanted.iter().all(|run| self.tables.slots[run.slot].is_plain());
        if plain && columns.masked.is_empty() && prompts.is_none() {
            let (mut best, mut finite) = (vec![0; last.len()], vec![0; last.len()]);
            let rows = columns.rows(&self.tables, &given, &last);
            self.decoder.step(&rows, Wanted::Best(&mut best, &mut finite))?;
            let sample = |place: usize, _, _: &Slot| {
                // Logits that are not finite yield no token.
                let (token, finite) =
                    if finite[place] == 1 { (best[place], true) } else { (0, false) };
                Some(Sampled { token, finite, logprobs: Vec::new() })
            };
            for (run, &row) in wanted.iter().zip(&columns.sampling) {
                let given = run.verify(&self.tables, sample);
                count(result, &wanted, given.len());
                self.keep(run, row, &given, result);
            }
            return Ok(true);
        }
        let mut logits = std::mem::take(&mut self.logits);
        logits.resize(last.len() * self.sizes.vocabulary, 0.0);
        match &prompts {
            None => {
                let rows = columns.rows(&self.tables, &given, &last);
                self.decoder.step(&rows, Wanted::Logits(&mut logits))?;
            }
            Some(prompts) => {
                let states = self.states(&columns, &given, &last, prompts)?;
                self.heads(&states, prompts, &mut logits, result)?;
            }
        }
        let mut of_places = vec![Mask::Everything; last.len()];
        if !columns.masked.is_empty() {
            let Some(received) = masks()? else { return Ok(false) };
            let masked: Vec<Run> = columns.masked.iter().map(|&at| wanted[at]).collect();
            self.masks(plan.step(), &masked, &received, &mut of_places)?;
        }
        let sits_out = |at: usize| of_places[wanted[at].first] == Mask::NoToken;
        let drawn: Vec<usize> = (0..wanted.len()).filter(|&at| !sits_out(at)).collect();
        let found = self.sample(&logits, &wanted, (&drawn, &of_places));
        self.logits = logits;
        let asked = drawn.iter().any(|&at| self.tables.slots[wanted[at].slot].logprobs().is_some());
        for (&at, given) in drawn.iter().zip(&found) {
            count(result, &wanted, given.len());
            self.keep(&wanted[at], columns.sampling[at], given, result);
            for sampled in given.iter().filter(|_| asked) {
                result.logprob_counts.push(sampled.logprobs.len() as i32);
                result.logprob_ids.extend(sampled.logprobs.iter().map(|(id, _)| id));
                result.logprob_values.extend(sampled.logprobs.iter().map(|(_, value)| value));
            }
        }
        Ok(true)
    }

    fn keep(&mut self, run: &Run, row: usize, given: &[Sampled], result: &mut StepResult) {
        for (nth, sampled) in given.iter().enumerate() {
            self.tables.keep(run.slot, run.position + nth, sampled.token);
            result.tokens.push(sampled.token);
            if !sampled.finite {
                result.row_errors[row] = ROW_NOT_FINITE;
            }
        }
    }

    /// Samples the rows `wanted[i]` for each `i` in `drawn`, each on the next free thread. `masks`
    /// has a mask for each index of logits.
    fn sample(
        &self,
        logits: &[f32],
        wanted: &[Run],
        (drawn, masks): (&[usize], &[Mask]),
    ) -> Vec<Vec<Sampled>> {
        let found: Vec<OnceLock<Vec<Sampled>>> = drawn.iter().map(|_| OnceLock::new()).collect();
        let (vocabulary, tables) = (self.sizes.vocabulary, &self.tables);
        self.threads.each(drawn.len(), |number| {
            let at = drawn[number];
            let given = wanted[at].verify(tables, |place, position, slot| {
                let mask = match &masks[place] {
                    Mask::Everything => None,
                    Mask::Tokens(words) => Some(&words[..]),
                    Mask::NoToken => return None,
                };
                let logits = &logits[place * vocabulary..][..vocabulary];
                let ask = Ask { slot, position, mask };
                Some(SCRATCH.with_borrow_mut(|scratch| sample(logits, &ask, scratch)))
            });
            // The cell is empty, because only this call sets it.
            let _ = found[number].set(given);
        });
        found.into_iter().filter_map(OnceLock::into_inner).collect()
    }

    /// Stores the received masks at the positions of masked rows.
    fn masks(
        &self,
        step: u64,
        masked: &[Run],
        received: &ReceivedMasks,
        to: &mut [Mask],
    ) -> Result<(), PlanError> {
        let places = || masked.iter().flat_map(|run| run.first..run.first + run.places());
        if received.step != step || received.places.len() != places().count() {
            return wrong(format!(
                "{} masks of step {}, where step {step} has {} masked positions",
                received.places.len(),
                received.step,
                places().count()
            ));
        }
        let width = self.sizes.vocabulary.div_ceil(32);
        for (at, &place) in places().zip(&received.places) {
            to[at] = match place {
                MaskPlace::Everything => Mask::Everything,
                MaskPlace::NoToken => Mask::NoToken,
                MaskPlace::Inline(index) => match received.inline(index, width) {
                    Some(words) => Mask::Tokens(words.to_vec()),
                    None => return wrong("a frame with fewer masks than it names"),
                },
                MaskPlace::Arena(offset) => match self.arena.read(offset as usize, 4 * width) {
                    Some(bytes) => {
                        let (words, _) = bytes.as_chunks::<4>();
                        Mask::Tokens(words.iter().map(|&word| u32::from_le_bytes(word)).collect())
                    }
                    None => {
                        let all = self.arena.bytes();
                        return wrong(format!("a mask at byte {offset} of an arena of {all}"));
                    }
                },
            };
        }
        Ok(())
    }

    /// The tokens of prompts with requested log-probabilities.
    fn prompts(
        &self,
        plan: &StepPlan,
        columns: &Columns,
    ) -> Result<Option<PromptTokens>, PlanError> {
        let row_of = |slot: u32| {
            let row = columns.slot.iter().position(|&of| of == i64::from(slot))?;
            Some((row, columns.start[row]))
        };
        let first = |(last, length): (&i64, &i64)| last - length + 1;
        let first: Vec<i64> = columns.last.iter().zip(&columns.length).map(first).collect();
        let token = |slot, position| self.tables.token(slot, position);
        let wanted = PromptTokens::of(plan.prompt_logprobs(), &first, row_of, token);
        let vocabulary = self.sizes.vocabulary;
        match wanted.as_ref().map(PromptTokens::widest).filter(|&most| most > vocabulary) {
            Some(most) => {
                wrong(format!("the {most} most likely tokens of a vocabulary of {vocabulary}"))
            }
            None => Ok(wanted),
        }
    }

    /// Computes rows. Returns the states of the tokens in `last`, then those of the positions
    /// before the prompt tokens.
    fn states(
        &mut self,
        columns: &Columns,
        given: &[Option<Given<'_>>],
        last: &[i64],
        prompts: &PromptTokens,
    ) -> Result<Vec<f32>, HandError> {
        let wanted = || last.iter().chain(&prompts.before);
        let mut tokens: Vec<i64> = wanted().copied().collect();
        tokens.sort_unstable();
        tokens.dedup();
        let hidden = self.sizes.hidden;
        let mut states = vec![0.0; tokens.len() * hidden];
        let rows = columns.rows(&self.tables, given, &tokens);
        self.decoder.step(&rows, Wanted::States(&mut states))?;
        // `tokens` contains every token that is looked up.
        let place = |token| tokens.binary_search(token).unwrap_or(0);
        Ok(wanted().flat_map(|token| &states[place(token) * hidden..][..hidden]).copied().collect())
    }

    /// Computes the logits of the sampled rows, and the log-probabilities of prompt tokens slice by
    /// slice.
    fn heads(
        &mut self,
        states: &[f32],
        prompts: &PromptTokens,
        logits: &mut [f32],
        result: &mut StepResult,
    ) -> Result<(), HandError> {
        let (hidden, vocabulary) = (self.sizes.hidden, self.sizes.vocabulary);
        let (sampled, of_prompts) = states.split_at(logits.len() / vocabulary * hidden);
        self.decoder.head(sampled, logits)?;
        let rows = slice_rows(vocabulary);
        let mut broken = Vec::new();
        let mut slice = Vec::new();
        for (number, states) in of_prompts.chunks(rows * hidden).enumerate() {
            slice.resize(states.len() / hidden * vocabulary, 0.0);
            self.decoder.head(states, &mut slice)?;
            let first = number * rows;
            prompts.fill(first, (&slice, vocabulary), &self.threads, result, &mut broken);
        }
        for row in broken {
            result.row_errors[row] = ROW_NOT_FINITE;
        }
        Ok(())
    }
}
