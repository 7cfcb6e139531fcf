//! The header of a GGUF file. Opening reads only the header, and checks all its sizes and counts.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::types::TensorType;
use crate::error::ModelError;

const MOST_DIMENSIONS: u32 = 4;
/// The largest size of a header in bytes: far more than any known file has. Vocabularies have
/// hundreds of thousands of tokens, and chat templates have hundreds of KiB.
const MOST_HEADER: u64 = 256 << 20;
const MOST_ENTRIES: u64 = 1 << 25;
const MOST_DEPTH: u32 = 4;
const MOST_ALIGNMENT: u64 = 1 << 20;
/// The smallest sizes of a metadata field and of a tensor's header entry.
const LEAST_FIELD: u64 = 8 + 4 + 1;
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum GgufValue {
    Whole(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    List(Vec<GgufValue>),
}

impl GgufValue {
    pub(crate) fn as_i64(&self) -> Option<i64> {
        match *self {
            Self::Whole(number) => i64::try_from(number).ok(),
            Self::Bool(value) => Some(value.into()),
            // Truncates, as Python's `int()` does.
            Self::Float(value) if value.is_finite() => Some(value as i64),
            _ => None,
        }
    }

    pub(crate) fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::Float(value) => Some(value),
            Self::Whole(number) => Some(number as f64),
            _ => None,
        }
    }

    pub(crate) fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub(crate) fn as_list(&self) -> Option<&[Self]> {
        if let Self::List(items) = self { Some(items) } else { None }
    }

    /// True if Python would treat the value as true.
    pub(crate) fn truthy(&self) -> bool {
        match self {
            Self::Whole(number) => *number != 0,
            Self::Float(value) => *value != 0.0,
            Self::Bool(value) => *value,
            Self::Text(text) => !text.is_empty(),
            Self::List(items) => !items.is_empty(),
        }
    }
}

/// A tensor in a file.
#[derive(Debug, Clone)]
pub(crate) struct GgufTensor {
    pub(crate) name: String,
    pub(crate) kind: TensorType,
    /// The shape in elements, with the outermost dimension first (GGUF stores the reverse order).
    pub(crate) shape: Vec<usize>,
    /// Bytes per row. The rows of all outer dimensions are contiguous.
    pub(crate) row_bytes: usize,
    pub(crate) path: PathBuf,
    file: Arc<File>,
    pub(crate) offset: u64,
}

impl GgufTensor {
    /// Fills `to` with blocks, starting at element `first`, which has to be the first of a block.
    pub(crate) fn read(&self, first: usize, to: &mut [u8]) -> Result<(), ModelError> {
        let (elements, bytes) = self.kind.block();
        let at = self.offset + (first / elements * bytes) as u64;
        let read = self.file.read_exact_at(to, at);
        read.map_err(|error| ModelError::unreadable(&self.path, &error))
    }
}

/// A GGUF model, in one file or in several parts.
#[derive(Debug)]
pub(crate) struct GgufFiles {
    pub(crate) metadata: HashMap<String, GgufValue>,
    /// The tensors, in the order of the files.
    pub(crate) tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
}

impl GgufFiles {
    /// Opens the files. The metadata that describes the model is in the first file.
    pub(crate) fn open(paths: &[PathBuf]) -> Result<Self, ModelError> {
        let mut metadata = None;
        let mut tensors: Vec<GgufTensor> = Vec::new();
        let mut by_name = HashMap::new();
        for path in paths {
            let (found, of_file) = open(path)?;
            metadata.get_or_insert(found);
            for tensor in of_file {
                match by_name.get(&tensor.name) {
                    Some(&at) => tensors[at] = tensor,
                    None => {
                        by_name.insert(tensor.name.clone(), tensors.len());
                        tensors.push(tensor);
                    }
                }
            }
        }
        let metadata = metadata.ok_or_else(|| ModelError::broken("a model of no file"))?;
        let expected = metadata.get("split.tensors.count").and_then(GgufValue::as_i64);
        if expected.is_some_and(|count| usize::try_from(count) != Ok(tensors.len())) {
            return Err(ModelError::broken(format!(
                "{} is one part of several: {} of {} tensors are in {}",
                paths[0].display(),
                tensors.len(),
                expected.unwrap_or_default(),
                paths.len()
            )));
        }
        Ok(Self { metadata, tensors, by_name })
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.by_name.get(name).map(|&at| &self.tensors[at])
    }

