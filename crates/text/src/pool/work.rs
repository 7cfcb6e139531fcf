//! One input on its way through the pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::oneshot;

use super::{Encoded, Keep, TextInput};
use crate::encoder::{Encoder, Work};
use crate::error::TextError;
use crate::template::{ChatRender, ChatTemplate};

/// About how many bytes make a token.
const BYTES_A_TOKEN: usize = 4;

/// Where an input's answer goes; closed once nobody waits for it.
pub(super) type Reply = oneshot::Sender<Result<Vec<Encoded>, TextError>>;

/// What inputs are worked on with.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) encoder: Encoder,
    pub(super) template: Option<Arc<ChatTemplate>>,
}

/// Text, or what becomes text.
#[derive(Debug)]
pub(super) enum Input {
    Texts {
        texts: Vec<String>,
        add_special_tokens: bool,
    },
    /// The first texts are often one and the same.
    Pairs(Vec<(Arc<str>, String)>),
    /// To become text again.
    Ids(Vec<i32>),
    Chat(Chat),
}

/// See [`TextInput::Chat`].
#[derive(Debug)]
pub(super) struct Chat {
    messages: Value,
    tools: Option<Value>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    kwargs: Map<String, Value>,
}

/// An input that waits.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) input: Input,
    /// An estimate, at least one.
    pub(super) tokens: usize,
    pub(super) reply: Reply,
    /// What goes when the input goes.
    pub(super) keep: Option<Keep>,
}

/// An input that has been cut into pieces for several threads or several turns.
#[derive(Debug)]
pub(super) struct Long {
    planned: Planned,
    /// Pieces that are not encoded yet.
    left: AtomicUsize,
    /// `None` once it is answered.
    reply: Mutex<Option<Reply>>,
    /// What goes when the input goes.
    _keep: Option<Keep>,
}

/// An input as text, cut; or what needs no cutting, done.
#[derive(Debug)]
pub(super) enum Planned {
    Cut {
        work: Work,
        /// What a template rendered, for the answer.
        rendered: Option<String>,
    },
    Done(Vec<Encoded>),
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
            } => Self::Chat(Chat {
                messages,
                tools,
                add_generation_prompt,
                continue_final_message,
                kwargs,
            }),
        }
    }
}

impl Input {
    /// About how many tokens this will be: at least one.
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

    fn plan(self, tools: &Tools) -> Result<Planned, TextError> {
        match self {
            Self::Texts { texts, add_special_tokens } => {
                let work = tools.encoder.plan(texts, add_special_tokens);
                Ok(Planned::Cut { work, rendered: None })
            }
            // An encoder's input is too short to be worth a cut, and each pair is another text.
            Self::Pairs(pairs) => {
                let encode = |(first, second): &(Arc<str>, String)| {
                    let (ids, begins) = tools.encoder.tokenizer().encode_pair(first, second)?;
                    Ok(Encoded { ids, text: None, second: Some(begins) })
                };
                Ok(Planned::Done(pairs.iter().map(encode).collect::<Result<_, _>>()?))
            }
            Self::Ids(ids) => {
                let text = Some(tools.encoder.tokenizer().decode(&ids, false)?);
                Ok(Planned::Done(vec![Encoded { ids: Vec::new(), text, second: None }]))
            }
            Self::Chat(chat) => {
                let template = tools.template.as_ref().ok_or(TextError::NoTemplate)?;
                let text = template.render(&ChatRender {
                    messages: &chat.messages,
                    tools: chat.tools.as_ref(),
                    documents: chat.kwargs.get("documents"),
                    add_generation_prompt: chat.add_generation_prompt,
                    continue_final_message: chat.continue_final_message,
                    kwargs: Some(&chat.kwargs),
                })?;
                let work = tools.encoder.plan(vec![text.clone()], false);
                Ok(Planned::Cut { work, rendered: Some(text) })
            }
        }
    }

    /// Does everything at once.
    pub(super) fn encode(self, tools: &Tools) -> Result<Vec<Encoded>, TextError> {
        guarded(|| self.plan(tools)?.encode(tools))
    }
}

/// What has become of an input that was started.
#[derive(Debug)]
pub(super) enum Started {
    /// It is encoded, or has failed; the answer is still to be given.
    Done(Reply, Result<Vec<Encoded>, TextError>),
    /// It is long and was cut.
    Long(Arc<Long>),
}

impl Job {
    /// Encodes an input, or cuts it if it is long.
    pub(super) fn start(self, tools: &Tools) -> Started {
        let planned = guarded(|| self.input.plan(tools));
        let result = match planned {
            Ok(planned) if planned.pieces() > 1 => {
                let left = AtomicUsize::new(planned.pieces());
                let reply = Mutex::new(Some(self.reply));
                return Started::Long(Arc::new(Long { planned, left, reply, _keep: self.keep }));
            }
            Ok(mut planned) => guarded(|| planned.encode(tools)),
            Err(error) => Err(error),
        };
        Started::Done(self.reply, result)
    }
}

impl Planned {
    fn pieces(&self) -> usize {
        match self {
            Self::Cut { work, .. } => work.pieces(),
            Self::Done(_) => 1,
        }
    }

    fn encode_piece(&self, piece: usize, tools: &Tools) -> Result<(), TextError> {
        match self {
            Self::Cut { work, .. } => tools.encoder.encode_piece(work, piece),
            Self::Done(_) => Ok(()),
        }
    }

    fn encode(&mut self, tools: &Tools) -> Result<Vec<Encoded>, TextError> {
        (0..self.pieces()).try_for_each(|piece| self.encode_piece(piece, tools))?;
        self.finish(tools)
    }

    fn finish(&self, tools: &Tools) -> Result<Vec<Encoded>, TextError> {
        match self {
            Self::Cut { work, rendered } => {
                let all = tools.encoder.finish(work)?;
                let encoded = |ids| Encoded { ids, text: rendered.clone(), second: None };
                Ok(all.into_iter().map(encoded).collect())
            }
            Self::Done(encoded) => Ok(encoded.clone()),
        }
    }
}

impl Long {
    pub(super) fn pieces(&self) -> usize {
        self.planned.pieces()
    }

    /// Whether nobody waits for the answer any more, or it has been given.
    pub(super) fn is_over(&self) -> bool {
        self.reply.lock().as_ref().is_none_or(Reply::is_closed)
    }

    /// Encodes one piece; the last one to end gives the answer, and so does a failure.
    pub(super) fn encode(&self, piece: usize, tools: &Tools) {
        let result = guarded(|| self.planned.encode_piece(piece, tools));
        let result = match result {
            // Each piece's ids are written before its count, and all counts are read before the ids.
            Ok(()) if self.left.fetch_sub(1, Ordering::AcqRel) > 1 => return,
            Ok(()) => guarded(|| self.planned.finish(tools)),
            Err(error) => Err(error),
        };
        if let Some(reply) = self.reply.lock().take() {
            let _ = reply.send(result);
        }
    }
}

/// A tokenizer or template that panics fails its own input only.
fn guarded<T>(work: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(TextError::Encode("the tokeniser failed on this input".to_owned())))
}

/// Bytes of all strings in `value`.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}
