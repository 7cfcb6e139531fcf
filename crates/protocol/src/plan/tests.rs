//! Tests that plans are encoded and decoded without loss, and that invalid plans are rejected.

use crate::columns::KEPT;
use crate::frame::{Frame, FrameError, HEADER_BYTES, Header, Kind, encode_columns};

use super::*;

fn frame(bytes: &[u8]) -> Frame {
    let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>().expect("a header");
    let words = body.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    Frame::new(Header::decode(head).expect("a good header"), words).expect("a good frame")
}

fn new_slot<'a>(slot: u32, tokens: &'a [i32], spec: &'a SlotSpec) -> NewSlot<'a> {
    NewSlot { slot, tokens, prompt_len: tokens.len() as u32, spec, place: None }
}

#[test]
fn long_prompts_leave_the_plan_and_short_ones_stay() {
    let mut plan = StepPlan::default();
    plan.begin(1);
    let spec = SlotSpec::default();
    for (slot, tokens) in [(0, vec![1; 3]), (1, vec![2; 10]), (2, vec![3; 4]), (3, vec![4; 12])] {
        plan.write_slot(&new_slot(slot, &tokens, &spec));
    }
    let (mut arena, mut bytes) = (Vec::new(), Vec::new());
    let before = plan.clone();
    plan.encode_spilling(&mut bytes, 8, |tokens| {
        if arena.len() + tokens.len() > 10 {
            return None;
        }
        let offset = arena.len() as u32 * 4;
        arena.extend_from_slice(tokens);
        Some(offset)
    })
    .expect("within the limit");
    assert_eq!(arena, vec![2; 10]);
    assert_eq!(plan, before);
    let sent = StepPlan::decode(&frame(&bytes)).expect("a plan");
    let left: Vec<_> = sent.new_slots().map(|new| (new.slot, new.tokens.to_vec())).collect();
    assert_eq!(
        left,
        [(0, vec![1; 3]), (1, vec![]), (2, vec![3; 4]), (3, vec![4; 12])],
        "the fourth found the arena full and stays inline"
    );
}

#[test]
fn a_plan_knows_how_many_words_its_frame_may_have() {
    let mut plan = StepPlan::default();
    let sampling = SamplingParams {
        min_tokens: 1,
        logit_bias: [(1, 0.5), (2, 1.5)].into(),
        allowed: Some([4, 5, 6, 7].into()),
        ..SamplingParams::default()
    };
    let whole = SlotSpec {
        sampling,
        stop_ids: [1, 2, 3].into(),
        pooling: Some(Pooling { segment: 2 }),
        embeds: Some(64),
    };
    for spec in [whole, SlotSpec::default()] {
        plan.begin(1);
        let tokens = [7; 5];
        let new = new_slot(0, &tokens, &spec);
        let empty = plan.words();
        plan.write_slot(&new);
        assert_eq!(plan.words(), empty + new.words());
        plan.write_page(0, 0, 9);
        plan.push_row(Row { slot: 0, start: 0, length: 5, want: Want::Tokens(2) });
        plan.want_prompt_logprobs(PromptLogprobsWant { slot: 0, first: 1, count: 4, most: 2 });
        assert_eq!(plan.words(), empty + new.words() + PAGE_WRITE_WORDS + ROW_WORDS);
        let mut bytes = Vec::new();
        plan.encode(&mut bytes).expect("within the limit");
        let most = HEADER_BYTES + 4 * plan.words();
        assert!(bytes.len() <= most && bytes.len() + 4 * empty >= most, "{}", bytes.len());
    }
}

#[test]
fn rows_say_how_many_tokens_they_may_give_only_where_it_is_more_than_one() {
    let mut plan = StepPlan::default();
    plan.begin(1);
    let push = |slot, want, plan: &mut StepPlan| {
        plan.push_row(Row { slot, start: 3, length: 1, want });
    };
    push(0, Want::TOKEN, &mut plan);
    push(1, Want::Nothing, &mut plan);
    assert_eq!(plan.row_tokens, [0; 0]);
    push(2, Want::Tokens(4), &mut plan);
    push(3, Want::Vector, &mut plan);
    push(4, Want::MASKED, &mut plan);
    push(5, Want::TOKEN, &mut plan);
    assert_eq!(plan.row_tokens, [1, 4, 1, 1]);
    let mut bytes = Vec::new();
    plan.encode(&mut bytes).expect("within the limit");
    let read = StepPlan::decode(&frame(&bytes)).expect("a plan");
    let wants: Vec<Want> = read.rows().map(|row| row.want).collect();
    let several = Want::Tokens(4);
    let expected = [Want::TOKEN, Want::Nothing, several, Want::Vector, Want::MASKED, Want::TOKEN];
    assert_eq!(wants, expected);
}

