//! Turns the flags and the model into the configuration of each component. /server_info prints all
//! of it.

mod adapters;
mod device;
mod drafts;
mod engine;
mod hand;
mod images;
mod kv_cache;
mod model;
mod pd;
mod server;
mod sparse;
mod states;
mod tiers;
mod windows;

use anyhow::Result;
use forebay_engine::EngineConfig;
use forebay_hand::HandConfig;
use forebay_machine::Machine;
use forebay_replicas::ReplicasConfig;
use forebay_server::{Disaggregation, ServerConfig};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::flags::ServeFlags;
use crate::hands::Chosen;
use crate::model::Model;

pub(crate) use device::{DeviceSettings, Simulated};
pub(crate) use drafts::Drafter;
pub(crate) use hand::{dtype, mem_fraction, own_blocks};
pub(crate) use images::{ImageSettings, sim_tower};
pub(crate) use kv_cache::kv_cache_dtype;
pub(crate) use model::ModelSettings;
pub(crate) use pd::model_name;
pub(crate) use server::ServerSettings;
pub(crate) use sparse::hot_row_tokens;
pub(crate) use tiers::HostSize;
pub(crate) use windows::why_one_pool;

/// Fields of a hand's configuration that /server_info omits because they are not settings: the
/// model's files, and values that differ between hands.
const NO_SETTINGS: [&str; 8] = [
    "model",
    "draft",
    "rank",
    "world_size",
    "host_pages",
    "host_state_pages",
    "host_shared",
    "host_lenders",
];

/// The configuration of each component: everything that is decided before the hand starts. A
/// setting that several components need has the same name and value in each of them.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Resolved {
    #[serde(flatten)]
    pub(crate) model: ModelSettings,
    #[serde(flatten)]
    pub(crate) device: DeviceSettings,
    /// The chosen hand, and the reason for the choice.
    #[serde(flatten)]
    pub(crate) choice: Chosen,
    #[serde(flatten, serialize_with = "settings_of_hand")]
    pub(crate) hand: HandConfig,
    #[serde(flatten)]
    pub(crate) engine: EngineConfig,
    #[serde(flatten)]
    pub(crate) replicas: ReplicasConfig,
    /// `None`: the server computes whole requests.
    #[serde(flatten)]
    pub(crate) disaggregation: Option<Disaggregation>,
    #[serde(flatten)]
    pub(crate) server: ServerSettings,
    /// `None`: the model takes no images.
    #[serde(flatten)]
    pub(crate) images: Option<ImageSettings>,
}

impl Resolved {
    /// Resolves defaults of `flags` for a model and its drafter on this machine. `access`: the
    /// access rules of the opened listeners.
    ///
    /// # Errors
    /// Flags contradict each other, the model, or the machine.
    pub(crate) fn new(
        flags: &ServeFlags,
        (model, drafter): (&Model, Option<&Drafter>),
        access: ServerConfig,
    ) -> Result<Self> {
        let context_length = model::context_length(flags, model)?;
        let machine = Machine::here();
        let device = DeviceSettings::new(flags, &machine.processors())?;
        pd::check(flags, model, device.device, drafter.is_some())?;
        let disaggregation = pd::disaggregation(flags);
        let replicas = engine::replicas(flags)?;
        let mut engine =
            engine::resolve(flags, model, &device, &machine.processors(), context_length)?;
        hand::bound_states(flags, model, &device, &mut engine, &machine);
        let mut hand = hand::resolve(flags, model, &device, &engine, &machine)?;
        hand.lora = adapters::resolve(flags, model, &device)?;
        hand.draft = drafts::resolve(flags, (model, drafter), &device)?;
        pd::leave_room(disaggregation.as_ref(), &mut hand);
        engine.places = hand.lora.map_or(0, |lora| lora.places);
        let images = images::resolve(&flags.images, model);
        device::check_elsewhere(flags, device.device, engine.host_tier.is_some())?;
        let choice = Chosen::new(flags.run.hand, &hand, device.arrangement.ranks, model)?;
        engine.drafts = drafts::from_text(flags, model, &device, &choice)?;
        if choice.hand == "torch" && hand.load_format == "auto" {
            hand.model["manifest"] = model.manifest()?;
        }
        Ok(Self {
            model: ModelSettings::new(flags, model),
            server: ServerSettings::new(flags, model, &machine, &engine, access)?,
            replicas,
            disaggregation,
            device,
            choice,
            hand,
            engine,
            images,
        })
    }
}

fn settings_of_hand<S: Serializer>(hand: &HandConfig, serializer: S) -> Result<S::Ok, S::Error> {
    let mut settings = json!(hand);
    if let Value::Object(settings) = &mut settings {
        settings.retain(|name, _| !NO_SETTINGS.contains(&name.as_str()));
        // A hand's configuration omits the default, but users see it by name.
        if hand.kv_cache_dtype.is_none() {
            settings.insert("kv_cache_dtype".into(), "auto".into());
        }
    }
    settings.serialize(serializer)
}

#[cfg(test)]
mod tests;
