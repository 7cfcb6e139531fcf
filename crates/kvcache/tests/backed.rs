//! Backed tiers, checked against the content of their memory: hot pages, host pages, and index
//! pages that are lost with the device.

use std::collections::{BTreeMap, HashSet};

use forebay_kvcache::{BlockHash, Host, Hot, Lease, Namer, Tiers};
use forebay_protocol::{Direction, PageCopy, Span};
use proptest::prelude::*;

const HOT: u32 = 6;
const HOST: u32 = 9;
const NAMES: usize = 8;
const PAGE: u32 = 2;

#[derive(Debug, Clone)]
enum Op {
    /// A request allocates a hot page with its host page, and computes the block with this name, or
    /// one without a name. The flag decides whether the request also names the block.
    Compute(Option<usize>, bool),
    /// A request names a page that it has computed.
    Name(usize),
    /// A request finds a block and has it restored: the whole block if the flag is true, otherwise
    /// only its index keys.
    Find(usize, bool),
    Look(usize),
    /// A request that can do so gives up its hot page, and keeps the host page.
    Drop(usize),
    TakeOver(usize),
    Release(usize),
    WantSaved(usize),
    SaveRow(usize, u32),
    SendRestores,
    SendSaves(u32),
    Ended(usize, bool),
    Forget(usize),
    Flush,
    Died,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let name = 0..NAMES;
    let at = any::<usize>();
    let op = prop_oneof![
        8 => (prop::option::weighted(0.8, name.clone()), any::<bool>())
            .prop_map(|(name, named)| Op::Compute(name, named)),
        3 => at.prop_map(Op::Name),
        7 => (name.clone(), any::<bool>()).prop_map(|(name, hot)| Op::Find(name, hot)),
        1 => name.clone().prop_map(Op::Look),
        5 => at.prop_map(Op::Drop),
        2 => at.prop_map(Op::TakeOver),
        7 => at.prop_map(Op::Release),
        7 => name.clone().prop_map(Op::WantSaved),
        5 => (at, 0..PAGE).prop_map(|(at, row)| Op::SaveRow(at, row)),
        4 => Just(Op::SendRestores),
        6 => (1..4_u32).prop_map(Op::SendSaves),
        9 => (at, prop::bool::weighted(0.85)).prop_map(|(at, fine)| Op::Ended(at, fine)),
        1 => name.prop_map(Op::Forget),
        1 => Just(Op::Flush),
        1 => Just(Op::Died),
    ];
    prop::collection::vec(op, 1..200)
}

/// The pages of a block that a request holds.
struct Held {
    hot: Option<Lease<Hot>>,
    host: Lease<Host>,
    content: Option<usize>,
    /// Copies that have to end before the content is valid.
    pending: HashSet<u32>,
    /// The rows that were saved one by one; `None` once the block has its name. The plan that
    /// computes a row saves it, so before the block is named.
    rows: Option<HashSet<u32>>,
}

type Page = [Option<usize>; PAGE as usize];
const NOTHING: Page = [None; PAGE as usize];

struct World {
    tiers: Tiers,
    names: Vec<BlockHash>,
    hot: Vec<Page>,
    host: Vec<Page>,
    /// Index keys on the device, and in the host's memory.
    index: Vec<Option<usize>>,
    saved_index: Vec<Option<usize>>,
    held: Vec<Held>,
    sent: BTreeMap<u32, PageCopy>,
    forgotten: HashSet<usize>,
}

impl World {
    fn new() -> Self {
        let namer = Namer::open();
        Self {
            tiers: Tiers::backed(HOT, HOST, PAGE),
            names: (0..NAMES).map(|n| namer.child(namer.root(3), &[n as i32])).collect(),
            hot: vec![NOTHING; HOT as usize],
            host: vec![NOTHING; HOST as usize],
            index: vec![None; HOST as usize],
            saved_index: vec![None; HOST as usize],
            held: vec![],
            sent: BTreeMap::new(),
            forgotten: HashSet::new(),
        }
    }

