//! The weights of a model, from safetensors or GGUF, read one at a time under the family's names.

pub(crate) mod blocks;
mod joined;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::bert::BertShape;
use crate::error::ModelError;
use crate::families::{COMMON_GGUF_RULES, Rule, Shape, TensorPart, Weight, layer_of, weights_of};
use crate::gguf::GgufFiles;
use crate::json::read_json;
use crate::mxfp4::{CODES, EXPONENTS, Mxfp4Stack, Placed};
use crate::quantised::{Headers, QuantisedParts, Scheme, StoredMatrix};
use crate::rows::FloatRows;
use crate::safe::SafeFile;
use crate::tensor::{Tensor, TorchNumber};

use self::joined::read_joined;

const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
/// The index file, which maps tensors to shards.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Rules for all safetensors files. Old Llama checkpoints store the inverse frequencies of the
/// rotary embedding as a buffer, which is not read.
const COMMON_RULES: &[Rule] = &[Rule::spare("**.rotary_emb.inv_freq")];

/// The blocks of a matrix, as the GGUF file stores them or converted to another block type.
pub type Blocks = Vec<u8>;

/// The open files of a model. Opening reads only their headers.
pub struct Checkpoint {
    stored: HashMap<String, Stored>,
    /// The names of weights that are not quantised matrices, in the order of the files.
    names: Vec<String>,
    /// The shape of every weight of the model, by name.
    shapes: HashMap<String, Vec<usize>>,
    /// True if the embedding matrix is also the head.
    tied: bool,
    /// The quantised matrices of safetensors files. Their tensors are not weights themselves.
    quantised: Vec<StoredMatrix>,
    /// For each weight of a quantised matrix, the index of the matrix and the weight's index in it.
    multiplied_out: HashMap<String, (usize, usize)>,
    /// Biases of quantised matrices. The model's architecture may lack these biases.
    biases: Vec<String>,
}

/// A tensor that stacks heads, the part of it that is used, and the shape of that part in the
/// weight.
pub(crate) type JoinedPart = (Tensor, TensorPart, Vec<usize>);

/// The location of a weight in a model's files.
pub(crate) enum Stored {
    /// A part of one tensor.
    One(Tensor, TensorPart),
    /// Several tensors, each a stack of heads. Their rows are concatenated for each head.
    Joined(Vec<JoinedPart>),
}

impl Checkpoint {
    /// Opens the files of a model. `format` is `safetensors` or `gguf`.
    ///
    /// # Errors
    /// A file can't be read or is damaged.
    pub fn open(format: &str, files: &[PathBuf], shape: &Shape) -> Result<Self, ModelError> {
        let tied = shape.tied && !shape.headless;
        let mut found = Self::empty(tied && format == "gguf");
        match format {
            "safetensors" => found.add_safetensors(files, shape)?,
            "gguf" => found.add_gguf(files, shape)?,
            other => return Err(ModelError::elsewhere(format!("the model format '{other}'"))),
        }
        if shape.tied && !found.stored.contains_key(EMBEDDING) {
            found.take_head_for_embedding();
        }
        if shape.has_spare_head() {
            found.remove(HEAD);
        }
        Ok(found)
    }

    fn empty(tied: bool) -> Self {
        Self {
            stored: HashMap::new(),
            names: Vec::new(),
            shapes: HashMap::new(),
            tied,
            quantised: Vec::new(),
            multiplied_out: HashMap::new(),
            biases: Vec::new(),
        }
    }

