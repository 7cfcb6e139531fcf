//! Applies results to requests: sampled tokens, ends of requests, and the return of retired pages
//! and slots.

use forebay_protocol::{COPY_OK, CopyEnd, PlaceEnd, ROW_OK, SampledLogprobs, StepResult, Want};

use crate::entry::Stage;
use crate::prompts::PromptLogprobsOf;
use crate::steps::{Flight, FlightRow};
use crate::{ApplyError, Event, Finish, Handle, Scheduler};

/// A sampled token and its log-probabilities, if requested.
type Sampled<'a> = (&'a i32, Option<SampledLogprobs<'a>>);

impl Scheduler {
    /// Applies the result of the oldest step in flight. Rows whose request has ended are ignored.
    ///
    /// # Errors
    /// The result is not of that step, or its columns do not fit the step's rows. Nothing is
    /// changed then.
    pub fn apply(
        &mut self,
        result: &StepResult,
        events: &mut Vec<Event>,
    ) -> Result<(), ApplyError> {
        let step = result.step;
        let oldest = self.steps.in_flight.front().ok_or(ApplyError::NothingInFlight { step })?;
        check_shape(result, oldest)?;
        let unknown = |end: &&CopyEnd| !self.memory.has_sent(end.ticket);
        if let Some(&CopyEnd { ticket, .. }) = result.copied.iter().find(unknown) {
            return Err(ApplyError::Copy { step, ticket });
        }
        let unknown = |end: &&PlaceEnd| !self.places.awaits(end.ticket);
        if let Some(&PlaceEnd { ticket, .. }) = result.placed.iter().find(unknown) {
            return Err(ApplyError::Place { step, ticket });
        }
        let Some(mut flight) = self.steps.in_flight.pop_front() else {
            return Ok(());
        };
        self.answered(step);
        self.counters.steps += u64::from(!flight.rows.is_empty());
        self.learn(&flight, result.timing.device_us);
        self.drafting.learn(&flight, result.tokens.len(), result.timing);
        let sampled_rows = flight.sampled as u32;
        let mut sampled = result.tokens.iter().zip(result.logprobs());
        let mut counts = result.counts();
        let mut prompts = PromptLogprobsOf::new(result);
        let mut vectors = result.pooled.chunks_exact(vector_size(result, flight.pooled));
        for (row, &error) in flight.rows.iter().zip(&result.row_errors) {
            let (count, vector) = match row.want {
                Want::Nothing => (0, None),
                Want::Tokens(_) | Want::Masked(_) => (counts.next().unwrap_or(0), None),
                Want::Vector => (0, vectors.next()),
            };
            let mut tokens = sampled.by_ref().take(count);
            let prompt = prompts.take(row);
            if self.roster.requests.get(row.handle).is_none() {
                // No request owns these rows any more.
            } else if error != ROW_OK {
                self.not_finite(row.handle, events);
            } else if let Some(vector) = vector {
                self.pooled(row, vector, events);
            } else {
                let before = events.len();
                self.computed(row, prompt, &mut tokens, events);
                self.drafts_ended(row, (count, before), events);
                if count > 0 && self.roster.requests.get(row.handle).is_some() {
                    self.compare_expected(row);
                    self.expect(row.handle, sampled_rows);
                }
            }
            tokens.for_each(drop);
        }
        // Blocks of failed rows are forgotten by now, so none of them enters the cache here.
        self.copies_ended(result, events);
        self.places_ended(&result.placed, events);
        self.report_left(events);
        self.memory.count_chosen(result);
        self.free_retired();
        events.extend(flight.read.drain(..).map(|patches| Event::ImageRead { patches }));
        self.steps.reuse(flight);
        Ok(())
    }

    fn learn(&mut self, flight: &Flight, device_us: u32) {
        // If the step also computed layers of the vision tower, its time does not show how long the
        // rows took.
        if flight.towers.is_empty() {
            let lengths = flight.rows.iter().map(FlightRow::positions);
            self.turns.learn(lengths.clone().sum(), device_us);
            if flight.drafts == 0 {
                let rows = flight.rows.iter().map(|row| (row.start, row.positions()));
                self.turns.pace.learn(rows, device_us);
            }
            self.turns.background.learn(flight.mixture(), flight.drafts > 0, device_us);
            self.memory.learn(lengths, device_us);
        }
    }

    /// Applies the finished copies that a result reports.
    fn copies_ended(&mut self, result: &StepResult, events: &mut Vec<Event>) {
        let Some(before) = self.memory.begin_copy_ends(result) else { return };
        for &end in &result.copied {
            if end.error != COPY_OK {
                self.preempt_waiters(end.ticket, events);
            }
            self.memory.copy_ended(end);
        }
        if self.memory.finish_copy_ends(&before, result, &mut self.roster) {
            self.turns.unblock();
        }
    }

    fn pooled(&mut self, row: &FlightRow, vector: &[f32], events: &mut Vec<Event>) {
        self.count_prompt(row, events);
        let id = self.roster[row.handle].request.id;
        events.push(Event::Pooled { id, vector: vector.into() });
        events.push(Event::Finished { id, reason: Finish::Length });
        self.remove(row.handle);
    }

