//! Pairs of a server that computes prompts and a server that continues after the first token.
//!
//! Both servers run the same engine, and transfer the KV cache by that engine's protocol. A request
//! that a pair computes is counted at both. The router names a Forebay prefill server to a Forebay
//! decode server. The decode server requests the blocks from it, and computes the prompt itself if
//! that fails.

use std::sync::Arc;

use clap::ValueEnum;
use forebay_api::{ApiError, BackendUrl, UrlError};
use http::Method;

use crate::backend::Backend;
use crate::policy::Policy;

/// The default bootstrap port of SGLang's prefill servers, to which decode servers connect.
pub(crate) const BOOTSTRAP_PORT: u16 = 8998;
/// Routes whose requests are computed by a pair.
const PAIRED: [&str; 3] = ["/v1/chat/completions", "/v1/completions", GENERATE];
/// SGLang's native route, which vLLM lacks.
pub(crate) const GENERATE: &str = "/generate";
/// Routes that a decode server answers alone, because no model computes anything.
const ALONE: [&str; 11] = [
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/api/show",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/server_info",
    "/openapi.json",
    "/v1/models",
];
/// Further routes that generate tokens: pairs of Forebay servers compute them too. All routes that
/// are neither here nor in `PAIRED` are answered by a Forebay decode server alone.
const OURS: [&str; 5] =
    ["/v1/messages", "/v1/responses", "/api/chat", "/api/generate", "/completion"];

/// The engine of the servers of a pair. It determines their protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum PairEngine {
    /// SGLang: both servers get the request at once. A bootstrap room at the prefill server
    /// connects them.
    #[value(name = "sglang")]
    SgLang,
    /// vLLM with its NIXL connector: the decode server gets the prefill server's answer.
    #[value(name = "vllm")]
    Vllm,
    /// Forebay: the decode server contacts the prefill server.
    #[value(name = "forebay")]
    Forebay,
}

impl PairEngine {
    /// The engine's name, as its authors write it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SgLang => "SGLang",
            Self::Vllm => "vLLM",
            Self::Forebay => "Forebay",
        }
    }
}

/// A server that computes prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillServer {
    /// The server's URL.
    pub url: String,
    /// The bootstrap port of this server, to which SGLang's decode servers connect. `None`: the
    /// port that the server reports, or 8998.
    pub bootstrap_port: Option<u16>,
}

/// The servers that form pairs. If there are none, each backend computes whole requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PairConfig {
    /// The servers that compute prompts.
    pub prefill: Vec<PrefillServer>,
    /// The servers that continue after the first token. Clients get their answers.
    pub decode: Vec<String>,
    /// The engine of all servers; `None`: each server is queried for it.
    pub engine: Option<PairEngine>,
    /// The policy that chooses a prefill server; `None`: that of the router.
    pub prefill_policy: Option<Policy>,
    /// The policy that chooses a decode server; `None`: that of the router.
    pub decode_policy: Option<Policy>,
}

impl PairConfig {
    /// True if no servers are configured for pairs.
    pub(crate) fn is_empty(&self) -> bool {
        self.prefill.is_empty() && self.decode.is_empty()
    }

    /// Returns the servers, each with its duty.
    ///
    /// # Errors
    /// A text is not the URL of a backend.
    pub(crate) fn named(&self) -> Result<Vec<(BackendUrl, Duty)>, UrlError> {
        let prefill = self.prefill.iter().map(|PrefillServer { url, bootstrap_port }| {
            Ok((BackendUrl::parse(url)?, Duty::Prefill { bootstrap_port: *bootstrap_port }))
        });
        let decode = self.decode.iter().map(|url| Ok((BackendUrl::parse(url)?, Duty::Decode)));
        prefill.chain(decode).collect()
    }
}

/// The part of requests that a backend computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Duty {
    /// Whole requests.
    #[default]
    Whole,
    /// Only prompts. `bootstrap_port` is the configured port to which SGLang's decode servers
    /// connect.
    Prefill { bootstrap_port: Option<u16> },
    /// Everything after the first token.
    Decode,
}

impl Duty {
    /// The duty's name, as in SGLang's `--disaggregation-mode`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill { .. } => "prefill",
            Self::Decode => "decode",
        }
    }

    /// True if the backend computes only prompts.
    pub(crate) fn is_prefill(self) -> bool {
        matches!(self, Self::Prefill { .. })
    }
}

/// The engine and port of a server in pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) engine: PairEngine,
    /// The port of a prefill server, to which SGLang's decode servers connect.
    pub(crate) bootstrap_port: u16,
}

/// True if all decode servers whose engine is known are Forebay's.
pub(crate) fn are_ours(backends: &[Arc<Backend>]) -> bool {
    let [_, decode] = engines(backends.iter());
    decode == [PairEngine::Forebay]
}

