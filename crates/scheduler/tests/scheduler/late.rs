//! Masks that are not ready in time, step by step.

use forebay_protocol::{Row, Want};
use forebay_scheduler::{Drafts, Request, SchedulerConfig};

use crate::harness::{Harness, config, request};

fn masked(id: u64, prompt: Vec<i32>, max_tokens: u32) -> Request {
    Request { masked: true, ..request(id, prompt, max_tokens) }
}

fn rows(harness: &Harness) -> Vec<(u32, u32, Want)> {
    harness.plan.rows().map(|Row { start, length, want, .. }| (start, length, want)).collect()
}

#[test]
fn a_row_that_sits_out_gives_no_token_and_its_last_position_comes_again() {
    for depth in [1, 2] {
        let mut harness = Harness::new(config(), depth);
        harness.submit(masked(0, vec![1; 8], 3));
        harness.submit(request(1, vec![2; 3], 9));
        assert!(harness.plan());
        assert_eq!(harness.sit_out(1), 1);
        assert_eq!(harness.plan(), depth == 2, "the other request has the only row");
        assert!(harness.apply());
        assert!(harness.clients[&0].tokens.is_empty());
        let stats = harness.scheduler.stats();
        assert_eq!(
            stats.prompt_tokens,
            7 + 3,
            "the last position counts when it is computed again"
        );
        harness.plan();
        assert_eq!(rows(&harness).len(), 1, "the masked request waits");
        harness.mask_ready(None);
        let mut again = Vec::new();
        while harness.clients[&0].tokens.is_empty() {
            harness.plan();
            again.extend(rows(&harness).into_iter().filter(|row| row.2 == Want::MASKED));
            harness.apply();
        }
        assert_eq!(again[0], (7, 1, Want::MASKED));
        assert_eq!(harness.scheduler.stats().prompt_tokens, 8 + 3);
        harness.drain();
    }
}

#[test]
fn whoever_waits_computes_what_it_knows_and_nobody_waits_for_it() {
    let mut harness = Harness::new(config(), 1);
    harness.was_reset = true;
    harness.submit(masked(0, vec![1; 12], 3));
    harness.wait_for_mask(0);
    harness.submit(request(1, vec![2; 3], 2));
    while harness.clients[&1].end.is_none() {
        assert!(harness.plan());
        harness.apply();
    }
    assert!(!harness.plan(), "all but the last position is computed");
    let view = harness.scheduler.views().next().expect("the request is alive");
    assert_eq!((view.computed, view.generated), (11, 0));
    harness.mask_ready(None);
    assert!(harness.plan());
    assert_eq!(rows(&harness), [(11, 1, Want::MASKED)]);
    harness.drain();
}

#[test]
fn masked_rows_have_drafts_that_their_form_allows_and_may_sit_out_with_them() {
    for (id, late) in [(0, false), (1, false), (2, false), (2, true), (3, false)] {
        let drafts = Some(Drafts { most: 4, priced: false });
        let config = SchedulerConfig { drafts, pages: 64, ..config() };
        let mut harness = Harness::new(config, 1);
        // The grammar of a request forces `2 * id` tokens; the grammar of request 3 is not ready.
        harness.submit(masked(id, vec![1; 8], 30));
        let (mut most, mut sat_out) = (0, 0);
        while harness.plan() {
            most = most.max(harness.plan.drafts().map(<[i32]>::len).max().unwrap_or(0));
            if late && most > 0 && sat_out < 3 {
                let given = harness.clients[&id].tokens.len();
                sat_out += harness.sit_out(1);
                harness.apply();
                assert_eq!(harness.clients[&id].tokens.len(), given, "the row gave a token");
                harness.mask_ready(None);
                assert!(harness.plan());
                assert_eq!(harness.plan.drafts().map(<[i32]>::len).sum::<usize>(), 0);
            }
            harness.apply();
        }
        assert_eq!(most, if id == 3 { 0 } else { 2 * id as usize }, "{id}");
        let tokens = harness.clients[&id].tokens.len() as u64;
        let stats = harness.scheduler.stats();
        assert!(id == 0 || id == 3 || stats.drafts.accepted > tokens / 2, "{stats:?}");
        assert_eq!(
            stats.drafts.accepted, stats.drafts.drafted,
            "drafts that a grammar forces are accepted"
        );
        assert_eq!(sat_out, 3 * usize::from(late));
        harness.drain();
    }
}
