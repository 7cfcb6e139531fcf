//! The components of a decoder that the kernels support, and the reasons why other components are
//! refused. A layer has attention, a recurrence, both or neither, followed by a dense network,
//! experts or nothing.

use forebay_kernels::{
    AttentionSizes, ExpertSizes, Factors, GateKind, LatentSizes, LayerInputSizes, RecurrenceSizes,
    StateGate,
};
use forebay_weights::{
    Activation, Attention, DenseFeed, ExpertScores, Experts, FeedShape, KeyChoice, Latent, Mixer,
    ModelError, NormPlacement, QkNorm, QueryScale, Recurrence, Scales, Shape, StateNorm,
};

use crate::latent::as_attention;

/// The components of a decoder that this hand serves.
#[derive(Debug, Clone)]
pub(crate) struct DecoderParts<'a> {
    pub(crate) shape: &'a Shape,
    /// The distinct kinds of attention.
    pub(crate) kinds: Vec<AttentionKind<'a>>,
    /// The index in `kinds` of each layer's attention.
    pub(crate) kind_of: Vec<usize>,
    /// The widest dense network of layers without experts; `None` if all layers have experts.
    pub(crate) dense: Option<&'a DenseFeed>,
    /// The experts of the layers that have experts; `None` if no layer has any.
    pub(crate) experts: Option<&'a Experts>,
}

/// Attention with its rotary embedding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionKind<'a> {
    pub(crate) attention: Attention,
    /// The latent attention whose absorbed form is `attention`; `None` if heads have their own keys
    /// and values.
    pub(crate) latent: Option<&'a Latent>,
    /// The index of the rotary embedding in the shape; `None` if there is none.
    pub(crate) rope: Option<usize>,
}

impl<'a> DecoderParts<'a> {
    /// Determines the components. The error text completes a sentence that begins with `the Rust
    /// hand does not have`, or is [`ModelError::Unserved`].
    ///
    /// # Errors
    /// If the kernels do not support a component.
    pub(crate) fn new(shape: &'a Shape) -> Result<Self, ModelError> {
        shape.check_served()?;
        if let Some(part) = lacks(shape) {
            return Err(ModelError::Elsewhere(part.into()));
        }
        let (mut found, mut kinds, mut kind_of) = (Vec::new(), Vec::new(), Vec::new());
        for (number, layer) in shape.layers.iter().enumerate() {
            let (attention, latent) = match shape.mixer(number) {
                Mixer::Latent(latent) => (as_attention(latent), Some(latent)),
                mixer => match mixer.attention() {
                    Some(attention) => (*attention, None),
                    None => {
                        // Any kind will do, because the layer has no pages.
                        kind_of.push(0);
                        continue;
                    }
                },
            };
            let key = (layer.mixer, layer.rope);
            kind_of.push(found.iter().position(|&other| other == key).unwrap_or_else(|| {
                found.push(key);
                let rope = layer.rope.map(usize::from);
                kinds.push(AttentionKind { attention, latent, rope });
                found.len() - 1
            }));
        }
        if kinds.is_empty() || kind_of.len() < shape.layers.len() {
            return Err(ModelError::Broken("a model without layers".into()));
        }
        let mut parts = Self { shape, kinds, kind_of, dense: None, experts: None };
        for feed in &shape.feeds {
            match feed {
                FeedShape::Dense(dense) => {
                    let widest =
                        parts.dense.filter(|it| it.intermediate_size >= dense.intermediate_size);
                    parts.dense = Some(widest.unwrap_or(dense));
                }
                FeedShape::Experts(experts) => parts.experts = Some(experts),
                FeedShape::None => {}
            }
        }
        if parts.inner_sizes().any(|size| size % 2 > 0) {
            return Err(ModelError::Elsewhere("inner dimensions that are odd".into()));
        }
        Ok(parts)
    }

