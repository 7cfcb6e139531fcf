//! Tests the choice of a token's experts, and the resulting order of rows.

use proptest::prelude::*;

use super::INNER;
use crate::experts::Sorted;
use crate::experts::routing::Chooser;
use crate::sizes::ExpertSizes;
use crate::tile::tests::numbers;

/// Softmax routing with three of twelve experts.
pub(super) const SOFTMAX: ExpertSizes = ExpertSizes {
    count: 12,
    per_token: 3,
    intermediate: INNER,
    shared: 0,
    latent: 0,
    sigmoid: false,
    corrected: false,
    in_float32: false,
    shared_gate: false,
    biases: false,
    groups: 1,
    kept_groups: 1,
    best_of_group: 1,
    normalise: true,
    scaling: 1.0,
    weighs_inputs: false,
    beside: false,
};
/// Routings of several models. DeepSeek-V3 adds a correction to sigmoids; ERNIE 4.5 adds one to the
/// softmax of a router in 32 bits without groups. A shared expert may have a gate (Qwen2-MoE).
pub(super) const ROUTINGS: [ExpertSizes; 5] = [
    SOFTMAX,
    ExpertSizes { normalise: false, scaling: 4.0, ..SOFTMAX },
    ExpertSizes {
        groups: 4,
        kept_groups: 2,
        in_float32: true,
        shared: 40,
        shared_gate: true,
        ..SOFTMAX
    },
    ExpertSizes { corrected: true, in_float32: true, shared: 24, ..SOFTMAX },
    ExpertSizes {
        sigmoid: true,
        corrected: true,
        in_float32: true,
        groups: 3,
        kept_groups: 2,
        best_of_group: 2,
        scaling: 2.5,
        shared: 16,
        ..SOFTMAX
    },
];

/// The reference choice, for tokens without ties: ids in ascending order with their weights.
pub(super) fn rule(routing: &ExpertSizes, logits: &[f64], correction: &[f32]) -> Vec<(usize, f64)> {
    let scores: Vec<f64> = match routing.sigmoid {
        false => {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / sum).collect()
        }
        true => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    };
    let mut wanted = scores.clone();
    for (wanted, &correction) in wanted.iter_mut().zip(correction) {
        *wanted += f64::from(correction);
    }
    let best = |values: &[f64], count: usize| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
        order.truncate(count);
        order
    };
    let size = wanted.len() / routing.groups;
    let of_group = |group: &[f64]| -> f64 {
        best(group, routing.best_of_group).iter().map(|&at| group[at]).sum()
    };
    let groups: Vec<f64> = wanted.chunks_exact(size).map(of_group).collect();
    let kept = best(&groups, routing.kept_groups);
    for (id, wanted) in wanted.iter_mut().enumerate() {
        if !kept.contains(&(id / size)) {
            *wanted = f64::NEG_INFINITY;
        }
    }
    let mut ids = best(&wanted, routing.per_token);
    ids.sort_unstable();
    let sum: f64 = ids.iter().map(|&id| scores[id]).sum();
    let divisor = if routing.normalise { sum + 1e-20 } else { 1.0 };
    ids.iter().map(|&id| (id, scores[id] / divisor * f64::from(routing.scaling))).collect()
}

#[test]
fn a_rule_that_differs_is_noticed() {
    let logits: Vec<f32> = numbers::<f32>(12, 9).iter().map(|x| 8.0 * x).collect();
    let correction: Vec<f32> = numbers(12, 10);
    let wide: Vec<f64> = logits.iter().map(|&x| x.into()).collect();
    let chosen = |routing: &ExpertSizes, correction: &[f32]| {
        let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
        Chooser::default().choose(routing, (&logits, correction), (&mut ids, &mut weights));
        ids.iter().map(|&id| id as usize).zip(weights).collect::<Vec<_>>()
    };
    let same = |found: &[(usize, f32)], wanted: &[(usize, f64)]| {
        let close = |(a, b): (&(usize, f32), &(usize, f64))| {
            a.0 == b.0 && (f64::from(a.1) - b.1).abs() < 1e-5
        };
        found.iter().zip(wanted).all(close)
    };
    for (index, routing) in ROUTINGS.iter().enumerate() {
        let own = if routing.corrected { &correction[..] } else { &[] };
        for (other, wanted) in ROUTINGS.iter().enumerate() {
            let of_other = if wanted.corrected { &correction[..] } else { &[] };
            let agrees = same(&chosen(routing, own), &rule(wanted, &wide, of_other));
            // Routings 0 and 2 differ in their groups, which may leave a choice unchanged. Every
            // other difference between these routings changes the choice.
            assert!(agrees == (index == other) || (index + other == 2 && agrees));
        }
    }
}

proptest! {
    #[test]
    fn of_equal_scores_the_lower_id_wins_and_all_ids_differ(
        logits in prop::collection::vec(
            prop::sample::select(vec![0.0f32, 1.0, -1.0, f32::NAN, f32::INFINITY]), 12,
        ),
    ) {
        for routing in ROUTINGS {
            let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
            Chooser::default().choose(&routing, (&logits, &[]), (&mut ids, &mut weights));
            prop_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]) && ids[2] < 12);
            if logits.iter().all(|x| x.is_finite()) {
                let wide: Vec<f64> = logits.iter().map(|&x| x.into()).collect();
                // Group sums in `f64` may tie where those in `f32` do not, or the reverse.
                if routing.best_of_group == 1 {
                    let wanted = rule(&routing, &wide, &[]);
                    let wanted: Vec<u32> = wanted.iter().map(|it| it.0 as u32).collect();
                    prop_assert_eq!(&ids[..], &wanted[..]);
                }
            }
        }
    }

    #[test]
    fn rows_are_sorted_by_expert_and_token(
        tokens in prop::collection::vec(prop::sample::subsequence((0..9_u32).collect::<Vec<_>>(), 3), 0..80),
        most in 1_usize..8,
        panels in 1_usize..4,
        block in 1_usize..10,
    ) {
        let ids: Vec<u32> = tokens.concat();
        let mut sorted = Sorted::default();
        sorted.sort(&ids, 3, 9, most);
        let total = sorted.count_pieces(panels, |_| block);
        let experts: Vec<u32> = {
            let mut of_rows = vec![u32::MAX; ids.len()];
            for (place, &row) in sorted.rows.iter().enumerate() {
                of_rows[row as usize] = ids[place];
                prop_assert_eq!(sorted.tokens[row as usize] as usize, place / 3);
            }
            of_rows
        };
        let keys: Vec<(u32, u32)> = experts.iter().copied().zip(sorted.tokens.clone()).collect();
        prop_assert!(keys.is_sorted());
        let covered: usize = sorted.active.iter().map(|active| active.count).sum();
        prop_assert_eq!(covered, ids.len());
        for active in &sorted.active {
            let own = &experts[active.first..active.first + active.count];
            prop_assert!(own.iter().all(|&expert| expert as usize == active.expert));
            prop_assert_eq!(active.end - active.begin, panels * active.count.div_ceil(block));
        }
        let mut next = 0;
        for tile in &sorted.tiles {
            prop_assert_eq!(tile.first, next);
            prop_assert!((1..=most).contains(&tile.count));
            let own = &experts[tile.first..tile.first + tile.count];
            prop_assert!(own.iter().all(|expert| *expert == own[0]));
            next += tile.count;
        }
        prop_assert_eq!(next, ids.len());
        for piece in 0..total {
            let active = sorted.active[sorted.place_of(piece)];
            prop_assert!((active.begin..active.end).contains(&piece));
        }
    }
}
