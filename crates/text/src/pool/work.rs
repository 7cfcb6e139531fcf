//! One input, from its arrival in the pool to its result.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::oneshot;

use super::{Encoded, Keep, TextInput};
use crate::encoder::{Encoder, Texts, Work};
use crate::error::TextError;
use crate::template::{ChatRender, ChatTemplate, Guard, GuardedChat, text_bytes};

/// The estimated number of bytes per token.
const BYTES_A_TOKEN: usize = 4;
/// The approximate size in bytes of the pairs that are encoded at a time.
const PAIRS_BYTES: usize = 8 << 10;
/// The least size in bytes of a pair that is encoded on the thread for long pieces.
const LONG_PAIR_BYTES: usize = 64 << 10;

/// The channel for the result of an input. It is closed once no caller waits.
pub(super) type Reply = oneshot::Sender<Result<Vec<Encoded>, TextError>>;

/// The tools with which threads process inputs.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) encoder: Encoder,
    pub(super) template: Option<Arc<ChatTemplate>>,
    /// Encodes special tokens in chats as ordinary text; `None` if they are recognised.
    pub(super) guard: Option<Guard>,
    /// True if the pool is closed, so that no caller waits.
    pub(super) closed: AtomicBool,
}

/// Text, token ids, or a chat.
#[derive(Debug)]
pub(super) enum Input {
    Texts {
        texts: Vec<String>,
        add_special_tokens: bool,
    },
    /// Pairs of texts. First texts are shared, because they are often the same.
    Pairs(Vec<(Arc<str>, String)>),
    /// Token ids to decode.
    Ids(Vec<i32>),
    Chat(Box<Chat>),
}

/// The parameters for encoding an input.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Terms {
    /// The largest number of tokens of each text; `None` for no limit.
    pub(super) most: Option<usize>,
    /// The salt. Only inputs with the same salt share cached encodings.
    pub(super) salt: u64,
}

/// The fields of [`TextInput::Chat`].
#[derive(Debug)]
pub(super) struct Chat {
    messages: Value,
    tools: Option<Value>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Map<String, Value>,
    /// The rendered text, if the chat was rendered together with others.
    rendered: Option<Result<GuardedChat, TextError>>,
}

/// An input that waits for a thread.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) input: Input,
    pub(super) terms: Terms,
    /// An estimate of the number of tokens, at least one.
    pub(super) tokens: usize,
    pub(super) reply: Reply,
    /// A value that is dropped together with the input.
    pub(super) keep: Option<Keep>,
}

/// An input that is encoded piece by piece, possibly by several threads.
#[derive(Debug)]
pub(super) struct Long {
    planned: PlannedInput,
    /// The number of pieces that are not encoded yet.
    left: AtomicUsize,
    /// The channel for the result; `None` once the result was sent.
    reply: Mutex<Option<Reply>>,
    /// A value that is dropped together with the input.
    _keep: Option<Keep>,
}

/// An input that is ready to be encoded, in pieces. Chats are rendered.
#[derive(Debug)]
pub(super) enum PlannedInput {
    Cut {
        work: Work,
        /// The rendered text, for the result.
        rendered: Option<String>,
    },
    Pairs(Pairs),
    Done(Vec<Encoded>),
}

/// Pairs of texts, which are encoded in groups.
#[derive(Debug)]
pub(super) struct Pairs {
    pairs: Vec<(Arc<str>, String)>,
    encoded: Vec<OnceLock<Encoded>>,
    pieces: Vec<Range<usize>>,
}

impl From<TextInput> for Input {
    fn from(input: TextInput) -> Self {
        match input {
            TextInput::Text { text, add_special_tokens } => {
                Self::Texts { texts: vec![text], add_special_tokens }
            }
            TextInput::Chat {
                messages,
                tools,
                add_generation_prompt,
                continue_final_message,
                kwargs,
            } => Self::Chat(Box::new(Chat {
                messages,
                tools,
                add_generation_prompt,
                continue_final_message,
                kwargs,
                rendered: None,
            })),
        }
    }
}

impl Input {
    /// Estimates the number of tokens of the input, at least one.
    pub(super) fn tokens(&self) -> usize {
        let bytes = match self {
            Self::Texts { texts, .. } => texts.iter().map(String::len).sum(),
            Self::Pairs(pairs) => pairs.iter().map(|(a, b)| a.len() + b.len()).sum(),
            Self::Ids(ids) => return 1 + ids.len(),
            Self::Chat(chat) => {
                text_bytes(&chat.messages) + chat.tools.as_ref().map_or(0, text_bytes)
            }
        };
        1 + bytes / BYTES_A_TOKEN
    }

