//! Reads the weights of a plan from a checkpoint, or generates them from a seed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_kernels::{Bytes, Room, Threads};
use forebay_weights::{Checkpoint, ModelError, TorchNumber};

use super::{Matrices, Plan, Vectors, block_of, dtype};
use crate::random::randomise;

/// The source of weights.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Checkpoint(&'a Checkpoint),
    /// Random weights from this seed.
    Random(u64),
}

/// Loaded weights by name.
pub(crate) type Loaded = HashMap<String, Bytes>;

/// Allocates memory for all weights: one mapping for vectors, and one for matrices.
pub(crate) fn rooms(plan: &Plan) -> std::io::Result<Vec<(String, Room)>> {
    let entries = plan.entries();
    let sizes: Vec<usize> = entries.iter().map(|(_, entry)| entry.bytes().unwrap_or(0)).collect();
    let (vectors, matrices) = sizes.split_at(plan.vectors.len());
    let rooms = [Room::parts(vectors.iter().copied())?, Room::parts(matrices.iter().copied())?];
    let names = entries.iter().map(|(name, _)| (*name).to_owned());
    Ok(names.zip(rooms.into_iter().flatten()).collect())
}

pub(crate) fn shared(rooms: Vec<(String, Room)>) -> Loaded {
    rooms.into_iter().map(|(name, room)| (name, Arc::new(room))).collect()
}

/// Loads all weights. `report` receives the number of the checkpoint's weights that are loaded so
/// far, and the number of all its weights.
pub(crate) fn load(
    plan: &Plan,
    source: Source<'_>,
    threads: &Threads,
    report: &(dyn Fn(usize, usize) + Sync),
) -> Result<Loaded, ModelError> {
    let rooms = rooms(plan).map_err(|error| ModelError::Broken(format!("no memory: {error}")))?;
    let jobs: Vec<Mutex<(String, Room)>> = rooms.into_iter().map(Mutex::new).collect();
    let total = plan.wanted().count();
    let done = AtomicUsize::new(0);
    let failed: Mutex<Option<ModelError>> = Mutex::new(None);
    let locked = |failed: &Mutex<Option<ModelError>>| {
        failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    };
    threads.each(jobs.len(), |index| {
        if locked(&failed).is_some() {
            return;
        }
        let mut job = jobs[index].lock().unwrap_or_else(PoisonError::into_inner);
        let result = match index.checked_sub(plan.vectors.len()) {
            None => plan.vectors[index].read(source, &mut job.1),
            Some(index) => plan.matrices[index].read(source, plan.number, &mut job.1),
        };
        match result {
            Ok(count) => report(done.fetch_add(count, Ordering::Relaxed) + count, total),
            Err(error) => {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        }
    });
    match locked(&failed) {
        Some(error) => Err(error),
        None => Ok(shared(
            jobs.into_iter()
                .map(|job| job.into_inner().unwrap_or_else(PoisonError::into_inner))
                .collect(),
        )),
    }
}

impl Vectors {
    /// Reads all parts; returns the number of parts.
    fn read(&self, source: Source<'_>, to: &mut [u8]) -> Result<usize, ModelError> {
        match (block_of(self.storage), source) {
            (Some(kind), Source::Checkpoint(checkpoint)) => {
                checkpoint.read_block_rows(self.parts.name(), kind, to)?;
            }
            _ => read_parts(&self.parts.parts, source, self.number, to)?,
        }
        Ok(self.parts.parts.len())
    }
}

fn read_parts(
    parts: &[(String, Vec<usize>)],
    source: Source<'_>,
    number: TorchNumber,
    mut to: &mut [u8],
) -> Result<(), ModelError> {
    let width = dtype(number).bytes();
    for (name, shape) in parts {
        let (part, rest) = to.split_at_mut(shape.iter().product::<usize>() * width);
        source.read(name, number, part)?;
        to = rest;
    }
    Ok(())
}

impl Source<'_> {
    pub(super) fn read(
        self,
        name: &str,
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<(), ModelError> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.read(name, number, to),
            Self::Random(seed) => {
                randomise(seed, name, number, to);
                Ok(())
            }
        }
    }
}

impl Matrices {
    fn read(
        &self,
        source: Source<'_>,
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<usize, ModelError> {
        if let Some(rows) = self.rows {
            return self.read_heads(rows, source, number, to);
        }
        let each = self.parts.parts.len() / self.count;
        let packed = to.chunks_exact_mut(to.len() / self.count);
        for (parts, to) in self.parts.parts.chunks_exact(each).zip(packed) {
            self.read_one(parts, source, number, to)?;
        }
        Ok(if self.source.is_none() { self.parts.parts.len() } else { 0 })
    }

    fn read_one(
        &self,
        parts: &[(String, Vec<usize>)],
        source: Source<'_>,
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<(), ModelError> {
        let unfit = |error: forebay_kernels::Unfit| ModelError::Broken(error.to_string());
        if let (Some(kind), Source::Checkpoint(checkpoint)) =
            (block_of(self.packing.storage), source)
        {
            let mut blocks = Vec::with_capacity(self.packing.source_bytes());
            for (name, _) in parts {
                checkpoint.read_blocks(name, kind, &mut blocks)?;
            }
            return self.packing.pack(&blocks, to).map_err(unfit);
        }
        // A buffer of 64-bit words, so that elements of every type are aligned.
        let bytes = self.packing.source_bytes();
        let mut words = vec![0_u64; bytes.div_ceil(8)];
        let numbers = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
        match &self.source {
            None => read_parts(parts, source, number, numbers)?,
            Some(name) => source.read(name, number, numbers)?,
        }
        self.packing.pack(numbers, to).map_err(unfit)
    }
}
