use serde_json::{Value, json};

use crate::error::ModelError;
use crate::families::{
    ALL, Activation, Attention, DenseFeed, ExpertScores, Experts, FeedShape, KeyChoice, Latent,
    Mixer, Norm, NormPlacement, QkNorm, QueryScale, Recurrence, Routing, Scales, Shape,
};
use crate::{Angles, TorchNumber};

pub(super) fn of(changes: &[Value]) -> Result<Shape, ModelError> {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    });
    for (key, value) in changes.iter().filter_map(Value::as_object).flatten() {
        config[key] = value.clone();
    }
    Shape::from_config(config.as_object().expect("an object"))
}

fn qwen(changes: Value) -> Result<Shape, ModelError> {
    let own = json!({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "norm_topk_prob": true,
        "num_hidden_layers": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24});
    of(&[own, changes])
}

fn glm(changes: Value) -> Result<Shape, ModelError> {
    let own = json!({"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_hidden_layers": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24});
    of(&[own, changes])
}

fn deepseek(name: &str, changes: Value) -> Result<Shape, ModelError> {
    let own = json!({"architectures": [name], "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "num_hidden_layers": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12});
    of(&[own, changes])
}

pub(super) fn attention(shape: &Shape) -> Attention {
    let Mixer::Attention(attention) = shape.mixer(0) else { panic!("attention of heads") };
    *attention
}

fn latent(shape: &Shape) -> Latent {
    let Mixer::Latent(latent) = shape.mixer(0) else { panic!("latent attention") };
    latent.clone()
}

fn sparse(shape: &Shape) -> Vec<bool> {
    (0..shape.layers.len()).map(|layer| shape.experts(layer).is_some()).collect()
}

fn experts(shape: &Shape) -> Experts {
    let found = (0..shape.layers.len()).find_map(|layer| shape.experts(layer));
    *found.expect("experts")
}

#[test]
fn families_have_their_biases_and_norms() {
    let llama = of(&[json!({"attention_bias": true, "mlp_bias": true})]).expect("a model");
    let of_llama = attention(&llama);
    assert!(of_llama.qkv_bias && of_llama.output_bias && of_llama.qk_norm == QkNorm::None);
    assert_eq!((of_llama.head_dim, llama.ropes[0].dim), (16, 16));
    let FeedShape::Dense(feed) = llama.feed(0) else { panic!("a dense part") };
    assert!(feed.bias && feed.gated && feed.activation == Activation::Silu);
    let qwen2 = attention(&of(&[json!({"architectures": ["Qwen2ForCausalLM"]})]).expect("a model"));
    assert!(qwen2.qkv_bias && !qwen2.output_bias);
    let qwen3 = of(&[json!({"architectures": ["Qwen3ForCausalLM"]})]).expect("a model");
    assert!(attention(&qwen3).qk_norm == QkNorm::Heads && attention(&qwen3).head_dim == 128);
    assert_eq!(sparse(&qwen3), [false; 3]);
    assert_eq!(qwen3.check_served(), Ok(()));
}

#[test]
fn a_family_has_several_names() {
    for family in ALL {
        let body = family.architecture.replace("ForCausalLM", "Model");
        for (names, model_type) in [
            (json!([family.architecture]), Value::Null),
            (json!([body]), Value::Null),
            (Value::Null, json!(family.model_type)),
            (json!([]), json!(family.model_type)),
        ] {
            let found = of(&[json!({"architectures": names, "model_type": model_type})]);
            // The error of a missing key is fine here: some families need further keys.
            if let Err(error) = found {
                let told = error.to_string();
                assert!(!told.contains("the architecture"), "{names} {model_type}: {told}");
            }
        }
    }
    let llama = of(&[json!({"architectures": null, "model_type": "llama"})]).expect("a model");
    assert_eq!(llama.family.architecture, "LlamaForCausalLM");
    let nameless = of(&[json!({"architectures": null})]).expect_err("no name");
    assert!(nameless.to_string().contains("'model_type'"), "{nameless}");
}

#[test]
fn whatever_no_hand_has_is_named() {
    for (changes, reason) in [
        (json!({"architectures": ["MambaForCausalLM"]}), "the architecture MambaForCausalLM: try"),
        (
            json!({"architectures": ["DeepseekV4ForCausalLM"]}),
            "no hand serves the architecture DeepseekV4ForCausalLM (compressed attention",
        ),
        (json!({"architectures": [], "model_type": "mamba"}), "of model_type mamba"),
        (json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "rotated in part"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}),
            "differ between layers",
        ),
        (json!({"hidden_act": "relu2"}), "hidden_act \"relu2\""),
        (json!({"hidden_act": "sine"}), "hidden_act \"sine\""),
        (json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), "dynamic"),
    ] {
        let error = of(&[changes]).and_then(|shape| shape.check_served()).expect_err("unserved");
        let told = error.to_string();
        assert!(matches!(&error, ModelError::Unserved(_)) && told.contains(reason), "{told}");
        assert!(told.starts_with("no hand serves") && !told.contains('\n'), "{told}");
    }
    assert!(matches!(of(&[json!({"vocab_size": -1})]), Err(ModelError::Broken(_))));
    assert!(matches!(of(&[json!({"hidden_size": null})]), Err(ModelError::Broken(_))));
    assert!(matches!(of(&[json!({"num_hidden_layers": 0})]), Err(ModelError::Broken(_))));
}

