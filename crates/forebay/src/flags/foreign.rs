//! Flags of vLLM, SGLang, llama-server and Ollama that `forebay serve` does not declare itself, and
//! flags of other routers. Each flag is translated to one of ours, dropped as unnecessary, or
//! refused because Forebay lacks the feature.
//!
//! Users copy command lines from other servers. So flags in this table get specific messages, where
//! the parser's suggestions ("did you mean --trusted-proxies") would not help.

use std::ffi::OsString;

/// How a flag of another server is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// Replaced by this flag of ours, which has the same meaning and takes a value.
    Same(&'static str),
    /// The flag is dropped, for this reason.
    Unneeded(&'static str),
    /// The server does not start, for this reason.
    Missing(&'static str),
}
use Meaning::{Missing, Same, Unneeded};

/// A flag of another server.
struct Foreign {
    /// All spellings of the flag, with dashes.
    names: &'static [&'static str],
    /// True if the flag takes a value.
    value: bool,
    meaning: Meaning,
}

const fn switch(names: &'static [&'static str], meaning: Meaning) -> Foreign {
    Foreign { names, value: false, meaning }
}

const fn value(names: &'static [&'static str], meaning: Meaning) -> Foreign {
    Foreign { names, value: true, meaning }
}

const ALWAYS: &str = "always on";
const FILES: &str = "weights are safetensors or GGUF, and no code of a repository runs";
const PRICE: &str = "the measured cost of a draft decides, not the length of its match";
const PD: &str = "decode servers use the prefill server's own port";
const TRANSFER: &str = "keys and values go from prefill to decode through the memory of one server, \
                        with --pd P:D, or by HTTP, with --disaggregation-mode, and not from device \
                        to device by NIXL or Mooncake";
const TEMPLATE: &str = "templates are always Jinja";
const MAPPED: &str = "a CPU's packed weights are read once and kept in memory";
const OFFLOAD: &str = "a model is on one kind of device: --device cpu or --device cuda";

