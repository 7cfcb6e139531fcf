//! The `quantization_config` of a `config.json`.
//!
//! FP8 has a scale per block in DeepSeek-V3 (2024), and per row or per matrix in
//! compressed-tensors, FBGEMM and `AutoFP8`. 4-bit formats are GPTQ (Frantar et al. 2022), AWQ (Lin
//! et al. 2023), and the packing of compressed-tensors.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::ModelError;
use crate::sizes::truthy;

const COMPRESSED: &str = "compressed-tensors";
/// The values of `quant_method` that are supported.
const METHODS: [&str; 6] = ["fp8", "fbgemm_fp8", "awq", "gptq", COMPRESSED, "mxfp4"];
/// The default group size of AWQ and GPTQ, in inputs.
const USUAL_GROUP: u64 = 128;

/// How matrices are quantised, from the configuration. Which matrices are quantised follows from
/// the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantisation {
    /// The value of `quant_method`.
    pub method: String,
    /// How quantised matrices are stored.
    pub scheme: Scheme,
    /// Modules that are not quantised: names, substrings of names, or regular expressions after
    /// `re:` or `-:`.
    pub left_out: Vec<String>,
}

/// How quantised matrices are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Scheme {
    /// 8-bit floats.
    Fp8 {
        /// The rows and columns that share a scale; `None`: one scale per row or per matrix.
        block: Option<[usize; 2]>,
    },
    /// 4-bit integers.
    Int4(Int4Storage),
    /// 4-bit floats with an exponent per 32 floats. Both hands, Rust and Python, read them as
    /// blocks.
    Mxfp4,
}

/// 4-bit integers. Groups of inputs in a row share a scale and a zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Int4Storage {
    /// How eight codes are packed in a word.
    pub packing: CodePacking,
    /// The number of inputs that share a scale; `None`: all inputs of a row.
    pub group: Option<usize>,
    /// True if inputs are assigned to groups in any order (GPTQ's `desc_act`).
    pub ordered: bool,
    /// True if zero points are stored less 1.
    pub less_one: bool,
}

/// How eight codes are packed in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CodePacking {
    /// A word packs eight inputs; a word of zero points packs eight outputs.
    Gptq,
    /// A word packs eight outputs, in AWQ's order.
    Awq,
    /// A word packs eight inputs. The last word of a row is padded.
    CompressedTensors,
}

impl Quantisation {
    /// Reads the `quantization_config` of a `config.json`; `None`: nothing is quantised.
    ///
    /// # Errors
    /// [`ModelError::Unserved`] for a configuration that is not supported.
    pub(crate) fn from_config(config: &Map<String, Value>) -> Result<Option<Self>, ModelError> {
        let stored = config.get("quantization_config").filter(|value| truthy(Some(value)));
        let Some(stored) = stored.and_then(Value::as_object) else { return Ok(None) };
        let stored = Stored(stored);
        let method = stored.0.get("quant_method").and_then(Value::as_str).unwrap_or_default();
        let (scheme, left_out) = match method {
            "fp8" => {
                let block = block(stored.0.get("weight_block_size"), "weight_block_size")?;
                (Scheme::Fp8 { block }, stored.left_out())
            }
            "fbgemm_fp8" => (Scheme::Fp8 { block: None }, stored.left_out()),
            "awq" => (Scheme::Int4(stored.awq()?), stored.left_out()),
            "gptq" => (Scheme::Int4(stored.gptq()?), stored.dynamic()),
            COMPRESSED => (stored.compressed()?, stored.texts("ignore")),
            "mxfp4" => (Scheme::Mxfp4, stored.left_out()),
            other => {
                return Err(ModelError::unserved_part(&format!(
                    "weights quantised by '{other}' (quant_method; read are {})",
                    METHODS.join(", ")
                )));
            }
        };
        Ok(Some(Self { method: method.to_owned(), scheme, left_out }))
    }
}

/// The `quantization_config` object.
struct Stored<'a>(&'a Map<String, Value>);

