//! Compares the encoder and decoder with the frames in `tests/wire/`, which the Python tests check
//! too.

use std::path::{Path, PathBuf};

use forebay_protocol::{
    AdapterOrder, Direction, Frame, Grid, HEADER_BYTES, Header, ImageSpan, Kind, MaskPlace,
    Message, NewSlot, PageCopy, PlaceWrite, Pooling, PromptLogprobsWant, ReceivedMasks, Row,
    RowMask, SamplingParams, SlotSpec, Span, StateCopy, StepMasks, StepPlan, StepResult, TowerWork,
    Want, encode_json, encode_place, tell_group,
};
use serde_json::Value;

fn fixtures() -> (PathBuf, Vec<Value>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/wire");
    let text = std::fs::read_to_string(folder.join("fixtures.json")).expect("fixtures.json");
    let description: Value = serde_json::from_str(&text).expect("JSON");
    (folder, description["fixtures"].as_array().expect("a list").clone())
}

fn frame(bytes: &[u8]) -> Frame {
    let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>().expect("a header");
    let words = body.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    Frame::new(Header::decode(head).expect("a good header"), words).expect("a good frame")
}

const FLOAT_COLUMNS: [&str; 5] =
    ["slot_floats", "bias_values", "logprob_values", "pooled", "prompt_values"];

fn column(name: &str, values: &Value) -> Vec<i32> {
    let word = |value: &Value| match FLOAT_COLUMNS.contains(&name) {
        true => (value.as_f64().expect("a number") as f32).to_bits().cast_signed(),
        false => i32::try_from(value.as_i64().expect("an integer")).expect("32 bits"),
    };
    values.as_array().expect("a list").iter().map(word).collect()
}

/// Returns the id of a column, as in docs/protocol.md.
fn id(kind: &str, column: &str) -> u32 {
    let names: &[&str] = match kind {
        "plan" => &[
            "slots",
            "slot_floats",
            "tokens",
            "stop_ids",
            "bias_ids",
            "bias_values",
            "page_writes",
            "rows",
            "row_tokens",
            "segments",
            "embeds",
            "allowed_counts",
            "allowed_ids",
            "copies",
            "wait_us",
            "host_writes",
            "hot_rows",
            "copy_spans",
            "images",
            "image_pages",
            "image_spans",
            "span_pages",
            "unused",
            "prompt_logprobs",
            "group",
            "draft_tokens",
            "state_loads",
            "state_saves",
            "place_writes",
            "slot_places",
            "unused",
            "copy_sources",
            "window_writes",
        ],
        "masks" => &["offsets", "words", "no_token"],
        "plan_at" => &["place"],
        _ => &[
            "tokens",
            "row_errors",
            "logprob_counts",
            "logprob_ids",
            "logprob_values",
            "timing",
            "pooled",
            "token_counts",
            "copied",
            "copy_timing",
            "sparse_rows",
            "copy_wait_us",
            "prompt_ranks",
            "prompt_ids",
            "prompt_values",
            "placed",
        ],
    };
    let at = names.iter().position(|name| *name == column);
    1 + at.unwrap_or_else(|| panic!("no column {column}")) as u32
}

fn kind(name: &str) -> Kind {
    match name {
        "hello" => Kind::Hello,
        "config" => Kind::Config,
        "progress" => Kind::Progress,
        "ready" => Kind::Ready,
        "plan" => Kind::Plan,
        "result" => Kind::Result,
        "fatal" => Kind::Fatal,
        "shutdown" => Kind::Shutdown,
        "masks" => Kind::Masks,
        "store" => Kind::Store,
        "store_reply" => Kind::StoreReply,
        "plan_at" => Kind::PlanAt,
        "adapter" => Kind::Adapter,
        other => panic!("no kind {other}"),
    }
}

