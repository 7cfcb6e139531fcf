//! The models of a server, their health and their metrics.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use forebay_api::ApiError;
use forebay_fleet::ModelState;
use serde_json::{Map, Value, json};

use super::super::info::{self, exposed, model_card, timestamp};
use super::super::ollama;
use crate::fleet::metrics::{Sample, join, metric};
use crate::fleet::{Front, ModelReport};
use crate::reply::{self, Failure};

/// Returns the state of a model in llama-server's format.
fn status(report: &ModelReport) -> Value {
    let value = match report.state {
        ModelState::Unloaded => "unloaded",
        ModelState::Loading => "loading",
        ModelState::Ready | ModelState::Leaving => "loaded",
        ModelState::Asleep => "sleeping",
    };
    match &report.error {
        Some(error) => json!({"value": value, "failed": true, "error": error}),
        None => json!({"value": value}),
    }
}

fn card(front: &Front, model: usize, name: &str) -> Value {
    let entry = &front.entries[model];
    let running = front.running(model);
    let facts = running.and_then(|running| running.shared.engine.facts());
    let length = facts.map(|facts| facts.context_length);
    let report = front.report(model);
    let mut card = json!(model_card(name, &entry.root, front.started, length));
    card["status"] = status(&report);
    card["state"] = json!(report.state);
    card["size"] = json!(entry.stored_bytes);
    card
}

/// Lists all models by name, whether loaded or not.
pub(super) async fn models(State(front): State<Arc<Front>>) -> Response {
    let mut data = Vec::new();
    for (model, entry) in front.entries.iter().enumerate() {
        data.extend(entry.names.iter().map(|name| card(&front, model, name)));
    }
    let id = |card: Option<&Value>| card.map(|card| card["id"].clone());
    let (first_id, last_id) = (id(data.first()), id(data.last()));
    reply::ok(&json!({
        "object": "list",
        "data": data,
        "first_id": first_id,
        "last_id": last_id,
        "has_more": false,
    }))
}

/// Shows one model.
pub(super) async fn model(
    State(front): State<Arc<Front>>,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let model = front.find(Some(&id))?;
    Ok(reply::ok(&card(&front, model, &id)))
}

fn listed(front: &Front, model: usize, name: &str) -> Value {
    let entry = &front.entries[model];
    ollama::listed(name, &entry.root, &entry.facts, entry.stored_bytes, front.started)
}

/// Lists all models in Ollama's format.
pub(super) async fn tags(State(front): State<Arc<Front>>) -> Response {
    let mut models = Vec::new();
    for (model, entry) in front.entries.iter().enumerate() {
        models.extend(entry.names.iter().map(|name| listed(&front, model, name)));
    }
    reply::ok(&json!({"models": models}))
}

/// Describes a model that is not loaded, in Ollama's format.
pub(super) fn shown(front: &Front, model: usize) -> Response {
    let entry = &front.entries[model];
    let mut capabilities = vec![if entry.generates { "completion" } else { "embedding" }];
    // The template is not compiled, so this check is approximate. For a loaded model, the compiled
    // template is checked.
    if entry.generates && entry.template.contains("tools") {
        capabilities.push("tools");
    }
    reply::ok(&ollama::described(&ollama::ModelSheet {
        name: &entry.names[0],
        root: &entry.root,
        facts: &entry.facts,
        defaults: &entry.defaults,
        template: &entry.template,
        capabilities,
        context_length: entry.context_length,
        eos: None,
        started: front.started,
    }))
}

/// Lists the loaded models in Ollama's format.
pub(super) async fn running(State(front): State<Arc<Front>>) -> Response {
    let mut models = Vec::new();
    for (model, entry) in front.entries.iter().enumerate() {
        let Some(running) = front.running(model) else { continue };
        let (report, shared) = (front.report(model), &running.shared);
        let facts = shared.engine.facts();
        let until = report.idle_in.map(|seconds| timestamp(crate::state::now() + seconds as u64));
        let on_cpu = shared.info["device"] == "cpu";
        for name in &entry.names {
            let mut shown = listed(&front, model, name);
            shown["size"] = json!(report.bytes);
            shown["size_vram"] = json!(if on_cpu { 0 } else { report.bytes });
            shown["expires_at"] = json!(until.as_deref().unwrap_or(ollama::NEVER));
            shown["context_length"] = json!(facts.as_ref().map(|facts| facts.context_length));
            models.push(shown);
        }
    }
    reply::ok(&json!({"models": models}))
}

/// Reports whether the server accepts requests, and the state of each model. A model that is not
/// loaded does not make the server unhealthy.
pub(crate) async fn health(State(front): State<Arc<Front>>) -> Result<Response, Failure> {
    if let Some(cause) = front.guard.cause() {
        let reason = format!("the server has failed: {cause}");
        return Err(Failure(ApiError::Unavailable { reason, code: "failed" }));
    }
    if front.is_draining() {
        return Err(Failure(ApiError::Draining));
    }
    let models = front.entries.iter().enumerate();
    let models: Map<String, Value> =
        models.map(|(model, entry)| (entry.names[0].clone(), json!(front.report(model)))).collect();
    Ok(reply::json(StatusCode::OK, &json!({"status": "ready", "models": models})))
}

/// Returns the metrics of the loaded models, and of the fleet.
pub(crate) async fn metrics(State(front): State<Arc<Front>>) -> Result<Response, Failure> {
    let mut texts = Vec::new();
    for running in front.all_running() {
        let text = info::exposition(&running.shared)?;
        texts.push(String::from_utf8_lossy(&text).into_owned());
    }
    texts.push(of_fleet(&front));
    Ok(exposed(join(&texts).into_bytes()))
}

fn of_fleet(front: &Front) -> String {
    let all: Vec<(&str, ModelReport)> = front
        .entries
        .iter()
        .enumerate()
        .map(|(model, entry)| (&*entry.names[0], front.report(model)))
        .collect();
    let samples = |read: fn(&ModelReport) -> f64| {
        let read = all.iter().map(|(model, report)| (*model, read(report)));
        read.map(|(model, value)| Sample { model, label: None, value }).collect::<Vec<_>>()
    };
    const STATES: [(&str, ModelState); 5] = [
        ("unloaded", ModelState::Unloaded),
        ("loading", ModelState::Loading),
        ("ready", ModelState::Ready),
        ("leaving", ModelState::Leaving),
        ("asleep", ModelState::Asleep),
    ];
    let states: Vec<Sample<'_>> = all
        .iter()
        .flat_map(|(model, report)| {
            STATES.map(|(name, state)| Sample {
                model,
                label: Some(("state", name)),
                value: f64::from(u8::from(report.state == state)),
            })
        })
        .collect();
    [
        metric("forebay:model_state", "1 for the state of the model.", "gauge", &states),
        metric(
            "forebay:model_bytes",
            "Bytes of the model's weights and pages in memory.",
            "gauge",
            &samples(|report| report.bytes as f64),
        ),
        metric(
            "forebay:model_requests_waiting",
            "Requests that wait for the model's load.",
            "gauge",
            &samples(|report| report.waiting as f64),
        ),
        metric(
            "forebay:model_loads_total",
            "Loads of the model.",
            "counter",
            &samples(|report| report.loads as f64),
        ),
        metric(
            "forebay:model_load_seconds_total",
            "Seconds of these loads.",
            "counter",
            &samples(|report| report.load_seconds),
        ),
    ]
    .concat()
}
