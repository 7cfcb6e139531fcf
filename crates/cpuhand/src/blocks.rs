//! The choice between a GGUF file's blocks and the model's type.

use forebay_kernels::level;
use forebay_protocol::HandConfig;
use serde_json::Value;

use crate::pooled::kind;

/// The level of kernels that has no products of bytes.
const WITHOUT_BYTES: &str = "baseline";

/// The number format of products. `auto` becomes `gguf` where blocks of a file are quicker, or
/// `None`.
pub(crate) fn quantization(config: &HandConfig) -> Option<&str> {
    match config.quantization.as_deref() {
        Some("auto") => prefers_blocks(config).then_some("gguf"),
        named => named,
    }
}

fn prefers_blocks(config: &HandConfig) -> bool {
    is_of_file(config) && kind(config).is_none() && level() != WITHOUT_BYTES
}

/// True if matrices may come in blocks: from a GGUF file, or from safetensors of `MXFP4`.
pub(crate) fn is_of_file(config: &HandConfig) -> bool {
    let format = config.model.get("format").and_then(Value::as_str);
    let shape = config.model.get("shape");
    let scheme = shape.and_then(|shape| shape.pointer("/decoder/quantised/scheme/kind"));
    let has_blocks = format == Some("gguf") || scheme.and_then(Value::as_str) == Some("mxfp4");
    has_blocks && config.load_format == "auto"
}
