//! The flags that choose a dataset.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::image::{ImageContent, ImageFormat, Resolution};

/// The name of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DatasetName {
    /// Prompts of the requested lengths: ShareGPT text if --dataset-path is given, otherwise random
    /// words.
    Random,
    /// Prompts of the requested lengths, always of random words.
    RandomIds,
    /// First turns of ShareGPT conversations, with their own lengths and the lengths of their
    /// answers.
    Sharegpt,
    /// Chat messages of text and images.
    Image,
    /// Inputs for embeddings.
    #[value(alias = "embedding")]
    Embeddings,
    /// Groups of prompts that share a prefix.
    #[value(alias = "shared-prefix")]
    GeneratedSharedPrefix,
    /// A recorded trace in Mooncake's format: times, lengths and shared prefixes.
    #[value(alias = "mooncake")]
    Trace,
    /// A JSONL file of prompts.
    Custom,
}

impl DatasetName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RandomIds => "random-ids",
            Self::Sharegpt => "sharegpt",
            Self::Image => "image",
            Self::Embeddings => "embeddings",
            Self::GeneratedSharedPrefix => "generated-shared-prefix",
            Self::Trace => "trace",
            Self::Custom => "custom",
        }
    }
}

/// Flags about the requests that are sent.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Dataset")]
pub struct DatasetArgs {
    /// The source of the requests.
    #[arg(long, value_enum, default_value = "random")]
    pub dataset_name: DatasetName,
    /// File of the dataset.
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,
    /// Number of requests [default: 1000; for trace, custom and shared prefixes: all requests].
    #[arg(long, alias = "num-prompt", value_parser = clap::value_parser!(u32).range(1..))]
    pub num_prompts: Option<u32>,
    /// Number of distinct requests, which are repeated in rotation up to --num-prompts [default:
    /// all requests are distinct].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub unique_requests: Option<u32>,
    /// Send prompts as token ids (completions and /generate only).
    #[arg(long)]
    pub tokenize_prompt: bool,
    /// Flags about the lengths of the random, image and embeddings datasets.
    #[command(flatten)]
    pub random: RandomArgs,
    /// The selection of ShareGPT conversations.
    #[command(flatten)]
    pub sharegpt: SharegptArgs,
    /// Flags about images.
    #[command(flatten)]
    pub image: ImageArgs,
    /// Number of inputs in one embeddings request.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub embedding_inputs: u32,
    /// Flags about shared prefixes.
    #[command(flatten)]
    pub gsp: GspArgs,
    /// Truncate the trace's prompts to this many tokens.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub trace_max_input_len: Option<u32>,
    /// Number of tokens to generate for every custom prompt [default: the file's output_tokens, or
    /// 256].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub custom_output_len: Option<u32>,
}

/// Random lengths: uniform integers in `[max(1, floor(LEN * RATIO)), LEN]`, as in `bench_serving`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Dataset: random, image, embeddings")]
pub struct RandomArgs {
    /// Largest number of text tokens of a prompt.
    #[arg(
        long,
        visible_aliases = ["random-input", "input-len"],
        value_name = "TOKENS",
        default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub random_input_len: u32,
    /// Largest number of tokens to generate.
    #[arg(
        long,
        visible_aliases = ["random-output", "output-len"],
        value_name = "TOKENS",
        default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub random_output_len: u32,
    /// Lengths are uniform between RATIO times the maximum and the maximum; 1 makes them exact.
    #[arg(long, visible_alias = "random-range", value_name = "RATIO", default_value_t = 0.0, value_parser = ratio)]
    pub random_range_ratio: f64,
}

/// The selection of ShareGPT conversations.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Dataset: sharegpt")]
pub struct SharegptArgs {
    /// Number of tokens to generate, instead of the length of the answer in the file.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub sharegpt_output_len: Option<u32>,
    /// Keep every conversation whose prompt and answer fit in this many tokens
    /// [default: prompts up to 1024 tokens, with their answers up to 2048].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub sharegpt_context_len: Option<u32>,
}

/// Images of the image dataset.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Dataset: image")]
pub struct ImageArgs {
    /// Number of images in each request.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub image_count: u32,
    /// Size of the images: 360p, 720p, 1080p, 4k, or HEIGHTxWIDTH in pixels.
    #[arg(long, value_name = "SIZE", default_value = "1080p")]
    pub image_resolution: Resolution,
    /// Compression of the images.
    #[arg(long, value_enum, default_value = "jpeg")]
    pub image_format: ImageFormat,
    /// Content of the images: random pixels, or a white page.
    #[arg(long, value_enum, default_value = "random")]
    pub image_content: ImageContent,
}

/// Groups of prompts that share a prefix.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Dataset: generated-shared-prefix")]
pub struct GspArgs {
    /// Number of groups, each with a different prefix.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub gsp_num_groups: u32,
    /// Number of prompts in each group.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub gsp_prompts_per_group: u32,
    /// Number of tokens of a group's prefix.
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    pub gsp_system_prompt_len: u32,
    /// Number of tokens of each prompt after the prefix.
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub gsp_question_len: u32,
    /// Number of tokens to generate.
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub gsp_output_len: u32,
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("a ratio is between 0 and 1".to_owned()),
    }
}
