//! `POST /v1/completions`.

use std::sync::Arc;

use axum::response::Response;
use forebay_api::{
    ApiError, Completion, CompletionChoice, CompletionLogprobs, CompletionPrompts,
    CompletionRequest, ErrorBody, Limits, Prompt, PromptEmbeds, PromptTokenLogprobs, TokenOutput,
    ValidCompletion,
};
use forebay_egress::{
    Candidate, Delta, EventEncoder, Logprobs, Tally, Terms,
    events::{Chunks, Cut},
    prompt_logprobs::{self, PromptLogprobGate, PromptLogprobList},
};
use forebay_http::ClientId;
use forebay_text::{TextError, Tokenizer};
use serde_json::{Map, Value};

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use super::wording::{matched_stop, stop_reason, token_name};
use crate::call::Call;
use crate::reply::{self, Failure};
use crate::sse;
use crate::state::Shared;
use crate::submission::{Repetition, Submission};
use crate::text::{RequestText, encode_prompts, text_error};
use crate::wire::Wire;

impl Admissible for CompletionRequest {
    type Valid = ValidCompletion;

    fn model(&self) -> Option<&str> {
        self.model()
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidCompletion, ApiError> {
        let mut valid = self.validate(&door.state.model.defaults, door.limits)?;
        door.routing.fill(&mut valid.generation);
        Ok(valid)
    }
}

/// Continues one or more prompts. With `stream`, chunks are sent as server-sent events.
#[utoipa::path(
    post,
    path = "/v1/completions",
    request_body = CompletionRequest,
    responses(
        (status = 200, description = "The completion, or a stream of its chunks", body = Completion),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn completions(
    wire: Wire,
    AdmittedRequest { admission, valid }: AdmittedRequest<CompletionRequest>,
) -> Result<Response, Failure> {
    let Admission { state, peer, arrived, model, limits, charge, .. } = admission;
    let generation = valid.generation;
    let skip_special = generation.skip_special_tokens;
    // Of the `made` choices of each prompt, the `n` most likely are returned.
    let (made, n) = (generation.n as usize, valid.n as usize);
    let shown = Shown { tokens: valid.tokens, top: valid.logprobs, apart: valid.prompt_logprobs };
    let told = generation.prompt_logprobs.is_some();
    let terms = Arc::new(Terms::new(generation, &state.model.eos, limits));
    let echoes = if valid.echo { given(&valid.prompts) } else { Vec::new() };
    let mut submissions = match valid.prompts {
        CompletionPrompts::Prompts(prompts) => {
            let most = Some(limits.context_length as usize);
            let special = valid.add_special_tokens;
            let salt = terms.generation.cache_salt.as_deref();
            let text = RequestText::new(&state, &peer, salt, &charge);
            let encoded = encode_prompts(text, prompts, special, most, "prompt").await?;
            let submissions = encoded
                .into_iter()
                .map(|ids| Submission::new(&state, ids, Arc::clone(&terms), limits, "prompt"));
            submissions.collect::<Result<Vec<_>, _>>()?
        }
        CompletionPrompts::Embeds(embeds) => {
            embedded(&state, embeds, &terms, limits, charge.client()).await?
        }
    };
    let echoes = echo_texts(&state, echoes, &submissions, skip_special).await?;
    drop(charge);

    for (echo, submission) in echoes.iter().zip(&mut submissions) {
        submission.repetition = shown.repetition(echo.as_deref(), &submission.prompt, n);
    }
    let prompts = echoes.into_iter().zip(&submissions);
    let mut states: Vec<ChoiceState> = prompts
        .flat_map(|(echo, submission)| std::iter::repeat_n((echo, &submission.prompt), n))
        .map(|(echo, prompt)| ChoiceState::new(echo, prompt, shown, state.text.tokenizer()))
        .collect();
    let prompts = submissions.len();
    let name = peer.name("cmpl-");
    let (id, streamed) = (&name.id, valid.streaming.is_some());
    let mut call = Call::start(&state, submissions, streamed, arrived, &peer).await?.named(id);
    if let Some(streaming) = valid.streaming {
        let egress = state.config.egress;
        let chunks = Chunks::new(&name, "text_completion", &model, streaming, egress)
            .map_err(reply::unwritable)?;
        let made = || std::iter::repeat_n(made as u32, prompts);
        let awaited = told.then(|| PromptLogprobGate::new(made()));
        let encoder = CompletionEncoder { chunks, states, awaited };
        return sse::stream(&state, call, encoder, wire, (&peer, &name));
    }
    let mut deltas = call.collect().await?;
    if told {
        let told = prompt_logprobs::told(&mut deltas, std::iter::repeat_n(made as u32, prompts));
        for (states, told) in states.chunks_mut(n).zip(told) {
            states.iter_mut().for_each(|state| state.told = Arc::clone(&told));
        }
    }
    let deltas = most_likely(deltas, made, n);
    let choices = (0..).zip(deltas).zip(states);
    let choices = choices.map(|((index, mut delta), mut state)| state.choice(index, &mut delta));
    let completion = Completion {
        id: name.id,
        object: "text_completion",
        created: name.created,
        model,
        choices: Vec::new(),
        usage: call.tally().usage(),
    };
    call.writer().filled(&completion, "choices", choices)
}

/// Returns, for each prompt, the `n` of its `made` choices with the highest mean log-probability,
/// the best first. If all are returned they stay in order.
fn most_likely(deltas: Vec<Delta>, made: usize, n: usize) -> Vec<Delta> {
    if made == n {
        return deltas;
    }
    let mean = |delta: &Delta| {
        let (count, sum) =
            delta.logprobs.iter().fold((0_u32, 0.0), |(count, sum), ((_, logprob), _)| {
                (count + 1, sum + f64::from(logprob))
            });
        if count == 0 { f64::NEG_INFINITY } else { sum / f64::from(count) }
    };
    let mut kept = Vec::with_capacity(deltas.len() / made.max(1) * n);
    let mut deltas = deltas.into_iter().peekable();
    while deltas.peek().is_some() {
        let mut group: Vec<(f64, Delta)> =
            deltas.by_ref().take(made.max(1)).map(|delta| (mean(&delta), delta)).collect();
        // Of equal choices, the first stays first.
        group.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        kept.extend(group.into_iter().take(n).map(|(_, delta)| delta));
    }
    kept
}

/// Writes embeddings to the arena. Embeddings that do not fit the context are rejected before they
/// take room.
async fn embedded(
    state: &Shared,
    embeds: PromptEmbeds,
    terms: &Arc<Terms>,
    limits: Limits,
    client: ClientId,
) -> Result<Vec<Submission>, ApiError> {
    const PARAM: &str = "prompt_embeds";
    let (hidden_size, dtype) = state.embeddings(PARAM)?;
    let prompts = embeds.check(PARAM, hidden_size)?;
    for prompt in &prompts {
        terms.generation.room(prompt.rows() as usize, limits, PARAM)?;
    }
    let placed = state.intake.place(client, prompts, dtype, PARAM).await?;
    let submissions = placed.into_iter().map(|(rows, embeds)| {
        // Only the number of tokens matters: the embeddings replace the tokens.
        let tokens = vec![0; rows as usize];
        let submission = Submission::new(state, tokens, Arc::clone(terms), limits, PARAM)?;
        Ok(Submission { embeds: Some(embeds), ..submission })
    });
    submissions.collect()
}

/// Returns the text of each prompt; `None` for a prompt of token ids.
fn given(prompts: &CompletionPrompts) -> Vec<Option<Arc<str>>> {
    let CompletionPrompts::Prompts(prompts) = prompts else { return Vec::new() };
    let text = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => Some(text.as_str().into()),
        Prompt::Tokens(_) => None,
    };
    prompts.iter().map(text).collect()
}

/// Returns the text of each prompt, which its choices repeat; `None` if it is not requested.
/// `known` has the prompts that arrived as text. The other prompts, which were checked to fit the
/// context, are decoded on another thread.
async fn echo_texts(
    state: &Shared,
    known: Vec<Option<Arc<str>>>,
    submissions: &[Submission],
    skip_special_tokens: bool,
) -> Result<Vec<Option<Arc<str>>>, ApiError> {
    if known.is_empty() {
        return Ok(vec![None; submissions.len()]);
    }
    if known.iter().all(Option::is_some) {
        return Ok(known);
    }
    let prompts: Vec<Arc<[i32]>> = submissions.iter().map(|s| Arc::clone(&s.prompt)).collect();
    let text = Arc::clone(&state.text);
    let decode = move || {
        let all = known.into_iter().zip(&prompts).map(|(known, prompt)| match known {
            Some(known) => Ok(Some(known)),
            None => Ok(Some(text.tokenizer().decode(prompt, skip_special_tokens)?.into())),
        });
        all.collect::<Result<Vec<_>, TextError>>()
    };
    tokio::task::spawn_blocking(decode)
        .await
        .map_err(|error| ApiError::Internal { reason: error.to_string(), code: None })?
        .map_err(|error| text_error(error, "prompt"))
}

/// The token data that the response includes.
#[derive(Debug, Clone, Copy, Default)]
struct Shown {
    tokens: TokenOutput,
    /// The number of alternatives per token in log-probabilities; `None`: no log-probabilities.
    top: Option<u8>,
    /// The number of alternatives in the prompt's log-probabilities, if these are reported
    /// separately from the answer's.
    apart: Option<u8>,
}

impl Shown {
    /// Returns the size of the prompt data that each of `choices` choices repeats. `echo` is the
    /// prompt's text, if requested.
    fn repetition(self, echo: Option<&str>, prompt: &[i32], choices: usize) -> Repetition {
        /// The bytes of an id in decimal and a comma.
        const ID: usize = 8;
        let of_text = self.top.filter(|_| echo.is_some());
        let lists = [of_text, self.apart].into_iter().flatten();
        Repetition {
            choices,
            bytes: echo.map_or(0, str::len) + if self.tokens.ids { ID * prompt.len() } else { 0 },
            logprobs: lists.map(|top| 1 + usize::from(top)).sum(),
        }
    }
}

/// The state of a choice between chunks.
#[derive(Default)]
struct ChoiceState {
    /// Prompt text that has not been sent yet.
    echo: Option<Arc<str>>,
    /// The prompt's tokens, if their log-probabilities are sent together with the prompt's text.
    echoed: Option<Arc<[i32]>>,
    /// The log-probabilities of the prompt.
    told: Arc<PromptLogprobList>,
    /// The number of characters of all tokens' text so far.
    offset: u32,
    /// The tokenizer for log-probabilities, if requested.
    tokenizer: Option<Arc<Tokenizer>>,
    shown: Shown,
    /// The prompt's ids, if they have not been sent yet.
    prompt: Option<Arc<[i32]>>,
    /// The chunk template of a delta with text only.
    plain: Option<Cut>,
}

impl ChoiceState {
    fn new(
        echo: Option<Arc<str>>,
        prompt: &Arc<[i32]>,
        shown: Shown,
        tokenizer: &Arc<Tokenizer>,
    ) -> Self {
        Self {
            echoed: echo.as_ref().and(shown.top).map(|_| Arc::clone(prompt)),
            echo,
            tokenizer: shown.top.or(shown.apart).map(|_| Arc::clone(tokenizer)),
            shown,
            prompt: shown.tokens.ids.then(|| Arc::clone(prompt)),
            ..Self::default()
        }
    }

