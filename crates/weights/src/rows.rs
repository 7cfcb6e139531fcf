//! Reads weights row by row from tensors, converted to the model's data type.

use crate::error::ModelError;
use crate::families::TensorPart;
use crate::tensor::{TorchNumber, halves, write_numbers};

/// A function that receives values in chunks.
pub(crate) type Receiver<'a> = dyn FnMut(&[f32]) -> Result<(), ModelError> + 'a;

/// A tensor whose rows can be read as floats.
pub(crate) trait FloatRows {
    /// Calls `with` with `count` values from element `first` on, in chunks. `first` and `count` are
    /// multiples of a row's length.
    ///
    /// # Errors
    /// The values can't be read, or `with` fails.
    fn each(
        &self,
        name: &str,
        first: usize,
        count: usize,
        with: &mut Receiver<'_>,
    ) -> Result<(), ModelError>;

    /// Copies stored values from an element on, without a conversion, until the buffer is full.
    /// Returns false if the values are not stored in the given data type.
    ///
    /// # Errors
    /// The file can't be read.
    fn copy(&self, _: usize, _: TorchNumber, _: &mut [u8]) -> Result<bool, ModelError> {
        Ok(false)
    }

    /// Reads a weight into a buffer of its size, converted to the model's data type.
    ///
    /// # Errors
    /// The weight has another size, or can't be read.
    fn read(
        &self,
        name: &str,
        part: &TensorPart,
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<(), ModelError> {
        if to.len() != part.rows * part.columns() * number.bytes() {
            return Err(ModelError::broken(format!(
                "{name} has another size in the model's files"
            )));
        }
        let [rows, columns] = part.matrix;
        let width = number.bytes();
        if part.transposed {
            let mut matrix = Vec::with_capacity(rows * columns);
            self.each(name, part.base * columns, rows * columns, &mut |values| {
                matrix.extend_from_slice(values);
                Ok(())
            })?;
            // A row of the weight is a column of the stored matrix.
            for (row, to) in to.chunks_exact_mut((rows * width).max(1)).enumerate() {
                let column = matrix.iter().skip(part.row(row)).step_by(columns);
                write_numbers(column.map(|&value| part.change(value)), number, to);
            }
        } else if part.is_every_nth() {
            let mut all = Vec::with_capacity(part.span() * columns);
            let first = (part.base + part.first) * columns;
            self.each(name, first, part.span() * columns, &mut |values| {
                all.extend_from_slice(values);
                Ok(())
            })?;
            let rows = all.chunks_exact(columns.max(1)).step_by(part.step);
            for (row, to) in rows.zip(to.chunks_exact_mut((columns * width).max(1))) {
                write_numbers(row.iter().map(|&value| part.change(value)), number, to);
            }
        } else {
            let rows_of_run = part.run();
            let of_run = rows_of_run * columns;
            for (run, to) in to.chunks_exact_mut((of_run * width).max(1)).enumerate() {
                let first = (part.base + part.row(run * rows_of_run)) * columns;
                self.read_run(name, part, (first, of_run), number, to)?;
            }
        }
        if let Some(heads) = part.pairs {
            halves(to, part.rows, heads);
        }
        Ok(())
    }

    /// Reads contiguous elements of a weight.
    ///
    /// # Errors
    /// They can't be read.
    fn read_run(
        &self,
        name: &str,
        part: &TensorPart,
        (first, count): (usize, usize),
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<(), ModelError> {
        if part.is_rows() && self.copy(first, number, to)? {
            return Ok(());
        }
        let mut at = 0;
        self.each(name, first, count, &mut |values| {
            let bytes = values.len() * number.bytes();
            let values = values.iter().map(|&value| part.change(value));
            write_numbers(values, number, &mut to[at..at + bytes]);
            at += bytes;
            Ok(())
        })
    }
}

impl TensorPart {
    /// True if the weight takes single rows and skips the rows between them.
    pub(crate) fn is_every_nth(&self) -> bool {
        self.width == 1 && self.step > 1
    }

    /// The number of rows from the first row to the last one, including skipped rows.
    pub(crate) fn span(&self) -> usize {
        self.rows.saturating_sub(1) * self.step + self.rows.min(1)
    }

    fn change(&self, value: f32) -> f32 {
        let plain = self.times == 1.0 && self.plus == 0.0;
        // Adding 0 would lose the sign of a negative zero.
        let value = if plain { value } else { value * self.times + self.plus };
        if self.log { value.ln() } else { value }
    }
}
