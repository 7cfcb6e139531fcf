//! The tiers, checked against the content of their memory: copies move content, and a found block
//! has the content that belongs to its name.

use std::collections::{BTreeMap, HashMap, HashSet};

use forebay_kvcache::{BlockEvent, BlockHash, Found, Hot, Lease, Namer, Place, Tiers};
use forebay_protocol::{Direction, PageCopy};
use proptest::prelude::*;

const HOT: u32 = 6;
const NAMES: usize = 8;

#[derive(Debug, Clone)]
enum Op {
    /// A request allocates a page and computes a block: the block with this name, or one that gets
    /// no name.
    Compute(Option<usize>),
    /// A request finds a block and has it restored.
    Find(usize),
    /// A request finds a block and does not use it.
    Look(usize),
    Release(usize),
    WantSaved(usize),
    SendRestores,
    SendSaves(u32),
    Sweep(u32),
    /// A copy ends: its index, and whether it succeeded.
    Ended(usize, bool),
    Touch(usize),
    Forget(usize),
    Flush,
    Died,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let name = 0..NAMES;
    let op = prop_oneof![
        8 => prop::option::weighted(0.8, name.clone()).prop_map(Op::Compute),
        6 => name.clone().prop_map(Op::Find),
        1 => name.clone().prop_map(Op::Look),
        8 => any::<usize>().prop_map(Op::Release),
        6 => name.clone().prop_map(Op::WantSaved),
        4 => Just(Op::SendRestores),
        6 => (1..4_u32).prop_map(Op::SendSaves),
        2 => (0..=HOT).prop_map(Op::Sweep),
        8 => (any::<usize>(), prop::bool::weighted(0.85)).prop_map(|(at, fine)| Op::Ended(at, fine)),
        1 => name.clone().prop_map(Op::Touch),
        1 => name.prop_map(Op::Forget),
        1 => Just(Op::Flush),
        1 => Just(Op::Died),
    ];
    prop::collection::vec(op, 1..200)
}

/// The content of each page, as the index of a block; `None` if it is not known.
struct Memory {
    hot: Vec<Option<usize>>,
    host: Vec<Option<usize>>,
}

struct World {
    tiers: Tiers,
    names: Vec<BlockHash>,
    memory: Memory,
    /// Leases of requests, each with the expected content, and the ticket of the copy to wait for.
    leases: Vec<(Lease<Hot>, Option<usize>, Option<u32>)>,
    /// Copies under way, with the content of their sources when they began.
    sent: BTreeMap<u32, (PageCopy, Option<usize>)>,
    /// Names that must not be found: forgotten or flushed, and not computed since.
    forgotten: HashSet<usize>,
    known: HashMap<BlockHash, Place>,
}

impl World {
    fn new(host: u32) -> Self {
        let namer = Namer::open();
        let mut tiers = Tiers::new(HOT, host);
        tiers.note_events();
        Self {
            tiers,
            names: (0..NAMES).map(|n| namer.child(namer.root(3), &[n as i32])).collect(),
            memory: Memory { hot: vec![None; HOT as usize], host: vec![None; host as usize] },
            leases: Vec::new(),
            sent: BTreeMap::new(),
            forgotten: HashSet::new(),
            known: HashMap::new(),
        }
    }

    fn send(&mut self, copy: PageCopy) {
        let source = match copy.direction {
            Direction::Save => self.memory.hot[copy.hot.expect("a page") as usize],
            _ => self.memory.host[copy.host as usize],
        };
        assert!(source.is_some(), "{copy:?} reads a page that was not written");
        let targets = |other: &PageCopy| match copy.direction {
            Direction::Save => other.host == copy.host,
            _ => other.hot == copy.hot,
        };
        let other = self
            .sent
            .values()
            .find(|(other, _)| targets(other) && other.direction == copy.direction);
        assert!(other.is_none(), "{copy:?} writes where {other:?} does");
        assert!(self.sent.insert(copy.ticket, (copy, source)).is_none());
    }

