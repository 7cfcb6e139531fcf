//! Kinds of servers: their routes, and the bodies of requests to them.

use anyhow::{Result, bail};
use bytes::Bytes;
use clap::ValueEnum;
use serde_json::{Map, Value, json};

use crate::item::{Part, Prompt, WorkItem};

/// A kind of server, named as in `bench_serving` and `vllm bench serve`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Any server with OpenAI's completions route.
    #[value(alias = "forebay", alias = "openai-completions")]
    Openai,
    /// Any server with OpenAI's chat route.
    #[value(alias = "forebay-chat", alias = "openai-chat-completions")]
    OpenaiChat,
    /// SGLang's /generate route.
    #[value(alias = "sglang-native")]
    Sglang,
    /// SGLang's completions route.
    SglangOai,
    /// SGLang's chat route.
    SglangOaiChat,
    /// vLLM's completions route.
    Vllm,
    /// vLLM's chat route.
    VllmChat,
    /// llama.cpp's completions route.
    LlamaServer,
    /// llama.cpp's chat route.
    LlamaServerChat,
    /// Any server with OpenAI's embeddings route.
    #[value(alias = "sglang-embedding", alias = "vllm-embeddings")]
    OpenaiEmbeddings,
}

/// The format of a route's requests and responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// OpenAI's completions route.
    Completions,
    /// OpenAI's chat route.
    Chat,
    /// SGLang's /generate route.
    Generate,
    /// OpenAI's embeddings route.
    Embeddings,
}

impl Backend {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Openai => "openai",
            Self::OpenaiChat => "openai-chat",
            Self::Sglang => "sglang",
            Self::SglangOai => "sglang-oai",
            Self::SglangOaiChat => "sglang-oai-chat",
            Self::Vllm => "vllm",
            Self::VllmChat => "vllm-chat",
            Self::LlamaServer => "llama-server",
            Self::LlamaServerChat => "llama-server-chat",
            Self::OpenaiEmbeddings => "openai-embeddings",
        }
    }

    /// The format of this backend's requests and responses.
    pub(crate) fn dialect(self) -> Dialect {
        match self {
            Self::Openai | Self::SglangOai | Self::Vllm | Self::LlamaServer => Dialect::Completions,
            Self::OpenaiChat | Self::SglangOaiChat | Self::VllmChat | Self::LlamaServerChat => {
                Dialect::Chat
            }
            Self::Sglang => Dialect::Generate,
            Self::OpenaiEmbeddings => Dialect::Embeddings,
        }
    }

    /// The path of the measured route.
    pub(crate) fn route(self) -> &'static str {
        match self.dialect() {
            Dialect::Completions => "/v1/completions",
            Dialect::Chat => "/v1/chat/completions",
            Dialect::Generate => "/generate",
            Dialect::Embeddings => "/v1/embeddings",
        }
    }

    /// The default port of this kind of server.
    pub(crate) fn default_port(self) -> u16 {
        match self {
            Self::Sglang | Self::SglangOai | Self::SglangOaiChat => 30000,
            Self::LlamaServer | Self::LlamaServerChat => 8080,
            _ => 8000,
        }
    }

    /// True if /server_info may report the accept length of speculative decoding.
    pub(crate) fn has_server_info(self) -> bool {
        matches!(self, Self::Sglang | Self::SglangOai | Self::SglangOaiChat)
    }
}

/// The settings that all requests of a run share.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestOptions {
    /// The name of the model in requests.
    pub(crate) model: String,
    /// True if responses should be streamed.
    pub(crate) stream: bool,
    /// True if every event of an OpenAI stream should report the token count so far.
    pub(crate) continuous_usage: bool,
    /// Sampling temperature; 0 is greedy.
    pub(crate) temperature: f64,
    /// True if generation should continue after the end-of-sequence token. The body omits false,
    /// since not every server supports the parameter.
    pub(crate) ignore_eos: bool,
    /// Strings that end generation.
    pub(crate) stop: Vec<String>,
    /// Fields that are added to the body. They replace fields with the same name.
    pub(crate) extra: Map<String, Value>,
}

impl RequestOptions {
    /// The body of the request to `backend` for `item`.
    ///
    /// # Errors
    /// The route does not accept this kind of prompt.
    pub(crate) fn body(&self, backend: Backend, item: &WorkItem) -> Result<Bytes> {
        let mut body = match backend.dialect() {
            Dialect::Completions => self.completions(item)?,
            Dialect::Chat => self.chat(item)?,
            Dialect::Generate => self.generate(item)?,
            Dialect::Embeddings => self.embeddings(item)?,
        };
        body.extend(self.extra.clone());
        Ok(serde_json::to_vec(&body)?.into())
    }

