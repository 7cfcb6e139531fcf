//! PEFT's `adapter_config.json`. The adapter's tensors decide which modules it changes. The
//! configuration gives the scales, and is checked for features that no hand supports.

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Fields that change the computation, unless they are null, false or empty. No hand supports them.
const CHANGES: [&str; 14] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "kasa_config",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "lora_bias",
    "fan_in_fan_out",
];
/// Initialisations that also changed the base model: the adapter is wrong on the original base.
const CHANGED_BASE: [&str; 4] = ["pissa", "olora", "corda", "loftq"];
/// Fields that are read, or that do not affect the computation. Any other field gives a warning.
const KNOWN: [&str; 28] = [
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "peft_type",
    "bias",
    "init_lora_weights",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "lora_dropout",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "runtime_config",
    "peft_version",
    "qalora_group_size",
    "ensure_weight_tying",
    "lora_ga_config",
    "corda_config",
];

/// The values of the configuration that determine the scale of each matrix.
pub(super) struct Config {
    rank: u64,
    alpha: f64,
    by_root: bool,
    ranks: Vec<(String, u64)>,
    alphas: Vec<(String, f64)>,
    /// The name suffixes in `target_modules`; `None`: the field is not a list (a pattern or
    /// `all-linear`).
    targets: Option<Vec<String>>,
    pub(super) warnings: Vec<String>,
}

impl Config {
    pub(super) fn read(bytes: &[u8]) -> Result<Self, ModelError> {
        let wrong = |what: &str| ModelError::broken(format!("its adapter_config.json {what}"));
        let found: Value = serde_json::from_slice(bytes)
            .map_err(|error| wrong(&format!("is not JSON: {error}")))?;
        let found = found.as_object().ok_or_else(|| wrong("is not an object"))?;
        if found.get("peft_type").is_some_and(|kind| kind != "LORA") {
            return Err(wrong(&format!("is of {}, and LORA is served", found["peft_type"])));
        }
        let changes = |field: &&&str| found.get(**field).is_some_and(is_set);
        if let Some(field) = CHANGES.iter().find(changes) {
            return Err(wrong(&format!("has {field}, which no hand computes")));
        }
        if let Some(bias) = found.get("bias").filter(|&bias| bias != "none" && !bias.is_null()) {
            return Err(wrong(&format!(
                "has bias {bias}, and adapters with biases are not served"
            )));
        }
        let initial = found.get("init_lora_weights").and_then(Value::as_str).unwrap_or("true");
        if CHANGED_BASE.iter().any(|name| initial.starts_with(name)) {
            return Err(wrong(&format!(
                "has init_lora_weights {initial}, which changed the base: convert it with PEFT"
            )));
        }
        let rank = found.get("r").and_then(Value::as_u64).filter(|&rank| rank > 0);
        let unknown = |(field, value): &(&String, &Value)| {
            let known = KNOWN.contains(&field.as_str()) || CHANGES.contains(&field.as_str());
            !known && is_set(value)
        };
        let warnings = found.iter().filter(unknown);
        let warnings = warnings.map(|(field, _)| format!("{field} is not known and has no effect"));
        Ok(Self {
            rank: rank.ok_or_else(|| wrong("has no r"))?,
            alpha: found.get("lora_alpha").and_then(Value::as_f64).unwrap_or(8.0),
            by_root: found.get("use_rslora").is_some_and(is_set),
            ranks: pattern(found, "rank_pattern", Value::as_u64).ok_or_else(|| wrong(BAD))?,
            alphas: pattern(found, "alpha_pattern", Value::as_f64).ok_or_else(|| wrong(BAD))?,
            targets: found.get("target_modules").and_then(Value::as_array).map(|names| {
                names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
            }),
            warnings: warnings.collect(),
        })
    }

    /// Returns the scale of a module's matrices, given their rank in the file.
    pub(super) fn scale(&self, module: &str, rank: usize) -> Result<f32, ModelError> {
        let said = named(&self.ranks, module).unwrap_or(self.rank);
        if said != rank as u64 {
            return Err(ModelError::broken(format!(
                "{module} is of rank {rank}, and its adapter_config.json says {said}"
            )));
        }
        let alpha = named(&self.alphas, module).unwrap_or(self.alpha);
        let rank = if self.by_root { (rank as f64).sqrt() } else { rank as f64 };
        Ok((alpha / rank) as f32)
    }

    /// Checks that each module listed in `target_modules` has a tensor.
    pub(super) fn check_targets(&self, changed: &[String]) -> Result<(), ModelError> {
        let there = |target: &String| changed.iter().any(|module| ends_with(module, target));
        match self.targets.iter().flatten().find(|target| !there(target)) {
            None => Ok(()),
            Some(target) => Err(ModelError::broken(format!(
                "its adapter_config.json lists {target}, and no tensor is of such a module"
            ))),
        }
    }
}

const BAD: &str = "has a pattern of ranks or alphas that is no object of numbers";

/// True if a config value turns a feature on.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(items) => !items.is_empty(),
        _ => true,
    }
}

fn pattern<T>(
    config: &Map<String, Value>,
    key: &str,
    number: impl Fn(&Value) -> Option<T>,
) -> Option<Vec<(String, T)>> {
    let Some(found) = config.get(key).filter(|value| !value.is_null()) else {
        return Some(Vec::new());
    };
    let entries = found.as_object()?.iter();
    entries.map(|(name, value)| Some((name.clone(), number(value)?))).collect()
}

/// Returns the value of the first pattern that the module's name ends with. PEFT treats patterns as
/// regular expressions, but in practice they are plain names with dots.
fn named<T: Copy>(patterns: &[(String, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(name, _)| ends_with(module, name)).map(|&(_, value)| value)
}

fn ends_with(module: &str, name: &str) -> bool {
    let name = name.trim_start_matches('^');
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}
