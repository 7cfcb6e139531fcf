//! Chooses a backend for a request.

use clap::ValueEnum;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The policy that chooses a backend. Equally loaded backends take turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// A random backend.
    Random,
    /// Each backend in turn.
    RoundRobin,
    /// The less loaded of two random backends.
    PowerOfTwo,
    /// The backend with the fewest requests.
    ShortestQueue,
    /// The backend with most of the prompt in its cache, unless it has too much work.
    #[default]
    CacheAware,
    /// One backend for all requests with the same `x-routing-key`, `routing_key`, `session_id` or
    /// `user`. A request without any of these goes to the backend with the fewest requests.
    Session,
}

/// The thresholds at which `cache_aware` chooses by load, as in SGLang's router.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// The smallest cached share of a prompt with which the cache decides the choice.
    pub cache: f32,
    /// The largest difference between the loads of two backends, in requests, up to which loads do
    /// not decide.
    pub balance_abs: u32,
    /// The largest ratio between the loads of two backends up to which loads do not decide. They
    /// decide only if both limits are exceeded.
    pub balance_rel: f32,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self { cache: 0.3, balance_abs: 64, balance_rel: 1.5 }
    }
}

/// A backend that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The hash of the backend's URL.
    pub name: u64,
    /// The number of requests at the backend.
    pub requests: u32,
    /// The number of tokens at the backend. It decides between backends with equally many requests.
    pub tokens: u64,
    /// The share of the prompt that is in the backend's cache, from 0 to 1.
    pub cached: f32,
}

/// Chooses backends by a policy.
#[derive(Debug)]
pub struct Chooser {
    policy: Policy,
    thresholds: Thresholds,
    turn: usize,
}

impl Chooser {
    /// Creates a chooser.
    #[must_use]
    pub fn new(policy: Policy, thresholds: Thresholds) -> Self {
        Self { policy, thresholds, turn: 0 }
    }

    /// Returns the index of the chosen candidate; `None` if there are no candidates. `key` is the
    /// routing key for `session`.
    pub fn choose(&mut self, candidates: &[Candidate], key: Option<u64>) -> Option<usize> {
        if candidates.is_empty() {
            return None;
        }
        self.turn = self.turn.wrapping_add(1);
        let count = candidates.len();
        Some(match (self.policy, key) {
            (Policy::Random, _) => rand::random_range(0..count),
            (Policy::RoundRobin, _) => self.turn % count,
            (Policy::PowerOfTwo, _) => {
                let one = rand::random_range(0..count);
                let other = (one + rand::random_range(1..count.max(2))) % count;
                if work(&candidates[other]) < work(&candidates[one]) { other } else { one }
            }
            (Policy::CacheAware, _) => self.cache_aware(candidates),
            (Policy::Session, Some(key)) => rendezvous(candidates, key),
            (Policy::ShortestQueue, _) | (Policy::Session, None) => {
                self.least(candidates, |_| true)
            }
        })
    }

    fn cache_aware(&self, candidates: &[Candidate]) -> usize {
        let loads = || candidates.iter().map(|candidate| candidate.requests);
        let (least, most) = (loads().min().unwrap_or(0), loads().max().unwrap_or(0));
        let Thresholds { cache, balance_abs, balance_rel } = self.thresholds;
        let imbalanced = most - least > balance_abs && most as f32 > least as f32 * balance_rel;
        let best = candidates.iter().map(|candidate| candidate.cached).fold(0.0, f32::max);
        if imbalanced || best < cache {
            return self.least(candidates, |_| true);
        }
        // A slightly larger cached share, within 5%, is not worth a longer queue.
        self.least(candidates, |candidate| candidate.cached >= 0.95 * best)
    }

    /// Returns the least loaded of the candidates for which `fit` is true.
    fn least(&self, candidates: &[Candidate], fit: impl Fn(&Candidate) -> bool) -> usize {
        let count = candidates.len();
        let in_turn = (0..count).map(|step| (self.turn + step) % count);
        in_turn
            .filter(|&index| fit(&candidates[index]))
            .min_by_key(|&index| work(&candidates[index]))
            .unwrap_or(0)
    }
}

