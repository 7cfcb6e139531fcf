//! The flags of `serve`, as typed. `resolve` derives defaults that depend on the model or machine.

mod access;
mod adapters;
mod batches;
mod dialect;
mod drafts;
mod duration;
mod fleet;
pub(crate) mod foreign;
mod grammar;
mod images;
mod limits;
mod listening;
mod pd;
mod ranks;
mod replicas;
mod responses;
mod schedule;
mod sharing;
mod sparse;
mod states;
mod text;
mod tiers;
mod windows;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_engine::EngineConfig;
use forebay_hand::MAX_ARENA_BYTES;
use forebay_server::ServerConfig;

pub(crate) use self::access::{AccessFlags, access, keys, visible_keys};
pub(crate) use self::adapters::AdapterFlags;
pub(crate) use self::batches::BatchFlags;
pub(crate) use self::dialect::DialectFlags;
pub(crate) use self::drafts::{DraftFlags, HandDrafts};
pub(crate) use self::duration::seconds;
pub(crate) use self::fleet::{FleetFlags, fleet_flags, server_flags};
pub(crate) use self::grammar::GrammarFlags;
pub(crate) use self::images::ImageFlags;
pub(crate) use self::listening::ListenFlags;
pub(crate) use self::pd::DisaggregationMode;
pub(crate) use self::ranks::{Arrangement, RankFlags};
pub(crate) use self::replicas::{Placement, ReplicaFlags};
pub(crate) use self::responses::ResponseFlags;
pub(crate) use self::schedule::{ScheduleFlags, fraction};
pub(crate) use self::states::StateFlags;

pub(crate) use limits::LimitFlags;
pub(crate) use sharing::SharingFlags;
pub(crate) use sparse::SparseFlags;
pub(crate) use text::{TextFlags, TokenizerBackend, TokenizerMode};
pub(crate) use tiers::{Preemption, TierFlags};
pub(crate) use windows::WindowFlags;

#[derive(Debug, Args)]
pub(crate) struct ServeFlags {
    /// `smollm2` (SmolLM2-135M-Instruct), a hub id (org/name, org/name@revision, org/name:Q4_K_M or
    /// org/name/file.gguf), a directory, or a .gguf file. If several models are given, each is
    /// loaded when a request names it.
    #[arg(value_name = "MODEL", required_unless_present_any = ["model_path", "models_dir", "models_config"])]
    pub(crate) model: Vec<String>,
    /// SGLang's flag for MODEL.
    #[arg(long, value_name = "MODEL", conflicts_with = "model")]
    pub(crate) model_path: Option<String>,
    #[command(flatten)]
    pub(crate) listen: ListenFlags,
    #[command(flatten)]
    pub(crate) http: HttpFlags,
    #[command(flatten)]
    pub(crate) access: AccessFlags,
    #[command(flatten)]
    pub(crate) limits: LimitFlags,
    #[command(flatten)]
    pub(crate) sharing: SharingFlags,
    #[command(flatten)]
    pub(crate) responses: ResponseFlags,
    #[command(flatten)]
    pub(crate) batches: BatchFlags,
    #[command(flatten)]
    pub(crate) text: TextFlags,
    #[command(flatten)]
    pub(crate) dialect: DialectFlags,
    #[command(flatten)]
    pub(crate) loading: ModelFlags,
    #[command(flatten)]
    pub(crate) fleet: FleetFlags,
    #[command(flatten)]
    pub(crate) schedule: ScheduleFlags,
    #[command(flatten)]
    pub(crate) drafts: DraftFlags,
    #[command(flatten)]
    pub(crate) grammar: GrammarFlags,
    #[command(flatten)]
    pub(crate) images: ImageFlags,
    #[command(flatten)]
    pub(crate) states: StateFlags,
    #[command(flatten)]
    pub(crate) windows: WindowFlags,
    #[command(flatten)]
    pub(crate) adapters: AdapterFlags,
    #[command(flatten)]
    pub(crate) tiers: TierFlags,
    #[command(flatten)]
    pub(crate) sparse: SparseFlags,
    #[command(flatten)]
    pub(crate) replicas: ReplicaFlags,
    #[command(flatten)]
    pub(crate) run: RunFlags,
    #[command(flatten)]
    pub(crate) sim: SimFlags,
    #[command(flatten)]
    pub(crate) log: LogFlags,
}

