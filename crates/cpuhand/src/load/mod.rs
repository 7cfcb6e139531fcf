//! Loads weights in the kernels' layout, from a checkpoint or from a file that an earlier start has
//! written.

mod assemble;
mod behind;
mod bert;
mod inputs;
mod latent;
mod read;
mod recurrence;

use std::collections::{BTreeMap, HashSet};

use forebay_kernels::{Dtype, Packing, Storage};
use forebay_weights::{
    Attention, BlockKind, Checkpoint, DenseFeed, Entry, Experts, FeedShape, Mixer, ModelError,
    Norm, NormPlacement, QkNorm, Shape, TorchNumber, computed_as, computed_names,
};

use crate::parts::DecoderParts;

pub(crate) use assemble::assemble;
pub(crate) use behind::LayerBehind;
use latent::HeadRows;
pub(crate) use read::{Loaded, Source, load, rooms, shared};

const EMBEDDING: &str = "model.embed_tokens.weight";
const EMBEDDING_NORM: &str = "model.embed_norm.weight";
const NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";
/// The number of consecutive inputs in one quantised block.
const SHARED: usize = 32;

/// The name of the factor of a layer's output.
const FACTOR: &str = "layer_scalar";
/// The name of the factors of a router's inputs, for experts beside a dense network.
const ROUTER_FACTORS: &str = "gate.scale";
/// The name of the factors of the experts beside a dense network, one per expert.
const EXPERT_FACTORS: &str = "gate.per_expert_scale";
/// The names of the norms around experts beside a dense network: before the experts, after the
/// dense network, and after the experts.
const BESIDE_NORMS: [&str; 3] =
    ["experts_layernorm", "post_shared_layernorm", "post_experts_layernorm"];

/// The names of the projections before and after experts that compute on latent states.
const LATENT: [&str; 2] = ["fc1_latent_proj", "fc2_latent_proj"];

/// A joint matrix may have parts in blocks and plain parts. The plain parts are converted to 8-bit
/// blocks if the other parts have at least this many times as many rows. Files store small matrices
/// as plain numbers, and these must not force large ones into the model's type.
const FEW_ROWS: usize = 32;

/// The number formats of matrices.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Formats {
    /// True if matrices that are not in blocks are stored as 8-bit integers instead of the model's
    /// type.
    pub(crate) int8: bool,
    /// True if the user requires a file's blocks.
    pub(crate) insists: bool,
    /// The matrices that keep a file's blocks: checkpoint name to GGUF type name.
    pub(crate) stored: BTreeMap<String, String>,
}

impl Formats {
    /// The format of a matrix that consists of these parts.
    fn of(&self, parts: &[(String, Vec<usize>)], inputs: usize) -> Result<Storage, ModelError> {
        let kinds: Vec<Option<BlockKind>> =
            parts.iter().map(|(name, _)| computed_as(self.stored.get(name)?)).collect();
        let rows = |in_blocks: bool| -> usize {
            let parts = kinds.iter().zip(parts).filter(|(kind, _)| kind.is_some() == in_blocks);
            parts.map(|(_, (_, shape))| shape[0]).sum()
        };
        if rows(false) > 0 && rows(false) * FEW_ROWS <= rows(true) {
            return Ok(Storage::Q8_0);
        }
        let kinds: Option<Vec<BlockKind>> = kinds.into_iter().collect();
        Ok(match kinds.as_deref() {
            None | Some([]) if !self.int8 => Storage::Plain,
            None | Some([]) if inputs.is_multiple_of(SHARED) => Storage::Int8,
            None | Some([]) => {
                return Err(ModelError::Broken(format!(
                    "{} has {inputs} inputs, and --quantization w8a8_int8 needs multiples of {SHARED}",
                    parts[0].0
                )));
            }
            // Files may give keys and values more bits than queries. `Q8_0`, the widest of the
            // formats, can hold all of them.
            Some([first, rest @ ..]) if rest.iter().any(|kind| kind != first) => Storage::Q8_0,
            Some([BlockKind::Q8_0, ..]) => Storage::Q8_0,
            Some([BlockKind::Q4_0, ..]) => Storage::Q4_0,
            Some([BlockKind::Q4_1, ..]) => Storage::Q4_1,
            Some([BlockKind::Mxfp4, ..]) => Storage::Mxfp4,
            Some([BlockKind::Iq4Nl, ..]) => Storage::Iq4Nl,
        })
    }
}

