//! One batch of an encoder, computed by all members of a team together.

use std::ops::Range;

use super::weights::BertActivation;
use crate::attention::{self, Scratch, Unit};
use crate::codes::{CodesRoom, encode};
use crate::dispatch::Work;
use crate::dots::Dots;
use crate::element::Element;
use crate::math;
use crate::matmul::{Matrix, Out, Rows, arrange, multiply, multiply_codes};
use crate::pages::{Pool, Shape};
use crate::team::{Member, Queue};
use crate::tile::Kernel;

/// Queues per layer: four products and the attention.
pub(super) const QUEUES_A_LAYER: usize = 5;

/// Weights and biases of a layer normalisation.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(super) weight: &'a [f32],
    pub(super) bias: &'a [f32],
}

/// One layer.
pub(crate) struct Layer<'a, E> {
    pub(super) qkv: Matrix<'a, E>,
    pub(super) output: Matrix<'a, E>,
    pub(super) attention_norm: Norm<'a>,
    pub(super) up: Matrix<'a, E>,
    pub(super) down: Matrix<'a, E>,
    pub(super) output_norm: Norm<'a>,
}

/// The layers that compute a score from each vector.
pub(crate) struct Score<'a, E> {
    pub(super) pooler: Matrix<'a, E>,
    pub(super) classifier: Matrix<'a, E>,
}

/// A token's rows in the three embedding tables.
#[derive(Clone, Copy)]
pub(crate) struct Token<E> {
    pub(super) word: *const E,
    pub(super) place: *const E,
    pub(super) text: *const E,
    /// The pool entry of its keys and values.
    pub(super) entry: usize,
}

/// A batch, in the form that all members share. Between two barriers, each member writes its own
/// part of the buffers.
pub(crate) struct Pass<'a, E> {
    /// States `[tokens, hidden]`.
    pub(super) x: *mut f32,
    /// The first state, or the mean, of each prompt: `[prompts, hidden]`.
    pub(super) pooled: *mut f32,
    /// Normalised states, converted to elements.
    pub(super) normed: *mut E,
    /// Queries, keys and values `[tokens, 3 * hidden]`, and later `[tokens, intermediate]`.
    pub(super) wide: *mut f32,
    pub(super) attended: *mut E,
    pub(super) activated: *mut E,
    /// Arranged rows, in numbers of the kernel's type.
    pub(super) arranged: *mut f32,
    /// Rows as codes, for quantised matrices.
    pub(super) codes: CodesRoom,
    pub(super) scratch: *mut Scratch<E>,
    pub(super) vectors: *mut f32,
    pub(super) pool: Pool<E>,
    pub(super) tokens: &'a [Token<E>],
    /// The first token of each prompt, and the end of the last prompt.
    pub(super) starts: &'a [usize],
    pub(super) attention: attention::Shared<'a>,
    pub(super) last_attention: attention::Shared<'a>,
    pub(super) queues: &'a [Queue],
    pub(super) shape: Shape,
    pub(super) hidden: usize,
    pub(super) eps: f32,
    pub(super) activation: BertActivation,
    /// True if a prompt's vector is its first state; false if it is the mean of its states.
    pub(super) first: bool,
    pub(super) norm: Norm<'a>,
    pub(super) layers: &'a [Layer<'a, E>],
    pub(super) score: Option<Score<'a, E>>,
}

// SAFETY: no two members write the same memory at the same time, see `compute`.
unsafe impl<E> Sync for Pass<'_, E> {}

/// A buffer of states `[count, hidden]`.
#[derive(Clone, Copy)]
struct Stream {
    x: *mut f32,
    count: usize,
}

/// The range of rows that a member prepares for a product and arranges later.
#[inline(always)]
fn own<E: Element, K: Kernel<E>>(member: &Member<'_>, rows: Rows<E>) -> Range<usize> {
    rows.of_tiles::<K>(member.share(rows.tiles::<K>()))
}

/// A batch, and a member that computes its share of the batch.
impl<E: Element> Work<E> for (&Pass<'_, E>, &Member<'_>) {
    #[inline(always)]
    unsafe fn compute<K: Kernel<E>, D: Dots>(self) {
        // SAFETY: the caller upholds the contract.
        unsafe { self.0.compute::<K, D>(self.1) }
    }
}

