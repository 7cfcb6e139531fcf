//! States for pooled vectors: normalised as for the head, but not rounded to the model's type.

use super::{Step, Stream};
use crate::element::Element;
use crate::math;
use crate::team::Member;
use crate::tile::Kernel;

impl<E: Element> Step<'_, E> {
    /// One member's share of the vectors.
    ///
    /// # Safety
    /// As of [`Step::compute`]; `vectors` has room for the stream, which no member writes now.
    #[inline(always)]
    pub(super) unsafe fn give_vectors<K: Kernel<E>>(&self, member: &Member<'_>, stream: Stream) {
        for row in member.share(stream.count) {
            // SAFETY: this member's rows of both.
            unsafe {
                let to = self.vectors.add(row * self.hidden);
                let to = std::slice::from_raw_parts_mut(to, self.hidden);
                to.copy_from_slice(self.row(stream, row));
                math::normalise::<K::Vector>(to, self.final_norm, self.eps, self.mean_norms);
            }
        }
    }
}
