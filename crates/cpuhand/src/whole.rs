//! A decoder with bidirectional attention that executes plans (ADR 102). Every row is a whole
//! prompt, and only the slots' tokens are kept between steps.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_kernels::{Decoder, Room, Shared, Sizes, Threads, Wanted};
use forebay_protocol::{HandConfig, ROW_NOT_FINITE, ROW_OK, Ready, StepPlan, StepResult};
use forebay_weights::{Checkpoint, ModelError, Shape, VectorLayer};
use serde_json::Value;

use crate::columns::Columns;
use crate::copier::check_no_copies;
use crate::host::{PoolSize, host_counts};
use crate::kept::files;
use crate::load::{LayerBehind, Plan, Source, assemble, load};
use crate::parts::DecoderParts;
use crate::pooled::kind;
use crate::runner::{
    Executes, HandError, Loaded, Report, format_of, formats, numbers, sizes_of_parts, timed,
};
use crate::step::MaskSource;
use crate::tables::{PlanError, Tables, wrong};

/// The number of positions per page. The kernels store a step's keys and values of one layer at a
/// time in the pages.
const PAGE_SIZE: usize = 16;

/// A decoder with bidirectional attention, with its weights and the tokens of slots.
pub(crate) struct WholeRunner {
    decoder: Decoder,
    tables: Tables,
    arena: Shared,
    facts: Ready,
    ended: Instant,
    page_count: usize,
    /// True if a prompt's vector is its first state; false if it is the mean of its states.
    first: bool,
    layers: Vec<LayerBehind>,
}

impl WholeRunner {
    /// Loads a model and computes a first prompt.
    pub(crate) fn load(
        config: &HandConfig,
        shape: &Shape,
        arena: Shared,
        threads: &Arc<Threads>,
        report: Report<'_>,
    ) -> Result<Loaded, HandError> {
        // No page is kept from step to step.
        let none = PoolSize { count: 0, bytes: 0 };
        host_counts(config, none, none, None)?;
        let parts = DecoderParts::new(shape)?;
        let (number, dtype, told) = numbers(&config.dtype)?;
        let (files, layers) = layers_behind(config)?;
        let mut plan = Plan::new(&parts, number, formats(config, &parts, None, &mut None)?)?;
        plan.layers_behind(shape, &layers);
        let weights = if config.load_format == "dummy" {
            load(&plan, Source::Random(config.seed), threads, report)?
        } else {
            let mut checkpoint = Checkpoint::open(format_of(config), &files, shape)?;
            checkpoint.add_layers(&layers)?;
            plan.check(&checkpoint)?;
            load(&plan, Source::Checkpoint(&checkpoint), threads, report)?
        };
        let slots = config.slots as usize;
        // A step has at most this many tokens, and each prompt may leave a page partly empty.
        let page_count = (config.chunked_prefill_size as usize).div_ceil(PAGE_SIZE) + slots;
        let sizes =
            Sizes { page_size: PAGE_SIZE, page_count, ..sizes_of_parts(config, &parts, dtype) };
        let pool = |(layer, &kind): (usize, &usize)| match parts.keeps_pages(layer) {
            true => sizes.pool_bytes(kind),
            false => [0; 2],
        };
        let pools = parts.kind_of.iter().enumerate().flat_map(pool);
        let mut rooms = Room::parts(pools)?.into_iter();
        let mut pages = Vec::new();
        while let (Some(keys), Some(values)) = (rooms.next(), rooms.next()) {
            pages.push([keys, values]);
        }
        let assembled = assemble(&plan, &parts, &weights, sizes.positions)?;
        let layers = layers.iter().map(|layer| plan.layer_behind(shape, layer, &weights));
        let layers = layers.collect::<Result<Vec<_>, ModelError>>()?;
        let facts = Ready {
            page_count: 0,
            vocab_size: sizes.vocabulary as u32,
            hidden_size: sizes.hidden as u32,
            dtype: told,
            weight_bytes: plan.bytes(),
            device: "cpu".into(),
            tokens_a_row: 1,
            ..Ready::default()
        };
        let context = config.context_length as usize;
        let tables = Tables::new(slots, context, PAGE_SIZE, sizes.vocabulary);
        let decoder = Decoder::new(sizes, assembled, pages, 0, threads)
            .map_err(|error| ModelError::Broken(error.to_string()))?;
        let (ended, first) = (Instant::now(), kind(config) == Some("cls"));
        let mut runner = Self { decoder, tables, arena, facts, ended, page_count, first, layers };
        let length = i64::from(config.context_length).min(2);
        let vectors = runner.encode(&Columns::one(0, length, false))?;
        if !vectors.iter().flatten().all(|number| number.is_finite()) {
            let what = "the weights give results that are not finite";
            return Err(HandError::NotFinite(what.into()));
        }
        runner.ended = Instant::now();
        Ok(Loaded { runner: Box::new(runner), keep: Box::new(|| {}) })
    }

