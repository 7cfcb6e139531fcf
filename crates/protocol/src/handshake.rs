//! The JSON frames: the messages between brain and hand before the first plan, about adapters, and
//! after a failure.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::dtype::Dtype;
use crate::frame::{Frame, FrameError, Kind, encode_json};

/// The memory of a hand for adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceConfig {
    /// The number of places, which is the number of adapters that one step may use.
    pub places: u32,
    /// The largest rank of an adapter.
    pub rank: u32,
    /// The number of additional adapters that the hand keeps in the host's memory.
    pub kept: u32,
}

impl Default for PlaceConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        Self { places: 8, rank: 64, kept: 32 }
    }
}

/// A message with its own kind of frame.
pub trait Message: Serialize + DeserializeOwned {
    /// The kind of the frame.
    const KIND: Kind;

    /// Encodes the message as a frame.
    ///
    /// # Errors
    /// The frame would be too large.
    fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let text = serde_json::to_string(self).map_err(|error| unfit(Self::KIND, &error))?;
        encode_json(Self::KIND, &text)
    }

    /// Decodes a message of this kind. Unknown fields are ignored.
    ///
    /// # Errors
    /// The frame is of another kind, or a field is missing or of another type. The error names the
    /// field.
    fn decode(frame: &Frame) -> Result<Self, FrameError> {
        if frame.header().kind != Self::KIND {
            return Err(FrameError::Malformed("another kind of message"));
        }
        serde_json::from_str(frame.json()?).map_err(|error| unfit(Self::KIND, &error))
    }
}

fn unfit(kind: Kind, error: &serde_json::Error) -> FrameError {
    FrameError::Message { kind, reason: error.to_string() }
}

/// Hand to brain, the first message: the process has started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The process id of the hand.
    pub pid: u32,
}

/// A draft model with the same vocabulary as the target model, or a draft head of the target model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DraftModelConfig {
    /// The description of the model, made by the brain.
    pub model: Value,
    /// The largest number of draft tokens per row.
    pub tokens: u32,
}

