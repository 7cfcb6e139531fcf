//! The ids of requests, and of the answers in a file.

use std::collections::HashSet;

/// The fields that match a line of the output to one of the input.
#[derive(Debug, Clone, Copy)]
pub enum LineIdentity<'a> {
    /// The `custom_id` of a request.
    Name(&'a str),
    /// The number of a line that is not a request. It has no id, or an id that another line has
    /// too.
    Line(u64),
}

/// Whether earlier requests had the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeenBefore {
    /// Neither.
    Nothing,
    /// The output has the answer.
    Answer,
    /// The input had a request with the name.
    Request,
}

/// Hashes of ids, so that each takes the same room however long it is.
#[derive(Debug, Default)]
pub struct BatchNames(HashSet<u128>);

/// The bit that distinguishes ids of the input from those of the output.
const OF_INPUT: u128 = 1;

impl BatchNames {
    /// Records that the output has an answer to this line.
    pub fn add_answer(&mut self, identity: LineIdentity<'_>) {
        self.0.insert(key(identity));
    }

    /// True if the output has an answer.
    pub fn has_answer(&self, identity: LineIdentity<'_>) -> bool {
        self.0.contains(&key(identity))
    }

    /// Adds the ids of another output, whose answers are in this one too.
    pub fn add_all(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Records the name of a request of the input. Returns where the name was seen before.
    pub fn add_request(&mut self, name: &str) -> SeenBefore {
        let key = key(LineIdentity::Name(name));
        if !self.0.insert(key | OF_INPUT) {
            SeenBefore::Request
        } else if self.0.remove(&key) {
            SeenBefore::Answer
        } else {
            SeenBefore::Nothing
        }
    }
}

/// A collision-resistant hash, less one bit.
fn key(identity: LineIdentity<'_>) -> u128 {
    let mut hasher = blake3::Hasher::new();
    match identity {
        LineIdentity::Name(name) => hasher.update(b"name ").update(name.as_bytes()),
        LineIdentity::Line(number) => hasher.update(b"line ").update(&number.to_le_bytes()),
    };
    let mut first = [0; 16];
    hasher.finalize_xof().fill(&mut first);
    u128::from_le_bytes(first) & !OF_INPUT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_answered_once_and_then_it_is_a_second_request() {
        let mut names = BatchNames::default();
        names.add_answer(LineIdentity::Name("a"));
        names.add_answer(LineIdentity::Line(3));
        assert_eq!(names.add_request("a"), SeenBefore::Answer);
        assert_eq!(names.add_request("a"), SeenBefore::Request);
        assert_eq!(names.add_request("b"), SeenBefore::Nothing);
        assert_eq!(names.add_request("b"), SeenBefore::Request);
        assert!(
            names.has_answer(LineIdentity::Line(3)) && !names.has_answer(LineIdentity::Line(4))
        );
        assert_eq!(names.0.len(), 3);
    }
}
