//! Tiers that lend to each other, checked against the content of their memory. A borrower must read
//! the content that belongs to the block's name, and every loan must be given back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use forebay_kvcache::{BlockHash, Found, Hot, Lease, Loan, LoanId, Namer, Tiers};
use forebay_protocol::{Direction, PageCopy};
use proptest::prelude::*;

const REPLICAS: usize = 3;
const HOT: u32 = 5;
const HOST: u32 = 6;
const NAMES: usize = 6;

#[derive(Debug, Clone)]
enum Op {
    /// A request at a replica computes a block, given by its index, and has it saved. The flag
    /// decides whether the request then ends.
    Compute(usize, usize, bool),
    Release(usize, usize),
    SendSaves(usize),
    SendRestores(usize),
    /// A copy ends: the replica, the copy's index, and whether it succeeded.
    Ended(usize, usize, bool),
    /// A replica lends the blocks from an index on.
    Lend(usize, usize),
    /// A request at a replica borrows from a loan: the loan's index and the block's index.
    Borrow(usize, usize, usize),
    DropLoan(usize),
    /// A lender takes back a returned loan, given by its index.
    TakeBack(usize),
    Forget(usize, usize),
    Flush(usize),
    Died(usize),
    /// The hand of a replica restarts with new memory.
    Resized(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (at, name, which) = (0..REPLICAS, 0..NAMES, any::<usize>());
    let op = prop_oneof![
        10 => (at.clone(), name.clone(), any::<bool>()).prop_map(|(r, n, ends)| Op::Compute(r, n, ends)),
        5 => (at.clone(), which).prop_map(|(r, at)| Op::Release(r, at)),
        8 => at.clone().prop_map(Op::SendSaves),
        5 => at.clone().prop_map(Op::SendRestores),
        12 => (at.clone(), which, prop::bool::weighted(0.9))
            .prop_map(|(r, at, fine)| Op::Ended(r, at, fine)),
        8 => (at.clone(), name.clone()).prop_map(|(r, n)| Op::Lend(r, n)),
        8 => (at.clone(), which, name.clone()).prop_map(|(r, loan, n)| Op::Borrow(r, loan, n)),
        5 => which.prop_map(Op::DropLoan),
        5 => which.prop_map(Op::TakeBack),
        1 => (at.clone(), name).prop_map(|(r, n)| Op::Forget(r, n)),
        1 => at.clone().prop_map(Op::Flush),
        1 => at.clone().prop_map(Op::Died),
        1 => at.prop_map(Op::Resized),
    ];
    prop::collection::vec(op, 1..250)
}

/// A page of host memory: the replica, the number of its host memory, and the page.
type Place = (usize, usize, u32);

/// A copy under way, the content of its source when it began, and the host page that it reads or
/// writes.
type Sent = (PageCopy, Option<usize>, Place);

struct Replica {
    tiers: Tiers,
    hot: Vec<Option<usize>>,
    /// The number of the current host memory. It increases when the tier is resized.
    memory: usize,
    leases: Vec<(Lease<Hot>, usize, Option<u32>)>,
    sent: BTreeMap<u32, Sent>,
    /// The host page that each borrowing copy reads, by ticket.
    sources: BTreeMap<u32, Place>,
    ended: bool,
}

struct World {
    replicas: Vec<Replica>,
    names: Vec<BlockHash>,
    host: BTreeMap<Place, usize>,
    /// Loans, each with the number of the lender's host memory.
    loans: Vec<(Arc<Loan>, usize)>,
    returned: Arc<Mutex<Vec<(usize, LoanId)>>>,
    borrowed: usize,
}

impl World {
    fn new() -> Self {
        let namer = Namer::open();
        let replica = || Replica {
            tiers: Tiers::new(HOT, HOST),
            hot: vec![None; HOT as usize],
            memory: 0,
            leases: Vec::new(),
            sent: BTreeMap::new(),
            sources: BTreeMap::new(),
            ended: false,
        };
        Self {
            replicas: (0..REPLICAS).map(|_| replica()).collect(),
            names: (0..NAMES).map(|n| namer.child(namer.root(3), &[n as i32])).collect(),
            host: BTreeMap::new(),
            loans: Vec::new(),
            returned: Arc::default(),
            borrowed: 0,
        }
    }

