//! LoRA adapters in places (room for adapters in the hand's memory). A thread reads adapters in
//! parallel with the steps. Each slot names the place of its adapter.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use forebay_kernels::{
    AdaptedModule, AdapterMatrices, AdapterSizes, Dtype, ModuleMatrices, PackError, Sizes,
};
use forebay_protocol::{
    AdapterOrder, PLACE_FAILED_DIGEST, PLACE_FAILED_FILES, PLACE_FAILED_MEMORY, PLACE_OK,
    PlaceConfig, PlaceEnd, StepPlan,
};
use forebay_weights::{
    AdapterError, AdapterPair, FeedShape, ModelError, TorchNumber, read_adapter,
};
use rustix::process::nice;
use serde_json::Value;

use crate::parts::DecoderParts;
use crate::tables::{PlanError, wrong};

/// The niceness of the reading thread, which takes about a tenth of a core from the steps.
const PRIORITY: i32 = 10;

/// The modules that adapters may change, by the suffixes of their names.
const MODULES: [(&str, AdaptedModule); 7] = [
    ("mlp.down_proj", AdaptedModule::Down),
    ("mlp.gate_proj", AdaptedModule::Gate),
    ("mlp.up_proj", AdaptedModule::Up),
    ("self_attn.k_proj", AdaptedModule::Key),
    ("self_attn.o_proj", AdaptedModule::Output),
    ("self_attn.q_proj", AdaptedModule::Query),
    ("self_attn.v_proj", AdaptedModule::Value),
];

/// The places of adapters, the announced adapters, and the place of each slot.
pub(crate) struct AdapterPlaces {
    config: PlaceConfig,
    /// The place of each slot; `None` if the slot uses the base model.
    of_slot: Vec<Option<u32>>,
    known: HashMap<u32, Arc<Value>>,
    /// The adapters in places: for each place, the adapter's number and matrices.
    held: BTreeMap<u32, (u32, Arc<AdapterMatrices>)>,
    /// The place and adapter of each write in progress, by ticket.
    coming: BTreeMap<u32, (u32, u32)>,
    /// Writes that finished at once, because their adapters were kept in memory, and that are not
    /// reported yet.
    found: Vec<PlaceEnd>,
    /// Adapters that were read, in order of last use. They are kept so that they need not be read
    /// again.
    kept: Vec<(u32, Arc<AdapterMatrices>)>,
    jobs: Sender<Job>,
    ended: Receiver<Read>,
}

/// Work of the reading thread, in parallel with the steps.
enum Job {
    Read {
        ticket: u32,
        manifest: Arc<Value>,
    },
    /// Drops matrices on this thread, because freeing their memory takes time too.
    Drop(Arc<AdapterMatrices>),
}

/// The adapter that was read, or an error code for a [`PlaceEnd`].
struct Read {
    ticket: u32,
    result: Result<Arc<AdapterMatrices>, i32>,
}

/// The sizes of a model's modules.
pub(crate) fn adapter_sizes(parts: &DecoderParts<'_>, sizes: &Sizes) -> AdapterSizes {
    let layers = (0..parts.layers()).map(|layer| {
        let inner = match parts.shape.feed(layer) {
            FeedShape::Dense(dense) => dense.intermediate_size,
            FeedShape::Experts(_) | FeedShape::None => 0,
        };
        let alone = parts.attention(layer).is_some() && parts.recurrence(layer).is_none();
        let attention = alone.then(|| parts.kind_of[layer]);
        let own_keys = parts.shape.layers[layer].keys_of.is_none();
        sizes.adapted_widths(attention, own_keys, inner)
    });
    AdapterSizes::new(sizes.dtype, sizes.hidden, layers.collect::<Vec<_>>())
}

/// Bytes of all places, each with the largest possible adapter.
pub(crate) fn place_bytes(config: &PlaceConfig, sizes: &AdapterSizes) -> u64 {
    u64::from(config.places) * sizes.bytes(config.rank as usize) as u64
}

