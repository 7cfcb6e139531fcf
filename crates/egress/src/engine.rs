//! The interface between the server and an engine.

use forebay_engine::{
    AdapterOrder, BlockHash, EngineHandle, EngineRequest, Facts, RequestId, Stats, Status,
    SubmitError,
};
use forebay_replicas::{ReplicaReport, Replicas, Role};

/// An engine, as the server uses it. No method blocks.
pub trait Engine: Send + Sync + 'static {
    /// Submits a request to the engine. If this returns `Ok`, exactly one output with `finish`
    /// follows.
    ///
    /// # Errors
    /// The queue is full, or the engine is draining or not available.
    fn submit(&self, request: EngineRequest) -> Result<(), SubmitError>;
    /// Aborts a request, if it has not ended.
    fn abort(&self, id: RequestId);
    /// The time of the engine's clock, in microseconds.
    fn now_us(&self) -> u64;
    /// The engine's state.
    fn status(&self) -> Status;
    /// The statistics after the last step, summed over all replicas.
    fn stats(&self) -> Stats;
    /// The number of replicas.
    fn count(&self) -> u32;
    /// The report of each replica.
    fn replicas(&self) -> Vec<ReplicaReport>;
    /// The handles of the replicas, in the order of [`Self::replicas`].
    fn handles(&self) -> Vec<EngineHandle>;
    /// Drains a replica, or if `drained` is false, lets it take new requests again. Returns false
    /// if there is no such replica.
    fn drain_replica(&self, replica: usize, drained: bool) -> bool;
    /// Changes the role of a replica. Returns false if there is no such replica, or if replicas
    /// have no roles.
    fn set_role(&self, replica: usize, role: Role) -> bool;
    /// True if replicas have roles.
    fn has_roles(&self) -> bool;
    /// True if every replica is drained.
    fn drained(&self) -> bool;
    /// The names of the full blocks of a prompt, for requests with this salt.
    fn block_names(&self, salt: u64, prompt: &[i32]) -> Vec<BlockHash>;
    /// The largest number of tokens in these leading blocks that any one replica has cached.
    fn cached(&self, names: &[BlockHash]) -> u64;
    /// Informs the engine that later requests may use an adapter, or that no later request will use
    /// it.
    fn adapter(&self, order: &AdapterOrder);
    /// The facts that the hand reported, and limits derived from them; `None` until the engine is
    /// ready.
    fn facts(&self) -> Option<Facts>;
    /// Runs `work` on the engine's thread. No step is planned while it runs.
    fn run(&self, work: Box<dyn FnOnce() + Send>);
    /// Makes the engine refuse new requests from now on.
    fn drain(&self);
    /// Drops all blocks of the prefix cache that no request uses. `reply` gets false if running
    /// requests still use some.
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
    fn set_role(&self, replica: usize, role: Role) -> bool {
        self.set_role(replica, role)
    }
    fn has_roles(&self) -> bool {
        self.has_roles()
    }
    fn drained(&self) -> bool {
        self.drained()
    }
    fn block_names(&self, salt: u64, prompt: &[i32]) -> Vec<BlockHash> {
        self.block_names(salt, prompt)
    }
    fn cached(&self, names: &[BlockHash]) -> u64 {
        self.cached(names)
    }
    fn adapter(&self, order: &AdapterOrder) {
        self.adapter(order);
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
