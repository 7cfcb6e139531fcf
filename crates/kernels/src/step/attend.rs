//! Computes the attention of a step.

use super::{Attends, Step, Token};
use crate::attention::{self, Scratch, Unit};
use crate::element::Element;
use crate::layer::Layer;
use crate::math;
use crate::pages::{HeadNorm, Shape, turn};
use crate::team::{Member, Queue};
use crate::tile::Kernel;
use crate::vector::Vector;

impl Attends<'_> {
    /// The cosines and sines of a position's angles.
    #[inline(always)]
    pub(super) fn angles(&self, position: usize) -> (&[f32], &[f32]) {
        let at = position * self.half;
        (&self.cos[at..at + self.half], &self.sin[at..at + self.half])
    }
}

impl<E: Element> Step<'_, E> {
    /// Writes a token's key and value to their page.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and only this member may take the token and
    /// the head.
    #[inline(always)]
    pub(super) unsafe fn keep<K: Kernel<E>>(
        &self,
        (layer, attends): (&Layer<E>, &Attends<'_>),
        (token, kv_head): (usize, usize),
        scratch: &mut Scratch<E>,
    ) {
        let shape = &attends.shape;
        let &Shape { heads, kv_heads, head_dim: dim, .. } = shape;
        let Token { position, entries, .. } = self.tokens[token];
        let entry = entries[attends.part];
        // SAFETY: the token and the head belong to this member; no other member writes the entry.
        unsafe {
            let heads_of = self.qkv.add(token * layer.projected);
            let keys = std::slice::from_raw_parts(heads_of.add(heads * dim), kv_heads * dim);
            let first_value = if attends.keys_are_values { heads } else { heads + kv_heads };
            let value = heads_of.add((first_value + kv_head) * dim);
            let mut value = std::slice::from_raw_parts(value, dim);
            let (key, normed) = scratch.head.split_at_mut(dim);
            key.copy_from_slice(&keys[kv_head * dim..][..dim]);
            if attends.value_norm {
                let factor = math::rms_factor::<K::Vector>(value, self.eps);
                let normed = &mut normed[..dim];
                for (to, from) in normed.iter_mut().zip(value) {
                    *to = from * factor;
                }
                value = normed;
            }
            let weight = layer.qk_norm.as_ref().map(|(_, norm)| norm.as_slice());
            let norm = self.head_norm::<K::Vector>(attends, weight, (keys, kv_head));
            turn::<K::Vector>(key, norm, self.eps, attends.angles(position));
            if shape.coded {
                layer.pool.keep_codes::<K::Vector>(shape, (entry, kv_head), key, value);
                return;
            }
            // Uses the buffer of the queries, which has room for more than two heads.
            let (narrow_key, rest) = scratch.queries.split_at_mut(dim);
            math::narrow::<E, K>(key, narrow_key);
            math::narrow::<E, K>(value, &mut rest[..dim]);
            layer.pool.keep(shape, (entry, kv_head), narrow_key, &rest[..dim]);
        }
    }

    /// Returns the norm of the head with index `head` of queries or keys; `None`: heads are not
    /// normalised. `all` contains all heads of the token.
    #[inline(always)]
    fn head_norm<'w, V: Vector>(
        &self,
        attends: &Attends<'_>,
        weight: Option<&'w [f32]>,
        (all, head): (&[f32], usize),
    ) -> Option<HeadNorm<'w>> {
        let weight = weight?;
        if !attends.norm_rows {
            return Some(HeadNorm { weight, factor: None });
        }
        let dim = attends.shape.head_dim;
        let factor = Some(math::rms_factor::<V>(all, self.eps));
        Some(HeadNorm { weight: &weight[head * dim..][..dim], factor })
    }

    /// Computes this member's share of the attention of a layer.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold, and the layer's first projection must be
    /// done.
    #[inline(always)]
    pub(super) unsafe fn attend<K: Kernel<E>>(
        &self,
        (layer, attends): (&Layer<E>, &Attends<'_>),
        shared: attention::Shared<'_>,
        (queue, member): (&Queue, &Member<'_>),
    ) {
        // SAFETY: the scratch belongs to this member.
        let scratch = unsafe { &mut *self.scratch.add(member.index) };
        loop {
            let mine = queue.take(shared.units.len(), member.members);
            if mine.is_empty() {
                break;
            }
            for index in mine {
                let (unit, then) = (&shared.units[index], shared.units.get(index + 1));
                // SAFETY: only one member takes a unit, and no other member writes the unit's
                // results. The unit's pages were checked.
                unsafe {
                    if let Some(latent) = &layer.latent {
                        // The latent rows are already in their pages.
                        self.bring_queries::<K>((layer, latent, attends), unit, scratch);
                    } else {
                        if self.decodes && unit.sees_itself() && !layer.reads_others {
                            let first = unit.queries.held.kv_head;
                            for kv_head in first..first + unit.heads {
                                let place = (unit.queries.token, kv_head);
                                self.keep::<K>((layer, attends), place, scratch);
                            }
                        }
                        self.turn_queries::<K>((layer, attends), (unit, then), scratch);
                    }
                    let (units, out) = ((unit, then), self.attended);
                    let read = (layer.pool, layer.sinks.as_slice());
                    attention::attend::<E, K>(&attends.shape, shared, units, read, out, scratch);
                }
            }
        }
    }

    /// Copies a unit's queries into the scratch, normalised if the model has such a norm, and
    /// rotated.
    #[inline(always)]
    unsafe fn turn_queries<K: Kernel<E>>(
        &self,
        (layer, attends): (&Layer<E>, &Attends<'_>),
        (unit, then): (&Unit, Option<&Unit>),
        scratch: &mut Scratch<E>,
    ) {
        let shape = &attends.shape;
        let &Shape { heads, head_dim: dim, .. } = shape;
        let group = shape.group();
        let keeps = self.decodes && !layer.reads_others;
        let expected = then.filter(|then| keeps && then.sees_itself());
        let together = unit.heads * group;
        let weight = layer.qk_norm.as_ref().map(|(norm, _)| norm.as_slice());
        for index in 0..unit.queries.tokens {
            let token = unit.queries.token + index;
            // SAFETY: the projection is done, and nothing overwrites its results during attention:
            // each unit copies its queries into its own scratch.
            unsafe {
                let position = self.tokens[token].position;
                let angles = attends.angles(position);
                let scale = attends.query_scales.get(position).copied().unwrap_or(1.0);
                let all = self.qkv.add(token * layer.projected);
                let all = std::slice::from_raw_parts(all, heads * dim);
                let first = unit.queries.held.kv_head * group;
                let mut norm = self.head_norm::<K::Vector>(attends, weight, (all, first));
                for head in 0..together {
                    let at = (first + head) * dim;
                    let query = &mut scratch.head[..dim];
                    query.copy_from_slice(&all[at..][..dim]);
                    if let (Some(norm), Some(weight), true) = (&mut norm, weight, attends.norm_rows)
                    {
                        norm.weight = &weight[at..][..dim];
                    }
                    turn::<K::Vector>(query, norm, self.eps, angles);
                    if scale != 1.0 {
                        query.iter_mut().for_each(|x| *x *= scale);
                    }
                    let to = &mut scratch.queries[(index * together + head) * dim..][..dim];
                    math::narrow::<E, K>(query, to);
                    if let Some(then) = expected {
                        let entry = self.tokens[then.queries.token].entries[attends.part];
                        let kv_head = then.queries.held.kv_head + head / group;
                        layer.pool.expect::<K>(shape, (entry, kv_head), (head % group, group));
                    }
                }
            }
        }
    }
}
