//! Pools the states of a step's positions into vectors.

use forebay_kernels::Wanted;
use forebay_protocol::{HandConfig, ROW_NOT_FINITE, ROW_OK, StepPlan, StepResult};
use serde_json::Value;

use crate::columns::Columns;
use crate::runner::{HandError, Runner};
use crate::states::StateSteps;
use crate::tables::{PlanError, wrong};

/// The method by which a prompt's states become a vector.
pub(crate) enum Pooler {
    /// The state of the last position, which attends to all others.
    Last,
    /// The mean of all states, which may be computed in several steps.
    Mean(Sums),
}

/// The sum of the states of each slot so far, in float64. States are added one by one in their
/// order, so the division of a prompt into chunks changes no bit of the result.
pub(crate) struct Sums {
    /// `[slots, hidden]`
    sums: Vec<f64>,
    /// The number of positions of each slot that were added up.
    until: Vec<i64>,
    hidden: usize,
}

/// The kind of pooling in the configuration; `None` if the model generates tokens.
pub(crate) fn kind(config: &HandConfig) -> Option<&str> {
    let pooling = config.model.get("pooling").filter(|pooling| !pooling.is_null())?;
    Some(pooling.get("kind").and_then(Value::as_str).unwrap_or("of no kind"))
}

impl Pooler {
    /// Creates the pooler of this kind; `None` if this module does not support the kind.
    pub(crate) fn of(kind: &str, slots: usize, hidden: usize) -> Option<Self> {
        match kind {
            "last" => Some(Self::Last),
            "causal_mean" => Some(Self::Mean(Sums {
                sums: vec![0.0; slots * hidden],
                until: vec![0; slots],
                hidden,
            })),
            _ => None,
        }
    }

    /// True if this module supports the kind.
    pub(crate) fn knows(kind: &str) -> bool {
        Self::of(kind, 0, 0).is_some()
    }

    /// The indices of the tokens whose states this pooling needs, in ascending order.
    fn wants(&self, columns: &Columns) -> Vec<i64> {
        match self {
            Self::Last => columns.last_tokens(),
            Self::Mean(_) => (0..columns.last.last().map_or(0, |last| last + 1)).collect(),
        }
    }

    /// Computes the vectors `[s, hidden]` from the states of the tokens that [`Self::wants`]
    /// returned.
    fn make(&mut self, columns: &Columns, states: Vec<f32>) -> Result<Vec<f32>, PlanError> {
        match self {
            Self::Last => Ok(states),
            Self::Mean(sums) => sums.make(columns, &states),
        }
    }
}

impl Sums {
    fn make(&mut self, columns: &Columns, states: &[f32]) -> Result<Vec<f32>, PlanError> {
        let hidden = self.hidden;
        let mut rows = states.chunks_exact(hidden);
        for (row, &slot) in columns.slot.iter().enumerate() {
            let (slot, start, length) = (slot as usize, columns.start[row], columns.length[row]);
            if start > 0 && start != self.until[slot] {
                return wrong(format!("a mean of states that were not computed: slot {slot}"));
            }
            self.until[slot] = start + length;
            let sum = &mut self.sums[slot * hidden..][..hidden];
            if start == 0 {
                sum.fill(0.0);
            }
            for state in rows.by_ref().take(length as usize) {
                for (sum, &state) in sum.iter_mut().zip(state) {
                    *sum += f64::from(state);
                }
            }
        }
        let of_row = |&row: &usize| {
            let slot = columns.slot[row] as usize;
            let count = self.until[slot] as f64;
            self.sums[slot * hidden..][..hidden].iter().map(move |sum| (sum / count) as f32)
        };
        Ok(columns.sampling.iter().flat_map(of_row).collect())
    }
}

impl Runner {
    /// Computes rows, and pools prompts that are complete. Returns false if the model generates
    /// tokens.
    pub(crate) fn pool(
        &mut self,
        plan: &StepPlan,
        states: &StateSteps,
        result: &mut StepResult,
    ) -> Result<bool, HandError> {
        let Some(pooler) = &self.pooler else { return Ok(false) };
        if plan.prompt_logprobs().next().is_some() {
            return Err(PlanError("log-probabilities of a prompt that is pooled".into()).into());
        }
        let columns = Columns::of(plan, &self.tables, true)?;
        let columns = Columns { states: states.rows.clone(), ..columns };
        let (arena, width) = (self.arena.clone(), self.sizes.dtype.bytes());
        let given = columns.given(&self.tables, &arena, (self.sizes.hidden * width, width))?;
        let tokens = pooler.wants(&columns);
        let mut states = vec![0.0; tokens.len() * self.sizes.hidden];
        let rows = columns.rows(&self.tables, &given, &tokens);
        self.decoder.step(&rows, Wanted::Vectors(&mut states))?;
        let Some(pooler) = &mut self.pooler else { return Ok(false) };
        result.pooled = pooler.make(&columns, states)?;
        result.row_errors = vec![ROW_OK; columns.slot.len()];
        let vectors = result.pooled.chunks_exact(self.sizes.hidden);
        for (&row, vector) in columns.sampling.iter().zip(vectors) {
            if !vector.iter().all(|number| number.is_finite()) {
                result.row_errors[row] = ROW_NOT_FINITE;
            }
        }
        Ok(true)
    }
}
