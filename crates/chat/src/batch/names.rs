//! The names of requests, and of the answers that a file has.

use std::collections::HashSet;

/// The thing by which a line of the output belongs to one of the input.
#[derive(Debug, Clone, Copy)]
pub(super) enum Identity<'a> {
    /// The `custom_id` of a request.
    Name(&'a str),
    /// The number of a line that is no request. It has no name, or another line has it too.
    Line(u64),
}

/// What is known of a name when a request with it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    Nothing,
    /// The output has the answer.
    Answer,
    /// The input had a request with the name.
    Request,
}

/// Hashes in place of names: a name takes the same room however long it is.
#[derive(Debug, Default)]
pub(super) struct Names(HashSet<u128>);

/// The bit that tells names of the input from those of the output.
const OF_INPUT: u128 = 1;

impl Names {
    /// The output has an answer.
    pub(super) fn add_answer(&mut self, identity: Identity<'_>) {
        self.0.insert(key(identity));
    }

    /// True if the output has an answer.
    pub(super) fn has_answer(&self, identity: Identity<'_>) -> bool {
        self.0.contains(&key(identity))
    }

    /// The input has a request with a name.
    pub(super) fn add_request(&mut self, name: &str) -> Before {
        let key = key(Identity::Name(name));
        if !self.0.insert(key | OF_INPUT) {
            Before::Request
        } else if self.0.remove(&key) {
            Before::Answer
        } else {
            Before::Nothing
        }
    }
}

/// A hash for which nobody finds two names, less one bit.
fn key(identity: Identity<'_>) -> u128 {
    let mut hasher = blake3::Hasher::new();
    match identity {
        Identity::Name(name) => hasher.update(b"name ").update(name.as_bytes()),
        Identity::Line(number) => hasher.update(b"line ").update(&number.to_le_bytes()),
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
        let mut names = Names::default();
        names.add_answer(Identity::Name("a"));
        names.add_answer(Identity::Line(3));
        assert_eq!(names.add_request("a"), Before::Answer);
        assert_eq!(names.add_request("a"), Before::Request);
        assert_eq!(names.add_request("b"), Before::Nothing);
        assert_eq!(names.add_request("b"), Before::Request);
        assert!(names.has_answer(Identity::Line(3)) && !names.has_answer(Identity::Line(4)));
        assert_eq!(names.0.len(), 3);
    }
}
