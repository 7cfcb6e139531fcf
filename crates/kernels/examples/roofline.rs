//! Measures the machine's peak rates: bfloat16 dot products, `f32` multiply-adds and memory reads,
//! on one thread and on all.
//!
//! `cargo run --profile fast -p forebay-kernels --example roofline`
#![expect(unsafe_code, reason = "instructions that no portable code names")]

use std::hint::black_box;
use std::time::Instant;

const READ_BYTES: usize = 256 << 20;
const ROUNDS: usize = 7;
/// Distance in bytes from the address being read to the address being prefetched.
const AHEAD: usize = 4096;

fn main() {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let small = vec![1u64; READ_BYTES / 8];
    let large = in_large_pages(READ_BYTES / 8);
    for threads in [1, all] {
        let dots = median(|| run(threads, |_| dots()));
        let multiply_adds = median(|| run(threads, |_| multiply_adds()));
        let reads = |data: &[u64], ahead: usize| {
            let part = data.len() / threads;
            median(|| run(threads, |thread| read(&data[thread * part..][..part], ahead))) / 1e9
        };
        println!(
            "{threads} threads: bfloat16 dot products {:.0} GFLOP/s, f32 multiply-adds {:.0} GFLOP/s, reads {:.1} GB/s, in large pages {:.1}, \
             asked for ahead {:.1}",
            dots / 1e9,
            multiply_adds / 1e9,
            reads(&small, 0),
            reads(&large, 0),
            reads(&large, AHEAD),
        );
    }
}

/// A vector of ones, in huge pages if the system has them.
fn in_large_pages(count: usize) -> Vec<u64> {
    let mut data: Vec<u64> = Vec::with_capacity(count);
    #[cfg(target_os = "linux")]
    // SAFETY: the range consists of whole pages within the vector's capacity. Only the size of
    // their physical pages changes, not their content.
    let _ = unsafe {
        let start = data.as_mut_ptr().cast::<u8>().map_addr(|at| at.next_multiple_of(1 << 21));
        let room = count * size_of::<u64>() - (1 << 21);
        rustix::mm::madvise(start.cast(), room, rustix::mm::Advice::LinuxHugepage)
    };
    data.resize(count, 1);
    data
}

/// The median of several rounds, to suppress outliers.
fn median(mut measure: impl FnMut() -> f64) -> f64 {
    let mut found: Vec<f64> = (0..ROUNDS).map(|_| measure()).collect();
    found.sort_by(f64::total_cmp);
    found[ROUNDS / 2]
}

/// Units of work per second, summed over all threads.
fn run(threads: usize, work: impl Fn(usize) -> f64 + Sync) -> f64 {
    let started = Instant::now();
    let units: f64 = std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).sum()
    });
    units / started.elapsed().as_secs_f64()
}

/// Reads all data. Returns the number of bytes.
fn read(data: &[u64], ahead: usize) -> f64 {
    let mut sums = [0u64; 32];
    for chunk in data.chunks_exact(32) {
        #[cfg(target_arch = "x86_64")]
        if ahead > 0 {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            for line in chunk.chunks_exact(8) {
                // SAFETY: prefetching an invalid address has no effect.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast::<i8>().wrapping_add(ahead));
                }
            }
        }
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*value);
        }
    }
    black_box(sums);
    size_of_val(data) as f64
}

/// Returns the number of floating-point operations; 0 if the processor lacks the instruction.
fn dots() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the features were detected.
        return unsafe { x86::dots() };
    }
    0.0
}

/// Returns the number of floating-point operations; 0 if the processor lacks the instruction.
fn multiply_adds() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the features were detected.
        return unsafe { x86::multiply_adds() };
    }
    0.0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// The number of independent sums: enough to hide the instruction's latency, but few enough for
    /// the registers.
    const SUMS: usize = 24;
    const TIMES: usize = 2_000_000;

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn dots() -> f64 {
        // SAFETY: both types have the same size, and all bit patterns are valid.
        let x: __m512bh = unsafe { std::mem::transmute(black_box(_mm512_setzero_si512())) };
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..TIMES {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, x, x);
            }
        }
        black_box(sums);
        (TIMES * SUMS * 64) as f64
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn multiply_adds() -> f64 {
        let x = black_box(_mm512_setzero_ps());
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..TIMES {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(x, x, *sum);
            }
        }
        black_box(sums);
        (TIMES * SUMS * 32) as f64
    }
}
