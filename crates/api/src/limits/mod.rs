//! The limits of a request: every parameter of every route, in one table.
//!
//! One pass over a body compares each value with its bound. A value over its limit is refused with
//! the parameter's name. So a parsed request takes at most a few times its body's bytes. Later
//! validation checks the model's limits: context and vocabulary.
//!
//! A parameter of a request is a line of a table (`parameter`), with its bound. An object in a
//! parameter has a type with fields, and a list of bounds beside it; a test compares the two. The
//! server's resource tests generate their cases from both.

pub(crate) mod bounds;
mod checked;
mod walk;

use crate::error::ApiError;

pub use crate::cut::{SHOWN_BYTES, cut};
pub(crate) use checked::{BoundedDeserializer, Place, string_bytes};
pub(crate) use walk::Step;
pub use walk::{Walk, Weight};

/// The largest number of stop strings.
pub const STOPS: usize = 16;
/// The largest number of bytes of all stop strings together. Each choice's text is matched against
/// them byte by byte.
pub const STOP_BYTES: usize = 4096;
/// The largest number of stop token ids.
pub const STOP_IDS: usize = 1024;
/// The largest number of token ids in `allowed_token_ids`.
pub const ALLOWED_IDS: usize = 16_384;
/// The largest number of token ids with a bias.
pub const BIASES: usize = 1024;
/// The largest bias of a token, in either direction.
pub const BIAS: f64 = 100.0;
/// The largest number of words in `bad_words`.
pub const BAD_WORDS: usize = 256;
/// The largest number of bytes of all bad words together.
pub const BAD_WORD_BYTES: usize = 16_384;
/// The largest number of choices a prompt.
pub const CHOICES: u32 = 128;
/// The largest number of choices that all prompts of a request have together.
pub const TOTAL_CHOICES: usize = 4096;
/// The largest number of prompts of a request that generates.
pub const PROMPTS: usize = 1024;
/// The largest number of inputs of a pooling request, as in OpenAI's API.
pub const INPUTS: usize = 2048;
/// The largest number of bytes of the texts of all pairs together. A query counts for each
/// document, because it is tokenised for each.
pub const PAIR_BYTES: usize = 16 << 20;
/// The largest number of alternatives for a token's log-probability.
pub const LOGPROBS: u8 = 20;
/// The largest number of messages of a conversation.
pub const MESSAGES: usize = 4096;
/// The largest number of JSON values that are kept unparsed: messages, their parts, and the
/// elements of `tools`, `tool_calls` and `chat_template_kwargs`. The template gets a copy of each,
/// so one costs some hundred bytes.
pub const VALUES: usize = 16_384;
/// The deepest nesting of `tools`, `tool_calls` and `chat_template_kwargs`. A schema itself begins
/// four levels inside `tools`.
pub const DEPTH: usize = forebay_grammar::SCHEMA_DEPTH + 4;
/// The largest number of ids of `/detokenize`.
pub const IDS: usize = 1 << 18;
/// The longest name of a model, a user or a request, in bytes.
pub const NAME_BYTES: usize = 1024;
/// The longest role, type or name of a speaker, in bytes.
pub const WORD_BYTES: usize = 256;
/// The longest routing key, in bytes.
pub const ROUTING_KEY_BYTES: usize = 512;
/// The longest cache salt, in bytes.
pub const CACHE_SALT_BYTES: usize = 256;
/// The largest number of unread parameters whose names an answer lists.
pub const UNREAD: usize = 32;
/// Parameters that this kind of server ignores silently, since they concern the client's account or
/// storage.
pub const INERT: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

/// The permitted values of a parameter. Values of another shape are left to the parser, which
/// refuses them without keeping them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// True or false.
    Flag,
    /// A number from `least` to `most`.
    Number {
        /// The smallest.
        least: f64,
        /// The largest.
        most: f64,
    },
    /// A number of at least `least`. One above `most` means "everything", and is read as `most`.
    Amount {
        /// The smallest.
        least: f64,
        /// The largest value of the type.
        most: f64,
    },
    /// A string of at most this many bytes.
    Text(usize),
    /// A text to tokenise, or a list of token ids. The context bounds it.
    Prompt,
    /// A string, or a list of strings.
    Strings {
        /// The largest number of strings.
        count: usize,
        /// The largest number of bytes of each string.
        each: usize,
        /// The largest number of bytes of all strings together.
        total: usize,
    },
    /// A list of at most this many token ids.
    Ids(usize),
    /// An object of at most this many token ids and numbers.
    Biases(usize),
    /// A prompt, or a list of at most this many.
    Prompts(usize),
    /// A prompt's embeddings in base64, or a list of at most this many.
    Embeds(usize),
    /// A list of at most this many documents: strings, or objects with these parameters.
    Documents(usize, Params),
    /// An object with these parameters.
    Object(Params),
    /// An object with these parameters, or a list of at most this many.
    Objects(usize, Params),
    /// A conversation: a list of at most this many objects with these parameters.
    Messages(usize, Params),
    /// A message's content: a string, or a list of objects with these parameters.
    Content(Params),
    /// An image: its URL, or an object with these parameters.
    Image(Params),
    /// Such an image, or a list of them. Lists may be nested to this depth.
    Images(u8, Params),
    /// The URL of an image, which may be a whole file in base64.
    Url,
    /// Any JSON value, which is kept unparsed. Its elements count towards [`VALUES`], and it is at
    /// most [`DEPTH`] deep.
    Tree,
    /// The form of an answer: a string of at most this many bytes, or any JSON value, which is kept
    /// as text.
    Form(usize),
    /// Any JSON value, which is skipped and not kept.
    Ignored,
}

/// A parameter and its bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Param {
    /// The parameter's name, as clients write it.
    pub name: &'static str,
    /// The permitted values.
    pub bound: Bound,
}

/// The parameters of an object, in groups that several objects share.
pub type Params = &'static [&'static [Param]];

/// A request type, with the limits of its parameters.
pub trait Limited: Sized {
    /// Every parameter that the type reads.
    const PARAMS: Params;

    /// Reads the body that `walk` is about to pass over.
    ///
    /// # Errors
    /// The first value that is not JSON, of a wrong type, over its limit or not served.
    fn read(walk: &mut Walk<'_>) -> Result<Self, ApiError>;
}

/// True if one of these parameters holds embeddings, which may be larger than all else.
pub fn takes_embeds(params: Params) -> bool {
    let mut all = params.iter().flat_map(|group| group.iter());
    all.any(|param| matches!(param.bound, Bound::Embeds(_)))
}

/// True if these parameters, or nested ones, hold images, which may be large too.
pub fn takes_images(params: Params) -> bool {
    let mut all = params.iter().flat_map(|group| group.iter());
    all.any(|param| match param.bound {
        Bound::Image(_) | Bound::Images(..) | Bound::Url => true,
        Bound::Messages(_, within) | Bound::Content(within) | Bound::Object(within) => {
            takes_images(within)
        }
        _ => false,
    })
}
