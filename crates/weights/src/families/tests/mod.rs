//! What families read, and what rules take.

mod configs;
mod rules;
mod tables;
