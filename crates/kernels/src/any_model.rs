//! A decoder of either type.

use std::sync::Arc;

use crate::adapters::Groups;
use crate::dispatch::Number;
use crate::element::Bf16;
use crate::memory::Room;
use crate::model::{Model, StepError};
use crate::packing::Dtype;
use crate::pool::Threads;
use crate::processor::Level;
use crate::rows::{Rows, Wanted};
use crate::sizes::Sizes;
use crate::weights::Weights;

/// A decoder of either type, which computes with the instructions of the current level.
pub(crate) enum AnyModel {
    Float32(Model<f32>),
    Bfloat16(Model<Bf16>),
}

impl AnyModel {
    /// See [`Model::new`].
    pub(crate) fn new(
        sizes: &Sizes,
        weights: Arc<Weights>,
        pages: Vec<[Room; 2]>,
        states: Vec<[Room; 2]>,
        threads: Arc<Threads>,
    ) -> Self {
        match sizes.dtype {
            Dtype::Float32 => Self::Float32(Model::new(sizes, weights, pages, states, threads)),
            Dtype::Bfloat16 => Self::Bfloat16(Model::new(sizes, weights, pages, states, threads)),
        }
    }

    /// The states' tables of each layer.
    pub(crate) fn states(&mut self) -> &mut [[Room; 2]] {
        match self {
            Self::Float32(model) => model.states(),
            Self::Bfloat16(model) => model.states(),
        }
    }

    /// Computes a step.
    ///
    /// # Safety
    /// As of [`Model::step`].
    pub(crate) unsafe fn step(
        &mut self,
        rows: &Rows<'_>,
        wanted: Wanted<'_>,
        groups: Option<&Groups<'_>>,
    ) -> Result<(), StepError> {
        // SAFETY: the contract.
        unsafe {
            match self {
                Self::Float32(model) => compute(model, rows, wanted, groups),
                Self::Bfloat16(model) => compute(model, rows, wanted, groups),
            }
        }
    }

    /// Computes logits `[count, vocabulary]` of the same number of states.
    ///
    /// # Safety
    /// As of [`Model::head`], for any count.
    pub(crate) unsafe fn head(&mut self, states: (*const f32, usize), logits: *mut f32) {
        if states.1 == 0 {
            return;
        }
        // SAFETY: the contract.
        unsafe {
            match self {
                Self::Float32(model) => head(model, states, logits),
                Self::Bfloat16(model) => head(model, states, logits),
            }
        }
    }
}

unsafe fn compute<E: Number>(
    model: &mut Model<E>,
    rows: &Rows<'_>,
    wanted: Wanted<'_>,
    groups: Option<&Groups<'_>>,
) -> Result<(), StepError> {
    let level = Level::current();
    // SAFETY: the contract; once a member, and the level is there.
    unsafe {
        model.step(rows, wanted, groups, |threads, view| {
            threads.compute(|member| E::compute(level, (view, &member)));
        })
    }
}

unsafe fn head<E: Number>(model: &mut Model<E>, states: (*const f32, usize), logits: *mut f32) {
    let level = Level::current();
    // SAFETY: the contract; once a member, and the level is there.
    unsafe {
        model.head(states, logits, |threads, view| {
            threads.compute(|member| E::compute(level, (view, &member)));
        });
    }
}