#[test]
fn both_languages_write_the_same_bytes() {
    let (folder, fixtures) = fixtures();
    assert!(fixtures.len() >= 8);
    for fixture in fixtures {
        let name = fixture["name"].as_str().expect("a name");
        let bytes = std::fs::read(folder.join(fixture["file"].as_str().expect("a file")))
            .expect("the file");
        let got = frame(&bytes);
        let kind_name = fixture["kind"].as_str().expect("a kind");
        assert_eq!(got.header().kind, kind(kind_name), "{name}");
        assert_eq!(got.header().step, fixture["step"].as_u64().expect("a step"), "{name}");
        if let Some(text) = fixture["json"].as_str() {
            if !text.is_empty() {
                assert_eq!(got.json().expect("text"), text, "{name}");
            }
            assert_eq!(encode_json(got.header().kind, text).as_ref(), Ok(&bytes), "{name}");
            continue;
        }
        let columns = fixture["columns"].as_object().expect("columns");
        let described =
            columns.iter().map(|(name, values)| (id(kind_name, name), column(name, values)));
        let there = got.columns().map(|(id, words)| (id, words.to_vec()));
        assert_eq!(there.collect::<Vec<_>>(), described.collect::<Vec<_>>(), "{name}");
        let mut again = Vec::new();
        match got.header().kind {
            // The brain writes masks and never reads them.
            Kind::Masks => continue,
            Kind::PlanAt => {
                let place = &columns["place"];
                let word = |at: usize| place[at].as_u64().expect("a word") as u32;
                encode_place(got.header().step, word(0), word(1), &mut again)
            }
            Kind::Plan => StepPlan::decode(&got).expect("a plan").encode(&mut again),
            _ => StepResult::decode(&got).expect("a result").encode(&mut again),
        }
        .expect("within the limit");
        assert_eq!(again, bytes, "{name}");
    }
}

/// The plans of a step group carry the token counts of all ranks.
#[test]
fn a_group_s_plans_are_the_golden_ones() {
    let (folder, _) = fixtures();
    let mut plans = vec![StepPlan::default(); 3];
    plans.iter_mut().for_each(|plan| plan.begin(77));
    plans[1].write_page(1, 0, 6);
    plans[1].push_row(Row { slot: 1, start: 0, length: 5, want: Want::Nothing });
    plans[1].push_row(Row { slot: 3, start: 128, length: 1, want: Want::TOKEN });
    plans[2].push_row(Row { slot: 0, start: 0, length: 300, want: Want::TOKEN });
    tell_group(&mut plans);
    assert!(plans.iter().all(|plan| plan.group() == [0, 6, 300]));
    let mut got = Vec::new();
    for (rank, file) in [(0, "plan_group_idle.bin"), (1, "plan_group.bin")] {
        plans[rank].encode(&mut got).expect("within the limit");
        assert_eq!(got, std::fs::read(folder.join(file)).expect("the file"));
    }
    // The next step clears the counts. A plan without a group has none.
    plans[1].begin(78);
    assert!(plans[1].group().is_empty());
    tell_group(&mut plans[1..2]);
    assert!(plans[1].group().is_empty());
}

#[test]
fn a_column_that_is_no_group_s_is_refused() {
    let rows = [4, 0, 6, 1];
    for (group, fine) in [
        (vec![6, 0], true),
        (vec![2, 6, 9], true),
        (vec![6], false),
        (vec![2, 9], false),
        (vec![6, -1], false),
        (vec![6; 257], false),
    ] {
        let columns = [(8, &rows[..]), (25, &group[..])];
        let mut words: Vec<i32> = Vec::new();
        for (id, column) in columns {
            words.extend([id, column.len() as i32]);
        }
        columns.iter().for_each(|(_, column)| words.extend_from_slice(column));
        let header = Header { kind: Kind::Plan, step: 1, columns: 2, words: words.len() as u32 };
        let frame = Frame::new(header, words).expect("a good frame");
        assert_eq!(StepPlan::decode(&frame).is_ok(), fine, "{group:?}");
    }
}

/// Builds a plan with images through the scheduler's calls.
#[test]
fn the_scheduler_s_calls_write_the_golden_plan_of_images() {
    let (folder, _) = fixtures();
    let bytes = std::fs::read(folder.join("plan_images.bin")).expect("the file");
    let (wide, small) = (Grid { rows: 38, columns: 38 }, Grid { rows: 1, columns: 70 });
    let mut plan = StepPlan::default();
    plan.begin(31);
    plan.push_row(Row { slot: 0, start: 0, length: 7, want: Want::Nothing });
    let work = TowerWork { image: 3, first: 0, end: 9, grid: wide, patches: Some(4096) };
    plan.push_image(work, [].into_iter());
    let work = TowerWork { image: 4, first: 18, end: 27, grid: small, patches: None };
    plan.push_image(work, [12, 7].into_iter());
    plan.give_up_image(5);
    let span = ImageSpan { position: 4, grid: small, rope: 4 };
    plan.write_image_span(0, span, [12, 7].into_iter());
    let span = ImageSpan { position: 76, grid: wide, rope: 76 };
    plan.write_image_span(0, span, [].into_iter());
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, bytes);
    assert_eq!(plan.images().map(|(_, pages)| pages.len()).collect::<Vec<_>>(), [0, 2, 0]);
    assert_eq!(plan.images().nth(1), Some((work, &[12, 7][..])));
    assert_eq!(plan.image_spans().nth(1), Some((0, span, &[][..])));
}