    /// The architecture, such as `llama` or `qwen2`. Metadata keys of the architecture begin with
    /// this name.
    pub(crate) fn architecture(&self) -> &str {
        self.metadata.get("general.architecture").and_then(GgufValue::as_text).unwrap_or_default()
    }

    /// Returns a value from the architecture's metadata. A list of equal values, such as one per
    /// layer, counts as a single value.
    pub(crate) fn get(&self, key: &str) -> Option<&GgufValue> {
        let value = self.metadata.get(&format!("{}.{key}", self.architecture()))?;
        match value {
            GgufValue::List(items) => match &items[..] {
                [first, rest @ ..] if rest.iter().all(|item| item == first) => Some(first),
                _ => Some(value),
            },
            value => Some(value),
        }
    }
}

type Opened = (HashMap<String, GgufValue>, Vec<GgufTensor>);

fn open(path: &Path) -> Result<Opened, ModelError> {
    let unreadable = |error| ModelError::unreadable(path, &error);
    let file = File::open(path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    let not_gguf = || ModelError::broken(format!("{} is not a GGUF file", path.display()));
    if size < 24 {
        return Err(not_gguf());
    }
    let file = Arc::new(file);
    let input = BufReader::with_capacity(1 << 20, &*file);
    let mut header = Header { input, at: 0, size, entries: 0 };
    if &header.array::<4>().map_err(unreadable)? != b"GGUF" {
        return Err(not_gguf());
    }
    header.read(path, &file).map_err(|error| match error {
        Fault::Model(error) => error,
        Fault::Damage(what) => {
            ModelError::broken(format!("{} is truncated or damaged: {what}", path.display()))
        }
    })
}

/// Why a header can't be read.
enum Fault {
    Model(ModelError),
    Damage(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Damage(error.to_string())
    }
}

fn damage<T>(what: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Damage(what.into()))
}

struct Header<R> {
    input: R,
    at: u64,
    size: u64,
    /// The number of fields, tensors and array elements read so far.
    entries: u64,
}

