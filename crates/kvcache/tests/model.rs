//! The pool, compared with a naive model: maps and vectors that are searched linearly.

use std::collections::HashSet;

use forebay_kvcache::{BlockHash, Counts, Evicted, Hot, Lease, Namer, PagePool};
use proptest::prelude::*;

const PAGES: u32 = 6;
const NAMES: usize = 9;

#[derive(Debug, Clone)]
enum Op {
    Allocate,
    Share(usize),
    Name(usize, usize),
    Release(usize),
    ReleaseAll(usize),
    Forget(usize),
    Saved(usize, bool),
    Touch(usize),
    Flush,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => Just(Op::Allocate),
        6 => (0..NAMES).prop_map(Op::Share),
        6 => (any::<usize>(), 0..NAMES).prop_map(|(lease, name)| Op::Name(lease, name)),
        4 => any::<usize>().prop_map(Op::Release),
        1 => any::<usize>().prop_map(Op::ReleaseAll),
        1 => (0..NAMES).prop_map(Op::Forget),
        3 => (0..NAMES, any::<bool>()).prop_map(|(name, saved)| Op::Saved(name, saved)),
        1 => (0..NAMES).prop_map(Op::Touch),
        1 => Just(Op::Flush),
    ];
    prop::collection::vec(op, 1..200)
}

/// The state of pages, as the documentation describes it.
#[derive(Debug, Default)]
struct Model {
    /// The number of leases of each page, and the name of its block.
    pages: Vec<(u32, Option<usize>)>,
    /// Cached pages, the least recently used first.
    cached: Vec<u32>,
    /// The names of the cached blocks that another tier has too.
    saved: HashSet<usize>,
}

impl Model {
    fn counts(&self) -> Counts {
        let held = self.pages.iter().filter(|p| p.0 > 0).count() as u32;
        let cached = self.pages.iter().filter(|p| p.0 == 0 && p.1.is_some()).count() as u32;
        Counts { free: PAGES - held - cached, cached, held }
    }

    fn holder(&self, name: usize) -> Option<u32> {
        self.pages.iter().position(|p| p.1 == Some(name)).map(|at| at as u32)
    }

    fn release(&mut self, page: u32) {
        let entry = &mut self.pages[page as usize];
        entry.0 -= 1;
        if entry.0 == 0 && entry.1.is_some() {
            self.cached.push(page);
        }
    }

    /// Models an allocation; returns the name of the evicted block.
    fn allocated(&mut self, page: Option<u32>) -> Option<usize> {
        let counts = self.counts();
        let Some(page) = page else {
            assert_eq!(counts.held, PAGES, "only a full pool refuses");
            return None;
        };
        let name = self.pages[page as usize].1;
        if counts.free > 0 {
            assert_eq!(self.pages[page as usize], (0, None), "a free page goes first");
        } else {
            let is_saved = |&page: &u32| self.saved.contains(&self.name_of(page));
            let at = self.cached.iter().position(is_saved).unwrap_or(0);
            assert_eq!(
                page,
                self.cached.remove(at),
                "then the least recently used, saved ones first"
            );
        }
        self.pages[page as usize] = (1, None);
        name
    }

    fn name_of(&self, page: u32) -> usize {
        self.pages[page as usize].1.expect("a cached page has a name")
    }
}

