//! A budget of bytes for all requests in flight.
//!
//! Each queue has a bound, but its requests may be small or large: a thousand texts may be
//! gigabytes. So a request is charged for its memory before that is allocated. A request that does
//! not fit is refused at once. A request is charged twice. One charge is for its body and the
//! values made of it, until its prompts are token ids. The other is for its choices, until the
//! answer has ended. When their form is compiled, what it takes is added to that.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_api::ApiError;

/// Bytes of memory for each byte of a body: the body, its copy in one piece, and the parsed values.
pub(crate) const UNREAD: usize = 4;
/// Bytes of a parsed request for each byte of its body: the strings, the rendered prompt, its token
/// ids.
const READ: usize = 3;
/// Bytes of a JSON value that is kept as such, with the template's copy.
const VALUE: usize = 512;
/// Bytes of a request of any kind.
const REQUEST: usize = 4096;
/// Bytes of a choice: its places in the queue, the egress and the mailbox.
const CHOICE: usize = 4096;
/// Bytes of a token id.
const TOKEN: usize = size_of::<i32>();
/// Bytes of a generated token: its id here and in the engine, and its text.
const GENERATED: usize = 12;
/// Bytes of a candidate among log-probabilities.
const CANDIDATE: usize = 64;
/// Tokens that a choice is expected to generate at most. Few answers get so long. The rest of a
/// long context would be too much to set aside for each.
const EXPECTED: u32 = 4096;

/// The budget. Cheap to clone; a charge is one atomic addition, giving it back another.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: usize,
    used: AtomicUsize,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Self {
        Self(Arc::new(Inner { limit, used: AtomicUsize::new(0) }))
    }

    /// Bytes that are charged now.
    pub(crate) fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// A charge of nothing yet.
    pub(crate) fn open(&self) -> Charge {
        Charge { budget: self.clone(), bytes: AtomicUsize::new(0) }
    }

    /// Charges a request for its choices.
    ///
    /// # Errors
    /// As [`Charge::set`].
    pub(crate) fn choices(&self, prompts: impl Iterator<Item = Size>) -> Result<Charge, ApiError> {
        self.charge(prompts.map(|size| size.bytes()).fold(0, usize::saturating_add))
    }

    /// Charges a request for prompts of so many tokens in all, which are pooled.
    ///
    /// # Errors
    /// As [`Charge::set`].
    pub(crate) fn inputs(
        &self,
        inputs: usize,
        tokens: usize,
        size: usize,
    ) -> Result<Charge, ApiError> {
        let vector = size * size_of::<f32>();
        self.charge(inputs.saturating_mul(CHOICE + 2 * vector).saturating_add(2 * TOKEN * tokens))
    }

    fn charge(&self, bytes: usize) -> Result<Charge, ApiError> {
        let charge = self.open();
        charge.set(bytes)?;
        Ok(charge)
    }
}

/// The sizes of a prompt and its choices.
pub(crate) struct Size {
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// The largest number of tokens of a choice.
    pub(crate) max_tokens: u32,
    pub(crate) choices: usize,
    /// Log-probabilities of each token.
    pub(crate) candidates: usize,
    /// Ids that are the only ones allowed.
    pub(crate) allowed: usize,
    /// Log-probabilities of each token of the prompt.
    pub(crate) told: usize,
}

impl Size {
    fn bytes(&self) -> usize {
        let Self { prompt, max_tokens, choices, candidates, allowed, told } = *self;
        let tokens = max_tokens.min(EXPECTED) as usize;
        // An admitted choice has the prompt's tokens once more.
        let choice = CHOICE + TOKEN * prompt + tokens * (GENERATED + CANDIDATE * candidates);
        // Choices share the ids that are allowed, and so do prompts: each counts them, which is
        // more than enough.
        (TOKEN * (prompt + allowed) + CANDIDATE * told * prompt)
            .saturating_add(choice.saturating_mul(choices))
    }
}

/// The charge of a request, until it is dropped.
pub(crate) struct Charge {
    budget: Budget,
    bytes: AtomicUsize,
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes.load(Ordering::Relaxed))
    }
}

impl Charge {
    /// Charges `bytes` in all.
    ///
    /// # Errors
    /// The budget is spent, or is smaller than that. The charge is unchanged then.
    pub(crate) fn set(&self, bytes: usize) -> Result<(), ApiError> {
        let Inner { limit, used } = &*self.budget.0;
        let before = self.bytes.load(Ordering::Relaxed);
        if bytes <= before {
            used.fetch_sub(before - bytes, Ordering::Relaxed);
        } else {
            if bytes > *limit {
                return Err(ApiError::RequestTooLarge { bytes, limit: *limit });
            }
            let more = bytes - before;
            let all = used.fetch_add(more, Ordering::Relaxed).saturating_add(more);
            if all > *limit {
                used.fetch_sub(more, Ordering::Relaxed);
                let reason = format!(
                    "requests in flight take {} of {limit} bytes (--max-request-bytes-in-flight), and \
                     this one needs {more}",
                    all - more
                );
                return Err(ApiError::Overloaded { reason });
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Charges `bytes` more than before.
    ///
    /// # Errors
    /// As [`Charge::set`].
    pub(crate) fn add(&self, bytes: usize) -> Result<(), ApiError> {
        self.set(self.bytes.load(Ordering::Relaxed).saturating_add(bytes))
    }

    /// Charges a body of which so many bytes have come, or will come.
    ///
    /// # Errors
    /// The errors of [`Charge::set`].
    pub(crate) fn unread(&self, body: usize) -> Result<(), ApiError> {
        let bytes = REQUEST.saturating_add(body.saturating_mul(UNREAD));
        if bytes > self.bytes.load(Ordering::Relaxed) { self.set(bytes) } else { Ok(()) }
    }

    /// Charges the parsed form of a body of `body` bytes. Its embeddings take `embeds` bytes on
    /// top, and `values` JSON values were kept.
    ///
    /// # Errors
    /// The errors of [`Charge::set`].
    pub(crate) fn read(&self, body: usize, embeds: usize, values: usize) -> Result<(), ApiError> {
        self.set(REQUEST + body * READ + embeds + values * VALUE)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.0.used.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_charged_is_given_back_however_it_ends() {
        let budget = Budget::new(1000);
        let (first, second) = (budget.charge(600).unwrap(), budget.charge(400).unwrap());
        assert_eq!(budget.used(), 1000);
        let refused = budget.charge(1).unwrap_err();
        assert_eq!((refused.status(), refused.retry_after().is_some()), (429, true));
        first.set(100).unwrap();
        assert_eq!(budget.used(), 500);
        assert!(first.set(601).is_err(), "and what it had stays");
        assert_eq!(budget.used(), 500);
        drop((first, second));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_never_fits_is_not_told_to_come_again() {
        let refused = Budget::new(1000).charge(1001).unwrap_err();
        assert_eq!((refused.status(), refused.retry_after()), (413, None));
        assert!(refused.to_string().contains("--max-request-bytes-in-flight"), "{refused}");
    }

    #[test]
    fn a_body_is_charged_before_and_after_it_is_parsed() {
        let budget = Budget::new(1 << 20);
        let charge = budget.open();
        charge.unread(1000).unwrap();
        let unread = budget.used();
        charge.unread(10).unwrap();
        assert_eq!(budget.used(), unread, "it only grows while it is read");
        assert!(unread >= 4000);
        charge.read(1000, 0, 0).unwrap();
        assert!(budget.used() < unread);
    }
}
