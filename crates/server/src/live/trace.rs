//! Converts the recorded steps to a trace in Chrome's format, which Perfetto can open.
//!
//! The format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use forebay_engine::StepNote;
use serde_json::{Value, json};

use crate::state::Shared;

/// The thread id of a replica's engine thread in the trace.
const ENGINE: u32 = 1;
/// The thread id of a replica's device in the trace.
const DEVICE: u32 = 2;

/// Returns the trace of all replicas. Each replica is a process with two threads: its engine thread
/// and its device.
pub(crate) fn trace(state: &Shared) -> Value {
    let mut events = Vec::new();
    for (at, engine) in state.engine.handles().iter().enumerate() {
        let name = |thread: u32, name: &str| json!({"name": "thread_name", "ph": "M", "pid": at, "tid": thread, "args": {"name": name}});
        events.push(json!({"name": "process_name", "ph": "M", "pid": at, "args": {"name": format!("replica {at}")}}));
        events.extend([name(ENGINE, "engine thread: plans"), name(DEVICE, "device: steps")]);
        let steps = engine.steps_since(0).entries;
        events.extend(steps.iter().flat_map(|step| of_step(at, step)));
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

fn of_step(replica: usize, note: &StepNote) -> [Value; 2] {
    let StepNote { step, planned_us, done_us, device_us, gap_us, planned, plan_us, in_flight } =
        *note;
    let facts = json!({
        "step": step,
        "decode_rows": planned.decode_rows,
        "prefill_rows": planned.prefill_rows,
        "tokens": planned.tokens,
        "images": planned.images,
        "gap_us": gap_us,
        "in_flight": in_flight,
    });
    let began_us = planned_us.saturating_sub(plan_us.into());
    let computed_us = done_us.saturating_sub(device_us.into());
    [
        json!({"name": "plan", "ph": "X", "pid": replica, "tid": ENGINE, "ts": began_us, "dur": plan_us, "args": {"step": step}}),
        json!({"name": format!("step {step}"), "ph": "X", "pid": replica, "tid": DEVICE, "ts": computed_us, "dur": device_us, "args": facts}),
    ]
}