fn block_of(storage: Storage) -> Option<BlockKind> {
    match storage {
        Storage::Plain | Storage::Int8 => None,
        Storage::Q8_0 => Some(BlockKind::Q8_0),
        Storage::Q4_0 => Some(BlockKind::Q4_0),
        Storage::Q4_1 => Some(BlockKind::Q4_1),
        Storage::Mxfp4 => Some(BlockKind::Mxfp4),
        Storage::Iq4Nl => Some(BlockKind::Iq4Nl),
    }
}

/// Weights of the checkpoint that are consecutive in memory.
#[derive(Debug, Clone)]
struct Parts {
    /// Names and shapes in the checkpoint. The first name identifies all parts together.
    parts: Vec<(String, Vec<usize>)>,
}

impl Parts {
    fn name(&self) -> &str {
        &self.parts[0].0
    }

    fn elements(&self) -> usize {
        self.parts.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}

/// Weights that are not packed: they keep the checkpoint's order.
struct Vectors {
    parts: Parts,
    number: TorchNumber,
    /// The block format of a table's rows; `Plain` if its elements have the type `number`.
    storage: Storage,
}

struct Matrices {
    /// The parts of each matrix; all parts have the same number of matrices.
    parts: Parts,
    /// The packing of one matrix.
    packing: Packing,
    /// The number of consecutive matrices.
    count: usize,
    /// The tensor's name in the checkpoint, if it differs from that of the only part.
    source: Option<String>,
    /// The rows that each matrix takes from its only part; `None`: all rows.
    rows: Option<HeadRows>,
}

/// Describes a model's weights and their layout in memory, without the weights themselves.
pub(crate) struct Plan {
    vectors: Vec<Vectors>,
    matrices: Vec<Matrices>,
    number: TorchNumber,
    formats: Formats,
    layers: usize,
}

impl Plan {
    /// Plans a model's weights. Matrices have the type `number`, unless `formats` gives them
    /// another format.
    pub(crate) fn new(
        parts: &DecoderParts<'_>,
        number: TorchNumber,
        formats: Formats,
    ) -> Result<Self, ModelError> {
        let shape = parts.shape;
        let hidden = shape.hidden_size;
        let of_norms = number_of_norms(shape, number);
        let mut plan = Self {
            vectors: Vec::new(),
            matrices: Vec::new(),
            number,
            formats,
            layers: parts.layers(),
        };
        plan.vector(&[(EMBEDDING.into(), vec![shape.vocab_size, hidden])]);
        plan.norm_of_size(NORM.into(), hidden, of_norms);
        if shape.embedding_norm {
            plan.norm_of_size(EMBEDDING_NORM.into(), hidden, of_norms);
        }
        if let Some(inputs) = shape.layer_inputs {
            plan.layer_inputs(inputs, (parts.layers(), hidden), of_norms)?;
        }
        for layer in 0..parts.layers() {
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            if let Some(latent) = parts.latent(layer) {
                plan.latent(&at("self_attn"), (hidden, of_norms), latent)?;
            } else if let Some(attention) = parts.attention(layer) {
                plan.attention(parts, (layer, attention), of_norms)?;
            }
            if let Some(recurrence) = parts.recurrence(layer) {
                plan.recurrence(&at("linear_attn"), hidden, recurrence)?;
            }
            match shape.feed(layer) {
                FeedShape::Experts(experts) => {
                    plan.experts(&at("mlp"), hidden, experts)?;
                    if experts.beside {
                        plan.beside(&at("mlp"), (hidden, experts.count), of_norms);
                    }
                }
                &FeedShape::Dense(DenseFeed { intermediate_size: inner, bias, gated, .. }) => {
                    plan.dense(&at("mlp"), (hidden, inner), (bias, gated))?;
                }
                FeedShape::None => {}
            }
            for norm in norms_of(shape, layer).into_iter().flatten() {
                plan.norm_of_size(at(&format!("{norm}.weight")), hidden, of_norms);
            }
            if let Some(inputs) = shape.layer_inputs {
                plan.input_matrices(layer, (inputs.size, hidden), of_norms)?;
            }
            if shape.layers[layer].scaled {
                plan.vector(&[(at(FACTOR), vec![1])]);
            }
        }
        plan.head(shape)?;
        Ok(plan)
    }

