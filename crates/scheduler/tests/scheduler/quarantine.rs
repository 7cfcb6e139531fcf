//! Tests of which request is blamed for the death of the worker.

use forebay_scheduler::{Finish, SchedulerConfig};

use crate::device::KILL_TOKEN;
use crate::harness::{Harness, config, request};

#[test]
fn a_lone_killer_is_given_up_at_its_second_kill() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, vec![1, KILL_TOKEN], 4));
    assert!(harness.plan());
    assert_eq!(harness.reset(), [0; 0]);
    assert!(harness.plan());
    assert_eq!(harness.reset(), [1]);
    harness.drain();
}

#[test]
fn suspects_run_one_at_a_time_and_the_rest_waits() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, vec![1, 2], 8));
    harness.submit(request(2, vec![3, KILL_TOKEN], 8));
    assert!(harness.plan());
    harness.submit(request(3, vec![4, 5], 8));
    assert_eq!(harness.reset(), [0; 0]);
    assert!(harness.plan(), "the first suspect has no plan");
    assert_eq!(harness.plan.rows().len(), 1);
    assert!(harness.clients[&1].resident);
    harness.submit(request(4, vec![4, 6], 8));
    assert!(harness.apply(), "the first suspect is not cleared");
    assert!(harness.plan(), "the second suspect has no plan");
    assert_eq!(harness.plan.rows().len(), 1);
    assert!(harness.clients[&2].resident);
    assert_eq!(harness.reset(), [2]);
    assert!(harness.plan(), "the others have no plan");
    assert_eq!(harness.plan.rows().len(), 3);
    harness.drain();
    for id in [1, 3, 4] {
        assert_eq!(harness.ended(id).1, Some(Some(Finish::Length)));
    }
}

#[test]
fn a_suspect_waits_for_rows_of_an_aborted_one() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, vec![1, 2], 8));
    harness.submit(request(2, vec![3, 4], 8));
    assert!(harness.plan());
    harness.reset();
    assert!(harness.plan());
    harness.abort(1);
    assert!(!harness.plan(), "a death by the aborted request could be blamed on the other");
    assert!(harness.apply());
    assert!(harness.plan());
    assert!(harness.clients[&2].resident);
    harness.drain();
}

#[test]
fn who_survives_its_mark_starts_with_a_clean_sheet() {
    let mut harness = Harness::new(config(), 1);
    harness.submit(request(1, vec![1, 2], 20));
    for _ in 0..5 {
        assert!(harness.plan());
        assert_eq!(harness.reset(), [0; 0], "the request got past its last death before");
        for _ in 0..2 {
            assert!(harness.plan() && harness.apply());
        }
    }
    harness.drain();
    assert_eq!(harness.ended(1).1, Some(Some(Finish::Length)));
}

#[test]
fn a_suspect_must_get_past_all_of_its_rows_that_were_in_flight() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, vec![1, 2], 8));
    harness.submit(request(2, vec![3, 4], 8));
    assert!(harness.plan() && harness.plan(), "no plans for prefill and the first decode step");
    assert_eq!(harness.reset(), [0; 0]);
    assert!(harness.plan() && harness.apply(), "the prefill alone does not clear the suspect");
    assert!(harness.plan());
    assert_eq!(harness.reset(), [1]);
    harness.drain();
    assert_eq!(harness.ended(2).1, Some(Some(Finish::Length)));
}

#[test]
fn a_cleared_suspect_keeps_its_pages_and_waits_for_the_others_trial() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, vec![1, 2], 8));
    harness.submit(request(2, vec![3, 4], 8));
    assert!(harness.plan());
    harness.reset();
    assert!(harness.plan() && harness.plan() && harness.apply());
    assert!(
        harness.clients[&1].resident,
        "the first suspect is cleared, with a second step in flight"
    );
    assert!(!harness.plan());
    assert!(harness.apply() && harness.plan());
    assert_eq!(harness.plan.rows().len(), 1);
    assert!(harness.clients[&1].resident && harness.clients[&2].resident);
    assert!(harness.apply() && harness.plan());
    assert_eq!(harness.plan.rows().len(), 2, "both");
    harness.drain();
}