    fn add_safetensors(&mut self, files: &[PathBuf], shape: &Shape) -> Result<(), ModelError> {
        let index = Index::beside(files)?;
        let mut found: Vec<(String, Tensor, Vec<Weight>)> = Vec::new();
        let mut seen = HashSet::new();
        let has_stacks = shape.quantised.as_ref().is_some_and(|it| it.scheme == Scheme::Mxfp4);
        let mut halves: BTreeMap<String, Placed> = BTreeMap::new();
        for path in files {
            let file = Arc::new(SafeFile::open(path)?);
            let names = file.tensors.keys().filter(|name| index.places(name, path));
            let mut names: Vec<&String> = names.collect();
            // The iteration order of a map is random.
            names.sort();
            for name in names {
                let tensor = &file.tensors[name];
                let rooted = if shape.headless { root(name) } else { name.clone() };
                if has_stacks && [CODES, EXPONENTS].iter().any(|end| rooted.ends_with(end)) {
                    halves.entry(rooted).or_insert_with(|| (file.clone(), tensor.clone()));
                    continue;
                }
                let weights = weights_in(&rooted, &tensor.shape, shape)?;
                // If there is no index and two files have the same tensor, the first file is used.
                if !weights.is_empty() && seen.insert(rooted.clone()) {
                    found.push((rooted, Tensor::Safe(file.clone(), tensor.clone()), weights));
                }
            }
        }
        found.extend(stacks(halves, shape)?);
        let parts = self.find_quantised(&found, shape)?;
        for (name, tensor, weights) in found {
            if parts.contains(&name) {
                continue;
            }
            for weight in weights {
                if !self.shapes.contains_key(&weight.name) {
                    self.insert(weight, tensor.clone());
                }
            }
        }
        Ok(())
    }

    /// Finds quantised matrices by tensor names. Returns the names of all their tensors, including
    /// the tensors that are not read.
    fn find_quantised(
        &mut self,
        tensors: &[(String, Tensor, Vec<Weight>)],
        shape: &Shape,
    ) -> Result<HashSet<String>, ModelError> {
        let header = |(name, tensor, _): &(String, Tensor, Vec<Weight>)| {
            (name.clone(), (tensor.type_name(), tensor.shape().to_vec()))
        };
        let headers: Headers = tensors.iter().map(header).collect();
        let found = QuantisedParts::find(&headers, shape.quantised.as_ref())?;
        let mut all: HashSet<String> = found.not_read.into_iter().collect();
        if found.matrices.is_empty() {
            return Ok(all);
        }
        let by_name: HashMap<&str, &Tensor> =
            tensors.iter().map(|(name, tensor, _)| (name.as_str(), tensor)).collect();
        for matrix in found.matrices {
            let module = matrix.name.strip_suffix(".weight").unwrap_or(&matrix.name);
            let mut parts = Vec::new();
            for &end in &matrix.ends {
                let name = format!("{module}.{end}");
                let placed = by_name.get(name.as_str()).and_then(|tensor| tensor.placed());
                parts.push((end, placed.ok_or_else(|| lacks(&name))?));
                all.insert(name);
            }
            let weights = weights_in(&matrix.name, &matrix.shape, shape)?;
            let spare = shape.has_spare_head() && weights.iter().all(|it| it.name == HEAD);
            if !spare {
                for (number, weight) in weights.iter().enumerate() {
                    self.shapes.insert(weight.name.clone(), weight.shape.clone());
                    let place = (self.quantised.len(), number);
                    self.multiplied_out.insert(weight.name.clone(), place);
                }
                self.quantised.push(StoredMatrix { matrix, parts, weights });
            }
        }
        for bias in found.biases {
            let stored = by_name.get(bias.as_str()).ok_or_else(|| lacks(&bias))?.shape();
            let weights = weights_in(&bias, stored, shape)?;
            self.biases.extend(weights.into_iter().map(|weight| weight.name));
        }
        Ok(all)
    }

