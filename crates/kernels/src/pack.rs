//! Packs weights in the order in which the matrix kernels read them.
//!
//! A matrix `[n, k]` becomes panels of [`NR`] outputs. For each group of `PAIR` inner positions,
//! panel `p` holds the group's values of outputs `p * NR ..`. So one vector load reads one group of
//! many outputs (Goto & van de Geijn 2008).

use crate::element::Element;
use crate::tile::{HALF, Kernel, NR};
use crate::vector::LANES;

/// Elements of a packed `[n, k]` matrix; `n` is rounded up to whole panels.
#[must_use]
pub(crate) fn packed_len(n: usize, k: usize) -> usize {
    n.div_ceil(NR) * panel_len(k)
}

/// The number of outputs, including the padding of an interleaved matrix.
#[must_use]
pub(crate) fn padded_outputs(outputs: usize, interleaved: bool) -> usize {
    if interleaved { 2 * (outputs / 2).next_multiple_of(HALF) } else { outputs }
}

/// Elements of one panel.
#[must_use]
#[inline(always)]
pub(crate) fn panel_len(k: usize) -> usize {
    k * NR
}

/// The row of an `[n, k]` matrix that is stored in `column` of panel `p`; `None` if the column is
/// padding.
#[must_use]
pub(crate) fn row_of(p: usize, column: usize, n: usize, interleaved: bool) -> Option<usize> {
    let (row, end) = if interleaved {
        let gate = p * HALF + column % HALF;
        if column < HALF { (gate, n / 2) } else { (gate + n / 2, n) }
    } else {
        (p * NR + column, n)
    };
    (row < end).then_some(row)
}

/// Packs the row-major `source` `[n, k]`. Padding is zero.
///
/// `interleaved`: the first half of the rows are gates, the second half the values that they
/// multiply. A panel gets [`HALF`] of each, so that both factors of a product are computed
/// together.
///
/// # Panics
/// If the lengths do not fit `n` and `k`, or `k` is not a multiple of `E::PAIR`.
///
/// # Safety
/// The processor must support `K`.
pub(crate) unsafe fn pack<E: Element, K: Kernel<E>>(
    source: &[E],
    n: usize,
    k: usize,
    interleaved: bool,
    packed: &mut [E],
) {
    assert_eq!(source.len(), n * k, "a whole matrix");
    assert_eq!(k % E::PAIR, 0, "whole pairs");
    let outputs = padded_outputs(n, interleaved);
    assert_eq!(packed.len(), packed_len(outputs, k), "room for the packed matrix");
    let zeros = vec![E::default(); k];
    for (p, panel) in packed.chunks_exact_mut(panel_len(k)).enumerate() {
        let rows: [*const E; NR] =
            std::array::from_fn(|column| match row_of(p, column, n, interleaved) {
                Some(row) => source[row * k..].as_ptr(),
                None => zeros.as_ptr(),
            });
        let (halves, _) = rows.as_chunks();
        for (half, rows) in halves.iter().enumerate() {
            // SAFETY: the rows are whole, and the panel has two halves side by side.
            unsafe { K::pack_rows(rows, k, panel.as_mut_ptr().add(half * LANES * E::PAIR), NR) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Bf16;
    use crate::isa::plain::Plain;

    #[test]
    fn every_weight_has_its_place() {
        let (n, k) = (35, 4);
        let source: Vec<Bf16> = (0..n * k).map(|i| Bf16(i as u16 + 1)).collect();
        let mut packed = vec![Bf16(9); packed_len(n, k)];
        // SAFETY: `Plain` runs on every processor.
        unsafe { pack::<Bf16, Plain>(&source, n, k, false, &mut packed) };
        assert_eq!(packed.len(), 2 * 4 * NR);
        for row in 0..n {
            for inner in 0..k {
                let at = (row / NR) * 4 * NR + (inner / 2 * NR + row % NR) * 2 + inner % 2;
                assert_eq!(packed[at], source[row * k + inner]);
            }
        }
        assert_eq!(packed.iter().filter(|value| value.0 == 0).count(), packed.len() - source.len());
    }

    #[test]
    fn gates_lie_beside_what_they_gate() {
        let half = 20;
        let source: Vec<f32> = (0..2 * half).map(|i| i as f32 + 1.0).collect();
        let mut packed = vec![0.0; packed_len(64, 1)];
        // SAFETY: `Plain` runs on every processor.
        unsafe { pack::<f32, Plain>(&source, 2 * half, 1, true, &mut packed) };
        assert_eq!(packed[..NR], [&source[..HALF], &source[half..half + HALF]].concat());
        assert_eq!(packed[NR..NR + 5], [17.0, 18.0, 19.0, 20.0, 0.0]);
        assert_eq!(packed[NR + HALF..NR + HALF + 5], [37.0, 38.0, 39.0, 40.0, 0.0]);
    }
}
