//! States as vectors are pooled of them: normalised as for the head, and not rounded to the model's
//! type.

use super::{Step, Stream};
use crate::element::Element;
use crate::math::{mean_and_factor, rms_factor};
use crate::team::Member;
use crate::tile::Kernel;

impl<E: Element> Step<'_, E> {
    /// One member's share of the vectors.
    ///
    /// # Safety
    /// As of [`Step::compute`]; `vectors` has room for the stream, which nobody writes now.
    #[inline(always)]
    pub(super) unsafe fn give_vectors<K: Kernel<E>>(&self, member: &Member<'_>, stream: Stream) {
        for row in member.share(stream.count) {
            // SAFETY: this member's rows of both.
            unsafe {
                let to = self.vectors.add(row * self.hidden);
                let to = std::slice::from_raw_parts_mut(to, self.hidden);
                let from = self.row(stream, row);
                let (mean, factor) = match self.mean_norms {
                    true => mean_and_factor::<K::Vector>(from, self.eps),
                    false => (0.0, rms_factor::<K::Vector>(from, self.eps)),
                };
                for ((to, from), weight) in to.iter_mut().zip(from).zip(self.final_norm) {
                    *to = (*from - mean) * factor * weight;
                }
            }
        }
    }
}