impl ServeFlags {
    /// The given flags that have no effect on a simulated device, because they are about arithmetic
    /// or memory.
    pub(crate) fn without_effect_on_sim(&self) -> Vec<&'static str> {
        [
            ("--dtype", self.loading.dtype != Dtype::Auto),
            ("--load-format", self.loading.load_format != LoadFormat::Auto),
            ("--quantization", self.loading.quantization != Quantization::Auto),
            ("--kv-cache-dtype", self.loading.kv_cache_dtype != KvCacheDtype::Auto),
            ("--weight-cache-gib", self.loading.weight_cache_gib.is_some()),
            ("--mem-fraction-static", self.schedule.mem_fraction_static.is_some()),
            ("--threads", self.run.threads.is_some()),
            ("--disable-hybrid-kv-cache-manager", self.windows.disable_hybrid_kv_cache_manager),
        ]
        .into_iter()
        .filter_map(|(flag, given)| given.then_some(flag))
        .collect()
    }

    /// The model as typed, as MODEL or with --model-path.
    pub(crate) fn model_name(&self) -> Option<&str> {
        self.named().next()
    }

    /// The models that the command line names.
    pub(crate) fn named(&self) -> impl Iterator<Item = &str> {
        self.model.iter().chain(&self.model_path).map(String::as_str)
    }

    /// True if models are loaded on demand. A single named model is loaded at start and stays.
    pub(crate) fn is_fleet(&self) -> bool {
        let FleetFlags { models_dir, models_config, models_max, models_memory, .. } = &self.fleet;
        self.model.len() > 1
            || models_dir.is_some()
            || models_config.is_some()
            || models_max.is_some()
            || models_memory.is_some()
            || self.fleet.sleep_idle_seconds.is_some()
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "HTTP")]
pub(crate) struct HttpFlags {
    /// Names by which requests may call the model. The first is the name in logs, and in answers to
    /// requests that name no model [default: the model's own name, and MODEL].
    #[arg(long, num_args = 1..)]
    pub(crate) served_model_name: Vec<String>,
    /// Answer 400 to requests with a parameter that has no effect. Without the flag, the header
    /// x-forebay-ignored names such parameters.
    #[arg(long)]
    pub(crate) strict_params: bool,
    /// Do not serve the web page at `/`. The API routes that the page uses remain.
    #[arg(long)]
    pub(crate) no_webui: bool,
    /// Let requests that arrive while the model loads wait for it. Without the flag they are
    /// answered 503.
    #[arg(long)]
    pub(crate) queue_while_loading: bool,
    /// Longest time in seconds for a request's head to arrive, and again for its body. An idle
    /// connection is closed after the same time.
    #[arg(long, default_value = "60", value_parser = seconds)]
    pub(crate) receive_timeout: Duration,
    /// Seconds after which a client that does not read is disconnected, and its request aborted.
    #[arg(long, default_value = "60", value_parser = seconds)]
    pub(crate) send_timeout: Duration,
    /// Largest number of bytes of an answer that the client has not read; beyond it, the stream
    /// ends with an error.
    #[arg(long, default_value_t = ServerConfig::default().max_unread_bytes)]
    pub(crate) max_unread_bytes: usize,
    /// Number of threads that parse requests, and write the heads and ends of responses.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) http_threads: u16,
    /// Number of threads that detokenise and write streams [default: 1, and one more for every 16
    /// cores].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) egress_threads: Option<u16>,
    /// Threads that write a stream's chunks. `direct`: the egress threads. `tasks`: connection
    /// tasks, which wake when chunks are pending. `naive`: connection tasks, which wake for every
    /// token. The last two are for measurements.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) egress: Egress,
    /// Tokens in a chunk of a stream; requests may override it. The first token and the end of the
    /// stream are not delayed.
    #[arg(long, default_value_t = ServerConfig::default().stream_interval, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) stream_interval: u32,
    /// Shortest time in microseconds between two chunks of a stream; tokens in between are merged.
    /// The first token and the end of the stream are not delayed.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=60_000_000))]
    pub(crate) stream_flush_us: u64,
    /// Number of threads that apply chat templates and tokenise [default: 2, or 1 if the process
    /// may use only one processor].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) text_threads: Option<u16>,
    /// Number of threads that parse large requests and copy embeddings to the arena. If the model
    /// takes images, as many further threads decode them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) intake_threads: u16,
    /// For measurements: do the work of the intake threads on the engine thread, which delays
    /// steps.
    #[arg(long)]
    pub(crate) inline_intake: bool,
    /// Seconds for running requests to finish after SIGTERM.
    #[arg(long, default_value = "30", value_parser = seconds)]
    pub(crate) drain_timeout: Duration,
}