fn work(candidate: &Candidate) -> (u32, u64) {
    (candidate.requests, candidate.tokens)
}

/// Rendezvous hashing (Thaler and Ravishankar 1998): adding or removing a backend moves only the
/// keys of that backend.
fn rendezvous(candidates: &[Candidate], key: u64) -> usize {
    let weight = |candidate: &Candidate| xxh3_64_with_seed(&candidate.name.to_le_bytes(), key);
    (0..candidates.len()).max_by_key(|&index| weight(&candidates[index])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidates(loads: &[u32]) -> Vec<Candidate> {
        let candidate = |(name, &requests)| Candidate { name, requests, tokens: 0, cached: 0.0 };
        (0..).zip(loads).map(candidate).collect()
    }

    fn chooser(policy: Policy) -> Chooser {
        Chooser::new(policy, Thresholds::default())
    }

    #[test]
    fn without_candidates_there_is_no_choice() {
        for &policy in Policy::value_variants() {
            assert_eq!(chooser(policy).choose(&[], Some(1)), None);
            assert_eq!(chooser(policy).choose(&candidates(&[9]), Some(1)), Some(0));
        }
    }

    proptest! {
        #[test]
        fn the_shortest_queue_keeps_equal_requests_level(backends in 1usize..9, requests in 1usize..200) {
            let mut chooser = chooser(Policy::ShortestQueue);
            let mut loads = vec![0; backends];
            for _ in 0..requests {
                let chosen = chooser.choose(&candidates(&loads), None).unwrap();
                loads[chosen] += 1;
            }
            let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            prop_assert!(most - least <= 1);
        }

        #[test]
        fn power_of_two_never_takes_the_longest_of_different_queues(loads in prop::collection::vec(0u32..9, 2..8)) {
            let chosen = chooser(Policy::PowerOfTwo).choose(&candidates(&loads), None).unwrap();
            let longest = *loads.iter().max().unwrap();
            let alone = loads.iter().filter(|&&load| load == longest).count() == 1;
            prop_assert!(!alone || loads[chosen] < longest);
        }

        #[test]
        fn a_backend_that_goes_moves_only_its_own_sessions(gone in 0usize..5, key: u64) {
            let all = candidates(&[0; 5]);
            let before = chooser(Policy::Session).choose(&all, Some(key)).unwrap();
            let mut left = all.clone();
            left.remove(gone);
            let after = chooser(Policy::Session).choose(&left, Some(key)).unwrap();
            if before != gone {
                prop_assert_eq!(left[after].name, all[before].name);
            }
        }
    }

    #[test]
    fn equal_backends_take_turns() {
        for policy in [Policy::RoundRobin, Policy::ShortestQueue, Policy::CacheAware] {
            let mut chooser = chooser(policy);
            let mut taken: Vec<_> =
                (0..4).map(|_| chooser.choose(&candidates(&[3; 4]), None).unwrap()).collect();
            taken.sort_unstable();
            assert_eq!(taken, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn a_cache_counts_until_the_load_is_out_of_balance() {
        let with = |loads: &[u32], cached: &[f32]| {
            let mut candidates = candidates(loads);
            candidates.iter_mut().zip(cached).for_each(|(to, &cached)| to.cached = cached);
            chooser(Policy::CacheAware).choose(&candidates, None).unwrap()
        };
        assert_eq!(with(&[50, 0, 0], &[0.5, 0.1, 0.0]), 0);
        assert_eq!(with(&[50, 9, 20], &[0.2, 0.1, 0.0]), 1, "shares that are too small");
        assert_eq!(with(&[90, 9, 20], &[0.9, 0.1, 0.0]), 1, "too much load");
        assert_eq!(with(&[50, 40, 0], &[0.9, 0.9, 0.0]), 1, "equal caches");
        assert_eq!(with(&[900, 850, 840], &[0.9, 0.1, 0.0]), 0, "not by the factor");
    }
}
