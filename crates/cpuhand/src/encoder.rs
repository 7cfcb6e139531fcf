//! An encoder that executes plans. Every row is a whole prompt, and only the slots' tokens are kept
//! between steps.

use std::sync::Arc;
use std::time::Instant;

use forebay_kernels::{Bert, BertActivation, BertSizes, Shared, Texts, Threads};
use forebay_protocol::{HandConfig, ROW_NOT_FINITE, ROW_OK, Ready, StepPlan, StepResult};
use forebay_weights::{BertShape, Checkpoint, ModelError};
use serde_json::Value;

use crate::columns::Columns;
use crate::copier::check_no_copies;
use crate::host::{PoolSize, host_counts};
use crate::kept::files;
use crate::load::{Formats, Plan, Source, load};
use crate::pooled::kind;
use crate::runner::{Executes, HandError, Loaded, Report, numbers, timed};
use crate::step::MaskSource;
use crate::tables::{PlanError, Tables};

/// An encoder with its weights and the tokens of slots.
pub(crate) struct EncoderRunner {
    bert: Bert,
    tables: Tables,
    arena: Shared,
    facts: Ready,
    ended: Instant,
}

/// True if an encoder supports this kind of pooling.
pub(crate) fn knows(kind: &str) -> bool {
    matches!(kind, "mean" | "cls")
}

/// The number of scores to compute from each vector; 0 if the vector is the output.
fn scores(config: &HandConfig) -> usize {
    let pooling = config.model.get("pooling");
    let task = pooling.and_then(|it| it.get("task")).and_then(Value::as_str);
    let scoring = matches!(task, Some("score" | "classify"));
    let size = pooling.and_then(|it| it.get("size")).and_then(Value::as_u64);
    if scoring { size.map_or(0, |size| usize::try_from(size).unwrap_or(0)) } else { 0 }
}

impl EncoderRunner {
    /// Loads an encoder and computes a first prompt.
    pub(crate) fn load(
        config: &HandConfig,
        shape: &BertShape,
        arena: Shared,
        threads: &Arc<Threads>,
        report: Report<'_>,
    ) -> Result<Loaded, HandError> {
        // An encoder has no pages.
        let none = PoolSize { count: 0, bytes: 0 };
        host_counts(config, none, none, None)?;
        let (number, dtype, told) = numbers(&config.dtype)?;
        let int8 = config.quantization.as_deref() == Some("w8a8_int8");
        let formats = Formats { int8, ..Formats::default() };
        let scores = scores(config);
        let plan = Plan::of_bert(shape, scores, number, formats)?;
        let weights = if config.load_format == "dummy" {
            load(&plan, Source::Random(config.seed), threads, report)?
        } else {
            let checkpoint = Checkpoint::of_bert(&files(&config.model), shape, scores > 0)?;
            plan.check(&checkpoint)?;
            load(&plan, Source::Checkpoint(&checkpoint), threads, report)?
        };
        let sizes = BertSizes {
            dtype,
            hidden: shape.hidden_size,
            heads: shape.heads,
            intermediate: shape.intermediate_size,
            vocabulary: shape.vocab_size,
            positions: shape.max_positions,
            kinds: shape.kinds,
            activation: match shape.activation.as_str() {
                "gelu" => BertActivation::Gelu,
                "relu" => BertActivation::Relu,
                _ => BertActivation::GeluTanh,
            },
            first: kind(config) == Some("cls"),
            scores,
            eps: shape.layer_norm_eps as f32,
        };
        let bert = Bert::new(sizes, plan.assemble_bert(scores, &weights)?, threads)
            .map_err(|error| ModelError::Broken(error.to_string()))?;
        let facts = Ready {
            page_count: 0,
            vocab_size: shape.vocab_size as u32,
            hidden_size: shape.hidden_size as u32,
            dtype: told,
            weight_bytes: plan.bytes(),
            device: "cpu".into(),
            tokens_a_row: 1,
            ..Ready::default()
        };
        let tables = Tables::new(
            config.slots as usize,
            config.context_length as usize,
            config.page_size as usize,
            shape.vocab_size,
        );
        let mut runner = Self { bert, tables, arena, facts, ended: Instant::now() };
        let length = i64::from(config.context_length).min(2);
        let first = runner.encode(&Columns::one(0, length, false))?;
        if !first.iter().all(|number| number.is_finite()) {
            let what = "the weights give results that are not finite";
            return Err(HandError::NotFinite(what.into()));
        }
        runner.ended = Instant::now();
        Ok(Loaded { runner: Box::new(runner), keep: Box::new(|| {}) })
    }

    /// Computes the vectors, or scores, of rows that are whole prompts.
    fn encode(&mut self, columns: &Columns) -> Result<Vec<f32>, HandError> {
        if columns.start.iter().any(|&start| start > 0)
            || columns.sampling.len() != columns.slot.len()
        {
            return Err(PlanError("an encoder was given a part of a prompt".into()).into());
        }
        let pooling = |&slot: &i64| self.tables.slots[slot as usize].spec.pooling;
        let segment = columns.slot.iter().map(pooling);
        let segment: Vec<i64> =
            segment.map(|pooling| pooling.map_or(0, |pair| pair.segment.into())).collect();
        let texts = Texts {
            slot: &columns.slot,
            length: &columns.length,
            segment: &segment,
            tokens: &self.tables.tokens,
            token_stride: self.tables.token_stride,
        };
        let mut vectors = vec![0.0; columns.slot.len() * self.bert.width()];
        self.bert.encode(&texts, &mut vectors)?;
        Ok(vectors)
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
        result.pooled = self.encode(&columns)?;
        let broken = |vector: &[f32]| !vector.iter().all(|number| number.is_finite());
        let vectors = result.pooled.chunks_exact(self.bert.width());
        result.row_errors =
            vectors.map(|vector| if broken(vector) { ROW_NOT_FINITE } else { ROW_OK }).collect();
        Ok(())
    }
}

impl Executes for EncoderRunner {
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
        timed(&mut result, begun, &mut self.ended, std::time::Duration::ZERO);
        Ok(Some(result))
    }
}
