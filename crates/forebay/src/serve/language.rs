//! The model's language: its tokens, its chats and its forms of answers.

use std::sync::Arc;

use anyhow::{Context, Result};
use forebay_dialect::Dialect;
use forebay_grammar::Grammars;
use forebay_server::Guard;
use forebay_text::{ChatTemplate, TextPool, Tokenizer};
use tracing::warn;

use crate::flags::ServeFlags;
use crate::model::Model;
use crate::resolve::Resolved;
use crate::{dialect, grammar, text, vocabulary};

/// The parts that read and write the model's language, with their threads.
pub(super) struct Language {
    pub(super) tokenizer: Arc<Tokenizer>,
    /// End-of-sequence token ids.
    pub(super) eos: Vec<i32>,
    pub(super) dialect: Dialect,
    /// Special tokens that are marks of the dialect.
    pub(super) marks: Arc<[i32]>,
    pub(super) text: TextPool,
    pub(super) grammars: Option<Grammars>,
}

impl Language {
    /// Reads the model's files and starts the threads. Notes the form of chats among the settings.
    pub(super) fn load(
        flags: &ServeFlags,
        model: &Model,
        resolved: &mut Resolved,
        guard: &Guard,
    ) -> Result<Self> {
        let backend = resolved.model.tokenizer_backend.into();
        let tokenizer = Arc::new(Tokenizer::from_file_for(&model.tokenizer, backend)?);
        let eos = vocabulary::check(&tokenizer, model)?;
        let template = chat_template(flags, model)?.map(Arc::new);
        if template.is_none() && model.pooling.is_none() {
            warn!("the model has no chat template: /v1/chat/completions will answer 400");
        }
        let found = dialect::find(&flags.dialect, template.as_ref(), &tokenizer)?;
        let (dialect, marks, facts) = found;
        resolved.model.chat = model.pooling.is_none().then_some(facts);
        let settings = &resolved.server;
        let text = text::pool(&settings.text, Arc::clone(&tokenizer), template, guard)?;
        let grammars = grammar::start(settings.grammar, &tokenizer, model, &eos, guard)?;
        Ok(Self { tokenizer, eos, dialect, marks, text, grammars })
    }
}

fn chat_template(flags: &ServeFlags, model: &Model) -> Result<Option<ChatTemplate>> {
    let source = match &flags.loading.chat_template {
        Some(file) => Some(
            std::fs::read_to_string(file)
                .with_context(|| format!("--chat-template {}", file.display()))?,
        ),
        None => model.chat_template.clone(),
    };
    let Some(source) = source else { return Ok(None) };
    let (bos, eos) = (model.bos_token.as_deref(), model.eos_token.as_deref());
    let tokens = model.named_special_tokens();
    let template = ChatTemplate::isolated(&source, bos, eos, &tokens, text::renderer)
        .context("the chat template, with chats of a few words")?;
    Ok(Some(template))
}
