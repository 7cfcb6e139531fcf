//! Resolves the settings of the engines and of the load balancing.

use anyhow::{Result, bail};
use forebay_balance::Method;
use forebay_engine::{EngineConfig, ImageConfig};
use forebay_machine::Processors;
use forebay_replicas::ReplicasConfig;
use forebay_weights::ModelShape;

use super::device::DeviceSettings;
use super::{images, pd, tiers};
use crate::flags::ServeFlags;
use crate::model::{Model, Pooling};
use crate::secret;

/// The default number of tokens per step. More rows do not make a GPU's matrix products more
/// efficient, but delay decode rows.
const CUDA_STEP_TOKENS: u32 = 2048;
/// The page size for latent attention on CUDA: the kernels read this many positions at once.
const CUDA_LATENT_PAGE_SIZE: u32 = 64;

pub(super) fn resolve(
    flags: &ServeFlags,
    model: &Model,
    device: &DeviceSettings,
    processors: &Processors,
    context_length: u32,
) -> Result<EngineConfig> {
    let mut usual = EngineConfig::default();
    if device.cuda() {
        usual.chunked_prefill_size = CUDA_STEP_TOKENS;
        usual.page_size = if model.is_latent() { CUDA_LATENT_PAGE_SIZE } else { usual.page_size };
    }
    let scheduling = flags.schedule.engine(usual);
    let (step, page_size) = (scheduling.chunked_prefill_size, scheduling.page_size);
    let host_tier = tiers::engine(flags, model, step, page_size)?;
    if device.arrangement.step_group() {
        check_step_group(model)?;
    }
    let pooling = model.pooling.as_ref();
    if pooling.is_some_and(Pooling::whole_prompts) && step < context_length {
        bail!(
            "--chunked-prefill-size {step} is less than the context length of {context_length}, and this model's prompts must \
             fit into one step: raise it, or lower --context-length"
        );
    }
    if context_length < 2 {
        bail!("--context-length must be at least 2: one token in, one token out");
    }
    let grammar = &flags.grammar;
    Ok(EngineConfig {
        context_length,
        prefix_cache: scheduling.prefix_cache && !pooling.is_some_and(Pooling::counts_all),
        namer: secret::namer(flags.sharing.cache_secret_file.as_deref())?,
        watchdog_timeout: flags.run.watchdog_timeout,
        load_timeout: flags.run.load_timeout,
        hand_restarts: flags.run.hand_restarts,
        mask_threads: if grammar.wanted(pooling.is_some()) {
            grammar.helpers(processors)
        } else {
            0
        },
        mask_share: grammar.mask_share,
        host_tier,
        images: step_images(flags, model, device)?,
        state_interval: flags.states.state_interval,
        is_recurrent: model.has_states(),
        ..scheduling
    })
}

/// The engine's image settings; `None`: the model takes no images.
fn step_images(
    flags: &ServeFlags,
    model: &Model,
    device: &DeviceSettings,
) -> Result<Option<ImageConfig>> {
    images::check(&flags.images, model)?;
    let cpu = !device.cuda() && device.simulated.is_none();
    let shape = model.shape.as_ref().and_then(ModelShape::decoder);
    let tower = shape.and_then(|shape| shape.tower.as_ref());
    let whole = tower.is_some_and(|tower| tower.both_ways);
    Ok(model.images.as_ref().map(|images| flags.images.engine(images.merge, whole, cpu)))
}

/// The settings of load balancing over replicas.
pub(super) fn replicas(all: &ServeFlags) -> Result<ReplicasConfig> {
    let flags = &all.replicas;
    let config = ReplicasConfig {
        load_balance_method: flags.load_balance_method.into(),
        load_watch_interval: flags.load_watch_interval,
        queue_moves: !flags.moves.disable_queue_moves,
        pd: pd::config(all),
        // A decode server has to know which blocks are cached: it requests the others from prefill
        // servers.
        tells_cached: all.replicas.pd.apart(),
    };
    let polled = !config.load_watch_interval.is_zero();
    if polled && config.load_balance_method != Method::ShortestQueue {
        bail!("--load-watch-interval is for --load-balance-method shortest_queue");
    }
    Ok(config)
}

/// Refuses models that step groups do not support yet. Hands check that the model has experts and
/// that they can be divided evenly.
fn check_step_group(model: &Model) -> Result<()> {
    const FLAG: &str = "--enable-dp-attention";
    if model.pooling.is_some() {
        bail!("{FLAG} is for models that generate, not for those that pool: use --dp-size alone");
    }
    if model.images.is_some() {
        bail!("{FLAG}: the tower of {} is not shared: use --dp-size alone", model.name);
    }
    Ok(())
}
