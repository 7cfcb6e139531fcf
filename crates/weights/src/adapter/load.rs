//! Loads an adapter's matrices from its files, as the manifest lists them.

use std::path::Path;

use blake2::{Blake2b, Digest, digest::consts::U16};
use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::files::{AdapterFolder, OpenFile};
use crate::describe::hex;
use crate::error::ModelError;
use crate::manifest::Place;
use crate::tensor::{TorchNumber, halves, numbers_of, write_numbers};

/// The matrices of one module, in the model's data type.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterPair {
    /// The index of the layer.
    pub layer: usize,
    /// The suffix of the module's name, such as `self_attn.q_proj`.
    pub module: String,
    /// The rank of both matrices.
    pub rank: usize,
    /// `[rank, inputs]`
    pub a: Vec<u8>,
    /// `[outputs, rank]`, multiplied by the adapter's scale.
    pub b: Vec<u8>,
}

/// Why a hand could not read an adapter.
#[derive(Debug, Error)]
pub enum AdapterError {
    /// The files can't be read.
    #[error("{0}")]
    Files(#[from] ModelError),
    /// The files have changed since the manifest was made.
    #[error("{0}: the content has changed")]
    Changed(String),
}

/// The fields of a manifest that a hand reads.
#[derive(Deserialize)]
struct Wanted {
    files: Vec<String>,
    digest: String,
    modules: Vec<Module>,
}

#[derive(Deserialize)]
struct Module {
    name: String,
    scale: f32,
    a: Place,
    b: Place,
}

/// Reads the matrices that a manifest lists, in the model's data type. Each byte is read once, so
/// the digest covers exactly the bytes that are used.
///
/// # Errors
/// The files can't be read, or have changed.
pub fn read_adapter(
    manifest: &Value,
    number: TorchNumber,
) -> Result<Vec<AdapterPair>, AdapterError> {
    let wanted = Wanted::deserialize(manifest);
    let wanted = wanted.map_err(|error| ModelError::broken(format!("the manifest: {error}")))?;
    let open = |path: &String| AdapterFolder::Anywhere.open(Path::new(path));
    let files = wanted.files.iter().map(open).collect::<Result<Vec<OpenFile>, ModelError>>()?;
    let mut digest = Blake2b::<U16>::new();
    let mut pairs = Vec::with_capacity(wanted.modules.len());
    for Module { name, scale, a, b } in wanted.modules {
        digest.update(name.as_bytes());
        digest.update(scale.to_le_bytes());
        let (of_a, [rank, _]) = read(&files, &a, (1.0, number), &mut digest)?;
        let (of_b, _) = read(&files, &b, (scale, number), &mut digest)?;
        let parts = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let found = parts.and_then(|(layer, module)| Some((layer.parse().ok()?, module)));
        let Some((layer, module)) = found else {
            return Err(ModelError::broken(format!("{name} is no module of a layer")).into());
        };
        pairs.push(AdapterPair { layer, module: module.to_owned(), rank, a: of_a, b: of_b });
    }
    if hex(&digest.finalize()) != wanted.digest {
        return Err(AdapterError::Changed(wanted.files.join(", ")));
    }
    Ok(pairs)
}

/// Reads a matrix and multiplies it by a factor. Also returns its shape.
fn read(
    files: &[OpenFile],
    place: &Place,
    (scale, number): (f32, TorchNumber),
    digest: &mut Blake2b<U16>,
) -> Result<(Vec<u8>, [usize; 2]), ModelError> {
    let file = files.get(place.file);
    let file = file.ok_or_else(|| ModelError::broken("the manifest names a file too many"))?;
    digest.update(facts(place));
    let mut stored = Vec::new();
    file.each(place.offset, place.bytes, |some| {
        digest.update(some);
        stored.extend_from_slice(some);
    })?;
    let part = &place.part;
    let (&[rows, columns], true) = (&part.shape[..], place.is_of_rows()) else {
        return Err(ModelError::broken("the manifest has a matrix that is no adapter's"));
    };
    let values = numbers_of(&place.format, &stored)?;
    let chosen = part.chosen_rows();
    let row_of = |row: usize| values.get(chosen(row) * columns..(chosen(row) + 1) * columns);
    let found: Option<Vec<&[f32]>> = (0..rows).map(row_of).collect();
    let found = found.ok_or_else(|| ModelError::broken("the manifest has a matrix cut short"))?;
    let mut numbers = vec![0; rows * columns * number.bytes()];
    let scaled = found.into_iter().flatten().map(|value| value * scale);
    write_numbers(scaled, number, &mut numbers);
    if let Some(heads) = part.pairs {
        halves(&mut numbers, rows, heads);
    }
    Ok((numbers, [rows, columns]))
}

/// The properties of a tensor that are hashed in addition to its bytes.
pub(super) fn facts(place: &Place) -> String {
    let Place { bytes, format, part, .. } = place;
    format!(" {format} {bytes} {} ", part.pairs.unwrap_or(0))
}
