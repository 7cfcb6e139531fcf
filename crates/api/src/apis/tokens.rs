//! `POST /tokenize` and `POST /detokenize`.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::apis::openai::{ChatMessage, MESSAGE, Rendering, chat_prompt};
use crate::chat::ChatPrompt;
use crate::error::ApiError;
use crate::limits::{Bound, IDS, MESSAGES, PROMPTS};
use crate::parameter::generation::*;
use crate::parameter::{Line, own, tabled};
use crate::prompt::{Strings, in_vocabulary};
use crate::tools::{OfferedTools, ToolNames};

/// A request to tokenise text or a conversation.
#[derive(Debug, Default)]
pub struct TokenizeRequest {
    /// The name of the model; `None` means the served one.
    pub model: Option<String>,
    prompt: Option<Strings>,
    content: Option<String>,
    add_special: Option<bool>,
    /// True if tokens are returned as objects with `id` and `piece`, as llama.cpp does.
    pub with_pieces: Option<bool>,
    messages: Option<Vec<ChatMessage>>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    /// True if the text of each token is returned too.
    pub return_token_strs: Option<bool>,
}

#[rustfmt::skip]
const TOKENIZE: &[Line<TokenizeRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("prompt", Bound::Strings { count: PROMPTS, each: usize::MAX, total: usize::MAX }, "Text, or a list of texts. Either this or `messages`.", |r, v| v.put(&mut r.prompt)),
    own("content", Bound::Prompt, "llama.cpp's name of `prompt`. With it no special tokens are added.", |r, v| v.put(&mut r.content)),
    own("add_special", Bound::Flag, "llama.cpp's name of `add_special_tokens`.", |r, v| v.put(&mut r.add_special)),
    own("with_pieces", Bound::Flag, "Return tokens as objects with their `id` and `piece`, as llama.cpp does.", |r, v| v.put(&mut r.with_pieces)),
    own("messages", Bound::Messages(MESSAGES, &[MESSAGE]), "A conversation. Either this or `prompt`.", |r, v| v.put(&mut r.messages)),
    own("add_special_tokens", Bound::Flag, "Put the tokenizer's special tokens around a text; true if absent. A conversation has those of its template.", |r, v| v.put(&mut r.add_special_tokens)),
    own("add_generation_prompt", Bound::Flag, "Let the template open the assistant's turn; true if absent.", |r, v| v.put(&mut r.add_generation_prompt)),
    own("continue_final_message", Bound::Flag, "Leave the last message open.", |r, v| v.put(&mut r.continue_final_message)),
    own("chat_template_kwargs", Bound::Tree, "Variables for the chat template.", |r, v| v.put(&mut r.chat_template_kwargs)),
    own("tools", Bound::Tree, "Tools for the template to describe.", |r, v| v.put(&mut r.tools)),
    own("return_token_strs", Bound::Flag, "Return the tokens' text too.", |r, v| v.put(&mut r.return_token_strs)),
];

tabled!(TokenizeRequest, "Text, or a conversation, to tokenise.", [TOKENIZE]);

/// The input to tokenise.
#[derive(Debug, PartialEq)]
pub enum TokenizeInput {
    /// Texts.
    Texts {
        /// The list of texts, which has at least one.
        texts: Vec<String>,
        /// True if the texts were given as a list.
        many: bool,
        /// True if the tokenizer adds its special tokens around each text.
        add_special_tokens: bool,
    },
    /// A conversation.
    Chat(Box<ChatPrompt>),
}

impl TokenizeRequest {
    /// Checks the request and returns the input to tokenise.
    ///
    /// # Errors
    /// Neither or both of `prompt` and `messages` are given, or a message has unsupported content.
    pub fn validate(self) -> Result<TokenizeInput, ApiError> {
        let asked = self.add_special_tokens.or(self.add_special);
        if let (Some(content), None, None) = (&self.content, &self.prompt, &self.messages) {
            let texts = vec![content.clone()];
            let add_special_tokens = asked.unwrap_or(false);
            return Ok(TokenizeInput::Texts { texts, many: false, add_special_tokens });
        }
        match (self.prompt, self.messages) {
            (Some(Strings(texts)), None) if self.content.is_none() => {
                if texts.is_empty() {
                    return Err(ApiError::invalid("prompt", "`prompt`: at least one is needed"));
                }
                let add_special_tokens = asked.unwrap_or(true);
                let many = texts.len() > 1;
                Ok(TokenizeInput::Texts { texts, many, add_special_tokens })
            }
            (None, Some(_)) if self.add_special_tokens == Some(true) => {
                Err(ApiError::unsupported("add_special_tokens"))
            }
            (None, Some(messages)) => {
                let tools = OfferedTools::new(self.tools, ToolNames::CHAT, None, None)?;
                let chat = chat_prompt(
                    messages,
                    Rendering {
                        add_generation_prompt: self.add_generation_prompt,
                        continue_final_message: self.continue_final_message,
                        kwargs: self.chat_template_kwargs,
                        tools: tools.described,
                        ..Rendering::default()
                    },
                )?;
                Ok(TokenizeInput::Chat(Box::new(chat)))
            }
            _ => {
                Err(ApiError::invalid("prompt", "exactly one of `prompt` and `messages` is needed"))
            }
        }
    }
}

