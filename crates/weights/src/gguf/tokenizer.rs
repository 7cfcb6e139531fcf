//! Converts GGUF tokenizer metadata back to the original `tokenizer.json`.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::file::GgufValue;
use super::pretokenizers::pipeline;
use crate::error::ModelError;

const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;
const BYTE: i64 = 6;
const SPACE: &str = "▁";
/// Values of `tokenizer.ggml.pre` of vocabularies with SentencePiece pieces, without a byte
/// alphabet.
const OF_PIECES: [&str; 3] = ["gemma4", "granite-embed-multi-311m", "sarvam-moe"];

type Metadata = HashMap<String, GgufValue>;

fn texts<'a>(metadata: &'a Metadata, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
    let Some(list) = metadata.get(key).and_then(GgufValue::as_list) else { return Ok(None) };
    let texts: Option<Vec<&str>> = list.iter().map(GgufValue::as_text).collect();
    texts.map(Some).ok_or_else(|| {
        ModelError::broken(format!("the GGUF file has metadata that makes no sense: {key}"))
    })
}

fn flag(metadata: &Metadata, key: &str, default: bool) -> bool {
    metadata.get(key).map_or(default, GgufValue::truthy)
}

/// Builds the content of `tokenizer.json`.
///
/// GGUF does not state whether an added token absorbs the spaces beside it, nor whether a token
/// that looks special was special. Neither changes the encoding of ordinary text.
pub(crate) fn tokenizer_json(metadata: &Metadata) -> Result<Value, ModelError> {
    let tokens = texts(metadata, "tokenizer.ggml.tokens")?.filter(|tokens| !tokens.is_empty());
    let tokens = tokens.ok_or_else(|| ModelError::broken("the GGUF file has no tokenizer"))?;
    let types = metadata.get("tokenizer.ggml.token_type").and_then(GgufValue::as_list);
    let types: Vec<i64> = match types.filter(|types| !types.is_empty()) {
        Some(types) => types.iter().map(|kind| kind.as_i64().unwrap_or(1)).collect(),
        None => vec![1; tokens.len()],
    };
    if types.len() != tokens.len() {
        return Err(ModelError::broken(format!(
            "the GGUF file has {} tokens and {} token types",
            tokens.len(),
            types.len()
        )));
    }
    let vocabulary = Vocabulary { metadata, tokens, types };
    let pre = metadata.get("tokenizer.ggml.pre").and_then(GgufValue::as_text);
    match metadata.get("tokenizer.ggml.model").and_then(GgufValue::as_text) {
        Some("gemma4") => vocabulary.merged_pieces(),
        Some("gpt2") if pre.is_some_and(|pre| OF_PIECES.contains(&pre)) => {
            vocabulary.merged_pieces()
        }
        Some("gpt2") => vocabulary.byte_level_bpe(),
        Some("llama") => vocabulary.sentencepiece_bpe(),
        other => Err(ModelError::elsewhere(format!(
            "the GGUF tokenizer '{}'",
            other.unwrap_or_default()
        ))),
    }
}

/// Returns the text of a special token. `name` is `bos` or `eos`.
pub(crate) fn special_token(metadata: &Metadata, name: &str) -> Option<String> {
    let index = metadata.get(&format!("tokenizer.ggml.{name}_token_id"))?.as_i64()?;
    let tokens = metadata.get("tokenizer.ggml.tokens")?.as_list()?;
    tokens.get(usize::try_from(index).ok()?)?.as_text().map(str::to_owned)
}

struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: Vec<&'a str>,
    types: Vec<i64>,
}

/// The steps of a tokenizer before and after its model.
struct Around {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    add_bos: bool,
    unknown: Option<String>,
}

