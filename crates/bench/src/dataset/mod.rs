//! Datasets: the sources of requests.
//!
//! All random numbers come from ChaCha12 generators with keys from the run's seed. So the same seed
//! gives the same requests on every machine. Tokens are counted without a chat template and without
//! special tokens.

mod args;
mod custom;
mod image;
mod jsonl;
mod random;
pub(crate) mod seed;
mod sharegpt;
#[cfg(test)]
mod tests;
pub mod trace;
mod turns;
mod words;

use std::path::Path;

use anyhow::{Context as _, ensure};
use forebay_text::Tokenizer;

pub use args::{DatasetArgs, DatasetName, GspArgs, ImageArgs, RandomArgs, SharegptArgs};
pub use image::{ImageContent, ImageFormat, Resolution};

use crate::WorkItem;
use random::Source;
use sharegpt::Filter;
use turns::Turns;
use words::Words;

/// The default number of requests of a dataset that can generate any number.
const REQUESTS: u32 = 1000;

/// Creates the requests of a run: `--num-prompts` requests if that is given, except that a trace is
/// never repeated.
///
/// # Errors
/// The tokenizer is missing, flags contradict each other, or the file is missing or malformed.
pub fn load(
    args: &DatasetArgs,
    seed: u64,
    tokenizer: Option<&Tokenizer>,
) -> anyhow::Result<Vec<WorkItem>> {
    let name = args.dataset_name.name();
    check(args)?;
    let tokenizer = tokenizer
        .with_context(|| format!("the {name} dataset counts tokens and needs a tokenizer"))?;
    let words = Words::new(tokenizer)?;
    let wanted = args.num_prompts.unwrap_or(REQUESTS) as usize;
    let distinct = args.unique_requests.map_or(wanted, |unique| wanted.min(unique as usize));
    let as_ids = args.tokenize_prompt;
    let path = || file(args);

    match args.dataset_name {
        DatasetName::Trace => trace::items(&trace::read(path()?)?, args, seed, &words),
        DatasetName::Random | DatasetName::RandomIds => {
            let source = source(args, seed, &words, distinct)?;
            let items = random::items(&args.random, seed, &source, distinct, as_ids)?;
            Ok(repeat(items, wanted))
        }
        DatasetName::Image => {
            let source = source(args, seed, &words, distinct)?;
            let items = random::with_images(&args.random, &args.image, seed, &source, distinct)?;
            Ok(repeat(items, wanted))
        }
        DatasetName::Sharegpt => {
            let exchanges = sharegpt::read(path()?, seed)?;
            let filter = Filter::new(&args.sharegpt);
            let items = sharegpt::items(&exchanges, filter, &words, distinct, as_ids)?;
            warn_if_fewer(items.len(), distinct);
            Ok(repeat(items, wanted))
        }
        DatasetName::Embeddings => Ok(repeat(embeddings(args, seed, &words, distinct)?, wanted)),
        DatasetName::GeneratedSharedPrefix => {
            let items = random::shared_prefix(&args.gsp, seed, &words, as_ids)?;
            let wanted = args.num_prompts.map_or(items.len(), |wanted| wanted as usize);
            Ok(repeat(items, wanted))
        }
        DatasetName::Custom => {
            let limit = [args.num_prompts, args.unique_requests].into_iter().flatten().min();
            let items = custom::items(path()?, args, limit, &words)?;
            let wanted = args.num_prompts.map_or(items.len(), |wanted| wanted as usize);
            Ok(repeat(items, wanted))
        }
    }
}

/// Refuses given flags that the dataset does not use.
fn check(args: &DatasetArgs) -> anyhow::Result<()> {
    use DatasetName::{Embeddings, GeneratedSharedPrefix, Image, RandomIds, Trace};
    let dataset = args.dataset_name;
    let name = dataset.name();
    ensure!(
        args.dataset_path.is_none() || !matches!(dataset, RandomIds | GeneratedSharedPrefix),
        "the {name} dataset is made up and reads no --dataset-path"
    );
    ensure!(
        !args.tokenize_prompt || !matches!(dataset, Image | Embeddings),
        "--tokenize-prompt: the {name} dataset is sent as text"
    );
    ensure!(
        args.unique_requests.is_none() || !matches!(dataset, Trace | GeneratedSharedPrefix),
        "--unique-requests: the {name} dataset says itself what repeats"
    );
    Ok(())
}

fn file(args: &DatasetArgs) -> anyhow::Result<&Path> {
    args.dataset_path
        .as_deref()
        .with_context(|| format!("the {} dataset needs --dataset-path", args.dataset_name.name()))
}

/// The source of text for `count` requests.
fn source<'a>(
    args: &DatasetArgs,
    seed: u64,
    words: &'a Words<'a>,
    count: usize,
) -> anyhow::Result<Source<'a>> {
    let longest = args.random.random_input_len;
    let turns = match &args.dataset_path {
        None => None,
        Some(path) => Some(Turns::new(words, &sharegpt::read(path, seed)?, count, longest)?),
    };
    Ok(Source { words, turns })
}

fn embeddings(
    args: &DatasetArgs,
    seed: u64,
    words: &Words<'_>,
    count: usize,
) -> anyhow::Result<Vec<WorkItem>> {
    let inputs = args.embedding_inputs;
    let Some(path) = &args.dataset_path else {
        return random::embeddings(
            &args.random,
            seed,
            &Source { words, turns: None },
            count,
            inputs,
        );
    };
    let exchanges = sharegpt::read(path, seed)?;
    let wanted = count * inputs as usize;
    let prompts = sharegpt::prompts(&exchanges, Filter::new(&args.sharegpt), words, wanted)?;
    warn_if_fewer(prompts.len(), wanted);
    Ok(random::in_requests(repeat(prompts, wanted), inputs))
}

fn warn_if_fewer(found: usize, wanted: usize) {
    if found < wanted {
        tracing::warn!("the file has {found} texts of wanted lengths, not {wanted}: they repeat");
    }
}

/// Returns exactly `wanted` items: the first items, or all items repeated.
fn repeat<T: Clone>(mut items: Vec<T>, wanted: usize) -> Vec<T> {
    let distinct = items.len();
    items.truncate(wanted);
    for index in items.len()..wanted {
        items.push(items[index % distinct].clone());
    }
    items
}
