//! A layer of a decoder, as a step reads it.

use crate::codes::Format;
use crate::element::{Element, widened};
use crate::experts::Mixture;
use crate::matmul::Matrix;
use crate::memory::Room;
use crate::pages::Pool;
use crate::recurrence::Recurrence;
use crate::sizes::Sizes;
use crate::weights::{self, Bytes, FeedForward, Gated};

/// A layer. An empty norm is not there.
pub(crate) struct Layer<E> {
    /// The number of its kind of attention.
    pub(crate) attention: usize,
    pub(crate) parallel: bool,
    pub(crate) input_norm: Vec<f32>,
    pub(crate) attended_norm: Vec<f32>,
    pub(crate) fed_norm: Vec<f32>,
    pub(crate) sinks: Vec<f32>,
    pub(crate) qkv: Owned,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) output: Owned,
    pub(crate) post_norm: Vec<f32>,
    pub(crate) mixture: Option<Mixture>,
    /// The dense part for all tokens: beside experts, or in place of them.
    pub(crate) feed: Option<[Owned; 2]>,
    pub(crate) pool: Pool<E>,
    /// What the layer has in place of attention; `None`: it attends.
    pub(crate) recurrence: Option<Recurrence>,
    /// True if it reads the keys and values of another layer, and has none of its own.
    pub(crate) reads_others: bool,
    /// What it does with its own input; `None`: it has none.
    pub(crate) input: Option<OwnInput>,
    /// The factor of its output.
    pub(crate) factor: f32,
}

/// What a layer does with its own input.
pub(crate) struct OwnInput {
    pub(crate) gate: Owned,
    pub(crate) output: Owned,
    pub(crate) norm: Vec<f32>,
}

/// A product that makes gates, and one whose output is added to the stream.
#[derive(Clone, Copy)]
pub(crate) struct GatedPart<'a> {
    /// Gates with what they gate, or the gates of the layer's own input.
    pub(crate) gates: &'a Owned,
    pub(crate) output: &'a Owned,
    /// The norm of the output; empty: there is none.
    pub(crate) norm: &'a [f32],
    /// The factor of the stream once the output was added.
    pub(crate) factor: f32,
    /// True if the layer's own input is gated.
    pub(crate) of_input: bool,
}

impl<E: Element> Layer<E> {
    /// A layer whose keys and values lie in `pool`, and whose states lie in `states`. It does not
    /// keep them alive.
    pub(crate) fn new(
        of: &weights::Layer,
        sizes: &Sizes,
        pool: Pool<E>,
        states: &mut [Room; 2],
    ) -> Self {
        let hidden = sizes.hidden;
        let (projected, mixed) = of.widths(sizes);
        let norm = |norm: &Bytes| sizes.read_norm::<E>(norm);
        let optional = |it: &Option<Bytes>| it.as_ref().map(norm).unwrap_or_default();
        let feed = |it: &Gated| {
            let inner = it.inner;
            [
                Owned::new::<E>(&it.gate_up, (2 * inner, hidden), it.gate_up_bias.as_ref()),
                Owned::new::<E>(&it.down, (hidden, inner), it.down_bias.as_ref()),
            ]
        };
        let (feed, mixture) = match &of.feed {
            FeedForward::Dense(dense) => (Some(feed(dense)), None),
            FeedForward::Experts(experts) => {
                (experts.shared.as_ref().map(feed), Mixture::new::<E>(experts, sizes))
            }
        };
        let inner = sizes.layer_inputs.map_or(0, |of| of.size);
        let input = of.inputs.as_ref().map(|it| OwnInput {
            gate: Owned::new::<E>(&it.gate, (inner, hidden), None),
            output: Owned::new::<E>(&it.output, (hidden, inner), None),
            norm: norm(&it.norm),
        });
        let factor = of.factor.as_ref().and_then(|it| widened::<E>(it).first().copied());
        Self {
            attention: of.attention,
            parallel: of.parallel,
            input_norm: optional(&of.input_norm),
            attended_norm: optional(&of.attended_norm),
            fed_norm: optional(&of.fed_norm),
            sinks: of.sinks.as_ref().map(|it| widened::<E>(it)).unwrap_or_default(),
            qkv: Owned::new::<E>(&of.qkv, (projected, hidden), of.qkv_bias.as_ref()),
            qk_norm: of.head_norms.as_ref().map(|(q, k)| (norm(q), optional(k))),
            output: Owned::new::<E>(&of.output, (hidden, mixed), of.output_bias.as_ref()),
            post_norm: optional(&of.post_norm),
            mixture,
            feed,
            pool,
            recurrence: of.recurrence.as_ref().map(|it| Recurrence::new::<E>(it, states)),
            reads_others: of.keys_of.is_some(),
            input,
            factor: factor.unwrap_or(1.0),
        }
    }

    /// The part behind the attention that all tokens have, and that of the layer's own input.
    #[inline]
    pub(crate) fn gated_parts(&self) -> [Option<GatedPart<'_>>; 2] {
        let factor = if self.input.is_some() { 1.0 } else { self.factor };
        let feed = self.feed.as_ref().map(|[gates, output]| {
            let norm = &self.fed_norm[..];
            GatedPart { gates, output, norm, factor, of_input: false }
        });
        let input = self.input.as_ref().map(|OwnInput { gate, output, norm }| GatedPart {
            gates: gate,
            output,
            norm,
            factor: self.factor,
            of_input: true,
        });
        [feed, input]
    }

    pub(crate) fn is_quantised(&self) -> bool {
        [&self.qkv, &self.output]
            .into_iter()
            .chain(self.feed.iter().flatten())
            .chain(self.input.iter().flat_map(|it| [&it.gate, &it.output]))
            .any(Owned::is_quantised)
            || self.mixture.as_ref().is_some_and(Mixture::is_quantised)
    }
}

/// A packed matrix, and its bias.
pub(crate) struct Owned {
    packed: Bytes,
    format: Option<Format>,
    pub(crate) outputs: usize,
    inputs: usize,
    bias: Vec<f32>,
}

impl Owned {
    /// A matrix that was checked to have these outputs and inputs. Biases are of the type `E`.
    pub(crate) fn new<E: Element>(
        matrix: &weights::Matrix,
        (outputs, inputs): (usize, usize),
        bias: Option<&Bytes>,
    ) -> Self {
        let bias = bias.map(|bias| widened::<E>(bias)).unwrap_or_default();
        let format = matrix.storage.format();
        Self { packed: matrix.packed.clone(), format, outputs, inputs, bias }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        self.format.is_some()
    }

    #[inline]
    pub(crate) fn matrix<E>(&self) -> Matrix<'_, E> {
        let Self { packed, format, outputs, inputs, bias } = self;
        let panels = packed.as_ptr().cast();
        Matrix { panels, format: *format, outputs: *outputs, inputs: *inputs, bias }
    }
}
