//! Data parallel replicas in one brain: N engines behind the interface of one.
//!
//! [`Replicas::submit`] chooses a replica on the caller's thread, with an exact ledger
//! ([`forebay_balance::Ledger`]). A request counts at its replica as soon as the replica is chosen,
//! and its end is recorded before the client can read it. So if a client sends a request after its
//! previous one has ended, the previous one no longer counts. Load reports are not needed, because
//! all replicas are in this process.
//!
//! | lock | what | held by |
//! |---|---|---|
//! | dispatch | ledger, policy, which replicas are up | callers for one choice; engine threads for the ends of one step |
//! | blocks | which replica holds which blocks | callers for one lookup; engine threads never: they send their changes through a lane |
//!
//! The replicas of a step group share one engine thread and one rank group. For the dispatcher this
//! only means that they die together.
//!
//! A replica whose hand dies leaves the set, and its engine gives its requests back to be sent to
//! the other replicas ([`forebay_engine::Peers`]). When the hand has been respawned, the replica
//! joins again.

mod blocks;
mod dispatch;
mod hooks;
mod lending;
mod replicas;
mod roles;
mod status;

pub use forebay_balance::{Load, LocalReason, Method, Role};
pub use replicas::{Listeners, Member, Replicas, ReplicasConfig};
pub use roles::{LocalCounts, PdConfig};
pub use status::{ReplicaReport, combined_facts, combined_stats, combined_status};
