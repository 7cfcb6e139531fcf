use clap::{CommandFactory, Parser};
use forebay_server::StoreConfig;
use forebay_text::TextConfig;
use serde_json::Map;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flags: ServeFlags,
}

/// Settings that no single flag determines.
const DERIVED: [&str; 18] = [
    // These come from the model and its hand.
    "chat",
    "family",
    "format",
    "hand_reason",
    "parameters",
    "pooling",
    "sampling_defaults",
    "simulated",
    "weight_type",
    // These come from several flags, or from the machine.
    "gpus",
    "graph_rows",
    "host_fits",
    "host_share",
    "host_tier",
    "slots",
    "step_group",
    "weight_cache_bytes",
    "expert_parallel",
];

/// Settings whose names in the step protocol differ from the names of their flags.
const OF_THE_WIRE: [(&str, &str); 8] = [
    ("copy_gbps", "debug-kv-copy-gbps"),
    ("host_bytes", "hicache-size"),
    ("host_ratio", "hicache-ratio"),
    ("hot_row_tokens", "hot-buffer-tokens"),
    ("kv_checksum", "debug-kv-checksum"),
    ("sparse_top_k", "hisparse-config"),
    ("state_pages", "max-state-pages"),
    ("window_ratio", "swa-full-tokens-ratio"),
];

/// Settings of features that are on by default, each with the flag that disables the feature.
const TURNED_OFF: [(&str, &str); 6] = [
    ("fair_queueing", "disable-fair-queueing"),
    ("step_shares", "disable-step-shares"),
    ("queue_moves", "disable-queue-moves"),
    ("prefix_cache", "disable-radix-cache"),
    ("remote_media", "no-remote-media"),
    ("webui", "no-webui"),
];

fn model(images: bool) -> Model {
    let images = images.then(|| {
        json!({"patch": 16, "merge": 2, "min_pixels": 1, "max_pixels": 1 << 20, "image_token_id": 9})
    });
    serde_json::from_value(json!({
        "name": "tiny",
        "format": "safetensors",
        "directory": "/models/tiny",
        "files": [],
        "config": {},
        "tokenizer": "/models/tiny/tokenizer.json",
        "tokenizer_config": {},
        "chat_template": null,
        "generation_config": {},
        "eos_token_ids": [1],
        "bos_token": null,
        "eos_token": null,
        "context_length": 4096,
        "vocab_size": 100,
        "pooling": null,
        "images": images,
        "cache": "/cache",
    }))
    .expect("a model")
}

fn resolved(flags: &[&str], model: &Model) -> Resolved {
    let line = ["serve", "tiny", "--device", "sim"].iter().chain(flags);
    let flags = Line::try_parse_from(line).expect("flags that clap takes").flags;
    Resolved::new(&flags, (model, None), ServerConfig::default()).expect("a configuration")
}

/// Flags that together change every setting.
const ALL: [&str; 9] = [
    "--dp-size=2",
    "--enable-hierarchical-cache",
    "--max-running-requests=7",
    "--page-size=32",
    "--chunked-prefill-size=99",
    "--context-length=1000",
    "--queue-timeout=2.5",
    "--stream-flush-us=300",
    "--schedule-policy=priority",
];

fn object(part: impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(part).expect("JSON") {
        Value::Object(map) => map,
        other => panic!("{other}"),
    }
}

#[test]
fn a_setting_of_several_parts_has_one_value() {
    for images in [false, true] {
        let all = resolved(&ALL, &model(images));
        let whole = object(&all);
        let mut hand = object(&all.hand);
        hand.retain(|name, _| !NO_SETTINGS.contains(&name.as_str()) && name != "kv_cache_dtype");
        let parts = [
            object(&all.model),
            object(&all.device),
            object(&all.choice),
            hand,
            object(&all.engine),
            object(all.replicas),
            object(&all.server),
        ];
        let mut several = 0;
        for (name, value) in &whole {
            let held: Vec<_> = parts.iter().filter_map(|part| part.get(name)).collect();
            assert!(held.iter().all(|&held| held == value), "{name}: {held:?}");
            several += usize::from(held.len() > 1);
        }
        assert_eq!(several, 5, "settings such as page_size that the engine and its workers share");
        assert_eq!(whole["kv_cache_dtype"], "auto");
        assert_eq!(whole["page_size"], 32);
        assert_eq!(whole["queue_timeout"], 2.5);
        assert_eq!(whole["stream_flush_us"], 300);
        assert_eq!(whole.contains_key("image_budget"), images);
        assert_eq!(whole.contains_key("limit_images"), images);
    }
}

