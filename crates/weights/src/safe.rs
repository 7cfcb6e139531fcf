//! Safetensors files: the location of each tensor, and its bytes. The `safetensors` crate checks
//! the header's format.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::error::ModelError;

/// Bytes of the header's length, which precedes the header.
const LENGTH: u64 = 8;
/// The header size limit of the reference implementation.
const MOST_HEADER: u64 = 100_000_000;

/// An open file. Opening it reads only the header.
pub(crate) struct SafeFile {
    path: PathBuf,
    file: File,
    pub(crate) tensors: HashMap<String, SafeTensor>,
}

/// The location, data type and shape of a tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SafeTensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

impl SafeFile {
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let unreadable = |error| ModelError::unreadable(path, &error);
        let damaged =
            |what: &str| ModelError::broken(format!("{} is damaged: {what}", path.display()));
        let file = File::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let mut length = [0; LENGTH as usize];
        if size < LENGTH {
            return Err(damaged("it has no header"));
        }
        file.read_exact_at(&mut length, 0).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > MOST_HEADER || length > size - LENGTH {
            return Err(damaged("its header is longer than the file, or than any header"));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, LENGTH).map_err(unreadable)?;
        // Deserialising checks that tensors are contiguous, and that each has the length of its
        // shape.
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| damaged(&error.to_string()))?;
        if Some(metadata.data_len() as u64) != size.checked_sub(LENGTH + length) {
            return Err(damaged("its tensors end elsewhere than the file"));
        }
        let mut tensors = HashMap::new();
        let mut at = 0;
        for name in metadata.offset_keys() {
            let info = metadata.info(&name).ok_or_else(|| damaged("a tensor without a place"))?;
            let (first, end) = info.data_offsets;
            let bits =
                info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &n| bits.checked_mul(n));
            if first != at || end < first || bits != (end - first).checked_mul(8) {
                return Err(damaged("a tensor that is not as long as its shape"));
            }
            at = end;
            let offset = LENGTH + length + first as u64;
            let (dtype, shape) = (info.dtype, info.shape.clone());
            let tensor = SafeTensor { dtype, shape, offset, bytes: end - first };
            tensors.insert(name, tensor);
        }
        Ok(Self { path: path.to_owned(), file, tensors })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads bytes from an offset until `to` is full.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), ModelError> {
        self.file
            .read_exact_at(to, offset)
            .map_err(|error| ModelError::unreadable(&self.path, &error))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn write(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(bytes).expect("written");
        file
    }

    fn whole() -> Vec<u8> {
        let header = br#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}"#;
        [&(header.len() as u64).to_le_bytes()[..], header, &[7; 12]].concat()
    }

    #[test]
    fn tensors_are_found_in_the_file() {
        let bytes = whole();
        let file = write(&bytes);
        let opened = SafeFile::open(file.path()).expect("a good file");
        assert_eq!(opened.tensors.len(), 2);
        assert_eq!(opened.tensors["b"].shape, [2]);
        let mut read = [0; 8];
        opened.read(opened.tensors["b"].offset, &mut read).expect("inside");
        assert_eq!(read, [7; 8]);
    }

    proptest! {
        #[test]
        fn a_damaged_file_is_an_error_or_reads_within_itself(
            cut in 0..160_usize, at in 0..140_usize, value in any::<u8>(),
        ) {
            let mut bytes = whole();
            let at = at % bytes.len();
            bytes[at] = value;
            bytes.truncate(cut.min(bytes.len()));
            let file = write(&bytes);
            if let Ok(opened) = SafeFile::open(file.path()) {
                for tensor in opened.tensors.values() {
                    prop_assert!(opened.read(tensor.offset, &mut vec![0; tensor.bytes]).is_ok());
                }
            }
        }
    }
}