fn check(ops: Vec<Op>) {
    let namer = Namer::open();
    let name = |n| namer.child(namer.root(3), &[n as i32]);
    let names: Vec<BlockHash> = (0..NAMES).map(name).collect();
    let mut pool = PagePool::<Hot>::new(PAGES);
    pool.note_changes();
    // The names that an observer can derive from events alone.
    let mut known = HashSet::new();
    let mut model =
        Model { pages: vec![(0, None); PAGES as usize], cached: vec![], saved: HashSet::new() };
    let mut leases: Vec<Lease> = Vec::new();
    for op in ops {
        match op {
            Op::Allocate => {
                let next = pool.next_evicted();
                let (lease, evicted) = pool.allocate().unzip();
                let lost = model.allocated(lease.as_ref().map(Lease::page));
                let saved = |name: &usize| model.saved.contains(name);
                assert_eq!(next, lost.map(|name| names[name]));
                let lost = lost.map(|name| Evicted { name: names[name], saved: saved(&name) });
                assert_eq!(evicted.flatten(), lost);
                leases.extend(lease);
            }
            Op::Share(name) => {
                let lease = pool.share(names[name]);
                assert_eq!(lease.as_ref().map(Lease::page), model.holder(name));
                if let Some(lease) = &lease {
                    model.pages[lease.page() as usize].0 += 1;
                    model.cached.retain(|&page| page != lease.page());
                }
                leases.extend(lease);
            }
            Op::Name(at, name) if !leases.is_empty() => {
                let lease = &leases[at % leases.len()];
                let fresh = model.holder(name).is_none();
                let entry = &mut model.pages[lease.page() as usize];
                let expected = fresh && entry.1.is_none();
                if expected {
                    entry.1 = Some(name);
                }
                assert_eq!(pool.name(lease, names[name]), expected);
            }
            Op::Release(at) if !leases.is_empty() => {
                let lease = leases.swap_remove(at % leases.len());
                model.release(lease.page());
                pool.release(lease);
            }
            Op::ReleaseAll(from) if !leases.is_empty() => {
                let mut tail = leases.split_off(from % leases.len());
                for lease in tail.iter().rev() {
                    model.release(lease.page());
                }
                pool.release_all(&mut tail);
                assert!(tail.is_empty());
            }
            Op::Name(..) | Op::Release(_) | Op::ReleaseAll(_) => {}
            Op::Forget(name) => {
                let holder = model.holder(name);
                assert_eq!(pool.forget(names[name]), holder.is_some());
                if let Some(page) = holder {
                    model.pages[page as usize].1 = None;
                    model.cached.retain(|&other| other != page);
                }
            }
            Op::Saved(name, saved) => {
                pool.set_saved(names[name], saved);
                if let Some(page) = model.holder(name) {
                    let changes =
                        if saved { model.saved.insert(name) } else { model.saved.remove(&name) };
                    if let Some(at) =
                        model.cached.iter().position(|&other| other == page && changes)
                    {
                        model.cached.remove(at);
                        model.cached.push(page);
                    }
                }
            }
            Op::Touch(name) => {
                pool.touch(names[name]);
                let page = model.holder(name);
                if let Some(at) = model.cached.iter().position(|&other| Some(other) == page) {
                    let page = model.cached.remove(at);
                    model.cached.push(page);
                }
            }
            Op::Flush => {
                pool.flush();
                for page in model.cached.drain(..) {
                    model.pages[page as usize].1 = None;
                }
            }
        }
        let held: HashSet<usize> = model.pages.iter().filter_map(|page| page.1).collect();
        model.saved.retain(|name| held.contains(name));
        let changed: Vec<BlockHash> = pool.take_changes().collect();
        for name in changed {
            if pool.contains(name) {
                known.insert(name)
            } else {
                known.remove(&name)
            };
        }
        for (name, &hash) in names.iter().enumerate() {
            assert_eq!(pool.is_saved(hash), model.saved.contains(&name));
        }
        let unsaved = model.cached.iter().map(|&page| model.name_of(page));
        let oldest = unsaved.into_iter().find(|name| !model.saved.contains(name));
        assert_eq!(pool.oldest_unsaved(), oldest.map(|name| names[name]));
        assert_eq!(known, held.iter().map(|&name| names[name]).collect());
        let counts = pool.counts();
        assert_eq!(counts, model.counts());
        assert_eq!(counts.free + counts.cached + counts.held, PAGES);
        assert_eq!(pool.available(), counts.free + counts.cached);
        let saved = model.cached.iter().filter(|&&page| model.saved.contains(&model.name_of(page)));
        assert_eq!(pool.spare(), counts.free + saved.count() as u32);
        assert_eq!(pool.blocks(), model.pages.iter().filter(|p| p.1.is_some()).count());
        for (page, entry) in model.pages.iter().enumerate() {
            assert_eq!(pool.leases(page as u32), entry.0);
        }
        assert_eq!(pool.check_integrity(), Ok(()));
    }
    pool.release_all(&mut leases);
    assert_eq!(pool.counts().held, 0);
    assert_eq!(pool.check_integrity(), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_pool_is_its_model(ops in ops()) {
        check(ops);
    }
}
