//! The key-value store with which the ranks of a group exchange addresses when they start. Ranks
//! use the store through their sockets before they are ready, so no rank has to listen on a port.
//! The store behaves like PyTorch's stores (`torch.distributed.Store`).

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use base64_simd::STANDARD;
use forebay_protocol::{StoreOp, StoreReply, StoreRequest};
use thiserror::Error;

/// The largest size of a value in bytes.
const VALUE_BYTES: usize = 1 << 20;
/// The largest size of a key in bytes.
const KEY_BYTES: usize = 1024;
/// The largest number of keys.
const KEYS: usize = 1 << 16;

/// An invalid request, which ends the group.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum StoreError {
    /// A key or value is too large, or there are too many keys.
    #[error("the store has at most {KEYS} keys of {KEY_BYTES} bytes, with values of {VALUE_BYTES}")]
    TooLarge,
    /// A value is not base64.
    #[error("a value of the store is not base64")]
    Base64,
    /// An `Add` to a value that is not a number.
    #[error("the store has no number as {0:?}")]
    NoNumber(String),
    /// A rank sent a request before the response to its last one.
    #[error("two questions to the store at a time")]
    Impatient,
}

/// A rank's request to the store, which waits until all of its keys exist.
#[derive(Debug)]
struct WaitingQuestion {
    rank: usize,
    id: u64,
    keys: Vec<String>,
    /// True if the response contains the first key's value.
    wants_value: bool,
}

/// The keys and values of a group that is starting.
#[derive(Debug, Default)]
pub(crate) struct Store {
    values: HashMap<String, Vec<u8>>,
    waiting: Vec<WaitingQuestion>,
}

impl Store {
    /// Handles a request of `rank`. Returns the responses that are ready now, each with its rank.
    ///
    /// # Errors
    /// The request is invalid.
    pub(crate) fn ask(
        &mut self,
        rank: usize,
        request: StoreRequest,
    ) -> Result<Vec<(usize, StoreReply)>, StoreError> {
        if self.waiting.iter().any(|waiting| waiting.rank == rank) {
            return Err(StoreError::Impatient);
        }
        let StoreRequest { id, op } = request;
        let mut reply = StoreReply { id, value: None, number: None };
        match op {
            StoreOp::Set { key, value } => {
                let value = decoded(&value)?;
                self.set(key, value)?;
            }
            StoreOp::Add { key, amount } => {
                let sum = match self.values.get(&key) {
                    None => amount,
                    Some(value) => number(value)
                        .and_then(|before| before.checked_add(amount))
                        .ok_or_else(|| StoreError::NoNumber(key.clone()))?,
                };
                self.set(key, sum.to_string().into_bytes())?;
                reply.number = Some(sum);
            }
            StoreOp::Check { keys } => {
                reply.number = Some(self.has(&keys).into());
            }
            StoreOp::CompareSet { key, expected, value } => {
                let (expected, value) = (decoded(&expected)?, decoded(&value)?);
                let is_expected = match self.values.get(&key) {
                    // As in PyTorch's stores, a missing key matches an empty expected value.
                    None => expected.is_empty(),
                    Some(there) => *there == expected,
                };
                if is_expected {
                    self.set(key.clone(), value)?;
                }
                let there = self.values.get(&key).unwrap_or(&expected);
                reply.value = Some(STANDARD.encode_to_string(there));
            }
            StoreOp::Delete { key } => {
                reply.number = Some(self.values.remove(&key).is_some().into());
            }
            StoreOp::Count => {
                reply.number = Some(i64::try_from(self.values.len()).unwrap_or(i64::MAX));
            }
            StoreOp::Get { key } => return self.wait(rank, id, vec![key], true),
            StoreOp::Wait { keys } => return self.wait(rank, id, keys, false),
        }
        let mut answers = vec![(rank, reply)];
        answers.extend(self.come());
        Ok(answers)
    }

    fn wait(
        &mut self,
        rank: usize,
        id: u64,
        keys: Vec<String>,
        wants_value: bool,
    ) -> Result<Vec<(usize, StoreReply)>, StoreError> {
        if keys.len() > KEYS || keys.iter().any(|key| key.len() > KEY_BYTES) {
            return Err(StoreError::TooLarge);
        }
        self.waiting.push(WaitingQuestion { rank, id, keys, wants_value });
        Ok(self.come())
    }

    /// Returns the responses to waiting requests whose keys all exist by now.
    fn come(&mut self) -> Vec<(usize, StoreReply)> {
        let values = &self.values;
        let answered = self
            .waiting
            .extract_if(.., |waiting| waiting.keys.iter().all(|key| values.contains_key(key)));
        let answer = |waiting: WaitingQuestion| {
            let value = waiting.keys.first().filter(|_| waiting.wants_value);
            let value = value.and_then(|key| values.get(key));
            let value = value.map(|value| STANDARD.encode_to_string(value));
            (waiting.rank, StoreReply { id: waiting.id, value, number: None })
        };
        answered.map(answer).collect()
    }

    fn has(&self, keys: &[String]) -> bool {
        keys.iter().all(|key| self.values.contains_key(key))
    }

