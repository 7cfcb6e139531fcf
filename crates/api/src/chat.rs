//! `POST /v1/chat/completions`.

use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::content::TextOr;
use crate::error::ApiError;
use crate::images::{ImagePart, ImageUrl, Images};
use crate::inert::{Choice, Inert};
use crate::openai::{StreamOptions, Streaming, TokenOutput, openai_request};
use crate::sampling::{
    Fields, Generation, GenerationDefaults, Limits, check_logprobs, whole_prompt,
};
use crate::tools::OfferedTools;

openai_request! {
    /// A chat completion request.
    pub struct ChatRequest {
        /// The conversation so far.
        pub messages: Vec<ChatMessage>,
        /// The largest number of tokens to generate; the rest of the context if absent.
        /// `max_tokens` is its older name.
        pub max_completion_tokens: Option<u32>,
        /// Return log-probabilities.
        pub logprobs: Option<bool>,
        /// Alternatives to return for each token, 0 to 20.
        pub top_logprobs: Option<i32>,
        /// Let the template open the assistant's turn; true if absent.
        pub add_generation_prompt: Option<bool>,
        /// Let the model continue the last message, and not answer it.
        pub continue_final_message: Option<bool>,
        /// Variables for the chat template.
        #[schema(value_type = Option<Object>)]
        pub chat_template_kwargs: Option<Map<String, Value>>,
        /// Functions that the model may call.
        #[schema(value_type = Option<Vec<Object>>)]
        pub tools: Option<Vec<Value>>,
        /// `auto`; `none`: the model does not see the tools; `required`: it calls one; or an object
        /// that names a function, or the allowed ones.
        #[schema(value_type = Option<String>)]
        pub tool_choice: Option<Value>,
        /// True if an answer may have several calls; true if absent.
        pub parallel_tool_calls: Option<bool>,
        /// The effort of the model's reasoning, for templates that use it; `none` means no
        /// reasoning.
        pub reasoning_effort: Option<String>,
        /// True if the model should think, for templates that use it.
        pub enable_thinking: Option<bool>,
        /// The settings of reasoning in OpenRouter's words, with a limit on its tokens.
        pub reasoning: Option<ReasoningRequest>,
        /// True if reasoning is part of the answer; true if absent.
        pub include_reasoning: Option<bool>,
        /// True if reasoning stands apart from the content; true if absent.
        pub separate_reasoning: Option<bool>,
        #[serde(default)] #[schema(ignore)] functions: Inert,
        #[serde(default)] #[schema(ignore)] function_call: Choice,
        #[schema(ignore)] modalities: Option<Vec<String>>,
        #[serde(default)] #[schema(ignore)] audio: Inert,
        #[serde(default)] #[schema(ignore)] prediction: Inert,
        #[serde(default)] #[schema(ignore)] web_search_options: Inert,
        #[serde(default)] #[schema(ignore)] documents: Inert,
        #[serde(default)] #[schema(ignore)] chat_template: Inert,
        #[serde(default)] #[schema(ignore)] echo: Inert,
    }
}

/// The `reasoning` parameter.
#[derive(Debug, Clone, Default, serde::Deserialize, ToSchema)]
pub struct ReasoningRequest {
    /// The effort, as in `reasoning_effort`.
    pub effort: Option<String>,
    /// The limit on the tokens of reasoning, as in `thinking_budget`.
    pub max_tokens: Option<i64>,
    /// The switch for reasoning, as in `enable_thinking`.
    pub enabled: Option<bool>,
    /// True leaves reasoning out, like `include_reasoning` false.
    pub exclude: Option<bool>,
}

/// One message of a conversation.
#[derive(Debug, Clone, serde::Deserialize, ToSchema)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`, or another role of the chat template.
    pub role: String,
    /// A string, or a list of parts of type `text`.
    #[schema(value_type = Option<String>)]
    pub content: Option<MessageContent>,
    /// The name of the speaker, for templates that use it.
    pub name: Option<String>,
    /// Reasoning of an earlier turn, for templates that use it.
    pub reasoning_content: Option<String>,
    /// The reasoning before the message, under another name.
    pub reasoning: Option<String>,
    /// The reasoning before the message, under another name.
    pub thinking: Option<String>,
    /// Tool calls of an earlier turn, for templates that use them.
    #[schema(value_type = Option<Vec<Object>>)]
    pub tool_calls: Option<Vec<Value>>,
    /// The call that a `tool` message answers.
    pub tool_call_id: Option<String>,
}

/// Content of a message.
pub type MessageContent = TextOr<ContentPart>;

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct ContentPart {
    /// `text`; also `image_url`, if the model takes images.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    pub text: Option<String>,
    /// The image.
    pub image_url: Option<ImageUrl>,
}

/// A conversation ready for the chat template.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatPrompt {
    /// Messages as the template sees them, an array of objects: `content` is a string, or a list of
    /// parts where there are images.
    pub messages: Value,
    /// The images in them, in order.
    pub images: Vec<ImagePart>,
    /// True if the template opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// True if the last message is left open.
    pub continue_final_message: bool,
    /// Descriptions of tools; `None`: the request has none.
    pub tools: Option<Value>,
    /// More variables for the template.
    pub kwargs: Map<String, Value>,
    /// The effort of the model's reasoning.
    pub effort: Effort,
}

