//! Finds the model's dialect: detected, or named by flags.

use std::sync::Arc;

use anyhow::{Context, Result};
use forebay_dialect::{Choice, Dialect, Evidence};
use forebay_text::{ChatTemplate, Tokenizer};
use serde::Serialize;
use tracing::warn;

use crate::flags::DialectFlags;

/// The format of the model's chats and answers, for /server_info.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ChatFacts {
    /// The format of tool calls, by vLLM's name; null: calls are not parsed.
    pub(crate) tool_call_parser: Option<&'static str>,
    /// The format of reasoning, by vLLM's name; null: reasoning is not parsed.
    pub(crate) reasoning_parser: Option<&'static str>,
    /// True if the chat template lists the tools for the model.
    template_takes_tools: bool,
    /// Changes that messages need before the template is applied.
    adaptations: Vec<&'static str>,
}

impl ChatFacts {
    /// True if a system message lists the tools, in place of the template.
    pub(crate) fn has_generic_tools(&self) -> bool {
        !self.template_takes_tools && self.tool_call_parser == Some(GENERIC)
    }
}

/// The name of the tool call format for templates that do not list tools.
const GENERIC: &str = "generic";

/// Finds the model's dialect and the special tokens that are its marks. If the template does not
/// list tools and no flag names a tool call format, a system message will list the tools.
///
/// # Errors
/// A flag names no dialect.
pub(crate) fn find(
    flags: &DialectFlags,
    mut template: Option<&mut ChatTemplate>,
    tokenizer: &Tokenizer,
) -> Result<(Dialect, Arc<[i32]>, ChatFacts)> {
    let has_token = |text: &str| tokenizer.token_to_id(text).is_some();
    let sources = template.iter().flat_map(|template| template.sources());
    let source = sources.collect::<Vec<_>>().join("\n");
    let evidence = Evidence { template: &source, has_token: &has_token };
    let mut calls = Choice::new(flags.tool_call_parser.as_deref());
    if let Some(template) = template.as_deref_mut().filter(|template| !template.shows_tools())
        && (calls == Choice::Auto || calls == Choice::Named(GENERIC.to_owned()))
    {
        calls = Choice::Named(GENERIC.to_owned());
        template.show_tools_generically();
    }
    let dialect = Dialect::new(&calls, &Choice::Auto, evidence).context("--tool-call-parser")?;
    let reasoning = Choice::new(flags.reasoning_parser.as_deref());
    let dialect = match reasoning {
        Choice::Auto => dialect,
        reasoning => Dialect::new(&calls, &reasoning, evidence).context("--reasoning-parser")?,
    };
    let takes_tools = template.as_ref().is_some_and(|template| template.shows_tools());
    if takes_tools && dialect.calls_name().is_none() && calls == Choice::Auto {
        warn!(
            "the chat template takes tools, and its way to write calls is not known: calls will be text. --tool-call-parser names it"
        );
    }
    let marks = tokenizer.special_ids(|token| dialect.is_mark(token));
    let facts = ChatFacts {
        tool_call_parser: dialect.calls_name(),
        reasoning_parser: dialect.reasoning_name(),
        template_takes_tools: takes_tools,
        adaptations: template.map_or_else(Vec::new, |template| template.adaptations()),
    };
    Ok((dialect, marks.into(), facts))
}
