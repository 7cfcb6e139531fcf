//! `POST /v1/chat/completions`.

use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::conversation::{ChatMessage, MESSAGE, Rendering, chat_prompt};
use super::shared::{Shared, Shares};
use crate::chat::{Effort, ReasoningOutput, ValidChat};
use crate::error::ApiError;
use crate::limits::{Bound, MESSAGES, Param, WORD_BYTES};
use crate::parameter::generation::*;
use crate::parameter::{Line, TEXT, component, own, refused, tabled};
use crate::sampling::{Limits, check_logprobs, whole_prompt};
use crate::tools::{OfferedTools, ToolNames};

/// A chat completion request.
#[derive(Debug, Default)]
pub struct ChatRequest {
    shared: Shared,
    messages: Vec<ChatMessage>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<bool>,
    top_logprobs: Option<i32>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    enable_thinking: Option<bool>,
    reasoning: Option<ReasoningRequest>,
    include_reasoning: Option<bool>,
    separate_reasoning: Option<bool>,
    modalities: Option<Vec<String>>,
    prediction: Option<Value>,
}

/// The `reasoning` parameter.
#[derive(Debug, Clone, Default, serde::Deserialize, ToSchema)]
pub(crate) struct ReasoningRequest {
    /// The effort, as in `reasoning_effort`.
    pub effort: Option<String>,
    /// The limit on the tokens of reasoning, as in `thinking_budget`.
    pub max_tokens: Option<i64>,
    /// The switch for reasoning, as in `enable_thinking`.
    pub enabled: Option<bool>,
    /// True to leave reasoning out, as with `include_reasoning: false`.
    pub exclude: Option<bool>,
}

pub(crate) const REASONING: &[Param] = &[
    param("effort", WORD),
    param("max_tokens", COUNT_OR_ALL),
    param("enabled", Bound::Flag),
    param("exclude", Bound::Flag),
];

component!(ReasoningRequest);

#[rustfmt::skip]
const OWN: &[Line<ChatRequest>] = &[
    own("messages", Bound::Messages(MESSAGES, &[MESSAGE]), "The conversation so far.", |r: &mut ChatRequest, v| v.put(&mut r.messages)).required().note("Roles that the template does not accept are converted; see below."),
    own("max_completion_tokens", count(1), "The largest number of tokens to generate; the rest of the context if absent. `max_tokens` is its older name.", |r, v| v.put(&mut r.max_completion_tokens)),
    own("logprobs", Bound::Flag, "Return log-probabilities.", |r, v| v.put(&mut r.logprobs)),
    own("top_logprobs", ALTERNATIVES, "Alternatives to return for each token, 0 to 20.", |r, v| v.put(&mut r.top_logprobs)),
    own("add_generation_prompt", Bound::Flag, "Let the template open the assistant's turn; true if absent.", |r, v| v.put(&mut r.add_generation_prompt)),
    own("continue_final_message", Bound::Flag, "Let the model continue the last message, and not answer it.", |r, v| v.put(&mut r.continue_final_message)),
    own("chat_template_kwargs", Bound::Tree, "Variables for the chat template.", |r, v| v.put(&mut r.chat_template_kwargs)),
    own("tools", Bound::Tree, "Functions that the model may call.", |r: &mut ChatRequest, v| v.put(&mut r.tools)).note("`strict` is supported. Tools of other types (`web_search`, `custom`) are skipped and named."),
    own("tool_choice", Bound::Tree, "`auto`; `none`: the model does not see the tools; `required`: it calls one; or an object that names a function, or the allowed ones.", |r: &mut ChatRequest, v| v.put(&mut r.tool_choice)).shown(TEXT).note("See [calls that are asked for](#calls-that-are-asked-for)."),
    own("parallel_tool_calls", Bound::Flag, "True if an answer may have several calls; true if absent.", |r: &mut ChatRequest, v| v.put(&mut r.parallel_tool_calls)).note("False: the answer ends with its first call."),
    own("reasoning_effort", WORD, "The effort of the model's reasoning, for templates that use it; `none` means no reasoning.", |r: &mut ChatRequest, v| v.put(&mut r.reasoning_effort)).note("Given to templates with `reasoning_effort`, `enable_thinking` or `thinking`; otherwise named."),
    own("enable_thinking", Bound::Flag, "True if the model should think, for templates that use it.", |r, v| v.put(&mut r.enable_thinking)),
    own("reasoning", Bound::Object(&[REASONING]), "Settings of reasoning in OpenRouter's format, with a limit on its tokens.", |r: &mut ChatRequest, v| v.put(&mut r.reasoning)).note("`effort`, `max_tokens` (as `thinking_budget`), `enabled`, `exclude`."),
    own("include_reasoning", Bound::Flag, "True if reasoning is part of the answer; true if absent.", |r, v| v.put(&mut r.include_reasoning)),
    own("separate_reasoning", Bound::Flag, "True if reasoning is separate from the content; true if absent.", |r: &mut ChatRequest, v| v.put(&mut r.separate_reasoning)).note("False: reasoning stays in the content."),
    refused("functions").note("OpenAI's older form of tools."),
    refused("function_call").unless(&["auto", "none"]),
    own("modalities", Bound::Strings { count: 16, each: WORD_BYTES, total: 16 * WORD_BYTES }, "", |r: &mut ChatRequest, v| v.put(&mut r.modalities)).hidden(),
    refused("audio"),
    own("prediction", Bound::Tree, "The answer that the client predicts: `{\"type\": \"content\", \"content\": ...}`.", |r: &mut ChatRequest, v| v.put(&mut r.prediction)).note("Its tokens are [drafts](speculation.md) if speculation is on, and change no output. Otherwise named."),
    refused("web_search_options"),
    refused("documents").note("`chat_template_kwargs` may have them."),
    refused("chat_template").note("`--chat-template`."),
    refused("echo"),
];

