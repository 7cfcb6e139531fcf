//! `POST /generate`, SGLang's native dialect: requests.

mod one_or_many;
mod output;

use std::collections::HashMap;

use forebay_engine::PromptTail;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::images::{ImageData, ImagePart};
use crate::inert::Inert;
use crate::prompt::{Prompt, Prompts, Strings};
use crate::sampling::{
    Fields, Generation, GenerationDefaults, Limits, check_logprobs, check_total,
};
use crate::structure::{Raw, Spellings};
pub use one_or_many::OneOrMany;
pub use output::{GenerateFinish, GenerateMeta, GenerateOutput, LogprobTriple};

/// Tokens that this dialect generates where the client does not say.
const DEFAULT_MAX_TOKENS: u32 = 128;

/// A native generation request: one prompt, or a batch.
#[derive(Debug, Deserialize, ToSchema)]
pub struct GenerateRequest {
    /// A prompt or a list of prompts.
    #[schema(value_type = Option<Object>)]
    pub text: Option<Prompts>,
    /// Instead of `text`: token ids or a list of lists of token ids.
    #[schema(value_type = Option<Object>)]
    pub input_ids: Option<Prompts>,
    /// Parameters for all prompts, or a list with parameters for each prompt.
    #[schema(value_type = Option<GenerateSampling>)]
    pub sampling_params: Option<OneOrMany<GenerateSampling>>,
    /// Send the text so far as server-sent events.
    pub stream: Option<bool>,
    /// Return log-probabilities of the generated tokens, and of the prompt's from
    /// `logprob_start_len` on.
    pub return_logprob: Option<bool>,
    /// Alternatives to return for each token, 0 to 20.
    pub top_logprobs_num: Option<i32>,
    /// Return the tokens' text with their log-probabilities.
    pub return_text_in_logprobs: Option<bool>,
    /// The position of the first token of the prompt whose log-probability is listed; -1: none is
    /// listed. The first listed one is null.
    pub logprob_start_len: Option<i32>,
    /// The name of the request, or a name for each prompt; it comes back in `meta_info.id`.
    #[schema(value_type = Option<Vec<String>>)]
    pub rid: Option<Strings>,
    /// The priority; larger is sooner, under the priority policy.
    pub priority: Option<i32>,
    /// Requests with the same key are computed by the same replica.
    pub routing_key: Option<String>,
    /// The number of the replica for the request; `data_parallel_rank` is its older name.
    #[serde(alias = "data_parallel_rank")]
    pub routed_dp_rank: Option<i64>,
    /// Blocks of the prompts are shared only with requests of the same salt, 1 to 256 bytes.
    pub cache_salt: Option<String>,
    #[serde(default)]
    #[schema(ignore)]
    input_embeds: Inert,
    /// Images of the prompts, by URL or in base64: one, a list, or a list of lists. A prompt has
    /// the model's image token for each.
    #[schema(value_type = Option<Vec<String>>)]
    image_data: Option<ImageData>,
    #[serde(default)]
    #[schema(ignore)]
    audio_data: Inert,
    #[serde(default)]
    #[schema(ignore)]
    video_data: Inert,
    #[serde(default)]
    #[schema(ignore)]
    lora_path: Inert,
    #[serde(default)]
    #[schema(ignore)]
    session_params: Inert,
    #[serde(default)]
    #[schema(ignore)]
    token_ids_logprob: Inert,
    #[serde(default)]
    #[schema(ignore)]
    return_hidden_states: Inert,
    #[serde(default)]
    #[schema(ignore)]
    custom_logit_processor: Inert,
}