    fn send(&mut self, at: usize, copy: PageCopy) {
        let own = (at, self.replicas[at].memory, copy.host);
        let replica = &mut self.replicas[at];
        let place = replica.sources.remove(&copy.ticket).unwrap_or(own);
        assert_eq!(copy.lender.map(|it| it as usize), (place.0 != at).then_some(place.0));
        let content = match copy.direction {
            Direction::Save => replica.hot[copy.hot.expect("a page") as usize],
            _ => self.host.get(&place).copied(),
        };
        assert!(content.is_some(), "{copy:?} reads a page that was not written");
        assert!(replica.sent.insert(copy.ticket, (copy, content, place)).is_none());
    }

    fn end(&mut self, at: usize, which: usize, fine: bool) {
        let replica = &mut self.replicas[at];
        let Some(&ticket) = replica.sent.keys().nth(which % replica.sent.len().max(1)) else {
            return;
        };
        let (copy, content, place) = replica.sent.remove(&ticket).expect("sent");
        let hot = &mut replica.hot[copy.hot.expect("a page") as usize];
        match copy.direction {
            Direction::Save => {
                assert_eq!(*hot, content, "the source of {copy:?} was overwritten meanwhile");
                match content.filter(|_| fine) {
                    Some(content) => _ = self.host.insert(place, content),
                    None => _ = self.host.remove(&place),
                }
            }
            _ => {
                let now = self.host.get(&place).copied();
                assert_eq!(now, content, "the source of {copy:?} was overwritten meanwhile");
                *hot = if fine { content } else { None };
            }
        }
        assert!(replica.tiers.ended(ticket, fine));
        if !fine {
            let (gone, kept) = replica.leases.drain(..).partition(|lease| lease.2 == Some(ticket));
            replica.leases = kept;
            for (lease, ..) in Vec::from_iter::<Vec<_>>(gone) {
                replica.tiers.release(lease);
            }
        }
        replica.leases.iter_mut().for_each(|lease| _ = lease.2.take_if(|of| *of == ticket));
    }

    fn died(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        for (lease, ..) in replica.leases.drain(..) {
            replica.tiers.release(lease);
        }
        replica.sent.clear();
        replica.sources.clear();
        replica.tiers.hand_died(false);
        replica.hot.fill(None);
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Compute(at, name, ends) => {
                let replica = &mut self.replicas[at];
                let Some(lease) = replica.tiers.allocate() else { return };
                replica.hot[lease.page() as usize] = Some(name);
                replica.tiers.name(&lease, self.names[name]);
                replica.tiers.want_saved(self.names[name]);
                if ends {
                    replica.tiers.release(lease);
                } else {
                    replica.leases.push((lease, name, None));
                }
            }
            Op::Release(at, which) => {
                let replica = &mut self.replicas[at];
                if !replica.leases.is_empty() {
                    let (lease, ..) = replica.leases.swap_remove(which % replica.leases.len());
                    replica.tiers.release(lease);
                }
            }
            Op::SendSaves(at) => {
                while let Some(copy) = self.replicas[at].tiers.next_save(3) {
                    self.send(at, copy);
                }
            }
            Op::SendRestores(at) => {
                while let Some(copy) = self.replicas[at].tiers.next_restore() {
                    self.send(at, copy);
                }
            }
            Op::Ended(at, which, fine) => self.end(at, which, fine),
            Op::Lend(at, first) => self.lend(at, first),
            Op::Borrow(at, which, name) => self.borrow(at, which, name),
            Op::DropLoan(which) if !self.loans.is_empty() => {
                self.loans.swap_remove(which % self.loans.len());
            }
            Op::DropLoan(_) => {}
            Op::TakeBack(which) => {
                let mut returned = self.returned.lock().expect("no panic");
                if !returned.is_empty() {
                    let count = returned.len();
                    let (at, id) = returned.swap_remove(which % count);
                    let replica = &mut self.replicas[at];
                    assert!(replica.tiers.take_back(id) || replica.ended);
                }
            }
            Op::Forget(at, name) => self.replicas[at].tiers.forget(self.names[name]),
            Op::Flush(at) => _ = self.replicas[at].tiers.flush(),
            Op::Died(at) => self.died(at),
            Op::Resized(at) => {
                self.died(at);
                let replica = &mut self.replicas[at];
                replica.tiers.end_loans();
                let mut tiers = Tiers::new(HOT, HOST);
                tiers.go_on_from(&replica.tiers);
                replica.tiers = tiers;
                replica.memory += 1;
                replica.ended = true;
            }
        }
    }