    fn attention(
        &mut self,
        parts: &DecoderParts<'_>,
        (layer, attention): (usize, &Attention),
        of_norms: TorchNumber,
    ) -> Result<(), ModelError> {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let hidden = parts.shape.hidden_size;
        let dim = attention.head_dim;
        let (queries, keys) = (attention.heads * dim, attention.kv_heads * dim);
        let own = parts.shape.layers[layer].keys_of.is_none();
        let qkv = [
            ("q_proj", queries, true),
            ("k_proj", keys, own),
            ("v_proj", keys, own && !attention.keys_are_values),
            ("g_proj", queries, attention.gate),
        ];
        let qkv = qkv.into_iter().filter(|&(_, _, is_there)| is_there);
        let qkv = qkv.map(|(name, rows, _)| (at(&format!("self_attn.{name}")), rows));
        let output = [(at("self_attn.o_proj"), hidden)];
        self.linear(&qkv.collect::<Vec<_>>(), hidden, attention.qkv_bias, false)?;
        self.linear(&output, queries, attention.output_bias, false)?;
        let of_heads = match attention.qk_norm {
            QkNorm::None | QkNorm::Plain => None,
            QkNorm::Heads => Some([dim, dim]),
            QkNorm::Rows => Some([queries, keys]),
        };
        let norms = ["q_norm", "k_norm"].into_iter().take(if own { 2 } else { 1 });
        for (norm, size) in norms.zip(of_heads.into_iter().flatten()) {
            self.norm_of_size(at(&format!("self_attn.{norm}.weight")), size, of_norms);
        }
        if attention.sinks {
            self.vector(&[(at("self_attn.sinks"), vec![attention.heads])]);
        }
        Ok(())
    }

    fn vector(&mut self, parts: &[(String, Vec<usize>)]) {
        let (parts, number) = (Parts { parts: parts.to_vec() }, self.number);
        self.vectors.push(Vectors { parts, number, storage: Storage::Plain });
    }

    fn norm_of_size(&mut self, name: String, size: usize, number: TorchNumber) {
        let parts = Parts { parts: vec![(name, vec![size])] };
        self.vectors.push(Vectors { parts, number, storage: Storage::Plain });
    }

    /// Adds a dense feed-forward network, with gates or without.
    fn dense(
        &mut self,
        at: &str,
        (hidden, inner): (usize, usize),
        (bias, gated): (bool, bool),
    ) -> Result<(), ModelError> {
        let first = first_products(gated).iter().map(|name| (format!("{at}.{name}"), inner));
        self.linear(&first.collect::<Vec<_>>(), hidden, bias, gated)?;
        self.linear(&[(format!("{at}.down_proj"), hidden)], inner, bias, false)
    }

    fn linear(
        &mut self,
        outputs: &[(String, usize)],
        inputs: usize,
        bias: bool,
        interleaved: bool,
    ) -> Result<(), ModelError> {
        let part = |(name, rows): &(String, usize)| (format!("{name}.weight"), vec![*rows, inputs]);
        let parts = Parts { parts: outputs.iter().map(part).collect() };
        self.matrix((parts, 1), inputs, interleaved, None)?;
        if bias {
            let part = |(name, rows): &(String, usize)| (format!("{name}.bias"), vec![*rows]);
            self.vector(&outputs.iter().map(part).collect::<Vec<_>>());
        }
        Ok(())
    }

