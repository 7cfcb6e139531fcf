//! A decoder of either type.

use crate::adapters::Groups;
use crate::dispatch::{Level, Number};
use crate::element::Bf16;
use crate::model::{Model, ModelSpec, StepError, StepSpec};
use crate::team::Team;

/// A decoder of either type, which computes with the instructions of the current level.
pub struct AnyModel(Typed);

enum Typed {
    Float32(Model<f32>),
    Bfloat16(Model<Bf16>),
}

impl AnyModel {
    /// # Safety
    /// See [`Model::new`].
    pub(crate) unsafe fn new(spec: &ModelSpec, team: Team) -> Self {
        // SAFETY: the contract.
        Self(unsafe {
            match spec.dtype {
                0 => Typed::Float32(Model::new(spec, team)),
                _ => Typed::Bfloat16(Model::new(spec, team)),
            }
        })
    }

    /// Computes a step.
    ///
    /// # Safety
    /// As of [`Model::step`].
    pub(crate) unsafe fn step(
        &mut self,
        step: &StepSpec,
        groups: Option<&Groups<'_>>,
    ) -> Result<(), StepError> {
        // SAFETY: the contract.
        unsafe {
            match &mut self.0 {
                Typed::Float32(model) => compute(model, step, groups),
                Typed::Bfloat16(model) => compute(model, step, groups),
            }
        }
    }

    /// Computes logits `[count, vocabulary]` of as many states.
    ///
    /// # Safety
    /// As of [`Model::head`], for any count.
    pub(crate) unsafe fn head(&mut self, states: (*const f32, usize), logits: *mut f32) {
        if states.1 == 0 {
            return;
        }
        // SAFETY: the contract.
        unsafe {
            match &mut self.0 {
                Typed::Float32(model) => head(model, states, logits),
                Typed::Bfloat16(model) => head(model, states, logits),
            }
        }
    }
}

unsafe fn compute<E: Number>(
    model: &mut Model<E>,
    step: &StepSpec,
    groups: Option<&Groups<'_>>,
) -> Result<(), StepError> {
    let level = Level::current();
    // SAFETY: the caller's description; once a member, and the level is there.
    unsafe {
        model.step(step, groups, |team, view| {
            team.run(|member| E::compute(level, (view, &member)));
        })
    }
}

unsafe fn head<E: Number>(model: &mut Model<E>, states: (*const f32, usize), logits: *mut f32) {
    let level = Level::current();
    // SAFETY: the caller's description; once a member, and the level is there.
    unsafe {
        model.head(states, logits, |team, view| {
            team.run(|member| E::compute(level, (view, &member)));
        });
    }
}