    fn add_gguf(&mut self, files: &[PathBuf], shape: &Shape) -> Result<(), ModelError> {
        let files = GgufFiles::open(files)?;
        let own = shape.family.gguf.as_ref().map_or(&[][..], |names| names.rules);
        let mut joined: Vec<(String, Vec<(Weight, Tensor)>)> = Vec::new();
        for tensor in &files.tensors {
            if layer_of(&tensor.name).is_some_and(|layer| !shape.has_place_for(layer)) {
                continue;
            }
            let stored = (tensor.name.as_str(), &tensor.shape[..]);
            let weights = weights_of([own, COMMON_GGUF_RULES], stored, shape)?;
            let weights = weights.ok_or_else(|| {
                let name = &tensor.name;
                ModelError::broken(format!(
                    "the GGUF file has a tensor '{name}' that the model has no place for"
                ))
            })?;
            // A tensor may contain several weights, such as all experts of a layer.
            let source = Tensor::Gguf(Arc::new(tensor.clone()));
            for weight in weights {
                if weight.part.joined.is_some() {
                    let of = joined.iter_mut().find(|(name, _)| *name == weight.name);
                    match of {
                        Some((_, parts)) => parts.push((weight, source.clone())),
                        None => joined.push((weight.name.clone(), vec![(weight, source.clone())])),
                    }
                    continue;
                }
                if self.stored.contains_key(&weight.name) {
                    return Err(ModelError::broken(format!(
                        "the GGUF file has {} twice, once as '{}'",
                        weight.name, tensor.name
                    )));
                }
                self.insert(weight, source.clone());
            }
        }
        for (name, parts) in joined {
            // Some files have the matrix both joined and in several tensors.
            if !self.stored.contains_key(&name) {
                self.insert_joined(name, parts)?;
            }
        }
        Ok(())
    }

    fn insert_joined(
        &mut self,
        name: String,
        mut parts: Vec<(Weight, Tensor)>,
    ) -> Result<(), ModelError> {
        parts.sort_by_key(|(weight, _)| weight.part.joined);
        let numbers: Vec<usize> =
            parts.iter().filter_map(|(weight, _)| Some(weight.part.joined?.0)).collect();
        let wanted = parts[0].0.part.joined.map_or(0, |(_, of)| of);
        let names = || {
            let of_tensor = |(_, tensor): &(Weight, Tensor)| tensor.name().to_owned();
            parts.iter().map(of_tensor).collect::<Vec<_>>().join(" and ")
        };
        if !numbers.iter().copied().eq(0..wanted) {
            return Err(ModelError::broken(format!(
                "the GGUF file has {} only, of {wanted} tensors that make {name}",
                names()
            )));
        }
        let shapes: Vec<&[usize]> = parts.iter().map(|(weight, _)| &weight.shape[..]).collect();
        let same = |shape: &&[usize]| (shape[0], shape[2]) == (shapes[0][0], shapes[0][2]);
        if !shapes.iter().all(same) {
            return Err(ModelError::broken(format!(
                "{} of {shapes:?} are not of the same heads",
                names()
            )));
        }
        let rows = shapes.iter().map(|shape| shape[0] * shape[1]).sum();
        self.shapes.insert(name.clone(), vec![rows, shapes[0][2]]);
        self.names.push(name.clone());
        let parts = parts.into_iter().map(|(weight, tensor)| (tensor, weight.part, weight.shape));
        self.stored.insert(name, Stored::Joined(parts.collect()));
        Ok(())
    }

    fn insert(&mut self, weight: Weight, source: Tensor) {
        self.names.push(weight.name.clone());
        self.shapes.insert(weight.name.clone(), weight.shape);
        self.stored.insert(weight.name, Stored::One(source, weight.part));
    }

    fn remove(&mut self, name: &str) {
        self.stored.remove(name);
        self.shapes.remove(name);
        self.names.retain(|other| other != name);
    }

    /// Uses the head's matrix as the embedding: some tools store a tied matrix only under the
    /// head's name.
    fn take_head_for_embedding(&mut self) {
        if let (Some(stored), Some(shape)) = (self.stored.remove(HEAD), self.shapes.remove(HEAD)) {
            self.stored.insert(EMBEDDING.into(), stored);
            self.shapes.insert(EMBEDDING.into(), shape);
            let head = self.names.iter_mut().filter(|name| *name == HEAD);
            head.for_each(|name| EMBEDDING.clone_into(name));
        }
    }