    /// Applies a row's prompt log-probabilities and its sampled tokens. Tokens after the request's
    /// end are dropped.
    fn computed<'a>(
        &mut self,
        row: &FlightRow,
        prompt: PromptLogprobsOf<'_>,
        sampled: &mut impl Iterator<Item = Sampled<'a>>,
        events: &mut Vec<Event>,
    ) {
        self.count_prompt(row, events);
        if !self.tell_prompt(row, prompt, events) {
            return;
        }
        let mut first = true;
        for (&token, logprobs) in sampled {
            let entry = &mut self.roster[row.handle];
            debug_assert!(!first || entry.known() == row.end, "results come in order");
            if !std::mem::take(&mut first) {
                entry.total += 1;
                // A request that lost its pages meanwhile computes all positions again.
                if let Some(Stage::Decode { .. }) = entry.stage() {
                    entry.computed += 1;
                }
            }
            entry.tokens.push(token);
            if let Some(proposer) = &mut entry.request.proposer {
                proposer.push(token);
            }
            self.counters.generated_tokens += 1;
            let (id, full) = (entry.request.id, entry.known() == entry.limit);
            let nth = entry.known() - entry.prompt_len;
            let stop = entry.request.spec.stop_ids.binary_search(&token).is_ok();
            let logprobs =
                logprobs.map(|l| l.ids.iter().copied().zip(l.values.iter().copied()).collect());
            events.push(Event::Token { id, nth, token, logprobs });
            if stop || full {
                self.memory.offer_blocks(entry);
                let reason = if stop { Finish::Stop { token } } else { Finish::Length };
                events.push(Event::Finished { id, reason });
                self.remove(row.handle);
                return;
            }
        }
        let entry = &mut self.roster[row.handle];
        if !first {
            self.memory.offer_blocks(entry);
        }
        let cleared = entry.mark().is_some_and(|mark| row.end >= mark);
        if cleared && !row.sits_out {
            self.turns.clear_suspect(row.handle, entry, &self.memory);
        }
        if !first {
            self.leave(row.handle);
        }
    }

    /// Reports the new log-probabilities of a row's prompt. Returns false if the request needed
    /// nothing else, and has ended.
    fn tell_prompt(
        &mut self,
        row: &FlightRow,
        given: PromptLogprobsOf<'_>,
        events: &mut Vec<Event>,
    ) -> bool {
        let (Some(want), entry) = (row.prompt, &mut self.roster[row.handle]) else { return true };
        let Some(tail) = &mut entry.request.prompt_logprobs else { return true };
        debug_assert!(want.first <= tail.first, "results come in order, without a gap");
        let told = tail.first - want.first;
        if told >= want.count {
            return true;
        }
        tail.first = want.first + want.count;
        let (id, complete) = (entry.request.id, tail.first == entry.prompt_len);
        events.push(Event::PromptLogprobs { id, logprobs: given.from(told, want.most) });
        if !complete || entry.generates() {
            return true;
        }
        self.memory.offer_blocks(entry);
        events.push(Event::Finished { id, reason: Finish::Length });
        self.remove(row.handle);
        false
    }

    fn count_prompt(&mut self, row: &FlightRow, events: &mut Vec<Event>) {
        let entry = &self.roster[row.handle];
        // The last position of a row that sits out does not count: it is computed again.
        let end = row.end - u32::from(row.sits_out);
        let tokens = end.min(entry.prompt_len) - row.start.min(entry.prompt_len);
        if tokens > 0 {
            self.counters.prompt_tokens += u64::from(tokens);
            events.push(Event::Prefilled { id: entry.request.id, tokens });
        }
    }

    /// Ends a request whose logits or vector were not finite. All its blocks are forgotten, also
    /// shared ones. They may hold the bad values, which would then reach every request that shares
    /// them.
    fn not_finite(&mut self, handle: Handle, events: &mut Vec<Event>) {
        let entry = &self.roster[handle];
        events.push(Event::Finished { id: entry.request.id, reason: Finish::NotFinite });
        self.memory.forget_blocks(entry);
        self.images.forget(entry);
        self.remove(handle);
    }
}

/// Elements per vector; never 0, because `chunks_exact(0)` panics.
fn vector_size(result: &StepResult, vectors: usize) -> usize {
    result.pooled.len().checked_div(vectors).unwrap_or(0).max(1)
}

fn check_shape(result: &StepResult, flight: &Flight) -> Result<(), ApplyError> {
    let step = result.step;
    if step != flight.step {
        return Err(ApplyError::WrongStep { expected: flight.step, got: step });
    }
    let check = |column, expected, got| {
        if expected == got {
            Ok(())
        } else {
            Err(ApplyError::Column { step, column, expected, got })
        }
    };
    check("row_errors", flight.rows.len(), result.row_errors.len())?;
    if result.token_counts.is_empty() {
        check("tokens", flight.sampled, result.tokens.len())?;
    } else {
        check("token_counts", flight.sampled, result.token_counts.len())?;
        let sampling = flight.rows.iter().filter(|row| row.want.samples());
        let most = sampling.map(|row| row.want.most() as usize);
        let mut tokens = 0;
        for (most, &count) in most.zip(&result.token_counts) {
            let count = usize::try_from(count).unwrap_or(0);
            // A count that is out of range differs from its clamped value, so this check fails.
            check("token_counts", count.clamp(1, most), count)?;
            tokens += count;
        }
        check("tokens", tokens, result.tokens.len())?;
    }
    check("pooled", vector_size(result, flight.pooled) * flight.pooled, result.pooled.len())?;
    if !result.logprob_counts.is_empty() {
        check("logprob_counts", result.tokens.len(), result.logprob_counts.len())?;
    }
    let counts = result.logprob_counts.iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX));
    let entries = counts.fold(0, usize::saturating_add);
    check("logprob_ids", entries, result.logprob_ids.len())?;
    check("logprob_values", entries, result.logprob_values.len())?;
    let (mut tokens, mut entries) = (0, 0);
    for want in flight.rows.iter().filter_map(|row| row.prompt) {
        tokens += want.count as usize;
        entries += want.count as usize * (1 + want.most as usize);
    }
    check("prompt_ranks", tokens, result.prompt_ranks.len())?;
    check("prompt_ids", entries, result.prompt_ids.len())?;
    check("prompt_values", entries, result.prompt_values.len())
}
