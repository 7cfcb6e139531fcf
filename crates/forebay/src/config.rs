//! Flags and model made into one resolved configuration. This is printed at /server_info and sent
//! to the hand.

use std::path::PathBuf;

use anyhow::{Result, bail};
use forebay_api::GenerationDefaults;
use forebay_engine::{EngineConfig, Namer, Policy};
use forebay_hand::HandConfig;
use forebay_machine::{Machine, Processors};
use forebay_replicas::ReplicasConfig;
use forebay_sim::Profile;
use serde::Serialize;

use crate::affinity::{Affinity, threads_each};
use crate::dialect::ChatFacts;
use crate::flags::{
    Arrangement, AttentionBackend, Device, Dtype, Egress, KvCacheDtype, LoadBalance, LoadFormat,
    Quantization, RunFlags, SchedulePolicy, ServeFlags, SimFlags,
};
use crate::gpus::Gpus;
use crate::hands::Chosen;
use crate::images::ImageConfig;
use crate::kv_cache::{check_floats, kv_cache_dtype};
use crate::model::{Model, Pooling};
use crate::sampling;
use crate::text::{TokenizerBackend, TokenizerMode};
use crate::tiers::{HostSize, HostTier};

/// A laptop's owner wants most of the memory for other things.
const CPU_MEM_FRACTION: f64 = 0.3;
/// The same where a control group has a limit, because such memory is there for this server. With
/// the quarter for requests it leaves enough to the brain.
const LIMITED_MEM_FRACTION: f64 = 0.6;
/// The default of `--mem-fraction-static` on CUDA. Other programs take little, and the memory of a
/// step was measured.
const CUDA_MEM_FRACTION: f64 = 0.9;
const STEP_TOKENS: u32 = 1024;
/// The default number of tokens of a step. More rows make the products of a GPU no faster, and
/// delay decode rows.
const CUDA_STEP_TOKENS: u32 = 2048;
const PAGE_SIZE: u32 = 16;
/// The positions that kernels for latent attention read at once.
const CUDA_LATENT_PAGE_SIZE: u32 = 64;
/// The share of the free memory of the machine for all host tiers. The rest is for the brain and
/// for other programs.
const HOST_SHARE: f64 = 0.8;
const SIM_PROFILE: &str = "instant";
/// A model of seven billion parameters in bfloat16 fits, two do not.
const WEIGHT_CACHE_GIB: u32 = 16;
/// About the length of a chat answer.
const SIM_OUTPUT_TOKENS: u32 = 256;

