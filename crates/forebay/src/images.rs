//! The settings of image models.

use anyhow::{Context, Result, bail};
use forebay_fetch::{Config as FetchConfig, Fetcher};
use forebay_server::ImageModel;
use forebay_sim::SimTower;
use forebay_vision::{Limits, Processing};
use serde::Serialize;
use serde_json::Value;

use crate::flags::ImageFlags;
use crate::model::Model;

/// About a quarter of an image of 1200x1200 in a tower of 27 layers.
const BUDGET: u64 = 40_000;
/// One layer of such an image: on a CPU it may take longer than a second.
const CPU_BUDGET: u64 = 5776;
/// Positions of a simulated pool.
const SIM_POOL_TOKENS: u64 = 8192;

/// The processing of images; `None`: the model takes none.
pub(crate) fn seen(flags: &ImageFlags, model: &Model) -> Result<Option<ImageModel>> {
    let Some(images) = model.images.as_ref() else { return Ok(None) };
    let processing =
        Processing::new(images.patch, images.merge, images.min_pixels, images.max_pixels)
            .context("preprocessor_config.json")?;
    Ok(Some(ImageModel {
        processing,
        token: images.image_token_id,
        most: flags.limit_images,
        limits: Limits { max_pixels: flags.max_image_pixels, ..Limits::default() },
    }))
}

/// The fetcher of images; `None`: the model takes none.
pub(crate) fn fetcher(flags: &ImageFlags, model: &Model) -> Result<Option<Fetcher>> {
    if model.images.is_none() {
        return Ok(None);
    }
    let config = FetchConfig {
        remote: !flags.no_remote_media,
        allowed_domains: flags.allowed_media_domains.clone(),
        allow_private: flags.media_allow_private,
        local: flags.allowed_local_media_path.clone(),
        ..FetchConfig::default()
    };
    Fetcher::new(&config).map(Some).context("images by URL")
}

/// The settings of images, defaults filled in.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct ImageConfig {
    /// Patches times layers a step.
    pub(crate) image_budget: u64,
    pub(crate) image_pool_tokens: Option<u64>,
    /// Patches of a position.
    #[serde(skip)]
    patches: u64,
}

impl ImageConfig {
    /// The settings of images; `None`: the model takes none.
    pub(crate) fn resolve(flags: &ImageFlags, model: &Model, cpu: bool) -> Result<Option<Self>> {
        let Some(images) = &model.images else {
            if let Some(flag) = flags.given() {
                bail!("{flag}: {} sees no images", model.name);
            }
            return Ok(None);
        };
        let usual = if cpu { CPU_BUDGET } else { BUDGET };
        Ok(Some(Self {
            image_budget: flags.image_budget.unwrap_or(usual),
            image_pool_tokens: flags.image_pool_tokens,
            patches: u64::from(images.merge).pow(2).max(1),
        }))
    }

    /// Positions times layers a step.
    pub(crate) fn position_layers(&self) -> u64 {
        (self.image_budget / self.patches).max(1)
    }

    /// The tower of a simulated device.
    pub(crate) fn simulated(&self, model: &Model) -> SimTower {
        let depth = model.config.get("vision_config").and_then(|vision| vision.get("depth"));
        let layers = depth.and_then(Value::as_u64).and_then(|depth| u32::try_from(depth).ok());
        let tokens = self.image_pool_tokens.unwrap_or(SIM_POOL_TOKENS);
        let pages = tokens.div_ceil(u64::from(SimTower::PAGE_TOKENS));
        SimTower {
            layers: layers.unwrap_or(1).max(1),
            pages: u32::try_from(pages).unwrap_or(u32::MAX),
        }
    }
}