    fn lend(&mut self, at: usize, first: usize) {
        let replica = &mut self.replicas[at];
        let Some((id, pages)) = replica.tiers.lend(&self.names[first..]) else { return };
        assert!(!replica.ended, "a replica lends memory that others have not mapped");
        for &(name, page) in &pages {
            let name = self.names.iter().position(|other| *other == name);
            assert_eq!(self.host.get(&(at, replica.memory, page)).copied(), name);
        }
        let returned = Arc::clone(&self.returned);
        let give_back = Box::new(move || returned.lock().expect("no panic").push((at, id)));
        let loan = Loan::new(at as u32, pages, give_back);
        self.loans.push((Arc::new(loan), replica.memory));
    }

    fn borrow(&mut self, at: usize, which: usize, name: usize) {
        let Some((loan, memory)) = self.loans.get(which % self.loans.len().max(1)) else { return };
        let (lender, hash) = (loan.lender() as usize, self.names[name]);
        let replica = &mut self.replicas[at];
        if lender == at || replica.tiers.knows(hash) {
            return;
        }
        let available = replica.tiers.hot().available();
        let Some((lease, ticket)) = replica.tiers.borrow(hash, loan) else {
            assert!(available == 0 || loan.page(hash).is_none());
            return;
        };
        self.borrowed += 1;
        let page = loan.page(hash).expect("the block is lent");
        assert_eq!(
            self.host.get(&(lender, *memory, page)),
            Some(&name),
            "the lent page has another content"
        );
        replica.hot[lease.page() as usize] = None;
        replica.sources.insert(ticket, (lender, *memory, page));
        replica.leases.push((lease, name, Some(ticket)));
    }