    /// Computes the vectors of rows that are whole prompts, and applies the layers after pooling.
    fn encode(&mut self, columns: &Columns) -> Result<Vec<Vec<f32>>, HandError> {
        self.lay_out(columns)?;
        let hidden = self.facts.hidden_size as usize;
        let tokens: Vec<i64> = match self.first {
            true => {
                columns.last.iter().zip(&columns.length).map(|(last, it)| last + 1 - it).collect()
            }
            false => (0..columns.last.last().map_or(0, |last| last + 1)).collect(),
        };
        let mut states = vec![0.0; tokens.len() * hidden];
        let rows = columns.rows(&self.tables, &[], &tokens);
        self.decoder.step(&rows, Wanted::Vectors(&mut states))?;
        let mut states = states.chunks_exact(hidden);
        let mut vectors = Vec::with_capacity(columns.slot.len());
        for &length in &columns.length {
            let count = if self.first { 1 } else { length as usize };
            let mut sums = vec![0.0_f64; hidden];
            for state in states.by_ref().take(count) {
                sums.iter_mut().zip(state).for_each(|(sum, &it)| *sum += f64::from(it));
            }
            let vector = sums.iter().map(|sum| (sum / count as f64) as f32).collect();
            vectors
                .push(self.layers.iter().fold(vector, |vector: Vec<f32>, layer| layer.of(&vector)));
        }
        Ok(vectors)
    }

    /// Assigns pages to the prompts of a step.
    fn lay_out(&mut self, columns: &Columns) -> Result<(), PlanError> {
        let mut seen = HashSet::new();
        let whole = columns.start.iter().all(|&start| start == 0)
            && columns.sampling.len() == columns.slot.len()
            && columns.slot.iter().all(|slot| seen.insert(slot));
        if !whole {
            return wrong("a part of a prompt, of a model with bidirectional attention");
        }
        let mut pages = 0..self.page_count as i32;
        for (&slot, &length) in columns.slot.iter().zip(&columns.length) {
            let of_slot = &mut self.tables.pages[slot as usize * self.tables.page_stride..];
            for to in &mut of_slot[..(length as usize).div_ceil(PAGE_SIZE)] {
                let Some(page) = pages.next() else {
                    return wrong("more tokens than a step of this model has");
                };
                *to = page;
            }
        }
        Ok(())
    }

    fn rows(&mut self, plan: &StepPlan, result: &mut StepResult) -> Result<(), HandError> {
        self.tables.write(plan, &self.arena)?;
        check_no_copies(plan)?;
        if plan.rows().len() == 0 {
            return Ok(());
        }
        if plan.prompt_logprobs().next().is_some() {
            return Err(PlanError("log-probabilities of a prompt that is pooled".into()).into());
        }
        let columns = Columns::of(plan, &self.tables, true)?;
        for vector in self.encode(&columns)? {
            let broken = !vector.iter().all(|number| number.is_finite());
            result.row_errors.push(if broken { ROW_NOT_FINITE } else { ROW_OK });
            result.pooled.extend(vector);
        }
        Ok(())
    }
}

impl Executes for WholeRunner {
    fn facts(&self) -> &Ready {
        &self.facts
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        _masks: &mut MaskSource<'_>,
    ) -> Result<Option<StepResult>, HandError> {
        let begun = Instant::now();
        if plan.has_images() {
            return Err(PlanError("images in a plan for a model of text".into()).into());
        }
        let mut result = StepResult { step: plan.step(), ..StepResult::default() };
        self.rows(plan, &mut result)?;
        timed(&mut result, begun, &mut self.ended, Duration::ZERO);
        Ok(Some(result))
    }
}

/// Returns the model's own files, and the layers after its pooling. In the configuration, the files
/// of these layers come after the model's own files.
fn layers_behind(
    config: &HandConfig,
) -> Result<(Vec<std::path::PathBuf>, Vec<VectorLayer>), HandError> {
    let layers = config.model.pointer("/pooling/layers").cloned().unwrap_or(Value::Null);
    let mut layers: Vec<VectorLayer> = match layers {
        Value::Null => Vec::new(),
        layers => serde_json::from_value(layers)
            .map_err(|error| HandError::Config(format!("the layers behind pooling: {error}")))?,
    };
    let mut own = files(&config.model);
    let count = layers.iter().filter(|layer| layer.file.is_some()).count();
    let theirs = own.split_off(own.len().saturating_sub(count));
    let places = layers.iter_mut().filter_map(|layer| layer.file.as_mut());
    places.zip(theirs).for_each(|(place, file)| *place = file);
    Ok((own, layers))
}