    fn end(&mut self, at: usize, fine: bool) {
        let Some(&ticket) = self.sent.keys().nth(at % self.sent.len().max(1)) else { return };
        let copy = self.sent.remove(&ticket).expect("sent");
        let host = copy.host as usize;
        let rows = copy.span.map_or(0..PAGE as usize, |span| {
            span.first as usize..(span.first + span.count) as usize
        });
        for row in rows {
            match (copy.direction, copy.hot) {
                (Direction::Save, Some(hot)) => {
                    let content = self.hot[hot as usize][row];
                    assert!(content.is_some(), "{copy:?} saves a page that was not written");
                    self.host[host][row] = content.filter(|_| fine);
                    self.saved_index[host] = self.index[host].filter(|_| fine);
                }
                (Direction::Restore, Some(hot)) => {
                    let content = self.host[host][row];
                    assert!(content.is_some(), "{copy:?} restores a page that was not saved");
                    self.hot[hot as usize][row] = content.filter(|_| fine);
                }
                (Direction::RestoreIndex, None) => {
                    assert!(
                        self.saved_index[host].is_some(),
                        "{copy:?} restores keys that were not saved"
                    );
                    self.index[host] = self.saved_index[host].filter(|_| fine);
                }
                _ => panic!("{copy:?}"),
            }
        }
        assert!(self.tiers.ended(ticket, fine));
        if !fine {
            // Requests that waited for the failed copy compute the block instead.
            let (gone, kept) = self.held.drain(..).partition(|held| held.pending.contains(&ticket));
            self.held = kept;
            for held in Vec::from_iter::<Vec<Held>>(gone) {
                self.give_back(held);
            }
        }
        self.held.iter_mut().for_each(|held| _ = held.pending.remove(&ticket));
    }

    fn give_back(&mut self, held: Held) {
        held.hot.into_iter().for_each(|hot| self.tiers.release(hot));
        self.tiers.release_host(held.host);
    }

    fn find(&mut self, name: usize, wants_hot: bool) {
        let Some(found) = self.tiers.find_backed(self.names[name]) else { return };
        assert!(!self.forgotten.contains(&name), "{name} was forgotten");
        let mut pending = HashSet::new();
        let mut hot = found.hot;
        if hot.is_none() && wants_hot {
            match self.tiers.restore_backed(self.names[name], &found.host) {
                Some((lease, ticket)) => {
                    self.hot[lease.page() as usize] = NOTHING;
                    hot = Some(lease);
                    pending.insert(ticket);
                }
                None => {
                    assert_eq!(self.tiers.hot().available(), 0);
                    return self.tiers.release_host(found.host);
                }
            }
        }
        pending.extend(found.pending);
        if !found.indexed {
            pending.insert(self.tiers.restore_index(self.names[name], &found.host));
        }
        self.held.push(Held { hot, host: found.host, content: Some(name), pending, rows: None });
    }