impl Stored<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn texts(&self, key: &str) -> Vec<String> {
        let items = self.get(key).and_then(Value::as_array).into_iter().flatten();
        items.filter_map(Value::as_str).map(str::to_owned).collect()
    }

    fn left_out(&self) -> Vec<String> {
        let named = self.texts("modules_to_not_convert");
        if named.is_empty() { self.texts("ignored_layers") } else { named }
    }

    /// Returns the patterns of GPTQ modules with separate settings.
    fn dynamic(&self) -> Vec<String> {
        let patterns = self.get("dynamic").and_then(Value::as_object).into_iter().flatten();
        patterns.map(|(pattern, _)| pattern.clone()).collect()
    }

    /// Checks that a value is one of the supported values, ignoring case.
    fn only(&self, method: &str, key: &str, known: &[Value]) -> Result<(), ModelError> {
        let value = match self.0.get(key) {
            Some(Value::String(text)) => Value::from(text.to_lowercase()),
            Some(value) => value.clone(),
            None => Value::Null,
        };
        if known.contains(&value) {
            return Ok(());
        }
        let named = known.iter().filter(|value| !value.is_null()).map(shown);
        let named = named.collect::<Vec<_>>().join(", ");
        Err(ModelError::unserved_part(&format!(
            "{method} with {key} {} ({named} is read)",
            shown(&value)
        )))
    }

    fn awq(&self) -> Result<Int4Storage, ModelError> {
        self.only("awq", "bits", &[json!(4)])?;
        self.only("awq", "version", &[json!("gemm"), Value::Null])?;
        self.only("awq", "zero_point", &[json!(true), Value::Null])?;
        let group = group(self.0.get("group_size"), Some(USUAL_GROUP), "awq")?;
        Ok(Int4Storage { packing: CodePacking::Awq, group, ordered: false, less_one: false })
    }

    fn gptq(&self) -> Result<Int4Storage, ModelError> {
        self.only("gptq", "bits", &[json!(4)])?;
        let forms = [json!("gptq"), json!("gptq_v2"), Value::Null];
        self.only("gptq", "checkpoint_format", &forms)?;
        if let Some(other) = self.dynamic().iter().find(|pattern| !pattern.starts_with("-:")) {
            return Err(ModelError::unserved_part(&format!(
                "gptq in which modules are quantised otherwise than the rest: dynamic has '{other}'"
            )));
        }
        let format = self.get("checkpoint_format").and_then(Value::as_str);
        Ok(Int4Storage {
            packing: CodePacking::Gptq,
            group: group(self.0.get("group_size"), Some(USUAL_GROUP), "gptq")?,
            ordered: truthy(self.get("desc_act")),
            less_one: format.is_none_or(|format| !format.eq_ignore_ascii_case("gptq_v2")),
        })
    }

    fn compressed(&self) -> Result<Scheme, ModelError> {
        for key in ["sparsity_config", "transform_config"] {
            let found = self.get(key).filter(|value| truthy(Some(value)));
            if found.is_some_and(|found| found.get("format") != Some(&json!("dense"))) {
                return Err(ModelError::unserved_part(&format!("{COMPRESSED} with a {key}")));
            }
        }
        let groups: Vec<&Value> = match self.get("config_groups") {
            Some(Value::Object(groups)) => groups.values().collect(),
            _ => Vec::new(),
        };
        let format_of = |group: &&Value| {
            let own = group.get("format").filter(|value| truthy(Some(value)));
            own.or_else(|| self.get("format")).cloned().unwrap_or_default()
        };
        let mut formats: Vec<Value> = Vec::new();
        for format in groups.iter().map(format_of) {
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
        let mut schemes: Vec<Scheme> = Vec::new();
        if let [format] = &formats[..] {
            for group in &groups {
                let scheme = compressed_group(group, format)?;
                if !schemes.contains(&scheme) {
                    schemes.push(scheme);
                }
            }
        }
        let [scheme] = schemes[..] else {
            let formats = formats.iter().map(shown).collect::<Vec<_>>().join(", ");
            return Err(ModelError::unserved_part(&format!(
                "{COMPRESSED} in more than one way for all matrices: config_groups has {} groups, of the formats [{formats}]",
                groups.len()
            )));
        };
        Ok(scheme)
    }
}

fn compressed_group(group_: &Value, format: &Value) -> Result<Scheme, ModelError> {
    let there = |key: &str| group_.get(key).filter(|value| !value.is_null());
    let (weights, inputs) = (there("weights"), there("input_activations"));
    let of_weights = |key: &str| weights.and_then(|it| it.get(key)).filter(|it| !it.is_null());
    let text = |key: &str| of_weights(key).and_then(Value::as_str);
    let kind = text("type").unwrap_or("int");
    let bits = of_weights("num_bits").and_then(Value::as_u64).unwrap_or(8);
    let strategy = text("strategy").unwrap_or("no strategy");
    match (kind, bits, format.as_str().unwrap_or_default()) {
        ("float", 8, "float-quantized" | "naive-quantized") => {
            let of_inputs = |key: &str| inputs.and_then(|inputs| inputs.get(key));
            let same = of_inputs("type").and_then(Value::as_str) == Some("float")
                && of_inputs("num_bits").and_then(Value::as_u64) == Some(8);
            if inputs.is_some() && !same {
                return Err(ModelError::unserved_part(&format!(
                    "{COMPRESSED} with activations of another kind than weights"
                )));
            }
            match strategy {
                "channel" | "tensor" => return Ok(Scheme::Fp8 { block: None }),
                "block" => {
                    let block = block(of_weights("block_structure"), "block_structure")?;
                    return Ok(Scheme::Fp8 { block });
                }
                _ => {}
            }
        }
        ("int", 4, "pack-quantized") => {
            if inputs.is_some() {
                return Err(ModelError::unserved_part(&format!(
                    "{COMPRESSED} with 4-bit weights and quantised activations"
                )));
            }
            let order = of_weights("actorder");
            let ordered = order == Some(&json!("group")) || order == Some(&json!(true));
            let packing = CodePacking::CompressedTensors;
            let of = |group| Scheme::Int4(Int4Storage { packing, group, ordered, less_one: false });
            match strategy {
                "channel" => return Ok(of(None)),
                "group" => return Ok(of(group(of_weights("group_size"), None, COMPRESSED)?)),
                _ => {}
            }
        }
        _ => {}
    }
    Err(ModelError::unserved_part(&format!(
        "{COMPRESSED} with {bits}-bit weights ({kind}, {strategy}) in the format {} (read are 8-bit floats in float-quantized, a scale a \
         channel, tensor or block, and 4-bit integers in pack-quantized, a scale a group or channel)",
        shown(format)
    )))
}

