//! Connects the engines to their set of replicas.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_engine::{
    BlockEvent, BlockObserver, FinishReason, Orphan, Output, OutputSink, Peers, QueuedRequest,
    RequestError, RequestId,
};
use tracing::info;

use crate::blocks::News;
use crate::replicas::Shared;

/// A sink that removes requests from the ledger when their last outputs are delivered.
pub(crate) struct CountingSink {
    pub(crate) shared: Arc<Shared>,
    pub(crate) at: usize,
    pub(crate) inner: Box<dyn OutputSink>,
}

impl OutputSink for CountingSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        let mut settled = Vec::new();
        let drifted = {
            let mut dispatch = self.shared.dispatch.lock();
            for output in &outputs {
                let id = output.id.0;
                if output.token.is_some() {
                    settled.extend(dispatch.token(self.at, id));
                }
                if output.finish.is_some() {
                    settled.extend(dispatch.ended(id));
                }
            }
            self.shared.note_room(&mut dispatch, self.at);
            self.shared.press(&mut dispatch);
            if self.shared.moves() { dispatch.drifted() } else { None }
        };
        self.shared.settled(settled);
        self.inner.deliver(outputs);
        if let Some((from, to)) = drifted
            && let Some(engine) = self.shared.engines().get(from)
        {
            engine.spare(to);
        }
    }
}

impl Drop for CountingSink {
    /// Records the end of all remaining requests. The engine has ended, perhaps by a panic, so it
    /// will report no more ends.
    fn drop(&mut self) {
        let mut settled = Vec::new();
        let left: Vec<u64> = {
            let mut dispatch = self.shared.dispatch.lock();
            dispatch.up[self.at] = false;
            let left: Vec<u64> = dispatch.ledger.requests(self.at).collect();
            settled.extend(left.iter().filter_map(|&id| dispatch.ended(id)));
            self.shared.press(&mut dispatch);
            left
        };
        self.shared.settled(settled);
        if left.is_empty() {
            return;
        }
        let reason = "the engine has ended".to_owned();
        let finish = FinishReason::Error(RequestError::HandFailed(reason));
        let end = |id| Output { finish: Some(finish.clone()), ..Output::of(RequestId(id)) };
        self.inner.deliver(left.into_iter().map(end).collect());
    }
}

/// Sends changes of a prefix cache to the index.
pub(crate) struct Observer {
    pub(crate) lane: crossbeam_channel::Sender<News>,
    pub(crate) at: usize,
}

impl BlockObserver for Observer {
    fn changed(&mut self, events: Vec<BlockEvent>) {
        // The set of replicas may be dropped before its engines.
        let _ = self.lane.send(News::Changed(self.at, events));
    }
}

/// Several observers of one prefix cache.
pub(crate) struct Observers(Vec<Box<dyn BlockObserver>>);

impl Observers {
    /// Combines several observers into one. `None`: there are no observers.
    pub(crate) fn join(mut all: Vec<Box<dyn BlockObserver>>) -> Option<Box<dyn BlockObserver>> {
        match all.len() {
            0 | 1 => all.pop(),
            _ => Some(Box::new(Self(all))),
        }
    }
}

impl BlockObserver for Observers {
    fn changed(&mut self, events: Vec<BlockEvent>) {
        for observer in &mut self.0 {
            observer.changed(events.clone());
        }
    }
}

/// The access of replica `at` to the other replicas.
pub(crate) struct OtherReplicas {
    pub(crate) shared: Arc<Shared>,
    pub(crate) at: usize,
}

impl Peers for OtherReplicas {
    fn up(&self, up: bool) {
        {
            let mut dispatch = self.shared.dispatch.lock();
            dispatch.up[self.at] = up;
            self.shared.press(&mut dispatch);
        }
        info!(replica = self.at, up, "the set of replicas has changed");
        if up {
            // Requests at other replicas may have been waiting until any replica takes plans again.
            let others = self.shared.engines().iter().enumerate();
            for (_, engine) in others.filter(|&(other, _)| other != self.at) {
                engine.hand_over();
            }
        }
    }

    fn others_up(&self) -> bool {
        let dispatch = self.shared.dispatch.lock();
        (0..dispatch.up.len()).any(|other| other != self.at && dispatch.open(other))
    }

    fn others_live(&self) -> bool {
        self.shared.others_live(self.at)
    }

    fn adopt(&self, orphans: Vec<Orphan>) -> Vec<Orphan> {
        let count = orphans.len();
        let left: Vec<Orphan> =
            orphans.into_iter().filter_map(|orphan| self.shared.adopt(self.at, orphan)).collect();
        if left.len() < count {
            info!(replica = self.at, requests = count - left.len(), "other replicas go on");
        }
        left
    }

    fn move_pays(&self, to: usize, request: &QueuedRequest<'_>) -> bool {
        self.shared.move_pays(self.at, to, request)
    }

    fn take(&self, to: usize, orphan: Orphan) -> Option<Orphan> {
        self.shared.take(to, orphan)
    }

    fn replica(&self) -> u32 {
        self.at as u32
    }

    fn hand_on(&self, orphan: Orphan) -> Option<Orphan> {
        self.shared.hand_on(self.at, orphan)
    }

    fn admitted(&self, id: u64) {
        if self.shared.pd.is_some() {
            let mut dispatch = self.shared.dispatch.lock();
            dispatch.pressure.admitted(id);
            self.shared.press(&mut dispatch);
        }
    }

    fn holds_prompts(&self) -> bool {
        self.shared.holding[self.at].load(Ordering::Acquire)
    }

    fn abort(&self, id: RequestId) {
        let dispatch = self.shared.dispatch.lock();
        if let Some(at) = dispatch.ledger.target(id.0).filter(|&at| at != self.at)
            && let Some(engine) = self.shared.engines().get(at)
        {
            engine.abort(id);
        }
    }
}
