//! `forebay plan`: how many replicas recorded traffic needs, or the memory of a model's ranks.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use forebay_capacity::{Memory, PlanArgs, RankMemory};
use forebay_cpuhand::footprint;
use forebay_engine::EngineConfig;
use forebay_hand::{HandConfig, without_keys};
use forebay_machine::Machine;
use serde_json::Deserializer;

use crate::flags::{
    Arrangement, Dtype, Hand, KvCacheDtype, Quantization, RankFlags, WindowFlags, fraction,
};
use crate::hands::Chosen;
use crate::model::{Model, Source, fetch, find_python};
use crate::python;
use crate::resolve::{dtype, kv_cache_dtype, mem_fraction, own_blocks};

/// The Python module that builds a rank's model without its weights.
const MODULE: &str = "forebay.runner.footprint";

#[derive(Debug, Args)]
pub(crate) struct PlanFlags {
    #[command(flatten)]
    plan: PlanArgs,
    #[command(flatten)]
    ranks: RankFlags,
    #[command(flatten)]
    memory: MemoryFlags,
    #[command(flatten)]
    windows: WindowFlags,
}

/// Flags about the memory of a model's ranks.
#[derive(Debug, Args)]
#[command(next_help_heading = "Memory of a model (--model)")]
struct MemoryFlags {
    /// Kind of device. The ranks on a CPU share its memory.
    #[arg(long, value_enum, default_value_t, conflicts_with = "trace")]
    device: PlannedDevice,
    /// Free memory of each rank's device before loading, in GB (10^9 bytes) [default: on a CPU the
    /// memory that this process may use; on CUDA --max-total-tokens sets the pool].
    #[arg(long, value_name = "GB", value_parser = gigabytes, conflicts_with = "trace")]
    device_memory: Option<u64>,
    /// Share of the device's free memory for weights and KV pages, divided among the ranks on a
    /// CPU. [default: 0.9 on CUDA, otherwise 0.3, or 0.6 if a control group limits the memory here]
    #[arg(long, visible_alias = "gpu-memory-utilization", value_parser = fraction, conflicts_with = "trace")]
    mem_fraction_static: Option<f64>,
    /// Data type of the model; `auto` is bfloat16 on CUDA and on processors with native bfloat16
    /// arithmetic, else float32.
    #[arg(long, value_enum, default_value_t, conflicts_with = "trace")]
    dtype: Dtype,
    /// Data type of the KV cache; `auto` follows --dtype. 8-bit floats are only for CUDA, 8-bit
    /// integers only for CPUs.
    #[arg(long, value_enum, default_value_t, conflicts_with = "trace")]
    kv_cache_dtype: KvCacheDtype,
    /// Largest total number of tokens of prompt and answer [default: the model's].
    #[arg(long, visible_alias = "max-model-len", value_name = "TOKENS", conflicts_with = "trace")]
    context_length: Option<u32>,
    /// Folder for downloads [default: the hub's own cache].
    #[arg(long, value_name = "DIR", conflicts_with = "trace")]
    download_dir: Option<PathBuf>,
    /// Python interpreter [default: the one beside this program, else the virtual environment's,
    /// else python3].
    #[arg(long, env = "FOREBAY_PYTHON", value_name = "FILE")]
    python: Option<PathBuf>,
}

impl MemoryFlags {
    /// True if the planned memory is that of this machine, and a control group limits it.
    fn limited(&self) -> bool {
        self.device_memory.is_none() && Machine::here().memory().limit.is_some()
    }

