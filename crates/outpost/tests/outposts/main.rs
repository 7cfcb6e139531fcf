//! Tests a brain and its outposts over the loopback interface, with hands that compute nothing, and
//! a network between them that fails on demand.

mod groups;
mod network;
mod payloads;
mod rig;
mod strangers;

use crate::rig::*;

#[test]
fn plans_and_results_go_over_the_network() {
    let brain = Brain::start();
    let outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("echo", 1);
    assert_eq!(ready(&mut executor).page_count, 100);
    for number in 1..=50 {
        assert_eq!(step(&mut executor, number, &[number as i32; 3]), [number as i32]);
    }
    // A plan that is too long for the socket alone: on one machine, it would be sent through the
    // arena.
    assert_eq!(step(&mut executor, 51, &[4; 100_000]), [4]);
    drop(executor);
    assert_eq!(outpost.end(), Ok(()));
}
