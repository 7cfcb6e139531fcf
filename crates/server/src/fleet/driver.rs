//! Loads and unloads models: runs the actions that the fleet decides, and reports their outcomes to
//! the fleet.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use forebay_engine::Status;
use forebay_fleet::{FleetAction, ModelState, SleepLevel, Ticket};
use forebay_http::panic_message;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use super::{Front, RunningModel};
use crate::state::not_serving;

impl Front {
    /// Runs the actions that are due.
    pub(super) fn step(self: &Arc<Self>) {
        let now = self.now_ms();
        let mut books = self.books.lock();
        for action in books.fleet.poll(now) {
            match action {
                FleetAction::Admit { ticket } => books.tell(ticket, Ok(())),
                FleetAction::Fail { ticket } => books.tell(ticket, Err(())),
                FleetAction::Load { model, bytes } => {
                    tokio::spawn(Arc::clone(self).load(model, bytes));
                }
                FleetAction::Leave { model, level } => {
                    let running = books.slots[model].running.take();
                    tokio::spawn(Arc::clone(self).leave(model, level, running));
                }
            }
        }
        drop(books);
        self.changes.send_modify(|changes| *changes += 1);
        self.wake.notify_one();
    }

    async fn load(self: Arc<Self>, model: usize, bytes: u64) {
        let name = self.entries[model].names[0].clone();
        tracing::info!(model = %name, bytes, "loading");
        let began = Instant::now();
        let (loader, entry) = (Arc::clone(&self.loader), self.entries[model].clone());
        let start = move || {
            let started = AssertUnwindSafe(|| loader.start(model, &entry, bytes));
            std::panic::catch_unwind(started).unwrap_or_else(|panic| {
                Err(format!("its start panicked: {}", panic_message(&*panic)))
            })
        };
        let started = match spawn_blocking(start).await {
            Ok(Ok(started)) => started,
            Ok(Err(reason)) => return self.failed(model, reason),
            Err(error) => return self.failed(model, error.to_string()),
        };
        let (running, ended) = RunningModel::new(started);
        let shared = Arc::clone(&running.shared);
        let asked = Arc::clone(&shared);
        let closes = async {
            // The sender lives in self, so waiting cannot fail.
            let _ = self.closing.subscribe().wait_for(|&closes| closes).await;
        };
        tokio::select! {
            () = shared.loaded.wait(move || matches!(asked.status(), Status::Starting(_))) => {}
            () = closes => {}
        }
        match shared.status() {
            Status::Ready | Status::Recovering(_) => {}
            status => {
                let reason = not_serving(status).to_string();
                running.stop().await;
                return self.failed(model, reason);
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        let facts = shared.engine.facts().filter(|_| self.entries[model].measures);
        let replicas = shared.engine.count() as u64;
        let measured =
            facts.map(|facts| (facts.hand.weight_bytes + facts.hand.kv_bytes) * replicas);
        let held = measured.unwrap_or(bytes);
        tracing::info!(model = %name, bytes = held, seconds, "loaded");
        {
            let mut books = self.books.lock();
            let slot = &mut books.slots[model];
            (slot.running, slot.error) = (Some(running.clone()), None);
            (slot.loads, slot.load_seconds) = (slot.loads + 1, slot.load_seconds + seconds);
            books.fleet.loaded(model, held, self.now_ms());
            if measured.is_some() {
                books.fleet.set_plan(model, held);
            }
        }
        tokio::spawn(Arc::clone(&self).watch(model, running, ended));
        self.step();
    }

    fn failed(self: &Arc<Self>, model: usize, reason: String) {
        tracing::error!(model = %self.entries[model].names[0], "not loaded: {reason}");
        {
            let mut books = self.books.lock();
            books.slots[model].error = Some(reason);
            books.fleet.load_failed(model, self.now_ms());
        }
        self.step();
    }

    /// Waits until a running model dies, and reports that to the fleet.
    async fn watch(
        self: Arc<Self>,
        model: usize,
        running: RunningModel,
        ended: oneshot::Receiver<()>,
    ) {
        tokio::select! {
            () = running.left() => return,
            _ = ended => {}
            () = running.shared.guard.failed() => {}
        }
        // The model may have been unloaded at the same moment.
        if *running.leaving.borrow() {
            return;
        }
        let reason = not_serving(running.shared.status()).to_string();
        tracing::error!(model = %self.entries[model].names[0], "died: {reason}");
        {
            let mut books = self.books.lock();
            let slot = &mut books.slots[model];
            (slot.running, slot.error) = (None, Some(reason));
            books.fleet.died(model, self.now_ms());
        }
        running.shared.abort_all();
        running.stop().await;
        self.forget(model).await;
        self.step();
    }

    async fn leave(
        self: Arc<Self>,
        model: usize,
        level: SleepLevel,
        running: Option<RunningModel>,
    ) {
        let name = &self.entries[model].names[0];
        if let Some(running) = running {
            running.leaving.send_replace(true);
            // Wait for background responses: their HTTP exchange ends before they are computed.
            running.shared.idle().await;
            running.stop().await;
        }
        if level == SleepLevel::Unloaded {
            self.forget(model).await;
        }
        tracing::info!(model = %name, kept = level == SleepLevel::Asleep, "left");
        self.books.lock().fleet.emptied(model);
        self.step();
    }

    /// Drops the state that is kept for the next start of a model. The model's threads may still be
    /// exiting.
    pub(super) async fn forget(&self, model: usize) {
        let loader = Arc::clone(&self.loader);
        if spawn_blocking(move || loader.forget(model)).await.is_err() {
            tracing::error!("the state kept for a model's next start could not be dropped");
        }
    }

    pub(super) fn is_moving(&self) -> bool {
        let books = self.books.lock();
        let moves = |model| {
            let state = books.fleet.state(model);
            state == ModelState::Loading
                || (state == ModelState::Leaving && books.slots[model].running.is_none())
        };
        (0..self.entries.len()).any(moves)
    }

    pub(super) fn fail_waiting(&self) {
        let mut books = self.books.lock();
        let tickets: Vec<Ticket> = books.waiting.keys().copied().collect();
        for ticket in tickets {
            books.fleet.give_up(ticket);
            books.tell(ticket, Err(()));
        }
    }
}
