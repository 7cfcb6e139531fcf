//! Reads rows of a quantised matrix from its tensors. At any time, only the tensors' parts for one
//! band of rows are in memory.

use std::ops::Range;

use safetensors::Dtype;

use super::codes::{CodeForm, Groups, PER_WORD, middles};
use super::matrices::{CodeStorage, QuantisedMatrix};
use super::scheme::{CodePacking, Int4Storage};
use crate::error::ModelError;
use crate::families::Weight;
use crate::mxfp4::Placed;
use crate::rows::{FloatRows, Receiver};
use crate::tensor::{AT_ONCE, floats};

/// The number of elements per band of rows. In AWQ and GPTQ, a band consists of one strip per input
/// or per eight inputs, and each strip is a separate read.
const BAND: usize = 1 << 22;

/// A quantised matrix in safetensors files, and the weights that it contains.
pub(crate) struct StoredMatrix {
    pub(crate) matrix: QuantisedMatrix,
    /// The matrix's tensors, by name suffix. The codes come first.
    pub(crate) parts: Vec<(&'static str, Placed)>,
    /// The weights that are parts of the matrix.
    pub(crate) weights: Vec<Weight>,
}

/// The stored data of neighbouring rows.
struct Band {
    form: CodeForm,
    codes: Vec<u8>,
    /// `[rows, groups]`
    scales: Vec<f32>,
    /// Zero points `[rows, groups]`, where rows may be padded to a multiple of eight; empty if the
    /// codes are floats.
    zeros: Vec<u8>,
}

impl FloatRows for StoredMatrix {
    fn each(
        &self,
        _: &str,
        first: usize,
        count: usize,
        with: &mut Receiver<'_>,
    ) -> Result<(), ModelError> {
        if count == 0 {
            return Ok(());
        }
        let inputs = self.matrix.shape[1];
        let whole = |elements: usize| (elements / inputs).max(1).next_multiple_of(PER_WORD);
        let wanted = first / inputs..(first + count) / inputs;
        self.multiply_out(&wanted, [whole(BAND), whole(AT_ONCE)], with)
    }
}

impl StoredMatrix {
    /// Dequantises the rows `wanted` and passes their values to `with`. `of_band` rows are read at
    /// a time, and `at_once` rows are dequantised at a time. Both are multiples of eight, the rows
    /// per word.
    pub(super) fn multiply_out(
        &self,
        wanted: &Range<usize>,
        [of_band, at_once]: [usize; 2],
        with: &mut Receiver<'_>,
    ) -> Result<(), ModelError> {
        let [all_rows, inputs] = self.matrix.shape;
        let (groups, of_row) = self.groups()?;
        // Words of AWQ's codes, and words of zero points, contain eight rows.
        let end = wanted.end.next_multiple_of(PER_WORD).min(all_rows);
        let mut values = Vec::new();
        for begin in (wanted.start / PER_WORD * PER_WORD..end).step_by(of_band) {
            let rows = begin..(begin + of_band).min(end);
            let band = self.band(&rows, of_row)?;
            for first in (0..rows.len()).step_by(at_once) {
                let some = first..(first + at_once).min(rows.len());
                values.resize(some.len() * inputs, 0.0);
                band.form.unpack(&band.codes, rows.len(), &some, inputs, &mut values);
                let of_rows = some.start * of_row..some.end * of_row;
                let zeros = band.zeros.get(of_rows.clone()).unwrap_or_default();
                groups.scale(&mut values, inputs, of_row, &band.scales[of_rows], zeros);
                let place = |row: usize| (row - begin - some.start) * inputs;
                let first = place(wanted.start.max(begin + some.start));
                with(&values[first..place(wanted.end.min(begin + some.end))])?;
            }
        }
        Ok(())
    }

    fn part(&self, end: &str) -> Option<&Placed> {
        self.parts.iter().find(|(other, _)| *other == end).map(|(_, placed)| placed)
    }