    fn apply(&mut self, op: &Op) {
        let count = self.held.len().max(1);
        let at = |at: usize| at % count;
        match *op {
            Op::Compute(name, named) => {
                let room = self.tiers.hot().available().min(self.tiers.host_available());
                let pages = self.tiers.allocate_backed();
                assert_eq!(pages.is_some(), room > 0, "allocation fails only without room");
                let Some((hot, host)) = pages else { return };
                self.hot[hot.page() as usize] = [name; PAGE as usize];
                self.index[host.page() as usize] = name;
                let mut rows = Some(HashSet::new());
                if let Some(name) = name.filter(|_| named)
                    && self.tiers.name_backed(&hot, &host, self.names[name])
                {
                    self.forgotten.remove(&name);
                    rows = None;
                }
                let pending = HashSet::new();
                self.held.push(Held { hot: Some(hot), host, content: name, pending, rows });
            }
            Op::Name(which) if !self.held.is_empty() => {
                let held = &mut self.held[at(which)];
                if held.pending.is_empty()
                    && let (Some(hot), Some(name)) = (&held.hot, held.content)
                    && self.tiers.name_backed(hot, &held.host, self.names[name])
                {
                    self.forgotten.remove(&name);
                    held.rows = None;
                }
            }
            Op::Find(name, hot) => self.find(name, hot),
            Op::Look(name) => {
                if let Some(found) = self.tiers.find_backed(self.names[name]) {
                    self.tiers.release_backed(found);
                }
            }
            Op::Drop(which) if !self.held.is_empty() => {
                let held = &mut self.held[at(which)];
                if held.pending.is_empty()
                    && let Some(hot) = held.hot.take_if(|hot| self.tiers.can_drop(hot))
                {
                    self.tiers.release(hot);
                }
            }
            Op::TakeOver(which) if !self.held.is_empty() => {
                let held = &mut self.held[at(which)];
                if held.pending.is_empty()
                    && let Some(hot) = &held.hot
                    && self.tiers.take_over(hot)
                {
                    self.hot[hot.page() as usize] = NOTHING;
                    held.hot.take().into_iter().for_each(|hot| self.tiers.release(hot));
                }
            }
            Op::Release(which) if !self.held.is_empty() => {
                let held = self.held.swap_remove(at(which));
                self.give_back(held);
            }
            Op::SaveRow(which, row) if !self.held.is_empty() => {
                let held = &mut self.held[at(which)];
                if let Some(hot) = &held.hot
                    && held.content.is_some()
                    && held.pending.is_empty()
                    && held.rows.as_mut().is_some_and(|rows| rows.insert(row))
                    && let Some(copy) =
                        self.tiers.save_rows(hot, &held.host, Span { first: row, count: 1 })
                {
                    self.sent.insert(copy.ticket, copy);
                }
            }
            Op::Name(_) | Op::Drop(_) | Op::TakeOver(_) | Op::Release(_) | Op::SaveRow(..) => {}
            Op::WantSaved(name) => self.tiers.want_saved(self.names[name]),
            Op::SendRestores => {
                while let Some(copy) = self.tiers.next_restore() {
                    self.sent.insert(copy.ticket, copy);
                }
            }
            Op::SendSaves(most) => {
                while let Some(copy) = self.tiers.next_save(most) {
                    self.sent.insert(copy.ticket, copy);
                }
            }
            Op::Ended(at, fine) => self.end(at, fine),
            Op::Forget(name) => {
                self.tiers.forget(self.names[name]);
                self.forgotten.insert(name);
            }
            Op::Flush => {
                self.tiers.flush();
                let held: HashSet<usize> =
                    self.held.iter().filter_map(|held| held.content).collect();
                self.forgotten.extend((0..NAMES).filter(|name| !held.contains(name)));
            }
            Op::Died => {
                for held in std::mem::take(&mut self.held) {
                    self.give_back(held);
                }
                self.sent.clear();
                self.tiers.hand_died(false);
                self.hot.fill(NOTHING);
                self.index.fill(None);
                assert_eq!(self.tiers.hot().counts().free, HOT);
                assert_eq!(self.tiers.outstanding(), 0);
            }
        }
    }

    fn check(&mut self) {
        self.tiers.check_integrity().unwrap_or_else(|wrong| panic!("{wrong}"));
        for held in self.held.iter().filter(|held| held.pending.is_empty()) {
            let host = held.host.page() as usize;
            assert_eq!(self.index[host], held.content, "index page {host} changed");
            match (&held.hot, held.content) {
                (Some(hot), content) => {
                    assert_eq!(self.hot[hot.page() as usize], [content; PAGE as usize]);
                }
                (None, content) => assert_eq!(self.host[host], [content; PAGE as usize]),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn whoever_holds_a_block_can_read_it_and_its_index(ops in ops()) {
        let mut world = World::new();
        for op in &ops {
            world.apply(op);
            world.check();
        }
        for _ in 0..3 * NAMES {
            world.apply(&Op::SendRestores);
            while !world.sent.is_empty() {
                world.end(0, true);
            }
        }
        while !world.held.is_empty() {
            world.apply(&Op::Release(0));
        }
        world.check();
        prop_assert_eq!(world.tiers.outstanding(), 0);
        prop_assert_eq!(world.tiers.hot().counts().held, 0);
        prop_assert_eq!(world.tiers.host_counts().held, 0);
        prop_assert!(world.tiers.flush());
        prop_assert_eq!(world.tiers.host_counts().free, HOST);
    }
}