/// Tokens of several texts.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizedTexts {
    /// The ids of each text.
    pub tokens: Vec<Vec<i32>>,
    /// The number of tokens of each text.
    pub count: Vec<usize>,
    /// The largest number of positions of a request.
    pub max_model_len: u32,
}

/// Tokens with their texts.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenPieces {
    /// The pieces, in order.
    pub tokens: Vec<TokenPiece>,
}

/// A token with its text.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenPiece {
    /// The id of the token.
    pub id: i32,
    /// The text of the token; U+FFFD if the token is part of a character.
    pub piece: String,
}

/// Tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizeResponse {
    /// The number of tokens.
    pub count: usize,
    /// The largest number of positions of a request.
    pub max_model_len: u32,
    /// Token ids.
    pub tokens: Vec<i32>,
    /// The tokens' text, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_strs: Option<Vec<String>>,
}

/// A request to convert tokens to text.
#[derive(Debug, Default)]
pub struct DetokenizeRequest {
    /// The name of the model; `None` means the served one.
    pub model: Option<String>,
    tokens: Vec<i32>,
    /// True if the text of each token is returned too.
    pub with_pieces: Option<bool>,
}

#[rustfmt::skip]
const DETOKENIZE: &[Line<DetokenizeRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("tokens", Bound::Ids(IDS), "Token ids.", |r: &mut DetokenizeRequest, v| v.put(&mut r.tokens)).required(),
    own("with_pieces", Bound::Flag, "Return the text of each token too, as log-probabilities have it.", |r, v| v.put(&mut r.with_pieces)),
];

tabled!(DetokenizeRequest, "Tokens to turn into text.", [DETOKENIZE]);

impl DetokenizeRequest {
    /// Checks the ids against the vocabulary.
    ///
    /// # Errors
    /// An id is out of range. [`ApiError::Invalid`] names the first such id.
    pub fn validate(self, vocab_size: u32) -> Result<Vec<i32>, ApiError> {
        match self.tokens.iter().position(|&id| !in_vocabulary(id, vocab_size)) {
            None => Ok(self.tokens),
            Some(index) => {
                let param = format!("tokens[{index}]");
                let reason =
                    format!("`{param}`: token id {} is not below {vocab_size}", self.tokens[index]);
                Err(ApiError::invalid(param, reason))
            }
        }
    }
}

/// Text of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct DetokenizeResponse {
    /// The text.
    pub prompt: String,
    /// The text, under SGLang's name.
    pub text: String,
    /// The text, under llama.cpp's name.
    pub content: String,
    /// The text of each token, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pieces: Option<Vec<String>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenize(body: &str) -> Result<TokenizeInput, ApiError> {
        crate::parse_request::<TokenizeRequest>(body.as_bytes(), |_| Ok(()))?.request.validate()
    }

    #[test]
    fn text_or_messages() {
        let text = tokenize(r#"{"prompt": "a"}"#).unwrap();
        let one = |add_special_tokens, many, texts: &[&str]| TokenizeInput::Texts {
            texts: texts.iter().map(|&text| text.to_owned()).collect(),
            many,
            add_special_tokens,
        };
        assert_eq!(text, one(true, false, &["a"]));
        let llama = tokenize(r#"{"content": "a"}"#);
        assert_eq!(llama.unwrap(), one(false, false, &["a"]));
        let many = r#"{"prompt": ["a", "b"], "add_special": false}"#;
        assert_eq!(tokenize(many).unwrap(), one(false, true, &["a", "b"]));
        let chat = tokenize(r#"{"messages": [{"role": "user", "content": "a"}]}"#).unwrap();
        assert!(matches!(chat, TokenizeInput::Chat(chat) if chat.add_generation_prompt));
        assert!(tokenize("{}").is_err());
        assert!(tokenize(r#"{"prompt": "a", "messages": []}"#).is_err());
    }

    #[test]
    fn ids_in_the_vocabulary() {
        let detokenize = |tokens: Vec<i32>| {
            DetokenizeRequest { tokens, ..DetokenizeRequest::default() }.validate(5)
        };
        assert_eq!(detokenize(vec![0, 4]), Ok(vec![0, 4]));
        assert_eq!(detokenize(vec![]), Ok(vec![]));
        assert!(
            matches!(detokenize(vec![0, 5]), Err(ApiError::Invalid { param, .. }) if param == "tokens[1]")
        );
    }
}
