//! The tokenizer, chat format and grammars of a model.

use std::borrow::Cow;
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

/// The components that convert between text and tokens, with their threads. Clones share them.
#[derive(Clone)]
pub(super) struct Language {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) dialect: Dialect,
    /// The special tokens that are marks of the dialect.
    pub(super) marks: Arc<[i32]>,
    pub(super) text: Arc<TextPool>,
    pub(super) grammars: Option<Grammars>,
}

impl Language {
    /// Loads the model's files and starts the threads. Records the chat format in the settings, and
    /// all end-of-turn tokens in the model.
    pub(super) fn load(
        flags: &ServeFlags,
        model: &mut Model,
        resolved: &mut Resolved,
        guard: &Guard,
    ) -> Result<Self> {
        let backend = resolved.model.tokenizer_backend.into();
        let added = &model.tokenizer_config;
        let tokenizer = Arc::new(Tokenizer::from_file_with(&model.tokenizer, backend, added)?);
        model.eos_token_ids = vocabulary::check(&tokenizer, model)?;
        let mut template = chat_template(flags, model)?;
        if template.is_none() && model.pooling.is_none() {
            warn!("the model has no chat template: /v1/chat/completions will answer 400");
        }
        let found = dialect::find(&flags.dialect, template.as_mut(), &tokenizer)?;
        let (dialect, marks, facts) = found;
        let template = template.map(Arc::new);
        resolved.model.chat = model.pooling.is_none().then_some(facts);
        let settings = &resolved.server;
        let text = text::pool(&settings.text, Arc::clone(&tokenizer), template, guard)?;
        let text = Arc::new(text);
        let grammars = grammar::start(settings.grammar, &tokenizer, model, guard)?;
        Ok(Self { tokenizer, dialect, marks, text, grammars })
    }
}

fn chat_template(flags: &ServeFlags, model: &Model) -> Result<Option<ChatTemplate>> {
    let (bos, eos) = (model.bos_token.as_deref(), model.eos_token.as_deref());
    let tokens = model.named_special_tokens();
    let mark = model.images.as_ref().and_then(|images| images.mark.as_ref());
    let compile = |source: &str| {
        let source = mark.map_or(Cow::Borrowed(source), |mark| mark.replaced(source).into());
        ChatTemplate::isolated(&source, bos, eos, &tokens, text::renderer)
            .context("the chat template, with chats of a few words")
    };
    if let Some(file) = &flags.loading.chat_template {
        let source = std::fs::read_to_string(file)
            .with_context(|| format!("--chat-template {}", file.display()))?;
        return compile(&source).map(Some);
    }
    let tool_use = model.tool_use_template()?;
    let Some(source) = model.chat_template.as_ref().or(tool_use.as_ref()) else { return Ok(None) };
    let template = compile(source)?;
    let other = tool_use.as_ref().filter(|tool_use| *tool_use != source);
    Ok(Some(match other {
        Some(tool_use) => template.with_tool_use(compile(tool_use)?),
        None => template,
    }))
}
