//! Computes the experts of a step.

use std::mem::MaybeUninit;

use super::{Step, Stream};
use crate::codes::{CodesRoom, encode, widened};
use crate::dots::Dots;
use crate::element::Element;
use crate::experts::{Active, Beside, Mixture, Own, RowTile, Sorted, Stack};
use crate::math;
use crate::matmul::{
    Arranged, BLOCK_ROWS, Out, Rows, block_of, multiply_codes_piece, multiply_piece,
};
use crate::pack::padded_outputs;
use crate::team::{FEW, Member, Queue};
use crate::tile::{Kernel, MAX_BLOCK_ROWS, MAX_ROWS, NR, Outputs, Tile, tile_height};
use crate::vector::{LANES, Vector};

/// The rows that a product of experts reads.
#[derive(Clone, Copy)]
enum Origin<E> {
    /// Rows of tokens, to be gathered.
    Tokens(*const E),
    /// Rows that are already sorted by expert.
    Rows(*const E),
}

impl<E: Element> Step<'_, E> {
    /// Computes each token's experts, and adds their outputs to the residual stream. `normed` is
    /// the normalised stream. Beside a dense network, the sums of the outputs are stored for
    /// [`Self::join`]; the router reads `normed`, and the experts have a norm of their own. Experts
    /// that work on latent states replace these with the sums. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and `queues` must be those of this layer's
    /// experts.
    #[inline(always)]
    pub(super) unsafe fn experts<K: Kernel<E>, D: Dots>(
        &self,
        mixture: &Mixture,
        (stream, normed): (Stream, Rows<E>),
        (queues, member): (&[Queue], &Member<'_>),
    ) {
        let buffers = self.experts;
        let (count, per_token) = (mixture.sizes.count, mixture.sizes.per_token);
        let few = stream.count <= FEW;
        if !few {
            // Each member has normalised only its share of the tokens.
            member.meet();
        }
        // SAFETY: between barriers, members write only their share, or work that they took from a
        // queue; `own` belongs to this member.
        unsafe {
            self.score::<K>(mixture, normed, member);
            member.meet();
            let mut first = normed.first;
            if let Some(beside) = &mixture.beside {
                first = self.normalise::<K>(member, stream, &beside.before).first;
            } else if mixture.latent.is_some() {
                first = buffers.latents.cast_const();
            }
            let own = &mut *buffers.own.add(member.index);
            // For few tokens, every member chooses the experts of all tokens itself, which is
            // faster than a barrier.
            let at = if few { member.index * FEW * per_token } else { 0 };
            let (ids, weights) = (buffers.ids.add(at), buffers.weights.add(at));
            for token in if few { 0..stream.count } else { member.share(stream.count) } {
                let logits = std::slice::from_raw_parts(buffers.logits.add(token * count), count);
                let at = token * per_token;
                let ids = std::slice::from_raw_parts_mut(ids.add(at), per_token);
                let weights = std::slice::from_raw_parts_mut(weights.add(at), per_token);
                let scores = (logits, mixture.correction.as_slice());
                own.chooser.choose(&mixture.sizes, scores, (ids, weights));
                if let Some(beside) = &mixture.beside {
                    for (weight, &id) in weights.iter_mut().zip(&*ids) {
                        *weight *= beside.factors[id as usize];
                    }
                }
            }
            if !few {
                member.meet();
            }
            let all = std::slice::from_raw_parts(ids, stream.count * per_token);
            own.sorted.sort(all, per_token, count, K::ROWS);
            if mixture.sizes.weighs_inputs {
                let all = std::slice::from_raw_parts(weights, stream.count * per_token);
                own.row_weights.resize(all.len(), 0.0);
                for (&row, &weight) in own.sorted.rows.iter().zip(all) {
                    own.row_weights[row as usize] = weight;
                }
            } else {
                own.row_weights.clear();
            }
            let (gated, terms) = (self.gated, buffers.terms);
            let steps = [
                (&mixture.gate_up, Origin::Tokens(first), self.gates_to(None)),
                (&mixture.down, Origin::Rows(gated.cast_const()), Out::Store(terms)),
            ];
            // A single loop, so that the code of the products is compiled only once.
            for (queue, (stack, from, out)) in queues.iter().zip(steps) {
                self.prepare_rows::<K>(stack, from, own, member);
                member.meet();
                self.multiply_stack::<K, D>(stack, out, &mut own.sorted, (queue, member));
                member.meet();
            }
            for token in member.share(stream.count) {
                let (choices, all) = ((weights.cast_const(), per_token), &own.sorted);
                self.add_terms::<K::Vector>((mixture, stream), token, (all, choices));
                if mixture.latent.is_some() {
                    let (states, at) = (mixture.down.outputs, token * mixture.down.outputs);
                    let from = std::slice::from_raw_parts(buffers.sums.add(at), states);
                    let to = std::slice::from_raw_parts_mut(buffers.latents.add(at), states);
                    math::narrow::<E, K>(from, to);
                }
            }
            member.meet();
        }
    }

    /// Replaces a row of the dense network's output by the sum of both outputs (dense and experts),
    /// each normalised.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and only this member may take this row of the
    /// two outputs.
    #[inline(always)]
    pub(super) unsafe fn join<V: Vector>(&self, beside: &Beside, row: usize, part: &mut [f32]) {
        // SAFETY: the caller upholds the contract.
        let sum = unsafe {
            let sum = self.experts.sums.add(row * self.hidden).cast_const();
            std::slice::from_raw_parts(sum, self.hidden)
        };
        let factor = math::rms_factor::<V>(part, self.eps);
        for (part, weight) in part.iter_mut().zip(&beside.behind_dense) {
            *part = *part * factor * weight;
        }
        math::add_rms_norm::<V>(part, sum, &beside.behind, (self.eps, 1.0));
    }

    /// Multiplies the shared expert's inner rows `[rows, inner]` by its gate, if it has one.
    /// Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and no other member may write these rows at
    /// the same time.
    #[inline(always)]
    pub(super) unsafe fn gate_shared<V: Vector>(
        &self,
        mixture: &Mixture,
        (normed, inner): (Rows<E>, usize),
        member: &Member<'_>,
    ) {
        if mixture.shared_gate.is_empty() {
            return;
        }
        for row in member.share(normed.count) {
            // SAFETY: the row `x` is in the normalised stream. The row of inner states belongs to
            // this member.
            unsafe {
                let x = normed.first.add(row * self.hidden);
                let gate = mixture.shared_gate.as_ptr();
                let logit = product::<E, f32, V>(x, gate, self.hidden);
                let factor = 1.0 / (1.0 + (-logit).exp());
                let inner = std::slice::from_raw_parts_mut(self.gated.add(row * inner), inner);
                inner.iter_mut().for_each(|x| *x = E::from_f32(x.to_f32() * factor));
            }
        }
        member.meet();
    }

    /// Computes the router logits of this member's share of all pairs of tokens and experts.
    #[inline(always)]
    unsafe fn score<K: Kernel<E>>(&self, mixture: &Mixture, normed: Rows<E>, member: &Member<'_>) {
        let (hidden, count) = (self.hidden, mixture.sizes.count);
        let router = mixture.router.as_ptr();
        for pair in member.share(normed.count * count) {
            let (token, expert) = (pair / count, pair % count);
            // SAFETY: the rows are in the normalised stream and in the router. No other member
            // writes the pair's logit.
            unsafe {
                let x = normed.first.add(token * hidden);
                let logit = if mixture.sizes.in_float32 {
                    let row = router.cast::<f32>().add(expert * hidden);
                    product::<E, f32, K::Vector>(x, row, hidden)
                } else {
                    let row = router.cast::<E>().add(expert * hidden);
                    product::<E, E, K::Vector>(x, row, hidden)
                };
                let bias = mixture.router_bias.get(expert).copied().unwrap_or(0.0);
                *self.experts.logits.add(pair) = logit + bias;
            }
        }
    }

    /// Prepares this member's share of all rows for the product: as codes if the stack is
    /// quantised, otherwise in the tiles' order.
    #[inline(always)]
    unsafe fn prepare_rows<K: Kernel<E>>(
        &self,
        stack: &Stack,
        from: Origin<E>,
        own: &mut Own<E>,
        member: &Member<'_>,
    ) {
        let inputs = stack.inputs;
        let Own { sorted, gathered, row_weights, .. } = own;
        // SAFETY: the rows are in this member's share; no member reads the prepared rows yet.
        unsafe {
            if let Some(format) = stack.format {
                let shared = format.shared(inputs);
                for row in member.share(sorted.tokens.len()) {
                    let from = match from {
                        Origin::Tokens(first) if !row_weights.is_empty() => {
                            let from = first.add(sorted.tokens[row] as usize * inputs);
                            gather(from, row_weights.get(row), &mut gathered[..inputs]);
                            gathered.as_ptr()
                        }
                        Origin::Tokens(first) => first.add(sorted.tokens[row] as usize * inputs),
                        Origin::Rows(first) => first.add(row * inputs),
                    };
                    let to = self.codes.from(row, inputs, shared);
                    encode::<E, K::Vector>(from, inputs, shared, to);
                }
                return;
            }
            let numbers = self.arranged.cast::<K::Number>();
            for tile in member.share(sorted.tiles.len()) {
                let RowTile { first, count } = sorted.tiles[tile];
                let rows = match from {
                    Origin::Rows(rows) => rows.add(first * inputs),
                    Origin::Tokens(tokens) => {
                        for (place, row) in (first..first + count).enumerate() {
                            let from = tokens.add(sorted.tokens[row] as usize * inputs);
                            let to = &mut gathered[place * inputs..][..inputs];
                            gather(from, row_weights.get(row), to);
                        }
                        gathered.as_ptr()
                    }
                };
                K::arrange(rows, count, inputs, numbers.add(first * inputs));
            }
        }
    }

    /// Computes this member's share of the products of all experts that have rows.
    #[inline(always)]
    unsafe fn multiply_stack<K: Kernel<E>, D: Dots>(
        &self,
        stack: &Stack,
        out: Out<E>,
        sorted: &mut Sorted,
        (queue, member): (&Queue, &Member<'_>),
    ) {
        let inputs = stack.inputs;
        let panels = padded_outputs(stack.outputs, out.is_interleaved()).div_ceil(NR);
        let total = match stack.format {
            Some(_) => sorted.count_pieces(panels, |_| BLOCK_ROWS),
            None => {
                sorted.count_pieces(panels, |count| block_of::<E, K>(tile_height(count, K::ROWS)))
            }
        };
        let mut sums = [const { MaybeUninit::<Outputs>::uninit() }; MAX_BLOCK_ROWS];
        let mut tile: Tile = [[0.0; NR]; MAX_ROWS];
        loop {
            let mine = queue.take(total, member.members);
            if mine.is_empty() {
                break;
            }
            let mut place = sorted.place_of(mine.start);
            for piece in mine {
                if piece >= sorted.active[place].end {
                    place += 1;
                }
                let Active { expert, first, count, begin, .. } = sorted.active[place];
                let which = ((piece - begin) / panels, (piece - begin) % panels);
                let matrix = stack.of::<E>(expert);
                // SAFETY: accesses stay inside the rows of this expert and their results.
                unsafe {
                    let out = match out {
                        Out::Gate(to, activation) => {
                            Out::Gate(to.add(first * stack.outputs / 2), activation)
                        }
                        Out::Activate(to, activation) => {
                            Out::Activate(to.add(first * stack.outputs), activation)
                        }
                        Out::Store(to) => Out::Store(to.add(first * stack.outputs)),
                        other => other,
                    };
                    if let Some(format) = stack.format {
                        let room: CodesRoom = self.codes.from(first, inputs, format.shared(inputs));
                        let (rows, of) = (room.filled(count), (&matrix, format));
                        multiply_codes_piece::<E, K, D>(rows, which, of, out, &mut tile);
                    } else {
                        let numbers = self.arranged.cast::<K::Number>().add(first * inputs);
                        let rows = Arranged::of::<E, K>(numbers.cast_const(), count);
                        multiply_piece::<E, K>(rows, which, &matrix, out, &mut sums);
                    }
                }
            }
        }
    }

    /// Adds the outputs of a token's experts to its row of the residual stream, in the order of the
    /// experts' ids. Beside a dense network, or with latent states, writes the row of sums instead.
    #[inline(always)]
    unsafe fn add_terms<V: Vector>(
        &self,
        (mixture, stream): (&Mixture, Stream),
        token: usize,
        (sorted, (weights, per_token)): (&Sorted, (*const f32, usize)),
    ) {
        let hidden = mixture.down.outputs;
        let apart = mixture.beside.is_some() || mixture.latent.is_some();
        // Weights that were multiplied with the experts' inputs do not multiply the outputs.
        let weigh = !mixture.sizes.weighs_inputs;
        let rows = &sorted.rows[token * per_token..][..per_token];
        let whole = hidden / LANES * LANES;
        // SAFETY: the row of the stream belongs to this member; no member writes the experts'
        // outputs (`terms`) at the same time.
        unsafe {
            let weights = std::slice::from_raw_parts(weights.add(token * per_token), per_token);
            let x = if apart { self.experts.sums } else { stream.x }.add(token * hidden);
            for at in (0..whole).step_by(LANES) {
                let mut sum = V::splat(0.0);
                for (&row, &weight) in rows.iter().zip(weights) {
                    let term = V::load(self.experts.terms.add(row as usize * hidden + at));
                    sum = term.fused(V::splat(if weigh { weight } else { 1.0 }), sum);
                }
                if apart {
                    sum.store(x.add(at));
                } else {
                    sum.fused(V::splat(self.scales.residuals), V::load(x.add(at))).store(x.add(at));
                }
            }
            for at in whole..hidden {
                let mut sum = 0.0;
                for (&row, &weight) in rows.iter().zip(weights) {
                    let weight = if weigh { weight } else { 1.0 };
                    sum += *self.experts.terms.add(row as usize * hidden + at) * weight;
                }
                *x.add(at) = if apart { sum } else { *x.add(at) + sum * self.scales.residuals };
            }
        }
    }
}

/// Copies a token's row; if there is a weight, multiplies the row by it.
///
/// # Safety
/// The row must have as many elements as `to`.
#[inline(always)]
unsafe fn gather<E: Element>(from: *const E, weight: Option<&f32>, to: &mut [E]) {
    // SAFETY: the caller upholds the contract.
    let from = unsafe { std::slice::from_raw_parts(from, to.len()) };
    match weight {
        None => to.copy_from_slice(from),
        Some(weight) => {
            for (to, from) in to.iter_mut().zip(from) {
                *to = E::from_f32(from.to_f32() * weight);
            }
        }
    }
}

/// Returns the dot product of two rows of `k` elements, summed in a fixed order.
///
/// # Safety
/// Both rows must have `k` elements.
#[inline(always)]
unsafe fn product<A: Element, B: Element, V: Vector>(a: *const A, b: *const B, k: usize) -> f32 {
    // Four alternating sums, since each addition to a single sum would wait for the previous one.
    let mut sums = [V::splat(0.0); 4];
    let whole = k / LANES * LANES;
    // SAFETY: reads stay inside the `k` elements of both rows.
    unsafe {
        for (index, at) in (0..whole).step_by(LANES).enumerate() {
            let a: V = widened(a.add(at));
            sums[index % 4] = a.fused(widened(b.add(at)), sums[index % 4]);
        }
        let rest: f32 = (whole..k).map(|at| (*a.add(at)).to_f32() * (*b.add(at)).to_f32()).sum();
        sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum() + rest
    }
}