/// Everything that was decided before the hand started.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Config {
    pub(crate) model: String,
    pub(crate) served_model_names: Vec<String>,
    /// The values of sampling parameters that a request leaves out; null: OpenAI's.
    pub(crate) sampling_defaults: GenerationDefaults,
    pub(crate) device: &'static str,
    /// The hand that computes, and the reason for its choice.
    #[serde(flatten)]
    pub(crate) hand: Chosen,
    /// The GPU of each replica, as `CUDA_VISIBLE_DEVICES` names it; none on another device.
    pub(crate) gpus: Vec<String>,
    pub(crate) attention_backend: Option<&'static str>,
    /// The largest number of rows of a CUDA graph; 0: every step is launched operator by operator.
    pub(crate) graph_rows: u32,
    pub(crate) dtype: &'static str,
    pub(crate) quantization: Option<Quantization>,
    pub(crate) kv_cache_dtype: KvCacheDtype,
    pub(crate) load_format: &'static str,
    pub(crate) weight_cache_bytes: u64,
    pub(crate) context_length: u32,
    pub(crate) page_size: u32,
    pub(crate) slots: u32,
    pub(crate) max_running_requests: u32,
    pub(crate) max_queued_requests: usize,
    pub(crate) queue_timeout_s: f64,
    pub(crate) fair_queueing: bool,
    pub(crate) max_client_priority: Option<u32>,
    pub(crate) dp_size: u32,
    pub(crate) tp_size: u32,
    pub(crate) ep_size: u32,
    pub(crate) enable_dp_attention: bool,
    #[serde(skip)]
    pub(crate) arrangement: Arrangement,
    pub(crate) load_balance_method: LoadBalance,
    pub(crate) load_watch_interval_s: f64,
    pub(crate) cpu_affinity: Affinity,
    pub(crate) chunked_prefill_size: u32,
    pub(crate) mem_fraction_static: f64,
    pub(crate) max_total_tokens: Option<u64>,
    pub(crate) prefix_cache: bool,
    pub(crate) host_tier: Option<HostTier>,
    pub(crate) schedule_policy: SchedulePolicy,
    pub(crate) schedule_low_priority_values_first: bool,
    pub(crate) lookahead: u32,
    pub(crate) threads: Option<u32>,
    pub(crate) http_threads: u16,
    pub(crate) max_request_bytes_in_flight: usize,
    pub(crate) text_threads: u16,
    pub(crate) intake_threads: u16,
    pub(crate) inline_intake: bool,
    pub(crate) arena_bytes: u32,
    pub(crate) tokenizer_backend: TokenizerBackend,
    pub(crate) tokenizer_mode: TokenizerMode,
    pub(crate) text_cache_bytes: usize,
    pub(crate) egress_threads: u16,
    pub(crate) egress: Egress,
    pub(crate) stream_interval: u32,
    pub(crate) stream_flush_us: u64,
    pub(crate) watchdog_timeout_s: f64,
    pub(crate) load_timeout_s: f64,
    pub(crate) drain_timeout_s: f64,
    pub(crate) hand_restarts: u32,
    pub(crate) seed: u64,
    pub(crate) grammar: bool,
    pub(crate) grammar_threads: usize,
    pub(crate) grammar_timeout_s: f64,
    pub(crate) grammar_cache_bytes: usize,
    pub(crate) grammar_lenient: bool,
    pub(crate) mask_threads: usize,
    pub(crate) mask_share: u32,
    /// The settings of images; `None`: the model takes none.
    #[serde(flatten)]
    pub(crate) images: Option<ImageConfig>,
    /// The form of chats; null before it is known, and if the model has none.
    pub(crate) chat: Option<ChatFacts>,
    /// The output of the model in place of tokens.
    pub(crate) pooling: Option<Pooling>,
    /// The simulation that makes up answers, in the time that it says. `None` with a real device.
    pub(crate) simulated: Option<Simulated>,
    /// The simulation of each replica.
    #[serde(skip)]
    pub(crate) simulated_groups: Vec<Simulated>,
}

/// The simulation that stands in for a device.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Simulated {
    pub(crate) profile: String,
    #[serde(flatten)]
    pub(crate) content: Profile,
    pub(crate) output_tokens: u32,
    pub(crate) tokens_a_row: u32,
    pub(crate) script: Option<PathBuf>,
}

impl Simulated {
    /// One for each replica; those of a step group are of one kind.
    fn resolve(flags: &SimFlags, replicas: u32) -> Result<Vec<Self>> {
        let output_tokens = flags.sim_output_tokens.unwrap_or(SIM_OUTPUT_TOKENS);
        let tokens_a_row = flags.sim_tokens_a_row.unwrap_or(1);
        let names: Vec<&str> = match flags.sim_profile.as_slice() {
            [] => vec![SIM_PROFILE; replicas as usize],
            [one] => vec![one; replicas as usize],
            many if many.len() == replicas as usize => many.iter().map(String::as_str).collect(),
            many => bail!("--sim-profile: {} profiles for {replicas} replicas", many.len()),
        };
        let simulated = names.into_iter().map(|name| {
            let content = Profile::find(name)?;
            let profile = content.name.clone();
            let script = flags.sim_script.clone();
            Ok(Self { profile, content, output_tokens, tokens_a_row, script })
        });
        simulated.collect()
    }
}