#[test]
fn every_part_that_no_hand_has_is_refused_by_its_name() {
    type Change = fn(&mut Shape);
    fn attends(shape: &mut Shape, change: fn(&mut Attention)) {
        for mixer in &mut shape.mixers {
            if let Mixer::Attention(attention) = mixer {
                change(attention);
            }
        }
    }
    fn with_experts() -> Vec<FeedShape> {
        qwen(json!({})).expect("a model").feeds
    }
    const CHANGES: [(&str, Change); 6] = [
        ("different lengths", |it| attends(it, |attention| attention.value_dim = 8)),
        ("that subtract the mean", |it| {
            it.norm = Norm::Mean;
            it.layers[1].norms = NormPlacement::Around;
        }),
        ("in front of the layer", |it| {
            it.feeds = with_experts();
            it.layers[1].norms = NormPlacement::Parallel;
        }),
        ("activations that differ", |it| {
            let FeedShape::Dense(feed) = it.feeds[0] else { panic!("a dense part") };
            it.feeds.push(FeedShape::Dense(DenseFeed { activation: Activation::Gelu, ..feed }));
        }),
        ("layers of one part", |it| {
            it.feeds.push(FeedShape::None);
            it.layers[1].feed = 1;
            it.layers[1].norms = NormPlacement::Around;
        }),
        ("recurrent layers alone", |it| {
            it.mixers = vec![Mixer::Recurrence(Recurrence::convolution(64, 4, false))];
        }),
    ];
    let plain = of(&[json!({})]).expect("a model");
    assert_eq!(plain.check_served(), Ok(()));
    for (part, change) in CHANGES {
        let mut shape = plain.clone();
        change(&mut shape);
        let error = shape.check_served().expect_err(part).to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
    let ungated = |shape: &mut Shape| {
        let FeedShape::Dense(feed) = &mut shape.feeds[0] else { panic!("a dense part") };
        feed.gated = false;
    };
    let mut shape = plain;
    ungated(&mut shape);
    assert!(shape.check_served().is_err_and(|error| error.to_string().contains("without a gate")));
    let biased = qwen(json!({"mlp_bias": true}));
    assert!(biased.is_err_and(|error| error.to_string().contains("mlp_bias")));
}

#[test]
fn ropes_of_both_generations_are_one() {
    let new = json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0,
        "original_max_position_embeddings": 64}});
    let old = json!({"rope_theta": 5.0, "rope_scaling": {"type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 64}});
    let (new, old) = (of(&[new]).expect("a model"), of(&[old]).expect("a model"));
    assert_eq!((new.ropes[0].theta, &new.ropes), (5.0, &old.ropes));
    assert_eq!((new.longest_context(), old.longest_context()), (256, 256));
}

#[test]
fn windows_are_of_the_layers_that_have_them() {
    let windows = |changes: Value| {
        let shape = of(&[json!({"sliding_window": 16}), changes]).expect("a model");
        let window = |layer| match shape.mixer(layer) {
            Mixer::Attention(attention) => attention.window,
            _ => None,
        };
        (0..3).map(window).collect::<Vec<_>>()
    };
    assert_eq!(windows(json!({})), [None; 3]);
    let mistral = json!({"architectures": ["MistralForCausalLM"]});
    assert_eq!(windows(mistral.clone()), [Some(16); 3]);
    assert_eq!(windows(json!({"architectures": ["Qwen3ForCausalLM"]})), [None; 3]);
    let upper = json!({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(upper), [None, Some(16), Some(16)]);
    let kinds = json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]});
    assert_eq!(windows(kinds), [None, Some(16), None]);
    let shape = of(&[mistral, json!({"sliding_window": 128})]).expect("a model");
    assert_eq!(attention(&shape).window, None, "no prompt is longer than the window");
}