    fn plan(self, tools: &Tools, terms: Terms) -> Result<PlannedInput, TextError> {
        match self {
            Self::Texts { texts, add_special_tokens } => {
                let Terms { most, salt } = terms;
                let texts = Texts { texts, add_special_tokens, most, salt, plain: Vec::new() };
                Ok(PlannedInput::Cut { work: tools.encoder.plan(texts)?, rendered: None })
            }
            Self::Pairs(pairs) => {
                Ok(PlannedInput::Pairs(Pairs::new(pairs, &tools.encoder, terms.most)?))
            }
            Self::Ids(ids) => {
                let text = Some(tools.encoder.tokenizer().decode(&ids, false)?);
                Ok(PlannedInput::Done(vec![Encoded { ids: Vec::new(), text, second: None }]))
            }
            Self::Chat(mut chat) => {
                let rendered = chat.rendered.take().unwrap_or_else(|| chat.render(tools));
                let GuardedChat { text, client } = rendered?;
                let plain = tools.encoder.tokenizer().spelled(&text, &client);
                let Terms { most, salt } = terms;
                let texts = vec![text.clone()];
                let texts = Texts { texts, add_special_tokens: false, most, salt, plain };
                Ok(PlannedInput::Cut { work: tools.encoder.plan(texts)?, rendered: Some(text) })
            }
        }
    }

    /// Plans and encodes the input on the current thread.
    pub(super) fn encode(self, tools: &Tools, terms: Terms) -> Result<Vec<Encoded>, TextError> {
        guarded(|| self.plan(tools, terms)?.encode(tools, &|| true))
    }
}

impl Chat {
    fn request(&self) -> ChatRender<'_> {
        ChatRender {
            messages: &self.messages,
            tools: self.tools.as_ref(),
            documents: self.kwargs.get("documents"),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            kwargs: Some(&self.kwargs),
        }
    }

    fn render(&self, tools: &Tools) -> Result<GuardedChat, TextError> {
        let template = tools.template.as_ref().ok_or(TextError::NoTemplate)?;
        match &tools.guard {
            Some(guard) => guard.render(template, &self.request()),
            None => template.render(&self.request()).map(GuardedChat::plain),
        }
    }
}

impl Pairs {
    /// Checks the pairs, and groups them into pieces.
    ///
    /// # Errors
    /// A pair cannot be truncated to the limit.
    fn new(
        pairs: Vec<(Arc<str>, String)>,
        encoder: &Encoder,
        most: Option<usize>,
    ) -> Result<Self, TextError> {
        let tokenizer = encoder.tokenizer();
        let mut pieces: Vec<Range<usize>> = Vec::new();
        let mut bytes = 0;
        for (at, (first, second)) in pairs.iter().enumerate() {
            let fewest = tokenizer.fewest_ids(first) + tokenizer.fewest_ids(second);
            encoder.check_length(at, fewest, most)?;
            encoder.check_words(first)?;
            encoder.check_words(second)?;
            let length = first.len() + second.len();
            bytes += length;
            match pieces.last_mut() {
                Some(last) if bytes < PAIRS_BYTES => last.end = at + 1,
                _ => {
                    pieces.push(at..at + 1);
                    bytes = length;
                }
            }
        }
        let encoded = pairs.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { pairs, encoded, pieces })
    }

    fn is_long(&self, piece: usize) -> bool {
        let length = |at: usize| self.pairs[at].0.len() + self.pairs[at].1.len();
        self.pieces[piece].clone().any(|at| length(at) >= LONG_PAIR_BYTES)
    }

    fn encode_piece(
        &self,
        piece: usize,
        encoder: &Encoder,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), TextError> {
        for at in self.pieces[piece].clone() {
            if !go_on() {
                return Err(TextError::Closed);
            }
            let (first, second) = &self.pairs[at];
            encoder.note_encoded(first.len() + second.len());
            let (ids, begins) = encoder.tokenizer().encode_pair(first, second)?;
            // A piece is encoded only once, so the value is not set yet.
            let _ = self.encoded[at].set(Encoded { ids, text: None, second: Some(begins) });
        }
        Ok(())
    }
}

/// The state of an input whose processing has started.
#[derive(Debug)]
pub(super) enum StartedInput {
    /// The input was encoded, or has failed, but the result is not sent yet.
    Done(Reply, Result<Vec<Encoded>, TextError>),
    /// The input is long and was cut into pieces.
    Long(Arc<Long>),
}

impl Job {
    /// Encodes the input, or cuts it if it is long.
    pub(super) fn start(self, tools: &Tools) -> StartedInput {
        let Self { input, terms, reply, keep, .. } = self;
        let planned = guarded(|| input.plan(tools, terms));
        let result = match planned {
            Ok(planned) if planned.pieces() > 1 || planned.is_long(0) => {
                let left = AtomicUsize::new(planned.pieces());
                let reply = Mutex::new(Some(reply));
                return StartedInput::Long(Arc::new(Long { planned, left, reply, _keep: keep }));
            }
            Ok(planned) => {
                let go_on = || !reply.is_closed() && !tools.is_closed();
                guarded(|| planned.encode(tools, &go_on))
            }
            Err(error) => Err(error),
        };
        StartedInput::Done(reply, result)
    }
}

