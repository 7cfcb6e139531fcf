use std::collections::HashMap;
use std::path::Path;

use serde_json::json;

use crate::checkpoint::Checkpoint;
use crate::families::gguf::COMMON;
use crate::families::{
    ALL, Family, RowBlocks, Rule, Shape, Take, Weight, fused_keys, fused_queries, fused_values,
    layer_of, weights_of,
};
use crate::tensor::TorchNumber;

/// A Qwen3-MoE model with two layers, three experts, four query heads of 2 elements, and two key
/// heads.
fn shape() -> Shape {
    let config = json!({"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 7, "hidden_size": 4,
        "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 2, "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 2});
    Shape::from_config(config.as_object().expect("an object")).expect("a model")
}

fn weights(rules: &[Rule], name: &str, stored: &[usize]) -> Result<Option<Vec<Weight>>, String> {
    weights_of([rules, COMMON], (name, stored), &shape()).map_err(|error| error.to_string())
}

fn names(rules: &[Rule], name: &str, stored: &[usize]) -> Vec<String> {
    let found = weights(rules, name, stored).expect("it fits").expect("a rule");
    found.into_iter().map(|weight| weight.name).collect()
}

#[test]
fn names_of_gguf_become_those_of_weights() {
    for (stored, name) in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.1.attn_q.bias", "model.layers.1.self_attn.q_proj.bias"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
        ("blk.1.exp_probs_b.bias", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ] {
        assert_eq!(names(&[], stored, &[4]), [name]);
    }
    for stored in [
        "blk.0.exp_probs_b.weight",
        "blk.0.ffn_down_exps.bias",
        "blk.x.attn_q.weight",
        "blk.1234567890.attn_q.weight",
        "attn_q.weight",
        "blk.0.attn_q.scale",
        "blk.0.post_attention_norm.weight",
    ] {
        assert_eq!(weights(&[], stored, &[4]), Ok(None), "{stored}");
    }
    assert_eq!(names(&[], "rope_freqs.weight", &[4]), [""; 0]);
    assert_eq!(names(&[], "blk.2.attn_q.weight", &[8, 4]), [""; 0], "behind the last layer");
    assert_eq!(layer_of("model.layers.7.mlp.gate.weight"), Some(7));
    assert_eq!(layer_of("layers.7.mlp.gate.weight"), Some(7));
    assert_eq!(layer_of("model.norm.weight"), None);
}

#[test]
fn a_familys_rules_are_in_front() {
    let own = [Rule::renamed("blk.#.ffn_norm.*", "model.layers.#.pre_feedforward_layernorm.*")];
    let found = names(&own, "blk.1.ffn_norm.weight", &[4]);
    assert_eq!(found, ["model.layers.1.pre_feedforward_layernorm.weight"]);
    let prefix = [
        Rule::spare("model.visual.**"),
        Rule::renamed("model.language_model.**", "model.**"),
        Rule::new("model.layers.#.norm.*", "model.layers.#.input_layernorm.*", Take::ALL),
    ];
    assert_eq!(names(&prefix, "model.visual.blocks.0.weight", &[4]), [""; 0]);
    let found = names(&prefix, "model.language_model.layers.0.norm.weight", &[4]);
    assert_eq!(found, ["model.layers.0.input_layernorm.weight"]);
    let found = names(&prefix, "model.language_model.layers.0.mlp.up_proj.weight", &[2, 4]);
    assert_eq!(found, ["model.layers.0.mlp.up_proj.weight"], "no further rule");
    assert_eq!(weights(&prefix, "model.visual", &[4]), Ok(None), "`**` matches at least one part");
    let mixtral = Rule::renamed("x.#.experts.@.w1.*", "y.#.@.gate.*");
    assert_eq!(names(&[mixtral], "x.1.experts.12.w1.weight", &[2, 4]), ["y.1.12.gate.weight"]);
    assert_eq!(weights(&[mixtral], "x.1.experts.w.w1.weight", &[2, 4]), Ok(None));
    let flat = Rule::new("x.#.*", "y.#.*", Take::ALL.flat());
    let found = weights(&[flat], "x.1.weight", &[1, 4]).expect("it fits").expect("a rule");
    assert_eq!(found[0].shape, [4]);
}

