//! `POST /generate`, SGLang's native API: requests.

mod output;

use forebay_engine::PromptTail;

use crate::error::ApiError;
use crate::images::{IMAGE, ImageData, ImagePart};
use crate::limits::{Bound, Limited, NAME_BYTES, PROMPTS};
use crate::parameter::generation::*;
use crate::parameter::{Line, OneOrMany, own, p, refused, tabled};
use crate::prompt::{Prompt, Prompts, Strings};
use crate::sampling::{Generation, Limits, check_logprobs, check_total};
pub use output::{GenerateFinish, GenerateMeta, GenerateOutput, LogprobTriple};

/// The number of tokens that this API generates if the client sets no limit.
const DEFAULT_MAX_TOKENS: u32 = 128;

/// A request to SGLang's native API: a prompt, or a batch of prompts.
#[derive(Debug, Default)]
pub struct GenerateRequest {
    generation: GenerationParameters,
    text: Option<Prompts>,
    input_ids: Option<Prompts>,
    sampling_params: Option<OneOrMany<GenerateSampling>>,
    stream: Option<bool>,
    return_logprob: Option<bool>,
    top_logprobs_num: Option<i32>,
    return_text_in_logprobs: Option<bool>,
    logprob_start_len: Option<i32>,
    rid: Option<Strings>,
    image_data: Option<ImageData>,
    lora_path: Option<String>,
}

#[rustfmt::skip]
const LINES: &[Line<GenerateRequest>] = &[
    own("text", Bound::Prompts(PROMPTS), "A prompt or a list of prompts.", |r, v| v.put(&mut r.text)),
    own("input_ids", Bound::Prompts(PROMPTS), "Instead of `text`: token ids or a list of lists of token ids.", |r, v| v.put(&mut r.input_ids)),
    own("sampling_params", Bound::Objects(PROMPTS, GenerateSampling::PARAMS), "Parameters for all prompts, or a list with parameters for each prompt.", |r, v| v.objects(&mut r.sampling_params)),
    own("stream", Bound::Flag, "Send the text so far as server-sent events.", |r, v| v.put(&mut r.stream)),
    own("return_logprob", Bound::Flag, "Return log-probabilities of the generated tokens, and of the prompt's from `logprob_start_len` on.", |r, v| v.put(&mut r.return_logprob)),
    own("top_logprobs_num", ALTERNATIVES, "Alternatives to return for each token, 0 to 20.", |r, v| v.put(&mut r.top_logprobs_num)),
    own("return_text_in_logprobs", Bound::Flag, "Return the tokens' text with their log-probabilities.", |r, v| v.put(&mut r.return_text_in_logprobs)),
    own("logprob_start_len", I32, "The position of the first token of the prompt whose log-probability is listed; -1: none is listed. The first listed one is null.", |r, v| v.put(&mut r.logprob_start_len)),
    own("rid", Bound::Strings { count: PROMPTS, each: NAME_BYTES, total: PROMPTS * NAME_BYTES }, "The name of the request, or a name for each prompt; it comes back in `meta_info.id`.", |r, v| v.put(&mut r.rid)),
    p("priority", PRIORITY),
    p("routing_key", ROUTING_KEY),
    p("routed_dp_rank", ROUTED_DP_RANK),
    p("cache_salt", CACHE_SALT).described("Blocks of the prompts are shared only with requests of the same salt, 1 to 256 bytes."),
    refused("input_embeds"),
    own("image_data", Bound::Images(2, &[IMAGE]), "Images of the prompts, by URL or in base64: one, a list, or a list of lists. A prompt has the model's image token for each.", |r, v| v.put(&mut r.image_data)),
    refused("audio_data"),
    refused("video_data"),
    own("lora_path", NAME, "The name of an adapter.", |r, v| v.put(&mut r.lora_path)),
    refused("session_params"),
    refused("token_ids_logprob"),
    refused("return_hidden_states"),
    refused("custom_logit_processor"),
];

tabled!(
    GenerateRequest,
    "A native generation request: one prompt, or a batch.",
    [LINES],
    generation
);

/// The `sampling_params` of SGLang's native API.
#[derive(Debug, Default)]
pub(crate) struct GenerateSampling {
    generation: GenerationParameters,
}

