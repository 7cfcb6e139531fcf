//! Connects the engines' outputs to clients.

use std::sync::Arc;

use anyhow::Result;
use forebay_engine::{BlockObserver, OutputSink};
use forebay_replicas::Listeners;
use forebay_server::{
    BlockLog, Egress, EgressConfig, EgressSink, Guard, Metrics, PooledModel, PoolingTask,
    ScoreFunction, egress, pooled,
};

use crate::model::{Function, Model, Task};
use crate::resolve::Resolved;

/// The receivers of the engines' outputs.
pub(super) struct Outputs {
    pub(super) metrics: Arc<Metrics>,
    pub(super) egress: Egress,
    /// The model, if it is a pooling model.
    pub(super) pooling: Option<PooledModel>,
    /// The log of cached blocks, for routers; `None` if there is no prefix cache.
    pub(super) blocks: Option<BlockLog>,
}

/// Creates the senders for the outputs of each replica.
pub(super) struct Sinks {
    sink: MakeSink,
    blocks: Option<BlockLog>,
}

impl Sinks {
    /// Creates the sinks of one more replica.
    pub(super) fn replica(&self) -> Listeners {
        let blocks = self.blocks.as_ref();
        Listeners {
            sink: (self.sink)(),
            blocks: blocks.map(|log| Box::new(log.replica()) as Box<dyn BlockObserver>),
        }
    }
}

impl Outputs {
    /// Starts the threads that write responses.
    pub(super) fn start(
        model: &Model,
        resolved: &Resolved,
        guard: &Guard,
    ) -> Result<(Self, Sinks)> {
        let metrics = Arc::new(Metrics::new(
            &resolved.model.served_model_names[0],
            resolved.engine.context_length,
            resolved.device.arrangement.replicas,
        )?);
        let config = resolved.server.egress;
        let (egress_sink, egress) = egress(&metrics, config, guard)?;
        let (sink, pooling) = sinks(model, egress_sink, config, &metrics, guard)?;
        let blocks = resolved.engine.prefix_cache.then(BlockLog::default);
        let sinks = Sinks { sink, blocks: blocks.clone() };
        Ok((Self { metrics, egress, pooling, blocks }, sinks))
    }
}

/// Creates a sink for a replica.
type MakeSink = Box<dyn Fn() -> Box<dyn OutputSink>>;

/// Returns the function that creates a sink for each replica, and the model if it is a pooling
/// model.
fn sinks(
    model: &Model,
    egress: EgressSink,
    config: EgressConfig,
    metrics: &Arc<Metrics>,
    guard: &Guard,
) -> Result<(MakeSink, Option<PooledModel>)> {
    let Some(facts) = &model.pooling else {
        return Ok((Box::new(move || Box::new(egress.clone())), None));
    };
    let (sink, outputs) = pooled(Arc::clone(metrics), config.capacity, guard)?;
    let pooling = PooledModel {
        task: match facts.task {
            Task::Embed => PoolingTask::Embed,
            Task::Score => PoolingTask::Score,
            Task::Classify => PoolingTask::Classify,
        },
        size: facts.size as usize,
        normalize: facts.normalize,
        function: match facts.function {
            Function::Identity => ScoreFunction::Identity,
            Function::Sigmoid => ScoreFunction::Sigmoid,
            Function::Softmax => ScoreFunction::Softmax,
        },
        labels: facts.labels.clone(),
        outputs,
    };
    Ok((Box::new(move || Box::new(sink.clone())), Some(pooling)))
}
