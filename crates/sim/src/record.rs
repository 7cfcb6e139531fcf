//! Records the load of each step and its time on a device, for [`crate::fit`].

use std::collections::VecDeque;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use forebay_engine::{Executor, Payload, Signal, There, Wake};
use forebay_protocol::{AdapterOrder, StepMasks, StepPlan, StepTiming};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::{error, info};

use crate::load::StepLoad;

/// The number of steps that may wait to be written. If writing is slower than the device, steps are
/// dropped, so that the device is not delayed.
const QUEUE: usize = 16_384;

/// A line of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The number of the step.
    pub step: u64,
    /// The load of the step.
    #[serde(flatten)]
    pub load: StepLoad,
    /// The device's compute time in microseconds.
    pub device_us: u32,
    /// The time in microseconds for which the device was idle before the step.
    pub gap_us: u32,
}

/// An executor that records the steps of another executor, which runs one replica.
pub struct Recorder {
    inner: Box<dyn Executor>,
    in_flight: VecDeque<StepLoad>,
    /// The channel to the writer; `None` only while the recorder is being dropped.
    steps: Option<Sender<StepRecord>>,
    dropped: u64,
    writer: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Records the steps of `inner` into `file`, one JSON object per line. A separate thread writes
    /// the file.
    ///
    /// # Errors
    /// The thread could not be created.
    pub fn new(
        inner: Box<dyn Executor>,
        file: impl Write + Send + 'static,
    ) -> std::io::Result<Self> {
        let (steps, queue) = bounded(QUEUE);
        let writer = std::thread::Builder::new().name("step recorder".into()).spawn(move || {
            if let Err(why) = write_all(&queue, BufWriter::new(file)) {
                error!("steps are no longer recorded: {why}");
            }
        })?;
        let (steps, writer) = (Some(steps), Some(writer));
        Ok(Self { inner, in_flight: VecDeque::new(), steps, dropped: 0, writer })
    }

    fn record(&mut self, step: StepRecord) {
        if let Some(steps) = &self.steps
            && let Err(TrySendError::Full(_)) = steps.try_send(step)
        {
            self.dropped += 1;
        }
    }
}

fn write_all(queue: &Receiver<StepRecord>, mut file: impl Write) -> std::io::Result<()> {
    while let Ok(step) = queue.recv() {
        serde_json::to_writer(&mut file, &step)?;
        file.write_all(b"\n")?;
        if queue.is_empty() {
            file.flush()?;
        }
    }
    file.flush()
}

impl Executor for Recorder {
    fn start(&mut self) {
        self.in_flight.clear();
        self.inner.start();
    }

    fn limit_pages(&mut self, pages: u32, host_pages: u32) {
        self.inner.limit_pages(pages, host_pages);
    }

    fn replace_model(&mut self, model: Value) -> Value {
        self.inner.replace_model(model)
    }

    fn masks(&mut self, member: usize, masks: &StepMasks) {
        self.inner.masks(member, masks);
    }

    fn submit(&mut self, plans: &[StepPlan]) {
        self.in_flight.extend(plans.first().map(StepLoad::of));
        self.inner.submit(plans);
    }

    fn wait(&mut self, timeout_us: Option<u64>) -> Signal {
        let signal = self.inner.wait(timeout_us);
        match &signal {
            Signal::Result(results) => {
                // A step that only waits for copies has no compute time.
                if let Some(load) = self.in_flight.pop_front().filter(|load| load.rows > 0)
                    && let [result] = &results[..]
                {
                    let StepTiming { device_us, gap_us } = result.timing;
                    self.record(StepRecord { step: result.step, load, device_us, gap_us });
                }
            }
            Signal::Died(_) | Signal::OutOfMemory(_) => self.in_flight.clear(),
            _ => {}
        }
        signal
    }

    fn adapter(&mut self, member: usize, order: &AdapterOrder) {
        self.inner.adapter(member, order);
    }

    fn is_near(&self) -> bool {
        self.inner.is_near()
    }

    fn carry(&mut self, member: usize, payload: &Arc<dyn Payload>, there: There) {
        self.inner.carry(member, payload, there);
    }

    fn stop(&mut self) {
        self.inner.stop();
    }

    fn kill(&mut self) {
        self.inner.kill();
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(writer) = self.writer.take() {
            // The writer thread has already reported its errors.
            let _ = writer.join();
        }
        if self.dropped > 0 {
            info!(steps = self.dropped, "steps were not recorded, the file was too slow");
        }
    }
}