impl<E: Element> Pass<'_, E> {
    /// Computes one member's share of the batch.
    ///
    /// # Safety
    /// Each member of the team must call it once, and the processor must support `K` and `D`.
    #[inline(always)]
    pub(crate) unsafe fn compute<K: Kernel<E>, D: Dots>(&self, member: &Member<'_>) {
        let prompts = self.starts.len() - 1;
        // SAFETY: between barriers, members write only their own share, or work that they took from
        // a queue.
        unsafe {
            let stream = self.layers::<K, D>(member);
            member.meet();
            let to = if self.score.is_some() { self.pooled } else { self.vectors };
            for prompt in member.share(prompts) {
                let to = self.row(Stream { x: to, count: prompts }, prompt);
                if !self.first {
                    self.mean(stream, prompt, to);
                } else if self.score.is_none() {
                    to.copy_from_slice(self.row(stream, prompt));
                }
            }
            member.meet();
            if let Some(score) = &self.score {
                self.score::<K, D>(member, score, prompts);
            }
        }
    }

    /// Computes one member's share of the layers. Returns the states of all tokens, or only of each
    /// prompt's first token.
    #[inline(always)]
    unsafe fn layers<K: Kernel<E>, D: Dots>(&self, member: &Member<'_>) -> Stream {
        let count = self.tokens.len();
        let mut stream = Stream { x: self.x, count };
        // SAFETY: see `compute`.
        unsafe {
            self.embed::<K>(member, stream);
            for (index, layer) in self.layers.iter().enumerate() {
                let queues = &self.queues[index * QUEUES_A_LAYER..][..QUEUES_A_LAYER];
                let normed = Rows { first: self.normed.cast_const(), count };
                self.multiply::<K, D>(
                    (&queues[0], member),
                    normed,
                    &layer.qkv,
                    Out::Store(self.wide),
                );
                self.keep::<K>(member);
                let mut attention = self.attention;
                if index + 1 == self.layers.len() && self.first {
                    // Only the results of first tokens are read.
                    let first = Stream { x: self.pooled, count: self.starts.len() - 1 };
                    for prompt in member.share(first.count) {
                        let from = self.row(stream, self.starts[prompt]);
                        self.row(first, prompt).copy_from_slice(from);
                    }
                    stream = first;
                    attention = self.last_attention;
                }
                member.meet();
                self.attend::<K>(attention, (&queues[1], member));
                member.meet();
                let attended = Rows { first: self.attended.cast_const(), count: stream.count };
                let added = Out::Add(stream.x, 1.0);
                self.multiply::<K, D>((&queues[2], member), attended, &layer.output, added);
                let normed = self.normalise::<K>(member, stream, layer.attention_norm);
                self.multiply::<K, D>(
                    (&queues[3], member),
                    normed,
                    &layer.up,
                    Out::Store(self.wide),
                );
                let inputs = layer.down.inputs;
                let activated = self.activate::<K>(member, stream.count, inputs);
                self.multiply::<K, D>((&queues[4], member), activated, &layer.down, added);
                self.normalise::<K>(member, stream, layer.output_norm);
            }
        }
        stream
    }

    /// Returns a row of a stream.
    ///
    /// # Safety
    /// While this member writes the row, no other member may read or write it. While this member
    /// reads it, no other member may write it.
    #[inline(always)]
    #[expect(
        clippy::mut_from_ref,
        reason = "members share the buffer and each writes its own rows"
    )]
    unsafe fn row(&self, stream: Stream, row: usize) -> &mut [f32] {
        // SAFETY: the row lies inside the stream. For other members see above.
        unsafe { std::slice::from_raw_parts_mut(stream.x.add(row * self.hidden), self.hidden) }
    }

    /// Computes the normalised sums of the tokens' embeddings.
    #[inline(always)]
    unsafe fn embed<K: Kernel<E>>(&self, member: &Member<'_>, stream: Stream) {
        let rows = Rows { first: self.normed.cast_const(), count: stream.count };
        // SAFETY: the tokens point to rows of the embeddings, and only this member writes its rows
        // of the stream.
        unsafe {
            for row in own::<E, K>(member, rows) {
                let Token { word, place, text, .. } = self.tokens[row];
                for (at, to) in self.row(stream, row).iter_mut().enumerate() {
                    let (word, place) = ((*word.add(at)).to_f32(), (*place.add(at)).to_f32());
                    *to = word + place + (*text.add(at)).to_f32();
                }
            }
            self.normalise::<K>(member, stream, self.norm);
        }
    }

    /// Normalises the states and converts them to elements, for the rows that [`Self::multiply`]
    /// assigns to this member.
    #[inline(always)]
    unsafe fn normalise<K: Kernel<E>>(
        &self,
        member: &Member<'_>,
        stream: Stream,
        norm: Norm<'_>,
    ) -> Rows<E> {
        let rows = Rows { first: self.normed.cast_const(), count: stream.count };
        for row in own::<E, K>(member, rows) {
            // SAFETY: these are this member's rows of both buffers.
            unsafe {
                let to = self.normed.add(row * self.hidden);
                let to = std::slice::from_raw_parts_mut(to, self.hidden);
                let scales = (norm.weight, norm.bias);
                math::layer_norm::<E, K>(self.row(stream, row), scales, self.eps, to);
            }
        }
        rows
    }

    /// Activates the output `[count, width]` of the up projection, for this member's rows, as in
    /// [`Self::normalise`].
    #[inline(always)]
    unsafe fn activate<K: Kernel<E>>(
        &self,
        member: &Member<'_>,
        count: usize,
        width: usize,
    ) -> Rows<E> {
        let rows = Rows { first: self.activated.cast_const(), count };
        let mine = own::<E, K>(member, rows);
        let (at, length) = (mine.start * width, mine.len() * width);
        // SAFETY: these are this member's rows of both buffers.
        let (from, to) = unsafe {
            (
                std::slice::from_raw_parts(self.wide.add(at), length),
                std::slice::from_raw_parts_mut(self.activated.add(at), length),
            )
        };
        match self.activation {
            BertActivation::Gelu => math::each::<E, K, math::Gelu>(from, to),
            BertActivation::GeluTanh => math::each::<E, K, math::GeluTanh>(from, to),
            BertActivation::Relu => math::each::<E, K, math::Relu>(from, to),
        }
        rows
    }

    /// Computes a product. Before the call, each member must have prepared its own rows, or all
    /// members must have passed a barrier since the preparation. The function ends with a barrier.
    #[inline(always)]
    unsafe fn multiply<K: Kernel<E>, D: Dots>(
        &self,
        (queue, member): (&Queue, &Member<'_>),
        rows: Rows<E>,
        matrix: &Matrix<'_, E>,
        out: Out<E>,
    ) {
        let tiles = member.share(rows.tiles::<K>());
        let (queue, inputs) = ((queue, member.members), matrix.inputs);
        // SAFETY: this member writes only its share of the arranged rows or codes. All readers of
        // an earlier product's rows have passed a barrier.
        unsafe {
            if let Some(format) = matrix.format {
                let shared = format.shared(inputs);
                for row in rows.of_tiles::<K>(tiles) {
                    let (from, to) = (rows.first.add(row * inputs), &self.codes);
                    encode::<E, K::Vector>(from, inputs, shared, to.from(row, inputs, shared));
                }
                member.meet();
                let codes = self.codes.filled(rows.count);
                multiply_codes::<E, K, D>(queue, codes, (matrix, format), out);
            } else {
                let rows = arrange::<E, K>(rows, inputs, tiles, self.arranged.cast());
                member.meet();
                multiply::<E, K>(queue, rows, matrix, out);
            }
        }
        member.meet();
    }

    /// Writes the keys and values of this member's tokens to their pages.
    #[inline(always)]
    unsafe fn keep<K: Kernel<E>>(&self, member: &Member<'_>) {
        let Shape { heads, head_dim: dim, .. } = self.shape;
        // SAFETY: no other member uses this scratch.
        let scratch = unsafe { &mut *self.scratch.add(member.index) };
        for token in member.share(self.tokens.len()) {
            for head in 0..heads {
                // SAFETY: the token is in this member's share, so no other member writes its entry.
                unsafe {
                    let from = self.wide.add(token * 3 * self.hidden + head * dim);
                    let key = std::slice::from_raw_parts(from.add(self.hidden), dim);
                    let value = std::slice::from_raw_parts(from.add(2 * self.hidden), dim);
                    // Borrows the buffer of the queries, which has room for more than two heads.
                    let (narrow_key, rest) = scratch.queries.split_at_mut(dim);
                    math::narrow::<E, K>(key, narrow_key);
                    math::narrow::<E, K>(value, &mut rest[..dim]);
                    let entry = (self.tokens[token].entry, head);
                    self.pool.keep(&self.shape, entry, narrow_key, &rest[..dim]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn attend<K: Kernel<E>>(
        &self,
        shared: attention::Shared<'_>,
        (queue, member): (&Queue, &Member<'_>),
    ) {
        // SAFETY: no other member uses this scratch.
        let scratch = unsafe { &mut *self.scratch.add(member.index) };
        loop {
            let mine = queue.take(shared.units.len(), member.members);
            if mine.is_empty() {
                break;
            }
            for index in mine {
                let units = (&shared.units[index], shared.units.get(index + 1));
                // SAFETY: only this member takes the unit, so no other member writes its results.
                // The unit's pages exist.
                unsafe {
                    self.queries::<K>(units.0, scratch);
                    let (shape, out) = (&self.shape, self.attended);
                    attention::attend::<E, K>(shape, shared, units, (self.pool, &[]), out, scratch);
                }
            }
        }
    }

    /// Copies a unit's queries into the scratch.
    #[inline(always)]
    unsafe fn queries<K: Kernel<E>>(&self, unit: &Unit, scratch: &mut Scratch<E>) {
        let dim = self.shape.head_dim;
        let rows = scratch.queries.chunks_exact_mut(dim).take(unit.queries.tokens);
        for (token, to) in (unit.queries.token..).zip(rows) {
            // SAFETY: no member writes the queries now.
            let from = unsafe {
                let from = self.wide.add(token * 3 * self.hidden + unit.queries.held.kv_head * dim);
                std::slice::from_raw_parts(from, dim)
            };
            math::narrow::<E, K>(from, to);
        }
    }

    /// Computes the mean of a prompt's states.
    #[inline(always)]
    unsafe fn mean(&self, stream: Stream, prompt: usize, to: &mut [f32]) {
        let tokens = self.starts[prompt]..self.starts[prompt + 1];
        let count = tokens.len() as f32;
        to.fill(0.0);
        for token in tokens {
            // SAFETY: no member writes the states now.
            let from = unsafe { self.row(stream, token) };
            for (to, &mut from) in to.iter_mut().zip(from) {
                *to += from;
            }
        }
        for to in to {
            *to /= count;
        }
    }

    /// Computes one member's share of the scores from the vectors.
    #[inline(always)]
    unsafe fn score<K: Kernel<E>, D: Dots>(
        &self,
        member: &Member<'_>,
        score: &Score<'_, E>,
        prompts: usize,
    ) {
        let queues = &self.queues[self.layers.len() * QUEUES_A_LAYER..];
        let rows = Rows { first: self.normed.cast_const(), count: prompts };
        let mine = own::<E, K>(member, rows);
        let (at, length) = (mine.start * self.hidden, mine.len() * self.hidden);
        // SAFETY: these are this member's rows. The buffers are large enough, since there are no
        // more prompts than tokens.
        unsafe {
            let normed = std::slice::from_raw_parts_mut(self.normed.add(at), length);
            let pooled = std::slice::from_raw_parts(self.pooled.add(at), length);
            math::narrow::<E, K>(pooled, normed);
            self.multiply::<K, D>((&queues[0], member), rows, &score.pooler, Out::Store(self.wide));
            let wide = std::slice::from_raw_parts(self.wide.add(at), length);
            math::each::<E, K, math::Tanh>(wide, normed);
            let out = Out::Store(self.vectors);
            self.multiply::<K, D>((&queues[1], member), rows, &score.classifier, out);
        }
    }
}