/// Builds a plan with a pooling prompt through the scheduler's calls.
#[test]
fn the_scheduler_s_calls_write_the_golden_pooling_plan() {
    let (folder, _) = fixtures();
    let bytes = std::fs::read(folder.join("plan_pool.bin")).expect("the file");
    let mut plan = StepPlan::default();
    plan.begin(5);
    for (slot, tokens, segment) in [(2, [101, 7592, 102, 0], 0), (0, [101, 9, 102, 8], 3)] {
        let tokens = if segment == 0 { &tokens[..3] } else { &tokens[..] };
        let prompt_len = tokens.len() as u32;
        let spec = SlotSpec { pooling: Some(Pooling { segment }), ..SlotSpec::default() };
        plan.write_slot(&NewSlot { slot, tokens, prompt_len, spec: &spec, place: None });
        plan.push_row(Row { slot, start: 0, length: prompt_len, want: Want::Vector });
    }
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, bytes);
}

/// Builds a plan of decoding rows through the scheduler's calls, so that the calls and the bytes
/// cannot diverge.
#[test]
fn the_scheduler_s_calls_write_the_golden_plan() {
    let (folder, _) = fixtures();
    let bytes = std::fs::read(folder.join("plan_decode.bin")).expect("the file");
    let mut plan = StepPlan::default();
    plan.begin(1_099_511_627_783);
    plan.write_page(3, 8, 41);
    plan.push_row(Row { slot: 0, start: 17, length: 1, want: Want::TOKEN });
    plan.push_row(Row { slot: 3, start: 128, length: 1, want: Want::TOKEN });
    plan.push_row(Row { slot: 2, start: 5, length: 1, want: Want::Nothing });
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, bytes);
}

/// Builds a plan in which a slot becomes sparse through the scheduler's calls.
#[test]
fn the_scheduler_s_calls_write_the_golden_sparse_plan() {
    let (folder, _) = fixtures();
    let bytes = std::fs::read(folder.join("plan_sparse.bin")).expect("the file");
    let mut plan = StepPlan::default();
    plan.begin(14);
    plan.drop_page(3, 2);
    plan.write_page(3, 4, 17);
    plan.write_host(3, 4, 6);
    plan.write_hot_rows(3, 0, 20);
    plan.write_hot_rows(3, 1, 21);
    plan.push_row(Row { slot: 3, start: 128, length: 1, want: Want::TOKEN });
    let copies = [
        (9, Direction::Save, Some(17), 6, Some(Span { first: 7, count: 1 })),
        (10, Direction::RestoreIndex, None, 5, None),
        (11, Direction::Restore, Some(18), 5, None),
    ];
    for (ticket, direction, hot, host, span) in copies {
        plan.push_copy(PageCopy { ticket, direction, hot, host, span, lender: None });
    }
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, bytes);
    let read = StepPlan::decode(&frame(&bytes)).expect("a plan");
    assert_eq!(read.page_writes().collect::<Vec<_>>(), [(3, 2, None), (3, 4, Some(17))]);
    assert_eq!(read.copies().nth(1).map(|copy| (copy.hot, copy.span)), Some((None, None)));
}

/// Builds a plan with adapters through the scheduler's calls.
#[test]
fn the_scheduler_s_calls_write_the_golden_places() {
    let (folder, _) = fixtures();
    let bytes = std::fs::read(folder.join("plan_places.bin")).expect("the file");
    let mut plan = StepPlan::default();
    plan.begin(21);
    let sampling = SamplingParams { temperature: 0.0, seed: 5, ..SamplingParams::default() };
    let spec = SlotSpec { sampling, ..SlotSpec::default() };
    let tokens = [11, 12, 13];
    plan.write_slot(&NewSlot {
        slot: 2,
        tokens: &tokens,
        prompt_len: 3,
        spec: &spec,
        place: Some(3),
    });
    plan.write_page(2, 0, 9);
    plan.push_row(Row { slot: 2, start: 0, length: 3, want: Want::TOKEN });
    let writes = [(4, 1, 7), (5, 0, 8)].map(|(ticket, place, id)| PlaceWrite { ticket, place, id });
    writes.into_iter().for_each(|write| plan.write_place(write));
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, bytes);
    let read = StepPlan::decode(&frame(&bytes)).expect("a plan");
    assert_eq!(read.new_slots().next().map(|new| new.place), Some(Some(3)));
    assert_eq!(read.place_writes(), writes);
    let adapter = std::fs::read(folder.join("adapter.bin")).expect("the file");
    assert_eq!(AdapterOrder::Forget { id: 3 }.encode().as_ref(), Ok(&adapter));
}