impl Vocabulary<'_> {
    fn entries(&self) -> impl Iterator<Item = (usize, &str, i64)> {
        self.tokens
            .iter()
            .zip(&self.types)
            .enumerate()
            .map(|(at, (token, kind))| (at, *token, *kind))
    }

    fn byte_level_bpe(&self) -> Result<Value, ModelError> {
        let name = self.metadata.get("tokenizer.ggml.pre").and_then(GgufValue::as_text);
        let pipe = pipeline(name.filter(|name| !name.is_empty()).unwrap_or("default"))?;
        let mut vocab = Map::new();
        for (index, token, _) in self.entries().filter(|&(_, _, kind)| kind != UNUSED) {
            vocab.insert(token.to_owned(), json!(index));
        }
        let merges = self.stored_merges(&vocab)?;
        let model = json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pipe.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        });
        let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let around = Around {
            normalizer: pipe.normalizer,
            pre_tokenizer: pipe.pre_tokenizer,
            decoder,
            add_bos: pipe.add_bos,
            unknown: None,
        };
        Ok(self.document(around, model))
    }

    /// Returns the file's merges. Leaves out a merge if its halves or its result are not tokens,
    /// because a `tokenizer.json` with such a merge can't be loaded.
    fn stored_merges(&self, vocab: &Map<String, Value>) -> Result<Vec<Value>, ModelError> {
        let stored = texts(self.metadata, "tokenizer.ggml.merges")?.ok_or_else(|| {
            ModelError::broken(
                "the GGUF file has a tokenizer of merges, and no merges (tokenizer.ggml.merges)",
            )
        })?;
        let known = |text: &str| vocab.contains_key(text);
        // The two halves are separated by the only space.
        let pairs = stored.iter().filter_map(|merge| merge.split_once(' '));
        let pairs = pairs.filter(|&(left, right)| {
            known(left) && known(right) && known(&format!("{left}{right}"))
        });
        Ok(pairs.map(|(left, right)| json!([left, right])).collect())
    }

    /// Builds a tokenizer of SentencePiece pieces, with merges from the file.
    fn merged_pieces(&self) -> Result<Value, ModelError> {
        let vocab = self.first_places();
        let merges = self.stored_merges(&vocab)?;
        Ok(self.pieces(vocab, merges, false))
    }

    /// Returns the id of each token text. A text that occurs twice gets the id of its first
    /// occurrence, as in SentencePiece and llama.cpp.
    fn first_places(&self) -> Map<String, Value> {
        let mut vocab = Map::new();
        for (index, token, _) in self.entries() {
            if !vocab.contains_key(token) {
                vocab.insert(token.to_owned(), json!(index));
            }
        }
        vocab
    }

    fn sentencepiece_bpe(&self) -> Result<Value, ModelError> {
        let scores = self.metadata.get("tokenizer.ggml.scores").and_then(GgufValue::as_list);
        let scores: Option<Vec<f64>> =
            scores.and_then(|scores| scores.iter().map(GgufValue::as_f64).collect());
        let scores =
            scores.filter(|scores| scores.len() == self.tokens.len()).ok_or_else(|| {
                ModelError::broken(
                    "the GGUF file has no score for each token, which its kind of tokenizer needs",
                )
            })?;
        let mergeable = self
            .entries()
            .filter(|&(_, _, kind)| ![UNKNOWN, CONTROL, USER_DEFINED, BYTE].contains(&kind))
            .map(|(index, token, _)| (token, scores[index]))
            .collect();
        let prefix = flag(self.metadata, "tokenizer.ggml.add_space_prefix", true);
        Ok(self.pieces(self.first_places(), merges_of_scores(mergeable), prefix))
    }

    /// Builds a tokenizer of SentencePiece pieces, in which a mark replaces each space. `prefix` is
    /// true if a mark is added in front of the text.
    fn pieces(&self, vocab: Map<String, Value>, merges: Vec<Value>, prefix: bool) -> Value {
        let unknown =
            self.entries().find(|&(_, _, kind)| kind == UNKNOWN).map(|(_, token, _)| token);
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let mut normalizers = vec![replace];
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let model = json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        });
        let around = Around {
            normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
            pre_tokenizer: Value::Null,
            decoder: json!({"type": "Sequence", "decoders": decoders}),
            add_bos: true,
            unknown: unknown.map(str::to_owned),
        };
        self.document(around, model)
    }

    fn document(&self, around: Around, model: Value) -> Value {
        let unknown = around.unknown.as_deref();
        let added: Vec<Value> = self
            .entries()
            .filter(|&(_, token, kind)| {
                kind == CONTROL
                    || kind == USER_DEFINED
                    || (kind == UNKNOWN && Some(token) == unknown)
            })
            .map(|(index, token, kind)| {
                json!({
                    "id": index,
                    "content": token,
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": kind != USER_DEFINED,
                })
            })
            .collect();
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": around.normalizer,
            "pre_tokenizer": around.pre_tokenizer,
            "post_processor": self.post_processor(around.add_bos),
            "decoder": around.decoder,
            "model": model,
        })
    }

    fn post_processor(&self, add_bos: bool) -> Value {
        let wanted = |key: &str, default| flag(self.metadata, key, default);
        let token = |name: &str| {
            let text = special_token(self.metadata, name)?;
            let id = self.metadata.get(&format!("tokenizer.ggml.{name}_token_id"))?.as_i64()?;
            Some((text, id))
        };
        let bos = wanted("tokenizer.ggml.add_bos_token", add_bos).then(|| token("bos")).flatten();
        let eos = wanted("tokenizer.ggml.add_eos_token", false).then(|| token("eos")).flatten();
        if bos.is_none() && eos.is_none() {
            return Value::Null;
        }
        let part = |sequence: &str, type_id: u32| {
            let special = |(text, _): &(String, i64)| json!({"SpecialToken": {"id": text, "type_id": type_id}});
            let mut part: Vec<Value> = bos.iter().map(special).collect();
            part.push(json!({"Sequence": {"id": sequence, "type_id": type_id}}));
            part.extend(eos.iter().map(special));
            part
        };
        let single = part("A", 0);
        let pair = [single.clone(), part("B", 1)].concat();
        let mut tokens = Map::new();
        for (text, id) in bos.iter().chain(&eos) {
            tokens.insert(text.clone(), json!({"id": text, "ids": [id], "tokens": [text]}));
        }
        json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
    }
}

