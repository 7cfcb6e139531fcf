//! Low-rank adapter matrices (Hu et al. 2021) beside matrices of a decoder: `y = W x + b + B (A
//! x)`.
//!
//! A decoder's products are first computed without adapters. Then the low-rank terms are added for
//! the tokens of each adapter: `A x` once for all modules with the same inputs, then `B` for each
//! module. The bits of a token's result depend only on its own row and its adapter.

mod groups;

use std::io;

use crate::memory::Room;
use crate::packing::{Dtype, Packing, Storage, Unfit, unfit};
use crate::tile::NR;

pub(crate) use groups::{Adapted, Buffers, Groups};

/// A matrix product of a layer: of one module, or the joint product of several modules with the
/// same inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Product {
    Qkv,
    Output,
    GateUp,
    Down,
}

/// The number of products of a layer.
pub(crate) const PRODUCTS: usize = 4;

/// A module that an adapter may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdaptedModule {
    /// The query projection.
    Query,
    /// The key projection.
    Key,
    /// The value projection.
    Value,
    /// The output projection of the attention.
    Output,
    /// The gate projection of a dense feed-forward network.
    Gate,
    /// The up projection of a dense feed-forward network. Without gates, its outputs are activated.
    Up,
    /// The down projection of a dense feed-forward network.
    Down,
}

impl AdaptedModule {
    const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    fn product(self) -> Product {
        match self {
            Self::Query | Self::Key | Self::Value => Product::Qkv,
            Self::Output => Product::Output,
            Self::Gate | Self::Up => Product::GateUp,
            Self::Down => Product::Down,
        }
    }
}

/// The input and output sizes of the modules that an adapter may change, for each layer of a
/// decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterSizes {
    dtype: Dtype,
    hidden: usize,
    layers: Vec<Widths>,
}

/// Output sizes of a layer's query, key, value, gate and up projections; 0 if the layer lacks the
/// module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Widths {
    queries: usize,
    keys: usize,
    values: usize,
    gates: usize,
    inner: usize,
}

/// A module's position in the product that it belongs to.
struct Slice {
    inputs: usize,
    outputs: usize,
    /// The index of the module's first output among the outputs of the product.
    first: usize,
}

impl AdapterSizes {
    /// Creates the sizes for a decoder of this type. `layers` has the output sizes of each layer's
    /// query, key, value, gate and up projections; 0 if the layer lacks the module.
    #[must_use]
    pub fn new(dtype: Dtype, hidden: usize, layers: impl IntoIterator<Item = [usize; 5]>) -> Self {
        let widths = |[queries, keys, values, gates, inner]: [usize; 5]| Widths {
            queries,
            keys,
            values,
            gates,
            inner,
        };
        Self { dtype, hidden, layers: layers.into_iter().map(widths).collect() }
    }

    /// Returns how many inputs and outputs a module has; `None` if the layer lacks it.
    #[must_use]
    pub fn of(&self, layer: usize, module: AdaptedModule) -> Option<[usize; 2]> {
        self.slice(layer, module).map(|slice| [slice.inputs, slice.outputs])
    }

    /// Bytes of an adapter of this rank that changes every module.
    #[must_use]
    pub fn bytes(&self, rank: usize) -> usize {
        let modules = (0..self.layers.len()).flat_map(|layer| {
            let there = move |&module: &AdaptedModule| self.slice(layer, module).is_some();
            AdaptedModule::ALL.into_iter().filter(there).map(move |module| (layer, module, rank))
        });
        let modules: Vec<_> = modules.collect();
        let packings = self.packings(&modules);
        packings.iter().flatten().filter_map(|packing| packing.bytes().ok()).sum()
    }

    /// Elements of the widest input of any module.
    pub(crate) fn widest(&self) -> usize {
        let of_layer = |layer: &Widths| layer.queries.max(layer.inner);
        self.layers.iter().map(of_layer).max().unwrap_or(0).max(self.hidden)
    }

    fn slice(&self, layer: usize, module: AdaptedModule) -> Option<Slice> {
        let &Widths { queries, keys, values, gates, inner } = self.layers.get(layer)?;
        let hidden = self.hidden;
        let (inputs, outputs, first) = match module {
            AdaptedModule::Query => (hidden, queries, 0),
            AdaptedModule::Key => (hidden, keys, queries),
            AdaptedModule::Value => (hidden, values, queries + keys),
            AdaptedModule::Output => (queries, hidden, 0),
            AdaptedModule::Gate => (hidden, gates, 0),
            AdaptedModule::Up => (hidden, inner, gates),
            AdaptedModule::Down => (inner, hidden, 0),
        };
        (inputs > 0 && outputs > 0).then_some(Slice { inputs, outputs, first })
    }