/// The modules that adapters of a model may change, by the suffixes of their names.
pub(crate) fn module_names(parts: &DecoderParts<'_>, sizes: &AdapterSizes) -> Vec<String> {
    let there = |module| (0..parts.layers()).any(|layer| sizes.of(layer, module).is_some());
    let names = MODULES.iter().filter(|&&(_, module)| there(module));
    names.map(|&(name, _)| name.to_owned()).collect()
}

impl AdapterPlaces {
    /// Creates empty places, and starts the thread that reads adapters of these sizes.
    pub(crate) fn open(
        config: PlaceConfig,
        sizes: AdapterSizes,
        dtype: Dtype,
        slots: usize,
    ) -> std::io::Result<Self> {
        let (jobs, wanted) = channel::<Job>();
        let (done, ended) = channel();
        let number = match dtype {
            Dtype::Float32 => TorchNumber::Float32,
            Dtype::Bfloat16 => TorchNumber::Bfloat16,
        };
        let read = move || {
            // On Linux, `nice` affects only the calling thread. Steps get priority.
            let _ = nice(PRIORITY);
            for job in wanted {
                match job {
                    Job::Read { ticket, manifest } => {
                        let result = load(&manifest, &sizes, number).map(Arc::new);
                        // The send fails if the receiver is closed.
                        let _ = done.send(Read { ticket, result });
                    }
                    Job::Drop(matrices) => drop(matrices),
                }
            }
        };
        std::thread::Builder::new().name("adapters".into()).spawn(read)?;
        Ok(Self {
            config,
            of_slot: vec![None; slots],
            known: HashMap::new(),
            held: BTreeMap::new(),
            coming: BTreeMap::new(),
            found: Vec::new(),
            kept: Vec::new(),
            jobs,
            ended,
        })
    }

    /// Executes an order about an adapter.
    pub(crate) fn follow(&mut self, order: AdapterOrder) {
        match order {
            AdapterOrder::Know { id, manifest } => {
                self.known.insert(id, Arc::new(manifest));
            }
            AdapterOrder::Forget { id } => {
                self.known.remove(&id);
                let kept = self.kept.extract_if(.., |(kept, _)| *kept == id);
                // No later plan uses the place.
                let of_it = self.held.iter().find(|(_, (held, _))| *held == id).map(|(&at, _)| at);
                let held = of_it.and_then(|at| self.held.remove(&at)).into_iter();
                let gone = kept.chain(held).map(|(_, matrices)| matrices);
                drop_beside(&self.jobs, gone);
            }
        }
    }

    /// Starts the writes of a plan, and records the places of new slots.
    pub(crate) fn read(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
        for write in plan.new_slots() {
            if let Some(place) = write.place.filter(|&place| place >= self.config.places) {
                return wrong(format!("a slot of place {place}, of {}", self.config.places));
            }
            // The tables have already rejected slots that do not exist.
            self.of_slot[write.slot as usize] = write.place;
        }
        for write in plan.place_writes() {
            let known = self.known.get(&write.id).filter(|_| write.place < self.config.places);
            let Some(manifest) = known.cloned() else {
                return wrong(format!(
                    "adapter {} to place {}: it is not known, or there is no such place",
                    write.id, write.place
                ));
            };
            let gone = self.held.remove(&write.place);
            drop_beside(&self.jobs, gone.into_iter().map(|(_, matrices)| matrices));
            match self.kept.iter().position(|(id, _)| *id == write.id) {
                Some(at) => {
                    let kept = self.kept.remove(at);
                    self.held.insert(write.place, kept.clone());
                    self.kept.push(kept);
                    self.found.push(PlaceEnd { ticket: write.ticket, error: PLACE_OK });
                }
                None => {
                    self.coming.insert(write.ticket, (write.place, write.id));
                    // The send succeeds: the thread lives as long as `self.jobs`.
                    let _ = self.jobs.send(Job::Read { ticket: write.ticket, manifest });
                }
            }
        }
        Ok(())
    }

