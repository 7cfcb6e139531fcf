//! The limits of a request: the bounds of every parameter of every route.
//!
//! One pass over a body compares each value with its bound. A value over its limit is refused, with
//! an error that names the parameter. So a parsed request takes at most a few times the size of its
//! body. Later validation checks the limits of the model: context and vocabulary.
//!
//! Each parameter of a request is a line of a table (`parameter`), with its bound. The value of a
//! parameter may be an object, which has a type with fields and a list of their bounds; a test
//! compares fields and bounds. The server's resource tests generate their cases from all these
//! bounds.

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
/// The largest total size of all stop strings in bytes. The text of each choice is matched against
/// them byte by byte.
pub const STOP_BYTES: usize = 4096;
/// The largest number of stop token ids.
pub const STOP_IDS: usize = 1024;
/// The largest number of token ids in `allowed_token_ids`.
pub const ALLOWED_IDS: usize = 16_384;
/// The largest number of token ids with a bias.
pub const BIASES: usize = 1024;
/// The largest absolute value of a token's bias.
pub const BIAS: f64 = 100.0;
/// The largest number of words in `bad_words`.
pub const BAD_WORDS: usize = 256;
/// The largest number of bytes of all bad words together.
pub const BAD_WORD_BYTES: usize = 16_384;
/// The largest number of choices per prompt.
pub const CHOICES: u32 = 128;
/// The largest total number of choices of all prompts of a request.
pub const TOTAL_CHOICES: usize = 4096;
/// The largest number of prompts of a generation request.
pub const PROMPTS: usize = 1024;
/// The largest number of inputs of a pooling request, as in OpenAI's API.
pub const INPUTS: usize = 2048;
/// The largest total size of the texts of all pairs in bytes. The query is counted once per
/// document, because it is tokenised with each.
pub const PAIR_BYTES: usize = 16 << 20;
/// The largest number of alternative tokens to report log-probabilities for.
pub const LOGPROBS: u8 = 20;
/// The largest number of messages of a conversation.
pub const MESSAGES: usize = 4096;
/// The largest number of JSON values that are kept unparsed: messages, their parts, and the
/// elements of `tools`, `tool_calls` and `chat_template_kwargs`. The template gets a copy of each,
/// so a value costs several hundred bytes.
pub const VALUES: usize = 16_384;
/// The deepest nesting of `tools`, `tool_calls` and `chat_template_kwargs`. A schema starts four
/// levels deep in `tools`.
pub const DEPTH: usize = forebay_grammar::SCHEMA_DEPTH + 4;
/// The largest number of ids in a request to `/detokenize`.
pub const IDS: usize = 1 << 18;
/// The longest name of a model, a user or a request, in bytes.
pub const NAME_BYTES: usize = 1024;
/// The longest role, type or name of a speaker, in bytes.
pub const WORD_BYTES: usize = 256;
/// The longest routing key, in bytes.
pub const ROUTING_KEY_BYTES: usize = 512;
/// The longest cache salt, in bytes.
pub const CACHE_SALT_BYTES: usize = 256;
/// The largest number of unread parameters that a response lists by name.
pub const UNREAD: usize = 32;
/// Parameters that are ignored silently, because they concern the client's account or the
/// provider's storage.
pub const INERT: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

/// The permitted values of a parameter. A value of another type is left to the parser, which
/// rejects it without storing it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// True or false.
    Flag,
    /// A number from `least` to `most`.
    Number {
        /// The smallest permitted value.
        least: f64,
        /// The largest permitted value.
        most: f64,
    },
    /// A number that is at least `least`. A number above `most` means "everything" and is read as
    /// `most`.
    Amount {
        /// The smallest permitted value.
        least: f64,
        /// The largest value that the parameter's type can hold.
        most: f64,
    },
    /// A string of at most this many bytes.
    Text(usize),
    /// A text to tokenise, or a list of token ids. Its length is limited by the context.
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
    /// An object that maps at most this many token ids to numbers.
    Biases(usize),
    /// A prompt, or a list of at most this many prompts.
    Prompts(usize),
    /// The embeddings of a prompt in base64, or a list of the embeddings of at most this many
    /// prompts.
    Embeds(usize),
    /// A list of at most this many documents: strings, or objects with these parameters.
    Documents(usize, Params),
    /// An object with these parameters.
    Object(Params),
    /// An object with these parameters, or a list of at most this many such objects.
    Objects(usize, Params),
    /// A conversation: a list of at most this many objects with these parameters.
    Messages(usize, Params),
    /// A message's content: a string, or a list of objects with these parameters.
    Content(Params),
    /// An image: its URL, or an object with these parameters.
    Image(Params),
    /// An image, or a list of images. Lists may be nested to this depth.
    Images(u8, Params),
    /// The URL of an image. A `data:` URL contains a whole file in base64.
    Url,
    /// Any JSON value, which is kept unparsed. Its elements count towards [`VALUES`], and it is
    /// nested at most [`DEPTH`] levels deep.
    Tree,
    /// A schema, pattern or grammar: a string of at most this many bytes, or any JSON value, which
    /// is kept as text.
    Form(usize),
    /// Any JSON value, which is skipped.
    Ignored,
}

/// The name of a parameter and its bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Param {
    /// The parameter's name, as clients write it.
    pub name: &'static str,
    /// The permitted values.
    pub bound: Bound,
}

/// The parameters of an object, in groups that several objects may share.
pub type Params = &'static [&'static [Param]];

/// A request type, with the limits of its parameters.
pub trait Limited: Sized {
    /// All parameters that the type reads.
    const PARAMS: Params;

    /// Reads the request from the body of `walk`.
    ///
    /// # Errors
    /// A value is not JSON, of a wrong type, over its limit or not supported. The error names the
    /// first such value.
    fn read(walk: &mut Walk<'_>) -> Result<Self, ApiError>;
}

/// True if one of these parameters holds embeddings. The larger size limit then applies to the
/// body.
pub fn takes_embeds(params: Params) -> bool {
    let mut all = params.iter().flat_map(|group| group.iter());
    all.any(|param| matches!(param.bound, Bound::Embeds(_)))
}

/// True if these parameters, or nested ones, hold images. The larger size limit then applies to the
/// body, as for embeddings.
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