    /// Opens the safetensors files of a BERT, with weights under the encoder's names. `scores` is
    /// true if the model has layers that compute scores from pooled vectors.
    ///
    /// # Errors
    /// A file cannot be read, or is damaged.
    pub fn of_bert(files: &[PathBuf], shape: &BertShape, scores: bool) -> Result<Self, ModelError> {
        let mut found = Self::empty(false);
        let index = Index::beside(files)?;
        for path in files {
            let file = Arc::new(SafeFile::open(path)?);
            let tensors = file.tensors.iter().filter(|(name, _)| index.places(name, path));
            let mut tensors: Vec<_> = tensors.collect();
            // The iteration order of a map is random.
            tensors.sort_by_key(|&(name, _)| name);
            for (name, tensor) in tensors {
                if let Some(name) = BertShape::name_of(name, scores) {
                    let mut part = TensorPart::whole(&tensor.shape);
                    let mut stored = tensor.shape.clone();
                    if let Some((first, rows)) = shape.rows_of(&name) {
                        if stored.first() != Some(&(first + rows)) {
                            return Err(ModelError::broken(format!(
                                "the model's files have {name} of {stored:?}, and {} rows are wanted",
                                first + rows
                            )));
                        }
                        (part.first, part.rows, stored[0]) = (first, rows, rows);
                    }
                    let weight = Weight { name, shape: stored, part };
                    found.insert(weight, Tensor::Safe(file.clone(), tensor.clone()));
                }
            }
        }
        Ok(found)
    }

    /// The shape of every weight, by name. A head that is tied to the embedding has no entry.
    #[must_use]
    pub fn shapes(&self) -> &HashMap<String, Vec<usize>> {
        &self.shapes
    }

    /// The names of weights that are not quantised matrices, in the order of the files.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the location of a tensor or weight in the files.
    pub(crate) fn stored_as(&self, name: &str) -> Result<&Stored, ModelError> {
        self.stored.get(name).ok_or_else(|| lacks(name))
    }

    /// The quantised matrices of safetensors files.
    pub(crate) fn quantised(&self) -> &[StoredMatrix] {
        &self.quantised
    }

    /// Returns the biases of quantised matrices that are all zeros. GPTQ's tools write such biases
    /// for models without biases.
    ///
    /// # Errors
    /// A file can't be read.
    pub fn zero_biases(&self) -> Result<Vec<String>, ModelError> {
        let mut found = Vec::new();
        for name in &self.biases {
            let elements: usize = self.shapes.get(name).map_or(0, |shape| shape.iter().product());
            let mut bytes = vec![0; 4 * elements];
            self.read(name, TorchNumber::Float32, &mut bytes)?;
            let (numbers, _) = bytes.as_chunks::<4>();
            if numbers.iter().all(|&number| f32::from_le_bytes(number) == 0.0) {
                found.push(name.clone());
            }
        }
        Ok(found)
    }

    fn one(&self, name: &str, from: &str) -> Result<(&Tensor, &TensorPart), ModelError> {
        match self.stored.get(from).ok_or_else(|| lacks(name))? {
            Stored::One(tensor, part) => Ok((tensor, part)),
            Stored::Joined(_) => {
                Err(ModelError::elsewhere(format!("{name} joined of several tensors")))
            }
        }
    }

    /// Returns the matrices that kernels can multiply in their block form, with the names of their
    /// GGUF types. A tied head is listed under its own name, although its tensor is the
    /// embedding's.
    #[must_use]
    pub fn stored(&self) -> Vec<(String, &'static str)> {
        let kind_of = |name: &str| {
            let Some(Stored::One(tensor, part)) = self.stored.get(name) else { return None };
            tensor.block_type(part)
        };
        let matrices = self.names.iter().filter(|&name| name != EMBEDDING);
        let mut found: Vec<(String, &'static str)> =
            matrices.filter_map(|name| Some((name.clone(), kind_of(name)?))).collect();
        if self.tied {
            found.extend(kind_of(EMBEDDING).map(|kind| (HEAD.to_owned(), kind)));
        }
        found
    }

    /// Reads a weight, converted to the model's data type, into a buffer of its size. Quantised
    /// matrices are dequantised in float32.
    ///
    /// # Errors
    /// There is no such weight, it has another size, or its file is damaged or can't be read.
    pub fn read(&self, name: &str, number: TorchNumber, to: &mut [u8]) -> Result<(), ModelError> {
        if let Some(&(matrix, weight)) = self.multiplied_out.get(name) {
            let matrix = &self.quantised[matrix];
            return matrix.read(name, &matrix.weights[weight].part, number, to);
        }
        match self.stored.get(name).ok_or_else(|| lacks(name))? {
            Stored::One(tensor, part) => tensor.read(name, part, number, to),
            Stored::Joined(parts) => read_joined(name, parts, number, to),
        }
    }
}

/// The index beside a model's files. It decides which shard's tensor is read, because tools leave
/// stale tensors in shards.
pub(crate) struct Index(Option<HashMap<String, String>>);

impl Index {
    /// Reads the index beside the files. An index that does not list all of these files belongs to
    /// other files and is ignored.
    pub(crate) fn beside(files: &[PathBuf]) -> Result<Self, ModelError> {
        let Some(folder) = files.first().and_then(|file| file.parent()) else {
            return Ok(Self(None));
        };
        let Some(placed) = read_index(folder)? else { return Ok(Self(None)) };
        let shards: HashSet<&str> = placed.values().map(String::as_str).collect();
        let named = files.iter().all(|file| name_of(file).is_some_and(|it| shards.contains(it)));
        Ok(Self(named.then_some(placed)))
    }

