//! The parts of a decoder that the kernels compute, and the reasons against the others. All layers
//! have the same attention, and one of two parts behind it.

use forebay_kernels::ExpertSizes;
use forebay_weights::{
    Attention, DenseFeed, ExpertScores, Experts, FeedShape, Mixer, ModelError, QkNorm, Rope,
    Scales, Shape,
};

/// The parts of a decoder that this hand serves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DecoderParts<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) attention: &'a Attention,
    pub(crate) rope: &'a Rope,
    /// The part of layers without experts; `None`: all have experts.
    pub(crate) dense: Option<&'a DenseFeed>,
    /// The experts of the other layers; `None`: none has any.
    pub(crate) experts: Option<&'a Experts>,
}

impl<'a> DecoderParts<'a> {
    /// Finds the parts. The error is a reason for a sentence that begins with `the Rust hand does
    /// not have`, or [`ModelError::Unserved`].
    ///
    /// # Errors
    /// There is a part that the kernels do not compute.
    pub(crate) fn new(shape: &'a Shape) -> Result<Self, ModelError> {
        shape.check_served()?;
        if let Some(part) = lacks(shape) {
            return Err(ModelError::Elsewhere(part.into()));
        }
        let attention = shape.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Attention(attention) => Some(attention),
            _ => None,
        });
        let (Some(attention), Some(rope)) = (attention, shape.ropes.first()) else {
            return Err(ModelError::Broken("a model without layers".into()));
        };
        let mut parts = Self { shape, attention, rope, dense: None, experts: None };
        for feed in &shape.feeds {
            match feed {
                FeedShape::Dense(dense) => parts.dense = Some(dense),
                FeedShape::Experts(experts) => parts.experts = Some(experts),
            }
        }
        if parts.inner_sizes().any(|size| size % 2 > 0) {
            return Err(ModelError::Elsewhere("inner dimensions that are odd".into()));
        }
        Ok(parts)
    }

    fn inner_sizes(&self) -> impl Iterator<Item = usize> {
        let of_experts = self.experts.map(|it| [it.intermediate_size, it.shared_size]);
        let fixed = [self.shape.hidden_size, self.attention.head_dim, self.rope.dim];
        fixed.into_iter().chain(of_experts.into_iter().flatten()).chain(self.dense_size())
    }

    fn dense_size(&self) -> Option<usize> {
        self.dense.map(|dense| dense.intermediate_size)
    }

    /// Elements between the products of a dense part; 0: no layer has one.
    pub(crate) fn intermediate(&self) -> usize {
        self.dense_size().unwrap_or(0)
    }

    /// The number of layers.
    pub(crate) fn layers(&self) -> usize {
        self.shape.layers.len()
    }

    /// True if query and key heads have norms.
    pub(crate) fn head_norms(&self) -> bool {
        self.attention.qk_norm == QkNorm::Heads
    }
}

/// The part of a model that another hand has, and this one has not.
fn lacks(shape: &Shape) -> Option<&'static str> {
    let latent = shape.mixers.iter().any(|mixer| matches!(mixer, Mixer::Latent(_)));
    let interleaved = shape.ropes.iter().any(|rope| rope.interleaved);
    let attentions = shape.mixers.iter().filter_map(|mixer| match mixer {
        Mixer::Attention(attention) => Some(attention),
        _ => None,
    });
    let (mut scaled, mut rows) = (false, false);
    for attention in attentions {
        scaled |= attention.scale.is_some();
        rows |= attention.qk_norm == QkNorm::Rows;
    }
    let sections = shape.ropes.iter().any(|rope| rope.sections.is_some());
    let parts = [
        (latent, "latent attention"),
        (shape.tower.is_some(), "images"),
        (sections, "positions of three numbers"),
        (interleaved, "rotary positions of neighbouring elements"),
        (shape.quantised.is_some(), "a checkpoint that is quantised"),
        (shape.scales != Scales::NONE, "scaled embeddings, residuals or logits"),
        (scaled, "attention with a scale of its own"),
        (rows, "norms over all heads of queries and keys"),
        (shape.layers.iter().any(|it| it.rope.is_none()), "layers without rotary positions"),
        (!shape.is_plain(), "layers of other kinds than Llama's"),
    ];
    parts.into_iter().find_map(|(lacks, part)| lacks.then_some(part))
}

