use serde_json::{Value, json};

use crate::error::ModelError;
use crate::families::{Shape, weights_of};
use crate::model::ModelShape;
use crate::vision::TowerKind;

fn shape(config: &Value) -> Result<Shape, ModelError> {
    Shape::from_config(config.as_object().expect("an object"))
}

/// Returns a config of Qwen3.5 whose sections have these counts of rotary frequencies.
fn qwen(sections: &[usize; 3]) -> Value {
    json!({"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": false, "text_config": {
        "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
            "mrope_section": sections, "mrope_interleaved": true}},
        "vision_config": {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16}})
}

/// Returns a config of Gemma 3 with changes to its tower's config.
fn gemma(changes: &Value) -> Value {
    let mut config = json!({"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 16,
        "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "head_dim": 16},
        "vision_config": {"hidden_size": 36, "image_size": 48, "intermediate_size": 40, "num_attention_heads": 2,
            "num_hidden_layers": 3, "patch_size": 6, "layer_norm_eps": 1e-5}});
    for (key, value) in changes.as_object().into_iter().flatten() {
        match config["vision_config"].get(key) {
            Some(_) => config["vision_config"][key] = value.clone(),
            None => config[key] = value.clone(),
        }
    }
    config
}

#[test]
fn the_tower_of_qwen3_5_is_that_of_qwen3_vl_without_deepstack() {
    let mut config = qwen(&[4, 2, 2]);
    config["vision_config"]["deepstack_visual_indexes"] = json!([0, 1]);
    let found = shape(&config).expect("a model");
    let tower = found.tower.as_ref().expect("a tower");
    assert_eq!((tower.kind, tower.layers, tower.both_ways), (TowerKind::Table, 3, false));
    assert!(tower.deepstack.is_empty() && tower.table_side == Some(4));
    let sections = found.ropes[0].sections.expect("sections");
    assert_eq!((found.ropes[0].dim, sections.counts, sections.interleaved), (16, [4, 2, 2], true));
    let error = shape(&qwen(&[4, 2, 1])).expect_err("7 of 8").to_string();
    assert!(error.contains("does not share the 8 rotary frequencies"), "{error}");
}

#[test]
fn a_model_without_its_tower_is_its_text() {
    let found = shape(&qwen(&[4, 2, 2])).expect("a model");
    let name = "model.visual.blocks.0.norm1.weight";
    let of = |shape: &Shape| {
        let found = weights_of([shape.family.rules, &[]], (name, &[32]), shape);
        found.expect("it fits").expect("a rule").into_iter().map(|it| it.name).collect::<Vec<_>>()
    };
    assert_eq!(of(&found), ["visual.blocks.0.norm1.weight"]);
    // The text part does not depend on the tower's config, even if that is invalid.
    let mut config = qwen(&[4, 2, 1]);
    config["vision_config"]["depth"] = json!(0);
    assert!(shape(&config).is_err());
    let text = ModelShape::of_text(config.as_object().expect("an object"), false);
    let text = text.expect("a model").decoder().cloned().expect("a decoder");
    assert!(of(&text).is_empty(), "the text part lists no weight of the tower");
    assert!(text.tower.is_none() && text.ropes[0].sections.is_none());
    assert_eq!(text, Shape { tower: None, ropes: text.ropes.clone(), ..found });
    // A text-only repository may keep the architecture name of the model with a tower.
    config["vision_config"] = Value::Null;
    assert_eq!(shape(&config), Ok(text));
}

#[test]
fn a_gemma_sees_images_of_one_size_both_ways() {
    let found = shape(&gemma(&json!({}))).expect("a model");
    let tower = found.tower.as_ref().expect("a tower");
    assert_eq!(
        (tower.kind, tower.layers, tower.hidden_size, tower.heads),
        (TowerKind::Siglip, 3, 36, 2)
    );
    assert_eq!((tower.patch, tower.merge, tower.temporal, tower.table_side), (6, 2, 1, Some(8)));
    assert_eq!((tower.out_size, tower.norm_eps, tower.theta), (64, 1e-5, None));
    assert!(tower.both_ways && found.ropes.iter().all(|rope| rope.sections.is_none()));
    for (changes, why) in [
        (json!({"image_size": 47}), "images of 47 pixels a side"),
        (json!({"mm_tokens_per_image": 15}), "15 positions"),
        (json!({"mm_tokens_per_image": 9}), "9 positions"),
        (json!({"num_attention_heads": 5}), "a tower of 5 heads"),
        (json!({"num_hidden_layers": 0}), "num_hidden_layers"),
    ] {
        let error = shape(&gemma(&changes)).expect_err(why).to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn the_names_of_a_gemma_are_those_of_any_release() {
    let found = shape(&gemma(&json!({}))).expect("a model");
    let of = |name: &str, stored: &[usize]| {
        let weights = weights_of([found.family.rules, &[]], (name, stored), &found);
        weights.expect("it fits").expect("a rule").into_iter().map(|it| it.name).collect::<Vec<_>>()
    };
    let layer = "encoder.layers.2.mlp.fc1.bias";
    for prefix in
        ["vision_tower.vision_model", "model.vision_tower.vision_model", "model.vision_tower"]
    {
        assert_eq!(of(&format!("{prefix}.{layer}"), &[40]), [format!("visual.{layer}")]);
        assert!(of(&format!("{prefix}.head.probe"), &[1, 1, 36]).is_empty());
    }
    for prefix in ["multi_modal_projector", "model.multi_modal_projector"] {
        let name = format!("{prefix}.mm_input_projection_weight");
        assert_eq!(of(&name, &[36, 64]), ["visual.projector.weight"]);
        let name = format!("{prefix}.mm_soft_emb_norm.weight");
        assert_eq!(of(&name, &[36]), ["visual.projector.norm.weight"]);
    }
    for prefix in ["language_model.model", "model.language_model"] {
        assert_eq!(of(&format!("{prefix}.norm.weight"), &[64]), ["model.norm.weight"]);
    }
}
