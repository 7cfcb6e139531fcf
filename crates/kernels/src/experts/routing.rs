//! The experts that a token goes to, and their weights.
//!
//! Softmax over all experts: Shazeer et al. 2017, as in Qwen3-MoE; limited to the best groups:
//! DeepSeek-V2 (2024); sigmoids whose choice a bias corrects: DeepSeek-V3 (2024), which GLM-4
//! shares.

/// A term that keeps a sum of sigmoids, which may all be 0, from being a divisor of 0.
const EPSILON: f32 = 1e-20;

/// The experts of a model, as the caller describes them; a `count` of 0: it has none.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct RoutingSpec {
    pub(crate) count: u32,
    /// Experts of a token.
    pub(crate) per_token: u32,
    /// Elements between the two products of an expert.
    pub(crate) intermediate: u32,
    /// The inner size of the shared expert, which all tokens have; 0: there is none.
    pub(crate) shared: u32,
    /// 0: softmax over all experts, 1: the sigmoid of each.
    pub(crate) scores: u32,
    /// 1: routers are float32; otherwise they are of the model's type.
    pub(crate) in_float32: u32,
    /// Groups of experts of neighbouring ids; 1: there are none.
    pub(crate) groups: u32,
    /// The number of best groups. Experts of other groups are not chosen.
    pub(crate) kept_groups: u32,
    /// The number of best scores whose sum is a group's score.
    pub(crate) best_of_group: u32,
    /// 1: a token's weights are divided by their sum.
    pub(crate) normalise: u32,
    /// The factor of the weights, applied last.
    pub(crate) scaling: f32,
}

impl RoutingSpec {
    /// True if as many experts can be chosen as a token has.
    pub(crate) fn is_possible(&self) -> bool {
        let &Self { count, per_token, groups, kept_groups, best_of_group, .. } = self;
        if count == 0 {
            return true;
        }
        let groups_fit = groups > 0 && count.is_multiple_of(groups) && kept_groups <= groups;
        per_token > 0
            && groups_fit
            && (1..=count / groups).contains(&best_of_group)
            && per_token as u64 <= u64::from(kept_groups) * u64::from(count / groups)
    }
}

/// Room for the choice of one token, kept from token to token.
#[derive(Default)]
pub(crate) struct Chooser {
    scores: Vec<f32>,
    wanted: Vec<f32>,
    group_scores: Vec<f32>,
    best: Vec<f32>,
    kept: Vec<u32>,
}

impl Chooser {
    /// Chooses the experts of a token by its logits: ids ascending, and their weights. Of equal
    /// scores those of lower ids win, so that nothing but a token's own logits decides.
    ///
    /// `correction` is added to the scores for the choice, and only for it; empty for none.
    #[inline(always)]
    pub(crate) fn choose(
        &mut self,
        routing: &RoutingSpec,
        (logits, correction): (&[f32], &[f32]),
        (ids, weights): (&mut [u32], &mut [f32]),
    ) {
        let scores = &mut self.scores;
        scores.clear();
        if routing.scores == 0 {
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
        if routing.normalise != 0 {
            let sum = weights.iter().sum::<f32>() + EPSILON;
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        weights.iter_mut().for_each(|weight| *weight *= routing.scaling);
    }

    /// Sets the scores of all groups except the best ones to minus infinity.
    fn leave_best_groups(&mut self, routing: &RoutingSpec) {
        let size = self.wanted.len() / routing.groups as usize;
        self.group_scores.clear();
        for group in self.wanted.chunks_exact(size) {
            self.best.clear();
            self.best.extend_from_slice(group);
            self.best.sort_unstable_by(|a, b| b.total_cmp(a));
            self.group_scores.push(self.best.iter().take(routing.best_of_group as usize).sum());
        }
        self.kept.clear();
        self.kept.resize(routing.kept_groups as usize, 0);
        take_best(&mut self.group_scores, &mut self.kept);
        for (group, wanted) in (0..).zip(self.wanted.chunks_exact_mut(size)) {
            if !self.kept.contains(&group) {
                wanted.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Finds the places of the largest scores, the first of equals first, as many as `ids` has room
/// for. Each of them is taken away. A score that is no number is never larger, so all ids differ.
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
