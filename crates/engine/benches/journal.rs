//! Measures the CPU time that the engine thread takes to note a step.
//! `cargo bench -p forebay-engine`.
//!
//! `step/N` notes a step of N decoding rows, from its plan to the journal, including the two clock
//! readings that this needs. `baseline/N` is the same loop without notes, with the one clock
//! reading that every plan needs.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use forebay_engine::{Clock, Journal, Notes, PlannedStep, StepNote, SystemClock};

const ROWS: [u32; 4] = [1, 64, 256, 1024];

fn note(criterion: &mut Criterion) {
    let clock = SystemClock::default();
    let mut group = criterion.benchmark_group("note");
    for rows in ROWS {
        group.bench_function(BenchmarkId::new("baseline", rows), |bencher| {
            let mut step = 0;
            bencher.iter(|| {
                step += 1;
                black_box(clock.now_us());
                (0..rows).for_each(|row| {
                    black_box((row, step));
                });
            });
        });
        group.bench_function(BenchmarkId::new("step", rows), |bencher| {
            let (mut notes, journal, mut step) = (Notes::default(), Journal::default(), 0);
            bencher.iter(|| {
                step += 1;
                let began = clock.now_us();
                let planned_us = black_box(clock.now_us());
                notes.planned(StepNote {
                    step,
                    planned_us,
                    done_us: 0,
                    device_us: 0,
                    gap_us: 0,
                    planned: PlannedStep {
                        decode_rows: rows,
                        prefill_rows: 0,
                        tokens: rows,
                        images: 0,
                    },
                    plan_us: (planned_us - began) as u32,
                    in_flight: 1,
                });
                let done_us = planned_us + 300;
                notes.done(step, done_us, 250, 0);
                (0..rows).for_each(|row| {
                    // Requests have different numbers of tokens, so each step reports about one in
                    // 64 of them.
                    let nth = 1 + (step as u32 + row) % 1000;
                    notes.token(black_box(row.into()), nth + 1, done_us);
                });
                notes.write(&journal);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, note);
criterion_main!(benches);