    fn set(&mut self, key: String, value: Vec<u8>) -> Result<(), StoreError> {
        if key.len() > KEY_BYTES || value.len() > VALUE_BYTES {
            return Err(StoreError::TooLarge);
        }
        let keys = self.values.len();
        match self.values.entry(key) {
            Entry::Occupied(mut entry) => {
                entry.insert(value);
            }
            Entry::Vacant(_) if keys >= KEYS => return Err(StoreError::TooLarge),
            Entry::Vacant(entry) => {
                entry.insert(value);
            }
        }
        Ok(())
    }
}

fn decoded(value: &str) -> Result<Vec<u8>, StoreError> {
    if value.len() > 2 * VALUE_BYTES {
        return Err(StoreError::TooLarge);
    }
    STANDARD.decode_to_vec(value).map_err(|_| StoreError::Base64)
}

/// Parses a number as PyTorch's stores keep it: as decimal digits.
fn number(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Group(Store, u64);

    impl Group {
        fn ask(&mut self, rank: usize, op: StoreOp) -> Vec<(usize, Option<String>, Option<i64>)> {
            self.1 += 1;
            let request = StoreRequest { id: self.1, op };
            let answers = self.0.ask(rank, request).expect("an answer");
            answers.into_iter().map(|(rank, reply)| (rank, reply.value, reply.number)).collect()
        }
    }

    fn key(name: &str) -> String {
        name.to_owned()
    }

    fn set(name: &str, value: &str) -> StoreOp {
        StoreOp::Set { key: key(name), value: STANDARD.encode_to_string(value) }
    }

    fn encoded(value: &str) -> Option<String> {
        Some(STANDARD.encode_to_string(value))
    }

    #[test]
    fn values_come_back_and_numbers_add_up() {
        let mut group = Group(Store::default(), 0);
        assert_eq!(group.ask(0, set("a", "x")), [(0, None, None)]);
        assert_eq!(group.ask(1, StoreOp::Get { key: key("a") }), [(1, encoded("x"), None)]);
        assert_eq!(group.ask(0, StoreOp::Add { key: key("n"), amount: 5 }), [(0, None, Some(5))]);
        assert_eq!(group.ask(1, StoreOp::Add { key: key("n"), amount: -7 }), [(1, None, Some(-2))]);
        assert_eq!(group.ask(1, StoreOp::Get { key: key("n") }), [(1, encoded("-2"), None)]);
        assert_eq!(group.ask(0, StoreOp::Count), [(0, None, Some(2))]);
        let check = |group: &mut Group, keys: &[&str]| {
            let keys = keys.iter().map(|name| key(name)).collect();
            group.ask(0, StoreOp::Check { keys })[0].2
        };
        assert_eq!(
            (check(&mut group, &["a", "n"]), check(&mut group, &["a", "b"])),
            (Some(1), Some(0))
        );
        assert_eq!(group.ask(0, StoreOp::Delete { key: key("a") })[0].2, Some(1));
        assert_eq!(group.ask(0, StoreOp::Delete { key: key("a") })[0].2, Some(0));
    }

    #[test]
    fn who_waits_is_answered_when_all_is_there() {
        let mut group = Group(Store::default(), 0);
        assert_eq!(group.ask(1, StoreOp::Get { key: key("a") }), []);
        let keys = vec![key("a"), key("b")];
        assert_eq!(group.ask(2, StoreOp::Wait { keys }), []);
        assert_eq!(group.ask(0, set("a", "x")), [(0, None, None), (1, encoded("x"), None)]);
        assert_eq!(group.ask(0, set("b", "y")), [(0, None, None), (2, None, None)]);
    }

    #[test]
    fn a_value_is_replaced_if_it_is_the_expected_one() {
        let mut group = Group(Store::default(), 0);
        let mut swap = |expected: &str, value: &str| {
            let (expected, value) =
                (STANDARD.encode_to_string(expected), STANDARD.encode_to_string(value));
            group.ask(0, StoreOp::CompareSet { key: key("a"), expected, value })[0].1.clone()
        };
        assert_eq!(swap("other", "x"), encoded("other"), "the key has no value");
        assert_eq!(swap("", "x"), encoded("x"));
        assert_eq!(swap("y", "z"), encoded("x"));
        assert_eq!(swap("x", "z"), encoded("z"));
    }

    #[test]
    fn what_nobody_needs_ends_the_group() {
        let mut store = Store::default();
        let mut ask = |op| store.ask(0, StoreRequest { id: 1, op });
        let long = "k".repeat(KEY_BYTES + 1);
        let large = STANDARD.encode_to_string(vec![0; VALUE_BYTES + 1]);
        for op in [
            StoreOp::Set { key: long.clone(), value: String::new() },
            StoreOp::Set { key: key("a"), value: large },
            StoreOp::Get { key: long },
        ] {
            assert_eq!(ask(op), Err(StoreError::TooLarge));
        }
        let bad = StoreOp::Set { key: key("a"), value: "?".into() };
        assert_eq!(ask(bad), Err(StoreError::Base64));
        ask(set("a", "x")).expect("fine");
        let error = ask(StoreOp::Add { key: key("a"), amount: 1 });
        assert_eq!(error, Err(StoreError::NoNumber("a".into())));
        ask(StoreOp::Get { key: key("none") }).expect("waits");
        assert_eq!(ask(StoreOp::Count), Err(StoreError::Impatient));
    }
}