/// Builds a plan with log-probabilities of prompts through the scheduler's calls.
#[test]
fn the_scheduler_s_calls_write_the_golden_wants_of_prompts() {
    let (folder, _) = fixtures();
    let bytes = std::fs::read(folder.join("plan_prompt_logprobs.bin")).expect("the file");
    let wants = [
        PromptLogprobsWant { slot: 3, first: 1, count: 3, most: 2 },
        PromptLogprobsWant { slot: 2, first: 130, count: 63, most: 0 },
    ];
    let mut plan = StepPlan::default();
    plan.begin(15);
    plan.push_row(Row { slot: 0, start: 17, length: 1, want: Want::TOKEN });
    plan.push_row(Row { slot: 3, start: 0, length: 4, want: Want::TOKEN });
    plan.push_row(Row { slot: 2, start: 128, length: 64, want: Want::Nothing });
    for want in wants {
        plan.want_prompt_logprobs(want);
    }
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, bytes);
    let read = StepPlan::decode(&frame(&bytes)).expect("a plan");
    assert_eq!(read.prompt_logprobs().collect::<Vec<_>>(), wants);
}

/// Builds plans with copies through the scheduler's calls.
#[test]
fn the_scheduler_s_calls_write_the_golden_copies() {
    let (folder, _) = fixtures();
    let read = |name| std::fs::read(folder.join(name)).expect("the file");
    let mut plan = StepPlan::default();
    plan.begin(12);
    plan.write_page(3, 8, 41);
    plan.push_row(Row { slot: 3, start: 128, length: 1, want: Want::TOKEN });
    plan.push_copy(PageCopy {
        ticket: 7,
        direction: Direction::Save,
        hot: Some(41),
        host: 2,
        span: None,
        lender: None,
    });
    plan.push_copy(PageCopy {
        ticket: 8,
        direction: Direction::Restore,
        hot: Some(40),
        host: 0,
        span: None,
        lender: None,
    });
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, read("plan_copies.bin"));
    let copies: Vec<u32> = plan.copies().map(|copy| copy.ticket).collect();
    assert_eq!((copies, plan.wait_us()), (vec![7, 8], 0));
    plan.begin(22);
    for (ticket, hot, host, lender) in [(3, 5, 6, None), (4, 7, 9, Some(1))] {
        let (direction, span) = (Direction::Restore, None);
        plan.push_copy(PageCopy { ticket, direction, hot: Some(hot), host, span, lender });
    }
    plan.wait(1000);
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, read("plan_lent.bin"));
    let lent = StepPlan::decode(&frame(&got)).expect("a plan");
    assert_eq!(lent.copies().map(|copy| copy.lender).collect::<Vec<_>>(), [None, Some(1)]);
    plan.begin(13);
    let last = i32::MAX.cast_unsigned();
    plan.push_copy(PageCopy {
        ticket: last,
        direction: Direction::Restore,
        hot: Some(3),
        host: 5,
        span: None,
        lender: None,
    });
    plan.wait(1000);
    plan.encode(&mut got).expect("within the limit");
    assert_eq!((plan.wait_us(), &got), (1000, &read("plan_wait.bin")));
}

/// Builds a plan with states: one row decodes and its state is saved, another starts from a saved
/// state.
#[test]
fn the_engine_s_calls_write_the_golden_states() {
    let (folder, _) = fixtures();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let (mut plan, spec) = (StepPlan::default(), SlotSpec { sampling, ..SlotSpec::default() });
    plan.begin(79);
    plan.write_slot(&NewSlot { slot: 6, tokens: &[4, 5], prompt_len: 2, spec: &spec, place: None });
    plan.write_page(6, 0, 3);
    plan.push_row(Row { slot: 0, start: 15, length: 1, want: Want::TOKEN });
    plan.save_state(0, 7);
    plan.load_state(6, 2);
    plan.push_row(Row { slot: 6, start: 16, length: 16, want: Want::Nothing });
    plan.save_state(6, 3);
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, std::fs::read(folder.join("plan_states.bin")).expect("the file"));
    let copies = |copies: &mut dyn Iterator<Item = StateCopy>| {
        copies.map(|copy| (copy.slot, copy.page)).collect::<Vec<_>>()
    };
    assert_eq!(copies(&mut plan.state_loads()), [(6, 2)]);
    assert_eq!(copies(&mut plan.state_saves()), [(0, 7), (6, 3)]);
}

