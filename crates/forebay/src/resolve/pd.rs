//! Resolves the settings of disaggregated prefill.

use anyhow::{Context, Result, bail};
use forebay_capacity::WritePolicy;
use forebay_hand::HandConfig;
use forebay_replicas::PdConfig;
use forebay_server::{DecodeConfig, Disaggregation};
use forebay_weights::content_digest;
use serde_json::json;

use crate::flags::{Device, DisaggregationMode, ServeFlags};
use crate::model::Model;

/// A decode server's host tier gets this share of the memory that a host tier usually gets. The
/// rest is for pages from other servers.
const TIER_SHARE: f64 = 2.0 / 3.0;

/// The roles of the replicas; `None`: each replica computes whole requests.
pub(super) fn config(flags: &ServeFlags) -> Option<PdConfig> {
    let usual = PdConfig::default().local_tokens;
    let local_tokens = flags.replicas.pd.pd_local_tokens.unwrap_or(usual);
    flags.replicas.pd.pd.map(|split| PdConfig { prefill: split.prefill, local_tokens })
}

/// The part of requests that the server computes if other servers compute the rest; `None`: it
/// computes whole requests.
pub(super) fn disaggregation(flags: &ServeFlags) -> Option<Disaggregation> {
    let (pd, usual) = (&flags.replicas.pd, DecodeConfig::default());
    match pd.disaggregation_mode {
        DisaggregationMode::Null => None,
        DisaggregationMode::Prefill => Some(Disaggregation::Prefill),
        DisaggregationMode::Decode => Some(Disaggregation::Decode(DecodeConfig {
            pd_prefill_servers: pd.pd_prefill_servers.clone(),
            pd_local_tokens: pd.pd_local_tokens.unwrap_or(usual.pd_local_tokens),
            pd_timeout: pd.pd_timeout.unwrap_or(usual.pd_timeout),
        })),
    }
}

/// Reduces the host tier of a decode server, to leave memory for pages from other servers.
pub(super) fn leave_room(config: Option<&Disaggregation>, hand: &mut HandConfig) {
    if let Some(Disaggregation::Decode(_)) = config {
        hand.host_share *= TIER_SHARE;
    }
}

/// A name that identifies the model and the settings that change the content of its pages.
///
/// # Errors
/// A file of the model can't be read.
pub(crate) fn model_name(model: &Model, hand: &HandConfig) -> Result<String> {
    let made = hand.load_format != "auto";
    let HandConfig { load_format, quantization, kv_cache_dtype, seed, .. } = hand;
    let facts = json!({
        "config": model.config,
        "format": model.format,
        "load_format": load_format,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "seed": made.then_some(seed),
    });
    let files = if made { &[][..] } else { &model.files };
    let digest = content_digest(files, &facts).context("the files of the model")?;
    Ok(format!("model {digest}"))
}

/// Refuses models whose KV cache can't be transferred to another replica or server. `drafts`: a
/// draft model is used.
///
/// # Errors
/// A message of one line for the user.
pub(super) fn check(flags: &ServeFlags, model: &Model, device: Device, drafts: bool) -> Result<()> {
    let pd = &flags.replicas.pd;
    let flag = match (pd.pd, pd.disaggregation_mode) {
        (Some(_), _) => "--pd",
        (None, DisaggregationMode::Null) => return Ok(()),
        (None, DisaggregationMode::Prefill | DisaggregationMode::Decode) => "--disaggregation-mode",
    };
    check_apart(flags, device, drafts)?;
    let together = flags.replicas.ranks.arrangement()?.step_group();
    let policy = flags.tiers.hicache_write_policy;
    let refused = [
        (model.pooling.is_some(), "a model that pools generates nothing"),
        (flags.sparse.enable_hisparse, "--enable-hisparse has host pages of its own"),
        (together, "replicas that share experts step together, and lend no pages yet"),
        (flags.replicas.elsewhere().is_some(), "the hands have to be on this machine"),
        (
            policy.is_some_and(|policy| policy != WritePolicy::WriteThrough),
            "--hicache-write-policy has to be write_through: what is not saved is not lent",
        ),
        (flags.schedule.disable_radix_cache, "--disable-radix-cache leaves no blocks to lend"),
    ];
    match refused.into_iter().find(|(given, _)| *given) {
        Some((_, why)) => bail!("{flag}: {why}"),
        None => Ok(()),
    }
}

/// Refuses settings with which the server could not share work with other servers.
fn check_apart(flags: &ServeFlags, device: Device, drafts: bool) -> Result<()> {
    let pd = &flags.replicas.pd;
    if !pd.apart() {
        return Ok(());
    }
    let decodes = pd.disaggregation_mode == DisaggregationMode::Decode;
    let nobody = pd.pd_prefill_servers.is_empty() && flags.sharing.router_key.is_none();
    let refused = [
        (device == Device::Sim, "--device sim keeps no keys and values to send"),
        (drafts, "a draft model's pages are not sent yet: turn speculation off"),
        (flags.replicas.ranks.tp_size > 1, "--tp-size above 1 is not supported yet"),
        (
            flags.sharing.cache_secret_file.is_none(),
            "--cache-secret-file has to be the same for all of its servers, so that blocks have \
             the same names",
        ),
        (
            decodes && nobody,
            "a decode server needs prefill servers that it may ask: --pd-prefill-servers URL,..., \
             or --router-key for a router that names them",
        ),
    ];
    match refused.into_iter().find(|(given, _)| *given) {
        Some((_, why)) => bail!("--disaggregation-mode: {why}"),
        None => Ok(()),
    }
}
