//! How text is split before byte-pair merges, per value of `tokenizer.ggml.pre` that the supported
//! families use.
//!
//! Where `tokenizer.json` has a pipeline, GGUF only has a name. This module maps each name to the
//! original pipeline, in the form of `tokenizer.json`.

use serde_json::{Value, json};

use crate::error::ModelError;

/// A byte-level tokenizer's steps before its merges, as JSON in the form of `tokenizer.json`.
pub(super) struct Pipeline {
    pub(super) pre_tokenizer: Value,
    pub(super) normalizer: Value,
    /// True if a whole word in the vocabulary always becomes that one token, even if merges would
    /// give other tokens.
    pub(super) ignore_merges: bool,
    /// Whether the beginning-of-sequence token is added, if the file does not state it.
    pub(super) add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Seed-Coder's pattern: punctuation does not include line ends after it.
const SEED: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Ling's pattern.
const BAILING: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
);
/// Qwen3.5's pattern: combining marks belong to words.
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const CJK: &str = "[一-龥ࠀ-一가-퟿]+";
const V3_CJK: &str = "[一-龥぀-ゟ゠-ヿ]+";
const V3_WORDS: &str = concat!(
    r##"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// The letters that DeepSeek LLM treats as parts of words: those of alphabets with two cases.
///
/// Six are escaped, because editors that normalise text would replace them by equivalent
/// characters.
const DEEPSEEK_LETTERS: &str = concat!(
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ",
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ",
    "\u{2126}ℨ\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-",
    "𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃",
);

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn split(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn digits() -> Value {
    json!({"type": "Digits", "individual_digits": true})
}

fn sequence(steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn splits(regexes: &[&str]) -> Value {
    let mut steps: Vec<Value> = regexes.iter().map(|regex| split(regex)).collect();
    steps.push(byte_level(false));
    sequence(steps)
}

fn gpt4_like(numbers: &str) -> String {
    let before = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|";
    let after = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    format!("{before}{numbers}{after}")
}

/// GPT-4o's pattern: words are split where the case changes, and include contraction suffixes.
fn o200k() -> String {
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
    let start = r"[^\r\n\p{L}\p{N}]?";
    let end = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
    let words = format!("{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}");
    let rest = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    format!("{words}|{rest}")
}

/// Kimi K2's pattern: words are split where the case changes, and Han characters are separate
/// words.
fn kimi() -> String {
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    let start = r"[^\r\n\p{L}\p{N}]?";
    let end = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
    let words = format!("{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}");
    let rest = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    format!(r"[\p{{Han}}]+|{words}|{rest}")
}

/// Returns the pipeline of this name.
pub(super) fn pipeline(name: &str) -> Result<Pipeline, ModelError> {
    let plain = |pre_tokenizer| Pipeline {
        pre_tokenizer,
        normalizer: Value::Null,
        ignore_merges: false,
        add_bos: false,
    };
    let with_words =
        |pre_tokenizer| Pipeline { ignore_merges: true, add_bos: true, ..plain(pre_tokenizer) };
    let composed =
        |pre_tokenizer| Pipeline { normalizer: json!({"type": "NFC"}), ..plain(pre_tokenizer) };
    let three = gpt4_like(r"\p{N}{1,3}");
    let one = gpt4_like(r"\p{N}");
    Ok(match name {
        // For a file without a name, the caller passes "default", as llama.cpp does: the file is
        // older than these names.
        "default" => plain(splits(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"])),
        "gpt-2" | "mpt" | "olmo" | "phi-2" | "a.x-4.0" | "exaone4" | "gigachat"
        | "granite-docling" | "jais" | "mellum" | "trillion" => plain(byte_level(true)),
        "smollm" | "starcoder" | "refact" | "codeshell" | "exaone" | "minerva-7b" => {
            plain(sequence(vec![digits(), byte_level(true)]))
        }
        "command-r" => composed(sequence(vec![digits(), byte_level(true)])),
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "jina-v5-nano" | "lfm2"
        | "midm-2.0" | "pixtral" => with_words(splits(&[&three])),
        "glm4" | "glm5" | "chatglm-bpe" | "dbrx" | "smaug-bpe" => plain(splits(&[&three])),
        "qwen2" | "deepseek-r1-qwen" | "megrez" | "f2llmv2" | "kormo" => composed(splits(&[&one])),
        "grok-2" | "hunyuan" | "solar-open" | "stablelm2" => plain(splits(&[&one])),
        "qwen35" => composed(splits(&[QWEN35])),
        "gpt-4o" | "kanana2" | "llama4" | "minimax-m2" => plain(splits(&[&o200k()])),
        "seed-coder" => plain(splits(&[SEED])),
        "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(splits(&[BAILING])),
        "tekken" => with_words(splits(&[TEKKEN])),
        "deepseek-coder" => plain(sequence(vec![
            split("[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split(CJK),
            digits(),
            byte_level(false),
        ])),
        "deepseek-llm" => plain(sequence(vec![
            split("[\r\n]"),
            split(&format!(r"\s?[{DEEPSEEK_LETTERS}]+")),
            split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            split(r"\s+$"),
            split(CJK),
            digits(),
            byte_level(false),
        ])),
        "deepseek-v3" | "hunyuan-dense" | "hy_v4" | "joyai-llm" => {
            plain(splits(&[r"\p{N}{1,3}", V3_CJK, V3_WORDS]))
        }
        "minicpm5" => Pipeline {
            ignore_merges: true,
            ..plain(splits(&[r"\p{N}{1,3}", &gpt4_like(r"\p{N}+")]))
        },
        "kimi-k2" => plain(splits(&[&kimi()])),
        other => return Err(ModelError::elsewhere(format!("the GGUF pre-tokenizer '{other}'"))),
    })
}
