//! Text in and text out: tokenisation, chat templates, incremental detokenisation and stop strings.
//!
//! Going in, a [`TextPool`] runs chat templates ([`ChatTemplate`]) and the tokenizer ([`Tokenizer`]) on its own
//! threads, so that a long prompt never holds up an HTTP thread. Coming out, each request has one [`Detokenizer`]
//! and one [`StopStrings`]: token ids become text that is final, with nothing of a stop string in it.
//!
//! The reference for all of it is Hugging Face: `tokenizers` for ids and text, `transformers` with `jinja2` for
//! chat templates. The tests compare with what those give.
//!
//! | threads | who | what |
//! |---|---|---|
//! | N, given by the caller | [`TextPool`] | render, encode |
//! | none | everything else | runs on the caller's thread |

mod detokenizer;
mod error;
mod pool;
mod scheme;
mod stop;
mod template;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use pool::{Encoded, TextInput, TextPool};
pub use stop::StopStrings;
pub use template::{ChatRender, ChatTemplate, ContentFormat};
pub use tokenizer::Tokenizer;