/// Reads the number of rows and the number of columns of a block.
fn block(sizes: Option<&Value>, key: &str) -> Result<Option<[usize; 2]>, ModelError> {
    let Some(sizes) = sizes.filter(|value| !value.is_null()) else { return Ok(None) };
    let size = |size: &Value| usize::try_from(size.as_u64()?).ok().filter(|&size| size >= 1);
    let found: Option<Vec<usize>> = sizes.as_array().and_then(|it| it.iter().map(size).collect());
    match found.as_deref() {
        Some(&[rows, columns]) => Ok(Some([rows, columns])),
        _ => Err(ModelError::unserved_part(&format!("a {key} of {}", shown(sizes)))),
    }
}

/// Reads the number of inputs per group. -1 means all inputs of a row.
fn group(
    size: Option<&Value>,
    usual: Option<u64>,
    method: &str,
) -> Result<Option<usize>, ModelError> {
    let size = size.cloned().or_else(|| usual.map(Value::from)).unwrap_or_default();
    if size.as_i64() == Some(-1) {
        return Ok(None);
    }
    let fits = |&size: &u64| size >= 8 && size.is_multiple_of(8);
    let found = size.as_u64().filter(fits).and_then(|size| usize::try_from(size).ok());
    found.map(Some).ok_or_else(|| {
        ModelError::unserved_part(&format!(
            "{method} with a group_size of {} (read are multiples of 8, and -1)",
            shown(&size)
        ))
    })
}