    fn choice(&mut self, index: u32, delta: &mut Delta) -> CompletionChoice {
        let text = delta.parts.as_content().unwrap_or_default();
        let text = match self.echo.take() {
            Some(echo) => [&*echo, text].concat(),
            None => text.to_owned(),
        };
        CompletionChoice {
            index,
            text,
            logprobs: self.logprobs(&delta.logprobs),
            finish_reason: delta.finish_reason(),
            stop_reason: delta.end.as_ref().and_then(stop_reason),
            matched_stop: delta.end.as_ref().and_then(matched_stop),
            prompt_token_ids: self.prompt.take().map(|ids| ids.to_vec()),
            token_ids: self.shown.tokens.ids.then(|| delta.tokens.clone()),
            prompt_logprobs: self.apart(),
        }
    }

    fn apart(&self) -> Option<Vec<Option<PromptTokenLogprobs>>> {
        Some(self.told.listed(self.shown.apart?, self.tokenizer.as_deref()?))
    }

    fn logprobs(&mut self, tokens: &Logprobs) -> Option<CompletionLogprobs> {
        let most = self.shown.top?;
        let tokenizer = self.tokenizer.clone()?;
        let mut lists = CompletionLogprobs::default();
        if let Some(prompt) = self.echoed.take() {
            // The first token has no log-probability: it has no predecessor.
            if let Some(&first) = prompt.first() {
                self.add(&tokenizer, first, None, &mut lists);
            }
            let told = Arc::clone(&self.told);
            for ((id, logprob), top) in told.iter() {
                let top = &top[..top.len().min(most.into())];
                self.add(&tokenizer, id, Some((logprob, top)), &mut lists);
            }
        }
        for ((id, logprob), top) in tokens.iter() {
            self.add(&tokenizer, id, Some((logprob, top)), &mut lists);
        }
        Some(lists)
    }