    fn completions(&self, item: &WorkItem) -> Result<Map<String, Value>> {
        let prompt = match &item.prompt {
            Prompt::Text(text) => json!(text),
            Prompt::Tokens(ids) => json!(ids),
            Prompt::Parts(_) | Prompt::Inputs(_) => {
                bail!("completions take text or token ids; this dataset needs another --backend")
            }
        };
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model));
        body.insert("prompt".into(), prompt);
        self.openai_sampling(&mut body, item.output_tokens);
        Ok(body)
    }

    fn chat(&self, item: &WorkItem) -> Result<Map<String, Value>> {
        let content = match &item.prompt {
            Prompt::Text(text) => json!(text),
            Prompt::Parts(parts) => parts.iter().map(part).collect(),
            Prompt::Tokens(_) | Prompt::Inputs(_) => {
                bail!("chat takes text and images; this dataset needs another --backend")
            }
        };
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model));
        body.insert("messages".into(), json!([{"role": "user", "content": content}]));
        self.openai_sampling(&mut body, item.output_tokens);
        Ok(body)
    }

    fn openai_sampling(&self, body: &mut Map<String, Value>, output_tokens: u32) {
        body.insert("temperature".into(), json!(self.temperature));
        body.insert("max_tokens".into(), json!(output_tokens));
        body.insert("stream".into(), json!(self.stream));
        if self.ignore_eos {
            body.insert("ignore_eos".into(), json!(true));
        }
        if !self.stop.is_empty() {
            body.insert("stop".into(), json!(self.stop));
        }
        if self.stream {
            let mut options = json!({"include_usage": true});
            if self.continuous_usage {
                options["continuous_usage_stats"] = json!(true);
            }
            body.insert("stream_options".into(), options);
        }
    }

    fn generate(&self, item: &WorkItem) -> Result<Map<String, Value>> {
        let (name, prompt) = match &item.prompt {
            Prompt::Text(text) => ("text", json!(text)),
            Prompt::Tokens(ids) => ("input_ids", json!(ids)),
            Prompt::Parts(_) | Prompt::Inputs(_) => {
                bail!("/generate takes text or token ids; this dataset needs another --backend")
            }
        };
        let mut sampling =
            json!({"temperature": self.temperature, "max_new_tokens": item.output_tokens});
        if self.ignore_eos {
            sampling["ignore_eos"] = json!(true);
        }
        if !self.stop.is_empty() {
            sampling["stop"] = json!(self.stop);
        }
        let mut body = Map::new();
        body.insert(name.into(), prompt);
        body.insert("sampling_params".into(), sampling);
        body.insert("stream".into(), json!(self.stream));
        Ok(body)
    }

    fn embeddings(&self, item: &WorkItem) -> Result<Map<String, Value>> {
        let input = match &item.prompt {
            Prompt::Inputs(inputs) => json!(inputs),
            Prompt::Text(text) => json!(text),
            Prompt::Tokens(ids) => json!(ids),
            Prompt::Parts(_) => bail!("embeddings take text; this dataset needs another --backend"),
        };
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model));
        body.insert("input".into(), input);
        Ok(body)
    }
}

fn part(part: &Part) -> Value {
    match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Image(url) => json!({"type": "image_url", "image_url": {"url": url}}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(prompt: Prompt) -> WorkItem {
        WorkItem { prompt, text_tokens: 3, output_tokens: 7, arrival: None }
    }

    fn options() -> RequestOptions {
        RequestOptions {
            model: "m".into(),
            stream: true,
            ignore_eos: true,
            stop: vec!["\n".into()],
            ..RequestOptions::default()
        }
    }

    fn body(options: &RequestOptions, backend: Backend, prompt: Prompt) -> Value {
        serde_json::from_slice(&options.body(backend, &item(prompt)).unwrap()).unwrap()
    }

    #[test]
    fn bodies_are_what_each_route_takes() {
        let options = options();
        assert_eq!(
            body(&options, Backend::Openai, Prompt::Text("hi".into())),
            json!({"model": "m", "prompt": "hi", "temperature": 0.0, "max_tokens": 7, "stream": true,
                   "ignore_eos": true, "stop": ["\n"], "stream_options": {"include_usage": true}})
        );
        assert_eq!(
            body(&options, Backend::Sglang, Prompt::Tokens(vec![1, 2])),
            json!({"input_ids": [1, 2], "stream": true, "sampling_params":
                   {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": true, "stop": ["\n"]}})
        );
        assert_eq!(
            body(&options, Backend::OpenaiEmbeddings, Prompt::Inputs(vec!["a".into()])),
            json!({"model": "m", "input": ["a"]})
        );
        let parts = vec![Part::Image("data:x".into()), Part::Text("what?".into())];
        assert_eq!(
            body(&options, Backend::VllmChat, Prompt::Parts(parts))["messages"][0]["content"],
            json!([{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "what?"}])
        );
    }

    #[test]
    fn extra_fields_win_and_unasked_ones_are_absent() {
        let extra = json!({"max_tokens": 1, "top_k": 5}).as_object().unwrap().clone();
        let options = RequestOptions { extra, ..RequestOptions::default() };
        let body = body(&options, Backend::OpenaiChat, Prompt::Text("hi".into()));
        assert_eq!(body["max_tokens"], 1);
        assert_eq!(body["top_k"], 5);
        assert_eq!(body["stream"], false);
        for absent in ["ignore_eos", "stop", "stream_options"] {
            assert_eq!(body.get(absent), None, "{absent}");
        }
    }

    #[test]
    fn shapes_that_a_route_does_not_take_are_refused() {
        let options = options();
        let parts = item(Prompt::Parts(vec![]));
        assert!(options.body(Backend::Openai, &parts).is_err());
        assert!(options.body(Backend::Sglang, &parts).is_err());
        assert!(options.body(Backend::OpenaiEmbeddings, &parts).is_err());
        assert!(options.body(Backend::OpenaiChat, &item(Prompt::Tokens(vec![1]))).is_err());
    }
}
