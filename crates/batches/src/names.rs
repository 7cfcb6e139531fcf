//! The ids of requests, and of the answers in an output file.

use std::collections::HashSet;

/// The id by which a line of the output is matched to a line of the input.
#[derive(Debug, Clone, Copy)]
pub enum LineIdentity<'a> {
    /// The `custom_id` of a request.
    Name(&'a str),
    /// The number of an invalid line that has no `custom_id`, or the same `custom_id` as another
    /// line.
    Line(u64),
}

/// Where the id of a request occurred before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeenBefore {
    /// Nowhere.
    Nothing,
    /// The output contains an answer with this id.
    Answer,
    /// The input contains an earlier request with this id.
    Request,
}

/// Hashes of ids. Each takes the same memory, however long the id is.
#[derive(Debug, Default)]
pub struct BatchNames(HashSet<u128>);

/// The bit that is set in the hashes of input ids, to distinguish them from output ids.
const OF_INPUT: u128 = 1;

impl BatchNames {
    /// Records that the output contains an answer to this line.
    pub fn add_answer(&mut self, identity: LineIdentity<'_>) {
        self.0.insert(key(identity));
    }

    /// True if the output contains an answer to this line.
    pub fn has_answer(&self, identity: LineIdentity<'_>) -> bool {
        self.0.contains(&key(identity))
    }

    /// Adds the ids of `other`, which are those of the answers in another output.
    pub fn add_all(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Records the id of a request of the input. Returns where the id occurred before.
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

/// A collision-resistant hash, of which one bit is cleared.
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
