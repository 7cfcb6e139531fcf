//! Reloads: the hand is stopped between two steps, and starts again with other weights.
//!
//! All ranks start with the same description of the model, so they have the same weights. If the
//! hand dies before it is ready with the new weights, it starts again with the old ones.

use serde_json::Value;
use tracing::{error, info};

use crate::member::Cause;
use crate::owner::Owner;
use crate::types::{Reload, ReloadReply, Status};

/// The status of a hand that starts with other weights.
const RELOADING: &str = "other weights are being loaded";

/// A requested reload.
pub(super) struct PendingReload {
    id: u64,
    model: Model,
    replies: Vec<ReloadReply>,
}

enum Model {
    /// The next model. The hand is stopped once no step is in flight.
    Next(Value),
    /// The previous model, while the hand is starting with the next one.
    Last(Value),
}

impl Owner {
    /// Takes a member's reload orders.
    pub(super) fn take_reloads(&mut self, at: usize) {
        for Reload { id, model, reply } in std::mem::take(&mut self.members[at].reloads) {
            match &mut self.reloading {
                // The same order has already come through another member of the step group.
                _ if self.reloaded == Some(id) => reply(Ok(())),
                Some(reloading) if reloading.id == id => reloading.replies.push(reply),
                Some(_) => reply(Err("other weights are being loaded already".into())),
                None => {
                    let (model, replies) = (Model::Next(model), vec![reply]);
                    self.reloading = Some(PendingReload { id, model, replies });
                }
            }
        }
    }

    /// Starts the hand with other weights, if a reload is pending and no step is in flight.
    pub(super) fn reload_if_due(&mut self) {
        if self.up && self.in_flight() > 0 {
            return;
        }
        let Some(PendingReload { id, model: model @ Model::Next(_), .. }) = &mut self.reloading
        else {
            return;
        };
        info!(reload = id, "the hand starts again with other weights");
        self.executor.stop();
        if let Model::Next(next) = model {
            *model = Model::Last(self.executor.replace_model(std::mem::take(next)));
        }
        self.start_again();
    }

    /// Called when the hand is ready. If it has new weights now, replies to the reload order.
    pub(super) fn reloaded_now(&mut self) {
        let loads = |reloading: &mut PendingReload| matches!(reloading.model, Model::Last(_));
        let Some(PendingReload { id, replies, .. }) = self.reloading.take_if(loads) else { return };
        self.reloaded = Some(id);
        replies.into_iter().for_each(|reply| reply(Ok(())));
    }

    /// Returns to the previous weights, if the hand could not start with the new ones.
    pub(super) fn go_back(&mut self, reason: &str) -> bool {
        match self.reloading.take() {
            Some(PendingReload { id, model: Model::Last(last), replies }) => {
                error!(reload = id, "the hand goes back to its last weights: {reason}");
                self.executor.replace_model(last);
                self.start_again();
                replies.into_iter().for_each(|reply| reply(Err(reason.to_owned())));
                true
            }
            waiting => {
                self.reloading = waiting;
                false
            }
        }
    }

    fn start_again(&mut self) {
        self.lose_hand(Cause::Weights);
        self.restart_at = None;
        self.say(&Status::Recovering(RELOADING.into()));
        self.start();
    }
}
