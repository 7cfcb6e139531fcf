//! The pool against a naive model: maps and vectors that are searched from end to end.

use std::collections::HashSet;

use forebay_kvcache::{BlockEvent, BlockHash, Counts, Lease, Namer, PagePool};
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
        1 => Just(Op::Flush),
    ];
    prop::collection::vec(op, 1..200)
}

/// What a page is, as the documentation says it.
#[derive(Debug, Default)]
struct Model {
    /// Leases and name of each page.
    pages: Vec<(u32, Option<usize>)>,
    /// Cached pages, the longest unused first.
    cached: Vec<u32>,
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

    fn allocated(&mut self, page: Option<u32>) {
        let counts = self.counts();
        let Some(page) = page else {
            assert_eq!(counts.held, PAGES, "only a full pool refuses");
            return;
        };
        if counts.free > 0 {
            assert_eq!(self.pages[page as usize], (0, None), "a free page goes first");
        } else {
            assert_eq!(page, self.cached.remove(0), "then the longest unused");
        }
        self.pages[page as usize] = (1, None);
    }
}

fn check(ops: Vec<Op>) {
    let namer = Namer::open();
    let name = |n| namer.child(namer.root(3), &[n as i32]);
    let names: Vec<BlockHash> = (0..NAMES).map(name).collect();
    let mut pool = PagePool::new(PAGES);
    pool.note_events();
    // What somebody else knows of the pool, by its events alone.
    let (mut known, mut events) = (HashSet::new(), Vec::new());
    let mut model = Model { pages: vec![(0, None); PAGES as usize], cached: vec![] };
    let mut leases: Vec<Lease> = Vec::new();
    for op in ops {
        match op {
            Op::Allocate => {
                let lease = pool.allocate();
                model.allocated(lease.as_ref().map(Lease::page));
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
            Op::Flush => {
                pool.flush();
                for page in model.cached.drain(..) {
                    model.pages[page as usize].1 = None;
                }
            }
        }
        pool.take_events(&mut events);
        for event in events.drain(..) {
            match event {
                BlockEvent::Stored(name) => assert!(known.insert(name), "stored twice"),
                BlockEvent::Dropped(name) => assert!(known.remove(&name), "was not there"),
                BlockEvent::Cleared => known.clear(),
            }
        }
        let held = model.pages.iter().filter_map(|page| page.1);
        assert_eq!(known, held.map(|name| names[name]).collect());
        let counts = pool.counts();
        assert_eq!(counts, model.counts());
        assert_eq!(counts.free + counts.cached + counts.held, PAGES);
        assert_eq!(pool.available(), counts.free + counts.cached);
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
