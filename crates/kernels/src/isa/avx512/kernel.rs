//! A macro that implements [`Kernel`](crate::tile::Kernel) with 512-bit loops.

/// The largest number of queries for which four groups of keys, or four vectors of a head, fit into
/// registers at a time. For more queries, only two fit.
pub(in crate::isa) const FEW_QUERIES: usize = 6;

/// Calls the instance of `$function` for `$rows` rows; for any number that is not among `$few`, the
/// instance for `$most`. `$second` is the function's second constant.
macro_rules! by_rows {
    ($rows:expr, $function:ident $arguments:tt, $second:tt, $($few:literal)* | $most:literal) => {
        match $rows {
            $($few => $function::<$few, $second> $arguments,)*
            _ => $function::<$most, $second> $arguments,
        }
    };
}

/// Implements [`Kernel`](crate::tile::Kernel) with the loops of a module, compiled for `$features`.
/// Each number of rows is a separate function: if they were inlined, all of them would be copied
/// into every product.
macro_rules! kernel {
    ($name:ident: $element:ty as $number:ty, $features:literal, $loops:ident) => {
        const _: () = {
            use $crate::element::Element;
            use $crate::isa::avx512::transpose::{columns, transpose_rows};
            use $crate::isa::avx512::vector::Zmm;
            use $crate::isa::avx512::kernel::{FEW_QUERIES, by_rows};
            use $crate::isa::avx512::sums;
            use $crate::tile::{Ahead, GROUP, GROUPS, Kernel, MAX_ROWS, Outputs, Scores};
            use $crate::vector::LANES;

            #[target_feature(enable = $features)]
            unsafe fn tiles<const M: usize, const LINES: usize>(
                numbers: *const $number,
                panel: *const $element,
                k: usize,
                ahead: *const $element,
                more: bool,
                out: *mut Outputs,
            ) {
                // SAFETY: the caller upholds the contract, here and below.
                unsafe { $loops::tile::<$element, M, LINES>(numbers, panel, k, ahead, more, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn arranged(
                a: *const $element,
                rows: usize,
                k: usize,
                numbers: *mut $number,
            ) {
                if rows == 1 {
                    // One row is in the right order already.
                    return unsafe { $loops::copy(a, k, numbers) };
                }
                let count = k / <$element as Element>::PAIR;
                for first in (0..count).step_by(LANES) {
                    let width = (count - first).min(LANES);
                    let block = unsafe { columns(a.cast(), (rows, count), first) };
                    for (d, &column) in block.iter().enumerate().take(width) {
                        let at = (first + d) * rows * <$element as Element>::PAIR;
                        unsafe { $loops::put::<$element>(column, rows, numbers.add(at)) };
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn scored<const M: usize, const G: usize>(
                queries: *const $number,
                keys: &[*const $element; G],
                ahead: &[*const $element; G],
                dim: usize,
                out: *mut f32,
            ) {
                unsafe { $loops::scores::<$element, M, G>(queries, keys, ahead, dim, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn mixed<const M: usize, const C: usize>(
                weights: *const $number,
                values: &[*const $element],
                ahead: &[*const $element; GROUPS],
                columns: (usize, usize),
                decay: &[f32; MAX_ROWS],
                out: *mut f32,
            ) {
                unsafe { $loops::mix::<$element, M, C>(weights, values, ahead, columns, decay, out) }
            }

            // SAFETY: callers detect the features.
            unsafe impl Kernel<$element> for $name {
                const ROWS: usize = 12;
                type Vector = Zmm;
                type Number = $number;

                #[inline(always)]
                unsafe fn arrange(
                    a: *const $element,
                    rows: usize,
                    k: usize,
                    numbers: *mut $number,
                ) {
                    unsafe { arranged(a, rows, k, numbers) }
                }

                #[inline(always)]
                unsafe fn tile(
                    numbers: *const $number,
                    rows: usize,
                    panel: *const $element,
                    k: usize,
                    ahead: Ahead<$element>,
                    more: bool,
                    out: *mut Outputs,
                ) {
                    unsafe {
                        match ahead {
                            Ahead::Nothing => {
                                let ahead = panel;
                                by_rows!(rows, tiles(numbers, panel, k, ahead, more, out), 0,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                            Ahead::Half(ahead) => {
                                by_rows!(rows, tiles(numbers, panel, k, ahead, more, out), 1,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                            Ahead::Whole(ahead) => {
                                by_rows!(rows, tiles(numbers, panel, k, ahead, more, out), 2,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                        }
                    }
                }

                #[inline(always)]
                unsafe fn scores(
                    queries: *const $number,
                    rows: usize,
                    keys: &[*const $element; GROUPS],
                    ahead: &[*const $element; GROUPS],
                    dim: usize,
                    out: &mut Scores,
                ) {
                    let out = out.as_flattened_mut().as_mut_ptr();
                    unsafe {
                        if rows <= FEW_QUERIES {
                            by_rows!(rows, scored(queries, keys, ahead, dim, out), GROUPS, 1 2 3 4 5 | 6);
                            return;
                        }
                        let ahead = ahead.as_chunks::<2>().0;
                        for (half, (keys, ahead)) in keys.as_chunks::<2>().0.iter().zip(ahead).enumerate() {
                            let out = out.add(half * 2 * GROUP);
                            by_rows!(rows, scored(queries, keys, ahead, dim, out), 2, 7 8 9 10 11 | 12);
                        }
                    }
                }

                #[inline(always)]
                unsafe fn mix(
                    weights: *const $number,
                    rows: usize,
                    values: &[*const $element],
                    ahead: &[*const $element; GROUPS],
                    dim: usize,
                    decay: &[f32; MAX_ROWS],
                    out: *mut f32,
                ) {
                    let width = if rows <= FEW_QUERIES { 4 * LANES } else { 2 * LANES };
                    let wide = dim / width * width;
                    unsafe {
                        for column in (0..wide).step_by(width) {
                            if rows <= FEW_QUERIES {
                                by_rows!(rows, mixed(weights, values, ahead, (dim, column), decay, out), 4,
                                                                                1 2 3 4 5 | 6);
                            } else {
                                by_rows!(rows, mixed(weights, values, ahead, (dim, column), decay, out), 2,
                                                                            7 8 9 10 11 | 12);
                            }
                        }
                        for column in (wide..dim).step_by(LANES) {
                            by_rows!(rows, mixed(weights, values, ahead, (dim, column), decay, out), 1,
                                                                1 2 3 4 5 6 7 8 9 10 11 | 12);
                        }
                    }
                }

                #[inline(always)]
                unsafe fn number(values: Zmm, to: *mut $number) {
                    unsafe { $loops::number::<$element>(values.0, to) }
                }

                #[inline(always)]
                unsafe fn pack_rows(
                    rows: &[*const $element; LANES],
                    k: usize,
                    panel: *mut $element,
                    pitch: usize,
                ) {
                    let count = k / <$element as Element>::PAIR;
                    unsafe {
                        transpose_rows(&rows.map(|row| row.cast()), count, panel.cast(), pitch)
                    }
                }

                #[inline(always)]
                unsafe fn narrow(values: Zmm, to: *mut $element) {
                    unsafe { $loops::store(values.0, to) }
                }

                #[inline(always)]
                fn prefetch(address: *const $element) {
                    sums::ask(address);
                }
            }
        };
    };
}

pub(in crate::isa) use {by_rows, kernel};
