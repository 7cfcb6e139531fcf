//! Default sampling parameters for requests that omit them.

use forebay_api::GenerationDefaults;
use serde_json::{Map, Value};

use crate::flags::GenerationConfig;

/// llama.cpp's defaults, for GGUF files. Most GGUF files have weights of few bits and no
/// recommended parameters. At temperature 1 without filters, such a model produces incoherent text.
const OF_GGUF: GenerationDefaults = GenerationDefaults {
    temperature: Some(0.8),
    top_p: Some(0.95),
    top_k: Some(40),
    min_p: Some(0.05),
    repetition_penalty: None,
};

/// Returns the default sampling parameters of a model: those in its files, or else those of its
/// format.
pub(crate) fn defaults(
    format: &str,
    named: &Map<String, Value>,
    source: GenerationConfig,
) -> GenerationDefaults {
    if source == GenerationConfig::None {
        return GenerationDefaults::default();
    }
    // Only numbers count as recommendations of the model's authors.
    let number = |name: &str| named.get(name).and_then(Value::as_f64);
    let format = if format == "gguf" { OF_GGUF } else { GenerationDefaults::default() };
    GenerationDefaults {
        temperature: number("temperature").map(|n| n as f32).or(format.temperature),
        top_p: number("top_p").map(|n| n as f32).or(format.top_p),
        top_k: number("top_k").map(|n| n as i32).or(format.top_k),
        min_p: number("min_p").map(|n| n as f32).or(format.min_p),
        repetition_penalty: number("repetition_penalty")
            .map(|n| n as f32)
            .or(format.repetition_penalty),
    }
}

/// The banner's line about defaults that differ from OpenAI's; empty if none differ.
pub(crate) fn banner_line(defaults: &GenerationDefaults) -> String {
    let shown = |name: &str, value: Option<f32>| value.map(|value| format!("{name} {value}"));
    let GenerationDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = *defaults;
    let named = [
        shown("temperature", temperature),
        shown("top_p", top_p),
        top_k.map(|top_k| format!("top_k {top_k}")),
        shown("min_p", min_p),
        shown("repetition_penalty", repetition_penalty),
    ];
    let named: Vec<String> = named.into_iter().flatten().collect();
    if named.is_empty() {
        return String::new();
    }
    let hint = "--generation-config none: OpenAI's";
    format!("  Samples by default with {} ({hint})\n", named.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(format: &str, named: &Value, source: GenerationConfig) -> GenerationDefaults {
        defaults(format, named.as_object().expect("an object"), source)
    }

    #[test]
    fn a_file_s_own_parameters_come_before_those_of_its_format() {
        let auto = |format, named| {
            let found = found(format, &named, GenerationConfig::Auto);
            (found.temperature, found.top_k, found.top_p, found.min_p)
        };
        assert_eq!(auto("gguf", json!({})), (Some(0.8), Some(40), Some(0.95), Some(0.05)));
        let own = json!({"temperature": 0.25, "top_k": 0});
        assert_eq!(auto("gguf", own.clone()), (Some(0.25), Some(0), Some(0.95), Some(0.05)));
        assert_eq!(auto("safetensors", own), (Some(0.25), Some(0), None, None));
        assert_eq!(auto("safetensors", json!({"top_p": "a"})), (None, None, None, None));
        let none = found("gguf", &json!({}), GenerationConfig::None);
        assert_eq!(none, GenerationDefaults::default());
    }

    #[test]
    fn the_banner_names_what_differs_from_openai() {
        assert_eq!(banner_line(&GenerationDefaults::default()), "");
        let line = banner_line(&OF_GGUF);
        assert!(line.contains("temperature 0.8, top_p 0.95, top_k 40, min_p 0.05"), "{line}");
    }
}
