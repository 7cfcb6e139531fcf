//! Resolves the configuration of the hands.

use anyhow::{Result, bail};
use forebay_engine::EngineConfig;
use forebay_hand::HandConfig;
use forebay_machine::{Machine, Processors};

use super::device::DeviceSettings;
use super::kv_cache::{check_floats, kv_cache_dtype};
use super::windows::why_one_pool;
use super::{states, tiers};
use crate::affinity::threads_each;
use crate::flags::{
    AttentionBackend, Device, Dtype, LoadFormat, Quantization, RunFlags, ServeFlags,
};
use crate::model::Model;

/// The default share of memory on a CPU: it leaves most of a laptop's memory to other programs.
const CPU_MEM_FRACTION: f64 = 0.3;
/// The default share under a control group's memory limit, since that memory is meant for this
/// server. Besides this share and the memory for requests, at most a quarter, enough memory remains
/// for the brain.
const LIMITED_MEM_FRACTION: f64 = 0.6;
/// The default of `--mem-fraction-static` on CUDA. Other programs use little GPU memory, and the
/// memory that a step takes is measured.
const CUDA_MEM_FRACTION: f64 = 0.9;
/// The share of free memory for all host tiers together. The rest is for the brain and other
/// programs.
const HOST_SHARE: f64 = 0.8;
/// The default size of the weight cache: enough for one model of seven billion parameters in
/// bfloat16, but not for two.
const WEIGHT_CACHE_GIB: u32 = 16;

/// The configuration that all hands share; their ranks differ.
pub(super) fn resolve(
    flags: &ServeFlags,
    model: &Model,
    device: &DeviceSettings,
    engine: &EngineConfig,
    machine: &Machine,
) -> Result<HandConfig> {
    let ServeFlags { loading, schedule, run, .. } = flags;
    let (arrangement, cuda) = (device.arrangement, device.cuda());
    let attention_backend = run.attention_backend.map(AttentionBackend::name);
    let graph_rows = graph_rows(run, device.device, engine.max_running_requests)?;
    let (quantization, kv_cache_dtype) = if device.simulated.is_some() {
        (None, None)
    } else {
        let alone = device.device == Device::Cpu && arrangement.ranks == 1;
        let quantization = quantization(flags, model, alone)?;
        check_floats(loading.kv_cache_dtype, model, attention_backend)?;
        let keys = kv_cache_dtype(loading.kv_cache_dtype, device.name(), arrangement.ranks)?;
        (quantization, keys.told())
    };
    // On other machines, only the hands of one replica share a machine.
    let together = if device.apart { arrangement.ranks } else { arrangement.hands() };
    // Memory limits of other machines are not known here.
    let limited = machine.memory().limit.is_some() && !device.apart;
    let simulated = device.simulated.is_some();
    // All heads use the same latent rows, so each rank has equal rows and the ranks can share a
    // host tier.
    let host_shared = engine.host_tier.is_some() && arrangement.tp_size() > 1 && model.is_latent();
    let tiers = if host_shared { arrangement.groups } else { arrangement.hands() };
    Ok(HandConfig {
        model: model.told(),
        load_format: match loading.load_format {
            LoadFormat::Auto => "auto",
            LoadFormat::Dummy => "dummy",
        }
        .to_owned(),
        device: device.name().to_owned(),
        dtype: if simulated { "none" } else { dtype(loading.dtype, cuda) }.to_owned(),
        quantization: quantization.map(Quantization::name),
        kv_cache_dtype,
        page_size: engine.page_size,
        slots: engine.slots,
        context_length: engine.context_length,
        chunked_prefill_size: engine.chunked_prefill_size,
        max_running_requests: engine.max_running_requests,
        attention_backend: attention_backend.map(str::to_owned),
        graph_rows,
        mem_fraction_static: mem_fraction(schedule.mem_fraction_static, cuda, limited, together),
        max_total_tokens: schedule.max_total_tokens,
        arena_bytes: run.arena_bytes.into(),
        expert_parallel: arrangement.expert_parallel,
        step_group: arrangement.step_group(),
        threads: threads(run.threads, device, &machine.processors()),
        seed: loading.seed,
        weight_cache_bytes: u64::from(loading.weight_cache_gib.unwrap_or(WEIGHT_CACHE_GIB)) << 30,
        // The hands read the free memory at about the same time, so each takes only its share of
        // it.
        host_share: HOST_SHARE / f64::from(tiers),
        host_shared,
        image_pool_tokens: flags.images.image_pool_tokens,
        // Without a prefix cache, a cached state would never be loaded.
        state_pages: if engine.prefix_cache { flags.states.pages() } else { Some(0) },
        window_ratio: flags.windows.ratio().filter(|_| why_one_pool(engine, device).is_none()),
        ..tiers::hand(flags, engine.host_tier.is_some())
    })
}

/// Lowers the number of running requests to what the machine's memory allows, if the model has
/// recurrent states. On other devices than CPUs, hands do this.
pub(super) fn bound_states(
    flags: &ServeFlags,
    model: &Model,
    device: &DeviceSettings,
    engine: &mut EngineConfig,
    machine: &Machine,
) {
    let memory = machine.memory();
    if device.device != Device::Cpu || device.apart {
        return;
    }
    let Some(available) = memory.available else { return };
    let (given, hands) = (flags.schedule.mem_fraction_static, device.arrangement.hands());
    let share = mem_fraction(given, false, memory.limit.is_some(), hands);
    let element = if dtype(flags.loading.dtype, false) == "float32" { 4 } else { 2 };
    states::bound(engine, model, element, (share * available as f64) as u64);
}

/// The number of threads of a hand on a CPU; `None`: the hand counts the cores itself.
fn threads(given: Option<u32>, device: &DeviceSettings, processors: &Processors) -> Option<u32> {
    let (affinity, hands) = (&device.cpu_affinity, device.arrangement.hands());
    // Hands on other machines do not use this machine's cores.
    if given.is_some() || device.apart {
        return given;
    }
    if hands > 1 && affinity.hands.is_empty() && device.device != Device::Sim {
        return Some(threads_each(processors, hands));
    }
    affinity.threads(processors)
}

/// Checks `--quantization` against the model. The hand checks that its kernels support the format,
/// and which formats a file contains.
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

/// Returns `auto` if a hand may compute with a GGUF file's blocks; `None`: it computes in the
/// model's data type.
///
/// `may`: the file is read by a single rank on a CPU.
pub(crate) fn own_blocks(model: &Model, dtype: Dtype, may: bool) -> Option<Quantization> {
    let may = may && model.format == "gguf" && model.pooling.is_none();
    (may && dtype == Dtype::Auto).then_some(Quantization::Auto)
}

/// The largest number of rows of a CUDA graph: by default all rows that a step may have. The
/// deferred device, which is for tests, has graphs only if a test requests them.
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

/// The share of free memory for a hand. The hands on a CPU read the same free memory at about the
/// same time, so `together` hands divide it. `limited`: a control group limits the memory.
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
            "no step has more rows"
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
            "graphs are used where a test asks for them"
        );
        for device in [Device::Cpu, Device::Sim] {
            assert_eq!(of(device, &[]).unwrap(), 0);
            assert_eq!(of(device, &["--enforce-eager"]).unwrap(), 0, "graphs are off in any case");
            for flags in [&["--cuda-graph-max-bs", "7"][..], &["--attention-backend", "torch"]] {
                let error = of(device, flags).unwrap_err().to_string();
                assert!(error.ends_with("are for --device cuda"), "{error}");
            }
        }
    }
}
