//! Text input and output: tokenisation, chat templates, incremental detokenisation and stop
//! strings.
//!
//! For input, a [`TextPool`] runs chat templates ([`ChatTemplate`]) and the tokenizer
//! ([`Tokenizer`]) on separate threads, so that a long prompt never blocks an HTTP thread. Its
//! [`Encoder`] cuts long texts where a cut changes no ids, and caches encoded parts. So the history
//! of a conversation is encoded only once. For output, each request has a [`Detokenizer`] and a
//! [`StopStrings`]. They convert token ids to final text that contains no part of a stop string.
//!
//! The reference is Hugging Face: `tokenizers` for ids and text, `transformers` with `jinja2` for
//! chat templates. The tests compare with their outputs.
//!
//! | threads | who | what |
//! |---|---|---|
//! | N, given by the caller | [`TextPool`] | render, encode |
//! | none | everything else | runs on the caller's thread |
//!
//! ```
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use forebay_text::{Detokenizer, StopStrings, StopTable, TextError, Tokenizer};
//!
//! let tokenizer = Tokenizer::from_file(Path::new("tests/data/tiny-llama-tokenizer.json"))?;
//! let ids = tokenizer.encode("Tea, please. STOP And cake.", false)?;
//!
//! let mut detokenizer = Detokenizer::new(Arc::new(tokenizer), true);
//! let mut stops = StopStrings::new(Arc::new(StopTable::new(vec!["STOP".into()])), false);
//! let (mut text, mut stopped) = (String::new(), None);
//! for id in ids {
//!     let mut delta = String::new();
//!     detokenizer.push(id, &mut delta);
//!     stopped = stops.push(&delta, &mut text);
//! }
//! assert_eq!((text.as_str(), stopped), ("Tea, please. ", Some(0)));
//! # Ok::<(), TextError>(())
//! ```

mod added;
mod backend;
mod cache;
mod cut;
mod detokenizer;
mod encoder;
mod error;
mod growth;
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
pub use template::{ChatRender, ChatTemplate, ContentFormat, render_templates};
pub use tokenizer::Tokenizer;