    fn inner_sizes(&self) -> impl Iterator<Item = usize> {
        let of_experts =
            self.experts.map(|it| [it.intermediate_size, it.shared_size, it.latent_size]);
        let of_dense = self.shape.feeds.iter().filter_map(|feed| match feed {
            FeedShape::Dense(dense) => Some(dense.intermediate_size),
            FeedShape::Experts(_) | FeedShape::None => None,
        });
        let of_inputs = self.shape.layer_inputs.map(|inputs| inputs.size);
        let heads = self.kinds.iter().flat_map(|kind| {
            let of_latent = kind.latent.map(|of| [of.rank, of.nope_dim, of.value_dim]);
            let low = kind.latent.and_then(|of| of.query_rank);
            std::iter::once(kind.attention.head_dim)
                .chain(of_latent.into_iter().flatten())
                .chain(low)
        });
        let states = self.shape.mixers.iter().filter_map(Mixer::recurrence);
        let states = states.flat_map(|it| [it.values(), it.low_rank]);
        let ropes = self.shape.ropes.iter().map(|rope| rope.dim);
        let fixed = std::iter::once(self.shape.hidden_size).chain(heads).chain(states).chain(ropes);
        fixed.chain(of_experts.into_iter().flatten()).chain(of_dense).chain(of_inputs)
    }

    /// The inner size of the widest dense network; 0 if no layer has one.
    pub(crate) fn intermediate(&self) -> usize {
        self.dense.map_or(0, |dense| dense.intermediate_size)
    }

    /// The sizes of per-layer inputs as the kernels take them; `None` if there are none.
    pub(crate) fn layer_inputs(&self) -> Option<LayerInputSizes> {
        let inputs = self.shape.layer_inputs?;
        Some(LayerInputSizes { vocabulary: inputs.vocab_size, size: inputs.size })
    }

    /// True if a layer has its own pages: it has attention, and does not read another layer's
    /// pages. With bidirectional attention, all layers of a kind share the pages of the first one.
    pub(crate) fn keeps_pages(&self, layer: usize) -> bool {
        let kind = self.kind_of[layer];
        let shares = self.shape.both_ways() && self.kind_of[..layer].contains(&kind);
        self.attention(layer).is_some() && self.shape.layers[layer].keys_of.is_none() && !shares
    }

    /// The number of layers.
    pub(crate) fn layers(&self) -> usize {
        self.shape.layers.len()
    }

    /// The attention of a layer, or the absorbed form of its latent attention; `None` if it has
    /// none.
    pub(crate) fn attention(&self, layer: usize) -> Option<&Attention> {
        let attends = self.shape.mixer(layer).attention().is_some() || self.latent(layer).is_some();
        attends.then(|| &self.kinds[self.kind_of[layer]].attention)
    }

    /// The latent attention of a layer; `None` if it has none.
    pub(crate) fn latent(&self, layer: usize) -> Option<&'a Latent> {
        match self.shape.mixer(layer) {
            Mixer::Latent(latent) => Some(latent),
            _ => None,
        }
    }

    /// The recurrence of a layer, instead of or beside attention; `None` if it has none.
    pub(crate) fn recurrence(&self, layer: usize) -> Option<&'a Recurrence> {
        self.shape.mixer(layer).recurrence()
    }

    /// The sizes of all kinds of attention as the kernels take them.
    pub(crate) fn attention_sizes(&self) -> Vec<AttentionSizes> {
        let sizes = |&AttentionKind { attention, latent, rope }: &AttentionKind<'_>| {
            let rotates = |rope: usize| &self.shape.ropes[rope];
            let usual = (attention.head_dim as f64).powf(-0.5);
            AttentionSizes {
                heads: attention.heads,
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
                rotary_dim: rope.map_or(0, |rope| rotates(rope).dim),
                angles: rope,
                window: attention.window.map(|window| window as usize),
                in_window_part: false,
                chunk: attention.chunk.map(|chunk| chunk as usize),
                norm_rows: attention.qk_norm == QkNorm::Rows,
                scale: attention.scale.unwrap_or(usual) as f32,
                cap: attention.cap.map(|cap| cap as f32),
                gate: attention.gate,
                keys_are_values: attention.keys_are_values,
                value_norm: attention.value_norm,
                scaled_queries: attention.query_scale.is_some(),
                both_ways: attention.both_ways,
                latent: latent.map(|of| LatentSizes {
                    query_rank: of.query_rank,
                    rank: of.rank,
                    nope_dim: of.nope_dim,
                    value_dim: of.value_dim,
                    interleaved: rope.is_some_and(|rope| rotates(rope).interleaved),
                }),
            }
        };
        self.kinds.iter().map(sizes).collect()
    }

    /// The factor of queries that grows with position, which is the same in all layers that have
    /// one.
    pub(crate) fn query_scale(&self) -> Option<QueryScale> {
        self.kinds.iter().find_map(|kind| kind.attention.query_scale)
    }

    /// True if the feed-forward networks have gates, which is the same for all of them.
    pub(crate) fn gated(&self) -> bool {
        let of_dense = self.dense.map(|dense| dense.gated);
        of_dense.or(self.experts.map(|experts| experts.gated)).unwrap_or(true)
    }

    /// The activation of the feed-forward networks, which is the same for all of them.
    pub(crate) fn gate(&self) -> GateKind {
        let of_dense = self.dense.map(|dense| dense.activation);
        match of_dense.or(self.experts.map(|experts| experts.activation)) {
            Some(Activation::Gelu) => GateKind::Gelu,
            Some(Activation::GeluTanh) => GateKind::GeluTanh,
            Some(Activation::ClampedSwiglu) => GateKind::ClampedSwiglu,
            Some(Activation::SquaredRelu) => GateKind::SquaredRelu,
            Some(Activation::Silu) | None => GateKind::Silu,
        }
    }

    /// The factors of states and logits as the kernels take them.
    pub(crate) fn factors(&self) -> Factors {
        let Scales { embeddings, inputs, residuals, logits, logit_cap } = self.shape.scales;
        Factors {
            embeddings: embeddings as f32,
            inputs: inputs as f32,
            residuals: residuals as f32,
            logits: logits as f32,
            logit_cap: logit_cap.map(|cap| cap as f32),
        }
    }
}