    fn tensor(&self, end: &str) -> Result<&Placed, ModelError> {
        self.part(end).ok_or_else(|| {
            ModelError::broken(format!("the checkpoint has no {end} for {}", self.matrix.name))
        })
    }

    /// Returns the group of each input, and the number of groups per row.
    ///
    /// # Errors
    /// The file has a group order that the config does not mention, or groups of other sizes.
    fn groups(&self) -> Result<(Groups, usize), ModelError> {
        let [_, inputs] = self.matrix.shape;
        let (size, ordered) = match self.matrix.storage {
            CodeStorage::Fp8 { block } => (block.map_or(inputs, |[_, columns]| columns), false),
            CodeStorage::Int4(Int4Storage { group, ordered, .. }) => {
                (group.unwrap_or(inputs), ordered)
            }
        };
        let count = inputs.div_ceil(size);
        self.check_shape()?;
        let Some(listed) = self.part("g_idx").or_else(|| self.part("weight_g_idx")) else {
            return Ok((Groups::Equal(size), count));
        };
        let listed = integers(listed)?;
        let of_neighbours = (0..inputs).map(|input| (input / size) as i64);
        if listed.iter().copied().eq(of_neighbours) {
            return Ok((Groups::Equal(size), count));
        }
        let name = &self.matrix.name;
        let mut sizes = vec![0; count];
        for &group in &listed {
            if let Some(size) = usize::try_from(group).ok().and_then(|it| sizes.get_mut(it)) {
                *size += 1;
            }
        }
        let wanted = (0..count).map(|group| size.min(inputs - group * size));
        if listed.len() != inputs || !sizes.into_iter().eq(wanted) {
            return Err(ModelError::broken(format!(
                "{name} has groups that are not of {size} inputs each"
            )));
        }
        if !ordered {
            return Err(ModelError::broken(format!(
                "{name} has groups in an order of their own, and the config does not say so"
            )));
        }
        let listed = listed.into_iter().map(|group| group as usize).collect();
        Ok((Groups::Listed(listed), count))
    }

    /// Checks the matrix's shape against the one that compressed-tensors stores beside the codes.
    fn check_shape(&self) -> Result<(), ModelError> {
        let Some(stated) = self.part("weight_shape") else { return Ok(()) };
        let (stated, shape) = (integers(stated)?, self.matrix.shape);
        if stated.iter().copied().eq(shape.map(|size| size as i64)) {
            return Ok(());
        }
        Err(ModelError::broken(format!(
            "{} is {stated:?} by its weight_shape, and its codes are those of {shape:?}",
            self.matrix.name
        )))
    }

    /// Reads a band of rows. The band starts at a word boundary, and ends at a word boundary or at
    /// the last row of the matrix. `groups` is the number of groups per row.
    fn band(&self, rows: &Range<usize>, groups: usize) -> Result<Band, ModelError> {
        let [_, inputs] = self.matrix.shape;
        let eights = rows.start / PER_WORD..rows.end.div_ceil(PER_WORD);
        let storage = match self.matrix.storage {
            CodeStorage::Fp8 { block } => return self.band_of_floats(rows, block),
            CodeStorage::Int4(storage) => storage,
        };
        let words = inputs / PER_WORD;
        let across = matches!(storage.packing, CodePacking::Gptq | CodePacking::Awq);
        let (form, codes) = match storage.packing {
            CodePacking::Gptq => {
                (CodeForm::Gptq, strip(self.tensor("qweight")?, &(0..words), rows)?)
            }
            CodePacking::Awq => {
                (CodeForm::Awq, strip(self.tensor("qweight")?, &(0..inputs), &eights)?)
            }
            CodePacking::CompressedTensors => {
                (CodeForm::Packed, strip(self.tensor("weight_packed")?, rows, &(0..words))?)
            }
        };
        let all = 0..groups;
        let (scales, zeros) = if across {
            let scales = self.floats("scales", &all, rows)?;
            let zeros = strip(self.tensor("qzeros")?, &all, &eights)?;
            (transposed(&scales, rows.len()), form.zeros(&zeros, groups, storage.less_one))
        } else {
            let scales = self.floats("weight_scale", rows, &all)?;
            let zeros = match self.part("weight_zero_point") {
                None => middles(scales.len()),
                Some(zeros) => form.zeros(&strip(zeros, &eights, &all)?, groups, false),
            };
            (scales, zeros)
        };
        Ok(Band { form, codes, scales, zeros })
    }

