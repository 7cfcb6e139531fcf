//! Answers to Ollama's clients about models.

use axum::extract::State;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody, OllamaShowRequest};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use crate::limits::{self, Upload};
use crate::reply::{self, Failure};
use crate::state::Shared;

/// The version of Ollama whose routes these are. Its clients refuse to talk to older ones.
const OLLAMA_VERSION: &str = "0.12.0";
/// The suffix of a model's name that has no meaning here.
const LATEST: &str = ":latest";

/// The name by which a model is served.
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

/// Lists the models that are loaded: the same.
#[utoipa::path(
    get,
    path = "/api/ps",
    operation_id = "ollama_ps",
    responses((status = 200, description = "The models", body = Object)),
)]
pub(crate) async fn ps(State(state): State<Shared>) -> Response {
    let mut models = models(&state);
    for model in &mut models {
        model["size_vram"] = model["size"].clone();
        model["expires_at"] = json!("9999-12-31T23:59:59Z");
    }
    reply::ok(&json!({"models": models}))
}

fn models(state: &Shared) -> Vec<Value> {
    let bytes = state.engine.facts().map_or(0, |facts| facts.hand.weight_bytes);
    let modified = i64::try_from(state.started).unwrap_or(0);
    let modified = jiff::Timestamp::from_second(modified).unwrap_or_default().to_string();
    let digest = format!("{:032x}", xxh3_128(state.model.root.as_bytes()));
    let model = |name: &String| {
        json!({
            "name": name,
            "model": name,
            "modified_at": modified,
            "size": bytes,
            "digest": digest,
            "details": details(state),
        })
    };
    state.model.served_names.iter().map(model).collect()
}

fn details(state: &Shared) -> Value {
    let info = &state.info["model"];
    let quantization = state.info["quantization"].as_str();
    let family = family(&info["config"]);
    json!({
        "parent_model": "",
        "format": info["format"].as_str().unwrap_or_default(),
        "family": family,
        "families": if family.is_empty() { Vec::new() } else { vec![&family] },
        "parameter_size": "",
        "quantization_level": quantization.filter(|&name| name != "auto").unwrap_or_default(),
    })
}

/// The family of a model: its type, or the beginning of its architecture's name where a file names
/// no type.
fn family(config: &Value) -> String {
    if let Some(kind) = config["model_type"].as_str() {
        return kind.to_owned();
    }
    let name = config["architectures"][0].as_str().unwrap_or_default();
    name.split("For").next().unwrap_or_default().trim_end_matches("Model").to_lowercase()
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
    let config = &state.info["model"]["config"];
    let family = family(config);
    let limits = state.limits()?;
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
    let mut facts = json!({
        "general.architecture": family,
        "general.basename": state.model.served_names.first(),
    });
    facts[format!("{family}.context_length")] = json!(limits.context_length);
    facts[format!("{family}.embedding_length")] = config["hidden_size"].clone();
    Ok(reply::ok(&json!({
        "modelfile": format!("FROM {}\n", state.model.root),
        "parameters": "",
        "template": state.text.template().map(|template| template.source()).unwrap_or_default(),
        "details": details(&state),
        "model_info": facts,
        "capabilities": capabilities,
    })))
}

/// Says which version of Ollama's API is spoken.
#[utoipa::path(
    get,
    path = "/api/version",
    operation_id = "ollama_version",
    responses((status = 200, description = "The version", body = Object)),
)]
pub(crate) async fn version() -> Response {
    reply::ok(&json!({"version": OLLAMA_VERSION}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_the_type_or_the_architecture() {
        for (config, expected) in [
            (json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}), "qwen2"),
            (json!({"architectures": ["LlamaForCausalLM"]}), "llama"),
            (json!({"architectures": ["BertModel"]}), "bert"),
            (json!({}), ""),
            (Value::Null, ""),
        ] {
            assert_eq!(family(&config), expected, "{config}");
        }
    }
}