impl PlannedInput {
    fn pieces(&self) -> usize {
        match self {
            Self::Cut { work, .. } => work.pieces(),
            Self::Pairs(pairs) => pairs.pieces.len(),
            Self::Done(_) => 1,
        }
    }

    fn is_long(&self, piece: usize) -> bool {
        match self {
            _ if piece >= self.pieces() => false,
            Self::Cut { work, .. } => work.is_long(piece),
            Self::Pairs(pairs) => pairs.is_long(piece),
            Self::Done(_) => false,
        }
    }

    fn encode_piece(
        &self,
        piece: usize,
        tools: &Tools,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), TextError> {
        match self {
            Self::Cut { work, .. } => tools.encoder.encode_piece(work, piece, go_on),
            Self::Pairs(pairs) => pairs.encode_piece(piece, &tools.encoder, go_on),
            Self::Done(_) => Ok(()),
        }
    }

    fn encode(&self, tools: &Tools, go_on: &dyn Fn() -> bool) -> Result<Vec<Encoded>, TextError> {
        (0..self.pieces()).try_for_each(|piece| self.encode_piece(piece, tools, go_on))?;
        self.finish(tools)
    }

    fn finish(&self, tools: &Tools) -> Result<Vec<Encoded>, TextError> {
        match self {
            Self::Cut { work, rendered } => {
                let all = tools.encoder.finish(work)?;
                let encoded = |ids| Encoded { ids, text: rendered.clone(), second: None };
                Ok(all.into_iter().map(encoded).collect())
            }
            Self::Pairs(pairs) => {
                let missing = || TextError::Encode("a pair was not encoded".to_owned());
                let encoded = |one: &OnceLock<Encoded>| one.get().cloned().ok_or_else(missing);
                pairs.encoded.iter().map(encoded).collect()
            }
            Self::Done(encoded) => Ok(encoded.clone()),
        }
    }
}

impl Tools {
    /// Renders the chats among the inputs together, if there are several.
    pub(super) fn render(&self, jobs: &mut [Job]) {
        let Some(template) = &self.template else { return };
        let mut chats: Vec<_> = jobs
            .iter_mut()
            .filter(|job| !job.reply.is_closed())
            .filter_map(|job| match &mut job.input {
                Input::Chat(chat) => Some(chat),
                _ => None,
            })
            .collect();
        if chats.len() < 2 {
            return;
        }
        let rendered = {
            let requests: Vec<_> = chats.iter().map(|chat| chat.request()).collect();
            guarded(|| match &self.guard {
                Some(guard) => Ok(guard.render_all(template, &requests)),
                None => {
                    let texts = template.render_all(&requests).into_iter();
                    Ok(texts.map(|text| text.map(GuardedChat::plain)).collect())
                }
            })
        };
        // After a panic, each chat is rendered separately, so that only the faulty chat fails.
        let Ok(rendered) = rendered else { return };
        for (chat, rendered) in chats.iter_mut().zip(rendered) {
            chat.rendered = Some(rendered);
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }
}

impl Long {
    pub(super) fn pieces(&self) -> usize {
        self.planned.pieces()
    }

    /// True if the piece must run on the thread for long pieces.
    pub(super) fn is_long(&self, piece: usize) -> bool {
        self.planned.is_long(piece)
    }

    /// True if the caller has stopped waiting, or has its result.
    pub(super) fn is_over(&self) -> bool {
        self.reply.lock().as_ref().is_none_or(Reply::is_closed)
    }

    /// Encodes one piece. The last piece sends the result, and so does a piece that fails.
    pub(super) fn encode(&self, piece: usize, tools: &Tools) {
        let go_on = || !self.is_over() && !tools.is_closed();
        let result = guarded(|| self.planned.encode_piece(piece, tools, &go_on));
        let result = match result {
            // The ids of each piece are written before the count is decremented, and read after the
            // count reaches zero.
            Ok(()) if self.left.fetch_sub(1, Ordering::AcqRel) > 1 => return,
            Ok(()) => guarded(|| self.planned.finish(tools)),
            Err(error) => Err(error),
        };
        if let Some(reply) = self.reply.lock().take() {
            let _ = reply.send(result);
        }
    }
}

/// Catches panics of the tokenizer or template, so that a panic fails only its own input.
fn guarded<T>(work: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(TextError::Encode("the tokeniser failed on this input".to_owned())))
}
