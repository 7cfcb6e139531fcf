//! A decoder, as its callers use it.
//!
//! [`Decoder::new`] and [`Decoder::step`] check the form of weights, pages and tables and return an
//! error if it is wrong. Every call here is safe.

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
    /// Rows of the states' tables.
    state_rows: usize,
}

// SAFETY: a model has pointers to its own pages and states, which any one thread at a time may read
// and write.
unsafe impl Send for Decoder {}

impl Decoder {
    /// A decoder that computes with `threads`. `pages` are the keys and values of each layer, of
    /// [`Sizes::pool_bytes`] for its kind of attention. They are empty for a layer without
    /// attention, and for one that reads another layer's. They are also empty where queries see
    /// later positions: all layers of a kind then share the first one's. The states of recurrent
    /// layers have `state_rows` rows.
    ///
    /// # Errors
    /// A part has a wrong size, or the kernels can't compute it.
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

    /// Copies a row of the states of all layers.
    ///
    /// # Errors
    /// There is no such row.
    pub fn copy_state(&mut self, from: usize, to: usize) -> Result<(), Unfit> {
        self.check_state_rows([from, to])?;
        for table in self.model.states().iter_mut().flatten() {
            let bytes = table.len() / self.state_rows;
            table.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
        }
        Ok(())
    }

    /// The tables of the states of all layers, each with the same number of rows. They are for
    /// callers that copy rows which no call here reads or writes at that time. Some are empty.
    pub fn state_tables(&mut self) -> impl Iterator<Item = &mut Room> {
        self.model.states().iter_mut().flatten()
    }

    /// Resets a row of the states of all layers to the state before the first position.
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

    /// Checks the state rows: each request row has two, and no other row may have them.
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

    /// Computes a step. Writes keys and values of every row, and the wanted outputs.
    ///
    /// # Errors
    /// A row is outside of the tables, or of the model. Nothing is written then.
    pub fn step(&mut self, rows: &Rows<'_>, wanted: Wanted<'_>) -> Result<(), Unfit> {
        let count = rows.check(&self.sizes)?;
        self.check_states(rows)?;
        if self.sizes.both_ways() && rows.start.iter().any(|&start| start > 0) {
            return unfit("a part of a prompt, of a model whose queries see what is behind them");
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

    /// Computes logits `[count, vocabulary]` of states `[count, hidden]` from a step.
    ///
    /// # Errors
    /// The numbers of logits and states differ, or there is no head.
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
        // SAFETY: both have the sizes that were checked.
        unsafe { self.model.head((states.as_ptr(), count), logits.as_mut_ptr()) };
        Ok(())
    }
}

/// State tables with this many rows, zero at first.
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

/// The instructions in use, by name.
#[must_use]
pub fn level() -> &'static str {
    Level::current().name()
}

/// The levels of instructions that the program has kernels for, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels {
    /// The one in use.
    pub used: &'static str,
    /// All, best first.
    pub built: Vec<&'static str>,
    /// The processor's fastest, if the program has no kernels for it.
    pub missing: Option<&'static str>,
}

/// The levels of instructions that the program has kernels for.
#[must_use]
pub fn levels() -> Levels {
    let (all, fastest) = (Level::ALL.iter(), Level::fastest());
    Levels {
        used: level(),
        built: all.filter(|level| level.is_built()).map(|level| level.name()).collect(),
        missing: (!fastest.is_built()).then(|| fastest.name()),
    }
}

/// Restricts the kernels to levels up to this one. Returns false if the program has no such level.
#[must_use]
pub fn limit(level: &str) -> bool {
    Level::limit(level)
}

/// The name of the order of packed weights. Two builds of the same sources have the same name.
#[must_use]
pub fn build() -> &'static str {
    env!("FOREBAY_KERNELS_BUILD")
}