#[test]
fn stacks_have_a_matrix_of_each_expert() {
    let found = weights(&[], "blk.1.ffn_gate_up_exps.weight", &[3, 4, 5]);
    let found = found.expect("it fits").expect("a rule");
    let of: HashMap<String, (usize, usize, Vec<usize>)> = found
        .into_iter()
        .map(|it| (it.name, (it.part.base + it.part.first, it.part.rows, it.shape)))
        .collect();
    assert_eq!(of.len(), 6);
    for expert in 0..3 {
        let at = format!("model.layers.1.mlp.experts.{expert}");
        assert_eq!(of[&format!("{at}.gate_proj.weight")], (4 * expert, 2, vec![2, 5]));
        assert_eq!(of[&format!("{at}.up_proj.weight")], (4 * expert + 2, 2, vec![2, 5]));
    }
    for (stored, why) in
        [(vec![4, 4, 5], "3 experts"), (vec![3, 3, 5], "2 parts"), (vec![3], "3 experts")]
    {
        let error = weights(&[], "blk.1.ffn_gate_up_exps.weight", &stored).expect_err(why);
        assert!(error.contains(why), "{error}");
    }
}

/// Returns the values that a rule takes from a stored tensor of 0, 1, 2, ...
fn taken(take: Take, stored: &[usize]) -> Result<Vec<Vec<f32>>, String> {
    // A shape's family and the family's rules have to live for `'static`: leak both.
    let rules = Box::leak(Box::new([Rule::new("x.#.*", "y.#.@.*", take)]));
    let family = Box::leak(Box::new(Family { rules, ..copy(ALL[4]) }));
    let shape = Shape { family, ..shape() };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    let count: usize = stored.iter().product();
    write(&path, "x.0.weight", stored, &(0..count).map(|it| it as f32).collect::<Vec<_>>());
    let found =
        Checkpoint::open("safetensors", &[path], &shape).map_err(|error| error.to_string())?;
    let mut names: Vec<&String> = found.shapes().keys().collect();
    names.sort();
    let read = |name: &String| {
        let elements: usize = found.shapes()[name].iter().product();
        let mut bytes = vec![0; 4 * elements];
        found.read(name, TorchNumber::Float32, &mut bytes).map_err(|error| error.to_string())?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&it| f32::from_le_bytes(it)).collect())
    };
    names.into_iter().map(read).collect()
}

fn copy(family: &Family) -> Family {
    let &Family {
        title, architecture, model_type, attention, layers, compiled, shape, rules, ..
    } = family;
    Family {
        title,
        architecture,
        model_type,
        attention,
        layers,
        compiled,
        shape,
        rules,
        gguf: None,
    }
}

fn write(path: &Path, name: &str, stored: &[usize], values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let header = json!({name: {"dtype": "F32", "shape": stored, "data_offsets": [0, bytes.len()]}});
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], header.as_bytes(), &bytes].concat()).expect("written");
}