/// A component of a model that only the Python hand supports; `None` if there is none.
fn lacks(shape: &Shape) -> Option<&'static str> {
    let chosen = |mixer: &Mixer| matches!(mixer, Mixer::Latent(of) if of.chosen != KeyChoice::All);
    let chooses = shape.mixers.iter().any(chosen);
    let states = || shape.mixers.iter().filter_map(Mixer::recurrence);
    let biased_ranks = states().any(|it| it.bias && it.low_rank > 0);
    let channels = states().any(|it| it.channel_decay && !it.delta);
    let interleaved = shape.layers.iter().enumerate().any(|(number, layer)| {
        let rope = layer.rope.map(|rope| &shape.ropes[usize::from(rope)]);
        let latent = matches!(shape.mixer(number), Mixer::Latent(_));
        !latent && rope.is_some_and(|rope| rope.interleaved)
    });
    let sections = shape.ropes.iter().any(|rope| rope.sections.is_some());
    let behind = |placement| matches!(placement, NormPlacement::After | NormPlacement::Around);
    let mut layers = shape.layers.iter().enumerate();
    let normed_mixers = layers.clone().any(|(number, layer)| {
        matches!(shape.mixer(number), Mixer::Beside(_)) && behind(layer.norms)
    });
    let normed_experts = layers.any(|(number, layer)| {
        shape.experts(number).is_some_and(|it| it.beside != behind(layer.norms))
    });
    let of_experts =
        shape.feeds.iter().filter(|feed| matches!(feed, FeedShape::Experts(_))).count();
    let mut functions = shape.feeds.iter().filter_map(|feed| match feed {
        FeedShape::Dense(DenseFeed { activation, gated, .. })
        | FeedShape::Experts(Experts { activation, gated, .. }) => Some((activation, gated)),
        FeedShape::None => None,
    });
    let function = functions.next();
    let several_functions = functions.any(|other| Some(other) != function);
    let mut scales = shape.mixers.iter().filter_map(|mixer| match mixer {
        Mixer::Latent(latent) => latent.query_scale,
        mixer => mixer.attention()?.query_scale,
    });
    let scale = scales.next();
    let query_scales = scales.any(|other| Some(other) != scale);
    let parts = [
        (chooses, "attention to positions that an indexer chooses"),
        (channels, "decays of channels without the delta rule"),
        (biased_ranks, "low ranks with biases in recurrent layers"),
        (shape.tower.is_some(), "images"),
        (sections, "positions of three numbers"),
        (interleaved, "rotary positions of neighbouring elements"),
        (query_scales, "factors of queries that grow differently"),
        (normed_mixers, "norms behind attention beside a recurrent state"),
        (normed_experts, "norms behind experts"),
        (of_experts > 1, "experts whose sizes differ between layers"),
        (several_functions, "feed-forward parts with several functions"),
    ];
    parts.into_iter().find_map(|(lacks, part)| lacks.then_some(part))
}