impl Config {
    pub(crate) fn resolve(flags: &ServeFlags, model: &Model) -> Result<Self> {
        let longest = model.context_length;
        let usual = model.pooling.as_ref().and_then(|pooling| pooling.max_length);
        let default = usual.unwrap_or(longest).min(longest);
        let context_length = flags.loading.context_length.unwrap_or(default);
        if context_length > longest {
            bail!(
                "--context-length {context_length} is more than the model was made for ({longest})"
            );
        }
        let machine = Machine::here();
        let (memory, processors) = (machine.memory(), machine.processors());
        let arrangement = flags.replicas.arrangement()?;
        let Arrangement { replicas: dp_size, groups, ranks, expert_parallel } = arrangement;
        let hands = arrangement.hands();
        let apart = flags.replicas.elsewhere().is_some();
        let (device, gpus) = device(flags.run.device, groups, ranks, apart)?;
        let cuda = device == Device::Cuda;
        let schedule = &flags.schedule;
        let usual_step = if cuda { CUDA_STEP_TOKENS } else { STEP_TOKENS };
        let step = schedule.chunked_prefill_size.unwrap_or(usual_step);
        let usual_page = if cuda && model.is_latent() { CUDA_LATENT_PAGE_SIZE } else { PAGE_SIZE };
        let page_size = schedule.page_size.unwrap_or(usual_page);
        let host_tier = HostTier::resolve(flags, model, step, page_size)?;
        if arrangement.step_group() {
            check_step_group(model, host_tier.is_some())?;
        }
        if model.pooling.as_ref().is_some_and(Pooling::whole_prompts) && step < context_length {
            bail!(
                "--chunked-prefill-size {step} is less than the context length of {context_length}, and this model's prompts must \
                 fit into one step: raise it, or lower --context-length"
            );
        }
        if context_length < 2 {
            bail!("--context-length must be at least 2: one token in, one token out");
        }
        let simulated_groups = match device {
            Device::Sim => Simulated::resolve(&flags.sim, groups)?,
            _ if flags.sim.given() => bail!("the --sim-... flags are for --device sim"),
            _ => Vec::new(),
        };
        let simulated = simulated_groups.first().cloned();
        if flags.run.record_steps.is_some() && dp_size > 1 {
            bail!("--record-steps writes the steps of one replica: --dp-size must be 1");
        }
        let balance = flags.replicas.load_balance_method;
        if !flags.replicas.load_watch_interval.is_zero() && balance != LoadBalance::ShortestQueue {
            bail!("--load-watch-interval is for --load-balance-method shortest_queue");
        }
        let affinity = match &flags.replicas.cpu_affinity {
            Some(flag) => flag.resolve(&processors, groups, ranks)?,
            None => Affinity::default(),
        };
        // Hands on other machines share none of this one.
        let undivided = affinity.hands.is_empty() && device != Device::Sim;
        let threads = match flags.run.threads {
            None if hands > 1 && undivided && !apart => Some(threads_each(&processors, hands)),
            None if !apart => affinity.threads(&processors),
            given => given,
        };
        let running = schedule.max_running_requests;
        let mut names = flags.http.served_model_name.clone();
        if names.is_empty() {
            names.push(model.name.clone());
            // Clients that were set up for another engine call the model what the command line
            // calls it.
            names
                .extend(flags.model_name().filter(|&typed| typed != model.name).map(str::to_owned));
        }
        let device_name = match device {
            Device::Auto | Device::Cpu => "cpu",
            Device::Cuda => "cuda",
            Device::Sim => "sim",
            Device::Deferred => "deferred",
        };
        let attention_backend = flags.run.attention_backend.map(AttentionBackend::name);
        let mut config = Self {
            model: model.name.clone(),
            served_model_names: names,
            hand: Chosen { hand: "none", hand_reason: None },
            device: device_name,
            gpus,
            attention_backend,
            graph_rows: graph_rows(&flags.run, device, running)?,
            dtype: if simulated.is_some() { "none" } else { dtype(flags.loading.dtype, cuda) },
            quantization: if simulated.is_some() {
                None
            } else {
                quantization(flags, model, device == Device::Cpu && ranks == 1)?
            },
            kv_cache_dtype: if simulated.is_some() {
                KvCacheDtype::Auto
            } else {
                let wanted = flags.loading.kv_cache_dtype;
                check_floats(wanted, model, attention_backend)?;
                kv_cache_dtype(wanted, device_name, ranks)?
            },
            load_format: match flags.loading.load_format {
                LoadFormat::Auto => "auto",
                LoadFormat::Dummy => "dummy",
            },
            weight_cache_bytes: u64::from(
                flags.loading.weight_cache_gib.unwrap_or(WEIGHT_CACHE_GIB),
            ) << 30,
            context_length,
            page_size,
            slots: slots(running),
            max_running_requests: running,
            max_queued_requests: schedule.max_queued_requests,
            queue_timeout_s: schedule.queue_timeout.as_secs_f64(),
            fair_queueing: !schedule.disable_fair_queueing,
            max_client_priority: schedule.max_client_priority,
            dp_size,
            tp_size: if arrangement.step_group() { 1 } else { ranks },
            ep_size: if expert_parallel { ranks } else { 1 },
            enable_dp_attention: arrangement.step_group(),
            arrangement,
            load_balance_method: balance,
            load_watch_interval_s: flags.replicas.load_watch_interval.as_secs_f64(),
            cpu_affinity: affinity,
            chunked_prefill_size: step,
            // Elsewhere, the hands of a replica are on one machine.
            mem_fraction_static: mem_fraction(
                schedule.mem_fraction_static,
                cuda,
                // Other machines have limits of their own.
                memory.limit.is_some() && !apart,
                if apart { ranks } else { hands },
            ),
            max_total_tokens: schedule.max_total_tokens,
            prefix_cache: !schedule.disable_radix_cache
                && !model.pooling.as_ref().is_some_and(Pooling::counts_all),
            host_tier,
            schedule_policy: schedule.schedule_policy,
            schedule_low_priority_values_first: schedule.schedule_low_priority_values_first,
            lookahead: schedule.lookahead,
            threads,
            http_threads: flags.http.http_threads,
            max_request_bytes_in_flight: flags.limits.request_bytes(&memory),
            text_threads: flags.http.text_threads.unwrap_or_else(|| text_threads(&processors)),
            intake_threads: flags.http.intake_threads,
            inline_intake: flags.http.inline_intake,
            arena_bytes: flags.run.arena_bytes,
            tokenizer_backend: flags.text.tokenizer_backend,
            tokenizer_mode: flags.text.tokenizer_mode,
            text_cache_bytes: flags.text.text_cache_bytes,
            egress_threads: flags
                .http
                .egress_threads
                .unwrap_or_else(|| egress_threads(&processors)),
            egress: flags.http.egress,
            stream_interval: flags.http.stream_interval,
            stream_flush_us: flags.http.stream_flush_us,
            watchdog_timeout_s: flags.run.watchdog_timeout.as_secs_f64(),
            load_timeout_s: flags.run.load_timeout.as_secs_f64(),
            drain_timeout_s: flags.http.drain_timeout.as_secs_f64(),
            hand_restarts: flags.run.hand_restarts,
            seed: flags.loading.seed,
            grammar: !flags.grammar.no_grammar && model.pooling.is_none(),
            grammar_threads: flags.grammar.grammar_threads.get(),
            grammar_timeout_s: flags.grammar.grammar_timeout.as_secs_f64(),
            grammar_cache_bytes: flags.grammar.grammar_cache_bytes,
            grammar_lenient: flags.grammar.grammar_lenient,
            mask_threads: flags.grammar.helpers(&processors),
            mask_share: flags.grammar.mask_share,
            images: ImageConfig::resolve(&flags.images, model, !cuda && simulated.is_none())?,
            chat: None,
            pooling: model.pooling.clone(),
            sampling_defaults: sampling::defaults(
                &model.format,
                &model.generation_config,
                flags.loading.generation_config,
            ),
            simulated,
            simulated_groups,
        };
        crate::outposts::check(flags, &config)?;
        config.hand = Chosen::of(flags.run.hand, &config, model)?;
        Ok(config)
    }