    fn check(&mut self) {
        for (replica, at) in self.replicas.iter_mut().zip(0..) {
            replica.tiers.check_integrity().unwrap_or_else(|wrong| panic!("replica {at}: {wrong}"));
            assert!(replica.tiers.lent_pages() <= HOST as usize / 2, "more than half is lent");
            for (lease, content, ticket) in &replica.leases {
                let found = replica.hot[lease.page() as usize];
                assert!(ticket.is_some() || found == Some(*content), "a page changed");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn borrowers_read_what_was_lent_and_every_loan_comes_back(ops in ops()) {
        let mut world = World::new();
        for op in &ops {
            world.apply(op);
            world.check();
        }
        world.loans.clear();
        for at in 0..REPLICAS {
            world.apply(&Op::SendRestores(at));
            while !world.replicas[at].sent.is_empty() {
                world.end(at, 0, true);
            }
            while !world.replicas[at].leases.is_empty() {
                world.apply(&Op::Release(at, 0));
            }
        }
        while !world.returned.lock().expect("no panic").is_empty() {
            world.apply(&Op::TakeBack(0));
        }
        world.check();
        for replica in &mut world.replicas {
            prop_assert_eq!(replica.tiers.lent_pages(), 0);
            prop_assert_eq!(replica.tiers.outstanding(), 0);
            prop_assert_eq!(replica.tiers.host_counts().held, 0);
            prop_assert_eq!(replica.tiers.hot().counts().held, 0);
            prop_assert!(replica.tiers.flush());
        }
    }
}

/// Creates tiers whose blocks are all saved on the host.
fn with_saved(count: i32, host: u32) -> (Tiers, Vec<BlockHash>) {
    let names = Namer::open().chain(0, &(0..count).collect::<Vec<i32>>(), 1);
    let mut tiers = Tiers::new(count.cast_unsigned(), host);
    for &name in &names {
        let lease = tiers.allocate().expect("a page");
        assert!(tiers.name(&lease, name));
        tiers.want_saved(name);
        let copy = tiers.next_save(1).expect("a save");
        tiers.ended(copy.ticket, true);
        tiers.release(lease);
    }
    (tiers, names)
}

fn loan(lent: (LoanId, Vec<(BlockHash, u32)>)) -> Arc<Loan> {
    Arc::new(Loan::new(4, lent.1, Box::new(|| {})))
}

#[test]
fn a_loan_ends_at_the_first_gap_and_at_half_of_the_tier() {
    let (mut tiers, names) = with_saved(4, 8);
    tiers.forget(names[2]);
    let (first, lent) = tiers.lend(&names).expect("a loan");
    assert_eq!(lent.iter().map(|it| it.0).collect::<Vec<_>>(), names[..2]);
    let (second, again) = tiers.lend(&names[..1]).expect("a loan");
    assert_eq!((again.len(), tiers.lent_pages()), (1, 2), "a page that is lent twice counts once");
    assert!(tiers.take_back(first) && !tiers.take_back(first));
    assert_eq!(tiers.lent_pages(), 1);
    tiers.take_back(second);
    assert!(tiers.lend(&names[2..]).is_none());

    let (mut tiers, names) = with_saved(4, 4);
    let (id, lent) = tiers.lend(&names).expect("a loan");
    assert_eq!(lent.len(), 2);
    tiers.take_back(id);
    assert_eq!(tiers.host_counts().held, 0);
}

#[test]
fn a_lent_page_keeps_its_content_when_its_block_is_flushed() {
    let (mut tiers, names) = with_saved(2, 4);
    let (id, lent) = tiers.lend(&names[..1]).expect("a loan");
    tiers.flush();
    assert!(tiers.find(names[0]).is_none(), "the forgotten name is still found");
    assert_eq!(tiers.host_counts().held, 1, "the lent page is still held");
    assert_eq!(lent.len(), 1);
    tiers.take_back(id);
    assert_eq!(tiers.host_counts().free, 4);
}

#[test]
fn a_copy_holds_the_loan_until_it_has_ended_well_or_not() {
    let (mut lender, names) = with_saved(1, 2);
    let loan = loan(lender.lend(&names).expect("a loan"));
    let mut tiers = Tiers::new(2, 2);
    let (lease, ticket) = tiers.borrow(names[0], &loan).expect("a page");
    let copy = tiers.next_restore().expect("a copy");
    assert_eq!((copy.lender, copy.host), (Some(4), loan.page(names[0]).expect("lent")));
    assert_eq!(Arc::strong_count(&loan), 2);
    let Some(Found::Arriving(other, same)) = tiers.find(names[0]) else {
        panic!("the block is not arriving")
    };
    assert_eq!(same, ticket);
    tiers.ended(ticket, false);
    assert_eq!(Arc::strong_count(&loan), 1, "the copy has ended");
    tiers.release(lease);
    tiers.release(other);
    assert!(tiers.find(names[0]).is_none());
    let (lease, ticket) = tiers.borrow(names[0], &loan).expect("a page");
    tiers.ended(ticket, true);
    tiers.release(lease);
    let Some(Found::Hot(lease)) = tiers.find(names[0]) else { panic!("the block has not arrived") };
    tiers.release(lease);
    let save = tiers.next_save(1).expect("a borrowed block is saved like a computed one");
    assert!(tiers.lend(&names).is_none(), "an unsaved block is not lent");
    tiers.ended(save.ticket, true);
    let (id, lent) = tiers.lend(&names).expect("a loan");
    assert_eq!(lent.len(), 1, "a saved borrowed block is lent");
    assert!(tiers.take_back(id));
    lender.end_loans();
    assert!(lender.lend(&names).is_none(), "loans of the old memory are void");
}