#[test]
fn drafts_come_back_by_row() {
    let mut plan = StepPlan::default();
    plan.begin(1);
    for (slot, want) in [(0, Want::TOKEN), (1, Want::Nothing), (2, Want::MASKED), (3, Want::TOKEN)]
    {
        plan.push_row(Row { slot, start: 3, length: 1, want });
    }
    let none: [&[i32]; 4] = [&[], &[], &[], &[]];
    assert_eq!(plan.drafts().collect::<Vec<_>>(), none);
    plan.push_drafts(0, &[7]);
    plan.push_drafts(2, &[6]);
    plan.push_drafts(3, &[8, 9]);
    assert_eq!(plan.row_tokens, [2, 2, 3]);
    let mut bytes = Vec::new();
    let written = |plan: &StepPlan, bytes: &mut Vec<u8>| {
        plan.encode(bytes).expect("within the limit");
        StepPlan::decode(&frame(bytes))
    };
    let read = written(&plan, &mut bytes).expect("a plan");
    let expected: [&[i32]; 4] = [&[7], &[], &[6], &[8, 9]];
    assert_eq!(read.drafts().collect::<Vec<_>>(), expected);
    let wants: Vec<Want> = read.rows().map(|row| row.want).collect();
    assert_eq!(wants, [Want::Tokens(2), Want::Nothing, Want::Masked(2), Want::Tokens(3)]);
    let refused = |change: &dyn Fn(&mut StepPlan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        let disagree = Err(FrameError::Malformed("plan columns disagree"));
        assert_eq!(written(&plan, &mut Vec::new()), disagree);
    };
    refused(&|plan| plan.draft_tokens.push(1));
    refused(&|plan| plan.draft_tokens[1] = -1);
    refused(&|plan| plan.row_tokens.clear());
    refused(&|plan| plan.row_tokens = vec![1, 2, 3, 1]);
    refused(&|plan| plan.row_tokens = vec![1, 2, 3]);
    // A plan without draft tokens is valid: the hand then drafts by itself.
    plan.draft_tokens.clear();
    assert_eq!(written(&plan, &mut Vec::new()).map(|plan| plan.drafts().count()), Ok(4));
}

