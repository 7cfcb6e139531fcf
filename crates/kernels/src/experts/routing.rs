//! Chooses the experts of a token, and their weights.
//!
//! The variants and their sources: softmax over all experts is from Shazeer et al. 2017, as in
//! Qwen3-MoE. The limit to the best groups is from DeepSeek-V2 (2024). Sigmoids with a bias that
//! corrects the choice are from DeepSeek-V3 (2024), and are also used by GLM-4.

use crate::sizes::ExpertSizes;

/// Keeps the divisor above 0: all summed sigmoids may be 0.
const EPSILON: f32 = 1e-20;

/// Buffers for the choice of one token, reused from token to token.
#[derive(Default)]
pub(crate) struct Chooser {
    scores: Vec<f32>,
    wanted: Vec<f32>,
    group_scores: Vec<f32>,
    best: Vec<f32>,
    kept: Vec<u32>,
}

impl Chooser {
    /// Chooses the experts of a token by its logits. Writes their ids in ascending order, and their
    /// weights. Of equal scores the lower id wins, so that the choice depends on the token's own
    /// logits alone.
    ///
    /// `correction` is added to the scores for the choice, and only for it; empty for none.
    #[inline(always)]
    pub(crate) fn choose(
        &mut self,
        routing: &ExpertSizes,
        (logits, correction): (&[f32], &[f32]),
        (ids, weights): (&mut [u32], &mut [f32]),
    ) {
        let scores = &mut self.scores;
        scores.clear();
        if !routing.sigmoid {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.extend(logits.iter().map(|logit| (logit - largest).exp()));
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= sum);
        } else {
            scores.extend(logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())));
        }
        self.wanted.clone_from(&self.scores);
        for (wanted, correction) in self.wanted.iter_mut().zip(correction) {
            *wanted += correction;
        }
        if routing.groups > 1 {
            self.leave_best_groups(routing);
        }
        take_best(&mut self.wanted, ids);
        ids.sort_unstable();
        for (weight, &id) in weights.iter_mut().zip(&*ids) {
            *weight = self.scores[id as usize];
        }
        if routing.normalise {
            let sum = weights.iter().sum::<f32>() + EPSILON;
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        weights.iter_mut().for_each(|weight| *weight *= routing.scaling);
    }

    /// Sets the scores of all groups except the best ones to minus infinity.
    fn leave_best_groups(&mut self, routing: &ExpertSizes) {
        let size = self.wanted.len() / routing.groups;
        self.group_scores.clear();
        for group in self.wanted.chunks_exact(size) {
            self.best.clear();
            self.best.extend_from_slice(group);
            self.best.sort_unstable_by(|a, b| b.total_cmp(a));
            self.group_scores.push(self.best.iter().take(routing.best_of_group).sum());
        }
        self.kept.clear();
        self.kept.resize(routing.kept_groups, 0);
        take_best(&mut self.group_scores, &mut self.kept);
        for (group, wanted) in (0..).zip(self.wanted.chunks_exact_mut(size)) {
            if !self.kept.contains(&group) {
                wanted.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Finds the indices of the largest scores until `ids` is full; of equal scores, the lower index
/// comes first. Each score found is set to minus infinity. NaN is never the largest, so all ids
/// differ.
#[inline(always)]
fn take_best(scores: &mut [f32], ids: &mut [u32]) {
    for place in 0..ids.len() {
        let (mut best, mut most) = (u32::MAX, f32::NEG_INFINITY);
        for (id, &score) in (0..).zip(&*scores) {
            if score > most || (best == u32::MAX && !ids[..place].contains(&id)) {
                (best, most) = (id, if score > f32::NEG_INFINITY { score } else { most });
            }
        }
        ids[place] = best;
        scores[best as usize] = f32::NEG_INFINITY;
    }
}