    /// Adds a token with its log-probability and the most likely tokens.
    fn add(
        &mut self,
        tokenizer: &Tokenizer,
        id: i32,
        found: Option<(f32, &[Candidate])>,
        lists: &mut CompletionLogprobs,
    ) {
        lists.text_offset.push(self.offset);
        self.offset += characters(&tokenizer.token_text(id));
        lists.token_logprobs.push(found.map(|(logprob, _)| logprob));
        lists.tokens.push(token_name(tokenizer, id, self.shown.tokens));
        lists.top_logprobs.push(found.map(|(logprob, top)| {
            let mut likely = Map::new();
            for &(id, logprob) in top.iter().chain([&(id, logprob)]) {
                let text = token_name(tokenizer, id, self.shown.tokens);
                likely.entry(text).or_insert_with(|| shortest(logprob));
            }
            likely
        }));
    }
}

fn characters(text: &str) -> u32 {
    u32::try_from(text.chars().count()).unwrap_or(u32::MAX)
}

struct CompletionEncoder {
    chunks: Chunks,
    states: Vec<ChoiceState>,
    /// Delays deltas until the prompts' log-probabilities are known, if these were requested.
    awaited: Option<PromptLogprobGate>,
}

impl CompletionEncoder {
    fn write(
        &mut self,
        index: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let state = &mut self.states[index as usize];
        let silent = delta.parts.is_empty() && delta.logprobs.is_empty() && state.echo.is_none();
        let silent = silent && !state.shown.tokens.ids;
        if silent && delta.end.is_none() {
            return Ok(());
        }
        let is_plain = delta.end.is_none() && state.echo.is_none() && state.tokenizer.is_none();
        let is_plain = is_plain && !state.shown.tokens.ids;
        if is_plain {
            if state.plain.is_none() {
                let empty = state.choice(index, &mut Delta::default());
                state.plain = self.chunks.cut(&empty, "text")?;
            }
            if let Some(plain) = &state.plain {
                return plain.write(delta.parts.as_content().unwrap_or_default(), out);
            }
        }
        let choice = state.choice(index, delta);
        self.chunks.choice(&choice, || tally.usage(), out)
    }
}

impl EventEncoder for CompletionEncoder {
    fn delta(
        &mut self,
        index: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let Some(awaited) = &mut self.awaited else { return self.write(index, delta, tally, out) };
        let ready = awaited.take(index, delta);
        for &(index, _) in &ready {
            self.states[index as usize].told = Arc::clone(awaited.told(index));
        }
        for (index, mut delta) in ready {
            self.write(index, &mut delta, tally, out)?;
        }
        Ok(())
    }

    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()> {
        self.chunks.usage(tally.usage(), out)
    }

