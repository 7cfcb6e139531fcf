//! The JSON frames: the messages between brain and hand before the first plan, and after a failure.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::dtype::Dtype;
use crate::frame::{Frame, FrameError, Kind, encode_json};

/// The memory of a hand for adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceConfig {
    /// The number of places: adapters that a step may use.
    pub places: u32,
    /// The largest rank of an adapter.
    pub rank: u32,
    /// The number of further adapters that the hand keeps in the host's memory.
    pub kept: u32,
}

impl Default for PlaceConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        Self { places: 8, rank: 64, kept: 32 }
    }
}

/// A message that has its own kind of frame.
pub trait Message: Serialize + DeserializeOwned {
    /// The frame's kind.
    const KIND: Kind;

    /// The message's frame.
    ///
    /// # Errors
    /// The frame would be too long.
    fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let text = serde_json::to_string(self).map_err(|error| unfit(Self::KIND, &error))?;
        encode_json(Self::KIND, &text)
    }

    /// Reads a frame of this kind. Unknown fields are ignored.
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

/// Hand to brain, the first message: the process runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The process id of the hand.
    pub pid: u32,
}

/// A draft model with the same vocabulary as the model, or a head of the model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DraftModelConfig {
    /// The model, as the brain has described it.
    pub model: Value,
    /// The largest number of drafts of a row.
    pub tokens: u32,
}

/// Brain to hand: the configuration, with everything resolved.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HandConfig {
    /// The model, as the brain has described it (docs/protocol.md).
    pub model: Value,
    /// `auto`, or `dummy` for weights made of `seed`.
    pub load_format: String,
    /// The kind of device.
    pub device: String,
    /// The name of a [`Dtype`].
    pub dtype: String,
    /// The weight format for products, if it is not `dtype`. `auto`: a GGUF file's blocks, if the
    /// hand has fast products with them.
    pub quantization: Option<String>,
    /// The data type of keys and values in pages (`int8`, `fp8_e4m3`), if it is not `dtype`.
    pub kv_cache_dtype: Option<String>,
    /// Positions of a page.
    pub page_size: u32,
    /// Rows of the device tables.
    pub slots: u32,
    /// The largest number of positions of a request.
    pub context_length: u32,
    /// The largest number of tokens of a step.
    pub chunked_prefill_size: u32,
    /// The largest number of running requests, and so of rows in a step.
    pub max_running_requests: u32,
    /// The implementation of attention (`triton`, `torch`, `fa3`); `None`: the device's best.
    pub attention_backend: Option<String>,
    /// The largest number of rows of a CUDA graph; 0: no graphs.
    pub graph_rows: u32,
    /// The share of the device's memory for weights and pages, and for the memory of steps if that
    /// is measured.
    pub mem_fraction_static: f64,
    /// A fixed size of the KV pool in tokens.
    pub max_total_tokens: Option<u64>,
    /// Bytes of the shared memory.
    pub arena_bytes: u64,
    /// The rank of the hand in its group.
    pub rank: u32,
    /// The number of ranks in the group.
    pub world_size: u32,
    /// True if ranks have whole experts. Otherwise each expert is split like any matrix.
    pub expert_parallel: bool,
    /// True if the ranks have plans, pages and requests of their own, and share only experts.
    pub step_group: bool,
    /// Compute threads on a CPU; `None`: as many as the hand's machine has cores and CPU quota for.
    pub threads: Option<u32>,
    /// The seed of dummy weights.
    pub seed: u64,
    /// The largest size of the cache of packed weights in bytes; 0: no cache.
    pub weight_cache_bytes: u64,
    /// The size of the host tier in bytes. Without this and a ratio there is no tier.
    pub host_bytes: Option<u64>,
    /// The size of the host tier, in pages for each page of the device.
    pub host_ratio: Option<f64>,
    /// True if the ratio is only an upper limit: the hand takes what fits.
    pub host_fits: bool,
    /// The number of pages of an earlier hand's host tier, whose content is still there.
    pub host_pages: Option<u32>,
    /// True if pages have the same content on all ranks, which then share one host tier. The first
    /// rank writes it.
    #[serde(default)]
    pub host_shared: bool,
    /// The number of state pages of an earlier hand's host tier, beside `host_pages`.
    pub host_state_pages: Option<u32>,
    /// The descriptors of host memories that are lent to this hand, by replica number; `None` for
    /// its own. Empty: nothing is lent.
    #[serde(default)]
    pub host_lenders: Vec<Option<u32>>,
    /// The largest share of the memory left by weights and pages that the host tier may take.
    pub host_share: f64,
    /// A speed limit on copies, in GB a second; for tests.
    pub copy_gbps: Option<f64>,
    /// True if checksums of pages are recorded and checked; for tests.
    pub kv_checksum: bool,
    /// Rows of the device that a sparse slot keeps, at least the model's top-k; 0: twice that.
    /// `None`: no slot is ever sparse.
    pub hot_row_tokens: Option<u32>,
    /// The number of positions that a row chooses, if the user gave it. The model must have the
    /// same.
    pub sparse_top_k: Option<u32>,
    /// Positions of all image pages; `None`: the hand chooses.
    pub image_pool_tokens: Option<u64>,
    /// State pages, if the model has recurrent layers; `None`: the hand chooses.
    pub state_pages: Option<u32>,
    /// Pages of the window part relative to the main part, if layers with a window may have pages
    /// of their own; `None`: all layers share one pool.
    #[serde(default)]
    pub window_ratio: Option<f64>,
    /// The memory for adapters; `None`: none are served.
    pub lora: Option<PlaceConfig>,
    /// The draft model or head that the hand runs; `None`: it has none.
    pub draft: Option<DraftModelConfig>,
    /// What waits for saves: `behind`, nothing; `fence`, the rows of the next plan; `inline`, the
    /// next plan.
    pub kv_save_order: String,
}

