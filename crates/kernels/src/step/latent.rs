//! Computes the latent attention of a step, see [`crate::latent`].

use std::mem::MaybeUninit;

use super::{Attends, Step, Stream, Token};
use crate::attention::{Scratch, Unit};
use crate::element::Element;
use crate::latent::{Latent, NORM_EPS, turn};
use crate::layer::Layer;
use crate::math;
use crate::matmul::{Arranged, Out, Rows, block_of, multiply_piece};
use crate::team::{FEW, Member, Queue};
use crate::tile::{Kernel, MAX_BLOCK_ROWS, MAX_ROWS, NR, Outputs, tile_height};

impl<E: Element> Step<'_, E> {
    /// Normalises the low-rank queries of all tokens. For few rows, each member computes its own
    /// copy; for more, its share, as in [`Step::normalise`]. Low-rank queries are the leading
    /// outputs of the layer's first projection, which has `stride` outputs.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the layer's first projection must be
    /// done.
    #[inline(always)]
    pub(super) unsafe fn normalise_low<K: Kernel<E>>(
        &self,
        (norm, stride): (&[f32], usize),
        member: &Member<'_>,
    ) -> Rows<E> {
        let (rank, count) = (norm.len(), self.tokens.len());
        let own = if count <= FEW { member.index * FEW * rank } else { 0 };
        // SAFETY: the low-rank queries are this member's copy or share; no member writes the
        // outputs at the same time.
        unsafe {
            let to = self.latent.low.add(own);
            let rows = Rows { first: to.cast_const(), count };
            for row in rows.of_tiles::<K>(self.tiles::<K>(member, rows)) {
                let from = std::slice::from_raw_parts(self.qkv.add(row * stride), rank);
                let to = std::slice::from_raw_parts_mut(to.add(row * rank), rank);
                math::rms_norm::<E, K>(from, norm, NORM_EPS, to);
            }
            rows
        }
    }

    /// Writes the latent rows of this member's share of the tokens to their pages. They are the
    /// last outputs of the layer's first projection. Other members may read them after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the layer's first projection must be
    /// done.
    #[inline(always)]
    pub(super) unsafe fn keep_rows<K: Kernel<E>>(
        &self,
        (layer, latent, attends): (&Layer<E>, &Latent, &Attends<'_>),
        member: &Member<'_>,
    ) {
        let shape = &attends.shape;
        let (dim, rank, stride) = (shape.head_dim, latent.sizes.rank, layer.projected);
        // SAFETY: the tokens belong to this member; no other member writes their entries.
        unsafe {
            let scratch = &mut *self.scratch.add(member.index);
            for token in member.share(self.tokens.len()) {
                let Token { position, entries, .. } = self.tokens[token];
                let from = self.qkv.add((token + 1) * stride - dim);
                let (from, shared) = std::slice::from_raw_parts(from, dim).split_at(rank);
                let (row, turned) = scratch.head[..dim].split_at_mut(rank);
                let factor = math::rms_factor::<K::Vector>(from, NORM_EPS);
                for ((to, from), weight) in row.iter_mut().zip(from).zip(&latent.row_norm) {
                    *to = from * factor * weight;
                }
                let angles = attends.angles(position);
                turn::<K::Vector>(shared, latent.sizes.interleaved, angles, turned);
                let (row, narrow) = (&scratch.head[..dim], &mut scratch.queries[..dim]);
                layer.pool.keep_row::<K>(shape, entries[attends.part], row, narrow);
            }
        }
    }

    /// Returns a token's query of one head, `[nope_dim + shared]`, before it is mapped to the
    /// latent space.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the projection of queries must be done.
    #[inline(always)]
    unsafe fn queries_of(
        &self,
        (layer, latent): (&Layer<E>, &Latent),
        (token, head): (usize, usize),
    ) -> &[f32] {
        let width = latent.sizes.nope_dim + latent.shared;
        let (first, stride) = match &latent.query {
            Some(_) => (self.latent.queries, latent.heads * width),
            None => (self.qkv, layer.projected),
        };
        // SAFETY: the caller upholds the contract.
        unsafe {
            let first = first.add(token * stride + head * width).cast_const();
            std::slice::from_raw_parts(first, width)
        }
    }

    /// Computes the per-head products. If `brought` is false, they map the queries of `count`
    /// tokens to the latent space. Otherwise they compute values from the attention results of
    /// `count` rows. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold. The projection of queries must be done, or,
    /// with `brought`, the attention.
    #[inline(always)]
    pub(super) unsafe fn multiply_heads<K: Kernel<E>>(
        &self,
        (layer, latent, brought): (&Layer<E>, &Latent, bool),
        count: usize,
        (queue, member): (&Queue, &Member<'_>),
    ) {
        let stack = if brought { &latent.values } else { &latent.keys };
        let (heads, inputs) = (latent.heads, stack.inputs);
        let height = tile_height(count, K::ROWS);
        let tiles = count.div_ceil(height.max(1));
        let numbers = self.arranged.cast::<K::Number>();
        // SAFETY: the gather buffer and the share of rows belong to this member. A barrier passes
        // before the rows are read.
        unsafe {
            let own = member.index * MAX_ROWS * latent.sizes.rank.max(latent.sizes.nope_dim);
            let gathered = self.latent.gathered.add(own);
            for piece in member.share(heads * tiles) {
                let (head, first) = (piece / tiles, piece % tiles * height);
                let rows = height.min(count - first);
                for place in 0..rows {
                    let row = first + place;
                    let to = std::slice::from_raw_parts_mut(gathered.add(place * inputs), inputs);
                    if brought {
                        let from = self.attended.add((row * heads + head) * inputs).cast_const();
                        to.copy_from_slice(std::slice::from_raw_parts(from, inputs));
                    } else {
                        let from = self.queries_of((layer, latent), (row, head));
                        math::narrow::<E, K>(&from[..inputs], to);
                    }
                }
                let to = numbers.add((head * count + first) * inputs);
                K::arrange(gathered.cast_const(), rows, inputs, to);
            }
        }
        member.meet();
        let panels = stack.outputs.div_ceil(NR);
        let of_head = panels * count.div_ceil(block_of::<E, K>(height));
        let mut sums = [const { MaybeUninit::<Outputs>::uninit() }; MAX_BLOCK_ROWS];
        loop {
            let mine = queue.take(heads * of_head, member.members);
            if mine.is_empty() {
                break;
            }
            for piece in mine {
                let (head, piece) = (piece / of_head, piece % of_head);
                let which = (piece / panels, piece % panels);
                // SAFETY: accesses stay inside the rows of this head and their results.
                unsafe {
                    let numbers = numbers.add(head * count * inputs).cast_const();
                    let rows = Arranged::of::<E, K>(numbers, count);
                    let out = Out::Store(self.latent.made.add(head * count * stack.outputs));
                    multiply_piece::<E, K>(rows, which, &stack.of::<E>(head), out, &mut sums);
                }
            }
        }
        member.meet();
    }

    /// Copies a unit's queries into the scratch, mapped to the latent space and rotated.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and [`Self::multiply_heads`] must have mapped
    /// the queries.
    #[inline(always)]
    pub(super) unsafe fn bring_queries<K: Kernel<E>>(
        &self,
        (layer, latent, attends): (&Layer<E>, &Latent, &Attends<'_>),
        unit: &Unit,
        scratch: &mut Scratch<E>,
    ) {
        let (dim, rank, nope) = (attends.shape.head_dim, latent.sizes.rank, latent.sizes.nope_dim);
        let group = attends.shape.group();
        let first = unit.queries.held.kv_head * group;
        for index in 0..unit.queries.tokens {
            let token = unit.queries.token + index;
            let position = self.tokens[token].position;
            let angles = attends.angles(position);
            let scale = attends.query_scales.get(position).copied().unwrap_or(1.0);
            for head in 0..group {
                // SAFETY: the queries belong to this unit; other members only read them.
                unsafe {
                    let of = first + head;
                    let brought = self.latent.made.add((of * self.tokens.len() + token) * rank);
                    let brought = std::slice::from_raw_parts(brought.cast_const(), rank);
                    let rest = &self.queries_of((layer, latent), (token, of))[nope..];
                    let query = &mut scratch.head[..dim];
                    query[..rank].copy_from_slice(brought);
                    let interleaved = latent.sizes.interleaved;
                    turn::<K::Vector>(rest, interleaved, angles, &mut query[rank..]);
                    if scale != 1.0 {
                        query.iter_mut().for_each(|x| *x *= scale);
                    }
                    let to = &mut scratch.queries[(index * group + head) * dim..][..dim];
                    math::narrow::<E, K>(query, to);
                }
            }
        }
    }

    /// Copies the values of all heads of a row next to each other, in the layout that the layer's
    /// last projection reads. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and [`Self::multiply_heads`] must have
    /// computed the values.
    #[inline(always)]
    pub(super) unsafe fn gather_heads<K: Kernel<E>>(
        &self,
        latent: &Latent,
        stream: Stream,
        member: &Member<'_>,
    ) {
        let (heads, width) = (latent.heads, latent.sizes.value_dim);
        for row in member.share(stream.count) {
            for head in 0..heads {
                // SAFETY: reads stay inside a head's values. The row of `attended` belongs to this
                // member. Its old content is no longer needed, because it was already arranged.
                unsafe {
                    let from = self.latent.made.add((head * stream.count + row) * width);
                    let from = std::slice::from_raw_parts(from.cast_const(), width);
                    let to = self.attended.add((row * heads + head) * width);
                    math::narrow::<E, K>(from, std::slice::from_raw_parts_mut(to, width));
                }
            }
        }
        member.meet();
    }
}
