//! Computes the states for pooling. They are normalised as for the head, but not rounded to the
//! model's type.

use super::{Step, Stream};
use crate::element::Element;
use crate::math;
use crate::team::Member;
use crate::tile::Kernel;

impl<E: Element> Step<'_, E> {
    /// Computes one member's share of the vectors.
    ///
    /// # Safety
    /// The conditions of [`Step::compute`] must hold. `vectors` must have room for the stream, and
    /// no member may write the stream at the same time.
    #[inline(always)]
    pub(super) unsafe fn give_vectors<K: Kernel<E>>(&self, member: &Member<'_>, stream: Stream) {
        for row in member.share(stream.count) {
            // SAFETY: these are this member's rows of both buffers.
            unsafe {
                let to = self.vectors.add(row * self.hidden);
                let to = std::slice::from_raw_parts_mut(to, self.hidden);
                to.copy_from_slice(self.row(stream, row));
                math::normalise::<K::Vector>(to, self.final_norm, self.eps, self.mean_norms);
            }
        }
    }
}