#[test]
fn layers_have_experts_as_the_config_says() {
    let all = qwen(json!({"intermediate_size": null})).expect("a model");
    let wanted = Experts {
        count: 8,
        per_token: 2,
        intermediate_size: 24,
        shared_size: 0,
        gated: true,
        latent_size: 0,
        shared_gate: false,
        beside: false,
        weighs_inputs: false,
        activation: Activation::Silu,
        bias: false,
        routing: Routing::SOFTMAX,
        normalise: true,
        scaling: 1.0,
    };
    assert_eq!((all.feeds.len(), experts(&all)), (1, wanted));
    assert!(attention(&all).qk_norm == QkNorm::Heads && attention(&all).head_dim == 16);
    assert!(sparse(&all) == [true; 6] && all.has_place_for(5) && !all.has_place_for(6));
    let some = qwen(json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]})).expect("a model");
    assert_eq!(sparse(&some), [false, true, false, false, false, true]);
    let FeedShape::Dense(feed) = some.feed(0) else { panic!("a dense part") };
    assert_eq!(feed.intermediate_size, 96);
    let none = qwen(json!({"num_experts": 0})).expect("a model");
    assert_eq!(sparse(&none), [false; 6]);
    let sigmoid = qwen(json!({"scoring_func": "sigmoid"}));
    assert!(matches!(sigmoid, Err(ModelError::Unserved(why)) if why.contains("scoring_func")));
    for broken in [
        json!({"num_experts_per_tok": 9}),
        json!({"num_experts": null}),
        json!({"moe_intermediate_size": null}),
        json!({"num_experts": 1 << 20}),
    ] {
        assert!(matches!(qwen(broken), Err(ModelError::Broken(_))));
    }
}

#[test]
fn glm_has_groups_a_shared_part_and_half_turned_heads() {
    let usual = glm(json!({"attention_bias": true})).expect("a model");
    assert_eq!(sparse(&usual), [false, true, true, true, true, true]);
    let of_usual = attention(&usual);
    assert!(of_usual.qkv_bias && !of_usual.output_bias && of_usual.qk_norm == QkNorm::None);
    assert_eq!((of_usual.head_dim, usual.ropes[0].dim), (16, 8));
    assert_eq!(experts(&usual).routing, Routing::corrected(2, 1));
    let told = |experts: Experts| (experts.shared_size, experts.normalise, experts.scaling);
    assert_eq!(told(experts(&usual)), (24, true, 1.0));
    let other = glm(json!({
        "first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": false, "use_qk_norm": true,
        "routed_scaling_factor": 2.5, "rope_parameters": {"partial_rotary_factor": 0.25}, "n_group": 1,
        "topk_group": 1,
    }))
    .expect("a model");
    assert!(attention(&other).qk_norm == QkNorm::Heads && other.ropes[0].dim == 4);
    assert_eq!((sparse(&other), experts(&other).routing.groups), (vec![true; 6], 1));
    assert_eq!(told(experts(&other)), (48, false, 2.5));
    let alone = glm(json!({"n_shared_experts": null})).expect("a model");
    assert_eq!(experts(&alone).shared_size, 0);
}