#[test]
fn each_kind_of_part_is_read() {
    let rows = |first: usize, count: usize, columns: usize| -> Vec<f32> {
        (first * columns..(first + count) * columns).map(|it| it as f32).collect()
    };
    let all = |values: Vec<f32>| Ok(vec![values]);
    assert_eq!(taken(Take::ALL, &[3, 2]), all(rows(0, 3, 2)));
    // Four query heads of 2 elements, then two key heads and two value heads.
    assert_eq!(taken(Take::ALL.rows(fused_queries), &[16, 3]), all(rows(0, 8, 3)));
    assert_eq!(taken(Take::ALL.rows(fused_keys), &[16, 3]), all(rows(8, 4, 3)));
    assert_eq!(taken(Take::ALL.rows(fused_values), &[16, 3]), all(rows(12, 4, 3)));
    assert_eq!(taken(Take::ALL.rows(fused_values), &[16]), all(rows(12, 4, 1)), "a bias");
    assert_eq!(taken(Take::ALL.share(1, 2), &[6, 2]), all(rows(3, 3, 2)));
    assert_eq!(taken(Take::ALL.transposed(), &[2, 3]), all(vec![0.0, 3.0, 1.0, 4.0, 2.0, 5.0]));
    assert_eq!(taken(Take::ALL.every(1, 2), &[5, 2]), all(vec![2.0, 3.0, 6.0, 7.0]));
    assert_eq!(taken(Take::ALL.every(0, 2), &[5]), all(vec![0.0, 2.0, 4.0]));
    let odd_columns = Take::ALL.transposed().every(1, 2);
    assert_eq!(taken(odd_columns, &[2, 4]), all(vec![1.0, 5.0, 3.0, 7.0]));
    assert_eq!(taken(Take::ALL.flat(), &[1, 3]), all(vec![0.0, 1.0, 2.0]));
    assert_eq!(taken(Take::ALL.plus(1.0), &[3]), all(vec![1.0, 2.0, 3.0]));
    assert_eq!(taken(Take::ALL.times(0.5).plus(1.0), &[1, 3]), all(vec![1.0, 1.5, 2.0]));
    assert_eq!(
        taken(Take::ALL.pairs(|it| it.kv_heads), &[8]),
        all(vec![0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0])
    );
    // The first two rows of each group of five, starting at row 1.
    let blocks = Take::ALL.blocks(|_| Some(RowBlocks { first: 1, width: 2, step: 5, count: 2 }));
    assert_eq!(taken(blocks, &[10, 2]), all([rows(1, 2, 2), rows(6, 2, 2)].concat()));
    // The channels of a depthwise convolution.
    let channels = Take::ALL.blocks(|_| Some(RowBlocks { first: 1, width: 2, step: 2, count: 1 }));
    assert_eq!(taken(channels, &[4, 1, 3]), all(rows(1, 2, 3)));
    let decays = Take::ALL.flat().times(-1.0).plus(-1.0).log();
    assert!(taken(decays, &[2, 1]).expect("numbers")[0][0].is_nan(), "ln(-1)");
    assert_eq!(taken(Take::ALL.plus(1.0).log(), &[1]), all(vec![0.0]));
    assert_eq!(taken(Take::ALL.only(|_, _| false), &[3]), Ok(Vec::new()));
    // gpt-oss stores the gate and up projections of experts in the even and odd columns of a
    // transposed stack.
    let gates = taken(Take::EACH_EXPERT.transposed().every(0, 2), &[3, 2, 4]);
    let of = |expert: f32| [0.0, 4.0, 2.0, 6.0].map(|it| 8.0 * expert + it).to_vec();
    assert_eq!(gates, Ok(vec![of(0.0), of(1.0), of(2.0)]));
    let biases = taken(Take::EACH_EXPERT.every(1, 2), &[3, 4]);
    let odd = vec![vec![1.0, 3.0], vec![5.0, 7.0], vec![9.0, 11.0]];
    assert_eq!(biases, Ok(odd), "a vector of each expert");
    let vectors = vec![vec![0.0, 1.0], vec![2.0, 3.0], vec![4.0, 5.0]];
    assert_eq!(taken(Take::EACH_EXPERT, &[3, 2]), Ok(vectors));
    let of_rows = taken(Take::EACH_EXPERT.every(1, 2), &[3, 4, 2]);
    let of = |expert: f32| [2.0, 3.0, 6.0, 7.0].map(|it| 8.0 * expert + it).to_vec();
    assert_eq!(of_rows, Ok(vec![of(0.0), of(1.0), of(2.0)]), "odd rows");
    // Qwen3-VL-MoE stores `[columns, rows]` in some files and `[rows, columns]` in others.
    let either = Take::EACH_EXPERT.transposed_where(|_, [rows, _]| rows == 2);
    let turned = |expert: f32| [0.0, 2.0, 1.0, 3.0].map(|it| 4.0 * expert + it).to_vec();
    assert_eq!(taken(either, &[3, 2, 2]), Ok(vec![turned(0.0), turned(1.0), turned(2.0)]));
    assert_eq!(taken(either, &[3, 1, 4]), Ok(vec![rows(0, 1, 4), rows(1, 1, 4), rows(2, 1, 4)]));
    for (take, stored, why) in [
        (Take::ALL.rows(fused_values), vec![15, 2], "rows 12..16"),
        (Take::ALL.share(0, 2), vec![5, 2], "2 parts can't share"),
        (Take::ALL.transposed(), vec![2, 2, 2], "a matrix is wanted"),
        (Take::ALL.pairs(|it| it.heads), vec![4, 2], "no two halves"),
        (Take::ALL.blocks(|_| None), vec![4, 2], "no such rows"),
        (
            Take::ALL.blocks(|_| Some(RowBlocks { first: 1, width: 2, step: 5, count: 2 })),
            vec![7, 2],
            "2 blocks of 2 rows",
        ),
    ] {
        let error = taken(take, &stored).expect_err(why);
        assert!(error.contains(why), "{error}");
    }
}