const FLAGS: &[Foreign] = &[
    // Flags of vLLM and SGLang.
    switch(&["--trust-remote-code"], Unneeded(FILES)),
    switch(
        &["--disable-log-requests", "--no-enable-log-requests"],
        Unneeded("requests are not logged"),
    ),
    switch(
        &["--enable-log-requests", "--log-requests"],
        Missing("requests are not logged: see --otlp-traces-endpoint"),
    ),
    switch(&["--disable-log-stats"], Unneeded("--log-interval 0 turns the step lines off")),
    switch(&["--enable-prefix-caching"], Unneeded(ALWAYS)),
    switch(&["--enable-chunked-prefill", "--async-scheduling"], Unneeded(ALWAYS)),
    switch(
        &["--no-enable-chunked-prefill"],
        Missing("prefill is always chunked, by --chunked-prefill-size"),
    ),
    switch(&["--enable-metrics", "--enable-cache-report"], Unneeded(ALWAYS)),
    switch(
        &["--disable-custom-all-reduce", "--disable-cuda-graph-padding"],
        Unneeded("there is nothing to turn off"),
    ),
    switch(
        &["--disable-overlap-schedule", "--no-async-scheduling"],
        Missing("--lookahead 0 is the serial loop"),
    ),
    switch(&["--skip-server-warmup"], Unneeded("the server starts without a request of its own")),
    switch(
        &["--enable-reasoning"],
        Unneeded("reasoning is found by the chat template, or by --reasoning-parser"),
    ),
    value(
        &["--lora-target-modules"],
        Unneeded("an adapter's tensors say which modules it changes"),
    ),
    value(&["--lora-backend", "--lora-dtype"], Unneeded("adapters are computed as the model is")),
    switch(&["--fully-sharded-loras"], Unneeded("adapters are for one rank")),
    value(&["--lora-scaled"], Missing("the adapter's config has its scale: use --lora")),
    switch(&["--lora-init-without-apply"], Unneeded("requests name their adapter")),
    value(
        &["--speculative-draft-model-revision", "--speculative-token-map"],
        Missing("the draft model is what its path or name says"),
    ),
    value(&["--speculative-model"], Same("--speculative-draft-model-path")),
    value(
        &["--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"],
        Unneeded("drafts change no token"),
    ),
    value(
        &[
            "--speculative-ngram-min-match-window-size",
            "--speculative-ngram-max-match-window-size",
            "--speculative-ngram-min-bfs-breadth",
            "--speculative-ngram-max-bfs-breadth",
            "--speculative-ngram-match-type",
            "--speculative-ngram-branch-length",
            "--speculative-ngram-max-trie-depth",
            "--speculative-ngram-capacity",
        ],
        Unneeded(PRICE),
    ),
    value(&["-sc"], Same("--speculative-config")),
    value(&["--disaggregation-bootstrap-port"], Unneeded(PD)),
    value(
        &[
            "--kv-transfer-config",
            "--disaggregation-transfer-backend",
            "--disaggregation-ib-device",
        ],
        Missing(TRANSFER),
    ),
    value(&["--tokenizer", "--tokenizer-path"], Missing("the tokenizer is the model's own")),
    value(
        &["--hf-overrides", "--json-model-override-args"],
        Missing("edit the model's config.json"),
    ),
    value(&["--rope-scaling"], Missing("edit the model's config.json")),
    value(
        &["--swap-space"],
        Unneeded("preempted requests are computed again, or see --hicache-size"),
    ),
    value(&["--cpu-offload-gb"], Missing(OFFLOAD)),
    value(&["--max-logprobs"], Unneeded("requests may ask for 20 alternatives")),
    value(
        &["--guided-decoding-backend", "--grammar-backend", "--structured-outputs-config"],
        Unneeded("there is one backend"),
    ),
    value(
        &["--distributed-executor-backend"],
        Unneeded("ranks are processes; other machines run `forebay worker`"),
    ),
    value(&["--compilation-config", "-O"], Unneeded("models are not compiled")),
    value(
        &["--runner", "--task"],
        Missing("embedding models are found by their files; others need --is-embedding"),
    ),
    value(&["--limit-mm-per-prompt"], Missing("--limit-images N bounds the images of a request")),
    switch(&["--language-model-only"], Missing("--limit-images 0 serves the text alone")),
    value(&["--mm-processor-kwargs"], Missing("--max-image-pixels bounds the pixels of an image")),
    value(&["--log-requests-level"], Unneeded("requests are not logged")),
    value(&["--max-prefill-tokens"], Same("--chunked-prefill-size")),
    value(&["--tp", "-tp"], Same("--tp-size")),
    value(&["--dp", "-dp"], Same("--dp-size")),
    value(&["--random-seed"], Same("--seed")),
    value(&["--base-gpu-id"], Missing("CUDA_VISIBLE_DEVICES chooses the GPUs")),
    // Flags of llama-server.
    value(&["-m", "--model"], Same("--model-path")),
    value(&["-hf", "-hfr", "--hf-repo"], Same("--model-path")),
    value(&["-a", "--alias"], Same("--served-model-name")),
    value(&["-c", "--ctx-size"], Same("--context-length")),
    value(&["-np"], Same("--max-running-requests")),
    value(&["-b", "--batch-size"], Same("--chunked-prefill-size")),
    value(&["-ub", "--ubatch-size"], Unneeded("--chunked-prefill-size bounds a step")),
    value(&["-t"], Same("--threads")),
    value(&["-tb", "--threads-batch"], Unneeded("--threads covers prompts and answers")),
    value(&["--threads-http"], Same("--http-threads")),
    value(&["--chat-template-file"], Same("--chat-template")),
    value(&["--api-prefix"], Same("--root-path")),
    value(&["--ssl-key-file"], Same("--ssl-keyfile")),
    value(&["--ssl-cert-file"], Same("--ssl-certfile")),
    value(&["-ngl", "--gpu-layers", "--n-gpu-layers"], Unneeded(OFFLOAD)),
    value(&["-ncmoe", "--n-cpu-moe", "-ot", "--override-tensor"], Missing(OFFLOAD)),
    switch(&["-cmoe", "--cpu-moe"], Missing(OFFLOAD)),
    value(&["-fa", "--flash-attn"], Unneeded("there is one implementation of attention a device")),
    value(
        &["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"],
        Missing("--kv-cache-dtype is the type of keys and values"),
    ),
    value(
        &["--cache-reuse", "-cram", "--cache-ram"],
        Unneeded("prefixes are cached in KV pages; --hicache-size adds host memory"),
    ),
    value(
        &["--reasoning-format"],
        Unneeded("requests choose: `separate_reasoning`, `include_reasoning`"),
    ),
    value(&["--reasoning-budget"], Missing("requests choose: `thinking_budget`")),
    value(&["-md", "--model-draft", "--spec-draft-model"], Same("--speculative-draft-model-path")),
    value(&["--draft", "--draft-n", "--spec-draft-n-max"], Same("--speculative-num-draft-tokens")),
    value(
        &[
            "--draft-min",
            "--draft-n-min",
            "--draft-p-min",
            "--spec-draft-n-min",
            "--spec-draft-p-min",
            "--spec-ngram-size-n",
            "--spec-ngram-size-m",
            "--spec-ngram-min-hits",
            "--spec-ngram-simple-size-n",
            "--spec-ngram-simple-size-m",
            "--spec-ngram-simple-min-hits",
            "--spec-ngram-mod-n-match",
            "--spec-ngram-mod-n-min",
            "--spec-ngram-mod-n-max",
        ],
        Unneeded(PRICE),
    ),
    value(
        &["-mm", "--mmproj", "-mmu", "--mmproj-url"],
        Missing("images need the model's safetensors"),
    ),
    value(
        &["--temp", "--top-k", "--min-p", "--repeat-penalty", "-n", "--n-predict"],
        Missing("requests choose; defaults are in the model's generation_config.json"),
    ),
    value(&["--numa", "--prio", "--poll"], Unneeded("see --cpu-affinity")),
    value(
        &["--slot-save-path"],
        Missing("slots are not saved to files; --hicache-size keeps prefixes in memory"),
    ),
    switch(&["--jinja", "--no-jinja"], Unneeded(TEMPLATE)),
    switch(&["-cb", "--cont-batching", "--metrics", "--slots", "--props"], Unneeded(ALWAYS)),
    switch(&["--mlock", "--mmap", "--no-mmap"], Unneeded(MAPPED)),
    switch(
        &["--embedding", "--embeddings", "--reranking", "--rerank"],
        Missing("embedding models are found by their files; others need --is-embedding"),
    ),
    switch(
        &["--context-shift", "--no-context-shift"],
        Unneeded("an answer ends at the context length"),
    ),
    switch(
        &["--no-warmup", "-kvu", "--kv-unified", "-v", "--verbose"],
        Unneeded("see --log-level"),
    ),
];

