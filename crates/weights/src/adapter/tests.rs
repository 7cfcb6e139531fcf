use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::{Adapter, AdapterError, AdapterFolder, read_adapter};
use crate::families::Shape;
use crate::gguf::{GgufValue, gguf_bytes};
use crate::tensor::TorchNumber;

const MOST: u32 = 8;

fn shape(architecture: &str, more: &Value) -> Shape {
    let mut config = json!({
        "architectures": [architecture], "vocab_size": 31, "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "max_position_embeddings": 64, "pad_token_id": 0,
    });
    let fields = config.as_object_mut().expect("an object");
    fields.extend(more.as_object().expect("an object").clone());
    Shape::from_config(fields).expect("a model")
}

fn llama() -> Shape {
    shape("LlamaForCausalLM", &json!({}))
}

/// A folder with an adapter in which each tensor repeats one value.
struct Files(tempfile::TempDir);

impl Files {
    fn new(config: &Value, tensors: &[(&str, [usize; 2], f32)]) -> Self {
        let files = Self(tempfile::tempdir().expect("a folder"));
        let mut whole = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
        let fields = whole.as_object_mut().expect("an object");
        fields.extend(config.as_object().expect("an object").clone());
        fs::write(files.path().join("adapter_config.json"), whole.to_string()).expect("written");
        let (mut header, mut bytes) = (serde_json::Map::new(), Vec::<u8>::new());
        for &(name, [rows, columns], value) in tensors {
            let first = bytes.len();
            bytes.extend(value.to_le_bytes().repeat(rows * columns));
            let place = json!({"dtype": "F32", "shape": [rows, columns], "data_offsets": [first, bytes.len()]});
            header.insert(name.into(), place);
        }
        files.write(&Value::Object(header).to_string(), &bytes);
        files
    }

