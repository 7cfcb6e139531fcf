//! The table of all limits. The parameters of each dialect have a file of their own.

mod anthropic;
mod native;
mod ollama;
mod openai;
mod param;
mod pooling;
mod responses;
mod shared;
mod tokens;

use crate::chat::ChatRequest;
use crate::completions::CompletionRequest;
use crate::embeddings::EmbeddingRequest;
use crate::generate::GenerateRequest;
use crate::limits::{Limited, Params};
use crate::llama::LlamaRequest;
use crate::messages::MessagesRequest;
use crate::ollama::{
    OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest, OllamaShowRequest,
};
use crate::rerank::{RerankRequest, ScoreRequest};
use crate::responses::ResponsesRequest;
use crate::tokenize::{DetokenizeRequest, TokenizeRequest};
use anthropic::ANTHROPIC;
use native::{GENERATE, LLAMA};
use ollama::{OLLAMA, OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_GENERATE, OLLAMA_SHOW};
use openai::{CHAT, COMPLETION, OPENAI};
use pooling::{EMBEDDING, POOLING, RERANK, SCORE};
use responses::RESPONSES;
use shared::{CONVERSATION, LISTS, NUMBERS};
use tokens::{DETOKENIZE, TOKENIZE};

/// The limits of a route that takes a body: the bounds of its parameters.
#[derive(Debug)]
pub struct RouteLimits {
    /// The path of the route, as in the documentation.
    pub path: &'static str,
    /// The parameters of the route.
    pub params: Params,
}

/// Every route that takes a body.
pub const ROUTES: &[RouteLimits] = &[
    RouteLimits { path: "/v1/chat/completions", params: ChatRequest::PARAMS },
    RouteLimits { path: "/v1/completions", params: CompletionRequest::PARAMS },
    RouteLimits { path: "/v1/messages", params: MessagesRequest::PARAMS },
    RouteLimits { path: "/v1/messages/count_tokens", params: MessagesRequest::PARAMS },
    RouteLimits { path: "/v1/responses", params: ResponsesRequest::PARAMS },
    RouteLimits { path: "/api/chat", params: OllamaChatRequest::PARAMS },
    RouteLimits { path: "/api/generate", params: OllamaGenerateRequest::PARAMS },
    RouteLimits { path: "/api/embed", params: OllamaEmbedRequest::PARAMS },
    RouteLimits { path: "/api/show", params: OllamaShowRequest::PARAMS },
    RouteLimits { path: "/generate", params: GenerateRequest::PARAMS },
    RouteLimits { path: "/completion", params: LlamaRequest::PARAMS },
    RouteLimits { path: "/v1/embeddings", params: EmbeddingRequest::PARAMS },
    RouteLimits { path: "/pooling", params: EmbeddingRequest::PARAMS },
    RouteLimits { path: "/rerank", params: RerankRequest::PARAMS },
    RouteLimits { path: "/v1/rerank", params: RerankRequest::PARAMS },
    RouteLimits { path: "/v2/rerank", params: RerankRequest::PARAMS },
    RouteLimits { path: "/score", params: ScoreRequest::PARAMS },
    RouteLimits { path: "/v1/score", params: ScoreRequest::PARAMS },
    RouteLimits { path: "/tokenize", params: TokenizeRequest::PARAMS },
    RouteLimits { path: "/apply-template", params: TokenizeRequest::PARAMS },
    RouteLimits { path: "/detokenize", params: DetokenizeRequest::PARAMS },
];

impl Limited for ChatRequest {
    const PARAMS: Params = &[CHAT, CONVERSATION, OPENAI, NUMBERS, LISTS];
}
impl Limited for CompletionRequest {
    const PARAMS: Params = &[COMPLETION, OPENAI, NUMBERS, LISTS];
}
impl Limited for GenerateRequest {
    const PARAMS: Params = &[GENERATE];
}
impl Limited for LlamaRequest {
    const PARAMS: Params = &[LLAMA];
}
impl Limited for EmbeddingRequest {
    const PARAMS: Params = &[EMBEDDING, POOLING];
}
impl Limited for MessagesRequest {
    const PARAMS: Params = &[ANTHROPIC];
}
impl Limited for ResponsesRequest {
    const PARAMS: Params = &[RESPONSES];
}
impl Limited for OllamaChatRequest {
    const PARAMS: Params = &[OLLAMA, OLLAMA_CHAT];
}
impl Limited for OllamaGenerateRequest {
    const PARAMS: Params = &[OLLAMA, OLLAMA_GENERATE];
}
impl Limited for OllamaEmbedRequest {
    const PARAMS: Params = &[OLLAMA_EMBED];
}
impl Limited for OllamaShowRequest {
    const PARAMS: Params = &[OLLAMA_SHOW];
}
impl Limited for RerankRequest {
    const PARAMS: Params = &[RERANK, POOLING];
}
impl Limited for ScoreRequest {
    const PARAMS: Params = &[SCORE, POOLING];
}
impl Limited for TokenizeRequest {
    const PARAMS: Params = &[TOKENIZE, CONVERSATION];
}
impl Limited for DetokenizeRequest {
    const PARAMS: Params = &[DETOKENIZE];
}