tabled!(ChatRequest, "A chat completion request.", [OWN, ChatRequest::SHARED], shared.generation);

/// Returns the text of the predicted output.
fn predicted(prediction: Value) -> Result<String, ApiError> {
    #[derive(serde::Deserialize)]
    struct Prediction {
        r#type: String,
        content: Content,
    }
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Content {
        Text(String),
        Parts(Vec<Part>),
    }
    #[derive(serde::Deserialize)]
    struct Part {
        r#type: String,
        text: String,
    }
    let found: Option<Prediction> = serde_json::from_value(prediction).ok();
    let text = found.filter(|it| it.r#type == "content").and_then(|it| match it.content {
        Content::Text(text) => Some(text),
        Content::Parts(parts) => {
            let texts = parts.into_iter().map(|part| (part.r#type == "text").then_some(part.text));
            texts.collect::<Option<String>>()
        }
    });
    text.ok_or_else(|| {
        let reason = "`prediction`: expected {\"type\": \"content\", \"content\": ...} with a text, or a list of parts of type `text`";
        ApiError::invalid("prediction", reason)
    })
}

impl Shares for ChatRequest {
    fn shared(&mut self) -> &mut Shared {
        &mut self.shared
    }
}

impl ChatRequest {
    /// Returns the name of the requested model.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.shared.model.as_deref()
    }

    /// Checks everything that can be checked before the prompt is tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        mut self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidChat, ApiError> {
        if self.shared.add_special_tokens == Some(true) {
            return Err(ApiError::unsupported("add_special_tokens"));
        }
        if self.modalities.iter().flatten().any(|modality| modality != "text") {
            return Err(ApiError::unsupported("modalities"));
        }
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(ApiError::invalid(
                    "top_logprobs",
                    "`top_logprobs` is only allowed when `logprobs` is true",
                ));
            }
            (true, count) => Some(check_logprobs("top_logprobs", count.unwrap_or(0))?),
        };
        if self.shared.generation.max_tokens == Some(0) && self.max_completion_tokens.is_none() {
            return Err(ApiError::invalid("max_tokens", "`max_tokens`: 0 is not at least 1"));
        }
        let tools = OfferedTools::new(
            self.tools.take(),
            ToolNames::CHAT,
            self.tool_choice.as_ref(),
            self.parallel_tool_calls,
        )?;
        self.spread_reasoning()?;
        let thinks = match self.reasoning_effort.as_deref() {
            Some("none") => Some(false),
            _ => self.enable_thinking,
        };
        let effort = Effort { level: self.reasoning_effort.take(), thinks, ..Effort::default() };
        let prediction = self.prediction.take().map(predicted).transpose()?;
        let prompt_logprobs = self.shared.prompt_alternatives()?.map(whole_prompt);
        let mut generation = std::mem::take(&mut self.shared.generation);
        generation.max_tokens = self.max_completion_tokens.or(generation.max_tokens);
        (generation.logprobs, generation.prompt_logprobs) = (logprobs, prompt_logprobs);
        Ok(ValidChat {
            generation: generation.validate("", defaults, limits)?,
            streaming: self.shared.streaming()?,
            tokens: self.shared.tokens(),
            prediction,
            reasoning: match (self.include_reasoning, self.separate_reasoning) {
                (Some(false), _) => ReasoningOutput::LeftOut,
                (_, Some(false)) => ReasoningOutput::Content,
                _ => ReasoningOutput::Apart,
            },
            prompt: chat_prompt(
                self.messages,
                Rendering {
                    add_generation_prompt: self.add_generation_prompt,
                    continue_final_message: self.continue_final_message,
                    kwargs: self.chat_template_kwargs,
                    tools: tools.described.clone(),
                    effort,
                    images: limits.images,
                },
            )?,
            tools,
        })
    }

    /// Moves the fields of `reasoning` to the equivalent parameters.
    fn spread_reasoning(&mut self) -> Result<(), ApiError> {
        fn put<T>(
            place: &mut Option<T>,
            given: Option<T>,
            names: [&str; 2],
        ) -> Result<(), ApiError> {
            match (place.is_some(), given) {
                (true, Some(_)) => {
                    let [param, other] = names;
                    let reason = format!("`{param}` and `{other}` exclude each other");
                    Err(ApiError::invalid(param, reason))
                }
                (false, given @ Some(_)) => {
                    *place = given;
                    Ok(())
                }
                (_, None) => Ok(()),
            }
        }
        let ReasoningRequest { effort, max_tokens, enabled, exclude } =
            self.reasoning.take().unwrap_or_default();
        let budget = &mut self.shared.generation.thinking_budget;
        put(&mut self.reasoning_effort, effort, ["reasoning.effort", "reasoning_effort"])?;
        put(budget, max_tokens, ["reasoning.max_tokens", "thinking_budget"])?;
        put(&mut self.enable_thinking, enabled, ["reasoning.enabled", "enable_thinking"])?;
        let include = exclude.map(|exclude| !exclude);
        put(&mut self.include_reasoning, include, ["reasoning.exclude", "include_reasoning"])
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::sampling::MaxTokens;
    use crate::trial::{LIMITS, request, with};

    fn validate(more: Value) -> Result<ValidChat, ApiError> {
        let body = with(json!({"messages": [{"role": "user", "content": "hi"}]}), &more);
        request::<ChatRequest>(&body)?.validate(&GenerationDefaults::default(), LIMITS)
    }

    #[test]
    fn the_shortest_request_gets_the_defaults() {
        let chat = validate(json!({})).unwrap();
        assert_eq!(chat.generation.max_tokens, MaxTokens::Rest);
        assert_eq!(chat.generation.n, 1);
        assert_eq!(chat.prompt.messages, json!([{"role": "user", "content": "hi"}]));
        assert!(chat.prompt.add_generation_prompt && !chat.prompt.continue_final_message);
        assert_eq!(chat.streaming, None);
        assert!(chat.generation.skip_special_tokens);
    }

    #[test]
    fn harmless_parameters_are_accepted() {
        validate(json!({
            "user": "u", "metadata": {"a": "b"}, "store": false, "service_tier": "auto",
            "parallel_tool_calls": true, "tools": [], "tool_choice": "auto", "logit_bias": null,
            "response_format": {"type": "text"}, "modalities": ["text"], "stop": null,
            "stream_options": null, "temperature": null, "spaces_between_special_tokens": true,
            "something_new": {"deep": [1]},
        }))
        .unwrap();
    }

    #[test]
    fn what_is_not_served_is_named() {
        let cases = [
            json!({"functions": [{}]}),
            json!({"function_call": {"name": "f"}}),
            json!({"modalities": ["text", "audio"]}),
            json!({"add_special_tokens": true}),
            json!({"audio": {"voice": "x"}}),
            json!({"lora_path": "x"}),
            json!({"use_beam_search": true}),
        ];
        for case in cases {
            let name = case.as_object().unwrap().keys().next().unwrap().clone();
            assert_eq!(validate(case).unwrap_err(), ApiError::unsupported(name));
        }
    }

    #[test]
    fn a_prediction_is_text() {
        let prediction = |content: Value| {
            validate(json!({"prediction": {"type": "content", "content": content}}))
                .map(|chat| chat.prediction)
        };
        assert_eq!(prediction(json!("a b")).unwrap().as_deref(), Some("a b"));
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]);
        assert_eq!(prediction(parts).unwrap().as_deref(), Some("a b"));
        assert_eq!(validate(json!({"prediction": null})).unwrap().prediction, None);
        for wrong in [json!(3), json!(null), json!([{"type": "image_url", "text": "a"}])] {
            let error = prediction(wrong).unwrap_err();
            assert!(matches!(error, ApiError::Invalid { param, .. } if param == "prediction"));
        }
        assert!(validate(json!({"prediction": {"type": "text", "content": "a"}})).is_err());
    }

    #[test]
    fn content_parts_are_joined_and_images_refused() {
        let parts =
            |parts: Value| validate(json!({"messages": [{"role": "user", "content": parts}]}));
        let text = |text: &str| json!({"type": "text", "text": text});
        let chat = parts(json!([text("a"), text("b")])).unwrap();
        assert_eq!(chat.prompt.messages[0]["content"], "a\nb");
        let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
        assert_eq!(
            parts(json!([text("a"), image])).unwrap_err(),
            ApiError::unsupported("messages[0].content[1].type=image_url")
        );
        let error = parts(json!([{"type": "text"}])).unwrap_err();
        assert!(
            matches!(error, ApiError::Invalid { param, .. } if param == "messages[0].content[0].text")
        );
    }

    #[test]
    fn paths_of_wrong_types() {
        let cases = [
            (json!({"messages": []}), "messages"),
            (json!({"messages": "hi"}), "messages"),
            (json!({"messages": [{"content": "hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user", "content": 3}]}), "messages[0].content"),
            (
                json!({"messages": [{"role": "user", "content": [{}]}]}),
                "messages[0].content[0].type",
            ),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
            (json!({"stop": [1]}), "stop[0]"),
            (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
            (json!({"stream_options": {}}), "stream_options"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
            (json!({"prompt_logprobs": -1}), "prompt_logprobs"),
            (json!({"prompt_logprobs": 0, "stream": true}), "prompt_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (
                json!({"continue_final_message": true, "add_generation_prompt": true}),
                "continue_final_message",
            ),
        ];
        for (case, expected) in cases {
            match validate(case.clone()) {
                Err(ApiError::Invalid { param, .. }) => assert_eq!(param, expected, "{case}"),
                other => panic!("{case}: {other:?}"),
            }
        }
    }

    #[test]
    fn the_new_name_of_max_tokens_wins() {
        let chat = validate(json!({"max_tokens": 5, "max_completion_tokens": 7})).unwrap();
        assert_eq!(chat.generation.max_tokens, MaxTokens::Exactly(7));
    }

    #[test]
    fn reasoning_in_other_words_means_the_same() {
        let chat = validate(json!({
            "reasoning": {"effort": "low", "max_tokens": 7, "enabled": true, "exclude": true},
        }))
        .unwrap();
        assert_eq!(chat.generation.thinking_budget, Some(7));
        let effort = Effort { level: Some("low".into()), thinks: Some(true), ..Effort::default() };
        assert_eq!((chat.prompt.effort, chat.reasoning), (effort, ReasoningOutput::LeftOut));
        for (more, param) in [
            (json!({"reasoning": {"max_tokens": 1}, "thinking_budget": 2}), "reasoning.max_tokens"),
            (json!({"reasoning": {"max_tokens": -2}}), "reasoning.max_tokens"),
            (json!({"reasoning": {"effort": "a"}, "reasoning_effort": "b"}), "reasoning.effort"),
            (json!({"reasoning": 3}), "reasoning"),
        ] {
            match validate(more.clone()) {
                Err(ApiError::Invalid { param: found, .. }) => assert_eq!(found, param, "{more}"),
                other => panic!("{more}: {other:?}"),
            }
        }
    }

    #[test]
    fn logprobs_without_alternatives() {
        let chat = validate(json!({"logprobs": true})).unwrap();
        assert_eq!(chat.generation.sampling.logprobs, Some(0));
        assert_eq!(
            validate(json!({"logprobs": false})).unwrap().generation.sampling.logprobs,
            None
        );
    }

    #[test]
    fn refusals_are_content() {
        let said = |message: Value| {
            let question = json!({"role": "user", "content": "hi"});
            let chat = validate(json!({"messages": [question, message, question]}));
            chat.unwrap().prompt.messages[1]["content"].clone()
        };
        let part = |kind: &str, text: &str| json!({"type": kind, kind: text});
        let parts = json!([part("text", "well"), part("refusal", "no")]);
        assert_eq!(said(json!({"role": "assistant", "content": parts})), "well\nno");
        assert_eq!(said(json!({"role": "assistant", "refusal": "no"})), "no");
        assert_eq!(said(json!({"role": "assistant", "content": null, "refusal": "no"})), "no");
        assert_eq!(said(json!({"role": "assistant", "content": "a", "refusal": null})), "a");
        let error =
            validate(json!({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}));
        let error = error.unwrap_err().body().error;
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0].refusal"));
    }

    #[test]
    fn calls_in_the_older_form_are_calls() {
        let call = json!({"name": "f", "arguments": "{\"x\": 1}"});
        let chat = validate(json!({"messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "function_call": call},
            {"role": "function", "name": "f", "content": "4"},
        ]}));
        let messages = chat.unwrap().prompt.messages;
        let called = json!({"type": "function", "id": "call_1", "function": call});
        assert_eq!(messages[1]["tool_calls"], json!([called]));
        let result = json!({"role": "tool", "content": "4", "name": "f", "tool_call_id": "call_1"});
        assert_eq!(messages[2], result);
        for wrong in [json!("f"), json!({}), json!({"name": 1})] {
            let message = json!({"role": "assistant", "function_call": wrong});
            let error = validate(json!({"messages": [message]})).unwrap_err().body().error;
            assert_eq!(error.param.as_deref(), Some("messages[0].function_call.name"), "{wrong}");
        }
    }

    #[test]
    fn images_may_have_any_detail() {
        for detail in [json!("original"), json!("auto"), json!(null), json!({"a": 1})] {
            let image =
                json!({"type": "image_url", "image_url": {"url": "data:", "detail": detail}});
            let body = json!({"messages": [{"role": "user", "content": [image]}]});
            let limits = Limits { images: 1, ..LIMITS };
            let request = request::<ChatRequest>(&body).unwrap();
            let chat = request.validate(&GenerationDefaults::default(), limits).unwrap();
            assert_eq!(chat.prompt.images.len(), 1, "{detail}");
        }
    }
}
