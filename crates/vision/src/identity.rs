//! The identity of an image: a hash of its file and its processing.

use std::fmt;

use crate::processing::Processing;

/// The version of the hash. Change it when the same file would give other patches.
const VERSION: &[u8; 16] = b"forebay image  1";

/// A 128-bit BLAKE3 hash of a file and its processing. Images with the same identity have the same
/// patches.
///
/// The hash has no key, so that all brains behind a router compute the same identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity([u8; 16]);

impl Identity {
    /// Returns the identity of `file` under `processing`.
    pub fn of(file: &[u8], processing: &Processing) -> Self {
        let mut hasher = blake3::Hasher::new();
        // Fields of fixed length come before the only one of variable length, so different inputs
        // never give the same bytes.
        hasher.update(VERSION).update(&processing.to_bytes()).update(file);
        let mut name = [0; 16];
        hasher.finalize_xof().fill(&mut name);
        Self(name)
    }

    /// The bytes of the identity.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Identity({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_of_the_file_and_of_what_is_done() {
        let processing = |patch, least| Processing::new(patch, 2, least, 1 << 20).unwrap();
        let name = Identity::of(b"file", &processing(16, 100));
        assert_eq!(name, Identity::of(b"file", &processing(16, 100)));
        assert_ne!(name, Identity::of(b"file ", &processing(16, 100)));
        assert_ne!(name, Identity::of(b"file", &processing(14, 100)));
        assert_ne!(name, Identity::of(b"file", &processing(16, 101)));
    }

    /// Different builds behind one router must compute the same identities.
    #[test]
    fn the_name_of_a_file_does_not_change() {
        let processing = Processing::new(16, 2, 65_536, 16_777_216).unwrap();
        let name = Identity::of(b"", &processing).to_string();
        assert_eq!(name, "b8363407f558578d5ba8ea19887b7c7f");
    }
}