    /// True if the model uses this file's copy of a tensor.
    pub(crate) fn places(&self, tensor: &str, file: &Path) -> bool {
        let Some(placed) = &self.0 else { return true };
        placed.get(tensor).is_some_and(|shard| name_of(file) == Some(shard))
    }
}

fn name_of(file: &Path) -> Option<&str> {
    file.file_name()?.to_str()
}

/// Reads the map from tensors to shards in a folder's index; `None`: the folder has no index.
pub(crate) fn read_index(folder: &Path) -> Result<Option<HashMap<String, String>>, ModelError> {
    let path = folder.join(INDEX);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ModelError::unreadable(&path, &error)),
    };
    let index = read_json(&text)
        .map_err(|error| ModelError::broken(format!("{} is not JSON: {error}", path.display())))?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let shard = |(name, shard): (&String, &Value)| Some((name.clone(), shard.as_str()?.to_owned()));
    Ok(Some(map.into_iter().flatten().filter_map(shard).collect()))
}

/// Adds the prefix `model.` to the name of a body's weight. A model without a head may be saved
/// without this prefix.
fn root(name: &str) -> String {
    match name.starts_with("model.") || name.starts_with("lm_head.") {
        true => name.to_owned(),
        false => format!("model.{name}"),
    }
}

/// Returns the weights in a safetensors tensor, except those of layers after the last computed
/// layer.
fn weights_in(name: &str, stored: &[usize], shape: &Shape) -> Result<Vec<Weight>, ModelError> {
    let weights = weights_of([shape.family.rules, COMMON_RULES], (name, stored), shape)?;
    let mut weights = weights.unwrap_or_else(|| {
        let part = TensorPart::whole(stored);
        vec![Weight { name: name.to_owned(), shape: stored.to_vec(), part }]
    });
    weights.retain(|weight| layer_of(&weight.name).is_none_or(|it| shape.has_place_for(it)));
    Ok(weights)
}

/// Pairs the codes and exponents of each `MXFP4` stack.
fn stacks(
    mut halves: BTreeMap<String, Placed>,
    shape: &Shape,
) -> Result<Vec<(String, Tensor, Vec<Weight>)>, ModelError> {
    let mut found = Vec::new();
    while let Some((name, placed)) = halves.pop_first() {
        // In alphabetical order, the codes of a stack precede its exponents.
        let stem =
            name.strip_suffix(CODES).ok_or_else(|| lacks(&name.replace(EXPONENTS, CODES)))?;
        let exponents = format!("{stem}{EXPONENTS}");
        let exponents = halves.remove(&exponents).ok_or_else(|| lacks(&exponents))?;
        let stack = Mxfp4Stack::new(stem, placed, exponents)?;
        let weights = weights_in(&name, &stack.shape, shape)?;
        if !weights.is_empty() {
            found.push((name, Tensor::Mxfp4(Arc::new(stack)), weights));
        }
    }
    Ok(found)
}

