//! The scheduler, tested against a fake device that checks the content of every page.

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
