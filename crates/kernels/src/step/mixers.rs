//! The projections at the start of a layer, and then the part of the layer that mixes positions
//! (the mixer).

use super::{LATENT_QUEUES, Step, Stream};
use crate::element::Element;
use crate::layer::{Layer, MixerPart};
use crate::owned::Owned;
use crate::recurrence::Recurrence;
use crate::rows_of_layers::RowsOfLayers;
use crate::team::{Member, Queue};
use crate::tile::Kernel;

/// A computation that begins with a product of the normalised stream.
#[derive(Clone, Copy)]
pub(super) enum First<'a> {
    /// The per-layer inputs of all layers.
    OfLayers(&'a RowsOfLayers),
    /// The mixer of a layer, which mixes positions.
    Mixer(MixerPart<'a>),
    /// The gates (`number` 0) or the decays (1) of the mixer `part`, from their low rank.
    Low { part: MixerPart<'a>, recurrence: &'a Recurrence, matrix: &'a Owned, number: usize },
    /// The queries of the mixer `part` (latent attention), from their normalised low rank.
    Queries { part: MixerPart<'a>, norm: &'a [f32], matrix: &'a Owned },
}

impl<'a> First<'a> {
    /// Returns the products of a mixer, in the order of computation.
    #[inline]
    pub(super) fn of_part(part: Option<MixerPart<'a>>) -> [Option<Self>; 3] {
        let Some(part) = part else { return [None; 3] };
        let queries = part.latent.and_then(|latent| latent.query.as_ref());
        if let Some((norm, matrix)) = queries {
            return [Some(Self::Mixer(part)), Some(Self::Queries { part, norm, matrix }), None];
        }
        let low =
            part.recurrence.and_then(|recurrence| Some((recurrence, recurrence.low.as_ref()?)));
        let low = |number: usize| {
            low.map(|(recurrence, matrices)| Self::Low {
                part,
                recurrence,
                matrix: &matrices[number],
                number,
            })
        };
        [Some(Self::Mixer(part)), low(0), low(1)]
    }
}

impl<E: Element> Step<'_, E> {
    /// Advances the states of all rows, or writes all keys and values to their pages. Returns after
    /// a barrier if other members read these data before the next barrier.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the mixer's input projection must be
    /// done.
    #[inline(always)]
    pub(super) unsafe fn keep_positions<K: Kernel<E>>(
        &self,
        (layer, part): (&Layer<E>, MixerPart<'_>),
        (queues, member): (&[Queue], &Member<'_>),
    ) {
        let attends = &self.attentions[layer.attention];
        // SAFETY: the caller upholds the contract.
        unsafe {
            if let Some(recurrence) = part.recurrence {
                let of = (recurrence, part.input.outputs);
                self.recur::<K>(of, (&queues[part.queues[2]], member));
            } else if let Some(latent) = part.latent {
                // No barrier is needed: these rows are read only after the per-head products, which
                // end with a barrier.
                self.keep_rows::<K>((layer, latent, attends), member);
            } else if !self.decodes && !layer.reads_others {
                let scratch = &mut *self.scratch.add(member.index);
                for token in member.share(self.tokens.len()) {
                    for kv_head in 0..attends.shape.kv_heads {
                        self.keep::<K>((layer, attends), (token, kv_head), scratch);
                    }
                }
                member.meet();
            }
        }
    }

    /// Computes the outputs of the recurrence or attention for the stream's rows. They are the
    /// inputs of the mixer's output projection. Returns after a barrier.
    ///
    /// # Safety
    /// The conditions of [`Self::keep_positions`] must hold, and that function must have been
    /// called.
    #[inline(always)]
    pub(super) unsafe fn mix_positions<K: Kernel<E>>(
        &self,
        (layer, part): (&Layer<E>, MixerPart<'_>),
        stream: Stream,
        (queues, member): (&[Queue], &Member<'_>),
    ) {
        let attends = &self.attentions[layer.attention];
        let stride = part.input.outputs;
        let whole = stream.count == self.tokens.len();
        // SAFETY: the caller upholds the contract.
        unsafe {
            if let Some(recurrence) = part.recurrence {
                self.gate_states::<K>((recurrence, stride), member, stream);
                return;
            }
            let units = if whole { attends.units } else { attends.last_units };
            // A single loop, so that the code of the per-head products is compiled only once.
            let mut brought = false;
            loop {
                if let Some(latent) = part.latent {
                    let rows = if brought { stream.count } else { self.tokens.len() };
                    let queue = &queues[LATENT_QUEUES + if brought { 2 } else { 1 }];
                    self.multiply_heads::<K>((layer, latent, brought), rows, (queue, member));
                    if brought {
                        self.gather_heads::<K>(latent, stream, member);
                        break;
                    }
                }
                self.attend::<K>((layer, attends), units, (&queues[part.queues[2]], member));
                member.meet();
                if part.latent.is_none() {
                    break;
                }
                brought = true;
            }
            if attends.gate {
                let queries = attends.shape.heads * attends.shape.head_dim;
                self.gate_attended::<K>((queries, stride), member, stream);
            }
        }
    }
}
