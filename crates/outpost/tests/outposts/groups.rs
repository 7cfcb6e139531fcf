//! Tests which outposts a group runs on, and what happens when hands die.

use std::time::Duration;

use forebay_engine::{Executor, Signal};

use crate::rig::*;

#[test]
fn a_group_waits_for_an_outpost_with_room_for_all_of_it() {
    let brain = Brain::start();
    let _small = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("echo", 2);
    executor.start();
    let waits = "waits for an outpost with free hands: 1/2";
    eventually(
        "the error says what is missing",
        || matches!(next(&mut executor), Signal::Progress(text) if text == waits),
    );
    let _large = Outpost::start(brain.settings(2));
    loop {
        match next(&mut executor) {
            Signal::Ready(facts) => break assert_eq!(facts.page_count, 100),
            Signal::Progress(_) => {}
            other => panic!("not ready: {other:?}"),
        }
    }
    assert_eq!(step(&mut executor, 1, &[7; 3]), [7]);
    // The hands of an outpost are free again once their group has ended.
    executor.stop();
    assert_eq!(ready(&mut executor).page_count, 100);
}

#[test]
fn a_group_is_on_several_outposts_where_none_has_room_for_all_of_it() {
    let brain = Brain::of(Some("eth7"));
    let small = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("apart", 3);
    executor.start();
    let waits = "waits for outposts with free hands: 1/3";
    eventually(
        "the error says what is missing",
        || matches!(next(&mut executor), Signal::Progress(text) if text == waits),
    );
    let _large = Outpost::start(brain.settings(2));
    ready_at_last(&mut executor);
    assert_eq!(step(&mut executor, 1, &[7; 3]), [0]);
    let ways = |wanted: &str| {
        let found = environments("apart");
        found.iter().filter(|text| text.contains(wanted)).count()
    };
    assert_eq!(ways("FAKE_COLLECTIVES=Network(\"eth7\")\0"), 3);

    // When one outpost stops, all ranks end. They are started again once enough hands are free.
    small.end().expect("no error");
    let (reason, after) = death(&mut executor);
    assert!(reason.contains("outpost here"), "{reason}");
    assert!(after < Duration::from_secs(2), "{after:?}");
    eventually("all hands are gone", || hands_of("apart") == 0);
    executor.start();
    let _other = Outpost::start(brain.settings(3));
    ready_at_last(&mut executor);
    assert_eq!(step(&mut executor, 1, &[7; 3]), [0]);
    assert_eq!(ways("FAKE_COLLECTIVES=Machine\0"), 3, "one outpost suffices");
}

#[test]
fn a_hand_that_dies_says_how_and_is_started_again() {
    let brain = Brain::start();
    let _outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("crash", 1);
    ready(&mut executor);
    executor.submit(&[plan(1, &[5; 3])]);
    let (reason, after) = death(&mut executor);
    assert!(reason.starts_with("exit status"), "{reason}");
    assert!(after < Duration::from_secs(5), "{after:?}");
    ready(&mut executor);
}

#[test]
fn last_words_and_failures_to_start_reach_the_brain() {
    let brain = Brain::start();
    let _outpost = Outpost::start(brain.settings(1));
    for (behaviour, wanted) in [("fatal", "no such model"), ("no program", "outpost here: ")] {
        let mut executor = brain.executor(behaviour, 1);
        executor.start();
        let (reason, _) = death(&mut executor);
        assert!(reason.contains(wanted), "{reason}");
    }
}

#[test]
fn an_outpost_that_ends_takes_its_hands_along_and_may_come_back() {
    let brain = Brain::start();
    let outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("comes back", 1);
    ready(&mut executor);
    assert_eq!(hands_of("comes back"), 1);
    outpost.end().expect("no error");
    eventually("the hand is gone", || hands_of("comes back") == 0);
    let (reason, after) = death(&mut executor);
    assert!(reason.contains("outpost here"), "{reason}");
    assert!(after < Duration::from_secs(2), "{after:?}");
    executor.start();
    let _again = Outpost::start(brain.settings(1));
    loop {
        match next(&mut executor) {
            Signal::Ready(_) => break,
            Signal::Progress(_) => {}
            other => panic!("not ready: {other:?}"),
        }
    }
    assert_eq!(step(&mut executor, 1, &[3; 2]), [0]);
}

#[test]
fn a_brain_that_goes_leaves_no_hand_behind() {
    let brain = Brain::start();
    let outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("goodbye", 1);
    ready(&mut executor);
    assert_eq!(hands_of("goodbye"), 1);
    drop(brain);
    let (reason, _) = death(&mut executor);
    assert!(!reason.is_empty());
    eventually("the hand is gone", || hands_of("goodbye") == 0);
    drop(executor);
    assert_eq!(outpost.end(), Ok(()));
}
