//! The public interface of a decoder.
//!
//! [`Decoder::new`] and [`Decoder::step`] check the sizes and formats of weights, pages and tables,
//! and return an error if one is wrong. So every public function of this module is safe.

use std::collections::HashSet;
use std::sync::Arc;

use crate::adapters::{AdapterMatrices, AdapterSizes, Groups};
use crate::any_model::AnyModel;
use crate::memory::Room;
use crate::model::StepError;
use crate::packing::{Unfit, unfit};
use crate::pool::Threads;
use crate::processor::Level;
use crate::rows::{Rows, Wanted};
use crate::sizes::Sizes;
use crate::weights::{Layer, Weights};

/// A decoder that is ready to compute.
pub struct Decoder {
    model: AnyModel,
    sizes: Sizes,
    weights: Arc<Weights>,
    adapter_sizes: AdapterSizes,
    /// The number of rows of each state table.
    state_rows: usize,
}

// SAFETY: a model has pointers to its own pages and states, which any one thread at a time may read
// and write.
unsafe impl Send for Decoder {}

impl Decoder {
    /// Creates a decoder that computes with `threads`. `pages` are the key and value pools of each
    /// layer, of the size [`Sizes::pool_bytes`] for its kind of attention. The pools are empty for
    /// a layer without attention, and for one that reads another layer's keys. If queries see later
    /// positions, all layers of a kind share the first such layer's pool; the others are empty.
    /// `state_rows` is the number of rows of the state tables of recurrent layers.
    ///
    /// # Errors
    /// If a component has a wrong size, or the kernels do not support it.
    pub fn new(
        sizes: Sizes,
        weights: Weights,
        pages: Vec<[Room; 2]>,
        state_rows: usize,
        threads: &Arc<Threads>,
    ) -> Result<Self, Unfit> {
        sizes.check()?;
        weights.check(&sizes)?;
        let fits = |(number, rooms): (usize, &[Room; 2])| {
            let layer = &weights.layers[number];
            let keeps = layer.attends() && weights.pages_of(&sizes, number) == number;
            let bytes = if keeps { sizes.pool_bytes(layer.attention) } else { [0; 2] };
            rooms.iter().zip(bytes).all(|(room, bytes)| room.len() == bytes)
        };
        if pages.len() != weights.layers.len() || !pages.iter().enumerate().all(fits) {
            return unfit("the pages are not of this model");
        }
        let states = tables(&weights.layers, state_rows)?;
        let (adapter_sizes, weights) = (weights.adapter_sizes(&sizes), Arc::new(weights));
        let model = AnyModel::new(&sizes, weights.clone(), pages, states, threads.clone());
        Ok(Self { model, sizes, weights, adapter_sizes, state_rows })
    }

    /// Copies one row of the state tables of all layers.
    ///
    /// # Errors
    /// If a row does not exist.
    pub fn copy_state(&mut self, from: usize, to: usize) -> Result<(), Unfit> {
        self.check_state_rows([from, to])?;
        for table in self.model.states().iter_mut().flatten() {
            let bytes = table.len() / self.state_rows;
            table.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
        }
        Ok(())
    }

    /// The state tables of all layers; tables of layers without state are empty, others have the
    /// same number of rows. A caller may copy rows of these tables, but only while no other call
    /// reads or writes these rows.
    pub fn state_tables(&mut self) -> impl Iterator<Item = &mut Room> {
        self.model.states().iter_mut().flatten()
    }

    /// Resets one row of the state tables of all layers to the state before the first position.
    pub fn clear_state(&mut self, row: usize) -> Result<(), Unfit> {
        self.check_state_rows([row])?;
        for table in self.model.states().iter_mut().flatten() {
            let bytes = table.len() / self.state_rows;
            table[row * bytes..(row + 1) * bytes].fill(0);
        }
        Ok(())
    }

    fn check_state_rows(&self, rows: impl IntoIterator<Item = usize>) -> Result<(), Unfit> {
        match rows.into_iter().find(|&row| row >= self.state_rows) {
            None => Ok(()),
            Some(row) => unfit(format!("row {row} of {} rows of states", self.state_rows)),
        }
    }

    /// Checks the state rows: each request row has a source and a target, and no other row shares
    /// them.
    fn check_states(&self, rows: &Rows<'_>) -> Result<(), Unfit> {
        let recurrent = self.weights.layers.iter().any(|layer| layer.state().is_some());
        if rows.states.len() != if recurrent { rows.slot.len() } else { 0 } {
            return unfit("rows without their states, or states for layers that have none");
        }
        let mut seen = HashSet::new();
        for &[source, target] in rows.states {
            let distinct = if source == target { vec![source] } else { vec![source, target] };
            for row in distinct {
                let number = usize::try_from(row).unwrap_or(usize::MAX);
                self.check_state_rows([number])?;
                if !seen.insert(row) {
                    return unfit("two rows of a step with one state");
                }
            }
        }
        Ok(())
    }