    /// The settings for the spread of requests over replicas.
    pub(crate) fn replicas(&self) -> ReplicasConfig {
        ReplicasConfig {
            method: self.load_balance_method.into(),
            watch_interval_us: (self.load_watch_interval_s * 1e6) as u64,
        }
    }

    /// The part that decides in the brain.
    pub(crate) fn engine(&self, namer: Namer) -> EngineConfig {
        EngineConfig {
            max_running: self.max_running_requests,
            slots: self.slots,
            page_size: self.page_size,
            token_budget: self.chunked_prefill_size,
            prefix_cache: self.prefix_cache,
            namer,
            policy: match self.schedule_policy {
                SchedulePolicy::Fcfs => Policy::Fcfs,
                SchedulePolicy::Priority if self.schedule_low_priority_values_first => {
                    Policy::PriorityAscending
                }
                SchedulePolicy::Priority => Policy::Priority,
            },
            fair: self.fair_queueing,
            lookahead: self.lookahead,
            max_queued: self.max_queued_requests,
            queue_timeout_us: (self.queue_timeout_s * 1e6) as u64,
            context_length: self.context_length,
            watchdog_us: (self.watchdog_timeout_s * 1e6) as u64,
            load_timeout_us: (self.load_timeout_s * 1e6) as u64,
            restart_limit: self.hand_restarts,
            mask_threads: if self.grammar { self.mask_threads } else { 0 },
            mask_share: self.mask_share,
            host: self.host_tier.as_ref().map(HostTier::engine),
            image_budget: self.images.map_or(1, |images| images.position_layers()),
        }
    }

