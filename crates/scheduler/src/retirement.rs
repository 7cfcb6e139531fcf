//! Retirement of slots and pages. Plans in flight may read and write the slots and pages that they
//! name. So a slot or page returns to its pool only when the result of the last step that names it
//! was applied. Until then it is *retired*.

/// Retired slots or pages.
#[derive(Debug)]
pub(crate) struct Retirement<T> {
    /// The retired slots or pages, each with the last step that names it.
    retired: Vec<(u64, T)>,
    /// The last step whose result was applied.
    answered: u64,
    /// The number of slots or pages that were returned.
    returns: u64,
}

impl<T> Default for Retirement<T> {
    fn default() -> Self {
        Self { retired: Vec::new(), answered: 0, returns: 0 }
    }
}

impl<T> Retirement<T> {
    /// Retires a slot or page until the result of `last_step` is applied. If that result was
    /// applied already, returns the slot or page, which is free.
    #[must_use]
    pub(crate) fn retire(&mut self, last_step: u64, thing: T) -> Option<T> {
        if last_step > self.answered {
            self.retired.push((last_step, thing));
            return None;
        }
        self.returns += 1;
        Some(thing)
    }

    /// Notes that the result of a step has come, so that slots or pages which later plans do not
    /// name can be freed.
    pub(crate) fn answered(&mut self, step: u64) {
        self.answered = step;
    }

    /// Returns the retired slots or pages that no step in flight names, in the order of retirement.
    #[must_use]
    pub(crate) fn take_returned(&mut self) -> Vec<T> {
        let answered = self.answered;
        let back = self.retired.extract_if(.., |(last, _)| *last <= answered);
        let back: Vec<T> = back.map(|(_, thing)| thing).collect();
        self.returns += back.len() as u64;
        back
    }

    /// The number of slots or pages freed so far. While it does not change, a request that lacked
    /// room still lacks it.
    pub(crate) fn returns(&self) -> u64 {
        self.returns
    }

    /// True if the result of a step before `step` will free slots or pages.
    pub(crate) fn is_awaited_before(&self, step: u64) -> bool {
        self.awaited_before(step).next().is_some()
    }

    /// The slots or pages that results of steps before `step` will free.
    pub(crate) fn awaited_before(&self, step: u64) -> impl Iterator<Item = &T> {
        self.retired.iter().filter(move |&&(last, _)| last < step).map(|(_, thing)| thing)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.retired.iter().map(|(_, thing)| thing)
    }
}

/// Checks that a pool counts as many leases of each page as there are owners.
pub(crate) fn check_leases(
    what: &str,
    owned: impl Iterator<Item = u32>,
    pages: u32,
    counted: impl Fn(u32) -> u32,
) -> Result<(), String> {
    let mut leases = vec![0_u32; pages as usize];
    owned.for_each(|page| leases[page as usize] += 1);
    match leases.iter().zip(0..).find(|&(&owned, page)| owned != counted(page)) {
        None => Ok(()),
        Some((owned, page)) => {
            Err(format!("{what} {page}: {owned} leases of {} exist", counted(page)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_return_with_their_step_in_the_order_of_retirement() {
        let mut retirement = Retirement::default();
        assert_eq!(retirement.retire(0, 'a'), Some('a'), "no step names it");
        for (step, thing) in [(2, 'b'), (1, 'c'), (2, 'd'), (1, 'e')] {
            assert_eq!(retirement.retire(step, thing), None);
        }
        assert_eq!(
            (retirement.is_awaited_before(2), retirement.is_awaited_before(1)),
            (true, false)
        );
        assert_eq!(retirement.take_returned(), []);
        retirement.answered(1);
        assert_eq!(retirement.retire(1, 'f'), Some('f'), "its step was answered");
        assert_eq!(retirement.take_returned(), ['c', 'e']);
        assert_eq!((retirement.returns(), retirement.iter().count()), (4, 2));
        retirement.answered(2);
        assert_eq!(retirement.take_returned(), ['b', 'd']);
        assert_eq!((retirement.returns(), retirement.iter().count()), (6, 0));
    }
}