/// The sizes of experts in the kernels.
pub(crate) fn expert_sizes(experts: &Experts) -> ExpertSizes {
    let routing = experts.routing;
    ExpertSizes {
        count: experts.count,
        per_token: experts.per_token,
        intermediate: experts.intermediate_size,
        shared: experts.shared_size,
        sigmoid: routing.scores == ExpertScores::Sigmoid,
        corrected: routing.corrected,
        in_float32: routing.in_float32,
        shared_gate: experts.shared_gate,
        groups: routing.groups,
        kept_groups: routing.kept_groups,
        best_of_group: routing.best_of_group,
        normalise: experts.normalise,
        scaling: experts.scaling as f32,
    }
}

#[cfg(test)]
mod tests {
    use forebay_weights::RotarySections;
    use forebay_weights::families::ALL;
    use serde_json::{Value, json};

    use super::*;

    /// A config that has the keys of all families.
    fn shape(architecture: &str, changes: &Value) -> Shape {
        let is_hybrid = architecture == "GraniteMoeHybridForCausalLM";
        let mut config = json!({
            "architectures": [architecture], "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "num_local_experts": if is_hybrid { 0 } else { 8 },
            "no_rope_layers": [1, 0, 1], "moe_num_experts": 8, "moe_k": 2, "shared_expert_intermediate_size": 16,
            "shared_intermediate_size": 16, "layer_types": is_hybrid.then_some(["attention"; 3]),
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "index_head_dim": 16,
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
        });
        config["vision_config"] = json!({
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "window_size": 16,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        });
        let config = config.as_object_mut().expect("an object");
        config.extend(changes.as_object().cloned().unwrap_or_default());
        Shape::from_config(config).expect("a shape")
    }

    #[test]
    fn the_kernels_compute_the_families_that_say_so() {
        for family in ALL {
            let shape = shape(family.architecture, &json!({}));
            let found = DecoderParts::new(&shape).map(drop);
            let lacks = |error: &ModelError| matches!(error, ModelError::Elsewhere(_));
            let fits =
                if family.compiled { found.is_ok() } else { found.as_ref().is_err_and(lacks) };
            assert!(fits, "{}: {found:?}", family.architecture);
        }
    }

    #[test]
    fn a_part_that_only_the_other_hand_has_is_named() {
        let mut scaled = shape("LlamaForCausalLM", &json!({}));
        scaled.scales.residuals = 0.5;
        let mut unrotated = shape("LlamaForCausalLM", &json!({}));
        unrotated.layers[1].rope = None;
        let attending = |change: fn(&mut Attention)| {
            let mut shape = shape("LlamaForCausalLM", &json!({}));
            let Mixer::Attention(attention) = &mut shape.mixers[0] else { panic!("attention") };
            change(attention);
            shape
        };
        let mut turned = shape("LlamaForCausalLM", &json!({}));
        turned.ropes[0].interleaved = true;
        let mut sections = shape("LlamaForCausalLM", &json!({}));
        sections.ropes[0].sections = Some(RotarySections { counts: [4, 2, 2], interleaved: false });
        let fp8 = json!({"quantization_config": {"quant_method": "fp8"}});
        for (shape, part) in [
            (shape("DeepseekV3ForCausalLM", &json!({})), "latent attention"),
            (shape("Qwen2_5_VLForConditionalGeneration", &json!({})), "images"),
            (shape("LlamaForCausalLM", &fp8), "a checkpoint that is quantised"),
            (
                shape("LlamaForCausalLM", &json!({"hidden_size": 63})),
                "inner dimensions that are odd",
            ),
            (scaled, "scaled embeddings, residuals or logits"),
            (unrotated, "layers without rotary positions"),
            (attending(|it| it.scale = Some(0.5)), "attention with a scale of its own"),
            (attending(|it| it.qk_norm = QkNorm::Rows), "norms over all heads of queries and keys"),
            (turned, "rotary positions of neighbouring elements"),
            (sections, "positions of three numbers"),
        ] {
            let found = DecoderParts::new(&shape).map(drop);
            assert_eq!(found, Err(ModelError::Elsewhere(part.into())));
        }
        let mut gate = shape("LlamaForCausalLM", &json!({}));
        gate.scales.logit_cap = Some(30.0);
        assert!(matches!(DecoderParts::new(&gate), Err(ModelError::Elsewhere(_))));
        gate.layers[1].keys_of = Some(0);
        assert!(matches!(DecoderParts::new(&gate), Err(ModelError::Unserved(_))));
    }
}
