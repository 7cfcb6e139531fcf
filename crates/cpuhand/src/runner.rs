//! The memory of a hand: weights, pages and tables, loaded and ready for steps (`step`).

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_kernels::{Decoder, Dtype, Room, Shared, Sizes, Threads, Unfit, Wanted, level, limit};
use forebay_machine::Machine;
use forebay_protocol::{AdapterOrder, HandConfig, Ready, StepPlan, StepResult};
use forebay_weights::{Checkpoint, ModelError, ModelShape, Norm, Shape, TorchNumber};
use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use crate::adapters::{AdapterPlaces, adapter_sizes, module_names, place_bytes};
use crate::blocks::{is_of_file, quantization};
use crate::columns::Columns;
use crate::connection::ConnectionError;
use crate::copier::Copier;
use crate::descriptors::{HostFiles, PageMemory};
use crate::encoder::EncoderRunner;
use crate::host::{HostTier, PageSizes, PoolSize, host_counts};
use crate::kept::{Kept, files};
use crate::latent;
use crate::load::{Formats, Plan, Source, assemble, load};
use crate::parts::{DecoderParts, expert_sizes};
use crate::pooled::Pooler;
use crate::prompts::slice_bytes;
use crate::serves::{Asked, serves};
use crate::states::{self, StateMemory, States};
use crate::step::MaskSource;
use crate::tables::{PlanError, Tables};
use crate::whole::WholeRunner;
use crate::windows::{WindowLayers, page_bytes};