    fn experts(&mut self, at: &str, hidden: usize, of: &Experts) -> Result<(), ModelError> {
        let inner = of.intermediate_size;
        self.vector(&[(format!("{at}.gate.weight"), vec![of.count, hidden])]);
        // Rounding would change which experts are chosen, and routers are small compared to
        // experts.
        if let Some(router) = self.vectors.last_mut().filter(|_| of.routing.in_float32) {
            router.number = TorchNumber::Float32;
        }
        if of.routing.corrected {
            self.norm_of_size(correction(at), of.count, TorchNumber::Float32);
        }
        if of.shared_gate {
            self.vector(&[(shared_gate(at), vec![hidden])]);
        }
        if of.shared_size > 0 {
            let name = format!("{at}.shared_experts");
            self.dense(&name, (hidden, of.shared_size), (false, of.gated))?;
        }
        let states = if of.latent_size > 0 { of.latent_size } else { hidden };
        if of.latent_size > 0 {
            let [before, behind] = LATENT.map(|name| format!("{at}.{name}"));
            self.linear(&[(before, states)], hidden, false, false)?;
            self.linear(&[(behind, hidden)], states, false, false)?;
        }
        let all = |kinds: &[&str], shape: [usize; 2]| {
            let each =
                (0..of.count).flat_map(|expert| kinds.iter().map(move |kind| (expert, kind)));
            let name = |(expert, kind)| format!("{at}.experts.{expert}.{kind}.weight");
            Parts { parts: each.map(|it| (name(it), shape.to_vec())).collect() }
        };
        if of.bias {
            self.vector(&[(router_bias(at), vec![of.count])]);
            for (kinds, size) in [(first_products(of.gated), inner), (&["down_proj"], states)] {
                let each = (0..of.count).flat_map(|of| kinds.iter().map(move |kind| (of, kind)));
                let name = |(of, kind)| (format!("{at}.experts.{of}.{kind}.bias"), vec![size]);
                self.vector(&each.map(name).collect::<Vec<_>>());
            }
        }
        let first = all(first_products(of.gated), [inner, states]);
        let down = all(&["down_proj"], [states, inner]);
        self.matrix((first, of.count), states, of.gated, None)?;
        self.matrix((down, of.count), inner, false, None)
    }

    /// Adds the norms and factors of experts beside a dense network.
    fn beside(&mut self, at: &str, (hidden, count): (usize, usize), of_norms: TorchNumber) {
        for (name, size) in [(ROUTER_FACTORS, hidden), (EXPERT_FACTORS, count)] {
            self.vector(&[(format!("{at}.{name}"), vec![size])]);
        }
        for norm in BESIDE_NORMS {
            self.norm_of_size(format!("{at}.{norm}.weight"), hidden, of_norms);
        }
    }

    fn head(&mut self, shape: &Shape) -> Result<(), ModelError> {
        if shape.headless {
            return Ok(());
        }
        let parts = Parts { parts: vec![(HEAD.into(), vec![shape.vocab_size, shape.hidden_size])] };
        let storage = self.formats.of(&parts.parts, shape.hidden_size)?;
        // A tied head in blocks has its own matrix too, because embedding rows are looked up in the
        // model's type.
        let own = !shape.tied || block_of(storage).is_some();
        self.matrix((parts, 1), shape.hidden_size, false, (!own).then_some(EMBEDDING))
    }

    fn matrix(
        &mut self,
        (parts, count): (Parts, usize),
        inputs: usize,
        interleaved: bool,
        source: Option<&str>,
    ) -> Result<(), ModelError> {
        let storage = self.formats.of(&parts.parts, inputs)?;
        let dtype = dtype(self.number);
        let outputs = parts.elements() / inputs / count;
        let packing = Packing { outputs, inputs, interleaved, dtype, storage };
        packing.bytes().map_err(|error| ModelError::Broken(error.to_string()))?;
        let source = source.map(str::to_owned);
        self.matrices.push(Matrices { parts, packing, count, source, rows: None });
        Ok(())
    }

    pub(crate) fn formats(&self) -> &Formats {
        &self.formats
    }

