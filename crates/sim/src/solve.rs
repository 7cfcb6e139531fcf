//! Solves non-negative least squares with few columns.

/// The largest number of columns.
pub(crate) const COLUMNS: usize = 5;

/// One linear equation: the values of the columns, and the value that their weighted sum should
/// have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Equation {
    pub(crate) columns: [f64; COLUMNS],
    pub(crate) target: f64,
}

/// Returns the coefficients, none below 0, that minimise the weighted sum of the squared errors.
///
/// The solution equals the unconstrained solution on the columns with positive coefficients (Lawson
/// and Hanson 1974). With few columns, all subsets can be tried: the best unconstrained solution
/// without a negative coefficient is exact. Columns that depend linearly on others are left out.
pub(crate) fn non_negative(
    equations: impl Iterator<Item = (Equation, f64)> + Clone,
) -> [f64; COLUMNS] {
    let mut scale = [0.0_f64; COLUMNS];
    for (equation, weight) in equations.clone() {
        for (sum, x) in scale.iter_mut().zip(equation.columns) {
            *sum += weight * x * x;
        }
    }
    for sum in &mut scale {
        *sum = sum.sqrt();
    }
    // The normal equations, with the columns scaled to length 1.
    let mut gram = [[0.0; COLUMNS]; COLUMNS];
    let mut right = [0.0; COLUMNS];
    for (equation, weight) in equations {
        let mut x = equation.columns;
        for (x, scale) in x.iter_mut().zip(scale) {
            *x = if scale > 0.0 { *x / scale } else { 0.0 };
        }
        for i in 0..COLUMNS {
            right[i] += weight * x[i] * equation.target;
            for j in 0..=i {
                gram[i][j] += weight * x[i] * x[j];
            }
        }
    }
    let mut best = ([0.0; COLUMNS], 0.0);
    for subset in 1_u32..1 << COLUMNS {
        let Some(found) = on_subset(&gram, &right, subset) else { continue };
        // Compared with all coefficients 0, an unconstrained solution reduces the sum of squares by
        // the scalar product of the solution and the right side.
        let gain: f64 = found.iter().zip(right).map(|(x, b)| x * b).sum();
        if found.iter().all(|&x| x >= 0.0) && gain > best.1 {
            best = (found, gain);
        }
    }
    let mut solution = best.0;
    for (x, scale) in solution.iter_mut().zip(scale) {
        *x = if scale > 0.0 { *x / scale } else { 0.0 };
    }
    solution
}

/// Returns the unconstrained solution on the columns of `subset`, by Cholesky decomposition; `None`
/// if these columns are linearly dependent.
fn on_subset(
    gram: &[[f64; COLUMNS]; COLUMNS],
    right: &[f64; COLUMNS],
    subset: u32,
) -> Option<[f64; COLUMNS]> {
    const DEPENDENT: f64 = 1e-9;
    let used: Vec<usize> = (0..COLUMNS).filter(|i| subset & (1 << i) != 0).collect();
    let mut lower = [[0.0; COLUMNS]; COLUMNS];
    let mut middle = [0.0; COLUMNS];
    for (a, &i) in used.iter().enumerate() {
        for (b, &j) in used[..=a].iter().enumerate() {
            let known: f64 = (0..b).map(|k| lower[a][k] * lower[b][k]).sum();
            let rest = gram[i][j] - known;
            if a == b {
                if rest < DEPENDENT {
                    return None;
                }
                lower[a][a] = rest.sqrt();
            } else {
                lower[a][b] = rest / lower[b][b];
            }
        }
        let known: f64 = (0..a).map(|k| lower[a][k] * middle[k]).sum();
        middle[a] = (right[i] - known) / lower[a][a];
    }
    let mut solution = [0.0; COLUMNS];
    for a in (0..used.len()).rev() {
        let known: f64 = (a + 1..used.len()).map(|k| lower[k][a] * solution[used[k]]).sum();
        solution[used[a]] = (middle[a] - known) / lower[a][a];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn squares(equations: &[Equation], x: &[f64; COLUMNS]) -> f64 {
        let error = |e: &Equation| {
            let sum: f64 = e.columns.iter().zip(x).map(|(a, b)| a * b).sum();
            (sum - e.target).powi(2)
        };
        equations.iter().map(error).sum()
    }

    fn problem() -> impl Strategy<Value = Vec<Equation>> {
        let equation = (prop::array::uniform5(0.0..10.0_f64), -20.0..50.0_f64)
            .prop_map(|(columns, target)| Equation { columns, target });
        prop::collection::vec(equation, 1..30)
    }

    proptest! {
        #[test]
        fn no_small_change_makes_it_better(equations in problem()) {
            let solution = non_negative(equations.iter().map(|e| (*e, 1.0)));
            let least = squares(&equations, &solution);
            for column in 0..COLUMNS {
                for change in [-1e-3, 1e-3] {
                    let mut other = solution;
                    other[column] = (other[column] + change).max(0.0);
                    prop_assert!(squares(&equations, &other) >= least - 1e-6 * (1.0 + least));
                }
            }
        }

        #[test]
        fn what_made_the_targets_is_found(
            truth in prop::array::uniform5(0.0..5.0_f64),
            rows in prop::collection::vec(prop::array::uniform5(0.0..10.0_f64), 40..60),
        ) {
            let equations = rows.iter().map(|columns| {
                let target = columns.iter().zip(truth).map(|(a, b)| a * b).sum();
                (Equation { columns: *columns, target }, 1.0)
            });
            let found = non_negative(equations);
            for (a, b) in found.iter().zip(truth) {
                prop_assert!((a - b).abs() < 1e-6, "{found:?} {truth:?}");
            }
        }
    }

    #[test]
    fn a_column_that_repeats_another_is_not_needed() {
        let equations = (1..9).map(|i| {
            let x = f64::from(i);
            (Equation { columns: [x, x, 0.0, 0.0, 0.0], target: 3.0 * x }, 1.0)
        });
        let found = non_negative(equations);
        assert!((found[0] + found[1] - 3.0).abs() < 1e-9, "{found:?}");
        assert_eq!(found[2..], [0.0; 3]);
    }
}