/// Sampling parameters of the native dialect.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub struct GenerateSampling {
    /// The largest number of tokens to generate; 128 if absent.
    pub max_new_tokens: Option<u32>,
    /// Tokens to generate before a stop string or stop token counts.
    pub min_new_tokens: Option<u32>,
    /// Choices to generate for each prompt.
    pub n: Option<u32>,
    /// The temperature; 0 is greedy.
    pub temperature: Option<f32>,
    /// The share of probability that is kept (nucleus sampling).
    pub top_p: Option<f32>,
    /// The number of candidates; -1 or 0 is off.
    pub top_k: Option<i32>,
    /// The share of the largest probability below which tokens are dropped.
    pub min_p: Option<f32>,
    /// The seed, which makes sampling repeatable; `seed` is accepted too.
    #[serde(alias = "seed")]
    pub sampling_seed: Option<i64>,
    /// A number that is subtracted from the logits of generated tokens.
    pub presence_penalty: Option<f32>,
    /// A number that is subtracted from the logits of generated tokens, for each occurrence.
    pub frequency_penalty: Option<f32>,
    /// A number that divides positive logits of earlier tokens, and multiplies negative ones.
    pub repetition_penalty: Option<f32>,
    /// Numbers that are added to the logits, by token id.
    pub logit_bias: Option<HashMap<String, f32>>,
    /// A string or a list of strings that end the text.
    #[schema(value_type = Option<Vec<String>>)]
    pub stop: Option<Strings>,
    /// Token ids that end the text.
    pub stop_token_ids: Option<Vec<i32>>,
    /// Keep the stop string in the output.
    pub no_stop_trim: Option<bool>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: Option<bool>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: Option<bool>,
    /// Accepted, without an effect: tokenizers with fast detokenisation have no such spaces.
    pub spaces_between_special_tokens: Option<bool>,
    /// The number of tokens for an event of the stream; the server's flag if absent. The first
    /// token does not wait.
    pub stream_interval: Option<u32>,
    /// The form of the answer: a JSON schema, as text or as an object.
    #[schema(value_type = Option<String>)]
    json_schema: Option<Raw>,
    /// The form of the answer: a regular expression.
    pub regex: Option<String>,
    /// The form of the answer: a grammar in GBNF or Lark.
    pub ebnf: Option<String>,
    /// The form of the answer: a structural tag, as text or as an object.
    #[schema(value_type = Option<String>)]
    structural_tag: Option<Raw>,
    #[serde(default)]
    #[schema(ignore)]
    stop_regex: Inert,
    #[serde(default)]
    #[schema(ignore)]
    custom_params: Inert,
}

/// One prompt of a native request.
#[derive(Debug)]
pub struct GenerateItem {
    /// The prompt.
    pub prompt: Prompt,
    /// The client's name for the prompt.
    pub rid: Option<String>,
    /// The index of its parameters in [`ValidGenerate::generations`].
    pub generation: usize,
    /// The images of the prompt, in order.
    pub images: Vec<ImagePart>,
}

/// A native request that is checked, except for the prompts' lengths.
#[derive(Debug)]
pub struct ValidGenerate {
    /// The prompts, at least one.
    pub items: Vec<GenerateItem>,
    /// The other parameters: one entry for all prompts, or one for each prompt.
    pub generations: Vec<Generation>,
    /// True if the response is a list.
    pub batch: bool,
    /// True if the response is server-sent events.
    pub stream: bool,
    /// True if log-probabilities come with the tokens' text.
    pub text_in_logprobs: bool,
}

impl GenerateRequest {
    /// The name of the parameter with the prompts.
    pub fn prompt_param(&self) -> &'static str {
        if self.input_ids.is_some() { "input_ids" } else { "text" }
    }

    /// Checks everything that can be checked before the prompts are tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not served; the error names the first.
    pub fn validate(
        self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidGenerate, ApiError> {
        for (param, inert) in [
            ("input_embeds", self.input_embeds),
            ("audio_data", self.audio_data),
            ("video_data", self.video_data),
            ("lora_path", self.lora_path),
            ("session_params", self.session_params),
            ("token_ids_logprob", self.token_ids_logprob),
            ("return_hidden_states", self.return_hidden_states),
            ("custom_logit_processor", self.custom_logit_processor),
        ] {
            inert.refuse(param)?;
        }
        let wants_logprobs = self.return_logprob.unwrap_or(false);
        let first = first_told(self.logprob_start_len.filter(|_| wants_logprobs))?;
        let param = self.prompt_param();
        let prompts = one_of(self.text, self.input_ids)?;
        let many = prompts.is_many();
        let prompts = prompts.validate(param, limits.vocab_size)?;
        let count = prompts.len();
        check_total(param, count)?;
        let logprobs = if wants_logprobs {
            Some(check_logprobs("top_logprobs_num", self.top_logprobs_num.unwrap_or(0))?)
        } else {
            None
        };
        let outer = Outer {
            logprobs,
            prompt_logprobs: first.zip(logprobs).map(|(first, most)| PromptTail { first, most }),
            priority: self.priority,
            key: self.routing_key,
            rank: self.routed_dp_rank,
            cache_salt: self.cache_salt,
        };
        let params = match self.sampling_params {
            None => vec![GenerateSampling::default()],
            Some(OneOrMany::One(params)) => vec![params],
            Some(OneOrMany::Many(list)) => one_each("sampling_params", list, count)?,
        };
        let generations = params.into_iter().map(|it| it.validate(&outer, defaults, limits));
        let generations: Vec<Generation> = generations.collect::<Result<_, _>>()?;
        let rids: Vec<Option<String>> = match self.rid {
            None => vec![None; count],
            Some(Strings(rids)) => one_each("rid", rids, count)?.into_iter().map(Some).collect(),
        };
        let one = generations.len() == 1;
        let n = |index: usize| generations[if one { 0 } else { index }].n as usize;
        check_total(param, (0..count).map(n).sum())?;
        let batch = many || generations.iter().any(|generation| generation.n > 1);
        let images = match self.image_data {
            None => vec![Vec::new(); count],
            Some(data) => data.share(count, many, limits.images)?,
        };
        if first.is_some() && images.iter().any(|images| !images.is_empty()) {
            let reason = "`logprob_start_len`: a prompt with images has no log-probabilities";
            return Err(ApiError::invalid("logprob_start_len", reason));
        }
        let items = prompts
            .into_iter()
            .zip(rids)
            .zip(images)
            .enumerate()
            .map(|(index, ((prompt, rid), images))| GenerateItem {
                prompt,
                rid,
                generation: if one { 0 } else { index },
                images,
            })
            .collect();
        Ok(ValidGenerate {
            items,
            generations,
            batch,
            stream: self.stream.unwrap_or(false),
            text_in_logprobs: self.return_text_in_logprobs.unwrap_or(false),
        })
    }
}