    /// The names and shapes of the checkpoint's weights that this plan reads.
    fn wanted(&self) -> impl Iterator<Item = &(String, Vec<usize>)> {
        let of_matrices = self.matrices.iter().filter(|matrix| matrix.source.is_none());
        let matrices = of_matrices.flat_map(|matrix| &matrix.parts.parts);
        self.vectors.iter().flat_map(|vector| &vector.parts.parts).chain(matrices)
    }

    /// Bytes of all weights, in the formats that the kernels read.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries().iter().filter_map(|(_, entry)| entry.bytes()).map(|bytes| bytes as u64).sum()
    }

    /// The cached entries of a model, by name: vectors as in the checkpoint, matrices packed as the
    /// kernels read them.
    pub(crate) fn entries(&self) -> Vec<(&str, Entry)> {
        let name = |number| match number {
            TorchNumber::Float32 => "F32",
            TorchNumber::Bfloat16 => "BF16",
        };
        let vector = |parts: &Parts| {
            // The parts are joined along their first dimension.
            let rows = parts.parts.iter().map(|(_, shape)| shape[0]).sum();
            parts.parts[0].1.iter().skip(1).fold(vec![rows], |mut shape, &size| {
                shape.push(size);
                shape
            })
        };
        let vectors = self.vectors.iter().map(|Vectors { parts, number, storage }| {
            let entry = match block_of(*storage) {
                None => Entry { dtype: name(*number).into(), shape: vector(parts) },
                Some(kind) => {
                    let bytes = parts.elements() / SHARED * kind.bytes();
                    Entry { dtype: "U8".into(), shape: vec![bytes] }
                }
            };
            (parts.name(), entry)
        });
        let matrices = self.matrices.iter().map(|matrix| {
            let bytes = matrix.count * matrix.packing.bytes().unwrap_or(0);
            let plain = matrix.packing.storage == Storage::Plain;
            let (dtype, width) =
                if plain { (name(self.number), matrix.packing.dtype.bytes()) } else { ("U8", 1) };
            (matrix.parts.name(), Entry { dtype: dtype.into(), shape: vec![bytes / width] })
        });
        vectors.chain(matrices).collect()
    }

