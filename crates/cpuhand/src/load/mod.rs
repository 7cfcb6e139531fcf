//! The way of weights into the order of the kernels, from a checkpoint or from an earlier start's
//! file.

mod bert;
mod read;
mod recurrence;

use std::collections::{BTreeMap, HashMap, HashSet};

use forebay_kernels::{
    Dtype, ExpertBiases, ExpertMatrices, FeedForward, Gated, Layer, Matrix, Packing, Storage,
    Weights,
};
use forebay_weights::{
    Angles, BlockKind, Checkpoint, Entry, Experts, FeedShape, ModelError, Norm, NormPlacement,
    QkNorm, Shape, TorchNumber, computed_as, computed_names,
};

use crate::parts::{DecoderParts, ONE_PART};

pub(crate) use read::{Loaded, Source, load, rooms, shared};

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";
/// Inner positions of a quantised block.
const SHARED: usize = 32;

/// Numbers beside blocks are made blocks of 8 bits if these have so many times their rows: files
/// have small matrices as numbers, which must not make large ones wide.
const FEW_ROWS: usize = 32;

/// The formats of matrices.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Formats {
    /// True if matrices that are not in blocks are 8-bit integers, and not of the model's type.
    pub(crate) int8: bool,
    /// True if the user insists on blocks.
    pub(crate) insists: bool,
    /// Matrices that stay in a file's blocks: checkpoint name to GGUF's name of its type.
    pub(crate) stored: BTreeMap<String, String>,
}

impl Formats {
    /// The format of a matrix of these parts.
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
            // Files give keys and values more bits than queries: the widest of the formats holds
            // them all.
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

/// Some of the checkpoint's weights, one after the other in memory.
#[derive(Debug, Clone)]
struct Parts {
    /// Name and shape in the checkpoint. The first name stands for all.
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

/// Weights that stay in the order of the checkpoint.
struct Vectors {
    parts: Parts,
    number: TorchNumber,
}

struct Matrices {
    /// The parts of all of them, with as many matrices each.
    parts: Parts,
    /// The packing of one matrix.
    packing: Packing,
    /// The number of matrices, which lie one behind the other.
    count: usize,
    /// The name of the tensor in the checkpoint, if it is not that of the only part.
    source: Option<&'static str>,
}

/// The description of a model's weights and of their layout in memory. A plan has no loaded
/// weights.
pub(crate) struct Plan {
    vectors: Vec<Vectors>,
    matrices: Vec<Matrices>,
    number: TorchNumber,
    formats: Formats,
    layers: usize,
}

impl Plan {
    /// The weights of a model. Products are in `number`, except for matrices in `formats`.
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
        for layer in 0..parts.layers() {
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            match parts.recurrence(layer) {
                Some(recurrence) => plan.recurrence(&at("linear_attn"), hidden, recurrence)?,
                None => plan.attention(parts, layer, of_norms)?,
            }
            match shape.feed(layer) {
                FeedShape::Experts(experts) => plan.experts(&at("mlp"), hidden, experts)?,
                FeedShape::Dense(dense) => {
                    plan.gated(&at("mlp"), (hidden, dense.intermediate_size), dense.bias)?;
                }
                FeedShape::None => return Err(ModelError::Elsewhere(ONE_PART.into())),
            }
            for norm in norms_of(shape.layers[layer].norms).into_iter().flatten() {
                plan.norm_of_size(at(&format!("{norm}.weight")), hidden, of_norms);
            }
        }
        plan.head(shape)?;
        Ok(plan)
    }