    fn resumable(&self) -> bool {
        self.states.len() == 1
    }

    fn resume(&mut self, before: &Delta) {
        for state in &mut self.states {
            // The prompt was sent before the first token.
            if !before.tokens.is_empty() {
                state.echo = None;
                self.awaited = None;
                let told = state.echoed.take().zip(state.tokenizer.as_ref());
                let told = told.iter().flat_map(|(ids, tokenizer)| {
                    ids.iter().map(|&id| characters(&tokenizer.token_text(id)))
                });
                state.offset += told.sum::<u32>();
            }
            if let Some(tokenizer) = &state.tokenizer {
                let sampled = before.logprobs.iter().map(|((id, _), _)| tokenizer.token_text(id));
                state.offset += sampled.map(|text| characters(&text)).sum::<u32>();
            }
        }
    }
}

/// Converts a log-probability to a [`Value`] with the digits of the f32. A [`Value`] holds an f64,
/// and plain widening would add digits.
fn shortest(value: f32) -> Value {
    Value::from(value.to_string().parse().unwrap_or_else(|_| f64::from(value)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use forebay_egress::End;

    use super::*;

    fn logprobs(tokens: &[&[Candidate]]) -> Logprobs {
        let mut all = Logprobs::default();
        tokens.iter().for_each(|candidates| all.push(candidates));
        all
    }

    #[test]
    fn offsets_go_on_over_chunks_and_the_sampled_token_is_among_the_likely() {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = manifest.join("../text/tests/data/tiny-llama-tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_file(&file).unwrap());
        let ids = |text: &str| tokenizer.encode(text, false).unwrap();
        let (the, dog) = (ids(" the")[0], ids(" dog")[0]);
        let (the_text, dog_text) = (tokenizer.token_text(the), tokenizer.token_text(dog));
        let length = characters(&the_text);
        let mut state = ChoiceState {
            echo: Some("p".into()),
            tokenizer: Some(tokenizer),
            shown: Shown { top: Some(1), ..Shown::default() },
            ..ChoiceState::default()
        };
        let mut first = Delta {
            logprobs: logprobs(&[&[(the, -1.0), (dog, -0.5)], &[(dog, -2.0), (dog, -2.0)]]),
            ..Delta::default()
        };
        first.parts.content("né");
        let choice = state.choice(0, &mut first);
        assert_eq!(choice.text, "pné");
        let lists = choice.logprobs.unwrap();
        assert_eq!(lists.text_offset, [0, length]);
        assert_eq!(lists.tokens, [the_text.as_str(), &dog_text]);
        let likely = |at: usize| lists.top_logprobs[at].as_ref().unwrap();
        assert_eq!(likely(0).keys().collect::<Vec<_>>(), [&dog_text, &the_text]);
        assert_eq!(likely(1).len(), 1);
        let mut second = Delta {
            logprobs: logprobs(&[&[(the, -1.0)]]),
            end: Some(End::Length),
            ..Delta::default()
        };
        let choice = state.choice(0, &mut second);
        assert_eq!((choice.text.as_str(), choice.finish_reason), ("", Some("length")));
        assert_eq!(choice.logprobs.unwrap().text_offset, [length + characters(&dog_text)]);
    }
}
