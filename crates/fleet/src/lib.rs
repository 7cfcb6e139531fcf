//! Decides which models of a server are in memory. Pure: no I/O, no clock, no threads. Times are in
//! milliseconds of any clock.
//!
//! A [`Fleet`] receives requests and the outcomes of its [`FleetAction`]s, and returns the
//! next actions. It guarantees:
//!
//! - The loaded models stay within limits on memory and on their number.
//! - A model leaves only when none of its requests is running.
//! - Clients take turns at loads. In a client's turn, the model of its oldest waiting request is
//!   loaded, so no request starves. While a client waits, at most one load begins for each other
//!   client.
//! - Idle models make room first, in the order of their last use. After a while busy models are
//!   closed too: their running requests finish, and new ones wait.
//! - A model stays for a minimum time, and at least as long as its load took. So even if requests
//!   alternate between models, loads take at most half of the time.
//!
//! ```
//! use forebay_fleet::{Fleet, FleetAction, FleetBounds, FleetEntry, FleetModel};
//!
//! let config = FleetBounds { memory_bytes: 100, ..FleetBounds::default() };
//! let model = FleetModel { bytes: 60, ..FleetModel::default() };
//! let mut fleet = Fleet::new(config, vec![model.clone(), model]);
//! let Ok(FleetEntry::Waiting(ticket)) = fleet.enter(0, 7, 0) else { panic!("it is not loaded") };
//! assert_eq!(fleet.poll(0), [FleetAction::Load { model: 0, bytes: 60 }]);
//! fleet.loaded(0, 58, 500);
//! assert_eq!(fleet.poll(500), [FleetAction::Admit { ticket }]);
//! fleet.finish(0, 700);
//! // There is room for one of the two, and the first has not stayed for long.
//! assert!(fleet.enter(1, 7, 800).is_ok());
//! assert_eq!(fleet.poll(800), []);
//! assert_eq!(fleet.next_wake(800), Some(2500));
//! ```

mod fleet;
mod line;
mod model;

pub use fleet::{Fleet, FleetAction, FleetBounds, FleetEntry, FleetRefusal, Ticket};
pub use model::{FleetModel, ModelState, SleepLevel};
