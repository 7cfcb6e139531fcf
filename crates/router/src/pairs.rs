//! Pairs of a server that computes prompts and one that goes on behind the first token.
//!
//! Both are servers of one engine: they hand keys and values to each other by its protocol. A
//! request that a pair computes is counted at both. Where the servers are of ours, the decode
//! server asks the prefill server that the router names, and computes the prompt if that fails.

use std::sync::Arc;

use clap::ValueEnum;
use forebay_api::{ApiError, BackendUrl, UrlError};
use http::Method;

use crate::backend::Backend;
use crate::policy::Policy;

/// The default bootstrap port of SGLang's prefill servers, at which decode servers find them.
pub(crate) const BOOTSTRAP_PORT: u16 = 8998;
/// Routes whose requests a pair computes.
const PAIRED: [&str; 3] = ["/v1/chat/completions", "/v1/completions", GENERATE];
/// SGLang's own route, which vLLM has not.
pub(crate) const GENERATE: &str = "/generate";
/// Routes that a decode server answers alone: no model computes anything.
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
/// Forebay's further routes that generate. Its decode servers answer all other routes alone.
const OURS: [&str; 5] =
    ["/v1/messages", "/v1/responses", "/api/chat", "/api/generate", "/completion"];

/// The engine of the servers of a pair, whose protocol they speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum PairEngine {
    /// SGLang: both servers get the request at once, and meet in a room at the prefill server.
    #[value(name = "sglang")]
    SgLang,
    /// vLLM with its NIXL connector: the decode server gets what the prefill server has answered.
    #[value(name = "vllm")]
    Vllm,
    /// Forebay: the decode server asks the prefill server.
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
    /// The bootstrap port at which SGLang's decode servers find this server; `None`: the one that
    /// it reports, or 8998.
    pub bootstrap_port: Option<u16>,
}

/// The servers of which pairs are made. Without any, each backend computes whole requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PairConfig {
    /// The servers that compute prompts.
    pub prefill: Vec<PrefillServer>,
    /// The servers that go on, whose answers clients get.
    pub decode: Vec<String>,
    /// The engine of all servers; `None`: each server is asked.
    pub engine: Option<PairEngine>,
    /// The policy that chooses a prefill server; `None`: that of the router.
    pub prefill_policy: Option<Policy>,
    /// The policy that chooses a decode server; `None`: that of the router.
    pub decode_policy: Option<Policy>,
}

impl PairConfig {
    /// True if there are no such servers.
    pub(crate) fn is_empty(&self) -> bool {
        self.prefill.is_empty() && self.decode.is_empty()
    }

    /// The servers, each with its part of requests.
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
    /// Prompts, with the port at which SGLang's decode servers find it, if that was named.
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

    /// True if the backend computes prompts only.
    pub(crate) fn is_prefill(self) -> bool {
        matches!(self, Self::Prefill { .. })
    }
}

/// The way in which a server takes part in pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) engine: PairEngine,
    /// The port at which SGLang's decode servers find a prefill server.
    pub(crate) bootstrap_port: u16,
}

/// True if all decode servers whose engine is known are Forebay's.
pub(crate) fn are_ours(backends: &[Arc<Backend>]) -> bool {
    let [_, decode] = engines(backends.iter());
    decode == [PairEngine::Forebay]
}

/// True if a pair computes a request; false if a decode server answers it alone. `ours`: all decode
/// servers are of ours.
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
        "{method} {path} is not for pairs of prefill and decode servers, which compute {}",
        PAIRED.join(", ")
    );
    Err(ApiError::NotImplemented { reason })
}

/// Engines of which a prefill server is among these backends, and those of which a decode server
/// is.
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

/// The engines of which there is a pair among these backends. A decode server of ours is as good as
/// one: it computes the prompt if no prefill server does.
pub(crate) fn paired<'a>(backends: impl Iterator<Item = &'a Arc<Backend>>) -> Vec<PairEngine> {
    let [prefill, mut decode] = engines(backends);
    decode.retain(|engine| *engine == PairEngine::Forebay || prefill.contains(engine));
    decode
}

/// The reason for which none of these backends are a pair, though both kinds are there. `None` if a
/// pair is among them, or if one kind is missing.
pub(crate) fn mismatch(backends: &[Arc<Backend>]) -> Option<String> {
    let [prefill, decode] = engines(backends.iter());
    let apart = !prefill.is_empty() && !decode.is_empty();
    let apart = apart && !decode.iter().any(|engine| prefill.contains(engine));
    let names = |engines: &[PairEngine]| {
        engines.iter().map(|engine| engine.name()).collect::<Vec<_>>().join(" and ")
    };
    apart.then(|| {
        format!(
            "the prefill servers are {} and the decode servers {}: a pair is of one engine, whose \
             protocol both speak",
            names(&prefill),
            names(&decode)
        )
    })
}

/// The reasons for which servers of pairs take no requests, one sentence each: an unsuitable
/// server, or engines that do not match.
pub(crate) fn faults(backends: &[Arc<Backend>]) -> Vec<String> {
    let own = backends.iter().filter_map(|backend| backend.fault());
    own.chain(mismatch(backends)).collect()
}

/// The sentence for a request that no pair takes.
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
