//! Responses to Ollama's clients about models.

use axum::extract::State;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody, GenerationDefaults, OllamaShowRequest};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use crate::config::ModelInfo;
use crate::facts::ModelFacts;
use crate::limits::{self, Upload};
use crate::names::LATEST;
use crate::reply::{self, Failure};
use crate::routes::info::timestamp;
use crate::state::Shared;

/// The unload time that is reported for a model that stays loaded.
pub(crate) const NEVER: &str = "9999-12-31T23:59:59Z";
/// The Ollama version that is reported. Ollama's clients reject older versions.
const OLLAMA_VERSION: &str = "0.12.0";

/// Removes the suffix `:latest` from a model's name.
pub(super) fn served(wanted: Option<&str>) -> Option<&str> {
    wanted.map(|name| name.strip_suffix(LATEST).unwrap_or(name))
}

/// Lists the served model under its names.
#[utoipa::path(
    get,
    path = "/api/tags",
    operation_id = "ollama_tags",
    responses((status = 200, description = "The models", body = Object)),
)]
pub(crate) async fn tags(State(state): State<Shared>) -> Response {
    reply::ok(&json!({"models": models(&state)}))
}

/// Lists the loaded models.
#[utoipa::path(
    get,
    path = "/api/ps",
    operation_id = "ollama_ps",
    responses((status = 200, description = "The models", body = Object)),
)]
pub(crate) async fn ps(State(state): State<Shared>) -> Response {
    let on_cpu = state.info["device"] == "cpu";
    let context = state.engine.facts().map(|facts| facts.context_length);
    let mut models = models(&state);
    for model in &mut models {
        model["size_vram"] = if on_cpu { json!(0) } else { model["size"].clone() };
        model["expires_at"] = json!(NEVER);
        model["context_length"] = json!(context);
    }
    reply::ok(&json!({"models": models}))
}

fn models(state: &Shared) -> Vec<Value> {
    let bytes = state.engine.facts().map_or(0, |facts| facts.hand.weight_bytes);
    let ModelInfo { root, facts, .. } = &state.model;
    let model = |name: &String| listed(name, root, facts, bytes, state.started);
    state.model.served_names.iter().map(model).collect()
}

/// Describes a model as an item of a list. `started`, the start of the server in seconds since
/// 1970, is reported as the modification time.
pub(crate) fn listed(
    name: &str,
    root: &str,
    facts: &ModelFacts,
    bytes: u64,
    started: u64,
) -> Value {
    json!({
        "name": name,
        "model": name,
        "modified_at": timestamp(started),
        "size": bytes,
        "digest": format!("{:032x}", xxh3_128(root.as_bytes())),
        "details": details(facts),
    })
}

fn details(facts: &ModelFacts) -> Value {
    let families: Vec<&str> =
        Some(&*facts.family).filter(|name| !name.is_empty()).into_iter().collect();
    json!({
        "parent_model": "",
        "format": facts.format,
        "family": facts.family,
        "families": families,
        "parameter_size": facts.parameter_size(),
        "quantization_level": facts.weight_type,
    })
}

/// Lists the default values of options, one per line, in Ollama's format.
fn parameters(defaults: &GenerationDefaults, context_length: u32) -> String {
    let values = [
        ("num_ctx", Some(context_length.to_string())),
        ("temperature", defaults.temperature.map(|value| value.to_string())),
        ("top_k", defaults.top_k.map(|value| value.to_string())),
        ("top_p", defaults.top_p.map(|value| value.to_string())),
        ("min_p", defaults.min_p.map(|value| value.to_string())),
        ("repeat_penalty", defaults.repetition_penalty.map(|value| value.to_string())),
    ];
    let line = |(name, value): (&str, Option<String>)| Some(format!("{name:<30} {}", value?));
    values.into_iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

/// Describes the served model.
#[utoipa::path(
    post,
    path = "/api/show",
    operation_id = "ollama_show",
    request_body = OllamaShowRequest,
    responses(
        (status = 200, description = "The model", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn show(State(state): State<Shared>, body: Upload) -> Result<Response, Failure> {
    let (request, _charge) = limits::read::<OllamaShowRequest>(body, &state).await?;
    let name = request.model.or(request.name);
    let name = name.ok_or_else(|| ApiError::invalid("model", "`model`: required and missing"))?;
    state.model_name(served(Some(&name)))?;
    let context_length = state.limits()?.context_length;
    let mut capabilities = Vec::new();
    if state.model.pooling.is_some() {
        capabilities.push("embedding");
    } else {
        capabilities.push("completion");
        if state.text.template().is_some_and(|template| template.takes_tools()) {
            capabilities.push("tools");
        }
        if state.model.dialect.reasoning_name().is_some() {
            capabilities.push("thinking");
        }
        if state.model.images.is_some() {
            capabilities.push("vision");
        }
    }
    let template = state.text.template();
    Ok(reply::ok(&described(&ModelSheet {
        name: state.model.served_names.first().map_or("", String::as_str),
        root: &state.model.root,
        facts: &state.model.facts,
        defaults: &state.model.defaults,
        template: template.map(|template| template.source()).unwrap_or_default(),
        capabilities,
        context_length,
        eos: state.model.eos.first().copied(),
        started: state.started,
    })))
}

/// The data that describes a model.
pub(crate) struct ModelSheet<'a> {
    pub(crate) name: &'a str,
    pub(crate) root: &'a str,
    pub(crate) facts: &'a ModelFacts,
    pub(crate) defaults: &'a GenerationDefaults,
    /// The chat template; empty: there is none.
    pub(crate) template: &'a str,
    pub(crate) capabilities: Vec<&'static str>,
    pub(crate) context_length: u32,
    pub(crate) eos: Option<i32>,
    /// The start of the server, in seconds since 1970.
    pub(crate) started: u64,
}

/// Builds the response that describes a model.
pub(crate) fn described(sheet: &ModelSheet<'_>) -> Value {
    let mut facts = sheet.facts.metadata(sheet.context_length);
    facts.insert("general.basename".into(), json!(sheet.name));
    if let Some(id) = sheet.eos {
        facts.insert("tokenizer.ggml.eos_token_id".into(), json!(id));
    }
    json!({
        "modelfile": format!("FROM {}\n", sheet.root),
        "parameters": parameters(sheet.defaults, sheet.context_length),
        "template": sheet.template,
        "details": details(sheet.facts),
        "model_info": facts,
        "capabilities": sheet.capabilities,
        "modified_at": timestamp(sheet.started),
    })
}

/// Returns the version of Ollama's API that the server implements.
#[utoipa::path(
    get,
    path = "/api/version",
    operation_id = "ollama_version",
    responses((status = 200, description = "The version", body = Object)),
)]
pub(crate) async fn version() -> Response {
    reply::ok(&json!({"version": OLLAMA_VERSION}))
}
