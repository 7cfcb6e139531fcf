//! The settings of a server that computes prompts for other servers, or has them computed.

use std::sync::Arc;
use std::time::Duration;

use forebay_api::BackendUrl;
use forebay_engine::{Facts, TierMemory, as_seconds};
use serde::{Serialize, Serializer};

/// Which part of a request a server computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "disaggregation_mode", rename_all = "lowercase")]
pub enum Disaggregation {
    /// Prompts, for decode servers.
    Prefill,
    /// Whole requests; prefill servers compute most of their prompts.
    Decode(DecodeConfig),
}

/// The settings of a decode server. Each field has the name of its flag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DecodeConfig {
    /// The prefill servers to use if no router names one.
    #[serde(serialize_with = "as_urls")]
    pub pd_prefill_servers: Vec<BackendUrl>,
    /// The number of uncached prompt tokens up to which no prefill server is used.
    pub pd_local_tokens: u32,
    /// The longest time from the request to the last block.
    #[serde(serialize_with = "as_seconds")]
    pub pd_timeout: Duration,
}

impl Default for DecodeConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        Self {
            pd_prefill_servers: Vec::new(),
            pd_local_tokens: 512,
            pd_timeout: Duration::from_secs(60),
        }
    }
}

fn as_urls<S: Serializer>(urls: &[BackendUrl], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(urls.iter().map(BackendUrl::url))
}

/// The parts that a prefill server or a decode server needs in addition to the usual server parts.
#[derive(Debug)]
pub struct PdParts {
    /// The mode.
    pub config: Disaggregation,
    /// Identifies the model and all settings that change the contents of its pages.
    pub model: String,
    /// A prefill server has the host tier of each replica. A decode server has one memory region
    /// for received pages, which its hands read as the host tier of an additional replica.
    pub tiers: Vec<Arc<dyn TierMemory>>,
}

/// Returns a string that identifies everything on which the bytes of a page depend; `None` if no
/// other server can read these pages. `model` is [`PdParts::model`].
pub(super) fn layout(model: &str, facts: &Facts) -> Option<String> {
    let hand = &facts.hand;
    let (name, page, state) = (&hand.kv_layout, hand.page_bytes, hand.state_bytes);
    if name.is_empty() || page == 0 {
        return None;
    }
    let (size, dtype) = (facts.page_size, hand.dtype.name());
    Some(format!("{name}, {dtype}, {size} positions of {page} bytes, states of {state}, {model}"))
}

#[cfg(test)]
mod tests {
    use forebay_engine::{Dtype, Ready};

    use super::*;

    #[test]
    fn a_layout_names_all_that_pages_depend_on() {
        let of = |change: fn(&mut Facts)| {
            let hand = Ready {
                kv_layout: "cpu".into(),
                page_bytes: 64,
                dtype: Dtype::Bfloat16,
                ..Ready::default()
            };
            let mut facts = Facts { context_length: 8, prompt_length: 8, page_size: 16, hand };
            change(&mut facts);
            layout("m", &facts)
        };
        let one = of(|_| {}).expect("a name");
        assert_eq!(of(|facts| facts.context_length = 9), Some(one.clone()));
        let others = [
            of(|facts| facts.page_size = 8),
            of(|facts| facts.hand.page_bytes = 65),
            of(|facts| facts.hand.state_bytes = 1),
            of(|facts| facts.hand.dtype = Dtype::Float32),
            of(|facts| facts.hand.kv_layout = "torch".into()),
        ];
        assert!(others.iter().all(|other| other.as_ref().is_some_and(|other| *other != one)));
        assert_eq!(of(|facts| facts.hand.kv_layout.clear()), None);
        assert_eq!(of(|facts| facts.hand.page_bytes = 0), None);
    }
}
