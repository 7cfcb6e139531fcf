//! A decoder of either element type.

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

/// A decoder with float32 or bfloat16 elements. It computes with the kernels of the current
/// instruction level.
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

    /// The state tables of each layer.
    pub(crate) fn states(&mut self) -> &mut [[Room; 2]] {
        match self {
            Self::Float32(model) => model.states(),
            Self::Bfloat16(model) => model.states(),
        }
    }

    /// Computes a step.
    ///
    /// # Safety
    /// The conditions of [`Model::step`] must hold.
    pub(crate) unsafe fn step(
        &mut self,
        rows: &Rows<'_>,
        wanted: Wanted<'_>,
        groups: Option<&Groups<'_>>,
    ) -> Result<(), StepError> {
        // SAFETY: the caller upholds the contract.
        unsafe {
            match self {
                Self::Float32(model) => compute(model, rows, wanted, groups),
                Self::Bfloat16(model) => compute(model, rows, wanted, groups),
            }
        }
    }

    /// Computes logits `[count, vocabulary]` of `count` states. `states` is their address and
    /// count.
    ///
    /// # Safety
    /// The conditions of [`Model::head`] must hold, except that the count may be 0.
    pub(crate) unsafe fn head(&mut self, states: (*const f32, usize), logits: *mut f32) {
        if states.1 == 0 {
            return;
        }
        // SAFETY: the caller upholds the contract.
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
    // SAFETY: the caller upholds the contract, each thread calls `E::compute` once, and the
    // processor supports the instruction level.
    unsafe {
        model.step(rows, wanted, groups, |threads, view| {
            threads.compute(|member| E::compute(level, (view, &member)));
        })
    }
}

unsafe fn head<E: Number>(model: &mut Model<E>, states: (*const f32, usize), logits: *mut f32) {
    let level = Level::current();
    // SAFETY: the caller upholds the contract, each thread calls `E::compute` once, and the
    // processor supports the instruction level.
    unsafe {
        model.head(states, logits, |threads, view| {
            threads.compute(|member| E::compute(level, (view, &member)));
        });
    }
}
