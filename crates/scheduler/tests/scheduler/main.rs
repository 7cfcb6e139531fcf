//! The scheduler against a fake device that knows what every page should hold.

mod adapters;
mod background;
mod copier;
mod device;
mod drafts;
mod harness;
mod held;
mod host_states;
mod late;
mod model;
mod passing;
mod prices;
mod quarantine;
mod rules;
mod seeing;
mod shares;
mod states;
mod tiers;
mod windows;