    /// Checks that the shapes of a checkpoint's weights fit, before any weight is read.
    pub(crate) fn check(&self, checkpoint: &Checkpoint) -> Result<(), ModelError> {
        let found = checkpoint.shapes();
        let blocks = |name: &str| {
            // A tied head in blocks is read from the embedding's tensor, so the checkpoint needs no
            // tensor for the head.
            name == HEAD && self.formats.stored.contains_key(HEAD)
        };
        let wanted: HashSet<&str> = self.wanted().map(|(name, _)| name.as_str()).collect();
        let lacking: Vec<&str> = wanted
            .iter()
            .copied()
            .filter(|&name| !found.contains_key(name) && !blocks(name))
            .collect();
        if let Some(first) = lacking.iter().min() {
            return Err(ModelError::Broken(format!(
                "the checkpoint lacks {} of {} weights, the first is {first}",
                lacking.len(),
                wanted.len()
            )));
        }
        let mut names: Vec<&String> = found.keys().collect();
        names.sort();
        let mut others =
            names.into_iter().filter(|name| !wanted.contains(name.as_str())).peekable();
        if others.peek().is_some() {
            let spare = checkpoint.zero_biases()?;
            if let Some(name) = others.find(|name| !spare.contains(name)) {
                return Err(ModelError::Broken(format!(
                    "the checkpoint has {name}, which the model does not have"
                )));
            }
        }
        for (name, shape) in self.wanted() {
            match found.get(name) {
                Some(has) if has != shape => {
                    return Err(ModelError::Broken(format!(
                        "{name} is {has:?} in the checkpoint, the model wants {shape:?}"
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Describes the matrices that are computed in a file's blocks; empty if there are none.
    ///
    /// # Errors
    /// If there are none, but the user requires them.
    pub(crate) fn blocks(&self) -> Result<String, ModelError> {
        let stored = &self.formats.stored;
        let (mut kinds, mut others) = (BTreeMap::new(), 0);
        for table in &self.vectors {
            let name = table.parts.name();
            if let (Some(kind), Some(name)) = (block_of(table.storage), stored.get(name)) {
                *kinds.entry((name.clone(), kind.name())).or_insert(0) += 1;
            }
        }
        for matrix in &self.matrices {
            for (name, _) in &matrix.parts.parts {
                match (block_of(matrix.packing.storage), stored.get(name)) {
                    (Some(kind), Some(name)) => {
                        *kinds.entry((name.clone(), kind.name())).or_insert(0) += 1;
                    }
                    _ if matrix.source.is_none() => others += 1,
                    _ => {}
                }
            }
        }
        if kinds.is_empty() && !self.formats.insists {
            return Ok(String::new());
        }
        if kinds.is_empty() {
            return Err(ModelError::Broken(format!(
                "quantization gguf knows {}, and no matrix of the file is of these types",
                computed_names()
            )));
        }
        let named: Vec<String> = kinds
            .iter()
            .map(|((stored, kind), count)| match stored == kind {
                true => format!("{count} {kind}"),
                false => format!("{count} {stored} as {kind}"),
            })
            .collect();
        let number = match self.number {
            TorchNumber::Float32 => "float32",
            TorchNumber::Bfloat16 => "bfloat16",
        };
        let rest =
            if others > 0 { format!("; {others} matrices in {number}") } else { String::new() };
        Ok(named.join(", ") + &rest)
    }
}

/// The type of norms in memory. If the checkpoint stores differences from 1, the weights need more
/// bits than the model's type has.
fn number_of_norms(shape: &Shape, number: TorchNumber) -> TorchNumber {
    match shape.norm {
        Norm::RmsBesideOne => TorchNumber::Float32,
        Norm::Rms | Norm::Mean => number,
    }
}

/// The names of a layer's norms: before and after attention, before and after the feed-forward
/// network. A layer without attention, or without the feed-forward network, also lacks the norms
/// around that part.
fn norms_of(shape: &Shape, layer: usize) -> [Option<&'static str>; 4] {
    let (input, attended) = ("input_layernorm", "post_attention_layernorm");
    let (before, fed) = ("pre_feedforward_layernorm", "post_feedforward_layernorm");
    let names = match shape.layers[layer].norms {
        // With this placement, `post_attention_layernorm` is the norm before the feed-forward
        // network.
        NormPlacement::Before => [Some(input), None, Some(attended), None],
        NormPlacement::BeforeFeed => [None, None, Some(attended), None],
        NormPlacement::After => [None, Some(attended), None, Some(fed)],
        NormPlacement::Around => [Some(input), Some(attended), Some(before), Some(fed)],
        NormPlacement::Parallel => [Some(input), None, None, None],
    };
    let mixes = !matches!(shape.mixer(layer), Mixer::None);
    let feeds = !matches!(shape.feed(layer), FeedShape::None);
    let [input, attended, before, fed] = names;
    [
        input.filter(|_| mixes),
        attended.filter(|_| mixes),
        before.filter(|_| feeds),
        fed.filter(|_| feeds),
    ]
}

/// The names of the first projections of a feed-forward network.
fn first_products(gated: bool) -> &'static [&'static str] {
    if gated { &["gate_proj", "up_proj"] } else { &["up_proj"] }
}

/// The name of the bias that is added to experts' scores when experts are chosen.
fn correction(at: &str) -> String {
    format!("{at}.gate.e_score_correction_bias")
}

/// The name of the router's bias.
fn router_bias(at: &str) -> String {
    format!("{at}.gate.bias")
}

/// The name of the shared expert's gate.
fn shared_gate(at: &str) -> String {
    format!("{at}.shared_expert_gate.weight")
}

fn dtype(number: TorchNumber) -> Dtype {
    match number {
        TorchNumber::Float32 => Dtype::Float32,
        TorchNumber::Bfloat16 => Dtype::Bfloat16,
    }
}
