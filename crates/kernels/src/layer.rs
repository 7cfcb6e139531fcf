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
}

impl<E: Element> Layer<E> {
    /// A layer whose keys and values lie in `pages`, and whose states lie in `states`. It does not
    /// keep them alive.
    pub(crate) fn new(
        of: &weights::Layer,
        sizes: &Sizes,
        [keys, values]: &mut [Room; 2],
        states: &mut [Room; 2],
    ) -> Self {
        let hidden = sizes.hidden;
        let (projected, mixed) = of.widths(sizes);
        let norm = |norm: &Bytes| read_norm::<E>(sizes, norm);
        let optional = |it: &Option<Bytes>| it.as_ref().map(norm).unwrap_or_default();
        let feed = |it: &Gated, inner: usize| {
            [
                Owned::new::<E>(&it.gate_up, (2 * inner, hidden), it.gate_up_bias.as_ref()),
                Owned::new::<E>(&it.down, (hidden, inner), it.down_bias.as_ref()),
            ]
        };
        let (feed, mixture) = match &of.feed {
            FeedForward::Dense(dense) => (Some(feed(dense, sizes.intermediate)), None),
            FeedForward::Experts(experts) => {
                let mixture =
                    sizes.experts.map(|routing| Mixture::new::<E>(experts, routing, hidden));
                let inner = sizes.experts.map_or(0, |of| of.shared);
                (experts.shared.as_ref().map(|shared| feed(shared, inner)), mixture)
            }
        };
        Self {
            attention: of.attention,
            parallel: of.parallel,
            input_norm: optional(&of.input_norm),
            attended_norm: optional(&of.attended_norm),
            fed_norm: optional(&of.fed_norm),
            sinks: of.sinks.as_ref().map(|it| widened::<E>(it)).unwrap_or_default(),
            qkv: Owned::new::<E>(&of.qkv, (projected, hidden), of.qkv_bias.as_ref()),
            qk_norm: of.head_norms.as_ref().map(|(q, k)| (norm(q), norm(k))),
            output: Owned::new::<E>(&of.output, (hidden, mixed), of.output_bias.as_ref()),
            post_norm: optional(&of.post_norm),
            mixture,
            feed,
            pool: Pool { keys: keys.as_mut_ptr().cast(), values: values.as_mut_ptr().cast() },
            recurrence: of.recurrence.as_ref().map(|it| Recurrence::new::<E>(it, states)),
        }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        [&self.qkv, &self.output]
            .into_iter()
            .chain(self.feed.iter().flatten())
            .any(Owned::is_quantised)
            || self.mixture.as_ref().is_some_and(Mixture::is_quantised)
    }
}

/// The numbers of a norm: of the model's type `E`, or float32.
pub(crate) fn read_norm<E: Element>(sizes: &Sizes, norm: &Bytes) -> Vec<f32> {
    if sizes.wide_norms { widened::<f32>(norm) } else { widened::<E>(norm) }
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
