//! The state of a server with `--disaggregation-mode`, for both modes.

use std::sync::Arc;

use forebay_egress::PdCounts;
use forebay_engine::TierMemory;

use super::counts::SentCounters;
use super::decode::DecodeSide;
use super::parts::{Disaggregation, PdParts};

/// The role of a server in disaggregated prefill, with its statistics.
#[derive(Debug)]
pub(crate) enum Pd {
    /// The server computes prompts for decode servers.
    Prefill(PrefillSide),
    /// The server has its prompts computed by prefill servers.
    Decode(Box<DecodeSide>),
}

/// The state of a server with `--disaggregation-mode prefill`.
#[derive(Debug)]
pub(crate) struct PrefillSide {
    /// Identifies the model in layouts.
    pub(crate) model: String,
    /// The host tier of each replica.
    pub(crate) tiers: Vec<Arc<dyn TierMemory>>,
    pub(crate) sent: SentCounters,
}

impl Pd {
    /// Creates the state from its parts; `None` for a decode server without memory for blocks.
    pub(crate) fn new(parts: PdParts) -> Option<Self> {
        let PdParts { config, model, mut tiers } = parts;
        Some(match config {
            Disaggregation::Prefill => {
                Self::Prefill(PrefillSide { model, tiers, sent: SentCounters::default() })
            }
            Disaggregation::Decode(config) => {
                Self::Decode(Box::new(DecodeSide::new(config, model, tiers.pop()?)))
            }
        })
    }

    /// Returns the name of the mode.
    pub(crate) fn mode(&self) -> &'static str {
        match self {
            Self::Prefill(_) => "prefill",
            Self::Decode(_) => "decode",
        }
    }

    pub(crate) fn counts(&self) -> PdCounts {
        match self {
            Self::Prefill(side) => side.sent.counts(),
            Self::Decode(side) => side.counts(),
        }
    }
}
