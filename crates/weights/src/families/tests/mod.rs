//! What families read, and what rules take.

mod configs;
mod kinds;
mod rules;
mod tables;
mod towers;