/// Flags of SGLang's and vLLM's routers.
const ROUTER_FLAGS: &[Foreign] = &[
    switch(
        &["--pd-disaggregation", "--vllm-pd-disaggregation"],
        Unneeded("--prefill and --decode name the servers of pairs"),
    ),
    value(
        &["--kv-transfer-config", "--disaggregation-transfer-backend", "--kv-connector"],
        Missing(
            "set it on prefill and decode servers of vLLM or SGLang, which transfer keys and values themselves",
        ),
    ),
];

/// Names of float16, for which Forebay has no kernels. Command lines for older GPUs contain these
/// names.
const HALF: [&str; 4] = ["half", "float16", "fp16", "f16"];
const NO_HALF: &str = "--dtype: float16 is not computed here, so it is --dtype auto";

/// A command line in which other servers' flags have been translated or removed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Translated {
    pub(crate) arguments: Vec<OsString>,
    /// One line for each flag that was dropped.
    pub(crate) notes: Vec<String>,
}

/// Translates the arguments of `forebay serve` and `forebay route`. Arguments of other commands are
/// unchanged.
///
/// # Errors
/// Some flags belong to features that Forebay lacks; the message has one line for each.
pub(crate) fn translate(arguments: impl Iterator<Item = OsString>) -> Result<Translated, String> {
    let mut arguments = arguments.peekable();
    let mut found = Translated { arguments: Vec::new(), notes: Vec::new() };
    let mut missing = Vec::new();
    found.arguments.extend(arguments.next());
    let (command, table) = match arguments.peek().and_then(|command| command.to_str()) {
        Some("serve") => ("serve", FLAGS),
        Some("route") => ("route", ROUTER_FLAGS),
        _ => {
            found.arguments.extend(arguments);
            return Ok(found);
        }
    };
    while let Some(argument) = arguments.next() {
        let text = argument.to_str().unwrap_or_default();
        if text == "--" {
            found.arguments.push(argument);
            found.arguments.extend(arguments.by_ref());
            break;
        }
        let (name, attached) = match text.split_once('=') {
            Some((name, attached)) => (name, Some(attached)),
            None => (text, None),
        };
        if name == "--dtype" {
            let value = attached.map(OsString::from).or_else(|| arguments.next());
            if value.as_ref().is_some_and(|value| HALF.iter().any(|half| value == half)) {
                found.notes.push(NO_HALF.to_owned());
            } else {
                found.arguments.push(name.into());
                found.arguments.extend(value);
            }
            continue;
        }
        let Some(foreign) = table.iter().find(|foreign| foreign.names.contains(&name)) else {
            found.arguments.push(argument);
            continue;
        };
        let value = match attached {
            Some(attached) => Some(OsString::from(attached)),
            None if foreign.value => arguments.next_if(|next| !is_flag(next)),
            None => None,
        };
        match foreign.meaning {
            Same(ours) => {
                found.arguments.push(ours.into());
                found.arguments.extend(value);
            }
            Unneeded(why) => found.notes.push(format!("{name} is not needed: {why}")),
            Missing(why) => {
                missing.push(format!("{name} is not a flag of forebay {command}: {why}"));
            }
        }
    }
    if missing.is_empty() { Ok(found) } else { Err(missing.join("\n")) }
}