/// True if a pair computes a request; false if a decode server answers it alone. `ours`: true if
/// all decode servers are Forebay's.
///
/// # Errors
/// Pairs do not serve the route.
pub(crate) fn is_paired(method: &Method, path: &str, ours: bool) -> Result<bool, ApiError> {
    if method == Method::POST && (PAIRED.contains(&path) || ours && OURS.contains(&path)) {
        return Ok(true);
    }
    if ours || ALONE.contains(&path) || path.starts_with("/v1/models/") {
        return Ok(false);
    }
    let reason = format!(
        "{method} {path} is not available with --prefill and --decode, which serve {}",
        PAIRED.join(", ")
    );
    Err(ApiError::NotImplemented { reason })
}

/// Returns the engines of the prefill servers among these backends, and those of the decode
/// servers.
fn engines<'a>(backends: impl Iterator<Item = &'a Arc<Backend>>) -> [Vec<PairEngine>; 2] {
    let mut found = [Vec::new(), Vec::new()];
    for backend in backends {
        if let Some(peer) = backend.peer() {
            found[usize::from(!backend.duty.is_prefill())].push(peer.engine);
        }
    }
    found.iter_mut().for_each(|engines| {
        engines.sort_unstable();
        engines.dedup();
    });
    found
}

/// Returns the engines that have a complete pair among these backends. A Forebay decode server
/// alone suffices, because it can compute the prompt itself.
pub(crate) fn paired<'a>(backends: impl Iterator<Item = &'a Arc<Backend>>) -> Vec<PairEngine> {
    let [prefill, mut decode] = engines(backends);
    decode.retain(|engine| *engine == PairEngine::Forebay || prefill.contains(engine));
    decode
}

/// Returns the reason why none of these backends form a pair, although there are prefill servers
/// and decode servers. `None` if there is a pair, or if one of these two kinds is missing.
pub(crate) fn mismatch(backends: &[Arc<Backend>]) -> Option<String> {
    let [prefill, decode] = engines(backends.iter());
    let apart = !prefill.is_empty() && !decode.is_empty();
    let apart = apart && !decode.iter().any(|engine| prefill.contains(engine));
    let names = |engines: &[PairEngine]| {
        engines.iter().map(|engine| engine.name()).collect::<Vec<_>>().join(" and ")
    };
    apart.then(|| {
        format!(
            "the prefill servers are {} and the decode servers {}: both servers of a pair must run \
             the same engine",
            names(&prefill),
            names(&decode)
        )
    })
}

/// Returns the reasons why servers of pairs take no requests, one sentence each: an unsuitable
/// server, or engines that do not match.
pub(crate) fn faults(backends: &[Arc<Backend>]) -> Vec<String> {
    let own = backends.iter().filter_map(|backend| backend.fault());
    own.chain(mismatch(backends)).collect()
}

/// Returns the message for a request that no pair takes.
pub(crate) fn no_pair(backends: &[Arc<Backend>]) -> String {
    for (prefill, kind) in [(true, "prefill"), (false, "decode")] {
        let mut those = backends.iter().filter(|backend| backend.duty.is_prefill() == prefill);
        if !those.clone().any(|backend| backend.is_up()) {
            let fault = those.find_map(|backend| backend.fault());
            return fault.unwrap_or_else(|| format!("no {kind} server takes requests now"));
        }
    }
    let none = || "no pair of a prefill and a decode server takes the request now".to_owned();
    mismatch(backends).unwrap_or_else(none)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_compute_what_generates_and_one_server_the_rest() {
        let of = |method: Method, path: &str| is_paired(&method, path, false);
        assert_eq!(of(Method::POST, "/v1/chat/completions"), Ok(true));
        assert_eq!(of(Method::POST, "/generate"), Ok(true));
        assert_eq!(of(Method::POST, "/tokenize"), Ok(false));
        assert_eq!(of(Method::GET, "/v1/models/org/name"), Ok(false));
        for path in ["/v1/embeddings", "/v1/messages", "/v1/responses", "/api/chat"] {
            let refused = of(Method::POST, path).unwrap_err();
            assert_eq!(refused.status(), 501);
            assert!(refused.to_string().contains(path), "{refused}");
        }
        let ours = |method: Method, path: &str| is_paired(&method, path, true);
        for path in ["/v1/messages", "/v1/responses", "/api/chat", "/generate"] {
            assert_eq!(ours(Method::POST, path), Ok(true), "{path}");
        }
        assert_eq!(ours(Method::GET, "/v1/responses/resp_1"), Ok(false));
        assert_eq!(ours(Method::POST, "/api/show"), Ok(false));
    }

    #[test]
    fn servers_are_named_with_their_duty() {
        let prefill = PrefillServer { url: "a:1".into(), bootstrap_port: Some(7) };
        let config = PairConfig {
            prefill: vec![prefill],
            decode: vec!["http://b:2".into()],
            ..PairConfig::default()
        };
        let named = config.named().unwrap();
        assert_eq!(named[0].1, Duty::Prefill { bootstrap_port: Some(7) });
        assert_eq!((named[1].0.url().as_str(), named[1].1), ("http://b:2", Duty::Decode));
        let wrong = PairConfig { decode: vec!["https://b".into()], ..config };
        assert!(!wrong.is_empty() && wrong.named().is_err());
    }
}
