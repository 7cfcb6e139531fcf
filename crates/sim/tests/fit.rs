//! Tests that a profile can be recovered from the recording of a simulated run.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_engine::{Executor, Signal};
use forebay_protocol::{NewSlot, Row, SlotSpec, StepPlan, Want};
use forebay_sim::{
    CopyModel, DeviceModel, KvModel, Profile, Recorder, Sample, SimClock, SimConfig, SimExecutor,
    SimText, SparseModel, StateModel, StepLoad, Timing, fit, read_samples,
};

/// A temporary file that is removed when the value is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let unique = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-sim-{}-{unique}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns steps of many shapes: decoding requests, and in some steps a chunk of a prompt.
fn shapes() -> impl Iterator<Item = Vec<Row>> {
    (0..1500_u32).map(|i| {
        let decodes = (i * 7) % 61;
        let mut rows: Vec<Row> = (0..decodes)
            .map(|slot| Row {
                slot,
                start: 10 + (slot * 37 + i * 11) % 900,
                length: 1,
                want: Want::TOKEN,
            })
            .collect();
        if i % 3 == 0 || decodes == 0 {
            let start = (i * 13) % 700;
            rows.push(Row { slot: 100, start, length: 16 + (i * 29) % 500, want: Want::Nothing });
        }
        rows
    })
}

fn record(model: DeviceModel, file: &Scratch) {
    let clock = SimClock::virtual_time();
    let (executor, _control) = SimExecutor::new(SimConfig {
        clock,
        timing: Timing { model, ..Timing::default() },
        seed: 1,
        load_us: 0,
        page_count: 10,
        vocab_size: 10,
        text: SimText::endless((0..10).collect()),
        ..SimConfig::default()
    });
    let target = std::fs::File::create(&file.0).expect("file");
    let mut recorder = Recorder::new(Box::new(executor), target).expect("recorder");
    recorder.start();
    assert!(matches!(recorder.wait(None), Signal::Ready(_)));
    let mut plan = StepPlan::default();
    let spec = SlotSpec::default();
    for (step, rows) in shapes().enumerate() {
        plan.begin(step as u64 + 1);
        for row in rows {
            if row.want.samples() {
                let tokens = vec![1; (row.start + row.length) as usize];
                let prompt_len = tokens.len() as u32;
                let slot = row.slot;
                plan.write_slot(&NewSlot {
                    slot,
                    tokens: &tokens,
                    prompt_len,
                    spec: &spec,
                    place: None,
                });
            }
            plan.push_row(row);
        }
        recorder.submit(std::slice::from_ref(&plan));
        assert!(matches!(recorder.wait(None), Signal::Result(_)));
    }
}

fn close(found: f64, truth: f64, share: f64) -> bool {
    (found - truth).abs() <= share * truth
}

const STRAIGHT: DeviceModel = DeviceModel {
    tower_us: 0.0,
    step_us: 20_000.0,
    weights_us: 0.0,
    token_us: 900.0,
    row_us: 400.0,
    context_us: 2.5,
    attention_us: 0.3,
    host_us: 0.0,
    jitter_sigma: 0.0,
};
const ROOFLINE: DeviceModel = DeviceModel { weights_us: 90_000.0, step_us: 5000.0, ..STRAIGHT };

#[test]
fn a_recording_gives_the_profile_back() {
    for truth in [STRAIGHT, ROOFLINE] {
        for jitter_sigma in [0.0, 0.05] {
            let file = Scratch::new("steps.jsonl");
            record(DeviceModel { jitter_sigma, ..truth }, &file);
            let samples = read_samples(&file.0).expect("samples");
            assert_eq!(samples.len(), shapes().count(), "every step is recorded");
            let found = fit(&samples).expect("fit");
            let share = if jitter_sigma == 0.0 { 0.002 } else { 0.15 };
            let model = found.model;
            for (found, truth) in [
                (model.token_us, truth.token_us),
                (model.row_us, truth.row_us),
                (model.context_us, truth.context_us),
                (model.attention_us, truth.attention_us),
                (model.step_us + model.weights_us, truth.step_us + truth.weights_us),
            ] {
                assert!(close(found, truth, share), "{found} for {truth}: {model:?}");
            }
            assert!((model.jitter_sigma - jitter_sigma).abs() < 0.01, "{model:?}");
            assert!(found.r2 > 0.97, "{found:?}");
            assert!(found.error_percentiles[1] < 0.001 + 2.0 * jitter_sigma, "{found:?}");
        }
    }
}

#[test]
fn steps_that_were_held_up_do_not_matter() {
    let file = Scratch::new("steps.jsonl");
    record(DeviceModel { jitter_sigma: 0.02, ..STRAIGHT }, &file);
    let mut samples = read_samples(&file.0).expect("samples");
    let clean = fit(&samples).expect("fit");
    for sample in samples.iter_mut().step_by(20) {
        sample.step_us *= 8.0;
    }
    let held_up = fit(&samples).expect("fit");
    assert!(held_up.outliers >= samples.len() / 20);
    assert!(close(held_up.model.token_us, clean.model.token_us, 0.05), "{held_up:?}");
    assert!(close(held_up.model.step_us, clean.model.step_us, 0.1), "{held_up:?}");
}

#[test]
fn a_fitted_profile_survives_its_file() {
    let file = Scratch::new("fitted.toml");
    let samples: Vec<Sample> = (1..100)
        .map(|rows| {
            let load = StepLoad { rows, decode_rows: rows, ..StepLoad::default() };
            Sample { load, step_us: STRAIGHT.median_us(&load) }
        })
        .collect();
    let profile = Profile {
        name: file.0.file_stem().expect("stem").to_string_lossy().into_owned(),
        origin: "made up \"for\" a test\nof two lines".into(),
        device: "none".into(),
        model: "none".into(),
        sparse: SparseModel::default(),
        states: StateModel::default(),
        kv_tokens: 1000,
        load_s: 1.5,
        time: fit(&samples).expect("fit").model,
        kv: KvModel { main_bytes_token: 512, ..KvModel::default() },
        copy: CopyModel {
            save_gbps: Some(2.5),
            restore_gbps: None,
            latency_us: 3.0,
            ..CopyModel::default()
        },
    };
    std::fs::write(&file.0, profile.to_toml().expect("TOML")).expect("file");
    assert_eq!(Profile::find(&file.0.display().to_string()).expect("profile"), profile);
}

#[test]
fn too_few_steps_are_refused() {
    let sample = Sample { load: StepLoad::default(), step_us: 1.0 };
    assert!(fit(&[sample; 9]).is_err());
    assert!(fit(&[Sample { step_us: 0.0, ..sample }; 99]).is_err());
    assert!(fit(&[sample; 10]).is_ok());
}

/// The recorder forwards everything unchanged.
#[test]
fn a_recorder_passes_wakes_on() {
    let config = SimConfig {
        clock: SimClock::virtual_time(),
        timing: Timing { model: DeviceModel::INSTANT, ..Timing::default() },
        load_us: 5,
        page_count: 10,
        vocab_size: 10,
        text: SimText::endless(vec![1]),
        ..SimConfig::default()
    };
    let (executor, _control) = SimExecutor::new(config);
    let mut recorder = Recorder::new(Box::new(executor), std::io::sink()).expect("recorder");
    recorder.start();
    let waker: Arc<_> = recorder.waker();
    waker.wake();
    assert!(matches!(recorder.wait(None), Signal::Woken));
    assert!(matches!(recorder.wait(None), Signal::Ready(_)));
    recorder.stop();
}
