//! Chooses a model's files among those of a repository.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::error::HubError;
use crate::name::HubName;

/// The index file, which maps weights to shards.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

const SMALL_FILES: [&str; 12] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
];
/// The configuration file of an adapter. `IS_ADAPTER` is the error for a model that is an adapter.
pub(crate) const ADAPTER: &str = "adapter_config.json";
pub(crate) const IS_ADAPTER: &str =
    "is an adapter, which has no weights of its own: merge it into its base model, or serve that";
/// Words in the names of GGUF files that accompany a model but are not models.
const COMPANIONS: [&str; 2] = ["mmproj", "imatrix"];
const TOKENIZER: &str = "tokenizer.json";
/// Tokenizers in other formats, from which Python code creates a `tokenizer.json`.
const OTHER_TOKENIZERS: [&str; 5] =
    ["tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "merges.txt"];
const PICKLES: [&str; 4] = [".bin", ".pt", ".pth", ".ckpt"];

/// The files that are chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The parts of a GGUF file, in order. No other file is needed.
    Gguf(Vec<String>),
    /// The small files of a repository with safetensors. Its weights are chosen later, by
    /// [`weights`].
    Directory(Vec<String>),
}

/// Which kinds of files a repository must have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    pub(crate) weights: bool,
    pub(crate) tokenizer: bool,
}

/// Chooses a model's files among the files of a repository.
pub(crate) fn choose(name: &HubName, names: &[String], needs: Needs) -> Result<Choice, HubError> {
    let ggufs = ggufs(name, names)?;
    if !ggufs.is_empty() {
        return Ok(Choice::Gguf(ggufs));
    }
    if has(names, ADAPTER) && !has(names, "config.json") {
        return Err(HubError::Repository(format!("{} {IS_ADAPTER}", name.repository)));
    }
    if needs.weights {
        safetensors(names)?;
    }
    let other_tokenizers = if has(names, TOKENIZER) { Vec::new() } else { other_tokenizers(names) };
    for (needed, found) in [
        ("config.json", has(names, "config.json")),
        (TOKENIZER, !needs.tokenizer || has(names, TOKENIZER) || !other_tokenizers.is_empty()),
    ] {
        if !found {
            return Err(HubError::Repository(format!(
                "{} has no {needed}, without which its weights can't be used",
                name.repository
            )));
        }
    }
    let pooling = |name: &&String| {
        let ends = ["_Pooling/config.json", "_Dense/config.json"];
        name.matches('/').count() == 1 && ends.iter().any(|end| name.ends_with(end))
    };
    let small = SMALL_FILES.into_iter().filter(|name| has(names, name)).map(str::to_owned);
    let index = has(names, INDEX).then(|| INDEX.to_owned());
    let pooling = names.iter().filter(pooling).cloned();
    Ok(Choice::Directory(small.chain(index).chain(pooling).chain(other_tokenizers).collect()))
}

/// Returns the files in a repository's top folder that are tokenizers in other formats.
fn other_tokenizers(names: &[String]) -> Vec<String> {
    let is_one = |name: &&String| {
        OTHER_TOKENIZERS.contains(&name.as_str())
            || (!name.contains('/') && name.ends_with(".tiktoken"))
    };
    names.iter().filter(is_one).cloned().collect()
}

/// Returns the weight files, including those of `Dense` modules, which follow the model. `index` is
/// the content of [`INDEX`]; `None` if the repository has no index.
pub(crate) fn weights(
    repository: &str,
    names: &[String],
    index: Option<&[u8]>,
) -> Result<Vec<String>, HubError> {
    let mut found = of_model(repository, names, index)?;
    let is_dense = |name: &&String| {
        name.matches('/').count() == 1 && name.ends_with("_Dense/model.safetensors")
    };
    found.extend(names.iter().filter(is_dense).cloned());
    Ok(found)
}