    fn end(&mut self, at: usize, fine: bool) {
        let Some(&ticket) = self.sent.keys().nth(at % self.sent.len().max(1)) else { return };
        let (copy, content) = self.sent.remove(&ticket).expect("sent");
        let Memory { hot, host } = &mut self.memory;
        let (hot, host) =
            (&mut hot[copy.hot.expect("a page") as usize], &mut host[copy.host as usize]);
        let (source, target) = match copy.direction {
            Direction::Save => (hot, host),
            _ => (host, hot),
        };
        assert_eq!(*source, content, "the source of {copy:?} was overwritten meanwhile");
        *target = if fine { content } else { None };
        assert!(self.tiers.ended(ticket, fine));
        assert!(!self.tiers.ended(ticket, fine), "a copy ended twice");
        if !fine {
            // Requests that waited for the failed copy compute the block instead.
            let (gone, kept) = self.leases.drain(..).partition(|lease| lease.2 == Some(ticket));
            self.leases = kept;
            for (lease, _, _) in Vec::from_iter::<Vec<_>>(gone) {
                self.tiers.release(lease);
            }
        }
        self.leases.iter_mut().for_each(|lease| _ = lease.2.take_if(|of| *of == ticket));
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Compute(name) => {
                let available = self.tiers.hot().available();
                let lease = self.tiers.allocate();
                assert_eq!(lease.is_some(), available > 0, "allocation fails only without pages");
                let Some(lease) = lease else { return };
                self.memory.hot[lease.page() as usize] = name;
                if let Some(name) = name {
                    self.forgotten.remove(&name);
                    self.tiers.name(&lease, self.names[name]);
                }
                self.leases.push((lease, name, None));
            }
            Op::Find(name) => match self.tiers.find(self.names[name]) {
                Some(Found::Hot(lease)) => {
                    assert_eq!(self.memory.hot[lease.page() as usize], Some(name));
                    assert!(!self.forgotten.contains(&name));
                    self.leases.push((lease, Some(name), None));
                }
                Some(Found::Arriving(lease, ticket)) => {
                    assert!(!self.forgotten.contains(&name));
                    assert!(self.tiers.is_under_way(ticket));
                    self.leases.push((lease, Some(name), Some(ticket)));
                }
                Some(Found::Host(lease)) => {
                    assert_eq!(self.memory.host[lease.page() as usize], Some(name));
                    assert!(!self.forgotten.contains(&name));
                    let available = self.tiers.hot().available();
                    let restored = self.tiers.restore(self.names[name], lease);
                    assert_eq!(restored.is_some(), available > 0);
                    if let Some((lease, ticket)) = restored {
                        self.memory.hot[lease.page() as usize] = None;
                        self.leases.push((lease, Some(name), Some(ticket)));
                    }
                }
                None => {}
            },
            Op::Look(name) => match self.tiers.find(self.names[name]) {
                Some(Found::Hot(lease) | Found::Arriving(lease, _)) => self.tiers.release(lease),
                Some(Found::Host(lease)) => self.tiers.release_host(lease),
                None => {}
            },
            Op::Release(at) if !self.leases.is_empty() => {
                let (lease, ..) = self.leases.swap_remove(at % self.leases.len());
                self.tiers.release(lease);
            }
            Op::Release(_) => {}
            Op::WantSaved(name) => self.tiers.want_saved(self.names[name]),
            Op::SendRestores => {
                while let Some(copy) = self.tiers.next_restore() {
                    self.send(copy);
                }
            }
            Op::SendSaves(most) => {
                let saves = self.sent.values().filter(|(c, _)| c.direction == Direction::Save);
                let before = saves.count();
                while let Some(copy) = self.tiers.next_save(most) {
                    self.send(copy);
                }
                let saves = self.sent.values().filter(|(c, _)| c.direction == Direction::Save);
                assert!(saves.count() <= (most as usize).max(before), "more than were allowed");
            }
            Op::Sweep(goal) => {
                while let Some(copy) = self.tiers.sweep(goal, 4) {
                    self.send(copy);
                }
            }
            Op::Ended(at, fine) => self.end(at, fine),
            Op::Touch(name) => self.tiers.touch(&[self.names[name]]),
            Op::Forget(name) => {
                self.tiers.forget(self.names[name]);
                self.forgotten.insert(name);
            }
            Op::Flush => {
                self.tiers.flush();
                let held: HashSet<usize> = self.leases.iter().filter_map(|lease| lease.1).collect();
                self.forgotten.extend((0..NAMES).filter(|name| !held.contains(name)));
            }
            Op::Died => {
                for (lease, _, _) in self.leases.drain(..) {
                    self.tiers.release(lease);
                }
                self.sent.clear();
                self.tiers.hand_died(self.memory.host.len().is_multiple_of(2));
                self.memory.hot.fill(None);
                assert_eq!(self.tiers.hot().counts().free, HOT);
                assert_eq!(self.tiers.outstanding(), 0);
            }
        }
    }

    fn check(&mut self) {
        self.tiers.check_integrity().unwrap_or_else(|wrong| panic!("{wrong}"));
        for (lease, content, ticket) in &self.leases {
            let found = self.memory.hot[lease.page() as usize];
            assert!(ticket.is_some() || found == *content, "page {} changed", lease.page());
        }
        let mut events = Vec::new();
        self.tiers.take_events(&mut events);
        for event in events {
            match event {
                BlockEvent::Stored(name, place) => _ = self.known.insert(name, place),
                BlockEvent::Dropped(name) => _ = self.known.remove(&name),
                BlockEvent::Cleared => self.known.clear(),
            }
        }
        for &name in &self.names {
            let place = match self.tiers.find(name) {
                Some(Found::Hot(lease)) => {
                    self.tiers.release(lease);
                    Some(self.tiers.hot().is_saved(name))
                }
                Some(Found::Arriving(lease, _)) => {
                    self.tiers.release(lease);
                    continue;
                }
                Some(Found::Host(lease)) => {
                    self.tiers.release_host(lease);
                    assert_eq!(self.known.get(&name), Some(&Place::Host));
                    continue;
                }
                None => None,
            };
            let place = place.map(|both| if both { Place::Both } else { Place::Device });
            assert_eq!(self.known.get(&name), place.as_ref());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn whoever_finds_a_block_finds_its_content(host in 0..7_u32, ops in ops()) {
        let mut world = World::new(host);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        // All copies end, and all leases are released.
        for _ in 0..3 * NAMES {
            world.apply(&Op::SendRestores);
            while !world.sent.is_empty() {
                world.end(0, true);
            }
        }
        while !world.leases.is_empty() {
            world.apply(&Op::Release(0));
        }
        world.check();
        prop_assert_eq!(world.tiers.outstanding(), 0);
        prop_assert_eq!(world.tiers.hot().counts().held, 0);
        prop_assert_eq!(world.tiers.host_counts().held, 0);
        prop_assert!(world.tiers.flush());
        prop_assert_eq!(world.tiers.hot().counts().free, HOT);
        prop_assert_eq!(world.tiers.host_counts().free, host);
    }
}

/// Creates tiers with one block, computed and released.
fn one_block(host: u32) -> (Tiers, BlockHash) {
    let name = Namer::open().chain(0, &[1], 1)[0];
    let mut tiers = Tiers::new(2, host);
    let lease = tiers.allocate().expect("a page");
    assert!(tiers.name(&lease, name));
    tiers.release(lease);
    (tiers, name)
}

fn saved(tiers: &mut Tiers, name: BlockHash) {
    tiers.want_saved(name);
    let copy = tiers.next_save(1).expect("a save");
    assert!(tiers.ended(copy.ticket, true));
}

#[test]
fn a_block_is_found_on_the_host_only_when_its_save_was_reported() {
    let (mut tiers, name) = one_block(1);
    tiers.want_saved(name);
    let copy = tiers.next_save(1).expect("a save");
    assert_eq!(tiers.host_counts().held, 1);
    assert!(!tiers.hot().is_saved(name));
    tiers.ended(copy.ticket, true);
    assert!(tiers.hot().is_saved(name));
    assert_eq!((tiers.host_counts().cached, tiers.moves().saved), (1, 1));
}

#[test]
fn two_requests_share_one_restore() {
    let (mut tiers, name) = one_block(1);
    saved(&mut tiers, name);
    tiers.hand_died(true);
    let Some(Found::Host(host)) = tiers.find(name) else { panic!("the block outlives the worker") };
    let (first, ticket) = tiers.restore(name, host).expect("a page");
    let Some(Found::Arriving(second, other)) = tiers.find(name) else {
        panic!("the block is not arriving")
    };
    assert_eq!((first.page(), ticket), (second.page(), other));
    assert_eq!(tiers.next_restore().map(|copy| copy.ticket), Some(ticket));
    assert_eq!(tiers.next_restore(), None);
    tiers.ended(ticket, true);
    tiers.release(first);
    tiers.release(second);
    let Some(Found::Hot(lease)) = tiers.find(name) else { panic!("the block has not arrived") };
    tiers.release(lease);
}

#[test]
fn a_save_that_ends_after_a_flush_publishes_nothing() {
    let (mut tiers, name) = one_block(1);
    tiers.want_saved(name);
    let copy = tiers.next_save(1).expect("a save");
    assert!(tiers.flush(), "blocks that only a copy uses are forgotten");
    tiers.ended(copy.ticket, true);
    assert!(tiers.find(name).is_none());
    assert_eq!((tiers.host_counts().free, tiers.hot().counts().free), (1, 2));
}

#[test]
fn a_flush_forgets_a_block_that_only_two_saves_use() {
    let (mut tiers, name) = one_block(2);
    let Some(Found::Hot(lease)) = tiers.find(name) else { panic!("the block is on the device") };
    tiers.want_saved(name);
    let first = tiers.next_save(2).expect("a save");
    assert!(!tiers.flush(), "a request uses the block");
    tiers.want_saved(name);
    let second = tiers.next_save(2).expect("a save of what the first will not publish");
    tiers.release(lease);
    assert!(tiers.expects_pages());
    assert!(tiers.flush());
    for copy in [first, second] {
        assert!(tiers.ended(copy.ticket, true));
    }
    assert!(tiers.find(name).is_none());
    assert_eq!((tiers.host_counts().free, tiers.hot().counts().free), (2, 2));
}

#[test]
fn a_host_tier_that_copies_fill_refuses_and_does_not_wait() {
    let names = Namer::open().chain(0, &[1, 2], 1);
    let mut tiers = Tiers::new(2, 1);
    for &name in &names {
        let lease = tiers.allocate().expect("a page");
        tiers.name(&lease, name);
        tiers.want_saved(name);
        tiers.release(lease);
    }
    let copy = tiers.next_save(9).expect("a save");
    assert_eq!(tiers.next_save(9), None);
    assert_eq!(tiers.moves().refused, 1);
    // There are two cached blocks. The one that the host lacks is evicted, because a save holds the
    // page of the other one.
    let lease = tiers.allocate().expect("a page");
    assert_eq!(tiers.moves().dropped_unsaved, 1);
    assert!(tiers.allocate().is_none() && tiers.expects_pages());
    tiers.ended(copy.ticket, true);
    tiers.release(lease);
}

#[test]
fn what_the_host_gave_up_is_no_longer_called_saved() {
    let names = Namer::open().chain(0, &[1, 2], 1);
    let mut tiers = Tiers::new(2, 1);
    for &name in &names {
        let lease = tiers.allocate().expect("a page");
        tiers.name(&lease, name);
        tiers.release(lease);
        saved(&mut tiers, name);
    }
    assert!(!tiers.hot().is_saved(names[0]) && tiers.hot().is_saved(names[1]));
    assert_eq!(tiers.hot().oldest_unsaved(), Some(names[0]));
    assert_eq!(tiers.hot().spare(), 1);
}
