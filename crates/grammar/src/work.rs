//! The work that a form may cause before its grammar reaches the compiler.

use serde_json::Value;

use crate::error::GrammarError;

/// Units of one form. A schema of the largest size that is written out once takes a part of them.
const MOST: usize = 16 << 20;
/// Units of looking at a schema, or of copying a JSON value. A written byte takes one.
const STEP: usize = 32;

/// A count of schemas that are visited, values that are copied and bytes that are written.
///
/// Schemas refer to each other, and to themselves: written out they are many times their text. So
/// every walk over them spends from here, and ends when nothing is left.
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
    /// Looks at a schema.
    ///
    /// # Errors
    /// Too much work was done before, as for the other methods.
    pub(crate) fn visit(&mut self) -> Result<(), GrammarError> {
        self.spend(STEP)
    }

    /// Copies a value with all that is in it.
    pub(crate) fn copy(&mut self, value: &Value) -> Result<(), GrammarError> {
        self.spend(size(value, self.left))
    }

    /// Counts `bytes` written bytes.
    pub(crate) fn write(&mut self, bytes: usize) -> Result<(), GrammarError> {
        self.spend(bytes)
    }

    fn spend(&mut self, units: usize) -> Result<(), GrammarError> {
        let left = self.left.checked_sub(units);
        // Work after an error fails at once.
        self.left = left.unwrap_or(0);
        left.map(drop).ok_or_else(|| {
            GrammarError::invalid(
                "its parts refer to each other so often that it is too large when it is written out",
            )
        })
    }

    /// Units that were spent.
    #[cfg(test)]
    pub(crate) fn spent(&self) -> usize {
        MOST - self.left
    }
}

/// Units of a copy of `value`; a bit more than `most` if it takes more than that.
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
