//! Identifies the engine of a prefill or decode server.

use http::StatusCode;
use serde::Deserialize;

use crate::backend::Backend;
use crate::pairs::{BOOTSTRAP_PORT, Duty, PairEngine, Peer};
use crate::shared::Shared;
use crate::watch::{question, report_of};

/// The largest response with information about a server, in bytes.
const MAX_INFO: usize = 4 << 20;
/// The routes of SGLang's server information: the present one, and that of versions up to 0.5.
const INFO: [&str; 2] = ["/server_info", "/get_server_info"];
/// The SGLang flag that sets the duty of a server.
const MODE: &str = "--disaggregation-mode";

/// The fields of SGLang's server information that are needed for pairs.
#[derive(Deserialize)]
struct Info {
    disaggregation_mode: String,
    disaggregation_bootstrap_port: Option<u16>,
}

/// The field of Forebay's load reports that is needed for pairs.
#[derive(Deserialize)]
struct OwnLoads {
    disaggregation_mode: Option<String>,
}

/// Queries a server for its engine. `None`: the server has not responded. Its list of models must
/// be known already.
///
/// # Errors
/// The server can't be in a pair, or not with this duty. The error is a message with the reason.
pub(crate) async fn identify(shared: &Shared, backend: &Backend) -> Result<Option<Peer>, String> {
    let mut link = None;
    if let Some(loads) = report_of(shared, backend, &mut link, "/v1/loads").await {
        return own(backend, &loads).map(Some);
    }
    if backend.is_forebay() {
        return Ok(None);
    }
    let named = match backend.duty {
        Duty::Prefill { bootstrap_port } => bootstrap_port,
        Duty::Whole | Duty::Decode => None,
    };
    let peer = |engine, told: Option<u16>| {
        Ok(Some(Peer { engine, bootstrap_port: named.or(told).unwrap_or(BOOTSTRAP_PORT) }))
    };
    match shared.config.pairs.engine {
        Some(PairEngine::Forebay) => return Err(silent(backend)),
        Some(engine) => return peer(engine, None),
        None => {}
    }
    for path in INFO {
        let limits = (shared.config.health.timeout, MAX_INFO);
        let Ok((status, body)) = question(shared, backend, &mut link, path, limits).await else {
            return Ok(None);
        };
        let info = serde_json::from_slice::<Info>(&body).ok();
        if let Some(info) = info.filter(|_| status == StatusCode::OK) {
            let (mode, duty) = (&info.disaggregation_mode, backend.duty.name());
            if mode != duty {
                return Err(other_mode(backend, PairEngine::SgLang, mode));
            }
            return peer(PairEngine::SgLang, info.disaggregation_bootstrap_port);
        }
    }
    match backend.models.owner().as_deref() {
        Some("vllm") => peer(PairEngine::Vllm, None),
        Some("sglang") => peer(PairEngine::SgLang, None),
        Some("forebay") => Err(silent(backend)),
        _ => Err(format!(
            "{} does not tell its engine: --pd-engine sglang or --pd-engine vllm says it",
            backend.url.url()
        )),
    }
}

/// Identifies a Forebay server by its load report.
fn own(backend: &Backend, loads: &[u8]) -> Result<Peer, String> {
    let loads = serde_json::from_slice::<OwnLoads>(loads).ok();
    let mode = loads.and_then(|loads| loads.disaggregation_mode);
    let engine = PairEngine::Forebay;
    match mode.as_deref() {
        Some(mode) if mode == backend.duty.name() => {
            Ok(Peer { engine, bootstrap_port: BOOTSTRAP_PORT })
        }
        mode => Err(other_mode(backend, engine, mode.unwrap_or("null"))),
    }
}

/// Returns the message about a server that was started with a duty other than the configured one.
fn other_mode(backend: &Backend, engine: PairEngine, mode: &str) -> String {
    let (url, duty, engine) = (backend.url.url(), backend.duty.name(), engine.name());
    format!(
        "--{duty} names {url}, which is {engine} with {MODE} {mode}: start it with {MODE} {duty}"
    )
}

/// Returns the message about a Forebay server that reports nothing to this router, because the
/// router does not send the server's router key.
fn silent(backend: &Backend) -> String {
    let url = backend.url.url();
    format!(
        "{url} is a Forebay server that hides its state from this router: give both the same --router-key"
    )
}