/// The sizes of a recurrence as the kernels take them.
pub(crate) fn recurrence_sizes(recurrence: &Recurrence) -> RecurrenceSizes {
    let gate = match recurrence.norm {
        StateNorm::None => StateGate::Alone,
        StateNorm::BeforeGate => StateGate::BehindNorm,
        StateNorm::AfterGate => StateGate::BeforeNorm,
    };
    RecurrenceSizes {
        heads: recurrence.heads,
        key_heads: recurrence.key_heads,
        key_dim: recurrence.key_dim,
        value_dim: recurrence.value_dim,
        tiled: recurrence.tiled,
        channel_decay: recurrence.channel_decay,
        delta: recurrence.delta,
        taps: recurrence.taps,
        gate,
        sigmoid_gate: recurrence.sigmoid_gate,
        low_rank: recurrence.low_rank,
        norm_size: recurrence.norm_size,
    }
}

/// The sizes of experts as the kernels take them.
pub(crate) fn expert_sizes(experts: &Experts) -> ExpertSizes {
    let routing = experts.routing;
    ExpertSizes {
        count: experts.count,
        per_token: experts.per_token,
        intermediate: experts.intermediate_size,
        shared: experts.shared_size,
        latent: experts.latent_size,
        sigmoid: routing.scores == ExpertScores::Sigmoid,
        corrected: routing.corrected,
        in_float32: routing.in_float32,
        shared_gate: experts.shared_gate,
        biases: experts.bias,
        groups: routing.groups,
        kept_groups: routing.kept_groups,
        best_of_group: routing.best_of_group,
        normalise: experts.normalise,
        scaling: experts.scaling as f32,
        weighs_inputs: experts.weighs_inputs,
        beside: experts.beside,
    }
}

#[cfg(test)]
mod tests {
    use forebay_weights::RotarySections;
    use forebay_weights::families::ALL;
    use serde_json::{Map, Value, json};

    use super::*;

    fn shape(architecture: &str, changes: &Value) -> Shape {
        Shape::from_config(&config(architecture, changes)).expect("a shape")
    }