    /// The configuration of a hand.
    pub(crate) fn hand(&self, model: &Model) -> HandConfig {
        let tier = self.host_tier.as_ref();
        let size = tier.map(|tier| tier.size);
        let sparse = tier.and_then(|tier| tier.sparse);
        let order = sparse.map(|sparse| sparse.kv_save_order).unwrap_or_default();
        HandConfig {
            model: model.told(),
            load_format: self.load_format.to_owned(),
            device: self.device.to_owned(),
            dtype: self.dtype.to_owned(),
            quantization: self.quantization.map(Quantization::name),
            kv_cache_dtype: self.kv_cache_dtype.told(),
            page_size: self.page_size,
            slots: self.slots,
            context_length: self.context_length,
            chunked_prefill_size: self.chunked_prefill_size,
            max_running_requests: self.max_running_requests,
            attention_backend: self.attention_backend.map(str::to_owned),
            graph_rows: self.graph_rows,
            mem_fraction_static: self.mem_fraction_static,
            max_total_tokens: self.max_total_tokens,
            arena_bytes: 0,
            rank: 0,
            world_size: 0,
            expert_parallel: self.arrangement.expert_parallel,
            step_group: self.arrangement.step_group(),
            threads: self.threads,
            seed: self.seed,
            weight_cache_bytes: self.weight_cache_bytes,
            host_bytes: if let Some(HostSize::Bytes(bytes)) = size { Some(bytes) } else { None },
            host_ratio: if let Some(HostSize::Ratio(ratio)) = size { Some(ratio) } else { None },
            host_pages: None,
            // The hands look at the same free memory at about the same time.
            host_share: HOST_SHARE / f64::from(self.dp_size),
            copy_gbps: tier.and_then(|tier| tier.debug_copy_gbps),
            kv_checksum: tier.is_some_and(|tier| tier.debug_checksum),
            hot_row_tokens: sparse.map(|sparse| sparse.hot_buffer_tokens),
            sparse_top_k: sparse.and_then(|sparse| sparse.top_k),
            image_pool_tokens: self.images.and_then(|images| images.image_pool_tokens),
            kv_save_order: order.name().to_owned(),
        }
    }
}

/// One thread writes more than 100 000 chunks a second, which is more than most devices make.
fn egress_threads(processors: &Processors) -> u16 {
    u16::try_from(1 + processors.threads() / 16).unwrap_or(u16::MAX).min(8)
}

/// The second thread serves short prompts while the first has a long one.
fn text_threads(processors: &Processors) -> u16 {
    if processors.threads() > 1 { 2 } else { 1 }
}

/// The flag, where the model goes with it. What only the hand can know (its kernels, a file's
/// formats), it says itself.
fn quantization(flags: &ServeFlags, model: &Model, alone: bool) -> Result<Option<Quantization>> {
    let wanted = flags.loading.quantization;
    let dummy = flags.loading.load_format == LoadFormat::Dummy;
    if wanted == Quantization::Gguf && (model.format != "gguf" || dummy) {
        bail!(
            "--quantization gguf computes with the blocks of a GGUF file: {}",
            if dummy { "--load-format dummy loads none" } else { "the model is in safetensors" }
        );
    }
    Ok(match wanted {
        Quantization::Auto => own_blocks(model, flags.loading.dtype, alone && !dummy),
        Quantization::None => None,
        named => Some(named),
    })
}

/// `auto`, if a hand may choose the blocks of a GGUF file; `None`: it computes in the model's type.
///
/// `may`: the file is read, by one rank on a CPU.
pub(crate) fn own_blocks(model: &Model, dtype: Dtype, may: bool) -> Option<Quantization> {
    let may = may && model.format == "gguf" && model.pooling.is_none();
    (may && dtype == Dtype::Auto).then_some(Quantization::Auto)
}

/// Refuses models and flags that a step group does not have yet. Its hands check that the model has
/// experts, in a number that can be divided.
fn check_step_group(model: &Model, host_tier: bool) -> Result<()> {
    const FLAG: &str = "--enable-dp-attention";
    if model.pooling.is_some() {
        bail!("{FLAG} is for models that generate, not for those that pool: use --dp-size alone");
    }
    if model.images.is_some() {
        bail!("{FLAG}: the tower of {} is not shared: use --dp-size alone", model.name);
    }
    if host_tier {
        bail!(
            "{FLAG}: the copies of several ranks end at different times, and no step waits for the \
             last: leave the host tier's flags off"
        );
    }
    Ok(())
}