    /// Bytes of free memory on a rank's device; `None`: unknown.
    fn free(&self) -> Option<u64> {
        let here = || Machine::here().memory().available;
        self.device_memory.or_else(|| (self.device == PlannedDevice::Cpu).then(here).flatten())
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum PlannedDevice {
    #[default]
    Cuda,
    Cpu,
}

/// Runs `forebay plan`.
pub(crate) fn run(flags: &PlanFlags) -> Result<()> {
    let arrangement = flags.ranks.arrangement()?;
    let Some(name) = &flags.plan.model else {
        if arrangement.replicas > 1 {
            bail!("--dp-size needs --model: a plan for traffic computes the number of replicas");
        }
        if arrangement.expert_parallel {
            bail!("--enable-expert-parallel needs --model: a profile's times include its ranks");
        }
        return forebay_capacity::plan(&flags.plan, arrangement.ranks);
    };
    let python = find_python(flags.memory.python.as_deref());
    let source = Source { download_dir: flags.memory.download_dir.as_deref(), ..Source::default() };
    let model = fetch(&python, name, source, false, Hand::Auto)?;
    let config = hand(flags, &model, arrangement)?;
    let free = flags.memory.free().unwrap_or(0);
    let memory = Memory {
        model: model.name.clone(),
        device: config.device.clone(),
        dtype: config.dtype.clone(),
        kv_cache_dtype: config.kv_cache_dtype.clone(),
        page_size: config.page_size,
        replicas: arrangement.replicas,
        groups: arrangement.groups,
        ranks: match Chosen::new(Hand::Auto, &config, arrangement.ranks, &model)?.hand {
            "rust" => vec![own(&config, free)?],
            _ => ask(&python, &config, free)?,
        },
    };
    std::io::stdout().write_all(memory.text().as_bytes())?;
    if let Some(path) = &flags.plan.output_file {
        let text = serde_json::to_string_pretty(&memory)?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// The configuration of a group's ranks, as far as it affects memory.
fn hand(flags: &PlanFlags, model: &Model, arrangement: Arrangement) -> Result<HandConfig> {
    let PlanFlags { plan, memory, .. } = flags;
    if memory.free().is_none() && plan.max_total_tokens.is_none() {
        bail!("--model needs --device-memory, or --max-total-tokens for the pages");
    }
    let cuda = memory.device == PlannedDevice::Cuda;
    let device = if cuda { "cuda" } else { "cpu" };
    let context_length = memory.context_length.unwrap_or(model.context_length);
    if !(2..=model.context_length).contains(&context_length) {
        bail!("--context-length {context_length}: 2 to {}, the model's", model.context_length);
    }
    let mut told = model.told();
    if model.format == "gguf" {
        told["manifest"] = model.manifest()?;
    }
    Ok(HandConfig {
        model: told,
        // A GGUF file is on this machine, and the hand may keep its blocks. Other models need no
        // weight files.
        load_format: if model.format == "gguf" { "auto" } else { "dummy" }.to_owned(),
        quantization: own_blocks(model, memory.dtype, !cuda && arrangement.ranks == 1)
            .map(Quantization::name),
        device: device.to_owned(),
        dtype: dtype(memory.dtype, cuda).to_owned(),
        kv_cache_dtype: kv_cache_dtype(memory.kv_cache_dtype, device, arrangement.ranks)?.told(),
        page_size: plan.page_size,
        slots: EngineConfig::usual_slots(plan.max_running_requests),
        context_length,
        chunked_prefill_size: plan.chunked_prefill_size,
        max_running_requests: plan.max_running_requests,
        mem_fraction_static: mem_fraction(
            memory.mem_fraction_static,
            cuda,
            memory.limited(),
            arrangement.hands(),
        ),
        max_total_tokens: plan.max_total_tokens,
        window_ratio: flags.windows.ratio().filter(|_| arrangement.ranks == 1),
        world_size: arrangement.ranks,
        expert_parallel: arrangement.expert_parallel,
        step_group: arrangement.step_group(),
        kv_save_order: "behind".to_owned(),
        ..HandConfig::default()
    })
}

/// Computes the memory of a rank of the Rust hand.
fn own(config: &HandConfig, free: u64) -> Result<RankMemory> {
    let found = footprint(config, free).map_err(|why| anyhow!("{why}"))?;
    Ok(RankMemory {
        weight_bytes: found.weight_bytes,
        page_bytes: found.page_bytes,
        page_count: found.page_count,
        window_page_bytes: found.window_page_bytes,
        window_page_count: found.window_page_count,
        kv_bytes: found.kv_bytes,
        state_bytes: found.state_bytes,
    })
}

/// Runs Python to compute the memory of each rank of the PyTorch hand.
fn ask(python: &Path, config: &HandConfig, free: u64) -> Result<Vec<RankMemory>> {
    python::check(python)?;
    let mut asked = format!("{free}\n");
    for rank in 0..config.world_size {
        asked += &serde_json::to_string(&HandConfig { rank, ..config.clone() })?;
        asked.push('\n');
    }
    let mut command = Command::new(python);
    without_keys(&mut command);
    let mut child = command
        .args(python::arguments(MODULE))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", python.display()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // If the process has exited, its exit status and stderr report the reason.
        let _ = stdin.write_all(asked.as_bytes());
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("the memory of these ranks can't be planned (see above)");
    }
    let found: Result<Vec<RankMemory>, _> =
        Deserializer::from_slice(&output.stdout).into_iter().collect();
    let found = found.with_context(|| format!("{MODULE} printed no memory"))?;
    if found.len() != config.world_size as usize {
        bail!("{MODULE} printed the memory of {} ranks", found.len());
    }
    Ok(found)
}

fn gigabytes(text: &str) -> Result<u64, String> {
    let given: Option<f64> = text.parse().ok().filter(|gb| (0.001..=1e6).contains(gb));
    given.map(|gb| (gb * 1e9) as u64).ok_or_else(|| "expected GB from 0.001 to 1000000".to_owned())
}