/// The effort that a request wants of the model's reasoning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effort {
    /// The effort in words: `low`, `medium`, `high`, or another word of the template.
    pub level: Option<String>,
    /// True if the model should think; `None` leaves it to the template.
    pub thinks: Option<bool>,
}

/// A client's wishes about the rendering of a conversation.
#[derive(Debug, Default)]
pub struct Rendering {
    /// Let the template open the assistant's turn.
    pub add_generation_prompt: Option<bool>,
    /// Leave the last message open.
    pub continue_final_message: Option<bool>,
    /// Variables for the template.
    pub kwargs: Option<Map<String, Value>>,
    /// Descriptions of tools.
    pub tools: Vec<Value>,
    /// The effort of the model's reasoning.
    pub effort: Effort,
    /// The largest number of images; 0: the model takes none.
    pub images: u32,
}

impl ChatPrompt {
    /// Checks the messages and brings them into the shape that templates expect.
    ///
    /// # Errors
    /// There is no message, a part is not served, there are too many images, or both ways to end
    /// the prompt are requested.
    pub fn new(messages: Vec<ChatMessage>, rendering: Rendering) -> Result<Self, ApiError> {
        let Rendering {
            add_generation_prompt,
            continue_final_message,
            kwargs,
            tools,
            effort,
            images: most,
        } = rendering;
        if messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages`: at least one is needed"));
        }
        let continue_final_message = continue_final_message.unwrap_or(false);
        if continue_final_message && add_generation_prompt == Some(true) {
            return Err(ApiError::invalid(
                "continue_final_message",
                "`continue_final_message` and `add_generation_prompt` exclude each other",
            ));
        }
        let mut images = Images::new(most);
        let messages =
            messages.into_iter().enumerate().map(|(index, m)| flatten(index, m, &mut images));
        Ok(Self {
            messages: Value::Array(messages.collect::<Result<_, _>>()?),
            images: images.found,
            add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
            continue_final_message,
            tools: (!tools.is_empty()).then_some(Value::Array(tools)),
            kwargs: kwargs.unwrap_or_default(),
            effort,
        })
    }
}

/// Takes the part at `path`, which is no text; gives the template's view of it.
fn take(path: &str, part: ContentPart, images: &mut Images) -> Result<Value, ApiError> {
    if images.are_unseen() || part.kind != "image_url" {
        return Err(ApiError::unsupported(format!("{path}.type={}", part.kind)));
    }
    let image = part.image_url.ok_or_else(|| {
        let param = format!("{path}.image_url");
        ApiError::invalid(param.clone(), format!("`{param}`: required and missing"))
    })?;
    images.take(path.to_owned(), || format!("{path}.image_url.detail"), image)?;
    Ok(json!({"type": "image"}))
}

/// The template's view of message number `index`.
fn flatten(index: usize, message: ChatMessage, images: &mut Images) -> Result<Value, ApiError> {
    let mut map = Map::new();
    map.insert("role".into(), Value::String(message.role));
    let content = match message.content {
        None => Value::Null,
        Some(MessageContent::Text(text)) => Value::String(text),
        Some(MessageContent::List(parts)) => {
            let (mut texts, mut views) = (Vec::with_capacity(parts.len()), Vec::new());
            for (part_index, part) in parts.into_iter().enumerate() {
                let path = || format!("messages[{index}].content[{part_index}]");
                if part.kind != "text" {
                    // Those before it were texts.
                    views.extend(texts.drain(..).map(text_view));
                    views.push(take(&path(), part, images)?);
                    continue;
                }
                texts.push(part.text.ok_or_else(|| {
                    let param = format!("{}.text", path());
                    ApiError::invalid(param.clone(), format!("`{param}`: required and missing"))
                })?);
            }
            if views.is_empty() {
                Value::String(texts.join("\n"))
            } else {
                views.extend(texts.drain(..).map(text_view));
                Value::Array(views)
            }
        }
    };
    map.insert("content".into(), content);
    let reasoning = message.reasoning_content.or(message.reasoning).or(message.thinking);
    let strings = [
        ("name", message.name),
        ("reasoning_content", reasoning),
        ("tool_call_id", message.tool_call_id),
    ];
    for (key, value) in strings {
        if let Some(value) = value {
            map.insert(key.into(), Value::String(value));
        }
    }
    if let Some(calls) = message.tool_calls.filter(|calls| !calls.is_empty()) {
        check_calls(index, &calls)?;
        map.insert("tool_calls".into(), Value::Array(calls));
    }
    Ok(Value::Object(map))
}

fn text_view(text: String) -> Value {
    json!({"type": "text", "text": text})
}

/// Checks the calls of message number `index`. Without the check templates fail on wrong calls with
/// useless messages.
fn check_calls(index: usize, calls: &[Value]) -> Result<(), ApiError> {
    for (number, call) in calls.iter().enumerate() {
        let path = format!("messages[{index}].tool_calls[{number}]");
        let wrong = |field: &str, reason: &str| {
            let param = format!("{path}{field}");
            Err(ApiError::invalid(param.clone(), format!("`{param}`: {reason}")))
        };
        let Value::Object(fields) = call else { return wrong("", "must be an object") };
        if fields.get("id").is_some_and(|id| !id.is_string() && !id.is_null()) {
            return wrong(".id", "must be a string");
        }
        let Some(Value::Object(function)) = fields.get("function") else {
            return wrong(".function", "must be an object");
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return wrong(".function.name", "must be a string");
        }
        match function.get("arguments") {
            None | Some(Value::Null | Value::String(_) | Value::Object(_)) => {}
            Some(_) => return wrong(".function.arguments", "must be a string or an object"),
        }
    }
    Ok(())
}

/// A chat completion request that is checked, except for the prompt's length.
#[derive(Debug)]
pub struct ValidChat {
    /// The conversation.
    pub prompt: ChatPrompt,
    /// Tools that the model may call.
    pub tools: OfferedTools,
    /// The treatment of its reasoning.
    pub reasoning: ReasoningOutput,
    /// The form in which tokens appear beside their text.
    pub tokens: TokenOutput,
    /// The other parameters.
    pub generation: Generation,
    /// The options of the stream; `None`: one response.
    pub streaming: Option<Streaming>,
}

/// The treatment of a model's reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningOutput {
    /// Reasoning stands apart from the content.
    Apart,
    /// Reasoning is left out.
    LeftOut,
    /// Reasoning is content, as the model writes it.
    Content,
}

impl ChatRequest {
    /// Checks everything that can be checked before the prompt is tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not served; the error names the first.
    pub fn validate(
        mut self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidChat, ApiError> {
        self.refuse_shared()?;
        self.refuse_own()?;
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
        if self.max_tokens == Some(0) && self.max_completion_tokens.is_none() {
            return Err(ApiError::invalid("max_tokens", "`max_tokens`: 0 is not at least 1"));
        }
        let tools = OfferedTools::new(
            self.tools.take(),
            self.tool_choice.as_ref(),
            self.parallel_tool_calls,
        )?;
        self.spread_reasoning()?;
        let thinks = match self.reasoning_effort.as_deref() {
            Some("none") => Some(false),
            _ => self.enable_thinking,
        };
        let effort = Effort { level: self.reasoning_effort.take(), thinks };
        let renamed = self.max_completion_tokens.is_some();
        let prompt_logprobs = self.prompt_alternatives()?.map(whole_prompt);
        let mut fields = Fields { logprobs, prompt_logprobs, ..self.take_fields() };
        if renamed {
            fields.max_tokens = self.max_completion_tokens;
            fields.max_tokens_name = "max_completion_tokens";
        }
        Ok(ValidChat {
            generation: fields.validate(defaults, limits)?,
            streaming: StreamOptions::check(self.stream, self.stream_options)?,
            tokens: TokenOutput {
                ids: self.return_token_ids.unwrap_or(false),
                as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
            },
            reasoning: match (self.include_reasoning, self.separate_reasoning) {
                (Some(false), _) => ReasoningOutput::LeftOut,
                (_, Some(false)) => ReasoningOutput::Content,
                _ => ReasoningOutput::Apart,
            },
            prompt: ChatPrompt::new(
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

    /// Moves the settings in `reasoning` to the parameters of the same meaning.
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
        put(&mut self.reasoning_effort, effort, ["reasoning.effort", "reasoning_effort"])?;
        put(&mut self.thinking_budget, max_tokens, ["reasoning.max_tokens", "thinking_budget"])?;
        put(&mut self.enable_thinking, enabled, ["reasoning.enabled", "enable_thinking"])?;
        let include = exclude.map(|exclude| !exclude);
        put(&mut self.include_reasoning, include, ["reasoning.exclude", "include_reasoning"])
    }

    fn refuse_own(&self) -> Result<(), ApiError> {
        for (param, inert) in [
            ("functions", self.functions),
            ("audio", self.audio),
            ("prediction", self.prediction),
            ("web_search_options", self.web_search_options),
            ("documents", self.documents),
            ("chat_template", self.chat_template),
            ("echo", self.echo),
        ] {
            inert.refuse(param)?;
        }
        self.function_call.refuse("function_call")?;
        if self.add_special_tokens == Some(true) {
            return Err(ApiError::unsupported("add_special_tokens"));
        }
        if self.modalities.iter().flatten().any(|modality| modality != "text") {
            return Err(ApiError::unsupported("modalities"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
            json!({"prediction": {"type": "content"}}),
            json!({"lora_path": "x"}),
            json!({"use_beam_search": true}),
        ];
        for case in cases {
            let name = case.as_object().unwrap().keys().next().unwrap().clone();
            assert_eq!(validate(case).unwrap_err(), ApiError::unsupported(name));
        }
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
        let effort = Effort { level: Some("low".into()), thinks: Some(true) };
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
}