/// The device that `auto` stands for, and each rank's GPU.
fn device(flag: Device, replicas: u32, ranks: u32, apart: bool) -> Result<(Device, Vec<String>)> {
    if apart {
        // What other machines have, their hands say.
        return Ok((if flag == Device::Auto { Device::Cpu } else { flag }, Vec::new()));
    }
    let gpus = Gpus::find();
    let device = match flag {
        Device::Auto if gpus.any() => Device::Cuda,
        Device::Auto => Device::Cpu,
        given => given,
    };
    let each = if device == Device::Cuda { gpus.each(replicas, ranks)? } else { Vec::new() };
    Ok((device, each))
}

/// The largest number of rows of a graph: by default all that a step may have. The deferred device
/// has graphs only where a test asks for them.
fn graph_rows(flags: &RunFlags, device: Device, running: u32) -> Result<u32> {
    let graphs = matches!(device, Device::Cuda | Device::Deferred);
    let asked = flags.cuda_graph_max_bs.is_some() || flags.attention_backend.is_some();
    if !graphs && asked {
        bail!("--attention-backend and --cuda-graph-max-bs are for --device cuda");
    }
    Ok(match flags.cuda_graph_max_bs {
        _ if !graphs || flags.enforce_eager => 0,
        Some(most) => most.min(running),
        None if device == Device::Cuda => running,
        None => 0,
    })
}

/// The rows of the device tables for so many running requests. A slot is free again only when the
/// last step in flight that named it is done. Without spares, requests that end together would
/// leave their successors waiting for a step.
pub(crate) fn slots(running: u32) -> u32 {
    running + running.div_ceil(2)
}

/// The share of free memory for a hand. The hands of a CPU look at the same free memory at about
/// the same time: `together` of them divide it. `limited`: a control group limits the memory.
pub(crate) fn mem_fraction(given: Option<f64>, cuda: bool, limited: bool, together: u32) -> f64 {
    if cuda {
        return given.unwrap_or(CUDA_MEM_FRACTION);
    }
    let usual = if limited { LIMITED_MEM_FRACTION } else { CPU_MEM_FRACTION };
    given.unwrap_or(usual) / f64::from(together)
}

pub(crate) fn dtype(flag: Dtype, cuda: bool) -> &'static str {
    match flag {
        Dtype::Bfloat16 => "bfloat16",
        Dtype::Float32 => "float32",
        Dtype::Auto if cuda || native_bfloat16() => "bfloat16",
        Dtype::Auto => "float32",
    }
}

#[cfg(target_arch = "x86_64")]
fn native_bfloat16() -> bool {
    std::arch::is_x86_feature_detected!("avx512bf16")
}

#[cfg(target_arch = "aarch64")]
fn native_bfloat16() -> bool {
    std::arch::is_aarch64_feature_detected!("bf16")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn native_bfloat16() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: RunFlags,
    }

    fn of(device: Device, flags: &[&str]) -> Result<u32> {
        let line =
            Line::try_parse_from(["forebay"].iter().chain(flags)).expect("flags that clap takes");
        graph_rows(&line.run, device, 48)
    }

    #[test]
    fn a_gpu_has_graphs_of_all_rows_that_may_run() {
        assert_eq!(of(Device::Cuda, &[]).unwrap(), 48);
        assert_eq!(of(Device::Cuda, &["--cuda-graph-max-bs", "7"]).unwrap(), 7);
        assert_eq!(
            of(Device::Cuda, &["--max-cudagraph-capture-size", "500"]).unwrap(),
            48,
            "no step has more"
        );
        assert_eq!(of(Device::Cuda, &["--enforce-eager"]).unwrap(), 0);
        assert_eq!(of(Device::Cuda, &["--disable-cuda-graph"]).unwrap(), 0);
    }

    #[test]
    fn others_have_none_and_refuse_the_flags() {
        assert_eq!(of(Device::Deferred, &[]).unwrap(), 0);
        assert_eq!(
            of(Device::Deferred, &["--cuda-graph-max-bs", "7"]).unwrap(),
            7,
            "where a test asks for them"
        );
        for device in [Device::Cpu, Device::Sim] {
            assert_eq!(of(device, &[]).unwrap(), 0);
            assert_eq!(of(device, &["--enforce-eager"]).unwrap(), 0, "as it is anyway");
            for flags in [&["--cuda-graph-max-bs", "7"][..], &["--attention-backend", "torch"]] {
                let error = of(device, flags).unwrap_err().to_string();
                assert!(error.ends_with("are for --device cuda"), "{error}");
            }
        }
    }
}