impl HttpFlags {
    /// The shortest time between two chunks of a stream.
    pub(crate) fn stream_flush(&self) -> Duration {
        Duration::from_micros(self.stream_flush_us)
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelFlags {
    /// Branch, tag or commit on the hub.
    #[arg(long)]
    pub(crate) revision: Option<String>,
    /// Folder for downloads [default: the hub's own cache].
    #[arg(long, value_name = "DIR")]
    pub(crate) download_dir: Option<PathBuf>,
    /// Use only files that were downloaded before.
    #[arg(long)]
    pub(crate) offline: bool,
    /// Serve a causal model as an embedding model: /v1/embeddings returns the state of the last
    /// token. Encoders, and repositories with sentence-transformers settings, need no flag.
    #[arg(long)]
    pub(crate) is_embedding: bool,
    /// Code that computes the model. `native` is Forebay's own code. `transformers` is the code of
    /// that library, in PyTorch: it supports nearly every model, but is slower. `auto` is `native`
    /// if there is native code for the model, otherwise `transformers`.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) model_impl: ModelImpl,
    /// Source of the weights: `auto` reads the model's files. `dummy` fills the weights with random
    /// numbers, and needs only the config and tokenizer files.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) load_format: LoadFormat,
    /// Data type of the model; `auto` is bfloat16 on CUDA and on processors with native bfloat16
    /// arithmetic, else float32.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) dtype: Dtype,
    /// Weight format for matrix products. `auto` is `gguf` for a GGUF file on a CPU unless --dtype
    /// is given, and otherwise `none`: weights in DTYPE. `w8a8_int8` quantises weights to 8-bit
    /// integers at load. `gguf` computes with the file's blocks: Q8_0, Q4_0, Q4_1, IQ4_NL and MXFP4
    /// unchanged, Q4_K as Q4_1, IQ4_XS as IQ4_NL, other blocks as Q8_0, and all other tensors in
    /// DTYPE. `w8a8_int8` and `gguf` need the compiled kernels. `fp8` quantises to 8-bit floats on
    /// a GPU. A quantised checkpoint needs no flag; naming `fp8`, `awq`, `gptq` or
    /// `compressed-tensors` only checks its format.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) quantization: Quantization,
    /// Data type of the KV cache; `auto` follows --dtype. `int8` (CPU): 8-bit integers with a scale
    /// for every 32, which take 34 bytes instead of the 64 of bfloat16. It needs the compiled
    /// kernels, head sizes in multiples of 32, and pages in multiples of 16 tokens. `fp8_e4m3`
    /// (`fp8`, GPU): 8-bit floats without scales. It needs the Triton kernels, and a generating
    /// model without latent attention.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) kv_cache_dtype: KvCacheDtype,
    /// Disk space in GiB for caching packed weights, so that the next start loads them directly; 0:
    /// no cache [default: 16].
    #[arg(long, value_name = "GIB", value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    pub(crate) weight_cache_gib: Option<u32>,
    /// Largest total number of tokens of prompt and answer [default: the model's].
    #[arg(long, visible_alias = "max-model-len", value_name = "TOKENS")]
    pub(crate) context_length: Option<u32>,
    /// File with a Jinja chat template that replaces the model's.
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Source of default sampling parameters.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) generation_config: GenerationConfig,
    /// Seed of dummy weights, and of the random variation of a simulated device's step times.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Hand")]
pub(crate) struct RunFlags {
    /// Device of the model: `auto` is `cuda` if there is an NVIDIA GPU, and otherwise `cpu`. Each
    /// rank uses one of the GPUs in `CUDA_VISIBLE_DEVICES`. `sim` is a simulated device, which
    /// answers with made-up words and takes the step times of --sim-profile.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) device: Device,
    /// Implementation of the hand (the process that computes the model) on CPUs. `rust` is built
    /// into this program. `torch` is the reference implementation in Python with PyTorch, which
    /// supports every model. `auto` is `rust` if it supports the model and all flags, and otherwise
    /// `torch`.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) hand: Hand,
    /// Implementation of attention on CUDA [default: triton].
    #[arg(long, value_enum)]
    pub(crate) attention_backend: Option<AttentionBackend>,
    /// Run without CUDA graphs.
    #[arg(long, visible_alias = "disable-cuda-graph", conflicts_with = "cuda_graph_max_bs")]
    pub(crate) enforce_eager: bool,
    /// Largest number of rows of a CUDA graph. Larger steps launch each operator separately
    /// [default: --max-running-requests].
    #[arg(long, visible_alias = "max-cudagraph-capture-size", value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cuda_graph_max_bs: Option<u32>,
    /// Number of compute threads of a hand [default: one for each physical core that the hand may
    /// use, within the CPU quota of its control group].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) threads: Option<u32>,
    /// Seconds without a result after which a hand counts as hung and is restarted.
    #[arg(long, default_value = "300", value_parser = seconds)]
    pub(crate) watchdog_timeout: Duration,
    /// Seconds without progress after which a starting hand counts as hung; loading any part of the
    /// weights is progress. 0: no limit.
    #[arg(long, default_value = "600", value_parser = seconds)]
    pub(crate) load_timeout: Duration,
    /// Size in bytes of the shared memory that carries embeddings and images to the hand. Requests
    /// wait while it is full. Only used parts take physical memory.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, value_parser = clap::value_parser!(u32).range(65536..=i64::from(MAX_ARENA_BYTES)))]
    pub(crate) arena_bytes: u32,
    /// Number of consecutive failed restarts after which a hand is given up. While other replicas
    /// serve, it is retried later, with growing pauses. When no replica is left, the server exits
    /// with status 1. Deaths after a successful start do not count.
    #[arg(long, default_value_t = EngineConfig::default().hand_restarts)]
    pub(crate) hand_restarts: u32,
    /// Python interpreter [default: the one beside this program, else the virtual environment's,
    /// else python3].
    #[arg(long, env = "FOREBAY_PYTHON", value_name = "FILE")]
    pub(crate) python: Option<PathBuf>,
    /// Id of the parent process. This process exits when the parent does.
    #[arg(long, value_name = "PID", hide = true)]
    pub(crate) parent: Option<i32>,
    /// Write the load and the time of each step to this file, one JSON object per line (see
    /// `forebay sim fit`).
    #[arg(long, value_name = "FILE")]
    pub(crate) record_steps: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Simulated device (--device sim)")]
pub(crate) struct SimFlags {
    /// Step times: a profile that `forebay sim profiles` lists, or a TOML file. A comma-separated
    /// list has one profile for each replica [default: instant].
    #[arg(long, value_name = "NAME|FILE", value_delimiter = ',')]
    pub(crate) sim_profile: Vec<String>,
    /// Mean length of simulated answers that end with the end-of-sequence token. Lengths are
    /// uniform from 1 to nearly twice this [default: 256].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(crate) sim_output_tokens: Option<u32>,
    /// Largest number of tokens that a step generates for a request, as with speculative decoding;
    /// a hash chooses the number for each step [default: 1].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) sim_tokens_a_row: Option<u32>,
    /// File with answers that the simulated device gives instead of made-up words, as JSON lines:
    /// see docs/simulation.md.
    #[arg(long, value_name = "FILE")]
    pub(crate) sim_script: Option<PathBuf>,
}

impl SimFlags {
    /// True if a flag of the simulation was given.
    pub(crate) fn given(&self) -> bool {
        let numbers = [self.sim_output_tokens, self.sim_tokens_a_row];
        let given = !self.sim_profile.is_empty() || self.sim_script.is_some();
        given || numbers.iter().any(Option::is_some)
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Logs")]
pub(crate) struct LogFlags {
    #[command(flatten)]
    pub(crate) lines: LineFlags,
    /// Seconds between step log lines; 0 for none.
    #[arg(long, default_value = "10", value_parser = seconds)]
    pub(crate) log_interval: Duration,
    /// OTLP/HTTP endpoint for tracing spans, for example http://127.0.0.1:4318/v1/traces.
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_traces_endpoint: Option<String>,
}

/// The content and format of log lines.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logs")]
pub(crate) struct LineFlags {
    /// Log level (error, warn, info, debug, trace), or a filter such as
    /// `info,forebay_engine=debug`.
    #[arg(long, default_value = "info")]
    pub(crate) log_level: String,
    /// Format of log lines: one JSON object per line, or text.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoadFormat {
    #[default]
    Auto,
    Dummy,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    #[default]
    Auto,
    #[value(alias = "bf16")]
    Bfloat16,
    #[value(alias = "float", alias = "fp32")]
    Float32,
}

/// The weight format for matrix products: that of the model's files, or one that is computed at
/// load. The names are those of vLLM and SGLang.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Quantization {
    /// `gguf` for a GGUF file on a CPU, otherwise `none`.
    #[default]
    Auto,
    /// Weights in DTYPE.
    None,
    /// 8-bit weights with a scale per output channel, 8-bit activations with a scale per token.
    #[value(name = "w8a8_int8")]
    W8A8Int8,
    /// The GGUF file's blocks of 8-bit or 4-bit weights, with a scale for every 32 weights.
    Gguf,
    /// 8-bit floats: the checkpoint's own, or quantised at load.
    #[value(aliases = ["fbgemm_fp8", "w8a8_fp8"])]
    Fp8,
    /// The checkpoint's 4-bit integers.
    #[value(alias = "awq_marlin")]
    Awq,
    /// The checkpoint's 4-bit integers.
    #[value(alias = "gptq_marlin")]
    Gptq,
    /// The format that the checkpoint's config names.
    #[value(name = "compressed-tensors")]
    CompressedTensors,
}

impl Quantization {
    /// The name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The data type of the KV cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvCacheDtype {
    /// The model's data type.
    #[default]
    Auto,
    /// 8-bit integers with a scale for every 32.
    #[value(alias = "q8_0")]
    Int8,
    /// 8-bit floats without scales.
    #[value(name = "fp8_e4m3", alias = "fp8")]
    Fp8E4m3,
}

impl KvCacheDtype {
    /// The name in a hand's configuration; `None`: the model's data type.
    pub(crate) fn told(self) -> Option<String> {
        match self {
            Self::Auto => None,
            Self::Int8 => Some("int8".into()),
            Self::Fp8E4m3 => Some("fp8_e4m3".into()),
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Egress {
    #[default]
    Direct,
    Tasks,
    Naive,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AttentionBackend {
    /// Forebay's own kernels.
    #[value(alias = "TRITON_ATTN")]
    Triton,
    /// PyTorch's operators: slow, but without further requirements.
    #[value(aliases = ["torch_native", "sdpa", "TORCH_SDPA"])]
    Torch,
    /// FlashAttention 3 on Hopper in bfloat16, if `flash_attn_interface` is installed; without CUDA
    /// graphs.
    #[value(aliases = ["flash_attn", "FLASH_ATTN"])]
    Fa3,
}

impl AttentionBackend {
    /// The name in a hand's configuration.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Triton => "triton",
            Self::Torch => "torch",
            Self::Fa3 => "fa3",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// `cuda` if there is an NVIDIA GPU, otherwise `cpu`.
    #[default]
    Auto,
    Cpu,
    Cuda,
    Sim,
    /// For tests: a CPU that completes work as late as an accelerator may.
    #[value(hide = true)]
    Deferred,
}

/// The code that computes a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelImpl {
    #[default]
    Auto,
    Native,
    Transformers,
}

/// The hand on a CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Hand {
    #[default]
    Auto,
    Rust,
    Torch,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum GenerationConfig {
    /// The model's generation_config.json. A GGUF file has parameters of its own
    /// (`general.sampling.*`); llama.cpp's defaults replace missing ones.
    #[default]
    Auto,
    /// OpenAI's defaults.
    None,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}
