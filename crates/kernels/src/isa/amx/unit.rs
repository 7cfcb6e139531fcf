//! The tile operations of a processor, and an emulation in plain Rust for other processors.

/// The number of rows of a tile.
pub(super) const HIGH: usize = 16;
/// Bytes per row of a tile.
pub(super) const WIDE: usize = 64;

/// The number of rows, and bytes per row, of each of the eight tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The number of rows of each tile.
    pub(super) rows: [u8; 8],
    /// The bytes per row of each tile.
    pub(super) bytes: [u8; 8],
}

/// [`WIDE`] in the type of a shape.
const FULL: u8 = WIDE as u8;

impl Shape {
    /// The shape of released tiles.
    pub(super) const NONE: Self = Self { rows: [0; 8], bytes: [0; 8] };

    /// The shape for two tiles of rows by two tiles of outputs. Tiles 0 to 3 hold sums, 4 and 5
    /// rows, 6 and 7 weights.
    #[inline(always)]
    fn four(rows: usize, bytes: usize) -> Self {
        let first = rows.min(HIGH) as u8;
        // A shaped tile has at least one row, even if there is no second half.
        let second = (rows.saturating_sub(HIGH) as u8).max(1);
        let (bytes, groups) = (bytes as u8, (bytes / 4) as u8);
        Self {
            rows: [first, first, second, second, first, second, groups, groups],
            bytes: [FULL, FULL, FULL, FULL, bytes, bytes, FULL, FULL],
        }
    }

    /// The shape for up to 32 rows and `width` bfloat16 inner positions, at most 32.
    #[inline(always)]
    pub(super) fn product(rows: usize, width: usize) -> Self {
        Self::four(rows, 2 * width)
    }

    /// The shape for up to 32 rows and `width` inner positions of bytes, at most 64.
    #[inline(always)]
    pub(super) fn bytes(rows: usize, width: usize) -> Self {
        Self::four(rows, width)
    }

    /// The shape for attention. Tiles 0 to 3 hold the sums of up to 16 queries. For scores, tile 4
    /// holds `width` positions of queries and tile 5 those of keys. Tile 6 holds the weights of a
    /// group, and tile 7 its values.
    #[inline(always)]
    pub(super) fn attention(rows: usize, width: usize) -> Self {
        let (rows, bytes, pairs) = (rows as u8, (2 * width) as u8, (width / 2) as u8);
        Self {
            rows: [rows, rows, rows, rows, rows, pairs, rows, HIGH as u8 / 2],
            bytes: [FULL, FULL, FULL, FULL, bytes, FULL, FULL / 2, FULL],
        }
    }
}

/// The tiles of a processor. Each thread has its own.
///
/// # Safety
/// Implementations may use instructions that not every processor has. Their methods may be called
/// only where those instructions were detected.
pub(crate) unsafe trait Tiles: 'static {
    /// Shapes the tiles. Tiles that already have the shape keep their content; others become zero.
    ///
    /// # Safety
    /// The processor must have tiles (here and below).
    unsafe fn shape(shape: Shape);

    /// Fills tile `T` with zeros.
    ///
    /// # Safety
    /// The tile must be shaped (here and below).
    unsafe fn zero<const T: usize>();

    /// Loads tile `T` from rows that are `pitch` bytes apart.
    ///
    /// # Safety
    /// All rows of the tile must be readable.
    unsafe fn load<const T: usize>(from: *const u8, pitch: usize);

    /// Writes tile `T` as rows that are `pitch` bytes apart.
    ///
    /// # Safety
    /// All rows of the tile must be writable.
    unsafe fn store<const T: usize>(to: *mut u8, pitch: usize);

    /// Adds the products of bfloat16 pairs of tiles `A` and `B` to the `f32` sums of tile `C`.
    ///
    /// # Safety
    /// The shapes must match: `C` has the rows of `A` and the columns of `B`, and `B` has a row per
    /// pair of `A`.
    unsafe fn pairs<const C: usize, const A: usize, const B: usize>();

    /// Adds the products of quads to the `i32` sums of tile `C`: signed bytes of tile `A` with
    /// unsigned bytes of tile `B`.
    ///
    /// # Safety
    /// See [`Self::pairs`], with quads in place of pairs.
    unsafe fn quads<const C: usize, const A: usize, const B: usize>();
}

#[cfg(test)]
pub(crate) use emulated::Emulated;

#[cfg(test)]
mod emulated {
    use std::cell::RefCell;

    use super::{Shape, Tiles};
    use crate::element::{Bf16, Element};

    /// Tiles in memory, with the arithmetic that Intel's manual specifies for each instruction.
    pub(crate) struct Emulated;

