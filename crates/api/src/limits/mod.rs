//! The limits of a request: every parameter of every route, in one table.
//!
//! A body is walked along the table before anything is made of it ([`check`]). A value over its
//! limit is refused with the parameter's name, and nothing was allocated for it. So a parsed
//! request takes at most a few times its body's bytes. Validation afterwards checks limits that the
//! model decides: the context and the vocabulary.
//!
//! Every parameter is in the table: a test compares it with the fields of the request types. The
//! server's resource tests make their cases from it.

mod table;
mod walk;

pub use table::{ROUTES, RouteLimits};
pub use walk::Weight;
pub(crate) use walk::check;

/// Most stop strings.
pub const STOPS: usize = 16;
/// Most bytes of all stop strings together: each choice's text is compared with them byte by byte.
pub const STOP_BYTES: usize = 4096;
/// Most stop token ids.
pub const STOP_IDS: usize = 1024;
/// Most token ids that a request may name as the only ones.
pub const ALLOWED_IDS: usize = 16_384;
/// Most token ids with a bias.
pub const BIASES: usize = 1024;
/// Most words that an answer does not have.
pub const BAD_WORDS: usize = 256;
/// Most bytes of all of them together.
pub const BAD_WORD_BYTES: usize = 16_384;
/// Most choices a prompt.
pub const CHOICES: u32 = 128;
/// Most choices that all prompts of a request have together.
pub const TOTAL_CHOICES: usize = 4096;
/// Most prompts of a request that generates.
pub const PROMPTS: usize = 1024;
/// Most inputs of a request that pools, as with OpenAI.
pub const INPUTS: usize = 2048;
/// Most bytes of the texts of all pairs together; a query counts once a document, because it is
/// tokenised once a document.
pub const PAIR_BYTES: usize = 16 << 20;
/// Most alternatives a token's log-probabilities have.
pub const LOGPROBS: u8 = 20;
/// Most messages of a conversation.
pub const MESSAGES: usize = 4096;
/// Most JSON values that are kept as such: messages, their parts, and the elements of `tools`,
/// `tool_calls` and `chat_template_kwargs`. The template sees a copy of each, so one costs some
/// hundred bytes.
pub const VALUES: usize = 16_384;
/// Deepest nesting of `tools`, `tool_calls` and `chat_template_kwargs`.
pub const DEPTH: usize = 32;
/// Most ids of `/detokenize`.
pub const IDS: usize = 1 << 18;
/// Longest name of a model, a user or a request, in bytes.
pub const NAME_BYTES: usize = 1024;
/// Longest role, type or name of a speaker, in bytes.
pub const WORD_BYTES: usize = 256;
/// Longest routing key, in bytes.
pub const ROUTING_KEY_BYTES: usize = 512;
/// Longest cache salt, in bytes.
pub const CACHE_SALT_BYTES: usize = 256;
/// Most names of parameters that nothing reads: they are told to the client.
pub const UNREAD: usize = 32;
/// Parameters that ask nothing of a server of this kind: they are about the client's own accounts
/// and stores. They are read over without a word.
pub const INERT: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];
/// Longest string that is accepted where none is expected: the error shows it.
pub const SHOWN_BYTES: usize = 64;

/// The values that a parameter may have. A value of another shape is left to the parser, which
/// refuses it without keeping it.
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
    /// A string of at most this many bytes.
    Text(usize),
    /// Text that becomes tokens, or a list of token ids: the context bounds it.
    Prompt,
    /// A string, or a list of strings.
    Strings {
        /// Most strings.
        count: usize,
        /// Most bytes of one.
        each: usize,
        /// Most bytes of all together.
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
    /// Such an image, or a list of them, or so many lists around each other.
    Images(u8, Params),
    /// The URL of an image, which may be all of its file in base64.
    Url,
    /// Any JSON value, which is kept. Its elements count as [`VALUES`], and it is at most [`DEPTH`]
    /// deep.
    Tree,
    /// A form of answers: a string of at most this many bytes, or any JSON value, which is kept as
    /// text.
    Form(usize),
    /// Any JSON value. It is read over and not kept.
    Ignored,
}

/// A parameter and its bound.
#[derive(Debug, PartialEq)]
pub struct Param {
    /// As clients write it.
    pub name: &'static str,
    /// Its permitted values.
    pub bound: Bound,
}

/// The parameters of an object, in groups that several objects share.
pub type Params = &'static [&'static [Param]];

/// A request type, with the limits of its parameters.
pub trait Limited {
    /// Every parameter that the type reads.
    const PARAMS: Params;
}

/// True if one of these parameters carries embeddings, which may be larger than everything else.
pub fn takes_embeds(params: Params) -> bool {
    let mut all = params.iter().flat_map(|group| group.iter());
    all.any(|param| matches!(param.bound, Bound::Embeds(_)))
}

/// True if one of these parameters, or one inside them, carries images, which may be as large.
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

/// `text`, cut to at most `bytes` bytes where it is longer: for errors, which show what a client
/// sent.
pub fn cut(text: &str, bytes: usize) -> std::borrow::Cow<'_, str> {
    if text.len() <= bytes {
        return text.into();
    }
    let end = (0..=bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}...", &text[..end]).into()
}