    /// The adapter of each row of these slots; empty if all rows use the base model.
    pub(crate) fn of_rows(
        &self,
        slots: &[i64],
    ) -> Result<Vec<Option<Arc<AdapterMatrices>>>, PlanError> {
        let places = || slots.iter().map(|&slot| self.of_slot[slot as usize]);
        if places().all(|place| place.is_none()) {
            return Ok(Vec::new());
        }
        let adapter = |place: Option<u32>| {
            let Some(place) = place else { return Ok(None) };
            match self.held.get(&place) {
                Some((_, matrices)) => Ok(Some(matrices.clone())),
                None => wrong(format!("a row of place {place}, which has no adapter")),
            }
        };
        places().map(adapter).collect()
    }

    /// Returns the writes that have finished since the last call. If there are none, waits for one,
    /// up to this many microseconds.
    pub(crate) fn report(&mut self, wait_us: u32) -> Vec<PlaceEnd> {
        let mut ends = std::mem::take(&mut self.found);
        let until = Instant::now() + Duration::from_micros(wait_us.into());
        while !self.coming.is_empty() {
            let left = match ends.is_empty() {
                true => until.saturating_duration_since(Instant::now()),
                false => Duration::ZERO,
            };
            match self.ended.recv_timeout(left) {
                Ok(read) => ends.extend(self.keep(read)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        ends
    }

    /// Puts a finished adapter into its place.
    fn keep(&mut self, Read { ticket, result }: Read) -> Option<PlaceEnd> {
        let (place, id) = self.coming.remove(&ticket)?;
        let error = match result {
            Ok(matrices) => {
                self.held.insert(place, (id, matrices.clone()));
                if self.known.contains_key(&id) {
                    self.kept.retain(|(kept, _)| *kept != id);
                    self.kept.push((id, matrices));
                }
                let most = (self.config.places + self.config.kept) as usize;
                let gone = self.kept.drain(..self.kept.len().saturating_sub(most));
                drop_beside(&self.jobs, gone.map(|(_, matrices)| matrices));
                PLACE_OK
            }
            Err(error) => error,
        };
        Some(PlaceEnd { ticket, error })
    }
}

/// Makes the reading thread drop adapters that have no other owner.
fn drop_beside(jobs: &Sender<Job>, gone: impl Iterator<Item = Arc<AdapterMatrices>>) {
    for matrices in gone {
        // The send succeeds: the thread lives as long as the sender.
        let _ = jobs.send(Job::Drop(matrices));
    }
}

/// Reads an adapter and packs it.
fn load(
    manifest: &Value,
    sizes: &AdapterSizes,
    number: TorchNumber,
) -> Result<AdapterMatrices, i32> {
    let failed = |error: &dyn std::fmt::Display, code: i32| {
        eprintln!("an adapter can't be read: {error}");
        code
    };
    let pairs = read_adapter(manifest, number).map_err(|error| match error {
        AdapterError::Files(_) => failed(&error, PLACE_FAILED_FILES),
        AdapterError::Changed(_) => failed(&error, PLACE_FAILED_DIGEST),
    })?;
    let modules = pairs.into_iter().map(of_module).collect::<Result<Vec<_>, ModelError>>();
    let modules = modules.map_err(|error| failed(&error, PLACE_FAILED_FILES))?;
    AdapterMatrices::pack(sizes, modules).map_err(|error| match error {
        PackError::Unfit(error) => failed(&error, PLACE_FAILED_FILES),
        PackError::Memory(error) => failed(&error, PLACE_FAILED_MEMORY),
    })
}

fn of_module(pair: AdapterPair) -> Result<ModuleMatrices, ModelError> {
    let AdapterPair { layer, module, rank, a, b } = pair;
    match MODULES.iter().find(|(name, _)| *name == module) {
        Some(&(_, module)) => Ok(ModuleMatrices { layer, module, rank, a, b }),
        None => Err(ModelError::Broken(format!("{module} is no module that an adapter changes"))),
    }
}