#[test]
fn a_key_is_the_name_of_its_flag() {
    let command = Line::command();
    let flags: Vec<&str> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
    let command = Line::command();
    let positional = command.get_positionals().map(|argument| argument.get_id().as_str());
    let positional: Vec<&str> = positional.collect();
    let renamed: Vec<_> = OF_THE_WIRE.iter().chain(&TURNED_OFF).collect();
    let whole = object(resolved(&ALL, &model(true)));
    for name in whole.keys().map(String::as_str) {
        let other = renamed.iter().find(|(key, _)| *key == name);
        let flag = other.map_or_else(|| name.replace('_', "-"), |(_, flag)| (*flag).to_owned());
        let known = flags.contains(&flag.as_str())
            || positional.contains(&name)
            || DERIVED.contains(&name)
            || name == "served_model_names";
        assert!(known, "{name}: no flag has this name");
    }
    for (name, _) in &renamed {
        assert!(whole.contains_key(*name), "{name} is not a setting");
    }
    for name in DERIVED {
        assert!(whole.contains_key(name) && !flags.contains(&&*name.replace('_', "-")), "{name}");
    }
    let tier = object(&whole["host_tier"]);
    assert!(tier.keys().all(|name| flags.contains(&&*name.replace('_', "-"))), "{tier:?}");
}

#[test]
fn without_flags_each_part_has_its_defaults() {
    let all = resolved(&[], &model(false));
    // This setting depends on the machine's processors.
    let usual = EngineConfig { mask_threads: all.engine.mask_threads, ..EngineConfig::default() };
    assert_eq!(object(&all.engine), object(usual));
    assert_eq!(all.replicas, ReplicasConfig::default());
    let server = ServerConfig {
        max_request_bytes_in_flight: all.server.server.max_request_bytes_in_flight,
        ..ServerConfig::default()
    };
    assert_eq!(object(&all.server.server), object(server));
    let StoreConfig { response_store_bytes, .. } = all.server.server.responses;
    assert_eq!(response_store_bytes, StoreConfig::default().response_store_bytes);
    let text = TextConfig { text_threads: all.server.text.text_threads, ..TextConfig::default() };
    assert_eq!(object(&all.server.text), object(text));
    assert_eq!(all.server.grammar, Some(forebay_grammar::GrammarConfig::default()));
    let egress = forebay_server::EgressConfig {
        egress_threads: all.server.egress.egress_threads,
        ..forebay_server::EgressConfig::default()
    };
    assert_eq!(all.server.egress, egress);
    let tier = resolved(&["--enable-hierarchical-cache"], &model(false)).engine.host_tier;
    assert_eq!(tier, Some(forebay_engine::HostConfig::default()));
    let images = resolved(&[], &model(true)).engine.images.expect("the model takes images");
    assert_eq!(images, forebay_engine::ImageConfig { patches: 4, ..Default::default() });
}

#[test]
fn ranks_and_replicas_divide_the_memory_of_host_tiers() {
    let percent = |flags: &[&str]| {
        let flags = [&["--enable-hierarchical-cache"], flags].concat();
        (resolved(&flags, &model(false)).hand.host_share * 100.0).round() as u32
    };
    assert_eq!(percent(&[]), 80);
    assert_eq!(percent(&["--tp-size", "2", "--dp-size", "2"]), 20);
    assert_eq!(percent(&["--dp-size", "4"]), 20);
}

#[test]
fn states_are_kept_where_there_is_a_prefix_cache() {
    let pages = |flags: &[&str]| resolved(flags, &model(false)).hand.state_pages;
    assert_eq!(pages(&[]), None);
    assert_eq!(pages(&["--max-state-pages=5"]), Some(5));
    assert_eq!(pages(&["--disable-state-cache"]), Some(0));
    assert_eq!(pages(&["--disable-radix-cache", "--max-state-pages=5"]), Some(0));
    let interval = |flags: &[&str]| resolved(flags, &model(false)).engine.state_interval;
    assert_eq!((interval(&[]), interval(&["--state-interval=0"])), (4096, 0));
}

#[test]
fn layers_with_a_window_have_their_own_pages_where_nothing_needs_whole_ones() {
    let ratio = |flags: &[&str]| resolved(flags, &model(false)).hand.window_ratio;
    assert_eq!(ratio(&[]), Some(0.5));
    assert_eq!(ratio(&["--swa-full-tokens-ratio=0.2"]), Some(0.2));
    assert_eq!(ratio(&["--disable-hybrid-kv-cache-manager"]), None);
    assert_eq!(ratio(&["--enable-hierarchical-cache"]), None);
    assert_eq!(ratio(&["--tp-size=2"]), None);
}

#[test]
fn no_secret_is_shown() {
    let flags = ["--router-key=secret-r"];
    let line = ["serve", "tiny", "--device", "sim"].iter().chain(&flags);
    let flags = Line::try_parse_from(line).expect("flags that clap takes").flags;
    let access = ServerConfig {
        api_keys: forebay_server::Keys::new(["secret-a"]),
        admin_keys: forebay_server::Keys::new(["secret-b"]),
        ..ServerConfig::default()
    };
    let all = Resolved::new(&flags, (&model(false), None), access).expect("a configuration");
    assert_eq!(all.server.server.router_key.as_deref(), Some("secret-r"));
    let shown = serde_json::to_string(&object(&all)).expect("JSON");
    assert!(!shown.contains("secret"), "{shown}");
}
