//! The first products of a layer, and the steps after them in a part that mixes positions.

use super::{LATENT_QUEUES, Step, Stream};
use crate::element::Element;
use crate::layer::{Layer, MixerPart};
use crate::owned::Owned;
use crate::recurrence::Recurrence;
use crate::rows_of_layers::RowsOfLayers;
use crate::team::{Member, Queue};
use crate::tile::Kernel;

/// A piece of work that begins with a product of the normalised stream.
#[derive(Clone, Copy)]
pub(super) enum First<'a> {
    /// The inputs of all layers.
    OfLayers(&'a RowsOfLayers),
    /// A part of a layer that mixes positions.
    Mixer(MixerPart<'a>),
    /// The same part's gates, and then its decays, from their low ranks.
    Low { part: MixerPart<'a>, recurrence: &'a Recurrence, matrix: &'a Owned, number: usize },
    /// The same part's queries of latent attention, from their normalised low rank.
    Queries { part: MixerPart<'a>, norm: &'a [f32], matrix: &'a Owned },
}

impl<'a> First<'a> {
    /// The products of a part, in their order.
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
    /// a barrier.
    ///
    /// # Safety
    /// As for [`Step::compute`]; the part's first product is done.
    #[inline(always)]
    pub(super) unsafe fn keep_positions<K: Kernel<E>>(
        &self,
        (layer, part): (&Layer<E>, MixerPart<'_>),
        (queues, member): (&[Queue], &Member<'_>),
    ) {
        let attends = &self.attentions[layer.attention];
        // SAFETY: the contract.
        unsafe {
            if let Some(recurrence) = part.recurrence {
                let of = (recurrence, part.input.outputs);
                self.recur::<K>(of, (&queues[part.queues[2]], member));
            } else if let Some(latent) = part.latent {
                // These rows are read only after the products of heads, which end with a barrier.
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

    /// Computes the inputs of the second product for the stream's rows: the outputs of states, or
    /// of attention. Returns after a barrier.
    ///
    /// # Safety
    /// As for [`Self::keep_positions`], which is done.
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
        // SAFETY: the contract.
        unsafe {
            if let Some(recurrence) = part.recurrence {
                self.gate_states::<K>((recurrence, stride), member, stream);
                return;
            }
            let units = if whole { attends.units } else { attends.last_units };
            // One loop, so that products of heads are compiled once.
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
