//! Counts the memory that matchers take beyond their initial copies: their lexers create states and
//! expressions as answers grow. A matcher that grows without bound is stopped before it takes the
//! memory of the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of bytes by which all matchers have grown, and its limit.
#[derive(Debug)]
pub(crate) struct Growth {
    limit: usize,
    bytes: AtomicUsize,
    matchers: AtomicUsize,
}

/// The growth of one matcher, which is counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Grown {
    all: Arc<Growth>,
    own: usize,
}

impl Growth {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, bytes: AtomicUsize::new(0), matchers: AtomicUsize::new(0) })
    }

    /// Starts counting a matcher that has not grown yet.
    pub(crate) fn matcher(self: &Arc<Self>) -> Grown {
        self.matchers.fetch_add(1, Ordering::Relaxed);
        Grown { all: Arc::clone(self), own: 0 }
    }
}

impl Grown {
    /// Records by how many bytes this matcher has grown so far. Returns false if all matchers
    /// together exceed the limit and this matcher has grown by more than an equal share of it.
    pub(crate) fn note(&mut self, own: usize) -> bool {
        let Growth { limit, bytes, matchers } = &*self.all;
        let more = own.saturating_sub(self.own);
        self.own += more;
        let all = bytes.fetch_add(more, Ordering::Relaxed) + more;
        all <= *limit || self.own <= limit / matchers.load(Ordering::Relaxed).max(1)
    }
}

impl Drop for Grown {
    fn drop(&mut self) {
        self.all.bytes.fetch_sub(self.own, Ordering::Relaxed);
        self.all.matchers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_grows_most_has_to_end_and_gives_everything_back() {
        let all = Growth::new(100);
        let (mut small, mut large) = (all.matcher(), all.matcher());
        assert!(small.note(10) && large.note(90), "both fit");
        assert!(small.note(50), "the smaller matcher is within its share");
        assert!(!large.note(91));
        drop(large);
        assert!(small.note(100));
        assert!(!small.note(101));
        drop(small);
        let left = (all.bytes.load(Ordering::Relaxed), all.matchers.load(Ordering::Relaxed));
        assert_eq!(left, (0, 0));
    }
}