/// True if the argument is a flag. A negative number is not a flag, because it may be a value.
fn is_flag(argument: &OsString) -> bool {
    argument.to_str().is_some_and(|text| text.starts_with('-') && text.parse::<f64>().is_err())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::CommandFactory;

    use super::*;
    use crate::command::Flags;

    fn translated(line: &str) -> Result<(String, Vec<String>), String> {
        let found = translate(line.split(' ').map(OsString::from))?;
        let words: Vec<String> =
            found.arguments.into_iter().map(|word| word.into_string().expect("text")).collect();
        Ok((words.join(" "), found.notes))
    }

    #[test]
    fn flags_of_others_are_ours_or_gone_or_answered() {
        let line =
            "forebay serve org/model --trust-remote-code -c 4096 --host 0.0.0.0 -ngl -1 -np=4";
        let (ours, notes) = translated(line).expect("a server");
        assert_eq!(
            ours,
            "forebay serve org/model --context-length 4096 --host 0.0.0.0 --max-running-requests 4"
        );
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].starts_with("--trust-remote-code is not needed: "), "{notes:?}");
        let refused = translated(
            "forebay serve x --cmoe --lora-scaled a".replace("--cmoe", "-cmoe").as_str(),
        )
        .unwrap_err();
        assert_eq!(refused.lines().count(), 2, "{refused}");
        let (ours, notes) =
            translated("forebay serve x --dtype half --dtype=bfloat16").expect("a server");
        assert_eq!((ours.as_str(), notes.len()), ("forebay serve x --dtype bfloat16", 1));
        let (ours, notes) =
            translated("forebay route --pd-disaggregation --decode a:1").expect("a router");
        assert_eq!((ours.as_str(), notes.len()), ("forebay route --decode a:1", 1));
        for (command, says) in [("serve x", "--pd P:D"), ("route", "set it on")] {
            let line = format!("forebay {command} --kv-transfer-config {{\"kv_role\":1}}");
            let refused = translated(&line).unwrap_err();
            assert!(refused.lines().count() == 1 && refused.contains(says), "{refused}");
        }
        let same = "forebay bench serve --tokenizer x";
        assert_eq!(translated(same).expect("untouched").0, same);
        let last = "forebay serve -- -m";
        assert_eq!(translated(last).expect("a name").0, last);
    }

    #[test]
    fn the_table_repeats_no_flag_and_names_ours() {
        let command = Flags::command();
        for (name, table) in [("serve", FLAGS), ("route", ROUTER_FLAGS)] {
            let command = command.find_subcommand(name).expect(name);
            let mut own = HashSet::new();
            for argument in command.get_arguments() {
                for name in argument.get_long_and_visible_aliases().unwrap_or_default() {
                    own.insert(format!("--{name}"));
                }
                for name in argument.get_all_aliases().unwrap_or_default() {
                    own.insert(format!("--{name}"));
                }
            }
            let mut seen = HashSet::new();
            for foreign in table {
                for name in foreign.names {
                    assert!(!own.contains(*name), "{name} is a flag of ours");
                    assert!(seen.insert(*name), "{name} is listed twice");
                }
                if let Same(ours) = foreign.meaning {
                    assert!(own.contains(ours) && foreign.value, "{ours}");
                }
            }
        }
    }
}
