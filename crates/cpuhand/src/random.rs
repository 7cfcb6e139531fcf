//! Random weights from a seed, for `--load-format dummy`: norms are around one, all other weights
//! are small and around zero.
//!
//! The weights differ from those of the Python hand with the same seed, as they do between any two
//! kinds of devices.

use std::f64::consts::TAU;

use forebay_weights::TorchNumber;

const DEVIATION: f64 = 0.02;

fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills a weight with random numbers that depend only on the seed and the weight's name.
pub(crate) fn randomise(seed: u64, name: &str, number: TorchNumber, to: &mut [u8]) {
    let mean = if name.to_lowercase().ends_with("norm.weight") { 1.0 } else { 0.0 };
    let mut state = name.bytes().fold(seed, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17)
    });
    let mut spare: Option<f64> = None;
    let mut next = || {
        let normal = spare.take().unwrap_or_else(|| {
            // Box & Muller 1958: two uniform numbers give two normal ones.
            let mut uniform =
                || ((splitmix64(&mut state) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
            let (radius, turn) = ((-2.0 * uniform().ln()).sqrt(), TAU * uniform());
            spare = Some(radius * turn.sin());
            radius * turn.cos()
        });
        (mean + DEVIATION * normal) as f32
    };
    match number {
        TorchNumber::Float32 => {
            to.as_chunks_mut::<4>().0.iter_mut().for_each(|to| *to = next().to_le_bytes());
        }
        TorchNumber::Bfloat16 => {
            for to in to.as_chunks_mut::<2>().0 {
                // Truncated instead of rounded: dummy weights are not compared with others.
                *to = ((next().to_bits() >> 16) as u16).to_le_bytes();
            }
        }
    }
}
