//! Constraints that move to another engine while a mask job may still own them.

use crossbeam_channel::Receiver;

use crate::constraint::{Allowed, Constraint, ConstraintError};

/// A constraint that a job of another engine may still own, and the tokens generated since the
/// request moved.
#[derive(Debug)]
struct DeferredConstraint {
    constraint: Option<Box<dyn Constraint>>,
    from: Receiver<Box<dyn Constraint>>,
    said: Vec<i32>,
}

/// Creates a constraint that receives the actual constraint from `from`, and then feeds it the
/// tokens `said`. The first mask has to wait for that constraint, so a mask thread computes it.
pub(crate) fn deferred(from: Receiver<Box<dyn Constraint>>, said: Vec<i32>) -> Box<dyn Constraint> {
    Box::new(DeferredConstraint { constraint: None, from, said })
}

impl Constraint for DeferredConstraint {
    fn accept(&mut self, token: i32) -> Result<(), ConstraintError> {
        match &mut self.constraint {
            Some(constraint) => constraint.accept(token),
            None => {
                self.said.push(token);
                Ok(())
            }
        }
    }

    fn walk(
        &mut self,
        drafts: &[i32],
        masks: &mut [&mut [u32]],
    ) -> Result<Vec<Allowed>, ConstraintError> {
        let constraint = match &mut self.constraint {
            Some(constraint) => constraint,
            None => {
                // The sender is dropped only if the other engine ends.
                let lost = |_| {
                    ConstraintError("the request's grammar was lost when its engine ended".into())
                };
                let mut constraint = self.from.recv().map_err(lost)?;
                self.said.drain(..).try_for_each(|token| constraint.accept(token))?;
                self.constraint.insert(constraint)
            }
        };
        constraint.walk(drafts, masks)
    }

    fn restrict(&mut self, most: usize, drafts: &mut Vec<i32>) -> Result<usize, ConstraintError> {
        match &mut self.constraint {
            Some(constraint) => constraint.restrict(most, drafts),
            None => {
                drafts.clear();
                Ok(0)
            }
        }
    }
}
