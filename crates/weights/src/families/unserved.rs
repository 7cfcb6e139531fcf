//! The features and architectures that no hand supports. Once one hand supports a
//! feature, the feature is removed here, and the other hand lists it as missing.

use super::Family;
use super::shape::{Activation, Attention, Beside, FeedShape, Mixer, Norm, NormPlacement, Shape};
use crate::error::ModelError;

/// Known architectures that no hand supports: the names in `config.json` and in GGUF files, and the
/// missing feature.
pub const NOT_SERVED: [(&str, &str, &str); 3] = [
    ("Qwen2VLForConditionalGeneration", "qwen2vl", "another vision tower"),
    (
        "MistralLarge3ForCausalLM",
        "",
        "its repository has a params.json and names of its own, which are not read",
    ),
    ("DeepseekV4ForCausalLM", "", "compressed attention"),
];

impl ModelError {
    /// Creates the error for a feature that no hand supports.
    pub(crate) fn unserved_part(part: &str) -> Self {
        Self::Unserved(format!("a model with {part}"))
    }

    /// Creates the error for a `config.json` with an architecture that no hand supports.
    pub(crate) fn unserved_architecture(name: &str) -> Self {
        let known = NOT_SERVED.iter().find(|(known, ..)| *known == name);
        let why = known.map(|(.., why)| format!(" ({why})")).unwrap_or_default();
        Self::Unserved(format!(
            "the architecture {name}{why}: try --model-impl transformers, or a model of {}",
            titles(|_| true)
        ))
    }

    /// Creates the error for a GGUF file with an architecture that no hand supports.
    pub(crate) fn unserved_gguf(name: &str) -> Self {
        let known = NOT_SERVED.iter().find(|(_, known, _)| *known == name && !name.is_empty());
        let why = known.map(|(.., why)| format!(" ({why})")).unwrap_or_default();
        Self::Unserved(format!(
            "the GGUF architecture '{name}'{why}: try llama.cpp, or a file of {}",
            titles(|family| family.gguf.is_some())
        ))
    }
}

/// Returns the documented names of the families for which `which` returns true, joined with "; ".
fn titles(which: fn(&Family) -> bool) -> String {
    let families = super::ALL.into_iter().filter(|family| which(family));
    families.map(|family| family.title).collect::<Vec<_>>().join("; ")
}

impl Shape {
    /// Checks that a hand supports each of the model's features.
    ///
    /// # Errors
    /// [`ModelError::Unserved`], with the first unsupported feature.
    pub fn check_served(&self) -> Result<(), ModelError> {
        match self.part_without_hand() {
            None => Ok(()),
            Some(part) => Err(ModelError::unserved_part(&part)),
        }
    }

    fn part_without_hand(&self) -> Option<String> {
        let found = self.mixers.iter().find_map(Mixer::part_without_hand);
        let found = found.or_else(|| {
            let both = !self.factors.is_empty() && self.quantised.is_some();
            both.then_some("factors of weights that are quantised")
        });
        let found = found.or_else(|| self.differing_layers()).or_else(|| self.layer_without_hand());
        if let Some(part) = found {
            return Some(part.to_owned());
        }
        self.feeds.iter().find_map(FeedShape::part_without_hand)
    }

    fn differing_layers(&self) -> Option<&'static str> {
        let count = |kind: fn(&&Mixer) -> bool| self.mixers.iter().filter(kind).count();
        let attentions = count(|it| it.attention().is_some());
        let latents = count(|it| matches!(it, Mixer::Latent(_)));
        let both_ways = count(|it| it.attention().is_some_and(|it| it.both_ways));
        if both_ways > 0 && (both_ways < attentions || count(|it| it.recurrence().is_some()) > 0) {
            return Some("bidirectional attention in some layers only");
        }
        // Layers with latent attention may differ from each other only in their indexers.
        if attentions > 0 && latents > 0 {
            return Some("attention of several kinds");
        }
        if attentions == 0 && latents == 0 {
            return Some("recurrent layers alone");
        }
        let is_latent = |number: &usize| matches!(self.mixer(*number), Mixer::Latent(_));
        let mut ropes = (0..self.layers.len()).filter(is_latent).map(|it| self.layers[it].rope);
        let first = ropes.next();
        if ropes.any(|rope| Some(rope) != first) {
            return Some("latent attention whose rotary embedding differs between layers");
        }
        let activation = |feed: &FeedShape| match feed {
            FeedShape::Dense(dense) => Some(dense.activation),
            FeedShape::Experts(experts) => Some(experts.activation),
            FeedShape::None => None,
        };
        let activations: Vec<Activation> = self.feeds.iter().filter_map(activation).collect();
        if activations.windows(2).any(|pair| pair[0] != pair[1]) {
            return Some("activations that differ between layers");
        }
        None
    }

    fn layer_without_hand(&self) -> Option<&'static str> {
        self.layers.iter().enumerate().find_map(|(number, layer)| match layer.norms {
            NormPlacement::Before => None,
            _ if matches!(self.mixer(number), Mixer::None)
                || matches!(self.feed(number), FeedShape::None) =>
            {
                Some("layers of one part with other norms than one in front of it")
            }
            NormPlacement::Parallel if self.experts(number).is_some() => {
                Some("experts that read the states in front of the layer")
            }
            NormPlacement::BeforeFeed | NormPlacement::Parallel => None,
            NormPlacement::After | NormPlacement::Around if self.norm == Norm::Mean => {
                Some("norms behind the parts of layers that subtract the mean")
            }
            NormPlacement::After | NormPlacement::Around => None,
        })
    }
}

impl Mixer {
    fn part_without_hand(&self) -> Option<&'static str> {
        let attention = match self {
            Self::Recurrence(_) | Self::Latent(_) | Self::None => return None,
            Self::Attention(attention) | Self::Beside(Beside { attention, .. }) => attention,
        };
        let &Attention { head_dim, value_dim, .. } = attention;
        (value_dim != head_dim).then_some("keys and values of different lengths")
    }
}

impl FeedShape {
    fn part_without_hand(&self) -> Option<String> {
        let (activation, gated) = match self {
            Self::Dense(feed) => (feed.activation, feed.gated),
            Self::Experts(experts) => (experts.activation, experts.gated),
            Self::None => return None,
        };
        match (activation, gated) {
            (Activation::SquaredRelu, false) => None,
            (Activation::SquaredRelu, true) => {
                Some(format!("gates of the activation hidden_act {:?}", activation.name()))
            }
            (_, true) => None,
            (_, false) => Some("feed-forward parts without a gate".to_owned()),
        }
    }
}
