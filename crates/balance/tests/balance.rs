//! The ledger and the index, compared with naive models, and guarantees of the policies.

use std::collections::{HashMap, HashSet};

use forebay_balance::{Ask, Balancer, Ledger, Load, Method, PrefixIndex, Work};
use proptest::prelude::*;

const METHODS: [Method; 4] =
    [Method::RoundRobin, Method::ShortestQueue, Method::TotalTokens, Method::PrefixAware];

#[derive(Debug, Clone)]
enum Op {
    Sent { id: u64, target: usize, work: Work },
    Generated { id: u64, tokens: u64 },
    Ended(u64),
}

fn ops(targets: usize) -> impl Strategy<Value = Vec<Op>> {
    let id = 0..12_u64;
    let op = prop_oneof![
        4 => (id.clone(), 0..targets, 0..50_u64, 0..50_u64).prop_map(|(id, target, prefill, decode)| {
            Op::Sent { id, target, work: Work { prefill, decode } }
        }),
        6 => (id.clone(), 0..20_u64).prop_map(|(id, tokens)| Op::Generated { id, tokens }),
        3 => id.prop_map(Op::Ended),
    ];
    prop::collection::vec(op, 1..120)
}

/// A request in the naive model of the ledger.
#[derive(Debug, Clone, Copy)]
struct Seen {
    target: usize,
    work: Work,
    generated: u64,
    started: bool,
}

fn naive(seen: &HashMap<u64, Seen>, target: usize) -> (u64, u64, Work) {
    let here = || seen.values().filter(|seen| seen.target == target);
    let prefill = here().filter(|seen| !seen.started).map(|seen| seen.work.prefill).sum();
    let decode = here().map(|seen| seen.work.decode.saturating_sub(seen.generated)).sum();
    let waiting = here().filter(|seen| !seen.started).count() as u64;
    (here().count() as u64, waiting, Work { prefill, decode })
}

fn load(requests: u64, prefill: u64) -> Load {
    Load { requests, work: Work { prefill, decode: 0 }, ..Load::default() }
}

#[derive(Debug, Clone)]
enum BlockOp {
    Stored(usize, u32),
    Dropped(usize, u32),
    Cleared(usize),
    Expect(usize, Vec<u32>),
    Settle(usize),
}

fn block_ops() -> impl Strategy<Value = Vec<BlockOp>> {
    let target = 0..3_usize;
    let name = 0..6_u32;
    let op = prop_oneof![
        5 => (target.clone(), name.clone()).prop_map(|(target, name)| BlockOp::Stored(target, name)),
        3 => (target.clone(), name.clone()).prop_map(|(target, name)| BlockOp::Dropped(target, name)),
        1 => target.clone().prop_map(BlockOp::Cleared),
        3 => (target, prop::collection::vec(name, 0..5)).prop_map(|(t, names)| BlockOp::Expect(t, names)),
        2 => any::<usize>().prop_map(BlockOp::Settle),
    ];
    prop::collection::vec(op, 1..80)
}