fn of_model(
    repository: &str,
    names: &[String],
    index: Option<&[u8]>,
) -> Result<Vec<String>, HubError> {
    #[derive(Deserialize)]
    struct Index {
        #[serde(default)]
        weight_map: BTreeMap<String, String>,
    }
    let Some(index) = index else { return safetensors(names) };
    let index = index.strip_prefix("\u{feff}".as_bytes()).unwrap_or(index);
    let index: Index = serde_json::from_slice(index).map_err(|error| {
        HubError::Repository(format!("{INDEX} of {repository} is no index of shards: {error}"))
    })?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    // Only paths in the repository's list of files are accepted, because that list has been
    // checked.
    let missing: Vec<&str> =
        shards.iter().map(String::as_str).filter(|shard| !has(names, shard)).collect();
    if shards.is_empty() || !missing.is_empty() {
        let missing = if shards.is_empty() { "every shard".to_owned() } else { missing.join(", ") };
        return Err(HubError::Repository(format!("{repository} lacks {missing} of {INDEX}")));
    }
    if let Some(other) = shards.iter().find(|shard| !shard.ends_with(".safetensors")) {
        return Err(HubError::Repository(format!(
            "{INDEX} of {repository} names {other}, which is no safetensors file"
        )));
    }
    Ok(shards.into_iter().collect())
}

/// Returns the safetensors files in a repository's top folder, in order.
fn safetensors(names: &[String]) -> Result<Vec<String>, HubError> {
    let top = || names.iter().filter(|name| !name.contains('/'));
    // Some repositories also contain an adapter, or a second copy of the weights in the format of
    // the vendor's own tools.
    let mut found: Vec<String> = top()
        .filter(|name| name.ends_with(".safetensors"))
        .filter(|name| !name.starts_with("consolidated") && !name.starts_with("adapter"))
        .cloned()
        .collect();
    found.sort();
    if has(&found, "model.safetensors") && !has(names, INDEX) {
        return Ok(vec!["model.safetensors".to_owned()]);
    }
    if !found.is_empty() {
        return Ok(found);
    }
    let pickled = top().any(|name| PICKLES.iter().any(|ending| name.ends_with(ending)));
    Err(HubError::Repository(if pickled {
        "the model has only pickle files for weights, which can run code when they are read; convert them to safetensors, or choose a model that has them".to_owned()
    } else {
        "the model has no weights: neither *.safetensors nor *.gguf".to_owned()
    }))
}

/// Returns the parts of the requested GGUF file. Empty if the repository's safetensors are
/// requested.
fn ggufs(name: &HubName, names: &[String]) -> Result<Vec<String>, HubError> {
    let mut ggufs: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| name.ends_with(".gguf")).collect();
    ggufs.sort_unstable();
    let chosen: Vec<&str> = match (&name.file, &name.quant) {
        (Some(file), _) => ggufs.iter().copied().filter(|name| name == file).collect(),
        (None, Some(quant)) => {
            let models = ggufs.iter().copied().filter(|name| !is_companion(name));
            models.filter(|name| has_word(name, quant)).collect()
        }
        (None, None) => {
            let safetensors = names.iter().any(|name| name.ends_with(".safetensors"));
            if safetensors || ggufs.is_empty() {
                return Ok(Vec::new());
            }
            ggufs.iter().copied().filter(|name| !is_companion(name)).collect()
        }
    };
    let repository = &name.repository;
    let stems: BTreeSet<&str> = chosen.iter().map(|name| stem(name)).collect();
    if let (Some(first), 1) = (stems.first(), stems.len()) {
        let parts: Vec<String> = ggufs
            .iter()
            .filter(|name| {
                **name == chosen[0] || part(name).is_some_and(|(stem, ..)| stem == *first)
            })
            .map(|name| (*name).to_owned())
            .collect();
        return all_parts(repository, parts);
    }
    if ggufs.is_empty() {
        return Err(HubError::Repository(format!("{repository} has no GGUF files")));
    }
    let problem = match (&name.file, &name.quant) {
        (Some(word), _) | (None, Some(word)) if chosen.is_empty() => {
            format!("no GGUF file '{word}'")
        }
        _ if chosen.is_empty() => "no GGUF file that is a model".to_owned(),
        _ => "several GGUF files".to_owned(),
    };
    let all = ggufs.join(", ");
    Err(HubError::Repository(format!(
        "{repository} has {problem}; name one as {repository}/FILE, of: {all}"
    )))
}