/// Builds a plan that copies states to the host and back.
#[test]
fn the_scheduler_s_calls_write_the_golden_copies_of_states() {
    let (folder, _) = fixtures();
    let mut plan = StepPlan::default();
    plan.begin(80);
    plan.push_row(Row { slot: 0, start: 15, length: 1, want: Want::TOKEN });
    plan.save_state(0, 7);
    let copies = [(0, Direction::SaveState, 7, 2), (1, Direction::RestoreState, 5, 1)];
    for (nth, direction, page, host) in copies {
        let (ticket, hot) = ((1 << 30) + nth, Some(page));
        plan.push_copy(PageCopy { ticket, direction, hot, host, span: None, lender: None });
    }
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, std::fs::read(folder.join("plan_state_copies.bin")).expect("the file"));
    let read = StepPlan::decode(&frame(&got)).expect("a plan");
    assert!(read.copies().all(|copy| copy.direction.is_of_state()));
    assert_eq!(
        read.copies().map(|copy| copy.direction.is_save()).collect::<Vec<_>>(),
        [true, false]
    );
}

/// Builds masks for a vocabulary of 70 tokens: one in the arena, one that allows everything, and
/// two in the frame; then two rows that return no token.
#[test]
fn the_engine_s_calls_write_the_golden_masks() {
    let (folder, _) = fixtures();
    let read = |name| std::fs::read(folder.join(name)).expect("the file");
    let mut plan = StepPlan::default();
    plan.begin(21);
    for (slot, want) in [(0, Want::MASKED), (1, Want::TOKEN), (2, Want::MASKED)] {
        plan.push_row(Row { slot, start: 17, length: 1, want });
    }
    for slot in [3, 4] {
        plan.push_row(Row { slot, start: 0, length: 4, want: Want::MASKED });
    }
    let mut got = Vec::new();
    plan.encode(&mut got).expect("within the limit");
    assert_eq!(got, read("plan_masked.bin"));
    let tokens = |words: [u32; 3]| RowMask::Tokens(words.to_vec());
    let mut masks = StepMasks {
        step: 21,
        masks: vec![
            tokens([1, 0, 0]),
            RowMask::Everything,
            tokens([0x8000_0000, 0xffff_ffff, 0x3f]),
            tokens([0, 0, 0x20]),
        ],
    };
    let place = |mask: &[u32]| (mask[0] == 1).then_some(4096);
    masks.encode_spilling(&mut got, place).expect("within the limit");
    assert_eq!(got, read("masks.bin"));
    masks.masks[0] = RowMask::NoToken;
    masks.masks[2] = RowMask::NoToken;
    masks.encode_spilling(&mut got, place).expect("within the limit");
    assert_eq!(got, read("masks_no_token.bin"));
    let received = ReceivedMasks::decode(&frame(&got)).expect("a good one");
    let places =
        [MaskPlace::NoToken, MaskPlace::Everything, MaskPlace::NoToken, MaskPlace::Inline(0)];
    assert_eq!(received.places, places);
    assert_eq!(received.inline(0, 3), Some(&[0, 0, 0x20][..]));
}

#[test]
fn a_new_slot_reads_back_as_written() {
    let sampling = SamplingParams {
        temperature: 0.75,
        top_k: 40,
        seed: 0x1234_5678_dead_beef,
        min_tokens: 10,
        logprobs: Some(5),
        logit_bias: [(10, -100.0), (20, 0.5)].into(),
        allowed: Some([10, 20, 30].into()),
        ..SamplingParams::default()
    };
    let pooling = Some(Pooling { segment: 3 });
    let spec = SlotSpec { sampling, stop_ids: [2, 5].into(), pooling, embeds: Some(640) };
    let mut plan = StepPlan::default();
    plan.begin(9);
    let tokens = [1, 2, 3];
    plan.write_slot(&NewSlot { slot: 7, tokens: &tokens, prompt_len: 2, spec: &spec, place: None });
    let mut bytes = Vec::new();
    plan.encode(&mut bytes).expect("within the limit");
    let plan = StepPlan::decode(&frame(&bytes)).expect("a plan");
    let new: Vec<_> = plan.new_slots().collect();
    assert_eq!(new.len(), 1);
    assert_eq!((new[0].slot, new[0].tokens, new[0].prompt_len), (7, &tokens[..], 2));
    assert_eq!(new[0].spec, spec);
}