/// Brain to hand: the configuration, with all defaults resolved.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HandConfig {
    /// The description of the model, made by the brain (docs/protocol.md).
    pub model: Value,
    /// `auto`, or `dummy` for random weights from `seed`.
    pub load_format: String,
    /// The kind of device.
    pub device: String,
    /// The name of the data type: a [`Dtype`].
    pub dtype: String,
    /// The weight format of matrix products, if it is not `dtype`. `auto`: compute in a GGUF file's
    /// quantised blocks if the hand has fast kernels for them.
    pub quantization: Option<String>,
    /// The data type of the KV cache (`int8`, `fp8_e4m3`), if it is not `dtype`.
    pub kv_cache_dtype: Option<String>,
    /// The number of positions of a page.
    pub page_size: u32,
    /// The number of slots in the device tables.
    pub slots: u32,
    /// The largest number of positions of a request.
    pub context_length: u32,
    /// The largest number of tokens of a step.
    pub chunked_prefill_size: u32,
    /// The largest number of running requests, and so of rows in a step.
    pub max_running_requests: u32,
    /// The attention backend (`triton`, `torch`, `fa3`); `None` for the best one of the device.
    pub attention_backend: Option<String>,
    /// The largest number of rows of a CUDA graph; 0 disables CUDA graphs.
    pub graph_rows: u32,
    /// The fraction of the device's memory for weights and pages. The fraction includes the memory
    /// of steps if the hand measures that memory.
    pub mem_fraction_static: f64,
    /// The size of the KV pool in tokens; `None` derives it from the memory.
    pub max_total_tokens: Option<u64>,
    /// The size of the arena in bytes.
    pub arena_bytes: u64,
    /// The rank of the hand in its group.
    pub rank: u32,
    /// The number of ranks in the group.
    pub world_size: u32,
    /// True for expert parallelism, where each rank has whole experts; false if each expert is
    /// split like any matrix.
    pub expert_parallel: bool,
    /// True if the ranks form a step group: each has plans, pages and requests of its own, and only
    /// experts are shared.
    pub step_group: bool,
    /// The number of compute threads on a CPU; `None` for the number of cores, limited by the CPU
    /// quota.
    pub threads: Option<u32>,
    /// The seed of dummy weights.
    pub seed: u64,
    /// The largest size of the cache of packed weights in bytes; 0 disables it.
    pub weight_cache_bytes: u64,
    /// The size of the host tier in bytes. There is no host tier if neither `host_bytes` nor
    /// `host_ratio` is set.
    pub host_bytes: Option<u64>,
    /// The size of the host tier as the number of host pages per page of the device.
    pub host_ratio: Option<f64>,
    /// True if `host_ratio` is only an upper limit: the hand takes as much memory as it can get.
    pub host_fits: bool,
    /// The number of pages in the host tier if the tier and its content are those of an earlier
    /// hand.
    pub host_pages: Option<u32>,
    /// True if pages have the same content on all ranks. The ranks then share one host tier, which
    /// the first rank writes.
    #[serde(default)]
    pub host_shared: bool,
    /// Like `host_pages`, for the state pages in the host tier.
    pub host_state_pages: Option<u32>,
    /// The file descriptors of the host tiers that are lent to this hand, by replica number; `None`
    /// for the hand's own. Empty if no tier is lent.
    #[serde(default)]
    pub host_lenders: Vec<Option<u32>>,
    /// The largest fraction of the free host memory that the host tier may take. Memory that
    /// weights and pages take does not count as free.
    pub host_share: f64,
    /// The limit on the speed of copies, in GB per second; for tests.
    pub copy_gbps: Option<f64>,
    /// True if checksums of pages are stored and checked; for tests.
    pub kv_checksum: bool,
    /// The number of positions that a sparse slot caches on the device, at least the model's top-k;
    /// 0 for twice the top-k. `None` if slots never become sparse.
    pub hot_row_tokens: Option<u32>,
    /// The number of positions that a row selects, if the user set it. It must equal the model's
    /// own value.
    pub sparse_top_k: Option<u32>,
    /// The total number of positions of all image pages; `None` lets the hand choose.
    pub image_pool_tokens: Option<u64>,
    /// The number of state pages, if the model has recurrent layers; `None` lets the hand choose.
    pub state_pages: Option<u32>,
    /// The ratio of the number of pages in the window part to that in the main part, if layers with
    /// a sliding window may have separate pages. `None` if all layers share one pool.
    #[serde(default)]
    pub window_ratio: Option<f64>,
    /// The memory for adapters; `None` if adapters are not served.
    pub lora: Option<PlaceConfig>,
    /// The draft model or draft head that the hand runs; `None` if there is none.
    pub draft: Option<DraftModelConfig>,
    /// The work that waits until saves are done. `behind`: none; `fence`: the rows of the next
    /// plan; `inline`: the next plan.
    pub kv_save_order: String,
}

impl HandConfig {
    /// The number of host tiers of a group with this many ranks: one per rank, or one that all
    /// ranks share.
    #[must_use]
    pub fn host_tiers(&self, ranks: usize) -> usize {
        if self.host_shared { 1 } else { ranks }
    }
}

/// Hand to brain, between `config` and `ready`: a request to the store through which the ranks find
/// each other. Values are in base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRequest {
    /// The id of the request, which the response repeats.
    pub id: u64,
    /// The requested operation.
    #[serde(flatten)]
    pub op: StoreOp,
}

/// The operations of the store, as in PyTorch's stores (`torch.distributed.Store`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum StoreOp {
    /// Sets a value.
    Set {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
    /// Returns a value, and waits until it exists.
    Get {
        /// The key.
        key: String,
    },
    /// Adds to a number that is 0 at first. The response is the sum.
    Add {
        /// The key.
        key: String,
        /// The number to add.
        amount: i64,
    },
    /// Checks whether all keys exist. The response is 1 or 0.
    Check {
        /// The keys.
        keys: Vec<String>,
    },
    /// Waits until all keys exist.
    Wait {
        /// The keys.
        keys: Vec<String>,
    },
    /// Sets a value if the current one equals `expected`. The response is the resulting value.
    CompareSet {
        /// The key.
        key: String,
        /// The expected value. If empty, the key must not exist.
        expected: String,
        /// The new value.
        value: String,
    },
    /// Removes a key. The response is 1 if it existed, otherwise 0.
    Delete {
        /// The key.
        key: String,
    },
    /// Returns the number of keys.
    Count,
}

