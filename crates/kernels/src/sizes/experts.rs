//! The sizes of experts, and the rule by which they are chosen.

use crate::packing::{Unfit, unfit};

/// The sizes of a decoder's experts, and the rule by which they are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertSizes {
    /// The number of experts per layer.
    pub count: usize,
    /// The number of experts per token.
    pub per_token: usize,
    /// Elements of the inner state of an expert.
    pub intermediate: usize,
    /// Elements of the inner state of the shared expert, which all tokens use; 0 if there is none.
    pub shared: usize,
    /// Elements of the latent states that experts read and write, between two projections that all
    /// tokens share (Nemotron 3, 2025). 0 if experts read and write states of the hidden size.
    pub latent: usize,
    /// True if scores are the sigmoids of logits (DeepSeek-V3, 2024); false if they are the softmax
    /// over all experts (Shazeer et al. 2017).
    pub sigmoid: bool,
    /// True if a bias is added to scores for the choice of experts.
    pub corrected: bool,
    /// True if routers compute in 32 bits regardless of the model's type.
    pub in_float32: bool,
    /// True if the shared expert's output is multiplied by a gate.
    pub shared_gate: bool,
    /// True if the router and the experts' projections have biases.
    pub biases: bool,
    /// The number of groups of experts with consecutive ids; 1 if experts are not grouped.
    pub groups: usize,
    /// The number of best groups from which experts are chosen.
    pub kept_groups: usize,
    /// The score of a group is the sum of this many of its best scores.
    pub best_of_group: usize,
    /// True if the weights of a token's experts are divided by their sum.
    pub normalise: bool,
    /// The factor of the weights, applied last.
    pub scaling: f32,
    /// True if a weight multiplies the expert's inputs instead of its outputs (Llama 4, 2025).
    pub weighs_inputs: bool,
    /// True if the shared expert is a dense network with its own norms beside the other experts
    /// ([`crate::BesideWeights`]).
    pub beside: bool,
}

impl ExpertSizes {
    pub(crate) fn check(&self) -> Result<(), Unfit> {
        let &Self { count, per_token, intermediate, shared, latent, groups, .. } = self;
        let numbers = [count, per_token, intermediate, groups, self.kept_groups];
        let small = numbers.iter().all(|number| (1..=i32::MAX as usize).contains(number))
            && [shared, latent, self.best_of_group].iter().all(|&it| it <= i32::MAX as usize);
        let odd = [intermediate, shared, latent].iter().any(|size| size % 2 > 0);
        let gate_alone = (self.shared_gate || self.beside) && shared == 0;
        let latent_beside = self.beside && latent > 0;
        if !small || odd || gate_alone || latent_beside || !self.has_choice() {
            return unfit(format!("no kernel computes experts of {self:?}"));
        }
        Ok(())
    }

    /// Elements of the states that experts read and write, for a model with this hidden size.
    pub(crate) fn states(&self, hidden: usize) -> usize {
        if self.latent > 0 { self.latent } else { hidden }
    }

    /// True if enough experts can be chosen for each token.
    fn has_choice(&self) -> bool {
        let &Self { count, per_token, groups, kept_groups, best_of_group, .. } = self;
        count.is_multiple_of(groups)
            && kept_groups <= groups
            && (1..=count / groups).contains(&best_of_group)
            && per_token <= kept_groups * (count / groups)
    }
}
