//! Turns requirements on tool calls into a form of the answer.

use std::sync::Arc;

use forebay_api::{ApiError, CUSTOM_INPUT, CallDemand, Calls, OfferedTools, Structure, TextForm};
use forebay_dialect::{ArgumentStyle, Dialect, Instead, Marks, Place};
use forebay_grammar::{CallArguments, CallForm, CallText, Form, Source, Whitespace};
use serde_json::json;

use crate::ignored::ignore;
use crate::state::Shared;

/// The form of an answer that may call tools: `structure`, the form of its content, extended by
/// calls where necessary. Without requirements on calls and content there is no form. `thinks`:
/// whether the prompt leaves the model in its reasoning.
///
/// # Errors
/// The model's format of calls is not known, or can't be distinguished from content of that form. A
/// client that demands a form without effect gets an error as well.
pub(super) fn form(
    state: &Shared,
    tools: &OfferedTools,
    structure: Option<Structure>,
    thinks: Place,
) -> Result<Option<Structure>, ApiError> {
    let dialect = state.model.dialect;
    let Some(demand) = demand(tools, structure.as_ref(), dialect) else { return Ok(structure) };
    let CallDemand { callable, calls, param } = demand;
    let (instead, content) = match (calls, structure) {
        (Calls::Some | Calls::Named, structure) => {
            if let Some(structure) = structure {
                // There is no content.
                ignore(state, &structure.param)?;
            }
            (Instead::Nothing, None)
        }
        (Calls::Any, None) => (Instead::Text, None),
        (Calls::Any, Some(content)) => (Instead::Content, Some(content)),
    };
    if let Some(content) = content.as_ref().filter(|_| !dialect.marks_calls()) {
        let param = &content.param;
        let reason = format!(
            "`{param}`: the model's calls have no mark, so that they can't be told from content of a form: with `tools`, `tool_choice` is none, required or a function"
        );
        return Err(ApiError::invalid(param.clone(), reason));
    }
    let tokenizer = state.text.tokenizer();
    let special =
        state.model.marks.iter().map(|&id| (tokenizer.id_to_token(id).unwrap_or_default(), id));
    let marks = Marks::new(special);
    let some = callable.iter().map(|&tool| &tools.functions[tool]);
    let names: Vec<&str> = some.clone().map(|tool| tool.name.as_str()).collect();
    // Reasoning is followed by tokens if its marks are tokens, and by the grammar otherwise.
    let thinks = state.model.markers.is_none().then_some(thinks);
    let grammar = dialect.call_grammar(&names, instead, tools.parallel, &marks, thinks);
    let grammar = match grammar {
        Some(grammar) => grammar,
        // Nothing else asks for calls of any form.
        None if of_texts(tools, &param) => {
            ignore(state, &param)?;
            return Ok(content);
        }
        None => {
            let reason = format!(
                "`{param}`: it is not known how the model writes calls, so that they can't be forced: --tool-call-parser names it"
            );
            return Err(ApiError::invalid(param, reason));
        }
    };
    let keeps_texts = matches!(grammar.style, ArgumentStyle::Json | ArgumentStyle::Tagged(_));
    for text in some.clone().filter_map(|tool| tool.text.as_ref()).filter(|_| !keeps_texts) {
        ignore(state, &text.path)?;
    }
    if !keeps_texts && of_texts(tools, &param) {
        return Ok(content);
    }
    let arguments = some.zip(grammar.arguments).map(|(tool, rule)| {
        // If the model may choose whether to call, only strict tools have their schema enforced.
        let kept = tool.strict || calls != Calls::Any;
        let schema =
            if kept { tool.schema.to_string() } else { json!({"type": "object"}).to_string() };
        let text = tool.text.as_ref().filter(|_| keeps_texts).map(call_text);
        CallArguments {
            rule,
            schema: schema.into(),
            path: tool.path.as_str().into(),
            strict: tool.strict,
            text,
        }
    });
    let whitespace = content.as_ref().map(|content| content.source.whitespace.clone());
    let form = CallForm {
        lark: grammar.lark.into(),
        style: grammar.style,
        marks: Arc::new(marks),
        arguments: arguments.collect(),
        content: content.map(|content| (content.param.into(), content.source.form)),
    };
    let whitespace = whitespace.unwrap_or(Whitespace::Bounded);
    let source = Source { form: Form::Calls(Arc::new(form)), whitespace };
    Ok(Some(Structure { param, source }))
}

/// The requirement on calls, for content with the form `structure`. `None`: there is none, so only
/// the content has a form.
fn demand(
    tools: &OfferedTools,
    structure: Option<&Structure>,
    dialect: Dialect,
) -> Option<CallDemand> {
    if tools.functions.is_empty() {
        return None;
    }
    if tools.demand.is_some() {
        return tools.demand.clone();
    }
    // If the model has no syntax for calls, they are plain text, which has to have the form.
    let content = structure.filter(|_| dialect.calls_name().is_some())?;
    Some(CallDemand {
        callable: (0..tools.functions.len()).collect(),
        calls: Calls::Any,
        param: content.param.clone(),
    })
}

/// True if all forced calls are text forms. `param` names the first of them in errors.
fn of_texts(tools: &OfferedTools, param: &str) -> bool {
    tools.functions.iter().any(|tool| tool.text.as_ref().is_some_and(|text| text.path == param))
}

/// The form of a tool's text, for a grammar.
fn call_text(text: &TextForm) -> CallText {
    let definition = text.definition.as_str().into();
    let form = if text.is_regex { Form::Regex(definition) } else { Form::Lark(definition) };
    CallText { name: CUSTOM_INPUT.into(), form, path: text.path.as_str().into() }
}
