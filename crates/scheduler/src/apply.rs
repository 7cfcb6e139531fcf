//! What a result means for the requests: tokens, ends, and the return of what was retired.

use forebay_protocol::{ROW_OK, SampledLogprobs, StepResult};

use crate::{ApplyError, Event, Finish, Flight, FlightRow, Handle, Scheduler};

impl Scheduler {
    /// Takes the result of the oldest step in flight. Rows whose request is gone are ignored.
    ///
    /// # Errors
    /// The result is not of that step, or its columns do not fit the step's rows. Nothing is changed then.
    pub fn apply(
        &mut self,
        result: &StepResult,
        events: &mut Vec<Event>,
    ) -> Result<(), ApplyError> {
        let step = result.step;
        let oldest = self.in_flight.front().ok_or(ApplyError::NothingInFlight { step })?;
        check_shape(result, oldest)?;
        let Some(mut flight) = self.in_flight.pop_front() else {
            return Ok(());
        };
        self.counters.steps += 1;
        let mut sampled = result.tokens.iter().zip(result.logprobs());
        let mut vectors = result.pooled.chunks_exact(vector_size(result, flight.pooled));
        for (row, &error) in flight.rows.iter().zip(&result.row_errors) {
            let token = if row.sample { sampled.next() } else { None };
            let vector = if row.pool { vectors.next() } else { None };
            if self.requests.get(row.handle).is_none() {
                continue;
            }
            if error == ROW_OK {
                self.computed(row, token, vector, events);
            } else {
                self.not_finite(row.handle, events);
            }
        }
        // Blocks of rows that went wrong are forgotten by now, so that none of them enters the cache here.
        for retired in flight.retired.drain(..) {
            self.give_back(retired);
        }
        flight.rows.clear();
        (flight.sampled, flight.pooled) = (0, 0);
        self.spare.push(flight);
        Ok(())
    }

    fn computed(
        &mut self,
        row: &FlightRow,
        sampled: Option<(&i32, Option<SampledLogprobs<'_>>)>,
        vector: Option<&[f32]>,
        events: &mut Vec<Event>,
    ) {
        let entry = &mut self.requests[row.handle];
        let prompt = row.start.min(entry.prompt_len)..row.end.min(entry.prompt_len);
        self.counters.prompt_tokens += u64::from(prompt.end - prompt.start);
        if let Some(vector) = vector {
            let id = entry.id;
            events.push(Event::Pooled { id, vector: vector.into() });
            events.push(Event::Finished { id, reason: Finish::Length });
            self.remove(row.handle);
            return;
        }
        if let Some((&token, logprobs)) = sampled {
            debug_assert_eq!(entry.known(), row.end, "results come in order");
            entry.tokens.push(token);
            self.counters.generated_tokens += 1;
            let (id, full) = (entry.id, entry.known() == entry.limit);
            let stop = entry.stop_ids.binary_search(&token).is_ok();
            let logprobs =
                logprobs.map(|l| l.ids.iter().copied().zip(l.values.iter().copied()).collect());
            events.push(Event::Token { id, token, logprobs });
            self.offer_blocks(row.handle);
            if stop || full {
                let reason = if stop { Finish::Stop { token } } else { Finish::Length };
                events.push(Event::Finished { id, reason });
                self.remove(row.handle);
                return;
            }
        }
        self.clear_suspect(row);
    }

    /// Ends a request whose logits or vector were not finite. All its blocks are forgotten, also those that it got from others: they may be
    /// the reason, and would go on to spoil whoever shares them next.
    fn not_finite(&mut self, handle: Handle, events: &mut Vec<Event>) {
        let entry = &self.requests[handle];
        events.push(Event::Finished { id: entry.id, reason: Finish::NotFinite });
        for &name in &entry.names {
            self.pool.forget(name);
        }
        self.remove(handle);
    }
}

/// Numbers a vector; at least 1, so that nothing can be cut into it too.
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
    check("tokens", flight.sampled, result.tokens.len())?;
    check("pooled", vector_size(result, flight.pooled) * flight.pooled, result.pooled.len())?;
    if !result.logprob_counts.is_empty() {
        check("logprob_counts", flight.sampled, result.logprob_counts.len())?;
    }
    let counts = result.logprob_counts.iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX));
    let entries = counts.fold(0, usize::saturating_add);
    check("logprob_ids", entries, result.logprob_ids.len())?;
    check("logprob_values", entries, result.logprob_values.len())
}
