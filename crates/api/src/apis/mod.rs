//! The APIs, each in a folder or file: responses, and requests with the tables of their parameters.

pub(crate) mod anthropic;
pub(crate) mod classify;
pub(crate) mod llama;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod ranking;
pub(crate) mod responses;
pub(crate) mod router;
pub(crate) mod sglang;
pub(crate) mod tokens;

use crate::limits::{Limited, Params};
use crate::parameter::{Field, TabledRequest, fields};
use anthropic::MessagesRequest;
use classify::ClassifyRequest;
use llama::LlamaRequest;
use ollama::{
    OllamaChatRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest, OllamaGenerateRequest,
    OllamaShowRequest,
};
use openai::{ChatRequest, CompletionRequest, EmbeddingRequest};
use ranking::{RerankRequest, ScoreRequest};
use responses::ResponsesRequest;
use sglang::GenerateRequest;
use tokens::{DetokenizeRequest, TokenizeRequest};

/// The bounds of the parameters of a route that takes a body.
#[derive(Debug)]
pub struct RouteLimits {
    /// The path of the route, as in the documentation.
    pub path: &'static str,
    /// The parameters of the route.
    pub params: Params,
    /// Lists the parameters as they are documented.
    pub fields: fn() -> Vec<Field>,
}

/// Creates the limits of the route at `path`, whose body is a `T`.
const fn route<T: Limited + TabledRequest>(path: &'static str) -> RouteLimits {
    RouteLimits { path, params: T::PARAMS, fields: fields::<T> }
}

/// Every route that takes a body.
pub const ROUTES: &[RouteLimits] = &[
    route::<ChatRequest>("/v1/chat/completions"),
    route::<CompletionRequest>("/v1/completions"),
    route::<MessagesRequest>("/v1/messages"),
    route::<MessagesRequest>("/v1/messages/count_tokens"),
    route::<ResponsesRequest>("/v1/responses"),
    route::<ResponsesRequest>("/v1/responses/input_tokens"),
    route::<OllamaChatRequest>("/api/chat"),
    route::<OllamaGenerateRequest>("/api/generate"),
    route::<OllamaEmbedRequest>("/api/embed"),
    route::<OllamaEmbeddingsRequest>("/api/embeddings"),
    route::<OllamaShowRequest>("/api/show"),
    route::<GenerateRequest>("/generate"),
    route::<LlamaRequest>("/completion"),
    route::<EmbeddingRequest>("/v1/embeddings"),
    route::<EmbeddingRequest>("/pooling"),
    route::<ClassifyRequest>("/classify"),
    route::<ClassifyRequest>("/v1/classify"),
    route::<RerankRequest>("/rerank"),
    route::<RerankRequest>("/v1/rerank"),
    route::<RerankRequest>("/v2/rerank"),
    route::<ScoreRequest>("/score"),
    route::<ScoreRequest>("/v1/score"),
    route::<TokenizeRequest>("/tokenize"),
    route::<TokenizeRequest>("/apply-template"),
    route::<DetokenizeRequest>("/detokenize"),
];

#[cfg(test)]
mod tests {
    use serde::de::value::Error;
    use serde::de::{Deserialize, Deserializer, Visitor};
    use serde::forward_to_deserialize_any;

    use super::*;
    use crate::images::{IMAGE, ImageObject};
    use crate::structure::{
        JSON_SCHEMA, JsonSchemaFormat, RESPONSE_FORMAT, ResponseFormat, STRUCTURED_OUTPUTS,
        StructuredOutputs,
    };

    /// A deserializer that collects the names of a type's fields, including aliases.
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

    /// Compares the fields of each type with its table or list of bounds, for requests and for the
    /// objects in their parameters.
    #[test]
    fn every_field_of_every_object_has_a_limit() {
        use anthropic::conversation as blocks;
        compare::<blocks::InMessage>(&[blocks::MESSAGE]);
        compare::<blocks::Block>(&[blocks::BLOCK]);
        compare::<blocks::Inner>(&[blocks::INNER]);
        compare::<blocks::Leaf>(&[blocks::LEAF]);
        compare::<blocks::Source>(&[blocks::SOURCE_OF_BLOCK]);
        compare::<anthropic::Thinking>(&[anthropic::THINKING]);
        compare::<anthropic::ToolChoice>(&[anthropic::TOOL_CHOICE]);
        compare::<anthropic::OutputConfig>(&[anthropic::OUTPUT_CONFIG]);
        compare::<anthropic::OutputFormat>(&[anthropic::OUTPUT_FORMAT]);
        compare::<responses::ResponsesReasoning>(&[responses::REASONING]);
        compare::<responses::ResponsesText>(&[responses::ANSWER]);
        compare::<responses::TextFormat>(&[responses::TEXT_FORMAT]);
        compare::<responses::Item>(&[responses::ITEM]);
        compare::<responses::ItemPart>(&[responses::ITEM_PART]);
        compare::<ollama::OllamaMessage>(&[ollama::MESSAGE]);
        compare::<ollama::OllamaCall>(&[ollama::CALL]);
        compare::<ollama::OllamaFunction>(&[ollama::FUNCTION]);
        compare::<openai::ChatMessage>(&[openai::MESSAGE]);
        compare::<openai::ContentPart>(&[openai::PART]);
        compare::<openai::ReasoningRequest>(&[openai::REASONING]);
        compare::<openai::StreamOptions>(&[openai::STREAM_OPTIONS]);
        compare::<ImageObject>(&[IMAGE]);
        compare::<ResponseFormat>(&[RESPONSE_FORMAT]);
        compare::<JsonSchemaFormat>(&[JSON_SCHEMA]);
        compare::<StructuredOutputs>(&[STRUCTURED_OUTPUTS]);
    }
}
