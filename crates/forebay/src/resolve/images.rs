//! Resolves the settings for images from clients.

use anyhow::{Context, Result, bail};
use forebay_fetch::{Config as FetchConfig, Fetcher};
use forebay_server::ImageModel;
use forebay_sim::SimTower;
use forebay_vision::{Grid, Limits, Processing};
use forebay_weights::ModelShape;
use serde::Serialize;

use crate::flags::ImageFlags;
use crate::model::{Images, Model};

/// The number of positions in the image pool of a simulated device.
const SIM_POOL_TOKENS: u64 = 8192;

/// How many images a request may have, and where they may come from.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ImageSettings {
    pub(crate) limit_images: u32,
    pub(crate) max_image_pixels: u64,
    #[serde(flatten)]
    pub(crate) fetch: FetchConfig,
}

/// Checks that image flags are given only for models that take images.
///
/// # Errors
/// An image flag was given for a model that takes no images.
pub(super) fn check(flags: &ImageFlags, model: &Model) -> Result<()> {
    match flags.given().filter(|_| model.images.is_none()) {
        Some(flag) => bail!("{flag}: {} takes no images", model.name),
        None => Ok(()),
    }
}

/// The image settings; `None`: the model takes no images.
pub(super) fn resolve(flags: &ImageFlags, model: &Model) -> Option<ImageSettings> {
    model.images.as_ref()?;
    Some(ImageSettings {
        limit_images: flags.limit_images,
        max_image_pixels: flags.max_image_pixels,
        fetch: FetchConfig {
            remote_media: !flags.no_remote_media,
            allowed_media_domains: flags.allowed_media_domains.clone(),
            media_allow_private: flags.media_allow_private,
            allowed_local_media_path: flags.allowed_local_media_path.clone(),
            ..FetchConfig::default()
        },
    })
}

impl ImageSettings {
    /// Creates the image processor for the model.
    ///
    /// # Errors
    /// The model's parameters exclude every image.
    pub(crate) fn model(&self, images: &Images) -> Result<ImageModel> {
        let (patch, merge) = (images.patch, images.merge);
        let processing = match images.fixed {
            Some([height, width]) => Processing::fixed(patch, merge, Grid { height, width }),
            None => Processing::new(patch, merge, images.min_pixels, images.max_pixels),
        };
        let processing = processing.context("preprocessor_config.json")?;
        Ok(ImageModel {
            processing,
            token: images.image_token_id,
            most: self.limit_images,
            limits: Limits { max_pixels: self.max_image_pixels, ..Limits::default() },
        })
    }

    /// Creates the fetcher for images by URL.
    ///
    /// # Errors
    /// One of the allowed domains, or the allowed folder, is invalid.
    pub(crate) fn fetcher(&self) -> Result<Fetcher> {
        Fetcher::new(&self.fetch).context("images by URL")
    }
}

/// The vision tower of a simulated device; `None`: the model takes no images.
pub(crate) fn sim_tower(model: &Model, image_pool_tokens: Option<u64>) -> Option<SimTower> {
    model.images.as_ref()?;
    let decoder = model.shape.as_ref().and_then(ModelShape::decoder);
    let tower = decoder.and_then(|decoder| decoder.tower.as_ref());
    let layers = tower.and_then(|tower| u32::try_from(tower.layers).ok());
    let tokens = image_pool_tokens.unwrap_or(SIM_POOL_TOKENS);
    let pages = tokens.div_ceil(u64::from(SimTower::PAGE_TOKENS));
    Some(SimTower {
        layers: layers.unwrap_or(1).max(1),
        pages: u32::try_from(pages).unwrap_or(u32::MAX),
    })
}