    fn write(&self, header: &str, bytes: &[u8]) {
        let length = (header.len() as u64).to_le_bytes();
        let all = [&length[..], header.as_bytes(), bytes].concat();
        fs::write(self.path().join("adapter_model.safetensors"), all).expect("written");
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    fn read(&self, shape: &Shape) -> Result<Adapter, String> {
        let read = Adapter::read(&AdapterFolder::Anywhere, self.0.path(), shape, MOST);
        read.map_err(|error| error.to_string())
    }
}

const A: &str = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight";
const B: &str = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight";

fn keys(rank: usize, value: f32) -> [(&'static str, [usize; 2], f32); 2] {
    [(A, [rank, 8], value), (B, [4, rank], value)]
}

#[test]
fn an_adapter_is_its_content() {
    let files = Files::new(&json!({"target_modules": ["k_proj"], "new_field": 3}), &keys(2, 0.5));
    let read = files.read(&llama()).expect("an adapter");
    assert_eq!((read.rank, &read.modules[..]), (2, &["self_attn.k_proj".to_owned()][..]));
    assert_eq!(read.warnings, ["new_field is not known and has no effect"]);
    let module = &read.manifest["modules"][0];
    assert_eq!(module["name"], "model.layers.1.self_attn.k_proj");
    assert_eq!((&module["scale"], &module["b"]["shape"]), (&json!(2.0), &json!([4, 2])));
    let again = Files::new(&json!({}), &keys(2, 0.5)).read(&llama()).expect("an adapter");
    assert_eq!(again.digest, read.digest, "files of the same content");
    for other in [
        Files::new(&json!({}), &keys(2, 0.25)),
        Files::new(&json!({"lora_alpha": 8}), &keys(2, 0.5)),
        Files::new(&json!({"r": 4, "lora_alpha": 8}), &keys(4, 0.5)),
    ] {
        assert_ne!(other.read(&llama()).expect("an adapter").digest, read.digest);
    }
}

#[test]
fn factors_follow_patterns_and_roots() {
    let scale = |config: &Value, rank| {
        let read = Files::new(config, &keys(rank, 1.0)).read(&llama()).expect("an adapter");
        read.manifest["modules"][0]["scale"].as_f64().expect("a number")
    };
    assert_eq!(scale(&json!({"lora_alpha": 6}), 2), 3.0);
    assert_eq!(scale(&json!({"r": 4, "use_rslora": true}), 4), 2.0);
    let pattern = json!({"rank_pattern": {"layers.1.self_attn.k_proj": 4, "k_proj": 3},
        "alpha_pattern": {"q_proj": 1, "k_proj": 12}});
    assert_eq!(scale(&pattern, 4), 3.0, "the first that fits");
    let error = Files::new(&json!({"r": 3}), &keys(2, 1.0)).read(&llama()).unwrap_err();
    assert!(error.ends_with("is of rank 2, and its adapter_config.json says 3"), "{error}");
}

#[test]
fn what_finds_no_place_is_refused_by_name() {
    let refused = |config: Value, tensors: &[(&str, [usize; 2], f32)], shape: &Shape| {
        Files::new(&config, tensors).read(shape).expect_err("it has a fault")
    };
    let none = || json!({});
    let [a, b] = keys(2, 1.0);
    let other = |name: &'static str| refused(none(), &[a, b, (name, [2, 8], 1.0)], &llama());
    for (error, why) in [
        (refused(none(), &[], &llama()), "there is no matrix in its file"),
        (refused(none(), &[a], &llama()), "k_proj.weight has only one of lora_A and lora_B"),
        (
            refused(none(), &[a, (B, [8, 2], 1.0)], &llama()),
            "[8, 8], and the model's own is [4, 8]",
        ),
        (
            refused(none(), &[(A, [2, 4], 1.0), b], &llama()),
            "[4, 4], and the model's own is [4, 8]",
        ),
        (refused(json!({"r": 9}), &keys(9, 1.0), &llama()), "ranks are from 1 to 8"),
        (refused(none(), &[a, (B, [4, 2], f32::NAN)], &llama()), "numbers that are not finite"),
        (
            refused(none(), &[a, (B, [4, 2], f32::INFINITY)], &llama()),
            "numbers that are not finite",
        ),
        (refused(json!({"lora_alpha": 1e300}), &keys(2, 1.0), &llama()), "has the factor inf"),
        (
            refused(json!({"target_modules": ["k_proj", "up_proj"]}), &[a, b], &llama()),
            "lists up_proj",
        ),
        (refused(json!({"use_dora": true}), &[a, b], &llama()), "has use_dora"),
        (
            refused(json!({"modules_to_save": ["lm_head"]}), &[a, b], &llama()),
            "has modules_to_save",
        ),
        (refused(json!({"bias": "all"}), &[a, b], &llama()), "has bias"),
        (
            refused(json!({"init_lora_weights": "pissa_niter_4"}), &[a, b], &llama()),
            "changed the base",
        ),
        (refused(json!({"peft_type": "IA3"}), &[a, b], &llama()), "LORA is served"),
        (other("base_model.model.lm_head.weight"), "which is no matrix of a low rank"),
        (other("base_model.model.lm_head.lora_A.weight"), "has only one of lora_A and lora_B"),
    ] {
        assert!(error.contains(why), "{error} lacks: {why}");
    }
    let pair = |module: &str| {
        let of = |half: &str| format!("base_model.model.model.{module}.lora_{half}.weight");
        let (a, b) = (of("A"), of("B"));
        refused(none(), &[(&a, [2, 8], 1.0), (&b, [31, 2], 1.0)], &llama())
    };
    for module in
        ["embed_tokens", "layers.2.mlp.up_proj", "layers.0.mlp.router", "layers.0.self_attn.q"]
    {
        assert!(
            pair(module).contains("a module for which LoRA is not supported"),
            "{}",
            pair(module)
        );
    }
    let experts =
        shape("MixtralForCausalLM", &json!({"num_local_experts": 4, "num_experts_per_tok": 2}));
    let (a, b) = (
        "model.layers.0.mlp.experts.0.gate_proj.lora_A.weight",
        "model.layers.0.mlp.experts.0.gate_proj.lora_B.weight",
    );
    let error = refused(none(), &[(a, [2, 8], 1.0), (b, [12, 2], 1.0)], &experts);
    assert!(error.contains("adapters of experts are not served"), "{error}");
}

#[test]
fn a_header_that_is_huge_is_not_read() {
    let files = Files::new(&json!({}), &keys(2, 1.0));
    files.write(&" ".repeat((1 << 20) + 1), &[]);
    assert!(files.read(&llama()).unwrap_err().contains("at most 1048576 are allowed"));
    fs::write(files.path().join("adapter_config.json"), " ".repeat(70_000)).expect("written");
    assert!(files.read(&llama()).unwrap_err().contains("has more than 65536 bytes"));
}

#[test]
fn a_matrix_of_several_modules_is_cut_as_the_base_is() {
    let shape = shape("Phi3ForCausalLM", &json!({}));
    let fused = [
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", [2, 8], 1.0),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight", [16, 2], 1.0),
    ];
    let read =
        Files::new(&json!({"target_modules": ["qkv_proj"]}), &fused).read(&shape).expect("read");
    let modules = read.manifest["modules"].as_array().expect("a list");
    let shapes: Vec<&Value> = modules.iter().map(|module| &module["b"]["shape"]).collect();
    assert_eq!(shapes, [&json!([4, 2]), &json!([8, 2]), &json!([4, 2])], "k, q, v");
    assert_eq!(modules[0]["a"], modules[1]["a"]);
    let offset = |at: usize| modules[at]["b"]["offset"].as_u64().expect("a number");
    assert_eq!((offset(0) - offset(1), offset(2) - offset(1)), (64, 96));
}

#[test]
fn gguf_adapters_have_the_order_of_the_base() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("one.gguf");
    let text = |text: &str| GgufValue::Text(text.into());
    let fields = [
        ("general.architecture", text("llama")),
        ("general.type", text("adapter")),
        ("adapter.type", text("lora")),
        ("adapter.lora.alpha", GgufValue::Float(6.0)),
    ];
    let tensors: [(&str, &[u64]); 2] =
        [("blk.1.attn_q.weight.lora_a", &[2, 8]), ("blk.1.attn_q.weight.lora_b", &[8, 2])];
    fs::write(&path, gguf_bytes(&fields, &tensors)).expect("written");
    let read = || Adapter::read(&AdapterFolder::Anywhere, &path, &llama(), MOST);
    let adapter = read().expect("an adapter");
    let module = &adapter.manifest["modules"][0];
    assert_eq!(module["name"], "model.layers.1.self_attn.q_proj");
    assert_eq!((&module["scale"], &module["b"]["pairs"]), (&json!(3.0), &json!(2)));
    fs::write(&path, gguf_bytes(&fields[..1], &tensors)).expect("written");
    assert!(read().unwrap_err().to_string().contains("general.type of the GGUF file is missing"));
}

