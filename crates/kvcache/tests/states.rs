//! Tiers of state pages, and tiers of keys and values beside them.

use std::sync::Arc;

use forebay_kvcache::{BlockHash, Found, Loan, Namer, Tiers};
use forebay_protocol::{Direction, PageCopy};

fn name() -> BlockHash {
    Namer::open().chain(0, &[1], 1)[0]
}

/// Has a block or state saved, and then evicted from the device. Returns the copy.
fn pushed_out(tiers: &mut Tiers) -> PageCopy {
    let lease = tiers.allocate().expect("a page");
    assert!(tiers.name(&lease, name()));
    tiers.release(lease);
    tiers.want_saved(name());
    let copy = tiers.next_save(1).expect("the save is planned");
    assert!(tiers.ended(copy.ticket, true));
    // Another block takes the only page of the device.
    let other = tiers.allocate().expect("a page");
    tiers.release(other);
    assert!(tiers.only_on_host(name()) && tiers.is_on_host(name()));
    copy
}

/// Has the block or state restored. Returns the copy.
fn restored(tiers: &mut Tiers) -> PageCopy {
    let Some(Found::Host(lease)) = tiers.find(name()) else { panic!("the host has it") };
    let (waiter, ticket) = tiers.restore(name(), lease).expect("a page");
    let copy = tiers.next_restore().expect("the restore is planned");
    assert_eq!(copy.ticket, ticket);
    assert!(tiers.ended(ticket, true));
    tiers.release(waiter);
    copy
}

#[test]
fn copies_of_states_have_directions_and_tickets_of_their_own() {
    let (mut blocks, mut states) = (Tiers::new(1, 1), Tiers::of_states(1, 1));
    let of_blocks = [pushed_out(&mut blocks), restored(&mut blocks)];
    let of_states = [pushed_out(&mut states), restored(&mut states)];
    assert_eq!(of_blocks.map(|copy| copy.direction), [Direction::Save, Direction::Restore]);
    let directions = [Direction::SaveState, Direction::RestoreState];
    assert_eq!(of_states.map(|copy| copy.direction), directions);
    let tickets: Vec<u32> = of_blocks.iter().chain(&of_states).map(|copy| copy.ticket).collect();
    assert_eq!(tickets, [0, 1, 1 << 30, (1 << 30) + 1]);
    for tiers in [&blocks, &states] {
        tiers.check_integrity().expect("the tier is consistent");
    }
}

#[test]
fn a_lent_state_is_another_thing_than_the_block_before_it() {
    let loan = |states| {
        let loan = Loan::new(3, vec![(name(), 5)], Box::new(|| {}));
        Arc::new(loan.with_states(states))
    };
    let (mut blocks, mut states) = (Tiers::new(1, 1), Tiers::of_states(1, 1));
    assert!(states.borrow(name(), &loan(vec![])).is_none(), "the state was not lent");
    let both = loan(vec![(name(), 8)]);
    for (tiers, page) in [(&mut blocks, 5), (&mut states, 8)] {
        let (waiter, ticket) = tiers.borrow(name(), &both).expect("the state is lent");
        let copy = tiers.next_restore().expect("the restore is planned");
        assert_eq!((copy.host, copy.lender), (page, Some(3)));
        assert!(tiers.ended(ticket, true));
        tiers.release(waiter);
    }
}