    /// The packings of the matrices of `modules`: layer, module and rank of each, in ascending
    /// order. Each product has one `A` for all its modules, followed by a `B` for each.
    fn packings(&self, modules: &[(usize, AdaptedModule, usize)]) -> Vec<Vec<Packing>> {
        let packing = |outputs, inputs| Packing {
            outputs,
            inputs,
            interleaved: false,
            dtype: self.dtype,
            storage: Storage::Plain,
        };
        let products =
            modules.chunk_by(|one, two| (one.0, one.1.product()) == (two.0, two.1.product()));
        let of_product = |modules: &[(usize, AdaptedModule, usize)]| {
            let slices = modules.iter().filter_map(|&(layer, module, rank)| {
                Some((self.slice(layer, module)?, whole_pairs(rank)))
            });
            let slices: Vec<(Slice, usize)> = slices.collect();
            let ranks = slices.iter().map(|(_, rank)| rank).sum();
            let inputs = slices.first().map_or(0, |(slice, _)| slice.inputs);
            let of_module = slices.iter().map(|(slice, rank)| packing(slice.outputs, *rank));
            std::iter::once(packing(ranks, inputs)).chain(of_module).collect()
        };
        products.map(of_product).collect()
    }
}

/// Rounds a rank up to an even number, since kernels take inner positions in pairs.
fn whole_pairs(rank: usize) -> usize {
    rank.next_multiple_of(2)
}

/// The adapter matrices of one module, as bytes of elements of the model's type.
pub struct ModuleMatrices {
    /// The layer.
    pub layer: usize,
    /// The module.
    pub module: AdaptedModule,
    /// The rank of both matrices.
    pub rank: usize,
    /// `[rank, inputs]`
    pub a: Vec<u8>,
    /// `[outputs, rank]`, multiplied by the adapter's scaling factor.
    pub b: Vec<u8>,
}

/// An adapter, packed in the order that the kernels read.
pub struct AdapterMatrices {
    pub(crate) sizes: AdapterSizes,
    /// The matrices for each product of each layer; `None` if the adapter does not change the
    /// product.
    layers: Vec<[Option<LowRank>; PRODUCTS]>,
}

/// The packed adapter matrices of one product.
pub(crate) struct LowRank {
    /// `A` of all modules, concatenated: `[rank, inputs]`.
    pub(crate) a: Room,
    pub(crate) rank: usize,
    pub(crate) inputs: usize,
    pub(crate) parts: Vec<Part>,
}

/// The packed matrix `B` of one module.
pub(crate) struct Part {
    /// `[outputs, rank]`
    pub(crate) b: Room,
    pub(crate) rank: usize,
    /// The index of the module's first column in `A x`.
    pub(crate) column: usize,
    pub(crate) outputs: usize,
    /// The index of the module's first output among the outputs of the product.
    pub(crate) first: usize,
}

/// Why an adapter can't be packed.
#[derive(Debug)]
pub enum PackError {
    /// The adapter does not fit the model.
    Unfit(Unfit),
    /// There is not enough memory for the adapter.
    Memory(io::Error),
}

impl From<Unfit> for PackError {
    fn from(error: Unfit) -> Self {
        Self::Unfit(error)
    }
}

impl From<io::Error> for PackError {
    fn from(error: io::Error) -> Self {
        Self::Memory(error)
    }
}

