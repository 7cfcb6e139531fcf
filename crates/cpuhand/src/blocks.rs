//! Chooses the format of matrix products: a GGUF file's blocks, or the model's type.

use forebay_kernels::level;
use forebay_protocol::HandConfig;
use serde_json::Value;

use crate::pooled::kind;

/// The instruction level whose kernels have no products of 8-bit integers.
const WITHOUT_BYTES: &str = "baseline";

/// The weight format for matrix products; `None` is the model's type. `auto` becomes `gguf` if the
/// file's blocks are faster, otherwise `None`.
pub(crate) fn quantization(config: &HandConfig) -> Option<&str> {
    match config.quantization.as_deref() {
        Some("auto") => prefers_blocks(config).then_some("gguf"),
        named => named,
    }
}

fn prefers_blocks(config: &HandConfig) -> bool {
    is_of_file(config) && kind(config).is_none() && level() != WITHOUT_BYTES
}

/// True if the file may store matrices in blocks: a GGUF file, or `MXFP4` in safetensors.
pub(crate) fn is_of_file(config: &HandConfig) -> bool {
    let format = config.model.get("format").and_then(Value::as_str);
    let shape = config.model.get("shape");
    let scheme = shape.and_then(|shape| shape.pointer("/decoder/quantised/scheme/kind"));
    let has_blocks = format == Some("gguf") || scheme.and_then(Value::as_str) == Some("mxfp4");
    has_blocks && config.load_format == "auto"
}