#[test]
fn a_hand_reads_what_the_brain_has_read_or_says_that_it_changed() {
    let shape = shape("Phi3ForCausalLM", &json!({}));
    let fused = [
        ("base_model.model.model.layers.1.self_attn.qkv_proj.lora_A.weight", [2, 8], 0.5),
        ("base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight", [16, 2], 3.0),
    ];
    let files = Files::new(&json!({"target_modules": ["qkv_proj"]}), &fused);
    let manifest = files.read(&shape).expect("read").manifest;
    let pairs = read_adapter(&manifest, TorchNumber::Bfloat16).expect("the same content");
    let found: Vec<_> = pairs.iter().map(|pair| (&pair.module[..], pair.b.len())).collect();
    let rows = [("self_attn.k_proj", 16), ("self_attn.q_proj", 32), ("self_attn.v_proj", 16)];
    assert_eq!(found, rows, "rows of two numbers of 16 bits");
    let pair = &pairs[0];
    assert_eq!((pair.layer, pair.rank, &pair.a[..2]), (1, 2, &[0x00, 0x3f][..]));
    // 6.0 in bfloat16: the stored 3.0, times `lora_alpha` (4), divided by the rank (2).
    assert_eq!(pair.b[..2], [0xc0, 0x40]);
    let path = files.path().join("adapter_model.safetensors");
    let mut content = fs::read(&path).expect("there");
    *content.last_mut().expect("bytes") ^= 1;
    fs::write(&path, content).expect("written");
    let changed = read_adapter(&manifest, TorchNumber::Float32);
    assert!(matches!(changed, Err(AdapterError::Changed(_))));
    fs::remove_file(&path).expect("removed");
    let gone = read_adapter(&manifest, TorchNumber::Float32);
    assert!(matches!(gone, Err(AdapterError::Files(_))));
}