#[test]
fn what_is_not_known_is_refused() {
    let refused = |change: &dyn Fn(&mut StepPlan)| {
        let (mut plan, spec) = (StepPlan::default(), SlotSpec::default());
        plan.begin(1);
        plan.write_slot(&new_slot(0, &[1, 2], &spec));
        plan.write_slot(&new_slot(1, &[3], &spec));
        plan.push_row(Row { slot: 0, start: 0, length: 2, want: Want::TOKEN });
        change(&mut plan);
        let mut bytes = Vec::new();
        plan.encode(&mut bytes).expect("within the limit");
        StepPlan::decode(&frame(&bytes)).err()
    };
    assert_eq!(refused(&|_| {}), None);
    let values = |values: &[[i32; 2]]| bytemuck::cast_slice(values).to_vec();
    assert_eq!(refused(&|plan| plan.segments = values(&[[1, 4]])), None);
    let flags = Some(FrameError::Malformed("unknown row flags"));
    assert_eq!(refused(&|plan| plan.rows[0].flags |= 4), None);
    assert_eq!(refused(&|plan| plan.rows[0].flags = FLAG_MASKED), flags);
    assert_eq!(refused(&|plan| plan.rows[0].flags |= 8), flags);
    assert_eq!(refused(&|plan| plan.rows[0].flags = FLAG_SAMPLE | FLAG_POOL), flags);
    let disagree = Some(FrameError::Malformed("plan columns disagree"));
    // The row computes positions 0 and 1, so it can return the log-probabilities of the prompt
    // tokens at positions 1 and 2.
    let wants = |wants: &[[i32; 4]]| bytemuck::cast_slice(wants).to_vec();
    assert_eq!(refused(&|plan| plan.prompt_logprobs = wants(&[[0, 1, 2, 20]])), None);
    let wrong =
        [[0, 0, 1, 0], [0, 1, 3, 0], [0, 3, 1, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, -1]];
    for record in wrong {
        let found = refused(&|plan| plan.prompt_logprobs = wants(&[record]));
        assert_eq!(found, disagree, "{record:?}");
    }
    let twice = wants(&[[0, 1, 1, 0], [0, 2, 1, 0]]);
    assert_eq!(refused(&|plan| plan.prompt_logprobs.clone_from(&twice)), disagree);
    assert_eq!(refused(&|plan| plan.row_tokens = vec![1, 1]), disagree);
    assert_eq!(refused(&|plan| plan.row_tokens = vec![0]), disagree);
    assert_eq!(
        refused(&|plan| plan.embeds = values(&[[2, 64]])),
        disagree,
        "embeddings of a slot that is not new"
    );
    assert_eq!(
        refused(&|plan| plan.segments = values(&[[1, 4], [0, 4]])),
        disagree,
        "slots in another order"
    );
    assert_eq!(
        refused(&|plan| plan.embeds = values(&[[1, -64]])),
        disagree,
        "an offset before the arena"
    );
    assert_eq!(
        refused(&|plan| plan.allowed_counts = values(&[[1, 4]])),
        disagree,
        "counts without ids"
    );
    assert_eq!(
        refused(&|plan| plan.allowed_counts = values(&[[1, 0]])),
        disagree,
        "an empty list of allowed ids"
    );
    assert_eq!(refused(&|plan| plan.allowed_ids = vec![4]), disagree, "ids without a slot");
    let states = |copies: &[[i32; 2]]| bytemuck::cast_slice(copies).to_vec();
    assert_eq!(refused(&|plan| plan.state_loads = states(&[[0, 4], [1, 4]])), None);
    assert_eq!(refused(&|plan| plan.state_saves = states(&[[0, 4], [0, 5]])), None);
    for wrong in [[[0, 4], [0, 5]], [[0, 4], [1, -1]], [[-1, 4], [0, 5]]] {
        assert_eq!(refused(&|plan| plan.state_loads = states(&wrong)), disagree, "{wrong:?}");
    }
    let twice = states(&[[0, 4], [1, 4]]);
    assert_eq!(
        refused(&|plan| plan.state_saves.clone_from(&twice)),
        disagree,
        "a page that is saved to twice"
    );
    let copy = |copy: [i32; 4]| bytemuck::cast_slice(&copy).to_vec();
    assert_eq!(refused(&|plan| plan.copies = copy([1, 5, 3, 4])), disagree, "an unknown direction");
    for direction in [3, 4] {
        let state = copy([1, direction, 3, 4]);
        assert_eq!(refused(&|plan| plan.copies.clone_from(&state)), None, "a copy of a state");
    }
    assert_eq!(
        refused(&|plan| plan.copies = copy([1, 2, 3, 4])),
        disagree,
        "index keys with a hot page"
    );
    assert_eq!(
        refused(&|plan| plan.copies = copy([1, 0, -3, 4])),
        disagree,
        "a copy without a page"
    );
    assert_eq!(
        refused(&|plan| plan.copies = copy([1, 4, -1, 4])),
        disagree,
        "a copy without a state page"
    );
    let wait = Some(FrameError::Malformed("wait_us beside rows or out of range"));
    assert_eq!(refused(&|plan| plan.wait_us = Some(5)), wait, "a plan with rows cannot wait");
    let waits = |us: u32| {
        refused(&move |plan| {
            plan.rows.clear();
            plan.wait_us = Some(us);
        })
    };
    assert_eq!(waits(1000), None);
    assert_eq!(waits(1001), wait);
    assert_eq!(waits(u32::MAX), wait);
}

#[test]
fn columns_that_are_not_declared_so_are_refused() {
    let read = |columns: &[(u32, &[i32])]| {
        let mut bytes = Vec::new();
        let columns = columns.iter().copied();
        encode_columns(Kind::Plan, 3, columns, &mut bytes).expect("within the limit");
        StepPlan::decode(&frame(&bytes)).map(|plan| plan.step())
    };
    assert_eq!(read(&[(8, &[0, 0, 1, 1]), (15, &[])]), Ok(3));
    let record = Err(FrameError::Malformed("plan record length"));
    for column in StepPlan::COLUMNS.iter().filter(|column| column.record.is_some()) {
        assert_eq!(read(&[(column.id, &[0])]), record, "{column:?}");
    }
    assert_eq!(read(&[(15, &[1, 1])]), record, "two numbers, where at most one can be");
    for unknown in [23, 31, u32::MAX] {
        assert_eq!(read(&[(unknown, &[0])]), Err(FrameError::Column(unknown)));
        assert_eq!(read(&[(8, &[0, 0, 1, 1]), (unknown, &[0])]), Err(FrameError::Column(unknown)));
    }
    assert_eq!(read(&[(23, &[0]), (24, &[])]), Err(FrameError::Column(23)));
    let not_a_plan =
        Frame::new(Header { kind: Kind::Result, step: 1, columns: 0, words: 0 }, vec![]);
    let refused = StepPlan::decode(&not_a_plan.expect("a frame"));
    assert_eq!(refused, Err(FrameError::Malformed("not a plan")));
}

#[test]
fn columns_that_grew_for_one_step_shrink_again() {
    let mut plan = StepPlan::default();
    plan.begin(1);
    plan.tokens.resize(8 * KEPT, 0);
    plan.begin(2);
    assert!(plan.tokens.capacity() >= 8 * KEPT, "the next step may be as large");
    plan.begin(3);
    assert!(plan.tokens.capacity() <= KEPT, "the last step was small");
}