#[rustfmt::skip]
const SAMPLING: &[Line<GenerateSampling>] = &[
    p("max_new_tokens", MAX_TOKENS).described("The largest number of tokens to generate; 128 if absent."),
    p("min_new_tokens", MIN_TOKENS),
    p("n", N),
    p("temperature", TEMPERATURE),
    p("top_p", TOP_P),
    p("top_k", TOP_K),
    p("min_p", MIN_P),
    p("sampling_seed", SEED).also(&["seed"]).described("The seed, which makes sampling repeatable; `seed` is accepted too."),
    p("presence_penalty", PRESENCE_PENALTY),
    p("frequency_penalty", FREQUENCY_PENALTY),
    p("repetition_penalty", REPETITION_PENALTY),
    p("logit_bias", LOGIT_BIAS),
    p("stop", STOP),
    p("stop_token_ids", STOP_TOKEN_IDS),
    p("no_stop_trim", INCLUDE_STOP),
    p("ignore_eos", IGNORE_EOS),
    p("skip_special_tokens", SKIP_SPECIAL_TOKENS),
    p("spaces_between_special_tokens", SPACES_BETWEEN_SPECIAL_TOKENS),
    p("stream_interval", STREAM_INTERVAL).described("The number of tokens for an event of the stream; the server's flag if absent. The first token does not wait."),
    p("json_schema", JSON_SCHEMA).described("The form of the answer: a JSON schema, as text or as an object."),
    p("regex", REGEX),
    p("ebnf", EBNF).described("The form of the answer: a grammar in GBNF or Lark."),
    p("structural_tag", STRUCTURAL_TAG),
    refused("stop_regex"),
    refused("custom_params"),
];

tabled!(GenerateSampling, "Sampling parameters of the native dialect.", [SAMPLING], generation);

/// One prompt of the request.
#[derive(Debug)]
pub struct GenerateItem {
    /// The prompt.
    pub prompt: Prompt,
    /// The client's id for the prompt; `None` if the client gave none.
    pub rid: Option<String>,
    /// The index of the prompt's parameters in [`ValidGenerate::generations`].
    pub generation: usize,
    /// The images of the prompt, in order.
    pub images: Vec<ImagePart>,
}

/// A native request, checked except for the lengths of the prompts.
#[derive(Debug)]
pub struct ValidGenerate {
    /// The list of prompts, which has at least one.
    pub items: Vec<GenerateItem>,
    /// The generation parameters: one entry for all prompts, or one entry per prompt.
    pub generations: Vec<Generation>,
    /// True if the response is a list.
    pub batch: bool,
    /// True if the response is a stream of server-sent events.
    pub stream: bool,
    /// True if log-probabilities include the text of their tokens.
    pub text_in_logprobs: bool,
}

impl GenerateRequest {
    /// Returns the name of the requested adapter.
    pub fn lora_path(&self) -> Option<&str> {
        self.lora_path.as_deref()
    }

    /// Returns the name of the parameter with the prompts.
    pub fn prompt_param(&self) -> &'static str {
        if self.input_ids.is_some() { "input_ids" } else { "text" }
    }

    /// Checks everything that can be checked before the prompts are tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        mut self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidGenerate, ApiError> {
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
        self.generation.logprobs = logprobs;
        self.generation.prompt_logprobs =
            first.zip(logprobs).map(|(first, most)| PromptTail { first, most });
        let params = match self.sampling_params {
            None => vec![GenerateSampling::default()],
            Some(OneOrMany::One(params)) => vec![params],
            Some(OneOrMany::Many(list)) => one_each("sampling_params", list, count)?,
        };
        let generations =
            params.into_iter().map(|it| it.validate(&self.generation, defaults, limits));
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

/// Returns the position of the first prompt token with a log-probability; `None` if no prompt token
/// is listed. `start` is the position of the first listed token, which has no log-probability.
fn first_told(start: Option<i32>) -> Result<Option<u32>, ApiError> {
    let start = start.unwrap_or(-1);
    if start < -1 {
        let reason = format!("`logprob_start_len`: {start} is not at least -1");
        return Err(ApiError::invalid("logprob_start_len", reason));
    }
    Ok(u32::try_from(start).ok().map(|start| start + 1))
}

/// Returns the prompts, which are given either as texts or as ids.
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

/// Checks that a list has one element per prompt.
fn one_each<T>(param: &str, list: Vec<T>, count: usize) -> Result<Vec<T>, ApiError> {
    if list.len() == count {
        return Ok(list);
    }
    let reason = format!("`{param}`: {} entries for {count} prompts", list.len());
    Err(ApiError::invalid(param, reason))
}

impl GenerateSampling {
    /// Validates the sampling parameters, combined with the request's other generation parameters
    /// in `beside`.
    fn validate(
        self,
        beside: &GenerationParameters,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<Generation, ApiError> {
        let parameters = GenerationParameters {
            default_max_tokens: Some(DEFAULT_MAX_TOKENS),
            priority: beside.priority,
            routing_key: beside.routing_key.clone(),
            routed_dp_rank: beside.routed_dp_rank,
            cache_salt: beside.cache_salt.clone(),
            logprobs: beside.logprobs,
            prompt_logprobs: beside.prompt_logprobs,
            ..self.generation
        };
        parameters.validate("sampling_params.", defaults, limits)
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
