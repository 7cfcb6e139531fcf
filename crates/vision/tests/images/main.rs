//! Whole image files: valid ones, invalid ones with each kind of error, and damaged ones.

mod damaged;
mod files;
mod refused;
