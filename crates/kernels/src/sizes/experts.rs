//! The sizes of experts, and the rule that chooses them.

use crate::packing::{Unfit, unfit};

/// The sizes of a decoder's experts, and the rule that chooses them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertSizes {
    /// The number of experts of a layer.
    pub count: usize,
    /// The number of experts of a token.
    pub per_token: usize,
    /// Elements between the two products of an expert.
    pub intermediate: usize,
    /// Elements between the two products of the shared expert, which all tokens use; 0: there is
    /// none.
    pub shared: usize,
    /// Elements of the states that experts read and write, between two products that all tokens
    /// share. 0: experts read and write the layer's states (Nemotron 3, 2025).
    pub latent: usize,
    /// True if scores are the sigmoids of logits (DeepSeek-V3, 2024). False for the softmax over
    /// all experts (Shazeer et al. 2017).
    pub sigmoid: bool,
    /// True if a bias is added to scores for the choice.
    pub corrected: bool,
    /// True if routers compute in 32 bits, whatever the model's type.
    pub in_float32: bool,
    /// True if the shared expert's output is multiplied by a gate.
    pub shared_gate: bool,
    /// True if the router and the products of experts have biases.
    pub biases: bool,
    /// The number of groups of experts with neighbouring ids; 1: experts are not grouped.
    pub groups: usize,
    /// The number of best groups. Experts of other groups are not chosen.
    pub kept_groups: usize,
    /// The number of best scores that are summed for a group's score.
    pub best_of_group: usize,
    /// True if a token's weights are divided by their sum.
    pub normalise: bool,
    /// The factor of the weights, applied last.
    pub scaling: f32,
    /// True if an expert's inputs are multiplied by its weight, and not its outputs (Llama 4,
    /// 2025).
    pub weighs_inputs: bool,
    /// True if the shared expert is a dense part with its own norms beside the other experts
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

    /// Elements of the states that experts read and write, if the model's own states have this
    /// many.
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
