//! The shape of a model of any kind.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bert::{BertShape, is_bert};
use crate::error::ModelError;
use crate::families::{Indexer, KeyChoice, Mixer, Shape, token_ids};
use crate::vision::TOWER_CONFIG;

/// The data from which a model is built.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelShape {
    /// A decoder.
    Decoder(Box<Shape>),
    /// An encoder, which only pools.
    Encoder(BertShape),
}

impl ModelShape {
    /// Reads a `config.json`. `headless` is true if the model is served for pooling.
    ///
    /// # Errors
    /// No hand serves the model, or the config lacks a needed value.
    pub fn from_config(config: &Map<String, Value>, headless: bool) -> Result<Self, ModelError> {
        if is_bert(config) {
            return Ok(Self::Encoder(BertShape::of(config)?));
        }
        let shape = Shape::from_config(config)?;
        shape.check_served()?;
        Ok(Self::Decoder(Box::new(Shape { headless, ..shape })))
    }

    /// Reads a `config.json`. For a model with a vision tower, reads only the text part, in which a
    /// position is a single number.
    ///
    /// # Errors
    /// As [`ModelShape::from_config`].
    pub fn of_text(config: &Map<String, Value>, headless: bool) -> Result<Self, ModelError> {
        let mut text = config.clone();
        text.shift_remove(TOWER_CONFIG);
        Self::from_config(&text, headless)
    }

    /// Returns the decoder; `None`: the model is an encoder.
    #[must_use]
    pub fn decoder(&self) -> Option<&Shape> {
        if let Self::Decoder(shape) = self { Some(shape) } else { None }
    }

    /// The number of tokens in the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Decoder(shape) => shape.vocab_size,
            Self::Encoder(shape) => shape.vocab_size,
        }
    }

    /// Elements of an embedding.
    #[must_use]
    pub fn hidden_size(&self) -> usize {
        match self {
            Self::Decoder(shape) => shape.hidden_size,
            Self::Encoder(shape) => shape.hidden_size,
        }
    }

    /// The largest number of positions of a request.
    #[must_use]
    pub fn longest_context(&self) -> u64 {
        match self {
            Self::Decoder(shape) => shape.longest_context(),
            Self::Encoder(shape) => shape.max_positions as u64,
        }
    }

    /// Tokens that end a generation, from the config from which the shape was read.
    pub(crate) fn eos_token_ids(&self, config: &Map<String, Value>) -> Vec<i32> {
        match self {
            Self::Decoder(shape) => shape.eos_token_ids.clone(),
            Self::Encoder(_) => token_ids(config.get("eos_token_id")),
        }
    }

    /// True if the model has latent attention, which caches one row per position instead of keys
    /// and values.
    #[must_use]
    pub fn is_latent(&self) -> bool {
        let latent = |mixer: &Mixer| matches!(mixer, Mixer::Latent(_));
        self.decoder().is_some_and(|shape| shape.mixers.iter().any(latent))
    }

    /// Returns the indexer of a model that chooses the positions to attend to; `None`: the model
    /// has none and attends to all positions.
    #[must_use]
    pub fn indexer(&self) -> Option<&Indexer> {
        self.decoder()?.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Latent(latent) => match &latent.chosen {
                KeyChoice::Indexed(indexer) => Some(indexer),
                KeyChoice::All | KeyChoice::Shared => None,
            },
            Mixer::Attention(_) | Mixer::Recurrence(_) | Mixer::Beside(_) | Mixer::None => None,
        })
    }
}
