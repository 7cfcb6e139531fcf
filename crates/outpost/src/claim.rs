//! Claims the hands of a group: on one outpost if it has enough free hands, otherwise on as few
//! outposts as possible.

use std::sync::Arc;

use crate::brain::{Member, Shared};

/// The hands that a group has claimed, on one or several outposts. Dropping the claim frees all of
/// them at once, so that the next start of the group can claim them again.
pub(crate) struct Claim {
    /// The claimed hands in rank order. Hands on the same outpost are adjacent.
    pub(crate) hands: Vec<(Arc<Member>, u32)>,
    shared: Arc<Shared>,
}

impl Claim {
    /// Claims `count` free hands on these outposts; `None`: too few are free. The hands may be on
    /// several outposts only if `apart` is true. The caller has to prevent concurrent claims.
    pub(crate) fn take(
        members: &[Arc<Member>],
        count: usize,
        apart: bool,
        shared: &Arc<Shared>,
    ) -> Option<Self> {
        let free: Vec<usize> = members.iter().map(|member| member.free()).collect();
        let mut hands = Vec::with_capacity(count);
        for (at, share) in shares(&free, count, apart)? {
            let member = &members[at];
            let mut taken = member.taken.lock();
            let places = (0_u32..).zip(taken.iter_mut()).filter(|(_, taken)| !**taken).take(share);
            hands.extend(
                places
                    .map(|(place, taken)| (*taken = true, place).1)
                    .map(|place| (Arc::clone(member), place)),
            );
        }
        Some(Self { hands, shared: Arc::clone(shared) })
    }

    /// True if the claimed hands are on several outposts.
    pub(crate) fn is_apart(&self) -> bool {
        let mut pairs = self.hands.iter().zip(self.hands.iter().skip(1));
        pairs.any(|((one, _), (other, _))| !Arc::ptr_eq(one, other))
    }

    /// The names of the outposts, for logs.
    pub(crate) fn names(&self) -> String {
        let mut names: Vec<&str> = self.hands.iter().map(|(member, _)| &*member.name).collect();
        names.dedup();
        names.join(", ")
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        for (member, place) in &self.hands {
            member.taken.lock()[*place as usize] = false;
        }
        self.shared.changed.notify_waiters();
    }
}

/// Returns the outposts to take hands from, each as its index in `free` and a number of hands;
/// `None`: too few are free. `free` contains the number of free hands of each outpost. Of the
/// outposts with at least `count` free hands, the one with the fewest provides all hands. If none
/// has enough and the group may be `apart`, the outpost with the most provides all its free hands,
/// and the rule applies again to the rest.
fn shares(free: &[usize], count: usize, apart: bool) -> Option<Vec<(usize, usize)>> {
    let mut shares = Vec::new();
    let mut left: Vec<(usize, usize)> = free.iter().copied().enumerate().collect();
    let mut missing = count;
    loop {
        let enough = left.iter().filter(|(_, free)| *free >= missing);
        if let Some(&(at, _)) = enough.min_by_key(|(_, free)| *free) {
            shares.push((at, missing));
            return Some(shares);
        }
        let largest = left.iter().enumerate().max_by_key(|(_, (_, free))| *free);
        let (which, &(at, most)) = largest.filter(|(_, (_, free))| apart && *free > 0)?;
        shares.push((at, most));
        missing -= most;
        left.swap_remove(which);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_outpost_is_preferred_and_the_smallest_that_suffices() {
        assert_eq!(shares(&[8, 2, 4], 3, true), Some(vec![(2, 3)]));
        assert_eq!(shares(&[8, 2, 4], 2, false), Some(vec![(1, 2)]));
        assert_eq!(shares(&[1, 1], 2, false), None);
        assert_eq!(shares(&[], 1, true), None);
    }

    #[test]
    fn few_outposts_share_what_none_has() {
        assert_eq!(shares(&[1, 1], 2, true).map(|shares| shares.len()), Some(2));
        assert_eq!(shares(&[2, 4, 3, 1], 6, true), Some(vec![(1, 4), (0, 2)]));
        assert_eq!(shares(&[2, 0, 1], 4, true), None);
    }

    proptest! {
        #[test]
        fn shares_are_there_and_add_up(
            free in prop::collection::vec(0_usize..9, 0..6), count in 1_usize..20, apart: bool,
        ) {
            let possible = if apart { free.iter().sum() } else { free.iter().copied().max().unwrap_or(0) };
            match shares(&free, count, apart) {
                None => prop_assert!(possible < count),
                Some(shares) => {
                    prop_assert_eq!(shares.iter().map(|(_, share)| share).sum::<usize>(), count);
                    prop_assert!(shares.iter().all(|&(at, share)| share > 0 && share <= free[at]));
                    let mut of: Vec<usize> = shares.iter().map(|&(at, _)| at).collect();
                    of.sort_unstable();
                    of.dedup();
                    prop_assert_eq!(of.len(), shares.len(), "each outpost is listed once");
                    let fewest = free.iter().any(|&free| free >= count);
                    prop_assert_eq!(fewest, shares.len() == 1);
                }
            }
        }
    }
}