fn lacks(name: &str) -> ModelError {
    ModelError::broken(format!("the checkpoint lacks {name}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shape(tied: bool) -> Shape {
        let config = json!({"architectures": ["LlamaForCausalLM"], "vocab_size": 3, "hidden_size": 4,
            "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": tied});
        Shape::from_config(config.as_object().expect("an object")).expect("a model")
    }

    /// Writes tensors that each hold one value.
    fn write(folder: &Path, name: &str, tensors: &[(&str, f64)], dtype: &str) -> PathBuf {
        let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
        for (name, value) in tensors {
            let first = bytes.len();
            match dtype {
                "F64" => bytes.extend(value.to_le_bytes()),
                _ => bytes.extend((*value as f32).to_le_bytes()),
            }
            let places =
                json!({"dtype": dtype, "shape": [1], "data_offsets": [first, bytes.len()]});
            header.insert((*name).into(), places);
        }
        let header = Value::Object(header).to_string();
        let length = (header.len() as u64).to_le_bytes();
        let path = folder.join(name);
        fs::write(&path, [&length[..], header.as_bytes(), &bytes].concat()).expect("written");
        path
    }

    fn number(checkpoint: &Checkpoint, name: &str) -> f32 {
        let mut bytes = [0; 4];
        checkpoint.read(name, TorchNumber::Float32, &mut bytes).expect("a number");
        f32::from_le_bytes(bytes)
    }

    #[test]
    fn the_index_says_which_tensors_count() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let files = [
            write(
                folder,
                "a.safetensors",
                &[("model.x", 1.0), ("model.y", 2.0), ("stale", 3.0)],
                "F32",
            ),
            write(folder, "b.safetensors", &[("model.x", 4.0)], "F32"),
        ];
        let open = || Checkpoint::open("safetensors", &files, &shape(false)).expect("a checkpoint");
        assert_eq!((number(&open(), "model.x"), open().shapes().len()), (1.0, 3));
        let index = |map: &Value| {
            fs::write(folder.join(INDEX), json!({"weight_map": map}).to_string()).expect("written");
        };
        index(&json!({"model.x": "b.safetensors", "model.y": "a.safetensors"}));
        assert_eq!((number(&open(), "model.x"), number(&open(), "model.y")), (4.0, 2.0));
        assert!(!open().shapes().contains_key("stale"));
        // This index names files that do not exist.
        index(&json!({"model.x": "gone.safetensors"}));
        assert_eq!((number(&open(), "model.x"), open().shapes().len()), (1.0, 3));
        index(&json!({"pooler.dense.weight": "b.safetensors", "model.x": "a.safetensors"}));
        let bert = json!({"architectures": ["BertModel"], "vocab_size": 3, "hidden_size": 4,
            "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2});
        let bert = BertShape::of(bert.as_object().expect("an object")).expect("a model");
        let encoder = Checkpoint::of_bert(&files, &bert, true).expect("a checkpoint");
        assert_eq!((number(&encoder, "model.x"), encoder.shapes().len()), (1.0, 1));
    }

    #[test]
    fn a_tied_pair_may_have_the_name_of_the_head() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = |name: &str, tensors: &[(&str, f64)], tied| {
            let file = write(folder.path(), name, tensors, "F32");
            Checkpoint::open("safetensors", &[file], &shape(tied)).expect("a checkpoint")
        };
        let alone = open("alone", &[(HEAD, 7.0)], true);
        assert_eq!((number(&alone, EMBEDDING), alone.shapes().len()), (7.0, 1));
        let both = open("both", &[(HEAD, 7.0), (EMBEDDING, 8.0)], true);
        assert_eq!((number(&both, EMBEDDING), both.shapes().len()), (8.0, 1));
        let untied = open("untied", &[(HEAD, 7.0)], false);
        assert!(!untied.shapes().contains_key(EMBEDDING) && untied.shapes().contains_key(HEAD));
    }

    #[test]
    fn numbers_of_64_bits_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = write(folder.path(), "x", &[("model.x", 1.5), ("model.y", 0.1)], "F64");
        let found = Checkpoint::open("safetensors", &[file], &shape(false)).expect("a checkpoint");
        assert_eq!([number(&found, "model.x"), number(&found, "model.y")], [1.5, 0.1_f32]);
    }
}