    /// Computes a step. Writes the keys and values of every row, and the wanted outputs.
    ///
    /// # Errors
    /// If a row lies outside of the tables, or does not fit the model. Nothing is written then.
    pub fn step(&mut self, rows: &Rows<'_>, wanted: Wanted<'_>) -> Result<(), Unfit> {
        let count = rows.check(&self.sizes)?;
        self.check_states(rows)?;
        if self.sizes.both_ways() && rows.start.iter().any(|&start| start > 0) {
            return unfit("a part of a prompt, of a model with bidirectional attention");
        }
        let &Sizes { vocabulary, hidden, .. } = &self.sizes;
        let sampled = rows.sample.len();
        let ascending = rows.sample.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = rows.sample.iter().all(|&token| (0..count as i64).contains(&token));
        if !(ascending && inside) {
            return unfit("a result of a token that the step does not have");
        }
        if rows.slot.is_empty() {
            return Ok(());
        }
        if self.weights.head.is_none() && !matches!(wanted, Wanted::Vectors(_)) {
            return unfit("something else than vectors of a decoder without a head");
        }
        let room = match &wanted {
            Wanted::Logits(logits) => logits.len() == sampled * vocabulary,
            Wanted::Best(best, finite) => best.len() == sampled && finite.len() == sampled,
            Wanted::States(states) => states.len() == sampled * hidden,
            Wanted::Vectors(vectors) => vectors.len() == sampled * hidden,
        };
        if !room {
            return unfit("too little room for what a step gives");
        }
        let fits = |of: &Arc<AdapterMatrices>| of.sizes == self.adapter_sizes;
        if !rows.adapters.iter().flatten().all(fits) {
            return unfit("an adapter of another model");
        }
        let groups = Groups::of(rows.adapters, rows.length, rows.sample);
        // SAFETY: rows lie within the tables and the model's positions, given inputs have this many
        // rows, adapters belong to this model, and all results have room.
        let done = unsafe { self.model.step(rows, wanted, groups.as_ref()) };
        done.map_err(|error| {
            Unfit(
                match error {
                    StepError::Page => "a row has a position without a page",
                    StepError::Token => "a row has a token that is not of the vocabulary",
                }
                .into(),
            )
        })
    }

    /// Computes logits `[count, vocabulary]` from states `[count, hidden]` that a step returned.
    ///
    /// # Errors
    /// If the counts of logits and states differ, or there is no head.
    pub fn head(&mut self, states: &[f32], logits: &mut [f32]) -> Result<(), Unfit> {
        if self.weights.head.is_none() {
            return unfit("logits of a decoder without a head");
        }
        let count = states.len() / self.sizes.hidden;
        if states.len() != count * self.sizes.hidden
            || logits.len() != count * self.sizes.vocabulary
        {
            return unfit("too little room for logits");
        }
        // SAFETY: the sizes of both slices were checked.
        unsafe { self.model.head((states.as_ptr(), count), logits.as_mut_ptr()) };
        Ok(())
    }
}

/// Creates the state tables of all layers with this many rows, zeroed.
fn tables(layers: &[Layer], rows: usize) -> Result<Vec<[Room; 2]>, Unfit> {
    let of_layer = |layer: &Layer| layer.state().map_or([0; 2], |it| it.sizes.row_bytes());
    let sizes = layers.iter().flat_map(of_layer).map(|bytes| bytes * rows);
    let rooms = Room::parts(sizes).map_err(|error| Unfit(error.to_string()))?;
    let mut rooms = rooms.into_iter();
    let mut found = Vec::with_capacity(layers.len());
    while let (Some(inputs), Some(states)) = (rooms.next(), rooms.next()) {
        found.push([inputs, states]);
    }
    Ok(found)
}

/// The name of the instruction level in use.
#[must_use]
pub fn level() -> &'static str {
    Level::current().name()
}

/// The instruction levels that the program has kernels for, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels {
    /// The instruction level in use.
    pub used: &'static str,
    /// All instruction levels with kernels, best first.
    pub built: Vec<&'static str>,
    /// The processor's fastest instruction level, if the program has no kernels for it.
    pub missing: Option<&'static str>,
}

/// Returns the instruction levels that the program has kernels for.
#[must_use]
pub fn levels() -> Levels {
    let (all, fastest) = (Level::ALL.iter(), Level::fastest());
    Levels {
        used: level(),
        built: all.filter(|level| level.is_built()).map(|level| level.name()).collect(),
        missing: (!fastest.is_built()).then(|| fastest.name()),
    }
}

/// Permits only instruction levels up to the one of this name. Returns false if the program has no
/// kernels for it.
#[must_use]
pub fn limit(level: &str) -> bool {
    Level::limit(level)
}

/// The name of the order of packed weights. Builds from the same sources have the same name.
#[must_use]
pub fn build() -> &'static str {
    env!("FOREBAY_KERNELS_BUILD")
}