    fn attention(
        &mut self,
        parts: &DecoderParts<'_>,
        layer: usize,
        of_norms: TorchNumber,
    ) -> Result<(), ModelError> {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let (hidden, attention) = (parts.shape.hidden_size, parts.kind(layer).attention);
        let dim = attention.head_dim;
        let (queries, keys) = (attention.heads * dim, attention.kv_heads * dim);
        let gate = attention.gate.then_some(("g_proj", queries));
        let qkv = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)].into_iter().chain(gate);
        let qkv = qkv.map(|(name, rows)| (at(&format!("self_attn.{name}")), rows));
        let output = [(at("self_attn.o_proj"), hidden)];
        self.linear(&qkv.collect::<Vec<_>>(), hidden, attention.qkv_bias, false)?;
        self.linear(&output, queries, attention.output_bias, false)?;
        let of_heads = match attention.qk_norm {
            QkNorm::None | QkNorm::Plain => None,
            QkNorm::Heads => Some([dim, dim]),
            QkNorm::Rows => Some([queries, keys]),
        };
        for (norm, size) in ["q_norm", "k_norm"].into_iter().zip(of_heads.into_iter().flatten()) {
            self.norm_of_size(at(&format!("self_attn.{norm}.weight")), size, of_norms);
        }
        if attention.sinks {
            self.vector(&[(at("self_attn.sinks"), vec![attention.heads])]);
        }
        Ok(())
    }

    fn vector(&mut self, parts: &[(String, Vec<usize>)]) {
        self.vectors.push(Vectors { parts: Parts { parts: parts.to_vec() }, number: self.number });
    }

    fn norm_of_size(&mut self, name: String, size: usize, number: TorchNumber) {
        let parts = Parts { parts: vec![(name, vec![size])] };
        self.vectors.push(Vectors { parts, number });
    }

    fn gated(
        &mut self,
        at: &str,
        (hidden, inner): (usize, usize),
        bias: bool,
    ) -> Result<(), ModelError> {
        let gate_up = ["gate_proj", "up_proj"].map(|name| (format!("{at}.{name}"), inner));
        self.linear(&gate_up, hidden, bias, true)?;
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
        // Rounding would change who is chosen, and next to the experts these are small.
        if let Some(router) = self.vectors.last_mut().filter(|_| of.routing.in_float32) {
            router.number = TorchNumber::Float32;
        }
        if of.routing.corrected {
            let parts = Parts { parts: vec![(correction(at), vec![of.count])] };
            self.vectors.push(Vectors { parts, number: TorchNumber::Float32 });
        }
        if of.shared_gate {
            self.vector(&[(shared_gate(at), vec![hidden])]);
        }
        if of.shared_size > 0 {
            self.gated(&format!("{at}.shared_experts"), (hidden, of.shared_size), false)?;
        }
        let all = |kinds: &[&str], shape: [usize; 2]| {
            let each =
                (0..of.count).flat_map(|expert| kinds.iter().map(move |kind| (expert, kind)));
            let name = |(expert, kind)| format!("{at}.experts.{expert}.{kind}.weight");
            Parts { parts: each.map(|it| (name(it), shape.to_vec())).collect() }
        };
        if of.bias {
            self.vector(&[(router_bias(at), vec![of.count])]);
            for (kinds, size) in [(&["gate_proj", "up_proj"][..], inner), (&["down_proj"], hidden)]
            {
                let each = (0..of.count).flat_map(|of| kinds.iter().map(move |kind| (of, kind)));
                let name = |(of, kind)| (format!("{at}.experts.{of}.{kind}.bias"), vec![size]);
                self.vector(&each.map(name).collect::<Vec<_>>());
            }
        }
        let gate_up = all(&["gate_proj", "up_proj"], [inner, hidden]);
        let down = all(&["down_proj"], [hidden, inner]);
        self.matrix((gate_up, of.count), hidden, true, None)?;
        self.matrix((down, of.count), inner, false, None)
    }

    fn head(&mut self, shape: &Shape) -> Result<(), ModelError> {
        if shape.headless {
            return Ok(());
        }
        let parts = Parts { parts: vec![(HEAD.into(), vec![shape.vocab_size, shape.hidden_size])] };
        let storage = self.formats.of(&parts.parts, shape.hidden_size)?;
        // Also where it is tied: the rows of an embedding are looked up in the model's type.
        let own = !shape.tied || block_of(storage).is_some();
        self.matrix((parts, 1), shape.hidden_size, false, (!own).then_some(EMBEDDING))
    }

    fn matrix(
        &mut self,
        (parts, count): (Parts, usize),
        inputs: usize,
        interleaved: bool,
        source: Option<&'static str>,
    ) -> Result<(), ModelError> {
        let storage = self.formats.of(&parts.parts, inputs)?;
        let dtype = dtype(self.number);
        let outputs = parts.elements() / inputs / count;
        let packing = Packing { outputs, inputs, interleaved, dtype, storage };
        packing.bytes().map_err(|error| ModelError::Broken(error.to_string()))?;
        self.matrices.push(Matrices { parts, packing, count, source });
        Ok(())
    }

    pub(crate) fn formats(&self) -> &Formats {
        &self.formats
    }

    /// Names of a checkpoint's weights that there is room for.
    fn wanted(&self) -> impl Iterator<Item = &(String, Vec<usize>)> {
        let of_matrices = self.matrices.iter().filter(|matrix| matrix.source.is_none());
        let matrices = of_matrices.flat_map(|matrix| &matrix.parts.parts);
        self.vectors.iter().flat_map(|vector| &vector.parts.parts).chain(matrices)
    }

    /// Bytes of all weights as they are computed with.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries().iter().filter_map(|(_, entry)| entry.bytes()).map(|bytes| bytes as u64).sum()
    }

    /// The entries that are kept of a model, by name: vectors as they were loaded, matrices as the
    /// kernels read them.
    pub(crate) fn entries(&self) -> Vec<(&str, Entry)> {
        let name = |number| match number {
            TorchNumber::Float32 => "F32",
            TorchNumber::Bfloat16 => "BF16",
        };
        let vector = |parts: &Parts| {
            // The first dimensions of parts come together.
            let rows = parts.parts.iter().map(|(_, shape)| shape[0]).sum();
            parts.parts[0].1.iter().skip(1).fold(vec![rows], |mut shape, &size| {
                shape.push(size);
                shape
            })
        };
        let vectors = self.vectors.iter().map(|Vectors { parts, number }| {
            (parts.name(), Entry { dtype: name(*number).into(), shape: vector(parts) })
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

    /// Checks that the shapes of a checkpoint's weights fit, before anything is read.
    pub(crate) fn check(&self, checkpoint: &Checkpoint) -> Result<(), ModelError> {
        let found = checkpoint.shapes();
        let blocks = |name: &str| {
            // Its shape is that of the embedding, which it is.
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

    /// The matrices that are computed in the blocks of a file, in words; empty: there are none.
    ///
    /// # Errors
    /// There are none, and the user insists on them.
    pub(crate) fn blocks(&self) -> Result<String, ModelError> {
        let stored = &self.formats.stored;
        let (mut kinds, mut others) = (BTreeMap::new(), 0);
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

/// The type of norms in memory. Where the checkpoint has distances from 1, what comes of them has
/// more digits than the model's type.
fn number_of_norms(shape: &Shape, number: TorchNumber) -> TorchNumber {
    match shape.norm {
        Norm::RmsBesideOne => TorchNumber::Float32,
        Norm::Rms | Norm::Mean => number,
    }
}

/// The names of a layer's norms: in front of the attention, behind it, in front of the feed-forward
/// part, behind it.
fn norms_of(placement: NormPlacement) -> [Option<&'static str>; 4] {
    let (input, attended) = ("input_layernorm", "post_attention_layernorm");
    let (before, fed) = ("pre_feedforward_layernorm", "post_feedforward_layernorm");
    match placement {
        // Here the same name is of the norm in front of the second part.
        NormPlacement::Before => [Some(input), None, Some(attended), None],
        NormPlacement::BeforeFeed => [None, None, Some(attended), None],
        NormPlacement::After => [None, Some(attended), None, Some(fed)],
        NormPlacement::Around => [Some(input), Some(attended), Some(before), Some(fed)],
        NormPlacement::Parallel => [Some(input), None, None, None],
    }
}

/// The name of the term that is added to experts' scores for the choice.
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

/// The weights of a decoder, made of loaded ones.
pub(crate) fn assemble(
    plan: &Plan,
    parts: &DecoderParts<'_>,
    loaded: &Loaded,
    positions: usize,
) -> Result<Weights, ModelError> {
    let shape = parts.shape;
    let get = |name: &str| {
        let found = loaded.get(name).cloned();
        found.ok_or_else(|| ModelError::Broken(format!("{name} is neither loaded nor packed")))
    };
    let storages: HashMap<&str, Storage> =
        plan.matrices.iter().map(|it| (it.parts.name(), it.packing.storage)).collect();
    let matrix = |name: &str| -> Result<Matrix, ModelError> {
        let storage = storages.get(name).copied().unwrap_or(Storage::Plain);
        Ok(Matrix { storage, packed: get(name)? })
    };
    let mut layers = Vec::new();
    for layer in 0..plan.layers {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let bias = |there: bool, name: &str| there.then(|| get(&at(name))).transpose();
        let attention = parts.kind(layer).attention;
        let norm = |name: &str| get(&at(&format!("{name}.weight")));
        let recurrent = parts.recurrence(layer);
        let state = |name: &str| get(&at(&format!("linear_attn.{name}")));
        let recurrence = recurrent.map(|of| recurrence::weights(of, state)).transpose()?;
        let (first, last, [bias_in, bias_out]) = match recurrent {
            None => {
                let biases = [attention.qkv_bias, attention.output_bias];
                ("self_attn.q_proj", "self_attn.o_proj", biases)
            }
            Some(of) => ("linear_attn.in_proj_q", "linear_attn.out_proj", [of.bias; 2]),
        };
        let head_norms = match attention.qk_norm {
            _ if recurrent.is_some() => None,
            QkNorm::None | QkNorm::Plain => None,
            QkNorm::Heads | QkNorm::Rows => {
                Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?))
            }
        };
        let placement = shape.layers[layer].norms;
        let [input, attended, before, fed] =
            norms_of(placement).map(|name| name.map(norm).transpose());
        let gated = |of: &str, with_bias: bool| -> Result<Gated, ModelError> {
            Ok(Gated {
                gate_up: matrix(&at(&format!("{of}.gate_proj.weight")))?,
                gate_up_bias: bias(with_bias, &format!("{of}.gate_proj.bias"))?,
                down: matrix(&at(&format!("{of}.down_proj.weight")))?,
                down_bias: bias(with_bias, &format!("{of}.down_proj.bias"))?,
            })
        };
        let feed = match shape.feed(layer) {
            FeedShape::Experts(experts) => {
                let corrected = experts.routing.corrected;
                let shared = experts.shared_size > 0;
                FeedForward::Experts(ExpertMatrices {
                    router: get(&at("mlp.gate.weight"))?,
                    correction: corrected.then(|| get(&correction(&at("mlp")))).transpose()?,
                    gate_up: matrix(&at("mlp.experts.0.gate_proj.weight"))?,
                    down: matrix(&at("mlp.experts.0.down_proj.weight"))?,
                    shared: shared.then(|| gated("mlp.shared_experts", false)).transpose()?,
                    shared_gate: experts
                        .shared_gate
                        .then(|| get(&shared_gate(&at("mlp"))))
                        .transpose()?,
                    biases: match experts.bias {
                        false => None,
                        true => Some(ExpertBiases {
                            router: get(&router_bias(&at("mlp")))?,
                            gate_up: get(&at("mlp.experts.0.gate_proj.bias"))?,
                            down: get(&at("mlp.experts.0.down_proj.bias"))?,
                        }),
                    },
                })
            }
            FeedShape::Dense(dense) => FeedForward::Dense(gated("mlp", dense.bias)?),
            FeedShape::None => return Err(ModelError::Elsewhere(ONE_PART.into())),
        };
        layers.push(Layer {
            attention: parts.kind_of[layer],
            recurrence,
            parallel: placement == NormPlacement::Parallel,
            input_norm: input?,
            attended_norm: attended?,
            fed_norm: fed?,
            sinks: bias(attention.sinks && recurrent.is_none(), "self_attn.sinks")?,
            qkv: matrix(&at(&format!("{first}.weight")))?,
            qkv_bias: bias(bias_in, &format!("{first}.bias"))?,
            head_norms,
            output: matrix(&at(&format!("{last}.weight")))?,
            output_bias: bias(bias_out, &format!("{last}.bias"))?,
            post_norm: before?,
            feed,
        });
    }
    let angles = shape.ropes.iter().map(|rope| -> Result<_, ModelError> {
        let Angles { cos, sin } = Angles::new(rope, shape.max_positions, positions, plan.number)?;
        Ok((cos, sin))
    });
    Ok(Weights {
        embedding: get(EMBEDDING)?,
        final_norm: get(NORM)?,
        head: (!shape.headless).then(|| matrix(HEAD)).transpose()?,
        layers,
        angles: angles.collect::<Result<Vec<_>, ModelError>>()?,
        query_scales: parts.query_scale().map_or_else(Vec::new, |scale| {
            (0..positions as u64).map(|position| scale.at(position)).collect()
        }),
    })
}
