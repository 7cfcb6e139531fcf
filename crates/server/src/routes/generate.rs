//! `POST /generate`.

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use forebay_api::{
    ApiError, ErrorBody, GenerateFinish, GenerateItem, GenerateMeta, GenerateOutput,
    GenerateRequest, ImagePart, LogprobTriple, Prompt, StopReason, ValidGenerate,
};
use forebay_egress::{
    Candidate, Delta, End, EventEncoder, Tally, Terms, events,
    prompt_logprobs::{self, PromptLogprobGate, PromptLogprobList},
};
use forebay_text::Tokenizer;

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use crate::call::Call;
use crate::images::{self, SeenPrompt};
use crate::names::random_hex;
use crate::reply::Failure;
use crate::sse;
use crate::submission::Submission;
use crate::text::{RequestText, encode_prompts};
use crate::weights::WeightVersion;
use crate::wire::Wire;

/// The maximum size in bytes of a stream event that may repeat all earlier output: the size of a
/// few thousand tokens.
const FREELY_REPEATED: usize = 64 << 10;
/// At least one in `REPEATS` bytes of a larger event has to be new.
const REPEATS: usize = 16;

impl Admissible for GenerateRequest {
    /// The parameter that contains the prompts, and the validated request.
    type Valid = (&'static str, ValidGenerate);

    fn model(&self) -> Option<&str> {
        self.lora_path()
    }

    fn validate_at(self, door: &Door<'_>) -> Result<Self::Valid, ApiError> {
        let param = self.prompt_param();
        let mut valid = self.validate(&door.state.model.defaults, door.limits)?;
        for generation in &mut valid.generations {
            door.routing.fill(generation);
        }
        Ok((param, valid))
    }
}

/// Continues a prompt or a batch of prompts. With `stream`, each event carries the whole text so
/// far.
#[utoipa::path(
    post,
    path = "/generate",
    request_body = GenerateRequest,
    responses(
        (status = 200, description = "The output, a list of them for a batch, or a stream", body = GenerateOutput),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn generate(
    wire: Wire,
    AdmittedRequest { admission, valid: (param, valid) }: AdmittedRequest<GenerateRequest>,
) -> Result<Response, Failure> {
    let Admission { state, peer, arrived, limits, charge, .. } = admission;
    let terms = valid
        .generations
        .into_iter()
        .map(|generation| Arc::new(Terms::new(generation, &state.model.eos, limits)));
    let terms: Vec<Arc<Terms>> = terms.collect();
    let text = valid.text_in_logprobs.then(|| state.text.tokenizer());
    let batch = Batch::new(valid.items, &terms, text, state.weights.version(), arrived);
    let Batch { prompts, terms, parts, shown, mut outputs, made } = batch;
    let most = Some(limits.context_length as usize);
    let mut files = images::read(&state, parts, limits, &charge).await?.into_iter();
    // All items have the same salt, that of the request.
    let salt = terms.first().and_then(|terms| terms.generation.cache_salt.as_deref());
    let text = RequestText::new(&state, &peer, salt, &charge);
    let encoded = encode_prompts(text, prompts, true, most, param).await?;
    drop(charge);
    let submissions = encoded.into_iter().zip(terms).zip(shown).map(|((ids, terms), shown)| {
        let files: Vec<_> = files.by_ref().take(shown).collect();
        let seen = match state.model.images {
            Some(model) => images::spread(ids, model.token, &files, param)?,
            None => SeenPrompt { ids, images: Arc::default() },
        };
        let mut submission = Submission::new(&state, seen.ids, terms, limits, param)?;
        // Each output lists the prompt's log-probabilities.
        submission.repetition.choices = submission.terms.generation.n as usize;
        (submission.images, submission.files) = (seen.images, files);
        Ok::<_, ApiError>(submission)
    });
    let submissions = submissions.collect::<Result<Vec<_>, _>>()?;
    list_from(&mut outputs, &submissions)?;

    let mut name = peer.name("");
    match (peer.resume(), outputs.first_mut()) {
        (None, Some(output)) => name.id.clone_from(&output.id),
        (Some(_), Some(output)) => output.id.clone_from(&name.id),
        (_, None) => {}
    }
    let call = Call::start(&state, submissions, valid.stream, arrived, &peer).await?;
    let mut call = call.named(&name.id);
    if valid.stream {
        let told = outputs.iter().any(|output| output.start.is_some());
        let awaited = told.then(|| PromptLogprobGate::new(made.into_iter()));
        let encoder = GenerateEncoder { outputs, batch: valid.batch, awaited };
        return sse::stream(&state, call, encoder, wire, (&peer, &name));
    }
    let mut deltas = call.collect().await?;
    let told = prompt_logprobs::told(&mut deltas, made.iter().copied());
    let told = told.iter().zip(&made).flat_map(|(told, &n)| std::iter::repeat_n(told, n as usize));
    for (output, told) in outputs.iter_mut().zip(told) {
        output.told = Arc::clone(told);
    }
    let (tally, is_list) = (call.tally(), valid.batch || deltas.len() != 1);
    let mut all = (0..).zip(deltas).zip(outputs).map(|((choice, delta), mut output)| {
        output.total = delta;
        output.output(choice, None, &tally)
    });
    match all.next() {
        Some(one) if !is_list => call.writer().value(&one),
        first => call.writer().list(first.into_iter().chain(all)),
    }
}

/// The prompts of a request, and their outputs so far.
struct Batch {
    prompts: Vec<Prompt>,
    terms: Vec<Arc<Terms>>,
    /// The images of all prompts in order, and the number of images of each prompt.
    parts: Vec<ImagePart>,
    shown: Vec<usize>,
    outputs: Vec<ChoiceOutput>,
    /// The number of choices of each prompt.
    made: Vec<u32>,
}

impl Batch {
    /// Creates the batch. `all` has the terms of the items, each distinct value once. `text` is the
    /// tokenizer that writes tokens beside their log-probabilities. `weights` is the current name
    /// of the weights.
    fn new(
        items: Vec<GenerateItem>,
        all: &[Arc<Terms>],
        text: Option<&Arc<Tokenizer>>,
        weights: Option<&WeightVersion>,
        arrived: Instant,
    ) -> Self {
        let count = items.len();
        let mut batch = Self {
            prompts: Vec::with_capacity(count),
            terms: Vec::with_capacity(count),
            parts: Vec::new(),
            shown: Vec::with_capacity(count),
            outputs: Vec::new(),
            made: Vec::with_capacity(count),
        };
        for item in items {
            batch.shown.push(item.images.len());
            batch.parts.extend(item.images);
            let terms = &all[item.generation];
            let generation = &terms.generation;
            let id = item.rid.unwrap_or_else(random_hex);
            let output = |_| ChoiceOutput {
                id: id.clone(),
                arrived,
                with_logprobs: generation.sampling.logprobs.is_some(),
                text: text.cloned(),
                total: Delta::default(),
                start: generation.prompt_logprobs.map(|tail| tail.first - 1),
                first: 0,
                told: Arc::default(),
                weights: weights.cloned(),
                sent: None,
            };
            batch.outputs.extend((0..generation.n).map(output));
            batch.made.push(generation.n);
            batch.prompts.push(item.prompt);
            batch.terms.push(Arc::clone(terms));
        }
        batch
    }
}

/// Looks up the first token of each prompt's log-probability list.
fn list_from(outputs: &mut [ChoiceOutput], submissions: &[Submission]) -> Result<(), ApiError> {
    const PARAM: &str = "logprob_start_len";
    let all = submissions.iter().flat_map(|submission| {
        std::iter::repeat_n(&submission.prompt, submission.terms.generation.n as usize)
    });
    for (output, prompt) in outputs.iter_mut().zip(all) {
        let Some(start) = output.start else { continue };
        let Some(&first) = prompt.get(start as usize) else {
            let reason = format!("`{PARAM}`: {start} is not below the prompt's {}", prompt.len());
            return Err(ApiError::invalid(PARAM, reason));
        };
        output.first = first;
    }
    Ok(())
}

/// The output of a choice so far.
struct ChoiceOutput {
    id: String,
    arrived: Instant,
    with_logprobs: bool,
    /// The tokenizer for the texts of log-probabilities, if requested.
    text: Option<Arc<Tokenizer>>,
    total: Delta,
    /// `start`: the first position of the list of prompt tokens; `None` if there is no list.
    /// `first`: the token at that position. `told`: the log-probabilities of the prompt tokens
    /// after it.
    start: Option<u32>,
    first: i32,
    told: Arc<PromptLogprobList>,
    /// The name of the weights; `None` if the weights never change.
    weights: Option<WeightVersion>,
    /// The approximate size of the output in bytes at its last event; `None` if no event was sent.
    sent: Option<usize>,
}

impl ChoiceOutput {
    /// True if an event is due. Each event repeats everything before it. So larger events need more
    /// new content, which bounds the total size of all events relative to the new content.
    fn is_due(&mut self) -> bool {
        let weight = self.total.weight();
        let all = weight + self.told.json();
        let fresh = self.sent.map_or(all, |sent| weight - sent);
        let due = all <= FREELY_REPEATED || fresh >= all / REPEATS || self.total.end.is_some();
        if due {
            self.sent = Some(weight);
        }
        due
    }

    fn output(&self, choice: u32, index: Option<u32>, tally: &Tally) -> GenerateOutput {
        let usage = tally.usage_of(choice);
        let written = |id, logprob| LogprobTriple {
            logprob,
            id,
            text: self.text.as_ref().map(|tokenizer| tokenizer.token_text(id)),
        };
        let triple = |&(id, logprob): &Candidate| written(id, Some(logprob));
        let input = |_| {
            let others = self.told.iter().map(|(token, _)| triple(&token));
            std::iter::once(written(self.first, None)).chain(others).collect()
        };
        let input_top = |_| {
            let others = self.told.iter().map(|(_, top)| Some(top.iter().map(triple).collect()));
            std::iter::once(None).chain(others).collect()
        };
        let has_input_top = self.told.iter().any(|(_, top)| !top.is_empty());
        let tokens = || self.total.logprobs.iter();
        let sampled = || tokens().map(|(sampled, _)| triple(&sampled)).collect();
        let top = || tokens().map(|(_, top)| top.iter().map(triple).collect()).collect();
        let has_top = tokens().any(|(_, top)| !top.is_empty());
        GenerateOutput {
            index,
            text: self.total.parts.as_content().unwrap_or_default().to_owned(),
            output_ids: self.total.tokens.clone(),
            meta_info: GenerateMeta {
                id: self.id.clone(),
                finish_reason: self.total.end.as_ref().and_then(|end| match end {
                    End::Eos(id) | End::Token(id) => {
                        Some(GenerateFinish::Stop { matched: StopReason::Token(*id) })
                    }
                    End::Text(text) => {
                        Some(GenerateFinish::Stop { matched: StopReason::Text(text.clone()) })
                    }
                    End::Length => Some(GenerateFinish::Length { length: usage.completion_tokens }),
                    End::Call | End::Error(_) => None,
                }),
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                cached_tokens: usage.prompt_tokens_details.map(|details| details.cached_tokens),
                e2e_latency: self.arrived.elapsed().as_secs_f64(),
                weight_version: self.weights.as_ref().map(|name| name.now().to_string()),
                input_token_logprobs: self.start.map(input),
                input_top_logprobs: self.start.filter(|_| has_input_top).map(input_top),
                output_token_logprobs: self.with_logprobs.then(sampled),
                output_top_logprobs: (self.with_logprobs && has_top).then(top),
            },
        }
    }
}

struct GenerateEncoder {
    outputs: Vec<ChoiceOutput>,
    batch: bool,
    /// Delays events until the prompts' log-probabilities, which every event contains, are known.
    awaited: Option<PromptLogprobGate>,
}

impl GenerateEncoder {
    fn write(
        &mut self,
        choice: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let output = &mut self.outputs[choice as usize];
        output.total.merge(delta);
        if !output.is_due() {
            return Ok(());
        }
        events::event(&output.output(choice, self.batch.then_some(choice), tally), out)
    }
}

impl EventEncoder for GenerateEncoder {
    fn delta(
        &mut self,
        choice: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let Some(awaited) = &mut self.awaited else { return self.write(choice, delta, tally, out) };
        let ready = awaited.take(choice, delta);
        for &(choice, _) in &ready {
            self.outputs[choice as usize].told = Arc::clone(awaited.told(choice));
        }
        for (choice, mut delta) in ready {
            self.write(choice, &mut delta, tally, out)?;
        }
        Ok(())
    }

    fn end(&mut self, _: &Tally, _: &mut Vec<u8>) -> serde_json::Result<()> {
        Ok(())
    }

    fn resumable(&self) -> bool {
        // Each event lists all log-probabilities so far, which another brain does not have.
        matches!(&self.outputs[..], [output] if !output.with_logprobs)
    }

    fn resume(&mut self, before: &Delta) {
        for output in &mut self.outputs {
            output.total.merge(&mut before.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams `tokens` tokens with `candidates` candidates each, and `told` log-probabilities of
    /// the prompt. Returns the size of all events together, the size of the last event, and the
    /// number of events.
    fn events(tokens: usize, candidates: i32, told: usize) -> (usize, usize, usize) {
        let mut of_prompt = PromptLogprobList::default();
        of_prompt.push(&forebay_engine::PromptLogprobs {
            ranks: vec![1; told],
            ids: vec![5; told * 21],
            values: vec![-1.0; told * 21],
        });
        let mut output = ChoiceOutput {
            id: String::new(),
            arrived: Instant::now(),
            with_logprobs: candidates > 0,
            text: None,
            total: Delta::default(),
            start: None,
            first: 0,
            told: Arc::new(of_prompt),
            weights: None,
            sent: None,
        };
        let likely: Vec<Candidate> = (0..candidates).map(|id| (id, -1.0)).collect();
        let (mut all, mut last, mut count) = (0, 0, 0);
        for at in 1..=tokens {
            output.total.tokens.push(7);
            output.total.parts.content("word");
            output.total.logprobs.push(&likely);
            output.total.end = (at == tokens).then_some(End::Length);
            if output.is_due() {
                last = output.total.weight() + output.told.json();
                all += last;
                count += 1;
            }
        }
        (all, last, count)
    }

    #[test]
    fn events_repeat_a_bounded_number_of_bytes_for_each_that_is_new() {
        for (tokens, candidates, told) in
            [(4096, 21, 0), (4096, 0, 8000), (100_000, 0, 0), (1, 1, 0), (100, 21, 8000)]
        {
            let (all, last, _) = events(tokens, candidates, told);
            // The bound is the sum of the first event, the events that may repeat everything, and
            // the larger events, of which only a part is repeated.
            let most = (FREELY_REPEATED + 1) * tokens.min(16_000) / 2 + (REPEATS + 3) * last;
            assert!(all <= most, "{tokens} {candidates} {told}: {all} bytes for {last}");
            let quadratic = last.saturating_mul(tokens) / 2;
            assert!(tokens < 1000 || all < quadratic / 8, "{all} of {quadratic}");
        }
    }

    #[test]
    fn a_short_stream_has_an_event_for_each_token() {
        let (.., count) = events(2000, 0, 0);
        assert_eq!(count, 2000);
    }
}
