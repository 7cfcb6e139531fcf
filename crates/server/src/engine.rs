//! The engine as the server sees it.

use forebay_engine::{
    BlockHash, EngineHandle, EngineRequest, Facts, RequestId, Stats, Status, SubmitError,
};
use forebay_replicas::{ReplicaReport, Replicas};

/// The server's view of an engine. No call blocks.
pub trait Engine: Send + Sync + 'static {
    /// Gives a request to the engine. Exactly one output with `finish` follows an `Ok`.
    ///
    /// # Errors
    /// The queue is full, the engine drains or is not available.
    fn submit(&self, request: EngineRequest) -> Result<(), SubmitError>;
    /// Ends a request, if it is still alive.
    fn abort(&self, id: RequestId);
    /// The engine's clock, in microseconds.
    fn now_us(&self) -> u64;
    /// The engine's state.
    fn status(&self) -> Status;
    /// The snapshot after the last step, of all replicas together.
    fn stats(&self) -> Stats;
    /// The number of replicas.
    fn count(&self) -> u32;
    /// Each replica by itself.
    fn replicas(&self) -> Vec<ReplicaReport>;
    /// The handles by which each replica is watched, in the order of [`Self::replicas`].
    fn handles(&self) -> Vec<EngineHandle>;
    /// A replica gets no new requests from now on, or gets them again; false: there is no such
    /// replica.
    fn drain_replica(&self, replica: usize, drained: bool) -> bool;
    /// True if every replica was told to take no new requests.
    fn drained(&self) -> bool;
    /// The names of a prompt's full blocks for requests with this salt, as the prefix cache knows
    /// them.
    fn block_names(&self, salt: u64, prompt: &[i32]) -> Vec<BlockHash>;
    /// `None` until the engine has been ready.
    fn facts(&self) -> Option<Facts>;
    /// Has the engine's own thread do `work`, which every step has to wait for.
    fn run(&self, work: Box<dyn FnOnce() + Send>);
    /// Refuses new requests from now on.
    fn drain(&self);
    /// Drops the prefix cache; `reply` gets false when requests are alive and nothing was dropped.
    fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>);
}

impl Engine for Replicas {
    fn submit(&self, request: EngineRequest) -> Result<(), SubmitError> {
        self.submit(request)
    }
    fn abort(&self, id: RequestId) {
        self.abort(id);
    }
    fn now_us(&self) -> u64 {
        self.now_us()
    }
    fn status(&self) -> Status {
        self.status()
    }
    fn stats(&self) -> Stats {
        self.stats()
    }
    fn count(&self) -> u32 {
        self.count()
    }
    fn replicas(&self) -> Vec<ReplicaReport> {
        self.reports()
    }
    fn handles(&self) -> Vec<EngineHandle> {
        self.handles()
    }
    fn drain_replica(&self, replica: usize, drained: bool) -> bool {
        self.drain_replica(replica, drained)
    }
    fn drained(&self) -> bool {
        self.drained()
    }
    fn block_names(&self, salt: u64, prompt: &[i32]) -> Vec<BlockHash> {
        self.block_names(salt, prompt)
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