/// Returns the beginning of a value, on one line.
fn shown(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = match value {
        Value::String(text) => format!("'{text}'").replace('\n', " "),
        value => value.to_string(),
    };
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(config: &Value) -> Result<Option<Quantisation>, ModelError> {
        let config = json!({"quantization_config": config});
        Quantisation::from_config(config.as_object().expect("an object"))
    }

    fn compressed(format: &str, groups: &[Value], more: &Value) -> Value {
        let groups: Map<String, Value> =
            (0..).map(|n: u32| format!("group_{n}")).zip(groups.iter().cloned()).collect();
        let mut config = json!({"quant_method": COMPRESSED, "format": format, "config_groups": groups, "ignore": ["lm_head"]});
        config
            .as_object_mut()
            .expect("an object")
            .extend(more.as_object().cloned().unwrap_or_default());
        config
    }

    fn with(base: &Value, changes: &Value) -> Value {
        let mut all = base.as_object().cloned().unwrap_or_default();
        all.extend(changes.as_object().cloned().unwrap_or_default());
        all.into()
    }

    fn weights(weights: &Value, inputs: &Value) -> Value {
        json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs})
    }

    fn int4(packing: CodePacking, group: Option<usize>) -> Int4Storage {
        Int4Storage { packing, group, ordered: false, less_one: false }
    }

    #[test]
    fn schemes_are_read() {
        let float = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        let dynamic = json!({"num_bits": 8, "type": "float", "strategy": "token"});
        let four = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128});
        let none = json!({});
        let block = json!({"strategy": "block", "block_structure": [64, 128]});
        let row = Scheme::Fp8 { block: None };
        let compressed_four = |changes: &Value| {
            compressed("pack-quantized", &[weights(&with(&four, changes), &Value::Null)], &none)
        };
        let of_compressed = int4(CodePacking::CompressedTensors, Some(128));
        for (config, scheme) in [
            (
                json!({"quant_method": "fp8", "weight_block_size": [128, 64]}),
                Scheme::Fp8 { block: Some([128, 64]) },
            ),
            (json!({"quant_method": "fp8", "activation_scheme": "static"}), row),
            (json!({"quant_method": "fbgemm_fp8"}), row),
            (
                json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}),
                Scheme::Int4(int4(CodePacking::Awq, Some(64))),
            ),
            (
                json!({"quant_method": "awq", "bits": 4}),
                Scheme::Int4(int4(CodePacking::Awq, Some(128))),
            ),
            (
                json!({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": true}),
                Scheme::Int4(Int4Storage {
                    ordered: true,
                    less_one: true,
                    ..int4(CodePacking::Gptq, None)
                }),
            ),
            (
                json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}),
                Scheme::Int4(int4(CodePacking::Gptq, Some(32))),
            ),
            (compressed("float-quantized", &[weights(&float, &dynamic)], &none), row),
            (
                compressed("float-quantized", &[weights(&with(&float, &block), &dynamic)], &none),
                Scheme::Fp8 { block: Some([64, 128]) },
            ),
            (compressed_four(&none), Scheme::Int4(of_compressed)),
            (
                compressed_four(&json!({"actorder": "group"})),
                Scheme::Int4(Int4Storage { ordered: true, ..of_compressed }),
            ),
            (compressed_four(&json!({"actorder": "weight"})), Scheme::Int4(of_compressed)),
            (
                compressed_four(&json!({"strategy": "channel", "group_size": null})),
                Scheme::Int4(int4(CodePacking::CompressedTensors, None)),
            ),
        ] {
            let found = read(&config).expect("a scheme").expect("it is quantised");
            assert_eq!(found.scheme, scheme, "{config}");
            assert_eq!(Value::from(found.method), config["quant_method"]);
        }
        assert_eq!(read(&Value::Null), Ok(None));
    }

    #[test]
    fn what_would_be_read_wrongly_is_refused_in_one_line() {
        let float = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        let four = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128});
        let none = json!({});
        let of = |format: &str, each: &Value, inputs: &Value, more: &Value| {
            compressed(format, &[weights(each, inputs)], more)
        };
        let whole = json!({"num_bits": 8, "type": "int"});
        let pack = "pack-quantized";
        let groups = [
            weights(&four, &Value::Null),
            weights(&with(&four, &json!({"group_size": 64})), &Value::Null),
        ];
        for (config, why) in [
            (json!({"quant_method": "mxfp8"}), "quantised by 'mxfp8'"),
            (json!({"quant_method": "fp8", "weight_block_size": [128]}), "weight_block_size"),
            (json!({"quant_method": "awq", "bits": 8}), "awq with bits 8"),
            (
                json!({"quant_method": "awq", "bits": 4, "version": "gemv"}),
                "awq with version 'gemv'",
            ),
            (json!({"quant_method": "awq", "bits": 4, "zero_point": false}), "zero_point false"),
            (json!({"quant_method": "awq", "bits": 4, "group_size": 100}), "group_size of 100"),
            (json!({"quant_method": "gptq", "bits": 3}), "gptq with bits 3"),
            (
                json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
                "checkpoint_format 'marlin'",
            ),
            (
                json!({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*gate": {}, "+:.*up": {}}}),
                "dynamic has '+:",
            ),
            (compressed(pack, &groups, &none), "more than one way"),
            (compressed(pack, &[], &none), "has 0 groups"),
            (of(pack, &with(&four, &json!({"num_bits": 8})), &Value::Null, &none), "8-bit weights"),
            (of(pack, &four, &whole, &none), "quantised activations"),
            (
                of("int-quantized", &with(&float, &json!({"type": "int"})), &Value::Null, &none),
                "'int-quantized'",
            ),
            (of("float-quantized", &float, &whole, &none), "activations of another kind"),
            (
                of(
                    "float-quantized",
                    &with(&float, &json!({"strategy": "group"})),
                    &Value::Null,
                    &none,
                ),
                "float, group",
            ),
            (
                of(pack, &four, &Value::Null, &json!({"sparsity_config": {"format": "sparse-24"}})),
                "sparsity_config",
            ),
            (
                of(pack, &four, &Value::Null, &json!({"transform_config": {"a": 1}})),
                "transform_config",
            ),
        ] {
            let error = read(&config).expect_err(why);
            let said = error.to_string();
            assert!(matches!(error, ModelError::Unserved(_)) && said.contains(why), "{said}");
            assert!(!said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn modules_may_be_left_out() {
        let read = |config: Value| read(&config).expect("a scheme").expect("quantised").left_out;
        assert_eq!(read(json!({"quant_method": "fp8", "modules_to_not_convert": ["a"]})), ["a"]);
        assert_eq!(read(json!({"quant_method": "fp8", "ignored_layers": ["b"]})), ["b"]);
        assert_eq!(
            read(json!({"quant_method": "gptq", "bits": 4, "dynamic": {"-:c": {}}})),
            ["-:c"]
        );
    }
}
