//! A layer of a decoder, as the computation of a step uses it.

use crate::element::{Element, widened};
use crate::experts::Mixture;
use crate::latent::Latent;
use crate::memory::Room;
use crate::owned::Owned;
use crate::pages::Pool;
use crate::recurrence::Recurrence;
use crate::sizes::Sizes;
use crate::weights::{self, Bytes, DenseMatrices, FeedForward};

/// A layer. An empty norm means that the layer lacks it.
pub(crate) struct Layer<E> {
    /// The index of its kind of attention.
    pub(crate) attention: usize,
    pub(crate) parallel: bool,
    pub(crate) input_norm: Vec<f32>,
    attended_norm: Vec<f32>,
    fed_norm: Vec<f32>,
    pub(crate) sinks: Vec<f32>,
    /// The input and output projections of the layer's mixer of positions (attention or
    /// recurrence). `None` if the layer has no mixer.
    mixer: Option<[Owned; 2]>,
    /// The number of outputs of the mixer's input projection.
    pub(crate) projected: usize,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    post_norm: Vec<f32>,
    pub(crate) mixture: Option<Mixture>,
    /// The projections of the dense network, whether there are experts beside it or not.
    feed: Option<[Owned; 2]>,
    pub(crate) pool: Pool<E>,
    /// The recurrence in place of attention. `None` if the layer has attention, or no mixer.
    recurrence: Option<Recurrence>,
    /// A recurrence beside the attention, with its input and output projections.
    beside: Option<(Recurrence, [Owned; 2])>,
    /// The additional weights of latent attention. `None` if heads have their own keys and values.
    pub(crate) latent: Option<Latent>,
    /// True if the layer reads the keys and values of another layer and stores none itself.
    pub(crate) reads_others: bool,
    /// The component that reads the per-layer input ([`OwnInput`]). `None` if the layer has no such
    /// input.
    input: Option<OwnInput>,
    /// The factor of the layer's output.
    factor: f32,
}

/// The weights that process the per-layer input: the input that each layer of Gemma 3n and Gemma 4
/// has in addition to the hidden states.
struct OwnInput {
    products: [Owned; 2],
    norm: Vec<f32>,
}

/// A mixer of positions in a layer (attention or recurrence), with the projections around it.
#[derive(Clone, Copy)]
pub(crate) struct MixerPart<'a> {
    /// The norm of the mixer's input, which may be empty. `None` if the mixer reads the same
    /// normalised input as the previous component.
    pub(crate) before: Option<&'a [f32]>,
    pub(crate) input: &'a Owned,
    /// `None` if the mixer is attention.
    pub(crate) recurrence: Option<&'a Recurrence>,
    /// `None` if heads have their own keys and values.
    pub(crate) latent: Option<&'a Latent>,
    pub(crate) output: &'a Owned,
    /// The norm of the output; empty if there is none.
    pub(crate) norm: &'a [f32],
    /// Indices of this part's queues among the layer's queues: for both projections, and for the
    /// work between the projections.
    pub(crate) queues: [usize; 3],
}

/// A component of a layer that processes each token by itself.
#[derive(Clone, Copy)]
pub(crate) struct FeedPart<'a> {
    /// The norm of the input, as in [`MixerPart`].
    pub(crate) before: Option<&'a [f32]>,
    pub(crate) kind: FeedKind<'a>,
    /// The projections before and after the computation `kind`. The second projection's result is
    /// added to the residual stream. `None` if experts read the normalised input and add their
    /// outputs themselves.
    pub(crate) products: Option<&'a [Owned; 2]>,
    /// The norm of the output; empty if there is none.
    pub(crate) norm: &'a [f32],
    /// The factor of the residual stream after the output is added.
    pub(crate) factor: f32,
    /// Indices of the projections' queues among the layer's queues.
    pub(crate) queues: [usize; 2],
}

/// The computation between the projections of a [`FeedPart`].
#[derive(Clone, Copy)]
pub(crate) enum FeedKind<'a> {
    /// Routed experts.
    Experts(&'a Mixture),
    /// An activation.
    Dense,
    /// A gate for the per-layer input.
    Input,
}