impl<R: Read> Header<R> {
    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn read(&mut self, path: &Path, file: &Arc<File>) -> Result<Opened, Fault> {
        let version = self.u32()?;
        if matches!(version >> 24, 1..=3) {
            let what = format!(
                "{} is big-endian: gguf-py's gguf_convert_endian.py makes it little-endian",
                path.display()
            );
            return Err(Fault::Model(ModelError::broken(what)));
        }
        if version != 2 && version != 3 {
            let what =
                format!("{} has version {version} of the format; supported: 2, 3", path.display());
            return Err(Fault::Model(ModelError::broken(what)));
        }
        let (tensors, fields) = (self.u64()?, self.u64()?);
        self.claim(fields, LEAST_FIELD)?;
        self.claim(tensors, LEAST_TENSOR)?;
        let mut metadata = HashMap::new();
        for _ in 0..fields {
            let name = self.text()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0)?;
            metadata.insert(name, value);
        }
        let mut headers = Vec::new();
        for _ in 0..tensors {
            headers.push(self.tensor()?);
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(GgufValue::Whole(number)) => u64::try_from(*number).unwrap_or(0),
            Some(_) => 0,
        };
        if !(1..=MOST_ALIGNMENT).contains(&alignment) {
            return damage("general.alignment makes no sense");
        }
        let start = self.at.next_multiple_of(alignment);
        let place = |header| self.place(header, start, path, file);
        let tensors = headers.into_iter().map(place).collect::<Result<_, _>>()?;
        Ok((metadata, tensors))
    }

    fn tensor(&mut self) -> Result<(String, Vec<u64>, u32, u64), Fault> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if dimensions > MOST_DIMENSIONS {
            return damage(format!("tensor {name:?} has {dimensions} dimensions"));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.u64()?);
        }
        shape.reverse();
        Ok((name, shape, self.u32()?, self.u64()?))
    }

    fn place(
        &self,
        (name, shape, number, offset): (String, Vec<u64>, u32, u64),
        start: u64,
        path: &Path,
        file: &Arc<File>,
    ) -> Result<GgufTensor, Fault> {
        let Some(kind) = TensorType::of(number) else {
            let what = format!("the type {number} of tensor {name:?} of {}", path.display());
            return Err(Fault::Model(ModelError::unserved_part(&what)));
        };
        let (block, block_bytes) = kind.block();
        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(block as u64) {
            return damage(format!(
                "tensor {name:?} has rows of {columns} elements in blocks of {block}"
            ));
        }
        let inner = shape.len().saturating_sub(1);
        let rows = shape[..inner].iter().try_fold(1_u64, |rows, &n| rows.checked_mul(n));
        let row_bytes = (columns / block as u64).checked_mul(block_bytes as u64);
        let bytes = rows.zip(row_bytes).and_then(|(rows, bytes)| rows.checked_mul(bytes));
        let first = start.checked_add(offset);
        let end = first.zip(bytes).and_then(|(first, bytes)| first.checked_add(bytes));
        let (Some(row_bytes), Some(first), Some(end)) = (row_bytes, first, end) else {
            return damage(format!("tensor {name:?} is larger than any memory"));
        };
        if end > self.size {
            return damage(format!("the data of tensor {name:?} goes beyond the end of the file"));
        }
        Ok(GgufTensor {
            name,
            kind,
            shape: shape.iter().map(|&n| n as usize).collect(),
            row_bytes: row_bytes as usize,
            path: path.to_owned(),
            file: file.clone(),
            offset: first,
        })
    }

    fn text(&mut self) -> Result<String, Fault> {
        let length = self.u64()?;
        self.fits(length)?;
        let mut bytes = vec![0; length as usize];
        self.input.read_exact(&mut bytes)?;
        self.at += length;
        // Vocabularies may contain any bytes: a token that isn't UTF-8 must not prevent loading.
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<GgufValue, Fault> {
        Ok(match kind {
            0 => GgufValue::Whole(u8::from_le_bytes(self.array()?).into()),
            1 => GgufValue::Whole(i8::from_le_bytes(self.array()?).into()),
            2 => GgufValue::Whole(u16::from_le_bytes(self.array()?).into()),
            3 => GgufValue::Whole(i16::from_le_bytes(self.array()?).into()),
            4 => GgufValue::Whole(self.u32()?.into()),
            5 => GgufValue::Whole(i32::from_le_bytes(self.array()?).into()),
            6 => GgufValue::Float(f32::from_le_bytes(self.array()?).into()),
            7 => GgufValue::Bool(self.array::<1>()? != [0]),
            8 => GgufValue::Text(self.text()?),
            9 => {
                if depth == MOST_DEPTH {
                    return damage(format!("arrays are inside each other beyond {MOST_DEPTH}"));
                }
                let item = self.u32()?;
                let count = self.u64()?;
                let least = match item {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    8 | 10..=12 => 8,
                    9 => 12,
                    other => return damage(format!("metadata of the unknown type {other}")),
                };
                self.claim(count, least)?;
                let mut items = Vec::new();
                for _ in 0..count {
                    items.push(self.value(item, depth + 1)?);
                }
                GgufValue::List(items)
            }
            10 => GgufValue::Whole(self.u64()?.into()),
            11 => GgufValue::Whole(i64::from_le_bytes(self.array()?).into()),
            12 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            other => return damage(format!("metadata of the unknown type {other}")),
        })
    }

    /// Checks that `count` items of at least `least` bytes fit in the rest of the file.
    fn claim(&mut self, count: u64, least: u64) -> Result<(), Fault> {
        self.entries = self.entries.saturating_add(count);
        if self.entries > MOST_ENTRIES {
            return damage(format!("its header has more than {MOST_ENTRIES} entries"));
        }
        self.fits(count.saturating_mul(least))
    }

    fn fits(&self, bytes: u64) -> Result<(), Fault> {
        match self.at.checked_add(bytes) {
            Some(end) if end > MOST_HEADER => {
                damage(format!("its header has more than {MOST_HEADER} bytes"))
            }
            Some(end) if end <= self.size => Ok(()),
            _ => damage("something in it goes beyond the end of the file"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes of a file with these fields and tensors of type F32.
    pub(crate) fn gguf(fields: &[(&str, GgufValue)], tensors: &[(&str, &[u64])]) -> Vec<u8> {
        fn text(out: &mut Vec<u8>, text: &str) {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        }
        fn value(out: &mut Vec<u8>, value_: &GgufValue, tagged: bool) {
            let (kind, bytes) = match value_ {
                GgufValue::Whole(number) => (5, (*number as i32).to_le_bytes().to_vec()),
                GgufValue::Float(number) => (6, (*number as f32).to_le_bytes().to_vec()),
                GgufValue::Bool(flag) => (7, vec![u8::from(*flag)]),
                GgufValue::Text(written) => {
                    let mut bytes = Vec::new();
                    text(&mut bytes, written);
                    (8, bytes)
                }
                GgufValue::List(items) => {
                    let kind: u32 = match items.first() {
                        Some(GgufValue::Text(_)) => 8,
                        Some(GgufValue::Float(_)) => 6,
                        _ => 5,
                    };
                    let mut bytes = kind.to_le_bytes().to_vec();
                    bytes.extend((items.len() as u64).to_le_bytes());
                    items.iter().for_each(|item| value(&mut bytes, item, false));
                    (9, bytes)
                }
            };
            if tagged {
                out.extend(u32::to_le_bytes(kind));
            }
            out.extend(bytes);
        }
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((tensors.len() as u64).to_le_bytes());
        out.extend((fields.len() as u64).to_le_bytes());
        for (name, field) in fields {
            text(&mut out, name);
            value(&mut out, field, true);
        }
        let mut at = 0_u64;
        for (name, shape) in tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(0_u32.to_le_bytes());
            out.extend(at.to_le_bytes());
            at += (4 * shape.iter().product::<u64>()).next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        let numbers = (0..at / 4).flat_map(|number| (number as f32).to_le_bytes());
        out.extend(numbers);
        out
    }

    pub(crate) fn written(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(bytes).expect("written");
        file
    }

    fn sample() -> Vec<u8> {
        let list = GgufValue::List(vec![GgufValue::Text("a".into()), GgufValue::Text("é".into())]);
        let fields = [
            ("general.architecture", GgufValue::Text("llama".into())),
            ("llama.block_count", GgufValue::Whole(2)),
            ("llama.rope.freq_base", GgufValue::Float(1e4)),
            ("tokenizer.ggml.tokens", list),
            ("tokenizer.ggml.add_bos_token", GgufValue::Bool(true)),
        ];
        gguf(&fields, &[("one", &[2, 3]), ("two", &[4])])
    }

    fn read_all(bytes: &[u8]) -> Result<GgufFiles, ModelError> {
        let file = written(bytes);
        let opened = GgufFiles::open(&[file.path().to_owned()])?;
        for tensor in &opened.tensors {
            let rows: usize = tensor.shape.iter().rev().skip(1).product();
            tensor.read(0, &mut vec![0; rows * tensor.row_bytes])?;
        }
        Ok(opened)
    }

    #[test]
    fn fields_and_tensors_are_read() {
        let files = read_all(&sample()).expect("a good file");
        assert_eq!(files.architecture(), "llama");
        assert_eq!(files.get("block_count"), Some(&GgufValue::Whole(2)));
        let tokens = files.metadata["tokenizer.ggml.tokens"].as_list().expect("a list");
        assert_eq!(tokens[1].as_text(), Some("é"));
        let two = files.tensor("two").expect("a tensor");
        let mut bytes = [0; 16];
        two.read(0, &mut bytes).expect("inside");
        assert_eq!(bytes[..4], 8_f32.to_le_bytes(), "the second tensor starts after 32 bytes");
    }

    #[test]
    fn what_a_file_can_not_have_takes_no_memory() {
        let mut bytes = sample();
        bytes[4..8].reverse();
        let error = read_all(&bytes).expect_err("big-endian").to_string();
        assert!(error.contains("is big-endian"), "{error}");
        bytes[4..8].reverse();
        // Damage the number of fields.
        bytes[16..24].copy_from_slice(&(1_u64 << 60).to_le_bytes());
        let error = read_all(&bytes).expect_err("damaged").to_string();
        assert!(error.contains("entries"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn a_damaged_file_is_an_error_or_reads_within_itself(
            cut in 0..700_usize, changes in proptest::collection::vec((0..700_usize, any::<u8>()), 0..6),
        ) {
            let mut bytes = sample();
            for (at, value) in changes {
                let at = at % bytes.len();
                bytes[at] = value;
            }
            bytes.truncate(cut.min(bytes.len()));
            // No input causes a panic, and the tensors of every file that opens can be read.
            if let Err(error) = read_all(&bytes) {
                prop_assert!(!error.to_string().contains("can't be read"), "{}", error);
            }
        }
    }
}