#[cfg(test)]
mod tests {
    use serde::de::value::Error;
    use serde::de::{Deserialize, Deserializer, Visitor};
    use serde::forward_to_deserialize_any;

    use super::anthropic::{
        ANTHROPIC_MESSAGE, BLOCK, INNER, OUTPUT_CONFIG, OUTPUT_FORMAT, SOURCE, THINKING,
        TOOL_CHOICE,
    };
    use super::native::SAMPLING;
    use super::openai::{JSON_SCHEMA, RESPONSE_FORMAT, STREAM_OPTIONS, STRUCTURED_OUTPUTS};
    use super::shared::{IMAGE, MESSAGE, PART};
    use super::*;
    use crate::chat::{ChatMessage, ContentPart};
    use crate::generate::GenerateSampling;
    use crate::images::ImageObject;
    use crate::messages::conversation::{Block, InMessage, Inner, Source};
    use crate::messages::{OutputConfig, OutputFormat, Thinking, ToolChoice};
    use crate::openai::StreamOptions;
    use crate::structure::{JsonSchemaFormat, ResponseFormat, StructuredOutputs};

    /// Asks a type for the names of its fields, aliases too, by not giving it any.
    struct Fields<'a>(&'a mut Vec<&'static str>);

    impl<'de> Deserializer<'de> for Fields<'_> {
        type Error = Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(serde::de::Error::custom("a request is an object"))
        }
        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Error> {
            self.0.extend(fields);
            self.deserialize_any(visitor)
        }
        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
            unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    fn compare<T: for<'de> Deserialize<'de>>(params: Params) {
        let mut fields = Vec::new();
        assert!(T::deserialize(Fields(&mut fields)).is_err());
        fields.sort_unstable();
        let mut names: Vec<_> =
            params.iter().flat_map(|group| group.iter()).map(|p| p.name).collect();
        names.sort_unstable();
        assert_eq!(fields, names, "{}: fields and limits", std::any::type_name::<T>());
    }

    #[test]
    fn every_field_of_every_request_has_a_limit() {
        compare::<ChatRequest>(ChatRequest::PARAMS);
        compare::<CompletionRequest>(CompletionRequest::PARAMS);
        compare::<GenerateRequest>(GenerateRequest::PARAMS);
        compare::<LlamaRequest>(LlamaRequest::PARAMS);
        compare::<EmbeddingRequest>(EmbeddingRequest::PARAMS);
        compare::<MessagesRequest>(MessagesRequest::PARAMS);
        compare::<InMessage>(&[ANTHROPIC_MESSAGE]);
        compare::<Block>(&[BLOCK]);
        compare::<Inner>(&[INNER]);
        compare::<Source>(&[SOURCE]);
        compare::<Thinking>(&[THINKING]);
        compare::<ToolChoice>(&[TOOL_CHOICE]);
        compare::<OutputConfig>(&[OUTPUT_CONFIG]);
        compare::<OutputFormat>(&[OUTPUT_FORMAT]);
        compare::<RerankRequest>(RerankRequest::PARAMS);
        compare::<ScoreRequest>(ScoreRequest::PARAMS);
        compare::<TokenizeRequest>(TokenizeRequest::PARAMS);
        compare::<DetokenizeRequest>(DetokenizeRequest::PARAMS);
        compare::<ChatMessage>(&[MESSAGE]);
        compare::<ContentPart>(&[PART]);
        compare::<ImageObject>(&[IMAGE]);
        compare::<GenerateSampling>(&[SAMPLING, NUMBERS, LISTS]);
        compare::<StreamOptions>(&[STREAM_OPTIONS]);
        compare::<ResponseFormat>(&[RESPONSE_FORMAT]);
        compare::<JsonSchemaFormat>(&[JSON_SCHEMA]);
        compare::<StructuredOutputs>(&[STRUCTURED_OUTPUTS]);
    }
}