/// Brain to hand: the response of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreReply {
    /// The id of the request.
    pub id: u64,
    /// The value in base64, if the operation returns one.
    pub value: Option<String>,
    /// The number, if the operation returns one.
    pub number: Option<i64>,
}

/// Hand to brain: the progress of loading, which also shows that the hand is alive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The name of the loading stage.
    pub stage: String,
    /// The number of items that are loaded.
    pub done: u64,
    /// The total number of items.
    pub total: u64,
}

/// Hand to brain: the hand is ready for plans. The message describes the device and its memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// The number of pages in the KV pool. 0 if the model has no KV cache; its prompts must then
    /// not be split over steps.
    pub page_count: u32,
    /// The number of rows of the output head.
    pub vocab_size: u32,
    /// The number of elements of an embedding.
    pub hidden_size: u32,
    /// The data type of the model's activations, and of prompts given as embeddings.
    pub dtype: Dtype,
    /// The size of the weights in memory, in bytes.
    pub weight_bytes: u64,
    /// The size of the KV pool in bytes.
    pub kv_bytes: u64,
    /// The device's name.
    pub device: String,
    /// Seconds from the start of the process to `ready`, by the hand's clock.
    pub load_seconds: f64,
    /// The largest number of tokens that a sampling row may return.
    #[serde(default = "one")]
    pub tokens_a_row: u32,
    /// True if the hand verifies draft tokens from the brain.
    #[serde(default)]
    pub verifies_drafts: bool,
    /// The number of pages in the host tier; 0 if there is none.
    #[serde(default)]
    pub host_page_count: u32,
    /// The size of a page over all layers in bytes; 0 if there are no pages or the size is unknown.
    #[serde(default)]
    pub page_bytes: u64,
    /// The number of positions that a sparse slot caches on the device, in whole pages; 0 if slots
    /// never become sparse.
    #[serde(default)]
    pub hot_row_tokens: u32,
    /// The number of layers of the vision tower; 0 if there is none.
    #[serde(default)]
    pub tower_layers: u32,
    /// The number of image pages; 0 if there is no vision tower.
    #[serde(default)]
    pub image_page_count: u32,
    /// The number of positions of an image page.
    #[serde(default)]
    pub image_page_tokens: u32,
    /// The number of captured CUDA graphs; 0 if every step launches its kernels one by one.
    #[serde(default)]
    pub graphs: u32,
    /// A description of the matrices that are computed in a GGUF file's quantised blocks: the
    /// number of matrices of each block type, and of the others. Empty if there are none.
    #[serde(default)]
    pub blocks: String,
    /// The size of the memory for adapters in places, in bytes.
    #[serde(default)]
    pub lora_bytes: u64,
    /// The modules that adapters may change, given by the last components of their names.
    #[serde(default)]
    pub lora_modules: Vec<String>,
    /// True if prompts must be token ids, because the model takes no embeddings.
    #[serde(default)]
    pub tokens_only: bool,
    /// The number of state pages; 0 if only the slots keep states.
    #[serde(default)]
    pub state_page_count: u32,
    /// The size of the recurrent states of one slot over all layers, in bytes; 0 if there are none.
    #[serde(default)]
    pub state_bytes: u64,
    /// The number of positions that layers with a sliding window read, including the query's
    /// position. 0 if no layer has a window shorter than the context.
    #[serde(default)]
    pub window: u32,
    /// The number of pages in the window part; 0 if all layers share one pool.
    #[serde(default)]
    pub window_page_count: u32,
    /// The size of a page of the window part in bytes, over the layers that use it.
    #[serde(default)]
    pub window_page_bytes: u64,
    /// Why layers with a sliding window have no separate pages although they were requested;
    /// otherwise empty.
    #[serde(default)]
    pub one_pool: String,
    /// The number of state pages in the host tier; 0 if there are none.
    #[serde(default)]
    pub host_state_page_count: u32,
    /// The name of the memory layout of a page. Hands of the same model with the same layout name
    /// and `page_bytes` can read each other's pages. Empty if no other hand can read this hand's
    /// pages.
    #[serde(default)]
    pub kv_layout: String,
}

