//! Converts requirements on tool calls to a form of the answer.

use std::sync::Arc;

use forebay_api::{ApiError, CUSTOM_INPUT, CallDemand, Calls, OfferedTools, Structure, TextForm};
use forebay_dialect::{ArgumentStyle, Dialect, Instead, Marks, Place};
use forebay_grammar::{CallArguments, CallForm, CallText, Form, Source, Whitespace};
use serde_json::json;

use crate::ignored::ignore;
use crate::state::Shared;

/// Returns the form of an answer that may call tools: `structure`, the form of its content,
/// extended by calls where necessary. `None`: neither calls nor content are constrained. `thinks`
/// states whether the prompt ends within the model's reasoning.
///
/// # Errors
/// The model's format of calls is not known, or can't be distinguished from content of that form.
/// If parameters without effect are errors, a form without effect is an error too.
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
                // A forced call leaves no content to constrain.
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
            "`{param}` can't be combined with `tools` and `tool_choice` auto, because this model's calls have no start marker and look like content: set `tool_choice` to none, required or a function"
        );
        return Err(ApiError::invalid(param.clone(), reason));
    }
    let tokenizer = state.text.tokenizer();
    let special =
        state.model.marks.iter().map(|&id| (tokenizer.id_to_token(id).unwrap_or_default(), id));
    let marks = Marks::new(special);
    let some = callable.iter().map(|&tool| &tools.functions[tool]);
    let names: Vec<&str> = some.clone().map(|tool| tool.name.as_str()).collect();
    // If the reasoning's marks are tokens, the constraint tracks it by tokens; otherwise the
    // grammar describes it.
    let thinks = state.model.markers.is_none().then_some(thinks);
    let grammar = dialect.call_grammar(&names, instead, tools.parallel, &marks, thinks);
    let grammar = match grammar {
        Some(grammar) => grammar,
        // Only the forms of text tools restrict calls here, so the restriction can be ignored.
        None if of_texts(tools, &param) => {
            ignore(state, &param)?;
            return Ok(content);
        }
        None => {
            let reason = format!(
                "`{param}`: calls can't be forced, because this model's format of tool calls is unknown: start the server with --tool-call-parser"
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
        // If the model may choose whether to call, the schema is enforced only for strict tools.
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

/// Returns the requirement on calls, for content with the form `structure`. `None`: calls are not
/// constrained.
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
    // If the model has no syntax for calls, calls are plain text, to which `structure` applies.
    let content = structure.filter(|_| dialect.calls_name().is_some())?;
    Some(CallDemand {
        callable: (0..tools.functions.len()).collect(),
        calls: Calls::Any,
        param: content.param.clone(),
    })
}

/// True if the requirement comes from a text tool: `param` is the path of its form.
fn of_texts(tools: &OfferedTools, param: &str) -> bool {
    tools.functions.iter().any(|tool| tool.text.as_ref().is_some_and(|text| text.path == param))
}

/// Converts the form of a text tool's input to a form for a grammar.
fn call_text(text: &TextForm) -> CallText {
    let definition = text.definition.as_str().into();
    let form = if text.is_regex { Form::Regex(definition) } else { Form::Lark(definition) };
    CallText { name: CUSTOM_INPUT.into(), form, path: text.path.as_str().into() }
}