/// Errors that end the hand. If a message starts with an error name, the Python hand uses the same
/// name.
#[derive(Debug, Error)]
pub(crate) enum HandError {
    #[error("{0}")]
    Config(String),
    #[error("{0}")]
    Model(#[from] ModelError),
    #[error("NotFiniteError: {0}")]
    NotFinite(String),
    #[error("PlanError: {0}")]
    Plan(#[from] PlanError),
    #[error("WireError: {0}")]
    Wire(#[from] ConnectionError),
    #[error("{0}")]
    System(#[from] std::io::Error),
}

impl From<Unfit> for HandError {
    fn from(error: Unfit) -> Self {
        Self::Plan(PlanError(error.to_string()))
    }
}

/// The largest number of pages: page-table entries are signed 32-bit integers.
const MOST_PAGES: u32 = i32::MAX.cast_unsigned();

/// Bytes of an element of a convolution state: a 32-bit float.
pub(crate) const STATE_ELEMENT: usize = 4;

/// A callback that receives the number of loaded weights and the number of all weights.
pub(crate) type Report<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// A loaded model that executes plans.
pub(crate) trait Executes {
    /// The values of the `ready` message, except the loading time.
    fn facts(&self) -> &Ready;

    /// Executes a plan. If it has masked rows, calls `masks` for their masks after the model's
    /// computation. Returns `None` if `masks` returned none.
    fn step(
        &mut self,
        plan: &StepPlan,
        masks: &mut MaskSource<'_>,
    ) -> Result<Option<StepResult>, HandError>;

    /// Adds finished page copies to a plan's result. If the plan states a wait, first waits until a
    /// copy finishes, or until `socket`, if there is one, is readable.
    fn end_copies(
        &mut self,
        _plan: &StepPlan,
        _socket: Option<BorrowedFd<'_>>,
        _result: &mut StepResult,
    ) {
    }

    /// Executes an order about an adapter.
    fn follow(&mut self, _: AdapterOrder) -> Result<(), HandError> {
        Err(no_places())
    }
}

/// The error for an adapter order to a hand without adapter places.
pub(crate) fn no_places() -> HandError {
    PlanError("adapters for a hand without places".into()).into()
}

/// Stores a step's times in its result. The step began at `begun` and ends now. The previous step
/// ended at `before`, and waiting for masks took `idle`.
pub(crate) fn timed(result: &mut StepResult, begun: Instant, before: &mut Instant, idle: Duration) {
    let ended = Instant::now();
    let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    result.timing.device_us = us((ended - begun).saturating_sub(idle));
    result.timing.gap_us = us(begun - *before + idle);
    *before = ended;
}

/// A loaded decoder: weights, pages and slot tables, on which plans are executed.
pub(crate) struct Runner {
    pub(crate) decoder: Decoder,
    pub(crate) tables: Tables,
    pub(crate) threads: Arc<Threads>,
    pub(crate) arena: Arc<Shared>,
    pub(crate) sizes: Sizes,
    pub(crate) facts: Ready,
    /// When the previous step ended.
    pub(crate) ended: Instant,
    /// A buffer that is reused from step to step.
    pub(crate) logits: Vec<f32>,
    /// `None` if the model generates tokens.
    pub(crate) pooler: Option<Pooler>,
    /// `None` if the model has no recurrent layers.
    pub(crate) states: Option<States>,
    /// `None` if the hand has no adapter places.
    pub(crate) adapters: Option<AdapterPlaces>,
    /// `None` if there is no host tier.
    pub(crate) copier: Option<Copier>,
}

/// A loaded model, and the function that caches its weights for the next start.
pub(crate) struct Loaded {
    pub(crate) runner: Box<dyn Executes>,
    /// Caches the weights; called once steps can be computed.
    pub(crate) keep: Box<dyn FnOnce()>,
}

impl Runner {
    /// Loads a model and computes a first step.
    pub(crate) fn load(
        config: &HandConfig,
        arena: Shared,
        host: Option<HostFiles>,
        report: Report<'_>,
    ) -> Result<Loaded, HandError> {
        let model = shape(config)?;
        let asked = Asked::of(config, &model);
        serves(&asked).map_err(|error| match error {
            ModelError::Elsewhere(what) => {
                HandError::Config(format!("the Rust hand does not have {what}"))
            }
            error => error.into(),
        })?;
        limit_kernels()?;
        check(config)?;
        let pooling = asked.pooling;
        let machine = Machine::here();
        let of_machine = || machine.processors().threads();
        let members = config.threads.map_or_else(of_machine, |threads| threads as usize);
        let threads = Arc::new(Threads::new(members)?);
        let shape = match &model {
            ModelShape::Encoder(shape) => {
                return EncoderRunner::load(config, shape, arena, &threads, report);
            }
            ModelShape::Decoder(shape) if shape.both_ways() => {
                return WholeRunner::load(config, shape, arena, &threads, report);
            }
            ModelShape::Decoder(shape) => shape,
        };
        let parts = DecoderParts::new(shape)?;
        let (number, dtype, told) = numbers(&config.dtype)?;
        let available = machine.memory().available.unwrap_or(0);
        let mut kept = Kept::open(config);
        let mut checkpoint = None;
        let formats = formats(config, &parts, kept.as_ref(), &mut checkpoint)?;
        let plan = Plan::new(&parts, number, formats)?;
        let blocks = plan.blocks()?;
        if !blocks.is_empty() {
            eprintln!("computing with blocks of the file: {blocks}");
        }
        let state_bytes = shape.state_bytes(STATE_ELEMENT);
        let pages =
            states::state_pages(config, state_bytes, free(config, &plan, available, state_bytes));
        let state_rows = if state_bytes > 0 { 2 * u64::from(config.slots) + pages } else { 0 };
        let taken = plan.bytes() + state_rows * state_bytes;
        let windows = WindowLayers::new(config, shape, state_bytes > 0);
        let sizes = sizes(config, &parts, &windows, dtype, (available, taken))?;
        let pool = |(layer, &kind): (usize, &usize)| match parts.keeps_pages(layer) {
            true => sizes.pool_bytes(kind),
            false => [0; 2],
        };
        let pools: Vec<usize> = parts.kind_of.iter().enumerate().flat_map(pool).collect();
        let slots = config.slots as usize;
        let states = (state_bytes > 0).then(|| States::new(slots, pages as usize));
        let of_parts = page_bytes(&parts, &sizes);
        let [page_bytes, window_page_bytes] = of_parts;
        let all_pages = windows.bytes(sizes.page_count as u32, of_parts);
        let of_adapters = adapter_sizes(&parts, &sizes);
        let of_places = config.lora.as_ref().map_or(0, |lora| place_bytes(lora, &of_adapters));
        let beside = taken + of_places + all_pages;
        let left = (available > 0).then(|| available.saturating_sub(beside));
        let of_device = PoolSize { count: sizes.page_count as u64, bytes: page_bytes };
        let of_states = PoolSize { count: pages, bytes: state_bytes };
        let host_pages = host_counts(config, of_device, of_states, left)?;
        // The last room is empty and belongs to no layer. As long as `memory` holds it, the memory
        // of all rooms stays mapped.
        let mut rooms = Room::parts(pools.iter().copied().chain([0]))?;
        let memory = rooms.pop();
        let mut rooms = rooms.into_iter();
        let mut layers = Vec::new();
        while let (Some(keys), Some(values)) = (rooms.next(), rooms.next()) {
            layers.push([keys, values]);
        }
        let memory = memory
            .map(|memory| PageMemory::new(layers.iter_mut().flatten(), sizes.page_count, memory));
        let earlier = kept.as_mut().and_then(|kept| kept.load(&plan, &threads, report));
        let weights = match earlier {
            Some(weights) => weights,
            None if config.load_format == "dummy" => {
                load(&plan, Source::Random(config.seed), &threads, report)?
            }
            None => {
                let checkpoint = match checkpoint {
                    Some(checkpoint) => checkpoint,
                    None => open(config, shape)?,
                };
                plan.check(&checkpoint)?;
                load(&plan, Source::Checkpoint(&checkpoint), &threads, report)?
            }
        };
        let assembled = assemble(&plan, &parts, &weights, sizes.positions)?;
        let mut decoder =
            Decoder::new(sizes.clone(), assembled, layers, state_rows as usize, &threads)
                .map_err(|error| ModelError::Broken(error.to_string()))?;
        let copier = match (host_pages.pages, host, memory) {
            (0, ..) => None,
            (_, Some(files), Some(memory)) => {
                let states = state_memory(&mut decoder, config, state_rows);
                let state = states.as_ref().map_or(0, |states| states.rows.page_bytes() as u64);
                let sizes_of = PageSizes { page: page_bytes, state };
                let tier = HostTier::open(files, host_pages, sizes_of)?;
                Some(Copier::start(config, memory, sizes.page_count, states, tier)?)
            }
            _ => return Err(HandError::Config("a host tier without memory for it".into())),
        };
        let (lora_bytes, lora_modules) = match &config.lora {
            Some(lora) => (place_bytes(lora, &of_adapters), module_names(&parts, &of_adapters)),
            None => (0, Vec::new()),
        };
        let facts = Ready {
            page_count: sizes.page_count as u32,
            vocab_size: sizes.vocabulary as u32,
            hidden_size: sizes.hidden as u32,
            dtype: told,
            weight_bytes: plan.bytes(),
            kv_bytes: all_pages,
            device: "cpu".into(),
            host_page_count: host_pages.pages,
            host_state_page_count: host_pages.state_pages,
            tokens_a_row: 1,
            verifies_drafts: pooling.is_none() && state_bytes == 0,
            state_page_count: pages as u32,
            state_bytes,
            page_bytes,
            window: windows.window,
            window_page_count: sizes.window_page_count as u32,
            window_page_bytes,
            one_pool: windows.one_pool.into(),
            // The order of elements in a page depends on the instruction level.
            kv_layout: format!("cpu {}", level()),
            blocks,
            lora_bytes,
            lora_modules,
            ..Ready::default()
        };
        let tables = Tables::new(
            config.slots as usize,
            config.context_length as usize,
            sizes.page_size,
            sizes.vocabulary,
        );
        let tables = tables.with_window(sizes.window_page_count);
        let (ended, logits, arena) = (Instant::now(), Vec::new(), Arc::new(arena));
        let pooler = pooling.and_then(|kind| Pooler::of(kind, config.slots as usize, sizes.hidden));
        let slots = config.slots as usize;
        let places = |lora| AdapterPlaces::open(lora, of_adapters, sizes.dtype, slots);
        let adapters = config.lora.map(places).transpose()?;
        let mut runner = Self {
            decoder,
            tables,
            threads,
            arena,
            sizes,
            facts,
            ended,
            logits,
            pooler,
            states,
            adapters,
            copier,
        };
        if !runner.warm_up()? {
            let mut what = "the weights give results that are not finite".to_owned();
            if kept.as_mut().is_some_and(Kept::discard) {
                what += "; they were kept by an earlier start and are removed: the next one reads the model's own files";
            }
            return Err(HandError::NotFinite(what));
        }
        let keep = Box::new(move || {
            if let Some(kept) = kept {
                kept.save(&plan, weights);
            }
        });
        Ok(Loaded { runner: Box::new(runner), keep })
    }

    /// Runs a tiny prompt and a decode row, so that no request pays for the set-up of the first
    /// step. The tables are unchanged afterwards. The content of the first page is undefined.
    /// Returns false if the results were not finite.
    fn warm_up(&mut self) -> Result<bool, HandError> {
        let length = 2.min(self.tables.context_length).min(self.sizes.page_size);
        self.tables.pages[0] = 0;
        self.tables.window.iter_mut().take(1).for_each(|page| *page = 0);
        let mut fine = true;
        for (start, length) in [(0, length), (length - 1, 1)] {
            let (mut best, mut finite) = ([0], [0]);
            let columns = Columns::one(start as i64, length as i64, self.states.is_some());
            let rows = columns.rows(&self.tables, &[], &columns.last);
            if self.pooler.is_some() {
                let mut vector = vec![0.0; self.sizes.hidden];
                self.decoder.step(&rows, Wanted::Vectors(&mut vector))?;
                fine &= vector.iter().all(|number| number.is_finite());
                continue;
            }
            self.decoder.step(&rows, Wanted::Best(&mut best, &mut finite))?;
            fine &= finite[0] == 1;
        }
        self.tables.forget_pages();
        self.ended = Instant::now();
        Ok(fine)
    }
}

/// The memory of the state pages, which follow the slots' rows in the state tables; `None` if the
/// model has no states.
fn state_memory(decoder: &mut Decoder, config: &HandConfig, rows: u64) -> Option<StateMemory> {
    let keeper = decoder.state_tables().next().map(|table| table.keeper())?;
    let rows = usize::try_from(rows).ok().filter(|&rows| rows > 0)?;
    let rows = PageMemory::new(decoder.state_tables(), rows, keeper);
    Some(StateMemory { rows, first: 2 * config.slots })
}

/// The type in which a model is computed, as the enums of three crates.
pub(crate) fn numbers(
    name: &str,
) -> Result<(TorchNumber, Dtype, forebay_protocol::Dtype), HandError> {
    use forebay_protocol::Dtype as Told;
    match name {
        "float32" => Ok((TorchNumber::Float32, Dtype::Float32, Told::Float32)),
        "bfloat16" => Ok((TorchNumber::Bfloat16, Dtype::Bfloat16, Told::Bfloat16)),
        other => Err(HandError::Config(format!(
            "dtype {other:?} is not supported: use bfloat16 or float32"
        ))),
    }
}

/// Limits the kernels to the instruction level that `FOREBAY_KERNELS` names.
fn limit_kernels() -> Result<(), HandError> {
    let Ok(wanted) = std::env::var("FOREBAY_KERNELS") else { return Ok(()) };
    if limit(&wanted) {
        return Ok(());
    }
    Err(HandError::Config(format!(
        "FOREBAY_KERNELS is {wanted:?}, which this kind of processor does not have, or this build has left out: leave it off, or use --hand torch for PyTorch's operators"
    )))
}

fn check(config: &HandConfig) -> Result<(), HandError> {
    let sizes = [
        config.page_size,
        config.slots,
        config.context_length,
        config.chunked_prefill_size,
        config.max_running_requests,
    ];
    if sizes.contains(&0) {
        return Err(HandError::Config(
            "page_size, slots, context_length, chunked_prefill_size, max_running_requests must be at least 1".into(),
        ));
    }
    if !["auto", "dummy"].contains(&config.load_format.as_str()) {
        return Err(HandError::Config(format!(
            "load format {:?} is not supported: use auto or dummy",
            config.load_format
        )));
    }
    if let Some(lora) = config.lora.as_ref().filter(|lora| lora.places == 0 || lora.rank == 0) {
        return Err(HandError::Config(format!("{lora:?}: places and ranks are at least 1")));
    }
    if let Some(other) = config.kv_cache_dtype.as_deref().filter(|&name| name != "int8") {
        return Err(HandError::Config(format!(
            "kv cache dtype {other:?} is not supported on a CPU: use null or int8"
        )));
    }
    if config.kv_save_order != "behind" {
        let order = &config.kv_save_order;
        return Err(HandError::Config(format!("saves that are {order} are for sparse decoding")));
    }
    let gguf = format_of(config) == "gguf";
    if config.quantization.as_deref() == Some("gguf") && (!gguf || config.load_format == "dummy") {
        return Err(HandError::Config(
            "quantization gguf computes with the blocks of a GGUF file, and none is loaded".into(),
        ));
    }
    Ok(())
}

/// The model's shape, which the brain has determined.
pub(crate) fn shape(config: &HandConfig) -> Result<ModelShape, HandError> {
    let shape = config.model.get("shape").filter(|shape| !shape.is_null());
    let shape = shape.ok_or_else(|| HandError::Config("the config has no shape".into()))?;
    let found = ModelShape::deserialize(shape);
    found.map_err(|error| HandError::Config(format!("the model's shape: {error}")))
}

fn open(config: &HandConfig, shape: &Shape) -> Result<Checkpoint, ModelError> {
    Checkpoint::open(format_of(config), &files(&config.model), shape)
}

/// The format of the model's files.
pub(crate) fn format_of(config: &HandConfig) -> &str {
    config.model.get("format").and_then(Value::as_str).unwrap_or_default()
}

/// Determines the formats of matrices. If the checkpoint had to be opened, it stays open in
/// `checkpoint`.
pub(crate) fn formats(
    config: &HandConfig,
    parts: &DecoderParts<'_>,
    kept: Option<&Kept>,
    checkpoint: &mut Option<Checkpoint>,
) -> Result<Formats, ModelError> {
    let quantization = quantization(config);
    let everything = quantization == Some("gguf");
    // Experts keep the blocks of their file, regardless of the format of other matrices.
    let stored = if everything || is_of_file(config) && parts.experts.is_some() {
        match kept.and_then(Kept::stored) {
            Some(stored) => stored,
            None => {
                let found = checkpoint.insert(open(config, parts.shape)?).stored();
                let wanted = found.into_iter().filter(|(name, _)| everything || is_of_expert(name));
                wanted.map(|(name, kind)| (name, kind.to_owned())).collect()
            }
        }
    } else {
        BTreeMap::new()
    };
    let insists = config.quantization.as_deref() == Some("gguf");
    Ok(Formats { int8: quantization == Some("w8a8_int8"), insists, stored })
}

/// True if a weight belongs to one of the routed experts.
fn is_of_expert(name: &str) -> bool {
    name.contains(".mlp.experts.")
}

/// Bytes that remain for KV pages and state pages, after the weights and the slots' states.
pub(crate) fn free(config: &HandConfig, plan: &Plan, available: u64, state_bytes: u64) -> u64 {
    let share = (config.mem_fraction_static * available as f64) as u64;
    share.saturating_sub(plan.bytes() + 2 * u64::from(config.slots) * state_bytes)
}

/// The sizes of a decoder with a single page.
pub(crate) fn sizes_of_parts(config: &HandConfig, parts: &DecoderParts<'_>, dtype: Dtype) -> Sizes {
    let &DecoderParts { shape, experts, .. } = parts;
    Sizes {
        dtype,
        kv_codes: config.kv_cache_dtype.is_some(),
        hidden: shape.hidden_size,
        attentions: parts.attention_sizes(),
        gate: parts.gate(),
        gated: parts.gated(),
        factors: parts.factors(),
        mean_norms: shape.norm == Norm::Mean,
        wide_norms: shape.norm == Norm::RmsBesideOne,
        intermediate: parts.intermediate(),
        layer_inputs: parts.layer_inputs(),
        experts: experts.map(expert_sizes),
        vocabulary: shape.vocab_size,
        positions: config.context_length as usize,
        page_size: config.page_size as usize,
        page_count: 1,
        window_page_count: 0,
        eps: shape.norm_eps as f32,
    }
}

/// Sizes the KV cache (`--gpu-memory-utilization`): returns the sizes of a decoder with as many
/// pages as fit.
pub(crate) fn sizes(
    config: &HandConfig,
    parts: &DecoderParts<'_>,
    windows: &WindowLayers,
    dtype: Dtype,
    (available, weight_bytes): (u64, u64),
) -> Result<Sizes, HandError> {
    let (page_size, shape) = (config.page_size as usize, parts.shape);
    let mut sizes = sizes_of_parts(config, parts, dtype);
    for attention in &mut sizes.attentions {
        attention.in_window_part = windows.holds(attention);
    }
    let page_bytes = page_bytes(parts, &sizes);
    let slices = slice_bytes(shape.vocab_size, config.chunked_prefill_size as usize);
    let of_places = config.lora.as_ref().map_or(0, |lora| {
        let gates = 2 * sizes.intermediate * size_of::<f32>();
        let of_step = config.chunked_prefill_size as u64 * gates as u64;
        place_bytes(lora, &adapter_sizes(parts, &sizes)) + of_step
    });
    let tokens = config.chunked_prefill_size.max(config.max_running_requests);
    let of_latent = latent::step_bytes(&sizes, tokens.into());
    let of_head = if shape.headless { 0 } else { slices };
    let taken = weight_bytes + of_places + of_latent + of_head;
    let pages = match config.max_total_tokens {
        Some(tokens) => {
            let pages = tokens / u64::from(config.page_size);
            let pages = u32::try_from(pages).unwrap_or(MOST_PAGES).min(MOST_PAGES);
            let (bytes, free) = (windows.bytes(pages, page_bytes), available.saturating_sub(taken));
            if available > 0 && bytes > free {
                let most = windows.fitting(free, pages, page_bytes) * config.page_size;
                return Err(HandError::Config(format!(
                    "max_total_tokens {tokens}: keys and values of so many tokens take {:.1} GB, and {:.1} GB are free beside \
                     the weights: at most {most} tokens",
                    bytes as f64 / 1e9,
                    free as f64 / 1e9
                )));
            }
            pages
        }
        None => {
            let share = (config.mem_fraction_static * available as f64) as u64;
            let of_slot = config.context_length.div_ceil(config.page_size);
            // By default, no more pages than all slots can fill; an explicit number may exceed
            // that.
            let most = config.slots.saturating_mul(of_slot).min(MOST_PAGES);
            windows.fitting(share.saturating_sub(taken), most, page_bytes)
        }
    };
    if pages < 1 {
        return Err(HandError::Config(format!(
            "no memory for a single page of {page_size} tokens: {} MiB of weights and of what a step takes, {} MiB available, \
             mem_fraction_static {}, max_total_tokens {:?}",
            taken >> 20,
            available >> 20,
            config.mem_fraction_static,
            config.max_total_tokens
        )));
    }
    sizes.page_count = pages as usize;
    sizes.window_page_count = windows.count(pages) as usize;
    Ok(sizes)
}