fn all_parts(repository: &str, parts: Vec<String>) -> Result<Vec<String>, HubError> {
    let Some((stem, _, count)) = parts.first().and_then(|name| part(name)) else {
        return Ok(parts);
    };
    let wanted = (1..=count).map(|number| format!("{stem}-{number:05}-of-{count:05}.gguf"));
    let missing: Vec<String> = wanted.filter(|name| !has(&parts, name)).collect();
    if missing.is_empty() {
        return Ok(parts);
    }
    Err(HubError::Repository(format!("{repository} lacks {}", missing.join(", "))))
}

/// True for a GGUF file that accompanies a model: an image projector, or the importance matrix of a
/// quantisation.
pub(crate) fn is_companion(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    COMPANIONS.iter().any(|word| has_word(&file.replace('_', "-"), word))
}

/// Returns the stem and both numbers of `stem-00002-of-00003.gguf`; `None` if the name has another
/// form.
pub(crate) fn part(name: &str) -> Option<(&str, u32, u32)> {
    let number = |text: &str| {
        let digits = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten()
    };
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, place) = rest.rsplit_once('-')?;
    Some((stem, number(place)?, number(count)?))
}

fn stem(name: &str) -> &str {
    part(name).map_or(name, |(stem, ..)| stem)
}

/// True if `text` contains `word`, in any case, with no letter, digit or underscore next to it.
pub(crate) fn has_word(text: &str, word: &str) -> bool {
    let (text, word) = (text.to_ascii_lowercase(), word.to_ascii_lowercase());
    let ends = |c: Option<char>| !c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    text.match_indices(&word).any(|(at, _)| {
        ends(text[..at].chars().next_back()) && ends(text[at + word.len()..].chars().next())
    })
}

