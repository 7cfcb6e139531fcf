//! Whole files: good ones, bad ones of every kind that has a sentence of its own, and damaged ones.

mod damaged;
mod files;
mod refused;
