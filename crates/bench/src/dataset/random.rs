//! Requests of random lengths: text, text with images, embeddings inputs, and prompts with a shared
//! prefix.

use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rayon::prelude::*;

use super::args::{GspArgs, ImageArgs, RandomArgs};
use super::image;
use super::seed::{Purpose, generator};
use super::turns::Turns;
use super::words::{Drawn, Text, Words};
use crate::{Part, Prompt, WorkItem};

/// The source of random texts.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    /// The tokenizer and its random words.
    pub(crate) words: &'a Words<'a>,
    /// Conversation turns as a source of text; `None`: random words.
    pub(crate) turns: Option<Turns>,
}

impl Source<'_> {
    /// Creates text number `index`, which has `tokens` tokens.
    fn text(&self, seed: u64, index: usize, tokens: u32) -> anyhow::Result<Text> {
        let mut generator = generator(seed, Purpose::Words, index as u64);
        if let Some(turns) = &self.turns {
            return turns.text(self.words, &mut generator, index, tokens);
        }
        let mut drawn = Drawn::new();
        self.words.draw(&mut generator, tokens, &mut drawn);
        self.words.text(&drawn)
    }
}

/// The lengths of request `index`: prompt tokens and tokens to generate. Each is uniform in
/// `[max(1, floor(most * ratio)), most]`.
fn lengths(args: &RandomArgs, seed: u64, index: usize) -> (u32, u32) {
    let mut generator = generator(seed, Purpose::Lengths, index as u64);
    let mut draw = |most: u32| {
        let least = (f64::from(most) * args.random_range_ratio) as u32;
        generator.random_range(least.clamp(1, most)..=most)
    };
    let input = draw(args.random_input_len);
    (input, draw(args.random_output_len))
}

/// Creates `count` text requests.
///
/// # Errors
/// If a text can't be encoded.
pub(crate) fn items(
    args: &RandomArgs,
    seed: u64,
    source: &Source<'_>,
    count: usize,
    as_ids: bool,
) -> anyhow::Result<Vec<WorkItem>> {
    let work = (0..count).into_par_iter().map(|index| {
        let (input, output_tokens) = lengths(args, seed, index);
        let text = source.text(seed, index, input)?;
        let text_tokens = text.tokens();
        Ok(WorkItem { prompt: text.prompt(as_ids), text_tokens, output_tokens, arrival: None })
    });
    work.collect()
}

/// Creates `count` chat requests, each of images followed by text.
///
/// # Errors
/// If a text can't be encoded, or an image can't be compressed.
pub(crate) fn with_images(
    args: &RandomArgs,
    images: &ImageArgs,
    seed: u64,
    source: &Source<'_>,
    count: usize,
) -> anyhow::Result<Vec<WorkItem>> {
    let work = (0..count).into_par_iter().map(|index| {
        let (input, output_tokens) = lengths(args, seed, index);
        let text = source.text(seed, index, input)?;
        let text_tokens = text.tokens();
        let mut pixels = generator(seed, Purpose::Pixels, index as u64);
        let addresses = (0..images.image_count)
            .map(|_| image::address(images, &mut pixels).map(Part::Image))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let parts = addresses.into_iter().chain([Part::Text(text.text)]).collect();
        let prompt = Prompt::Parts(parts);
        Ok(WorkItem { prompt, text_tokens, output_tokens, arrival: None })
    });
    work.collect()
}

/// Creates `count` embeddings requests of `inputs` texts each, of random lengths.
///
/// # Errors
/// If a text cannot be encoded.
pub(crate) fn embeddings(
    args: &RandomArgs,
    seed: u64,
    source: &Source<'_>,
    count: usize,
    inputs: u32,
) -> anyhow::Result<Vec<WorkItem>> {
    let texts = (0..count * inputs as usize).into_par_iter().map(|index| {
        let text = source.text(seed, index, lengths(args, seed, index).0)?;
        Ok((text.tokens(), text.text))
    });
    Ok(in_requests(texts.collect::<anyhow::Result<_>>()?, inputs))
}

/// Combines texts, given as `(tokens, text)`, into embeddings requests of `inputs` texts each.
pub(crate) fn in_requests(texts: Vec<(u32, String)>, inputs: u32) -> Vec<WorkItem> {
    let requests = texts.chunks(inputs as usize).map(|texts| WorkItem {
        text_tokens: texts.iter().map(|(tokens, _)| tokens).sum(),
        prompt: Prompt::Inputs(texts.iter().map(|(_, text)| text.clone()).collect()),
        output_tokens: 0,
        arrival: None,
    });
    requests.collect()
}

/// Creates requests in groups that share a prefix, in random order.
///
/// # Errors
/// If a text cannot be encoded.
pub(crate) fn shared_prefix(
    args: &GspArgs,
    seed: u64,
    words: &Words<'_>,
    as_ids: bool,
) -> anyhow::Result<Vec<WorkItem>> {
    let in_group = u64::from(args.gsp_prompts_per_group);
    let mut order: Vec<u64> = (0..u64::from(args.gsp_num_groups) * in_group).collect();
    order.shuffle(&mut generator(seed, Purpose::Order, 0));
    let work = order.into_par_iter().map(|index| {
        let mut drawn = Drawn::new();
        let mut prefix = generator(seed, Purpose::Shared, index / in_group);
        words.draw(&mut prefix, args.gsp_system_prompt_len, &mut drawn);
        let mut question = generator(seed, Purpose::Words, index);
        words.draw(&mut question, args.gsp_question_len, &mut drawn);
        let text = words.text(&drawn)?;
        Ok(WorkItem {
            text_tokens: text.tokens(),
            prompt: text.prompt(as_ids),
            output_tokens: args.gsp_output_len,
            arrival: None,
        })
    });
    work.collect()
}