    fn band_of_floats(
        &self,
        rows: &Range<usize>,
        block: Option<[usize; 2]>,
    ) -> Result<Band, ModelError> {
        let [all_rows, inputs] = self.matrix.shape;
        let codes = self.tensor("weight")?;
        let wide = codes.1.dtype == Dtype::F8_E5M2;
        let form = if wide { CodeForm::E5m2 } else { CodeForm::E4m3 };
        let end = self.matrix.ends.last().copied().unwrap_or_default();
        let (_, scale) = self.tensor(end)?;
        let scales = match block {
            Some([of_block, _]) => {
                let groups = scale.shape.last().copied().unwrap_or(1);
                let blocks = rows.start / of_block..rows.end.div_ceil(of_block);
                let found = self.floats(end, &blocks, &(0..groups))?;
                let of_row = |row: usize| {
                    let first = (row / of_block - blocks.start) * groups;
                    found[first..first + groups].iter().copied()
                };
                rows.clone().flat_map(of_row).collect()
            }
            None if scale.shape.iter().product::<usize>() == all_rows => {
                let (one, all) = (0..1, rows.clone());
                let [down, along] = if scale.shape.len() == 1 { [one, all] } else { [all, one] };
                self.floats(end, &down, &along)?
            }
            None => vec![self.floats(end, &(0..1), &(0..1))?[0]; rows.len()],
        };
        let codes = strip(codes, rows, &(0..inputs))?;
        Ok(Band { form, codes, scales, zeros: Vec::new() })
    }

    fn floats(
        &self,
        end: &str,
        rows: &Range<usize>,
        columns: &Range<usize>,
    ) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(end)?;
        floats(&self.matrix.name, tensor.1.dtype, &strip(tensor, rows, columns)?)
    }
}

/// Reads the bytes of some columns of some rows of a tensor, row by row. A vector is treated as one
/// row, and a scalar as one row of one column.
fn strip(
    (file, tensor): &Placed,
    rows: &Range<usize>,
    columns: &Range<usize>,
) -> Result<Vec<u8>, ModelError> {
    let element = tensor.dtype.bitsize() / 8;
    let of_row = tensor.shape.last().copied().unwrap_or(1) * element;
    let each = columns.len() * element;
    let mut bytes = vec![0; rows.len() * each];
    let offset = |row: usize| tensor.offset + (row * of_row + columns.start * element) as u64;
    if each == of_row {
        file.read(offset(rows.start), &mut bytes)?;
        return Ok(bytes);
    }
    for (row, bytes) in rows.clone().zip(bytes.chunks_exact_mut(each.max(1))) {
        file.read(offset(row), bytes)?;
    }
    Ok(bytes)
}

/// Reads all values of a small tensor of integers.
fn integers((file, tensor): &Placed) -> Result<Vec<i64>, ModelError> {
    let mut bytes = vec![0; tensor.bytes];
    file.read(tensor.offset, &mut bytes)?;
    Ok(match tensor.dtype {
        Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|&it| i64::from_le_bytes(it)).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|&it| i32::from_le_bytes(it).into()).collect(),
    })
}

/// Transposes a matrix with this many columns.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let column = |column| values.iter().skip(column).step_by(columns).copied();
    (0..columns).flat_map(column).collect()
}