/// Position of the first token of a prompt that has a log-probability: behind the first one that is
/// listed. `None`: none is listed.
fn first_told(start: Option<i32>) -> Result<Option<u32>, ApiError> {
    let start = start.unwrap_or(-1);
    if start < -1 {
        let reason = format!("`logprob_start_len`: {start} is not at least -1");
        return Err(ApiError::invalid("logprob_start_len", reason));
    }
    Ok(u32::try_from(start).ok().map(|start| start + 1))
}

/// The prompts, of which there are texts or ids.
fn one_of(text: Option<Prompts>, ids: Option<Prompts>) -> Result<Prompts, ApiError> {
    match (text, ids) {
        (Some(text @ (Prompts::Text(_) | Prompts::Texts(_))), None) => Ok(text),
        (None, Some(ids @ (Prompts::Tokens(_) | Prompts::TokenLists(_)))) => Ok(ids),
        (Some(_), None) => Err(ApiError::invalid("text", "`text`: expected a string or strings")),
        (None, Some(_)) => Err(ApiError::invalid("input_ids", "`input_ids`: expected token ids")),
        (None, None) | (Some(_), Some(_)) => {
            Err(ApiError::invalid("text", "exactly one of `text` and `input_ids` is needed"))
        }
    }
}

/// Refuses a list that has not an entry for each prompt.
fn one_each<T>(param: &str, list: Vec<T>, count: usize) -> Result<Vec<T>, ApiError> {
    if list.len() == count {
        return Ok(list);
    }
    let reason = format!("`{param}`: {} entries for {count} prompts", list.len());
    Err(ApiError::invalid(param, reason))
}

/// The wishes that do not come with the sampling parameters.
struct Outer {
    logprobs: Option<u8>,
    prompt_logprobs: Option<PromptTail>,
    priority: Option<i32>,
    key: Option<String>,
    rank: Option<i64>,
    cache_salt: Option<String>,
}