fn has(names: &[String], name: &str) -> bool {
    names.iter().any(|other| other == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn chosen(name: &str, text: &str) -> Result<Choice, String> {
        let name = HubName::parse(name, None).unwrap();
        let needs = Needs { weights: true, tokenizer: true };
        choose(&name, &names(text), needs).map_err(|error| error.to_string())
    }

    fn gguf(text: &str) -> Result<Choice, String> {
        Ok(Choice::Gguf(names(text)))
    }

    #[test]
    fn a_gguf_file_is_chosen_by_a_word_of_its_name() {
        let all = "config.json t-Q4_K.gguf t-Q4_K_M.gguf sub/t.Q8_0.gguf";
        assert_eq!(chosen("a/b:q4_k", all), gguf("t-Q4_K.gguf"));
        assert_eq!(chosen("a/b:Q4_K_M", all), gguf("t-Q4_K_M.gguf"));
        assert_eq!(chosen("a/b:Q8_0", all), gguf("sub/t.Q8_0.gguf"));
        assert_eq!(chosen("a/b/sub/t.Q8_0.gguf", all), gguf("sub/t.Q8_0.gguf"));
        assert_eq!(
            chosen("a/b:Q2_K", all).unwrap_err(),
            "a/b has no GGUF file 'Q2_K'; name one as a/b/FILE, of: sub/t.Q8_0.gguf, t-Q4_K.gguf, t-Q4_K_M.gguf"
        );
        assert!(chosen("a/b", all).unwrap_err().starts_with("a/b has several GGUF files; name"));
        assert_eq!(chosen("a/b:Q8_0", "config.json").unwrap_err(), "a/b has no GGUF files");
    }

    #[test]
    fn files_beside_a_model_are_none() {
        let all = "t-Q8_0.gguf mmproj-t-Q8_0.gguf t.imatrix.gguf imatrix.gguf t_mmproj_f16.gguf";
        assert_eq!(chosen("a/b", all), gguf("t-Q8_0.gguf"));
        assert_eq!(chosen("a/b:Q8_0", all), gguf("t-Q8_0.gguf"));
        let error = chosen("a/b", "mmproj-t.gguf").unwrap_err();
        assert!(error.starts_with("a/b has no GGUF file that is a model; name one"), "{error}");
        assert!(chosen("a/b", &format!("{all} t-Q4_0.gguf")).unwrap_err().contains("several"));
        let adapter = "adapter_config.json adapter_model.safetensors tokenizer.json";
        let error = chosen("a/b", adapter).unwrap_err();
        assert!(error.starts_with("a/b is an adapter, which has no weights"), "{error}");
    }

    #[test]
    fn all_parts_of_a_gguf_file_are_wanted() {
        let parts = "x/t-Q8_0-00001-of-00002.gguf x/t-Q8_0-00002-of-00002.gguf";
        assert_eq!(chosen("a/b:Q8_0", &format!("{parts} t-Q4_0.gguf")), gguf(parts));
        assert_eq!(chosen("a/b", parts), gguf(parts));
        assert_eq!(chosen("a/b/x/t-Q8_0-00002-of-00002.gguf", parts), gguf(parts));
        assert_eq!(
            chosen("a/b", "t-00001-of-00003.gguf t-00003-of-00003.gguf").unwrap_err(),
            "a/b lacks t-00002-of-00003.gguf"
        );
    }

    #[test]
    fn safetensors_win_over_gguf() {
        let all = "config.json tokenizer.json model.safetensors t.gguf README.md 1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors onnx/1_Pooling/config.json";
        let small = names("config.json tokenizer.json 1_Pooling/config.json 2_Dense/config.json");
        assert_eq!(chosen("a/b", all), Ok(Choice::Directory(small)));
    }

    #[test]
    fn shards_are_those_of_the_index() {
        let all =
            names("a.safetensors b.safetensors model.safetensors.index.json extra.safetensors");
        let index = br#"{"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}"#;
        assert_eq!(weights("r", &all, Some(index)).unwrap(), ["a.safetensors", "b.safetensors"]);
        let marked = [b"\xef\xbb\xbf", &index[..]].concat();
        assert_eq!(weights("r", &all, Some(&marked)).unwrap(), ["a.safetensors", "b.safetensors"]);
        for (index, expected) in [
            (r#"{"weight_map": {"x": "c.safetensors"}}"#, "lacks c.safetensors of"),
            (r#"{"weight_map": {"x": "../../.ssh/id"}}"#, "lacks ../../.ssh/id of"),
            ("{}", "lacks every shard of"),
            ("[", "is no index of shards"),
            (r#"{"weight_map": {"x": "model.safetensors.index.json"}}"#, "is no safetensors file"),
        ] {
            let error = weights("r", &all, Some(index.as_bytes())).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn without_an_index_the_names_say_it() {
        let of = |text| weights("r", &names(text), None).map_err(|error| error.to_string());
        assert_eq!(of("model.fp16.safetensors model.safetensors").unwrap(), ["model.safetensors"]);
        let modules = "2_Dense/model.safetensors x/3_Dense/model.safetensors model.safetensors";
        let wanted = ["model.safetensors", "2_Dense/model.safetensors"];
        assert_eq!(of(modules).unwrap(), wanted);
        assert_eq!(
            of("b.safetensors a.safetensors consolidated.safetensors adapter_model.safetensors sub/c.safetensors").unwrap(),
            ["a.safetensors", "b.safetensors"]
        );
        assert!(of("pytorch_model.bin").unwrap_err().contains("only pickle files"));
        assert!(of("config.json sub/x.bin").unwrap_err().contains("has no weights"));
    }

    #[test]
    fn other_forms_of_tokenizers_are_wanted_where_there_is_no_json() {
        let files = "config.json model.safetensors tokenizer.model qwen.tiktoken sub/x.tiktoken";
        let small = names("config.json tokenizer.model qwen.tiktoken");
        assert_eq!(chosen("a/b", files), Ok(Choice::Directory(small)));
        let with_json = format!("{files} tokenizer.json");
        assert_eq!(
            chosen("a/b", &with_json),
            Ok(Choice::Directory(names("config.json tokenizer.json")))
        );
    }

    #[test]
    fn what_is_missing_is_said() {
        assert!(
            chosen("a/b", "config.json model.safetensors")
                .unwrap_err()
                .contains("no tokenizer.json")
        );
        assert!(
            chosen("a/b", "tokenizer.json x.safetensors").unwrap_err().contains("no config.json")
        );
        assert!(chosen("a/b", "tokenizer.json x.bin").unwrap_err().contains("only pickle files"));
    }
}