fn one() -> u32 {
    1
}

/// Hand to brain: the error of a hand that fails.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fatal {
    /// The error, in one line.
    pub error: String,
    /// Where the error occurred, as a traceback.
    pub traceback: String,
}

impl Message for Hello {
    const KIND: Kind = Kind::Hello;
}

impl Message for HandConfig {
    const KIND: Kind = Kind::Config;
}

impl Message for StoreRequest {
    const KIND: Kind = Kind::Store;
}

impl Message for StoreReply {
    const KIND: Kind = Kind::StoreReply;
}

impl Message for Progress {
    const KIND: Kind = Kind::Progress;
}

impl Message for Ready {
    const KIND: Kind = Kind::Ready;
}

impl Message for Fatal {
    const KIND: Kind = Kind::Fatal;
}

#[cfg(test)]
mod tests {
    use crate::frame::{HEADER_BYTES, Header};

    use super::*;

    fn frame(bytes: &[u8]) -> Frame {
        let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>().expect("a header");
        let words = body.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        Frame::new(Header::decode(head).expect("a good header"), words).expect("a good frame")
    }

    fn ready() -> Ready {
        Ready {
            page_count: 10,
            vocab_size: 9,
            hidden_size: 8,
            dtype: Dtype::Bfloat16,
            weight_bytes: 1 << 40,
            kv_bytes: 7,
            device: "a device".into(),
            load_seconds: 0.5,
            tokens_a_row: 3,
            host_page_count: 4,
            page_bytes: 11,
            hot_row_tokens: 8,
            blocks: "7 Q4_1".into(),
            state_page_count: 5,
            state_bytes: 1 << 33,
            window: 9,
            window_page_count: 6,
            window_page_bytes: 12,
            one_pool: "it is small".into(),
            host_state_page_count: 6,
            kv_layout: "cpu".into(),
            ..Ready::default()
        }
    }

    #[test]
    fn messages_there_and_back() {
        let bytes = ready().encode().expect("short");
        assert_eq!(Ready::decode(&frame(&bytes)), Ok(ready()));
        let config = HandConfig { max_total_tokens: Some(5), ..HandConfig::default() };
        let bytes = config.encode().expect("short");
        assert_eq!(HandConfig::decode(&frame(&bytes)), Ok(config));
        assert!(Hello::decode(&frame(&bytes)).is_err(), "a frame of another kind is no hello");
        let set = StoreOp::Set { key: "k".into(), value: "eA==".into() };
        for op in [set, StoreOp::Count] {
            let request = StoreRequest { id: 3, op };
            let bytes = request.encode().expect("short");
            assert_eq!(StoreRequest::decode(&frame(&bytes)), Ok(request));
        }
    }

    #[test]
    fn a_missing_field_is_named() {
        let whole = serde_json::to_value(ready()).expect("JSON");
        let fields = whole.as_object().expect("an object");
        let optional = [
            "tokens_a_row",
            "verifies_drafts",
            "host_page_count",
            "page_bytes",
            "hot_row_tokens",
            "tower_layers",
            "image_page_count",
            "image_page_tokens",
            "graphs",
            "blocks",
            "lora_bytes",
            "lora_modules",
            "tokens_only",
            "state_page_count",
            "state_bytes",
            "window",
            "window_page_count",
            "window_page_bytes",
            "one_pool",
            "host_state_page_count",
            "kv_layout",
        ];
        for name in fields.keys().filter(|name| !optional.contains(&name.as_str())) {
            let mut rest = fields.clone();
            rest.remove(name);
            let text = Value::Object(rest).to_string();
            let bytes = encode_json(Kind::Ready, &text).expect("short");
            let error = Ready::decode(&frame(&bytes)).expect_err("a field is missing").to_string();
            assert!(error.contains(&format!("missing field `{name}`")), "{error}");
        }
    }
}