impl GenerateSampling {
    fn validate(
        self,
        outer: &Outer,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<Generation, ApiError> {
        for (param, inert) in [
            ("sampling_params.stop_regex", self.stop_regex),
            ("sampling_params.custom_params", self.custom_params),
        ] {
            inert.refuse(param)?;
        }
        let fields = Fields {
            prefix: "sampling_params.",
            max_tokens_name: "max_new_tokens",
            max_tokens: self.max_new_tokens,
            default_max_tokens: Some(DEFAULT_MAX_TOKENS),
            min_tokens: self.min_new_tokens,
            n: self.n,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.sampling_seed,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: self.logit_bias,
            allowed_token_ids: None,
            stop: self.stop,
            include_stop_str_in_output: self.no_stop_trim,
            stop_token_ids: self.stop_token_ids,
            ignore_eos: self.ignore_eos,
            skip_special_tokens: self.skip_special_tokens,
            priority: outer.priority,
            stream_interval: self.stream_interval,
            routing_key: outer.key.clone(),
            routed_dp_rank: outer.rank,
            cache_salt: outer.cache_salt.clone(),
            bad_words: None,
            thinking_budget: None,
            structure: Spellings {
                prefix: "sampling_params.",
                json_schema: self.json_schema,
                regex: self.regex,
                ebnf: self.ebnf,
                structural_tag: self.structural_tag,
                ..Spellings::default()
            },
            logprobs: outer.logprobs,
            prompt_logprobs: outer.prompt_logprobs,
        };
        fields.validate(defaults, limits)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::response::StopReason;
    use crate::sampling::MaxTokens;
    use crate::trial::{LIMITS, request, with};

    fn validate(body: Value) -> Result<ValidGenerate, ApiError> {
        request::<GenerateRequest>(&body)?.validate(&GenerationDefaults::default(), LIMITS)
    }

    #[test]
    fn single_and_batch() {
        let one = validate(json!({"text": "a"})).unwrap();
        assert!(!one.batch && !one.stream);
        assert_eq!(one.generations[0].max_tokens, MaxTokens::AtMost(128));

        let two = validate(json!({
            "input_ids": [[1], [2, 3]],
            "sampling_params": [{"max_new_tokens": 4}, {"seed": 9, "no_stop_trim": true}],
            "rid": ["x", "y"],
            "return_logprob": true,
            "top_logprobs_num": 3,
        }))
        .unwrap();
        assert!(two.batch);
        assert_eq!(two.generations[two.items[0].generation].max_tokens, MaxTokens::Exactly(4));
        assert_eq!(two.generations[1].seed, Some(9));
        assert_eq!(two.generations[1].sampling.logprobs, Some(3));
        assert_eq!(two.items[1].prompt, Prompt::Tokens(vec![2, 3]));
        assert_eq!(two.items[1].rid.as_deref(), Some("y"));

        let shared = validate(json!({"text": ["a", "b"], "sampling_params": {"n": 2}})).unwrap();
        assert_eq!((shared.generations.len(), shared.items[1].generation), (1, 0));
        let choices = validate(json!({"text": "a", "sampling_params": {"n": 2}})).unwrap();
        assert!(choices.batch);
    }

    #[test]
    fn the_first_token_that_is_listed_has_no_log_probability() {
        let first = |more: Value| {
            let body = with(json!({"text": "a", "top_logprobs_num": 2}), &more);
            let tail = validate(body).unwrap().generations[0].prompt_logprobs;
            tail.map(|tail| (tail.first, tail.most))
        };
        assert_eq!(first(json!({"return_logprob": true, "logprob_start_len": 0})), Some((1, 2)));
        assert_eq!(first(json!({"return_logprob": true, "logprob_start_len": 7})), Some((8, 2)));
        assert_eq!(first(json!({"return_logprob": true, "logprob_start_len": -1})), None);
        assert_eq!(first(json!({"return_logprob": true})), None);
        assert_eq!(first(json!({"return_logprob": false, "logprob_start_len": 0})), None);
    }

    #[test]
    fn errors_name_the_parameter() {
        let cases = [
            (json!({}), "text"),
            (json!({"text": "a", "input_ids": [1]}), "text"),
            (json!({"text": [1]}), "text"),
            (json!({"input_ids": "a"}), "input_ids"),
            (json!({"input_ids": [1, 1000]}), "input_ids[1]"),
            (json!({"text": "a", "rid": ["x", "y"]}), "rid"),
            (json!({"text": vec!["a"; 5000]}), "text"),
            (json!({"text": vec!["a"; 33], "sampling_params": {"n": 128}}), "text"),
            (json!({"text": ["a", "b"], "sampling_params": [{}]}), "sampling_params"),
            (json!({"text": "a", "sampling_params": {"top_p": 2}}), "sampling_params.top_p"),
            (json!({"text": "a", "sampling_params": {"top_p": "x"}}), "sampling_params.top_p"),
            (
                json!({"text": ["a"], "sampling_params": [{"max_new_tokens": "x"}]}),
                "sampling_params[0].max_new_tokens",
            ),
            (
                json!({"text": "a", "sampling_params": {"max_new_tokens": -1}}),
                "sampling_params.max_new_tokens",
            ),
            (
                json!({"text": "a", "sampling_params": {"stop_regex": "a"}}),
                "sampling_params.stop_regex",
            ),
            (json!({"text": "a", "image_data": "x"}), "image_data"),
            (
                json!({"text": "a", "return_logprob": true, "logprob_start_len": -2}),
                "logprob_start_len",
            ),
            (json!({"text": "a", "token_ids_logprob": [5]}), "token_ids_logprob"),
        ];
        for (case, expected) in cases {
            let error = validate(case.clone()).unwrap_err();
            assert_eq!(error.body().error.param.as_deref(), Some(expected), "{case}");
        }
    }

    #[test]
    fn output_shapes() {
        let finish = GenerateFinish::Stop { matched: StopReason::Token(2) };
        assert_eq!(serde_json::to_value(finish).unwrap(), json!({"type": "stop", "matched": 2}));
        let finish = GenerateFinish::Length { length: 5 };
        assert_eq!(serde_json::to_value(finish).unwrap(), json!({"type": "length", "length": 5}));
        let triple = LogprobTriple { logprob: Some(-0.5), id: 7, text: None };
        assert_eq!(serde_json::to_value(triple).unwrap(), json!([-0.5, 7, null]));
    }
}