/// Returns the merges of a SentencePiece vocabulary, best first: every pair of tokens that joins to
/// a token, ordered by that token's score.
///
/// With equal scores, merges are ordered by the length of their halves, longest first. Hugging
/// Face's converter uses this order, and so do the published `tokenizer.json` files.
fn merges_of_scores(scores: Vec<(&str, f64)>) -> Vec<Value> {
    // A text that occurs twice has the rank of its first occurrence, and the score of its last.
    let mut ranks: HashMap<&str, usize> = HashMap::new();
    let mut each: Vec<(&str, f64)> = Vec::new();
    for (token, score) in scores {
        match ranks.get(token) {
            Some(&rank) => each[rank].1 = score,
            None => {
                ranks.insert(token, each.len());
                each.push((token, score));
            }
        }
    }
    let mut merges: Vec<(f64, usize, usize, &str, &str)> = Vec::new();
    for &(token, score) in &each {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let rank = |half: &str| ranks.get(half).copied();
        let mut known: Vec<_> = cuts
            .filter_map(|(left, right)| Some((rank(left)?, rank(right)?, left, right)))
            .collect();
        known.sort_unstable();
        merges.extend(known.into_iter().map(|(_, _, left, right)| {
            (score, left.chars().count(), right.chars().count(), left, right)
        }));
    }
    merges.sort_by(|one, other| {
        other.0.total_cmp(&one.0).then((other.1, other.2).cmp(&(one.1, one.2)))
    });
    merges.iter().map(|merge| json!([merge.3, merge.4])).collect()
}