impl<E: Element> Layer<E> {
    /// Creates a layer whose keys and values are in `pool`, and whose states are in `states`. The
    /// layer does not keep this memory alive.
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
        let feed = |it: &DenseMatrices| {
            let (inner, first) = (it.inner, sizes.fed(it.inner));
            [
                Owned::new::<E>(&it.gate_up, (first, hidden), it.gate_up_bias.as_ref()),
                Owned::new::<E>(&it.down, (hidden, inner), it.down_bias.as_ref()),
            ]
        };
        let (feed, mixture) = match &of.feed {
            Some(FeedForward::Dense(dense)) => (Some(feed(dense)), None),
            Some(FeedForward::Experts(experts)) => {
                (experts.shared.as_ref().map(feed), Mixture::new::<E>(experts, sizes))
            }
            None => (None, None),
        };
        let inner = sizes.layer_inputs.map_or(0, |of| of.size);
        let input = of.inputs.as_ref().map(|it| OwnInput {
            products: [
                Owned::new::<E>(&it.gate, (inner, hidden), None),
                Owned::new::<E>(&it.output, (hidden, inner), None),
            ],
            norm: norm(&it.norm),
        });
        let mixer = of.qkv.as_ref().zip(of.output.as_ref()).map(|(qkv, output)| {
            [
                Owned::new::<E>(qkv, (projected, hidden), of.qkv_bias.as_ref()),
                Owned::new::<E>(output, (hidden, mixed), of.output_bias.as_ref()),
            ]
        });
        let beside = of.beside.as_ref().map(|it| {
            let (projected, values) = it.recurrence.sizes.widths();
            let products = [
                Owned::new::<E>(&it.input, (projected, hidden), it.input_bias.as_ref()),
                Owned::new::<E>(&it.output, (hidden, values), it.output_bias.as_ref()),
            ];
            (Recurrence::new::<E>(&it.recurrence, states), products)
        });
        let factor = of.factor.as_ref().and_then(|it| widened::<E>(it).first().copied());
        Self {
            attention: of.attention,
            parallel: of.parallel,
            input_norm: optional(&of.input_norm),
            attended_norm: optional(&of.attended_norm),
            fed_norm: optional(&of.fed_norm),
            sinks: of.sinks.as_ref().map(|it| widened::<E>(it)).unwrap_or_default(),
            mixer,
            projected,
            qk_norm: of.head_norms.as_ref().map(|(q, k)| (norm(q), optional(k))),
            post_norm: optional(&of.post_norm),
            mixture,
            feed,
            pool,
            recurrence: of.recurrence.as_ref().map(|it| Recurrence::new::<E>(it, states)),
            beside,
            latent: of.latent.as_ref().and_then(|it| Latent::new::<E>(it, of.attention, sizes)),
            reads_others: of.keys_of.is_some(),
            input,
            factor: factor.unwrap_or(1.0),
        }
    }

    /// The mixers of positions, in order. All of them read the same states.
    #[inline]
    pub(crate) fn mixers(&self) -> [Option<MixerPart<'_>>; 2] {
        let own = self.mixer.as_ref().map(|[input, output]| MixerPart {
            before: Some(&self.input_norm),
            input,
            recurrence: self.recurrence.as_ref(),
            latent: self.latent.as_ref(),
            output,
            norm: &self.attended_norm,
            queues: [0, 1, 4],
        });
        let beside = self.beside.as_ref().map(|(recurrence, [input, output])| MixerPart {
            before: None,
            input,
            recurrence: Some(recurrence),
            latent: None,
            output,
            norm: &[],
            queues: [9, 10, 11],
        });
        [own, beside]
    }

    /// The components after the mixers, in order: the experts, the dense network, and the component
    /// that reads the per-layer input.
    #[inline]
    pub(crate) fn feeds(&self) -> [Option<FeedPart<'_>>; 3] {
        // With parallel components, the residual stream is already normalised.
        let post_norm = (!self.parallel).then_some(&self.post_norm[..]);
        let beside = self.mixture.as_ref().and_then(|mixture| mixture.beside.as_ref());
        let experts = self.mixture.as_ref().map(|mixture| FeedPart {
            before: beside.map_or(post_norm, |beside| Some(&beside.router[..])),
            kind: FeedKind::Experts(mixture),
            products: mixture.latent.as_ref(),
            norm: &[],
            factor: 1.0,
            queues: [12, 13],
        });
        let reads_alike = experts.is_some() && beside.is_none();
        let dense = self.feed.as_ref().map(|products| FeedPart {
            before: post_norm.filter(|_| !reads_alike),
            kind: FeedKind::Dense,
            products: Some(products),
            norm: &self.fed_norm,
            factor: if self.input.is_some() { 1.0 } else { self.factor },
            queues: [2, 3],
        });
        let input = self.input.as_ref().map(|OwnInput { products, norm }| FeedPart {
            before: Some(&[]),
            kind: FeedKind::Input,
            products: Some(products),
            norm,
            factor: self.factor,
            queues: [7, 8],
        });
        [experts, dense, input]
    }

    /// The layer's recurrence, whether in place of attention or beside it.
    pub(crate) fn recurrence(&self) -> Option<&Recurrence> {
        self.mixers().into_iter().flatten().find_map(|part| part.recurrence)
    }

    /// The number of outputs of the mixers' widest input projection; 0 if there is no mixer.
    pub(crate) fn widest(&self) -> usize {
        let widths = self.mixers().into_iter().flatten().map(|part| part.input.outputs);
        widths.max().unwrap_or(0)
    }

    /// The number of inputs of the mixers' widest product, without the products that read the
    /// residual stream; 0 if there is no mixer.
    pub(crate) fn widest_input(&self) -> usize {
        let mixers = self.mixers().into_iter().flatten();
        let low = mixers.clone().filter_map(|part| part.recurrence?.low.as_ref()).flatten();
        let queries = self.latent.iter().filter_map(Latent::query_matrix);
        let outputs = mixers.map(|part| part.output);
        outputs.chain(low).chain(queries).map(|matrix| matrix.inputs).max().unwrap_or(0)
    }

    /// True if the output of any component is normalised.
    pub(crate) fn keeps_parts(&self) -> bool {
        let norms = self.mixers().map(|part| part.map_or(&[][..], |part| part.norm));
        let behind = self.feeds().map(|part| part.map_or(&[][..], |part| part.norm));
        norms.iter().chain(&behind).any(|norm| !norm.is_empty())
    }

    pub(crate) fn is_quantised(&self) -> bool {
        let mixers = self.mixers().into_iter().flatten();
        let mixers = mixers.flat_map(|part| [part.input, part.output]);
        let feeds = self.feeds().into_iter().flatten().filter_map(|part| part.products).flatten();
        let low = self.recurrence().and_then(|it| it.low.as_ref()).into_iter().flatten();
        let queries = self.latent.iter().filter_map(Latent::query_matrix);
        mixers.chain(feeds).chain(low).chain(queries).any(Owned::is_quantised)
            || self.mixture.as_ref().is_some_and(Mixture::is_quantised)
    }
}
