//! Text in and text out: tokenisation, chat templates, incremental detokenisation and stop strings.
//!
//! Going in, a [`TextPool`] runs chat templates ([`ChatTemplate`]) and the tokenizer
//! ([`Tokenizer`]) on its own threads, so that a long prompt never holds up an HTTP thread. Its
//! [`Encoder`] cuts long texts at places where this changes no id, and remembers encoded parts. So
//! a conversation's history is encoded once. Coming out, each request has one [`Detokenizer`] and
//! one [`StopStrings`]: token ids become text that is final, with nothing of a stop string in it.
//!
//! The reference for all of it is Hugging Face: `tokenizers` for ids and text, `transformers` with
//! `jinja2` for chat templates. The tests compare with their outputs.
//!
//! | threads | who | what |
//! |---|---|---|
//! | N, given by the caller | [`TextPool`] | render, encode |
//! | none | everything else | runs on the caller's thread |

mod backend;
mod cache;
mod cut;
mod detokenizer;
mod encoder;
mod error;
mod measure;
mod plain;
mod pool;
mod scheme;
mod stop;
mod template;
mod tokenizer;

pub use backend::Backend;
pub use detokenizer::Detokenizer;
pub use encoder::Encoder;
pub use error::TextError;
pub use pool::{
    Encoded, Keep, StartThread, TextConfig, TextInput, TextMode, TextPool, TextStats, Within,
};
pub use stop::{StopStrings, StopTable};
pub use template::{ChatRender, ChatTemplate, ContentFormat};
pub use tokenizer::Tokenizer;
