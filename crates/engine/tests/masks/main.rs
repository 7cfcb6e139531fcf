//! Requests with constraints: their masks follow the plans, in any order of events.

mod late;
mod rig;

use std::sync::mpsc::channel;

use forebay_engine::{DraftConfig, EngineConfig, FinishReason, RequestError, RequestId};
use forebay_sim::testing::{Hook, quiet};

use crate::rig::{Few, Rig, check, config, length};

/// Kills the hand ten times, each time after 150 outputs.
fn ten_deaths() -> Hook {
    let (mut kills, mut seen) = (0, 0);
    Box::new(move |control, outputs| {
        seen += outputs.len();
        if kills < 10 && seen > 150 {
            (kills, seen) = (kills + 1, 0);
            control.kill();
        }
    })
}

#[test]
fn the_tokens_are_the_same_whatever_runs_ahead_or_is_short_or_dies() {
    let reference = Rig::start(config(0, 0), 2000, 1, quiet());
    reference.submit_all(60);
    let expected = reference.follow(60);
    check(&expected);
    let masks = reference.handle.stats().hand.masks;
    let constrained: u64 = (0..60).filter(|id| id % 3 != 0).map(|id| u64::from(length(id))).sum();
    assert_eq!(masks, constrained, "one mask a token");
    for (lookahead, pages, mask_threads, tokens_a_row, dies) in [
        (1, 2000, 0, 1, false),
        (1, 2000, 2, 1, false),
        (1, 70, 2, 1, false),
        (0, 70, 0, 1, true),
        (1, 2000, 2, 1, true),
        (1, 70, 0, 1, true),
        (1, 2000, 2, 4, true),
    ] {
        let hook = if dies { ten_deaths() } else { quiet() };
        let rig = Rig::start(config(lookahead, mask_threads), pages, tokens_a_row, hook);
        rig.submit_all(60);
        let stories = rig.follow(60);
        assert!(
            stories == expected,
            "lookahead {lookahead}, {pages} pages, {mask_threads} threads"
        );
        let stats = rig.handle.stats();
        assert_eq!(stats.scheduler.preemptions > 0, pages == 70, "{stats:?}");
        assert_eq!(stats.hand.deaths >= 10, dies, "{stats:?}");
    }
}

#[test]
fn drafts_change_no_token_and_each_has_its_mask() {
    let reference = Rig::start(config(0, 0), 2000, 1, quiet());
    reference.submit_all(60);
    let expected = reference.follow(60);
    for (most, lookahead, pages, mask_threads, dies) in [
        (1, 1, 2000, 0, false),
        (3, 1, 2000, 2, false),
        (8, 1, 2000, 0, false),
        (8, 1, 2000, 2, false),
        (8, 0, 70, 0, true),
        (3, 1, 70, 2, true),
    ] {
        let hook = if dies { ten_deaths() } else { quiet() };
        let drafts = DraftConfig { speculative_num_draft_tokens: most, speculative_unpriced: true };
        let config = EngineConfig { drafts: Some(drafts), ..config(lookahead, mask_threads) };
        let rig = Rig::start(config, pages, 1, hook);
        rig.submit_drafted(&expected);
        let stories = rig.follow(60);
        for (id, story) in &stories {
            assert_eq!(story.tokens, expected[id].tokens, "{id}: {most} drafts, {pages} pages");
            assert_eq!(story.end, expected[id].end);
        }
        let stats = rig.handle.stats();
        let drafts = stats.scheduler.drafts;
        assert!(drafts.accepted > 200 && drafts.drafted > drafts.accepted, "{drafts:?}");
        assert_eq!(stats.scheduler.preemptions > 0, pages == 70, "{stats:?}");
        assert_eq!(stats.hand.deaths >= 10, dies, "{stats:?}");
    }
}

#[test]
fn a_constraint_that_breaks_ends_its_request_alone() {
    for lookahead in [0, 1] {
        let rig = Rig::start(config(lookahead, 0), 2000, 1, quiet());
        rig.submit_all(12);
        for id in 100..110 {
            let few = Few { breaks_at: Some(id as usize - 100), ..rig.few() };
            rig.submit(id, 50, Some(few));
        }
        let mut stories = rig.follow(22);
        for id in 100..110 {
            let story = stories.remove(&id).expect("the request has outputs");
            let why = RequestError::Constraint("it breaks here".into());
            assert_eq!(story.end, Some(FinishReason::Error(why)));
            assert_eq!(story.tokens.len(), id as usize - 100);
        }
        check(&stories);
    }
}

#[test]
fn a_request_that_goes_away_between_its_plan_and_its_mask_leaves_the_others_alone() {
    for lookahead in [0, 1] {
        let (mut seen, mut aborted) = (0, 100);
        let (sender, aborts) = channel();
        let hook: Hook = Box::new(move |_, outputs| {
            seen += outputs.len();
            while aborted < 110 && seen > 20 * (aborted - 99) {
                sender.send(RequestId(aborted as u64)).expect("the test listens");
                aborted += 1;
            }
        });
        let rig = Rig::start(config(lookahead, 0), 2000, 1, hook);
        rig.submit_all(12);
        for id in 100..110 {
            rig.submit(id, 150, Some(rig.few()));
        }
        let handle = rig.handle.clone();
        let aborting =
            std::thread::spawn(move || aborts.iter().take(10).for_each(|id| handle.abort(id)));
        let mut stories = rig.follow(22);
        aborting.join().expect("ten requests were aborted");
        stories.retain(|id, _| *id < 100);
        check(&stories);
    }
}