    struct State {
        shape: Shape,
        /// `[tile][row][byte]`.
        tiles: [[[u8; 64]; 16]; 8],
    }

    thread_local! {
        static STATE: RefCell<State> =
            const { RefCell::new(State { shape: Shape::NONE, tiles: [[[0; 64]; 16]; 8] }) };
    }

    fn flushed(value: f32) -> f32 {
        if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
    }

    impl State {
        fn word(&self, tile: usize, row: usize, column: usize) -> [u8; 4] {
            let row = &self.tiles[tile][row];
            [0, 1, 2, 3].map(|byte| row[4 * column + byte])
        }

        /// Sets every word of tile `c` to the `sum` of its old value, a row of `a` and a column of
        /// `b`.
        fn multiply(
            &mut self,
            (c, a, b): (usize, usize, usize),
            sum: impl Fn([u8; 4], &[([u8; 4], [u8; 4])]) -> [u8; 4],
        ) {
            let (rows, bytes) = (self.shape.rows, self.shape.bytes);
            assert_eq!(rows[c], rows[a], "rows of sums");
            assert_eq!(bytes[c], bytes[b], "columns of sums");
            assert_eq!(bytes[a] / 4, rows[b], "inner words");
            for row in 0..usize::from(rows[c]) {
                for column in 0..usize::from(bytes[c]) / 4 {
                    let words: Vec<_> = (0..usize::from(rows[b]))
                        .map(|inner| (self.word(a, row, inner), self.word(b, inner, column)))
                        .collect();
                    let found = sum(self.word(c, row, column), &words);
                    self.tiles[c][row][4 * column..][..4].copy_from_slice(&found);
                }
            }
        }
    }

    fn halves(word: [u8; 4]) -> [f32; 2] {
        [[word[0], word[1]], [word[2], word[3]]]
            .map(|half| flushed(Bf16(u16::from_le_bytes(half)).to_f32()))
    }

    fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
        STATE.with(|state| work(&mut state.borrow_mut()))
    }

    // SAFETY: the emulation uses no special instructions.
    unsafe impl Tiles for Emulated {
        unsafe fn shape(shape: Shape) {
            with(|state| {
                let possible = (shape.rows.iter().all(|&rows| (1..=16).contains(&rows)))
                    && shape.bytes.iter().all(|&bytes| (1..=64).contains(&bytes) && bytes % 4 == 0);
                assert!(possible, "{shape:?}");
                if state.shape != shape {
                    *state = State { shape, tiles: [[[0; 64]; 16]; 8] };
                }
            });
        }

        unsafe fn zero<const T: usize>() {
            with(|state| state.tiles[T] = [[0; 64]; 16]);
        }

        unsafe fn load<const T: usize>(from: *const u8, pitch: usize) {
            with(|state| {
                let (rows, bytes) = (state.shape.rows[T].into(), state.shape.bytes[T].into());
                for (row, to) in state.tiles[T].iter_mut().enumerate().take(rows) {
                    // SAFETY: the caller upholds the contract.
                    unsafe { from.add(row * pitch).copy_to(to.as_mut_ptr(), bytes) };
                }
            });
        }

        unsafe fn store<const T: usize>(to: *mut u8, pitch: usize) {
            with(|state| {
                let (rows, bytes) = (state.shape.rows[T].into(), state.shape.bytes[T].into());
                for (row, from) in state.tiles[T].iter().enumerate().take(rows) {
                    // SAFETY: the caller upholds the contract.
                    unsafe { to.add(row * pitch).copy_from(from.as_ptr(), bytes) };
                }
            });
        }

        unsafe fn pairs<const C: usize, const A: usize, const B: usize>() {
            let sum = |before, words: &[_]| {
                let mut sums = [0.0f32; 2];
                for &(a, b) in words {
                    for (sum, (a, b)) in sums.iter_mut().zip(halves(a).into_iter().zip(halves(b))) {
                        *sum = flushed(a.mul_add(b, *sum));
                    }
                }
                let both = flushed(sums[0] + sums[1]);
                flushed(flushed(f32::from_le_bytes(before)) + both).to_le_bytes()
            };
            with(|state| state.multiply((C, A, B), sum));
        }

        unsafe fn quads<const C: usize, const A: usize, const B: usize>() {
            let sum = |before, words: &[([u8; 4], [u8; 4])]| {
                let products = words.iter().flat_map(|(a, b)| a.iter().zip(b));
                products
                    .map(|(&a, &b)| i32::from(a.cast_signed()) * i32::from(b))
                    .fold(i32::from_le_bytes(before), i32::wrapping_add)
                    .to_le_bytes()
            };
            with(|state| state.multiply((C, A, B), sum));
        }
    }
}