impl AdapterMatrices {
    /// Packs an adapter for a decoder with these sizes.
    ///
    /// # Errors
    /// If a matrix does not have the size of its module, a module occurs twice, or there is not
    /// enough memory.
    pub fn pack(sizes: &AdapterSizes, mut modules: Vec<ModuleMatrices>) -> Result<Self, PackError> {
        modules.sort_by_key(|of| (of.layer, of.module));
        let width = sizes.dtype.bytes();
        for of in &modules {
            let Some(slice) = sizes.slice(of.layer, of.module).filter(|_| of.rank > 0) else {
                return Err(Unfit(format!("no {:?} in layer {}", of.module, of.layer)).into());
            };
            let fits = of.a.len() == of.rank * slice.inputs * width
                && of.b.len() == of.rank * slice.outputs * width;
            if !fits {
                return Err(Unfit(format!(
                    "matrices of another size beside {:?} of layer {}",
                    of.module, of.layer
                ))
                .into());
            }
        }
        let key = |of: &ModuleMatrices| (of.layer, of.module);
        if modules.windows(2).any(|pair| key(&pair[0]) == key(&pair[1])) {
            return Ok(unfit("a module that is changed twice")?);
        }
        let ranks: Vec<_> = modules.iter().map(|of| (of.layer, of.module, of.rank)).collect();
        let packings = sizes.packings(&ranks);
        let bytes: Vec<usize> =
            packings.iter().flatten().map(Packing::bytes).collect::<Result<_, Unfit>>()?;
        let mut rooms = Room::parts(bytes)?.into_iter();
        let mut layers: Vec<[Option<LowRank>; PRODUCTS]> = Vec::new();
        layers.resize_with(sizes.layers.len(), Default::default);
        let mut modules = modules.into_iter();
        for packings in &packings {
            let of_product: Vec<_> = modules.by_ref().take(packings.len() - 1).collect();
            let Some(first) = of_product.first() else { continue };
            let (layer, product) = (first.layer, first.module.product());
            let packed = LowRank::pack(sizes, packings, of_product, &mut rooms)?;
            layers[layer][product as usize] = Some(packed);
        }
        Ok(Self { sizes: sizes.clone(), layers })
    }

    /// The matrices for a product; `None` if the adapter does not change the product.
    pub(crate) fn beside(&self, layer: usize, product: Product) -> Option<&LowRank> {
        self.layers.get(layer)?[product as usize].as_ref()
    }

    /// The largest rank of any product: the sum over the modules of the product.
    fn widest_rank(&self) -> usize {
        self.layers.iter().flatten().flatten().map(|of| of.rank).max().unwrap_or(0)
    }

    /// True if the adapter changes a gate or up projection.
    fn changes_gates(&self) -> bool {
        (0..self.layers.len()).any(|layer| self.beside(layer, Product::GateUp).is_some())
    }
}

impl LowRank {
    /// Packs the modules of one product.
    fn pack(
        sizes: &AdapterSizes,
        packings: &[Packing],
        modules: Vec<ModuleMatrices>,
        rooms: &mut impl Iterator<Item = Room>,
    ) -> Result<Self, PackError> {
        let width = sizes.dtype.bytes();
        let mut next = |packing: &Packing, source: &[u8]| -> Result<Room, PackError> {
            // The caller provides memory for each packing.
            let Some(mut room) = rooms.next() else { return Ok(unfit("too little room")?) };
            packing.pack(source, &mut room)?;
            Ok(room)
        };
        let all = &packings[0];
        let (rank, inputs) = (all.outputs, all.inputs);
        let mut source = Words::new(all.source_bytes());
        let mut column = 0;
        for of in &modules {
            source.bytes()[column * inputs * width..][..of.a.len()].copy_from_slice(&of.a);
            column += whole_pairs(of.rank);
        }
        let a = next(all, source.bytes())?;
        let mut parts = Vec::with_capacity(modules.len());
        let mut column = 0;
        for (of, packing) in modules.into_iter().zip(&packings[1..]) {
            let (outputs, padded) = (packing.outputs, packing.inputs);
            let mut source = Words::new(packing.source_bytes());
            let rows = source.bytes().chunks_exact_mut(padded * width);
            for (row, to) in of.b.chunks_exact(of.rank * width).zip(rows) {
                to[..row.len()].copy_from_slice(row);
            }
            let first = sizes.slice(of.layer, of.module).map_or(0, |slice| slice.first);
            let b = next(packing, source.bytes())?;
            parts.push(Part { b, rank: padded, column, outputs, first });
            column += padded;
        }
        Ok(Self { a, rank, inputs, parts })
    }

    /// The number of panels of `A`.
    pub(crate) fn panels(&self) -> usize {
        self.rank.div_ceil(NR)
    }
}

/// Zeroed bytes, aligned for every element type.
struct Words {
    words: Vec<u64>,
    bytes: usize,
}

impl Words {
    fn new(bytes: usize) -> Self {
        Self { words: vec![0; bytes.div_ceil(8)], bytes }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let at = self.words.as_mut_ptr().cast();
        // SAFETY: the bytes lie within the words, and every bit pattern is a valid byte.
        unsafe { std::slice::from_raw_parts_mut(at, self.bytes) }
    }
}

#[cfg(test)]
mod tests;