#[test]
fn groups_that_make_no_sense_are_refused() {
    for (changes, reason) in [
        (json!({"n_group": 3}), "n_group"),
        (json!({"topk_group": 3}), "topk_group"),
        (json!({"n_group": 8}), "topk_group"),
        (json!({"num_experts_per_tok": 5}), "its groups have 4"),
        (json!({"n_routed_experts": null}), "n_routed_experts"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
    ] {
        let error = glm(changes).expect_err("broken");
        assert!(matches!(&error, ModelError::Broken(why) if why.contains(reason)), "{error:?}");
    }
    for (changes, reason) in [
        (json!({"moe_layer_freq": 2}), "moe_layer_freq"),
        (json!({"topk_method": "greedy"}), "topk_method"),
        (json!({"scoring_func": "softmax"}), "softmax"),
    ] {
        let error = glm(changes).expect_err("unserved");
        assert!(matches!(&error, ModelError::Unserved(why) if why.contains(reason)), "{error:?}");
    }
}

#[test]
fn latent_attention_has_its_sizes_and_its_choice_of_experts() {
    let v3 = deepseek("DeepseekV3ForCausalLM", json!({})).expect("a model");
    let of_v3 = latent(&v3);
    assert_eq!((of_v3.query_rank, of_v3.rank, of_v3.value_dim), (Some(32), 32, 12));
    assert!(v3.ropes[0].interleaved && v3.ropes[0].dim == 8 && of_v3.chosen == KeyChoice::All);
    assert!((of_v3.scale - 24_f64.powf(-0.5)).abs() < 1e-15);
    assert_eq!(sparse(&v3), [false, true, true, true, true, true]);
    assert_eq!((experts(&v3).routing, experts(&v3).scaling), (Routing::corrected(4, 2), 2.5));
    assert_eq!(v3.check_served(), Ok(()));
    let yarn = json!({"rope_scaling": {"type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}, "q_lora_rank": null});
    let sharp = latent(&deepseek("DeepseekV3ForCausalLM", yarn).expect("a model"));
    let wanted = 24_f64.powf(-0.5) * (0.1 * 40_f64.ln() + 1.0).powi(2);
    assert!((sharp.scale - wanted).abs() < 1e-12 && sharp.query_rank.is_none());
    let v2 = |changes: Value| deepseek("DeepseekV2ForCausalLM", changes);
    let greedy = experts(&v2(json!({})).expect("a model"));
    assert_eq!((greedy.routing.groups, greedy.routing.scores), (1, ExpertScores::Softmax));
    let grouped = v2(json!({"topk_method": "group_limited_greedy"})).expect("a model");
    assert_eq!((experts(&grouped).routing.groups, experts(&grouped).routing.kept_groups), (4, 2));
    assert!(v2(json!({"norm_topk_prob": true})).is_err());
    assert!(v2(json!({"topk_method": "noaux_tc"})).is_err());
}

#[test]
fn indexers_are_of_the_layers_that_have_them() {
    let indexed = |changes: Value| -> Result<Vec<bool>, ModelError> {
        let shape = deepseek("GlmMoeDsaForCausalLM", changes)?;
        assert_eq!(shape.check_served(), Ok(()));
        let has = |layer| matches!(shape.mixer(layer), Mixer::Latent(latent) if matches!(latent.chosen, KeyChoice::Indexed(_)));
        Ok((0..6).map(has).collect())
    };
    assert_eq!(indexed(json!({})), Ok(vec![true; 6]));
    let every = [true, false, true, false, true, false];
    let kinds =
        json!({"indexer_types": ["full", "shared", "full", "shared", "full", "shared", "full"]});
    assert_eq!(indexed(kinds), Ok(every.to_vec()));
    assert_eq!(indexed(json!({"index_topk_pattern": "FSFSFS"})), Ok(every.to_vec()));
    let skipped = json!({"index_topk_freq": 2, "index_skip_topk_offset": 1});
    assert_eq!(indexed(skipped), Ok(every.to_vec()));
    for (changes, why) in [
        (json!({"index_topk": 0}), "index_topk 0"),
        (json!({"index_head_dim": 4}), "index keys of 4 elements"),
        (json!({"index_init_tokens": 4}), "always kept (index_init_tokens)"),
        (json!({"q_lora_rank": null}), "without a low-rank query"),
        (json!({"indexer_types": ["full"]}), "wants `full` or `shared`"),
        (json!({"index_topk_pattern": "SFSFSF"}), "shares its indexer"),
        (json!({"mlp_layer_types": ["dense"]}), "mlp_layer_types wants"),
    ] {
        let error = indexed(changes).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_decoder_behind_a_tower_has_sections_of_frequencies() {
    let config = json!({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {
        "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "eos_token_id": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rope_scaling": {"rope_type": "mrope", "mrope_section": [4, 2, 2]}},
        "vision_config": {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2]}});
    let shape = Shape::from_config(config.as_object().expect("an object")).expect("a model");
    let sections = shape.ropes[0].sections.expect("sections");
    assert_eq!((sections.counts, sections.interleaved), ([4, 2, 2], true));
    let tower = shape.tower.expect("a tower");
    assert_eq!((tower.layers, tower.deepstack, tower.table_side), (3, vec![0, 2], Some(4)));
    assert_eq!((shape.hidden_size, &shape.eos_token_ids[..]), (64, &[7][..]));
    let mut other = config;
    other["text_config"]["rope_scaling"]["mrope_section"] = json!([4, 2, 1]);
    let error = Shape::from_config(other.as_object().expect("an object")).expect_err("7 of 8");
    assert!(error.to_string().contains("mrope_section"), "{error}");
}

#[test]
fn a_decoder_without_its_tower_is_that_of_its_own_config() {
    let text = json!({"model_type": "ministral3", "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128, "tie_word_embeddings": true, "rope_parameters": {"rope_type": "yarn",
        "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}});
    let read = |config: &Value| Shape::from_config(config.as_object().expect("an object"));
    let mut config = json!({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text,
        "quantization_config": {"quant_method": "fp8"}});
    let shape = read(&config).expect("a model");
    assert!(shape.tower.is_none() && shape.tied && shape.quantised.is_some());
    let wanted = QueryScale { beta: 0.1, every: 32, first: 0 };
    assert_eq!(attention(&shape).query_scale, Some(wanted));
    assert_eq!([0, 31, 32, 64].map(|at| wanted.at(at)), [1.0, 1.0, 1.069_314_7, 1.109_861_2]);
    config["tie_word_embeddings"] = json!(false);
    assert!(!read(&config).expect("a model").tied, "the whole decides");
    config["text_config"]["model_type"] = json!("mistral");
    assert_eq!(attention(&read(&config).expect("a model")).query_scale, None);
    config["text_config"]["model_type"] = json!("gemma3");
    assert!(read(&config).is_err_and(|error| error.to_string().contains("model_type gemma3")));
    let kimi = json!({"architectures": ["Kimi_K25ForConditionalGeneration"], "text_config": {
        "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12}});
    assert_eq!(latent(&read(&kimi).expect("a model")).rank, 32);
}

#[test]
fn factors_and_layers_without_rotation_are_read() {
    let granite =
        of(&[json!({"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 8.0})])
        .expect("a model");
    let scales =
        Scales { embeddings: 12.0, inputs: 12.0, residuals: 0.5, logits: 0.125, logit_cap: None };
    assert_eq!((granite.scales, attention(&granite).scale), (scales, Some(0.25)));
    let hybrid = |changes: Value| {
        let own = json!({"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0,
            "layer_types": ["attention", "full_attention", "attention"], "shared_intermediate_size": 48});
        of(&[own, changes])
    };
    let dense = hybrid(json!({"position_embedding_type": "rope"})).expect("a model");
    let FeedShape::Dense(feed) = dense.feed(0) else { panic!("a dense part") };
    assert!(feed.intermediate_size == 48 && dense.layers[0].rope == Some(0));
    assert_eq!(hybrid(json!({})).expect("a model").layers[0].rope, None);
    for (changes, why) in [
        (json!({"layer_types": ["attention", "mamba", "attention"]}), "mamba_n_heads"),
        (json!({"layer_types": null}), "mamba_n_heads"),
        (json!({"layer_types": ["attention", "rwkv", "attention"]}), "of other kinds"),
        (json!({"num_local_experts": 4}), "num_experts_per_tok"),
    ] {
        assert!(hybrid(changes).is_err_and(|error| error.to_string().contains(why)));
    }
    let rotated = |changes: Value| {
        let own = json!({"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5});
        let shape = of(&[own, changes])?;
        assert_eq!(shape.check_served(), Ok(()));
        Ok(shape.layers.iter().map(|layer| layer.rope.is_some()).collect::<Vec<_>>())
    };
    let usual = vec![true, true, true, false, true];
    assert_eq!(rotated(json!({})), Ok::<_, ModelError>(usual));
    assert_eq!(
        rotated(json!({"no_rope_layers": [0, 1, 1, 0, 1, 1]})),
        Ok(vec![false, true, true, false, true])
    );
    assert!(rotated(json!({"no_rope_layers": [0, 1]})).is_err());
}

#[test]
fn parts_of_heads_and_their_divisors_are_read() {
    let phi = |changes: Value| {
        of(&[json!({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75}), changes])
    };
    let plain = phi(json!({})).expect("a model");
    assert_eq!((plain.ropes[0].dim, &plain.ropes[0].scaling), (12, &None));
    let rope = |short: usize| {
        json!({"original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope",
        "short_factor": vec![1.0; short], "long_factor": vec![2.0; 6]}})
    };
    let long = phi(rope(6)).expect("a model");
    let scaling = long.ropes[0].scaling.clone().expect("a scaling");
    let wanted = (1.0 + 4_f64.ln() / 32_f64.ln()).sqrt();
    assert_eq!(scaling["attention_factor"].as_f64(), Some(wanted));
    assert!(phi(rope(5)).is_err_and(|error| error.to_string().contains("short_factor")));
    let first = |positions| {
        let angles = Angles::new(&long.ropes[0], 128, positions, TorchNumber::Float32);
        angles.expect("angles").sin[6] / wanted as f32
    };
    assert!((first(32) - 1_f32.sin()).abs() < 1e-6 && (first(33) - 0.5_f32.sin()).abs() < 1e-6);
    let minimax = of(&[json!({"architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2})])
    .expect("a model");
    assert!(attention(&minimax).qk_norm == QkNorm::Rows && minimax.ropes[0].dim == 8);
    let routing = experts(&minimax).routing;
    assert!(routing.corrected && !routing.in_float32 && experts(&minimax).normalise);
}

#[test]
fn experts_have_their_places_and_their_scores() {
    let ernie = |changes: Value| {
        let own = json!({"architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 6, "moe_num_experts": 8,
            "moe_k": 2, "moe_intermediate_size": 24});
        of(&[own, changes]).expect("a model")
    };
    let usual = ernie(json!({}));
    assert_eq!(sparse(&usual), [false, true, true, true, true, true]);
    let routing = experts(&usual).routing;
    assert!(routing.corrected && routing.scores == ExpertScores::Softmax && routing.in_float32);
    assert_eq!(experts(&usual).shared_size, 48);
    let some = ernie(
        json!({"moe_layer_start_index": 2, "moe_layer_end_index": 4, "moe_layer_interval": 2}),
    );
    assert_eq!(sparse(&some), [false, false, false, true, false, false]);
    let hy = |kinds: Value| {
        of(&[
            json!({"architectures": ["HYV3ForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "num_shared_experts": 2, "router_scaling_factor": 1.5,
            "mlp_layer_types": kinds}),
        ])
    };
    let found = hy(json!(["dense", "dense", "sparse"])).expect("a model");
    assert_eq!((sparse(&found), experts(&found).scaling), (vec![false, false, true], 1.5));
    assert_eq!(experts(&found).shared_size, 48);
    assert!(hy(json!(["dense", "sparse", "dense"])).is_err());
    assert!(hy(json!(["dense"])).is_err());
}

#[test]
fn a_tower_that_would_be_computed_wrongly_is_refused() {
    let tower = |changes: &Value| {
        let mut config = json!({"architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
            "vision_config": {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "window_size": 16}});
        for (key, value) in changes.as_object().into_iter().flatten() {
            config["vision_config"][key] = value.clone();
        }
        Shape::from_config(config.as_object().expect("an object"))
    };
    let shape = tower(&json!({})).expect("a model");
    assert_eq!(shape.tower.map(|it| (it.window, it.whole)), Some((Some(2), vec![7, 15, 23, 31])));
    for (changes, why) in [
        (json!({"out_hidden_size": 32}), "the tower gives 32 elements"),
        (json!({"in_channels": 1}), "in_channels 1 of images"),
        (json!({"hidden_act": "relu"}), "hidden_act"),
        (json!({"num_heads": 3}), "a tower of 3 heads"),
        (json!({"depth": 0}), "depth"),
        (json!({"patch_size": [4, 4]}), "patch_size"),
        (json!({"window_size": 4}), "has no position in it"),
        (json!({"fullatt_block_indexes": [-1]}), "fullatt_block_indexes"),
    ] {
        let error = tower(&changes).expect_err(why).to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_shape_is_itself_after_its_way_to_a_hand() {
    for shape in [
        of(&[json!({"quantization_config": {"quant_method": "gptq", "bits": 4}})]),
        qwen(json!({})),
        glm(json!({"partial_rotary_factor": 0.5})),
        // With heads of 16 elements, the factor on scores has few digits.
        deepseek(
            "GlmMoeDsaForCausalLM",
            json!({"index_topk": 8, "index_head_dim": 16, "qk_nope_head_dim": 8}),
        ),
        of(&[json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707}})]),
        of(&[json!({"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.3,
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 7.0})]),
        of(&[json!({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1]})]),
        of(&[
            json!({"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"rope_type": "yarn",
            "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}}),
        ]),
        of(&[
            json!({"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
        ]),
        of(&[json!({"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4,
            "num_experts_per_tok": 2})]),
    ] {
        let shape = shape.expect("a model");
        let text = serde_json::to_string(&shape).expect("JSON");
        assert_eq!(serde_json::from_str::<Shape>(&text).expect("a shape"), shape);
    }
    let mut unknown = serde_json::to_value(of(&[]).expect("a model")).expect("JSON");
    unknown["family"] = json!("Nobody");
    let error = serde_json::from_value::<Shape>(unknown).expect_err("no family").to_string();
    assert!(error.contains("no family has the architecture Nobody"), "{error}");
}
