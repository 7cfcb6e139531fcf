//! Layers that differ in windows, rotary embeddings and where their norms are.

use serde_json::{Value, json};

use super::configs::{attention, of};
use crate::error::ModelError;
use crate::families::{Activation, FeedShape, Mixer, Norm, NormPlacement, QkNorm, Shape};

#[test]
fn states_of_recurrent_layers_are_counted() {
    // The sizes of Qwen3.6-35B-A3B.
    let sizes = json!({"architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 40, "head_dim": 256,
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4});
    let shape = of(&[sizes]).expect("a model");
    assert_eq!(shape.check_served(), Ok(()));
    let attends = |layer: usize| matches!(shape.mixer(layer), Mixer::Attention(it) if it.gate);
    assert_eq!((0..8).filter(|&layer| attends(layer)).collect::<Vec<_>>(), [3, 7]);
    assert_eq!(shape.ropes[0].dim, 64, "a quarter of a head rotates");
    assert_eq!(shape.state_bytes(2), 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2));
    let granite = json!({"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0,
        "shared_intermediate_size": 96, "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2});
    let shape = of(std::slice::from_ref(&granite)).expect("a model");
    assert_eq!(shape.state_bytes(4), 2 * (8 * 24 * 16 * 4 + 3 * (128 + 96) * 4));
    for (changes, part) in [
        (json!({"time_step_limit": [0.001, 0.1]}), "time_step_limit"),
        (json!({"mamba_n_heads": 7}), "mamba_n_heads"),
        (json!({"layer_types": ["mamba"]}), "layer_types"),
    ] {
        let error = of(&[granite.clone(), changes]).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(of(&[json!({})]).expect("a model").state_bytes(4), 0);
}

#[test]
fn layers_of_nemotron_have_one_part() {
    let own = json!({"architectures": ["NemotronHForCausalLM"], "mamba_num_heads": 6, "mamba_head_dim": 20,
        "ssm_state_size": 24, "n_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "mlp_bias": null,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "hidden_act": null});
    let letters = json!({"hybrid_override_pattern": "ME*-M"});
    let names = json!({"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]});
    let [by_letters, by_names] =
        [letters.clone(), names].map(|kinds| of(&[own.clone(), kinds]).expect("a model"));
    assert_eq!(by_letters, by_names);
    assert_eq!(by_letters.check_served(), Ok(()));
    let mixes = |layer: usize| !matches!(by_letters.mixer(layer), Mixer::None);
    let feeds = |layer: usize| !matches!(by_letters.feed(layer), FeedShape::None);
    let layers = 0..by_letters.layers.len();
    assert_eq!(layers.clone().map(mixes).collect::<Vec<_>>(), [true, false, true, false, true]);
    assert!(layers.into_iter().all(|layer| mixes(layer) != feeds(layer)));
    assert_eq!(by_letters.state_bytes(4), 2 * (6 * 24 * 20 * 4 + 3 * (120 + 96) * 4));
    for (changes, part) in [
        (json!({"hybrid_override_pattern": "M?"}), "layers_block_type"),
        (json!({"hybrid_override_pattern": ""}), "layers_block_type"),
        (json!({"n_groups": 4}), "n_groups"),
        (json!({"time_step_limit": [0.001, 0.1]}), "time_step_limit"),
        (json!({"mlp_bias": true}), "mlp_bias"),
    ] {
        let error = of(&[own.clone(), letters.clone(), changes]).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn factors_of_falcon_are_those_of_its_weights() {
    let own = json!({"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 120, "mamba_n_heads": 6,
        "mamba_d_head": 20, "mamba_d_state": 24, "mamba_n_groups": 2, "key_multiplier": 0.5,
        "attention_in_multiplier": 3.0, "ssm_multipliers": [1, 1, 1, 1, 0.25], "lm_head_multiplier": 0.75});
    let shape = of(std::slice::from_ref(&own)).expect("a model");
    assert_eq!(shape.check_served(), Ok(()));
    let factor = |name: &str| shape.factors.get(name).copied();
    assert_eq!(factor("self_attn.k_proj.weight"), Some(1.5));
    assert_eq!(factor("self_attn.k_proj.bias"), Some(0.5));
    assert_eq!(factor("self_attn.q_proj.bias"), None);
    assert_eq!(factor("linear_attn.in_proj_a.weight"), Some(0.25));
    assert_eq!((shape.scales.logits, shape.scales.inputs), (0.75, 1.0));
    let layers = shape.layers.len() as u64;
    assert_eq!(shape.state_bytes(4), layers * (6 * 24 * 20 * 4 + 3 * (120 + 96) * 4));
    for (changes, part) in [
        (json!({"ssm_multipliers": [1, 2]}), "ssm_multipliers"),
        (json!({"mamba_d_ssm": 121}), "mamba_d_ssm"),
        (json!({"projectors_bias": true}), "projectors_bias"),
    ] {
        let error = of(&[own.clone(), changes]).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    let fp8 = json!({"quantization_config": {"quant_method": "fp8"}});
    let error = of(&[own, fp8]).expect("a model").check_served().expect_err("factors").to_string();
    assert!(error.contains("factors of weights"), "{error}");
}

#[test]
fn kimi_linear_counts_its_layers_from_one() {
    let own = json!({"architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 4,
        "kv_lora_rank": 20, "qk_nope_head_dim": 24, "qk_rope_head_dim": 12, "v_head_dim": 20,
        "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 24,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "num_heads": 3,
            "head_dim": 16, "short_conv_kernel_size": 3}});
    let shape = of(std::slice::from_ref(&own)).expect("a model");
    assert_eq!(shape.check_served(), Ok(()));
    let latent = |layer: usize| matches!(shape.mixer(layer), Mixer::Latent(_));
    assert_eq!((0..4).map(latent).collect::<Vec<_>>(), [false, false, true, false]);
    assert!(shape.layers.iter().all(|layer| layer.rope.is_none()));
    assert_eq!(shape.state_bytes(4), 3 * (3 * 16 * 16 * 4 + 2 * 3 * 48 * 4));
    assert!(shape.experts(0).is_none() && shape.experts(1).is_some());
}

#[test]
fn gemma_has_its_windows_ropes_and_scales() {
    let own = json!({"num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 24, "sliding_window": 16,
        "query_pre_attn_scalar": 20, "attn_logit_softcapping": null, "tie_word_embeddings": null});
    let gemma = |name: &str, changes: Value| {
        of(&[own.clone(), json!({"architectures": [name]}), changes]).expect("a model")
    };
    let shape = gemma("Gemma3ForCausalLM", json!({}));
    assert_eq!(shape.check_served(), Ok(()));
    let facts = |shape: &Shape, layer: usize| {
        let Mixer::Attention(attention) = shape.mixer(layer) else { panic!("heads") };
        let rope = shape.layers[layer].rope.map(|rope| shape.ropes[usize::from(rope)].theta);
        (attention.window, rope)
    };
    for layer in 0..8 {
        let wanted = if layer == 5 { (None, Some(1e6)) } else { (Some(16), Some(1e4)) };
        assert_eq!(facts(&shape, layer), wanted);
        assert_eq!(shape.layers[layer].norms, NormPlacement::Around);
    }
    let Mixer::Attention(attention) = shape.mixer(0) else { panic!("heads") };
    assert_eq!((attention.scale, attention.cap), (Some(20.0_f64.powf(-0.5)), None));
    assert_eq!((shape.scales.embeddings, shape.norm), (8.0, Norm::RmsBesideOne));
    assert!(!shape.tied, "null counts as false");
    let FeedShape::Dense(feed) = shape.feed(0) else { panic!("a dense part") };
    assert_eq!(feed.activation, Activation::GeluTanh);
    // A window longer than any prompt is dropped, but its layers keep their rotary embedding.
    let long = gemma("Gemma3ForCausalLM", json!({"sliding_window": 128}));
    assert_eq!((facts(&long, 0), facts(&long, 5)), ((None, Some(1e4)), (None, Some(1e6))));
    let new = json!({"layer_types": vec!["full_attention"; 8], "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}});
    let new = gemma("Gemma3ForCausalLM", new);
    assert_eq!((facts(&new, 0), new.ropes.len()), ((None, Some(5.0)), 1));
    let old = json!({"rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let old = gemma("Gemma3ForCausalLM", old);
    assert_eq!(old.ropes[0].scaling, None);
    assert!(old.ropes[1].scaling.is_some() && old.ropes[1].theta == 9.0);
    let second = gemma("Gemma2ForCausalLM", json!({}));
    assert_eq!((facts(&second, 0).0, facts(&second, 1).0), (Some(16), None));
    assert_eq!(second.scales.logit_cap, Some(30.0));
    let other = of(&[
        own,
        json!({"architectures": ["Gemma2ForCausalLM"], "layer_types": vec!["chunked"; 8]}),
    ]);
    assert!(matches!(other, Err(ModelError::Unserved(why)) if why.contains("chunked")));
}

#[test]
fn the_text_of_a_gemma_with_a_tower_has_what_its_config_leaves_out() {
    let config = json!({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 7, "sliding_window": 16, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}});
    let shape = Shape::from_config(config.as_object().expect("an object")).expect("a model");
    assert_eq!(shape.check_served(), Ok(()));
    assert!(shape.tower.is_none() && shape.tied);
    let Mixer::Attention(attention) = shape.mixer(0) else { panic!("heads") };
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim), (8, 4, 256));
    assert_eq!((shape.vocab_size, shape.max_positions), (262_208, 131_072));
    assert_eq!(
        shape.ropes.iter().map(|it| it.scaling.is_some()).collect::<Vec<_>>(),
        [false, true]
    );
}

#[test]
fn gemma_4_has_kinds_of_heads_and_layers_that_share_keys() {
    let own = json!({"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 9, "head_dim": 24,
        "num_kv_shared_layers": 3, "use_double_wide_mlp": true, "sliding_window": 16, "global_head_dim": 40,
        "layer_types": null, "hidden_size_per_layer_input": 8, "attention_k_eq_v": true,
        "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0});
    let gemma = |changes: Value| of(&[own.clone(), changes]);
    let shape = gemma(json!({})).expect("a model");
    assert_eq!(shape.check_served(), Ok(()));
    let heads = |shape: &Shape, layer: usize| {
        let Mixer::Attention(it) = shape.mixer(layer) else { panic!("heads") };
        (it.window, it.kv_heads, it.head_dim, it.keys_are_values)
    };
    assert_eq!(heads(&shape, 0), (Some(16), 2, 24, false));
    // The last layer has no window, whatever its position in the cycle.
    for layer in [5, 8] {
        assert_eq!(heads(&shape, layer), (None, 1, 40, true));
    }
    let sources: Vec<_> = shape.layers.iter().map(|layer| layer.keys_of).collect();
    assert_eq!(sources[..6], [None; 6]);
    assert_eq!(sources[6..], [Some(4), Some(4), Some(5)]);
    let alone = gemma(json!({"num_kv_shared_layers": 4}));
    assert!(alone.is_err_and(|error| error.to_string().contains("no layer has keys")));
    let FeedShape::Dense(wide) = shape.feed(8) else { panic!("a dense part") };
    assert_eq!(wide.intermediate_size, 192);
    assert!(shape.layers.iter().all(|layer| layer.scaled));
    assert_eq!(shape.layer_inputs.map(|it| (it.vocab_size, it.size)), Some((131, 8)));
    let turned = shape.ropes[1].scaling.as_ref().map(|it| it["turned"].clone());
    assert_eq!((turned, shape.ropes[1].theta), (Some(json!(5)), 1e6));
    let saved = json!({"per_layer_config": {"5": {"head_dim": 8, "num_key_value_heads": 4}}});
    assert_eq!(heads(&gemma(saved).expect("a model"), 5).2, 8);
    let experts = json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24});
    let shape = gemma(experts).expect("a model");
    let found = shape.experts(8).expect("experts");
    assert!((found.beside, found.shared_size, found.count) == (true, 192, 4));
    let all = gemma(json!({"use_bidirectional_attention": "all"}));
    assert!(all.is_err_and(|error| error.to_string().contains("bidirectional attention")));
}

#[test]
fn llama_4_has_chunks_and_layers_without_rotation() {
    let own = json!({"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 6, "head_dim": 24,
        "attention_chunk_size": 16, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 80,
        "num_local_experts": 4, "floor_scale": 8});
    let llama = |changes: Value| of(&[own.clone(), changes]);
    let shape = llama(json!({})).expect("a model");
    assert_eq!(shape.check_served(), Ok(()));
    let facts = |shape: &Shape, layer: usize| {
        let Mixer::Attention(it) = shape.mixer(layer) else { panic!("heads") };
        (it.chunk, it.qk_norm, it.query_scale.map(|it| it.first), shape.layers[layer].rope)
    };
    for layer in 0..6 {
        let wanted = match layer {
            3 => (None, QkNorm::None, Some(1), None),
            _ => (Some(16), QkNorm::Plain, None, Some(0)),
        };
        assert_eq!(facts(&shape, layer), wanted);
    }
    let Mixer::Attention(still) = shape.mixer(3) else { panic!("heads") };
    let scale = still.query_scale.expect("a factor");
    assert_eq!((scale.at(6), scale.at(7)), (1.0, 1.0 + 0.1 * 2.0_f32.ln()));
    let experts = shape.experts(1).expect("experts");
    assert!(experts.weighs_inputs && experts.shared_size == 96 && experts.per_token == 1);
    assert!(matches!(shape.feed(0), FeedShape::Dense(feed) if feed.intermediate_size == 80));
    let listed = json!({"no_rope_layers": [0, 1, 1, 1, 1, 1], "moe_layers": [0], "use_qk_norm": false,
        "attn_temperature_tuning": false, "attention_chunk_size": null});
    let listed = llama(listed).expect("a model");
    assert_eq!(facts(&listed, 0), (None, QkNorm::None, None, None));
    assert_eq!(facts(&listed, 1), (None, QkNorm::None, None, Some(0)));
    assert!(listed.experts(0).is_some() && listed.experts(1).is_none());
    assert!(llama(json!({"no_rope_layers": [1]})).is_err());
}

#[test]
fn norms_stand_behind_the_parts_of_olmo_and_in_front_of_both_of_commands() {
    let olmo = of(&[json!({"architectures": ["Olmo2ForCausalLM"]})]).expect("a model");
    assert_eq!(attention(&olmo).qk_norm, QkNorm::Rows);
    assert!(olmo.layers.iter().all(|layer| layer.norms == NormPlacement::After));
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let own = json!({"num_hidden_layers": 5, "sliding_window": 16, "rope_theta": 9.0, "rope_scaling": yarn});
    let olmo = of(&[own.clone(), json!({"architectures": ["Olmo3ForCausalLM"]})]).expect("a model");
    let windows = |shape: &Shape| -> Vec<Option<u64>> {
        let window = |layer| match shape.mixer(layer) {
            Mixer::Attention(attention) => attention.window,
            _ => panic!("heads"),
        };
        (0..shape.layers.len()).map(window).collect()
    };
    let wanted = [Some(16), Some(16), Some(16), None, Some(16)];
    assert_eq!(windows(&olmo), wanted);
    let rope = |layer: usize| &olmo.ropes[usize::from(olmo.layers[layer].rope.expect("a rope"))];
    assert!(rope(0).scaling.is_none() && rope(3).scaling.is_some() && rope(0).theta == 9.0);
    let plain = json!({"rope_scaling": null, "layer_norm_eps": 0.5, "logit_scale": 0.25});
    let command =
        of(&[own, plain, json!({"architectures": ["Cohere2ForCausalLM"]})]).expect("a model");
    assert_eq!((windows(&command), command.check_served()), (wanted.to_vec(), Ok(())));
    let rotated = command.layers.iter().map(|layer| layer.rope.is_some());
    assert_eq!(rotated.collect::<Vec<_>>(), [true, true, true, false, true]);
    assert!(command.layers.iter().all(|layer| layer.norms == NormPlacement::Parallel));
    assert_eq!((command.norm, command.norm_eps, command.scales.logits), (Norm::Mean, 0.5, 0.25));
    let normed = of(&[json!({"architectures": ["Cohere2ForCausalLM"], "use_qk_norm": true})]);
    assert!(normed.is_err_and(|error| error.to_string().contains("subtract the mean")));
}

#[test]
fn positions_of_embedders_see_both_ways() {
    let windows = |shape: &Shape| -> Vec<_> {
        (0..6).map(|layer| shape.mixer(layer).attention().expect("attention").window).collect()
    };
    let ropes = |shape: &Shape| -> Vec<_> { shape.ropes.iter().map(|rope| rope.theta).collect() };
    let own = json!({"num_hidden_layers": 6, "max_position_embeddings": 128});
    let gemma = |changes: Value| {
        let name = json!({"architectures": ["Gemma3TextModel"], "sliding_window": 12});
        of(&[own.clone(), name, changes]).expect("a model")
    };
    let causal = gemma(json!({}));
    assert!(!causal.both_ways() && windows(&causal)[0] == Some(12));
    let both = gemma(json!({"use_bidirectional_attention": true}));
    assert!(both.both_ways() && both.check_served() == Ok(()));
    let seven = Some(7);
    assert_eq!(windows(&both), [seven, seven, seven, seven, seven, None]);
    assert_eq!((both.norm, both.layers[0].norms), (Norm::RmsBesideOne, NormPlacement::Around));
    let bert = |changes: Value| {
        let name = json!({"architectures": ["ModernBertModel"], "hidden_size": 64,
            "num_key_value_heads": null, "local_attention": 8});
        of(&[own.clone(), name, changes])
    };
    let shape = bert(json!({"global_rope_theta": 5000.0})).expect("a model");
    assert!(shape.both_ways() && shape.embedding_norm && shape.check_served() == Ok(()));
    let five = Some(5);
    assert_eq!(windows(&shape), [None, five, five, None, five, five]);
    assert_eq!((ropes(&shape), shape.norm), (vec![5000.0, 10_000.0], Norm::Mean));
    let norms: Vec<_> = shape.layers.iter().map(|layer| layer.norms).collect();
    let (first, others) = (NormPlacement::BeforeFeed, NormPlacement::Before);
    assert_eq!(norms, [first, others, others, others, others, others]);
    let FeedShape::Dense(feed) = shape.feed(0) else { panic!("a dense part") };
    assert_eq!((feed.activation, feed.gated), (Activation::Gelu, true));
    let kinds = json!({"layer_types": ["sliding_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "sliding_attention"]});
    assert_eq!(windows(&bert(kinds).expect("a model")), [five, None, None, None, None, five]);
    for (changes, part) in [
        (json!({"norm_bias": true}), "norm_bias"),
        (json!({"hidden_activation": "sine"}), "hidden_activation"),
        (json!({"layer_types": ["chunked_attention"]}), "layer_types"),
    ] {
        let error = bert(changes).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    let mut mixed = shape;
    if let Mixer::Attention(attention) = &mut mixed.mixers[0] {
        attention.both_ways = false;
    }
    let refusal = mixed.check_served().expect_err("a mixture").to_string();
    assert!(refusal.contains("bidirectional attention in some layers"), "{refusal}");
}
