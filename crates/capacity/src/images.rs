//! Images in a plan: the threads that prepare them, and the vision tower that encodes them.

use std::collections::VecDeque;

use anyhow::{Result, bail};
use clap::Args;
use forebay_scheduler::{ImageId, Tower};
use forebay_sim::{Profile, SimTower};
use serde::Serialize;

use crate::traffic::Traffic;

/// Patches per position, as in Qwen's vision towers.
const PATCHES: u64 = 4;
/// The default number of positions in image pages, unless twice the largest image is more.
const USUAL_POOL: u64 = 8192;

/// Flags about images, for traces that contain images.
#[derive(Debug, Clone, Copy, Args, Serialize)]
pub struct ImageArgs {
    /// Number of layers of the vision tower.
    #[arg(long, value_name = "N", default_value_t = 27, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tower_layers: u32,
    /// Largest work of the vision tower in a step, in patches times layers.
    #[arg(long, value_name = "N", default_value_t = 40_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub image_budget: u64,
    /// Number of positions in a replica's image pages [default: twice the largest image, at least
    /// 8192].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub image_pool_tokens: Option<u64>,
    /// Milliseconds for decoding and resizing an image on one thread.
    #[arg(long, value_name = "MS", default_value_t = 20.0, value_parser = crate::args::from_zero)]
    pub image_prepare_ms: f64,
    /// Number of threads of a replica that decode and resize images.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub intake_threads: u32,
}

/// How a replica processes images: the vision tower, and the threads that prepare images.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageMeans {
    pub(crate) tower: Tower,
    pub(crate) prepare_us: u64,
    pub(crate) threads: u32,
}

impl ImageArgs {
    /// Returns the settings for images; `None`: the traffic has no images.
    ///
    /// # Errors
    /// The profile has no time for the vision tower, or the largest image does not fit in the image
    /// pages.
    pub(crate) fn resolve(
        &self,
        profile: &Profile,
        traffic: &Traffic,
    ) -> Result<Option<ImageMeans>> {
        let largest = u64::from(traffic.largest_image());
        if largest == 0 {
            return Ok(None);
        }
        if profile.time.tower_us == 0.0 {
            bail!(
                "the trace has images, and profile {} does not say what a vision tower takes (time.tower_us)",
                profile.name
            );
        }
        let pool = self.image_pool_tokens.unwrap_or(USUAL_POOL.max(2 * largest));
        let page_tokens = SimTower::PAGE_TOKENS;
        let pages = pool.div_ceil(page_tokens.into());
        if largest.div_ceil(page_tokens.into()) > pages {
            bail!(
                "an image of {largest} positions is larger than all image pages: {pool} (--image-pool-tokens)"
            );
        }
        let tower = Tower {
            layers: self.tower_layers,
            pages: u32::try_from(pages).unwrap_or(u32::MAX),
            page_tokens,
            budget: (self.image_budget / PATCHES).max(1),
            whole: false,
        };
        let prepare_us = (self.image_prepare_ms * 1000.0).round() as u64;
        Ok(Some(ImageMeans { tower, prepare_us, threads: self.intake_threads }))
    }
}

/// The intake threads of a replica. Each thread prepares one image at a time, in the order of the
/// requests.
#[derive(Debug, Default)]
pub(crate) struct Intake {
    /// The times at which busy threads become free, the earliest first.
    free_us: VecDeque<u64>,
    /// The images that are being prepared, in the order in which they will be ready.
    pub(crate) preparing: VecDeque<ImageId>,
}

impl Intake {
    /// Accepts an image, and returns the time at which it is ready. Preparation takes equally long
    /// for all images, so they become ready in order.
    pub(crate) fn take(&mut self, image: ImageId, now_us: u64, seeing: &ImageMeans) -> u64 {
        let free_us = if self.free_us.len() < seeing.threads as usize {
            now_us
        } else {
            self.free_us.pop_front().unwrap_or(now_us)
        };
        let ready_us = free_us.max(now_us) + seeing.prepare_us;
        self.free_us.push_back(ready_us);
        self.preparing.push_back(image);
        ready_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_prepare_images_side_by_side() {
        let tower = Tower { layers: 1, pages: 1, page_tokens: 64, budget: 1, whole: false };
        let seeing = ImageMeans { tower, prepare_us: 100, threads: 2 };
        let mut intake = Intake::default();
        let mut take = |id, now_us| intake.take(ImageId(id), now_us, &seeing);
        assert_eq!([take(1, 0), take(2, 10), take(3, 20), take(4, 500)], [100, 110, 200, 600]);
        assert_eq!(intake.preparing.len(), 4);
    }
}
