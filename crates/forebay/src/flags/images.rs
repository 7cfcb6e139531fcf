//! Flags about images.

use std::path::PathBuf;

use clap::Args;
use forebay_engine::ImageConfig;

/// The default of `--image-budget` on a CPU, in patches times layers: one layer of a 1200x1200
/// image, which may take longer than a second.
const CPU_BUDGET: u64 = 5776;

#[derive(Debug, Args)]
#[command(next_help_heading = "Images")]
pub(crate) struct ImageFlags {
    /// Largest work of the vision tower in a step, in patches times layers; at least one layer is
    /// computed. Running streams wait for this work [default: 40000, on a CPU 5776; a 1200x1200
    /// image has 5776 patches].
    #[arg(long, value_name = "PATCH_LAYERS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) image_budget: Option<u64>,
    /// Number of image tokens for which the vision tower's output is kept in memory [default: twice
    /// the largest image, at least 8192].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) image_pool_tokens: Option<u64>,
    /// Largest number of images in a request. 0: serve the model for text only. The vision tower is
    /// then not loaded, and the Rust hand may serve the model.
    #[arg(long, value_name = "N", default_value = "16")]
    pub(crate) limit_images: u32,
    /// Largest number of pixels of an image before it is resized.
    #[arg(long, value_name = "PIXELS", default_value = "50000000", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_image_pixels: u64,
    /// Do not fetch images by URL.
    #[arg(long)]
    pub(crate) no_remote_media: bool,
    /// Hosts from which images are fetched, on any port. `*.example.com` matches subdomains
    /// [default: all public hosts, on ports 80 and 443].
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',', num_args = 1..)]
    pub(crate) allowed_media_domains: Vec<String>,
    /// Also fetch images from private networks and this machine. Clients can then make the server
    /// send requests to them.
    #[arg(long)]
    pub(crate) media_allow_private: bool,
    /// Folder from which `file:` URLs may load images.
    #[arg(long, value_name = "DIR")]
    pub(crate) allowed_local_media_path: Option<PathBuf>,
}

impl ImageFlags {
    /// The engine's image settings, for a model with `merge` times `merge` patches per position.
    /// `whole`: no chunk of a prompt may end within an image.
    pub(crate) fn engine(&self, merge: u32, whole: bool, cpu: bool) -> ImageConfig {
        let usual = if cpu { CPU_BUDGET } else { ImageConfig::default().image_budget };
        ImageConfig {
            image_budget: self.image_budget.unwrap_or(usual),
            patches: u64::from(merge).pow(2).max(1),
            whole,
        }
    }

    /// The first image flag that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--image-budget", self.image_budget.is_some()),
            ("--image-pool-tokens", self.image_pool_tokens.is_some()),
            ("--no-remote-media", self.no_remote_media),
            ("--allowed-media-domains", !self.allowed_media_domains.is_empty()),
            ("--media-allow-private", self.media_allow_private),
            ("--allowed-local-media-path", self.allowed_local_media_path.is_some()),
        ];
        flags.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }
}
