//! The engine as the server sees it.

use forebay_engine::{EngineHandle, EngineRequest, Facts, RequestId, Stats, Status, SubmitError};

/// What the server needs of an engine. No call blocks.
pub trait Engine: Send + Sync + 'static {
    /// Gives a request to the engine. Exactly one output with `finish` follows an `Ok`.
    ///
    /// # Errors
    /// The queue is full, the engine drains or is not available.
    fn submit(&self, request: EngineRequest) -> Result<(), SubmitError>;
    /// Ends a request, if it is still alive.
    fn abort(&self, id: RequestId);
    /// The engine's state.
    fn status(&self) -> Status;
    /// The snapshot after the last step.
    fn stats(&self) -> Stats;
    /// `None` until the engine has been ready.
    fn facts(&self) -> Option<Facts>;
    /// Has the engine's own thread do `work`, which every step has to wait for.
    fn run(&self, work: Box<dyn FnOnce() + Send>);
    /// Refuses new requests from now on.
    fn drain(&self);
    /// Drops the prefix cache; `reply` gets false when requests are alive and nothing was dropped.
    fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>);
}

impl Engine for EngineHandle {
    fn submit(&self, request: EngineRequest) -> Result<(), SubmitError> {
        self.submit(request)
    }
    fn abort(&self, id: RequestId) {
        self.abort(id);
    }
    fn status(&self) -> Status {
        self.status()
    }
    fn stats(&self) -> Stats {
        self.stats()
    }
    fn facts(&self) -> Option<Facts> {
        self.facts()
    }
    fn run(&self, work: Box<dyn FnOnce() + Send>) {
        self.run(work);
    }
    fn drain(&self) {
        self.drain();
    }
    fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>) {
        self.flush_cache(reply);
    }
}
