//! Numbers of a few tokens in a row.

/// Hashes consecutive tokens. Equal tokens with equal seeds have equal hashes.
pub(crate) fn hash(seed: u64, tokens: impl Iterator<Item = i32>) -> u64 {
    let mixed = tokens.fold(seed, |hash, token| {
        let mixed = hash ^ u64::from(token.cast_unsigned());
        mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    mixed.wrapping_mul(0xd6e8_feb8_6659_fd93)
}
