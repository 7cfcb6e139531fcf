//! Limits the work on a form before its grammar reaches the compiler.

use serde_json::Value;

use crate::error::GrammarError;

/// The number of units of work that one form may take. Expanding the largest allowed schema once
/// takes only a part of them.
const MOST: usize = 16 << 20;
/// The units for visiting a schema or copying a JSON value. Writing a byte takes one unit.
const STEP: usize = 32;

/// Counts schemas that are visited, values that are copied and bytes that are written.
///
/// Schemas refer to each other and to themselves, and can expand to many times their text. So every
/// walk over them takes units from this budget, and fails when none are left.
#[derive(Debug)]
pub(crate) struct Work {
    left: usize,
}

impl Default for Work {
    fn default() -> Self {
        Self { left: MOST }
    }
}

impl Work {
    /// Counts the visit of a schema.
    ///
    /// # Errors
    /// The budget is used up. The other methods fail in the same case.
    pub(crate) fn visit(&mut self) -> Result<(), GrammarError> {
        self.spend(STEP)
    }

    /// Counts the copy of a value, nested values included.
    pub(crate) fn copy(&mut self, value: &Value) -> Result<(), GrammarError> {
        self.spend(size(value, self.left))
    }

    /// Counts the writing of `bytes` bytes.
    pub(crate) fn write(&mut self, bytes: usize) -> Result<(), GrammarError> {
        self.spend(bytes)
    }

    fn spend(&mut self, units: usize) -> Result<(), GrammarError> {
        let left = self.left.checked_sub(units);
        // After an error, all further work fails at once.
        self.left = left.unwrap_or(0);
        left.map(drop).ok_or_else(|| {
            GrammarError::invalid(
                "its parts refer to each other so often that it is too large when it is written out",
            )
        })
    }

    /// Returns the number of units that were used.
    #[cfg(test)]
    pub(crate) fn spent(&self) -> usize {
        MOST - self.left
    }
}

/// Returns the units for copying `value`. Stops counting soon after the count exceeds `most`.
fn size(value: &Value, most: usize) -> usize {
    let mut size = STEP;
    match value {
        Value::String(text) => size += text.len(),
        Value::Array(values) => {
            for value in values {
                size += self::size(value, most);
                if size > most {
                    break;
                }
            }
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                size += name.len() + self::size(value, most);
                if size > most {
                    break;
                }
            }
        }
        _ => {}
    }
    size
}