#[test]
fn a_death_with_nothing_in_flight_makes_no_suspects() {
    let mut harness = Harness::new(config(), 2);
    for id in 0..3 {
        harness.submit(request(id, vec![1, 2, id as i32], 8));
    }
    assert!(harness.plan() && harness.apply());
    assert_eq!(harness.reset(), [0; 0]);
    assert!(harness.plan());
    assert_eq!(harness.plan.rows().len(), 3);
    harness.drain();
}

#[test]
fn suspects_of_another_hand_are_tried_alone_while_residents_hold_on() {
    let (mut dead, mut other) = (Harness::new(config(), 2), Harness::new(config(), 2));
    for id in 0..2 {
        other.submit(request(id, vec![5, 6, id as i32], 8));
    }
    assert!(other.plan() && other.apply() && other.plan(), "the residents decode");
    dead.submit(request(2, vec![1, 2], 8));
    dead.submit(request(3, vec![3, KILL_TOKEN], 8));
    assert!(dead.plan());
    dead.submit(request(4, vec![7, 8], 8));
    assert_eq!(dead.reset(), [0; 0]);
    dead.move_to(&mut other);
    assert!(!other.plan(), "a step of the residents is in flight");
    assert!(other.apply() && other.plan());
    assert_eq!(other.plan.rows().len(), 1);
    assert!(other.apply() && other.plan());
    assert_eq!(other.plan.rows().len(), 1);
    assert!([0, 1, 2, 3].iter().all(|id| other.clients[id].resident));
    assert_eq!(other.reset(), [3], "the killer was in flight at two deaths, alone at the second");
    assert!(other.plan());
    assert_eq!(other.plan.rows().len(), 4, "no other request is suspected");
    other.drain();
    for id in [0, 1, 2, 4] {
        assert_eq!(other.ended(id).1, Some(Some(Finish::Length)));
    }
}

#[test]
fn a_suspect_of_another_hand_takes_pages_if_there_is_no_room() {
    let small = || SchedulerConfig { max_running: 1, slots: 1, ..config() };
    let (mut dead, mut other) = (Harness::new(small(), 2), Harness::new(small(), 2));
    other.submit(request(0, vec![5, 6], 8));
    assert!(other.plan() && other.apply());
    dead.submit(request(1, vec![1, 2], 8));
    assert!(dead.plan());
    dead.reset();
    dead.move_to(&mut other);
    assert!(other.plan());
    assert!(!other.clients[&0].resident && other.clients[&1].resident);
    other.drain();
    for id in 0..2 {
        assert_eq!(other.ended(id).1, Some(Some(Finish::Length)));
    }
}

#[test]
fn nobody_is_suspected_when_memory_runs_out() {
    let mut harness = Harness::new(config(), 2);
    for id in 1..=4 {
        harness.submit(request(id, vec![id as i32, 2], 8));
    }
    for pages in [15, 12, 9, 6] {
        assert!(harness.plan());
        assert!(harness.plan.rows().len() > 1, "several requests are in flight");
        harness.memory_runs_out(pages, 0);
    }
    harness.drain();
    for id in 1..=4 {
        assert_eq!(harness.ended(id).1, Some(Some(Finish::Length)));
    }
}

#[test]
fn a_suspect_stays_one_when_memory_runs_out() {
    let mut harness = Harness::new(config(), 2);
    harness.submit(request(1, vec![1, KILL_TOKEN], 4));
    assert!(harness.plan());
    assert_eq!(harness.reset(), [0; 0]);
    assert!(harness.plan());
    harness.memory_runs_out(12, 0);
    assert!(harness.plan());
    assert_eq!(harness.reset(), [1]);
}