impl HandConfig {
    /// The number of host tiers of a group with this many ranks: one each, or one in common.
    #[must_use]
    pub fn host_tiers(&self, ranks: usize) -> usize {
        if self.host_shared { 1 } else { ranks }
    }
}

/// Hand to brain, between `config` and `ready`: a request to the store with which ranks find each
/// other. Values are in base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRequest {
    /// The number of the request, which the answer repeats.
    pub id: u64,
    /// The question.
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
    /// Gets a value, and waits until it exists.
    Get {
        /// The key.
        key: String,
    },
    /// Adds to a number that is 0 at first. The answer is the sum.
    Add {
        /// The key.
        key: String,
        /// The number that is added.
        amount: i64,
    },
    /// Checks whether all keys exist. The answer is 1 or 0.
    Check {
        /// The keys.
        keys: Vec<String>,
    },
    /// Waits until all keys are there.
    Wait {
        /// The keys.
        keys: Vec<String>,
    },
    /// Sets a value if the current one is as expected. The answer is the value afterwards.
    CompareSet {
        /// The key.
        key: String,
        /// The expected value; empty: the key must not exist.
        expected: String,
        /// The value.
        value: String,
    },
    /// Removes a key. The answer is 1 if it existed, otherwise 0.
    Delete {
        /// The key.
        key: String,
    },
    /// Asks for the number of keys.
    Count,
}

/// Brain to hand: an answer of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreReply {
    /// The id of the question.
    pub id: u64,
    /// A value in base64, if the request asks for one.
    pub value: Option<String>,
    /// A number, if the request asks for one.
    pub number: Option<i64>,
}

/// Hand to brain: the progress of loading, which also shows that the hand is alive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The part that is loaded.
    pub stage: String,
    /// The number of loaded pieces.
    pub done: u64,
    /// The number of all pieces.
    pub total: u64,
}

/// Hand to brain: the hand is ready for plans. The message has facts about the device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// Pages of the KV pool; 0: the model keeps no keys and values, and its prompts must not be
    /// cut.
    pub page_count: u32,
    /// Rows of the output head.
    pub vocab_size: u32,
    /// Elements of an embedding.
    pub hidden_size: u32,
    /// The type of the model's activations, and of prompts of embeddings.
    pub dtype: Dtype,
    /// Bytes of the weights in memory.
    pub weight_bytes: u64,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
    /// The device's name.
    pub device: String,
    /// Seconds from the spawn to `ready`, by the hand's clock.
    pub load_seconds: f64,
    /// The largest number of tokens that a sampling row may give.
    #[serde(default = "one")]
    pub tokens_a_row: u32,
    /// True if the hand verifies drafts from the brain.
    #[serde(default)]
    pub verifies_drafts: bool,
    /// Pages of the host's tier; 0 without one.
    #[serde(default)]
    pub host_page_count: u32,
    /// Bytes of a page over all layers; 0: there are no pages, or the number is unknown.
    #[serde(default)]
    pub page_bytes: u64,
    /// Rows of the device that a sparse slot keeps, in whole pages; 0: no slot is ever sparse.
    #[serde(default)]
    pub hot_row_tokens: u32,
    /// Layers of the vision tower; 0 without one.
    #[serde(default)]
    pub tower_layers: u32,
    /// Image pages; 0 without a tower.
    #[serde(default)]
    pub image_page_count: u32,
    /// Positions of an image page.
    #[serde(default)]
    pub image_page_tokens: u32,
    /// The number of captured CUDA graphs; 0: every step launches its operators one by one.
    #[serde(default)]
    pub graphs: u32,
    /// A text about the matrices computed in a GGUF file's blocks: how many of each type, and of
    /// others; empty: there are none.
    #[serde(default)]
    pub blocks: String,
    /// Bytes that are kept for adapters in places.
    #[serde(default)]
    pub lora_bytes: u64,
    /// The modules that adapters may change, by the last parts of their names.
    #[serde(default)]
    pub lora_modules: Vec<String>,
    /// True if prompts must be tokens, because the model takes no embeddings.
    #[serde(default)]
    pub tokens_only: bool,
    /// State pages; 0: only the slots' own states are kept.
    #[serde(default)]
    pub state_page_count: u32,
    /// Bytes of one slot's recurrent states over all layers; 0: the model has none.
    #[serde(default)]
    pub state_bytes: u64,
    /// The number of positions that layers with a window read, including the query's; 0: no layer
    /// has a window shorter than the context.
    #[serde(default)]
    pub window: u32,
    /// Pages of the window part; 0: all layers share one pool.
    #[serde(default)]
    pub window_page_count: u32,
    /// Bytes of a page of the window part, over the layers that use it.
    #[serde(default)]
    pub window_page_bytes: u64,
    /// Why layers with a window have no pages of their own although that was requested; otherwise
    /// empty.
    #[serde(default)]
    pub one_pool: String,
    /// State pages of the host's tier; 0: it has none.
    #[serde(default)]
    pub host_state_page_count: u32,
    /// The name of the order of numbers in a page. Hands of the same model with the same name and
    /// the same bytes of a page read each other's pages; empty: nobody else reads this hand's.
    #[serde(default)]
    pub kv_layout: String,
}

fn one() -> u32 {
    1
}

/// Hand to brain: the last words of a failed hand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fatal {
    /// The error, in one line.
    pub error: String,
    /// The place of the error, as a traceback.
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