proptest! {
    #[test]
    fn the_counts_of_a_ledger_never_drift(ops in ops(3)) {
        let mut ledger = Ledger::new(3);
        let mut seen: HashMap<u64, Seen> = HashMap::new();
        let mut peaks = [0; 3];
        for op in ops {
            match op {
                Op::Sent { id, target, work } => {
                    ledger.sent(id, target, work);
                    seen.insert(id, Seen { target, work, generated: 0, started: false });
                }
                Op::Generated { id, tokens } => {
                    let first = ledger.generated(id, tokens);
                    let entry = seen.get_mut(&id);
                    prop_assert_eq!(first, entry.as_ref().is_some_and(|seen| !seen.started));
                    if let Some(entry) = entry {
                        entry.generated += tokens;
                        entry.started = true;
                    }
                }
                Op::Ended(id) => {
                    prop_assert_eq!(ledger.ended(id), seen.remove(&id).map(|seen| seen.target));
                }
            }
            for (target, peak) in peaks.iter_mut().enumerate() {
                let found = ledger.loads()[target];
                *peak = found.requests.max(*peak);
                let (requests, in_prefill, work) = naive(&seen, target);
                prop_assert_eq!((found.requests, found.in_prefill, found.work), (requests, in_prefill, work));
                prop_assert_eq!(found.peak, *peak);
                let listed: HashSet<u64> = ledger.requests(target).collect();
                prop_assert!(listed.iter().all(|id| seen[id].target == target));
                prop_assert_eq!(listed.len() as u64, requests);
            }
        }
    }

    /// Each client sends its next request when its last one ends. Requests end in any order.
    #[test]
    fn equal_requests_are_never_out_of_balance(
        targets in 1..6_usize, clients in 1..40_u64, ends in prop::collection::vec(any::<usize>(), 0..300),
        by_prefix in any::<bool>(),
    ) {
        let method = if by_prefix { Method::PrefixAware } else { Method::ShortestQueue };
        let (mut balancer, mut ledger) = (Balancer::new(method), Ledger::new(targets));
        let ask = Ask { tokens: 500, cached: &[] };
        let mut alive: Vec<u64> = Vec::new();
        let mut arrivals = 0..;
        let mut arrive = |ledger: &mut Ledger, alive: &mut Vec<u64>| {
            let id = arrivals.next().expect("endless");
            let at = balancer.choose(ledger.loads(), |_| true, &ask).expect("all are open");
            ledger.sent(id, at, Work { prefill: 500, decode: 1500 });
            alive.push(id);
        };
        for _ in 0..clients {
            arrive(&mut ledger, &mut alive);
        }
        for end in ends {
            let id = alive.swap_remove(end % alive.len());
            ledger.generated(id, (end % 1500) as u64);
            ledger.ended(id);
            arrive(&mut ledger, &mut alive);
            let most = ledger.loads().iter().map(|load| load.peak).max();
            prop_assert_eq!(most, Some(clients.div_ceil(targets as u64)));
        }
    }

    #[test]
    fn only_open_targets_are_chosen_and_one_always_is(
        loads in prop::collection::vec((0..50_u64, 0..5000_u64, any::<bool>(), 0..600_u64), 1..8), turns in 1..10,
    ) {
        let cached: Vec<u64> = loads.iter().map(|&(_, _, _, cached)| cached).collect();
        let open: Vec<bool> = loads.iter().map(|&(_, _, open, _)| open).collect();
        let loads: Vec<Load> = loads.iter().map(|&(requests, work, _, _)| load(requests, work)).collect();
        for method in METHODS {
            let mut balancer = Balancer::new(method);
            for _ in 0..turns {
                let ask = Ask { tokens: 500, cached: &cached };
                let chosen = balancer.choose(&loads, |at| open[at], &ask);
                prop_assert_eq!(chosen.is_some(), open.contains(&true));
                prop_assert!(chosen.is_none_or(|at| open[at]));
            }
        }
    }

    #[test]
    fn an_index_knows_what_targets_hold_and_will_hold(ops in block_ops(), asked in prop::collection::vec(0..6_u32, 0..6)) {
        let mut index = PrefixIndex::new(3);
        let mut stored = vec![HashSet::new(); 3];
        let mut coming: Vec<(usize, Vec<u32>)> = Vec::new();
        for op in ops {
            match op {
                BlockOp::Stored(target, name) => {
                    index.stored(target, name);
                    stored[target].insert(name);
                }
                BlockOp::Dropped(target, name) => {
                    index.dropped(target, name);
                    stored[target].remove(&name);
                }
                BlockOp::Cleared(target) => {
                    index.cleared(target);
                    stored[target].clear();
                }
                BlockOp::Expect(target, names) => {
                    index.expect(target, &names);
                    coming.push((target, names));
                }
                BlockOp::Settle(at) if !coming.is_empty() => {
                    let (target, names) = coming.swap_remove(at % coming.len());
                    index.settled(target, &names);
                }
                BlockOp::Settle(_) => {}
            }
            let has = |target: usize, name: &u32| {
                stored[target].contains(name) || coming.iter().any(|(at, names)| *at == target && names.contains(name))
            };
            let expected: Vec<u64> =
                (0..3).map(|target| asked.iter().take_while(|name| has(target, name)).count() as u64).collect();
            prop_assert_eq!(index.lookup(&asked), expected);
        }
        for target in 0..3 {
            index.cleared(target);
        }
        for (target, names) in coming {
            index.settled(target, &names);
        }
        prop_assert!(index.is_empty(), "{} names are left behind", index.len());
    }
}

#[test]
fn round_robin_takes_turns_and_leaves_out_who_is_closed() {
    let mut balancer = Balancer::new(Method::RoundRobin);
    let ask = Ask { tokens: 1, cached: &[] };
    let loads = vec![Load::default(); 3];
    let went: Vec<_> = (0..5).map(|_| balancer.choose(&loads, |at| at != 1, &ask)).collect();
    assert_eq!(went, [Some(0), Some(2), Some(0), Some(2), Some(0)]);
}

#[test]
fn work_counts_what_is_not_cached() {
    let mut balancer = Balancer::new(Method::TotalTokens);
    let loads = [load(1, 900), load(3, 800), load(1, 1000)];
    assert_eq!(balancer.choose(&loads, |_| true, &Ask { tokens: 500, cached: &[] }), Some(1));
    let ask = Ask { tokens: 500, cached: &[0, 0, 400] };
    assert_eq!(balancer.choose(&loads, |_| true, &ask), Some(2));
}

#[test]
fn a_cached_beginning_is_worth_some_imbalance_but_not_any() {
    let chosen = |loads: &[Load], cached: &[u64]| {
        let ask = Ask { tokens: 800, cached };
        Balancer::new(Method::PrefixAware).choose(loads, |_| true, &ask)
    };
    assert_eq!(
        chosen(&[load(4, 0), load(2, 0)], &[0, 0]),
        Some(1),
        "without cached tokens the shorter queue wins"
    );
    assert_eq!(chosen(&[load(4, 0), load(2, 0)], &[790, 0]), Some(0));
    assert_eq!(
        chosen(&[load(4, 0), load(2, 0)], &[790, 780]),
        Some(1),
        "with equal caches the shorter queue wins"
    );
    assert_eq!(
        chosen(&[load(19, 0), load(2, 0)], &[790, 0]),
        Some(1),
        "too many more requests outweigh the cache"
    );
    assert_eq!(
        chosen(&[load(4, 0), load(2, 0)], &[64, 0]),
        Some(1),
        "a short prefix does not outweigh two requests"
    );
    assert_eq!(
        chosen(&[load(2, 700), load(2, 0)], &[640, 0]),
        Some(1),
        "waiting prefill outweighs the cache"
    );
    assert_eq!(
        chosen(&[load(110, 0), load(64, 0)], &[790, 0]),
        Some(0),
        "among many requests, 46 more weigh little"
    );
}