    /// A config with the keys of all model families.
    fn config(architecture: &str, changes: &Value) -> Map<String, Value> {
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
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
            "full_attn_idxs": [1], "hidden_size_per_layer_input": 8, "global_head_dim": 24,
            "linear_attn_config": {"full_attn_layers": [2]},
            "use_bidirectional_attention": architecture == "Gemma3TextModel",
        });
        let states = json!({
            "hybrid_override_pattern": "M-*", "mamba_num_heads": 4, "mamba_head_dim": 8,
            "ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 16,
            "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2,
            "mamba_d_state": 8, "linear_num_heads": 2, "linear_head_dim": 8,
        });
        config["vision_config"] = json!({
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "window_size": 16,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            "image_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        });
        config["mm_tokens_per_image"] = json!(4);
        let config = config.as_object_mut().expect("an object");
        config.extend(states.as_object().cloned().unwrap_or_default());
        config.extend(changes.as_object().cloned().unwrap_or_default());
        std::mem::take(config)
    }

    #[test]
    fn the_kernels_compute_the_families_that_say_so() {
        for family in ALL {
            let mut config = config(family.architecture, &json!({}));
            if family.compiled {
                // Models with a vision tower are computed without it.
                config.remove("vision_config");
            }
            let shape = Shape::from_config(&config).expect("a shape");
            let found = DecoderParts::new(&shape).map(drop);
            let lacks = |error: &ModelError| matches!(error, ModelError::Elsewhere(_));
            let fits =
                if family.compiled { found.is_ok() } else { found.as_ref().is_err_and(lacks) };
            assert!(fits, "{}: {found:?}", family.architecture);
        }
    }

    #[test]
    fn a_layer_without_rotation_is_of_a_kind_of_its_own() {
        let mut unrotated = shape("LlamaForCausalLM", &json!({}));
        unrotated.layers[1].rope = None;
        let parts = DecoderParts::new(&unrotated).expect("a model");
        assert_eq!(parts.kind_of, [0, 1, 0]);
        let still = parts.attention_sizes()[1];
        assert_eq!((still.angles, still.rotary_dim), (None, 0));
    }

    #[test]
    fn a_part_that_only_the_other_hand_has_is_named() {
        let mut turned = shape("LlamaForCausalLM", &json!({}));
        turned.ropes[0].interleaved = true;
        let mut sections = shape("LlamaForCausalLM", &json!({}));
        sections.ropes[0].sections = Some(RotarySections { counts: [4, 2, 2], interleaved: false });
        let mut normed = shape("MixtralForCausalLM", &json!({}));
        normed.layers[1].norms = NormPlacement::Around;
        let mut beside = shape("FalconH1ForCausalLM", &json!({}));
        beside.layers[1].norms = NormPlacement::After;
        for (shape, part) in [
            (
                shape("DeepseekV32ForCausalLM", &json!({})),
                "attention to positions that an indexer chooses",
            ),
            (shape("Qwen2_5_VLForConditionalGeneration", &json!({})), "images"),
            (
                shape("LlamaForCausalLM", &json!({"hidden_size": 63})),
                "inner dimensions that are odd",
            ),
            (beside, "norms behind attention beside a recurrent state"),
            (turned, "rotary positions of neighbouring elements"),
            (sections, "positions of three numbers"),
            (normed, "norms behind experts"),
        ] {
            let found = DecoderParts::new(&shape).map(drop);
            assert_eq!(found, Err(ModelError::Elsewhere(part.into())));
        }
    }

    #[test]
    fn latent_attention_has_rows_of_one_head() {
        let shape = shape("DeepseekV3ForCausalLM", &json!({}));
        let parts = DecoderParts::new(&shape).expect("parts");
        let [sizes] = parts.attention_sizes()[..] else { panic!("one kind") };
        assert_eq!((sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.rotary_dim), (4, 1, 40, 8));
        let latent = LatentSizes {
            query_rank: Some(32),
            rank: 32,
            nope_dim: 16,
            value_dim: 12,
            interleaved: true,
        };
        assert_eq!(sizes.latent, Some(latent));
        assert_eq!(sizes.scale, 24_f64.powf(-0.5) as f32);
        assert!((0..3).all(|layer| parts.keeps_pages(layer)));
        let odd = self::shape("DeepseekV3ForCausalLM", &json!({"q_lora_rank": 33}));
        assert!(DecoderParts::new(&odd).is_err());
    }

    #[test]
    fn layers_that_read_the_keys_of_others_have_no_pages() {
        let changes = json!({"num_hidden_layers": 7, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
                "layer_types": (0..7).map(|at| if at % 2 == 1 { "full_attention" } else { "sliding_attention" })
                    .collect::<Vec<_>>()});
        let shape = shape("Gemma4ForCausalLM", &changes);
        let parts = DecoderParts::new(&shape).expect("parts");
        let keeping: Vec<bool> = (0..7).map(|layer| parts.keeps_pages(layer)).collect();
        assert_eq!(keeping, [true, true, true, true, true, false, false]);
        // Layers have different head sizes, and different feed-forward sizes.
        let dims: Vec<usize> = parts.attention_sizes().iter().map(|it| it.head_dim).collect();
        assert_eq!((dims, parts.intermediate()), (vec![16, 24], 192));
        let inputs = LayerInputSizes { vocabulary: 131, size: 8 };
        assert_eq!(parts.layer_inputs(), Some(inputs));
    }

    #[test]
    fn layers_have_pages_and_a_function_by_their_parts() {
        let keeping = |shape: &Shape| {
            let parts = DecoderParts::new(shape).expect("parts");
            let keeping: Vec<bool> = (0..3).map(|layer| parts.keeps_pages(layer)).collect();
            (keeping, parts.gate(), parts.gated())
        };
        // A Mamba 2 layer, a dense layer, and an attention layer.
        let single = shape("NemotronHForCausalLM", &json!({}));
        let expected = (vec![false, false, true], GateKind::SquaredRelu, false);
        assert_eq!(keeping(&single), expected);
        let beside = shape("FalconH1ForCausalLM", &json!({}));
        assert_eq!(keeping(&beside), (vec![true; 3], GateKind::Silu, true));
    }

    #[test]
    fn layers_of_one_kind_share_it() {
        let changes =
            json!({"num_hidden_layers": 12, "sliding_window": 64, "max_position_embeddings": 128});
        let shape = shape("Gemma3ForCausalLM", &changes);
        let parts = DecoderParts::new(&shape).expect("parts");
        assert_eq!(parts.kind_of, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]);
        let sizes = parts.attention_sizes();
        assert_eq!((sizes[0].window, sizes[1].window), (Some(64), None));
        assert_eq!((sizes[0].angles, sizes[1].angles, sizes[0].scale), (Some(0), Some(1), 0.0625));
        assert_eq!((parts.gate(), parts.factors().embeddings), (GateKind::GeluTanh, 8.0));
    }
}
