//! The kernels of each instruction level, and the processor features that they require.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::dots::Dots;
use crate::element::{Bf16, Element};
use crate::isa::plain::{Plain, Portable};
#[cfg(target_arch = "x86_64")]
use crate::isa::{amx, avx2, avx512, avx512_bf16, avxvnni};
use crate::processor::Level;
use crate::tile::Kernel;

/// Work that is compiled for each instruction [`Level`].
pub(crate) trait Work<E: Element> {
    /// Does the work. Implementations are inlined, so that plain loops are also compiled to the
    /// vector instructions of the instruction level.
    ///
    /// # Safety
    /// The processor must support `K` and `D`, and the work's own conditions must hold.
    unsafe fn compute<K: Kernel<E>, D: Dots>(self);
}

/// An element type with a kernel at every instruction level.
pub(crate) trait Number: Element {
    /// Does the work with the kernels of an instruction level.
    ///
    /// # Safety
    /// The processor must support the level, and the work's own conditions must hold.
    unsafe fn compute<W: Work<Self>>(level: Level, work: W);
}

/// Does the work in a separate function that is compiled for the given features. Everything that
/// the function calls is inlined into it.
macro_rules! compute {
    ($work:ident: $element:ty, $kernel:ty, $codes:ty, [$($features:literal)?], [$($turn:expr)?]) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn run<W: Work<$element>>(work: W) {
            // SAFETY: the caller upholds the contract, here and below.
            $(let _turn = unsafe { $turn };)?
            unsafe { work.compute::<$kernel, $codes>() }
        }
        unsafe { run($work) }
    }};
}

macro_rules! kernels {
    ($(
        $(#[$built:meta])*
        $level:ident {
            $(features: $features:literal,)?
            f32: $f32:ty,
            bf16: $bf16:ty,
            codes: $codes:ty,
            $(turn: $turn:expr,)?
        }
    )*) => {
        impl Level {
            /// True if the program was built with the kernels of this instruction level.
            #[allow(unreachable_patterns, reason = "most programs have all of them")]
            pub(crate) fn is_built(self) -> bool {
                match self {
                    $($(#[$built])* Self::$level => true,)*
                    _ => false,
                }
            }
        }

        kernels!(compute f32 [$($(#[$built])* $level: $f32, $codes, [$($features)?], [$($turn)?];)*]);
        kernels!(compute Bf16 [$($(#[$built])* $level: $bf16, $codes, [$($features)?], [$($turn)?];)*]);
    };
    (compute $element:ty [$(
        $(#[$built:meta])*
        $level:ident: $kernel:ty, $codes:ty, [$($features:literal)?], [$($turn:expr)?];
    )*]) => {
        impl Number for $element {
            #[allow(unreachable_patterns, reason = "most programs have all levels")]
            unsafe fn compute<W: Work<Self>>(level: Level, work: W) {
                match level {
                    $($(#[$built])* Level::$level => {
                        compute!(work: $element, $kernel, $codes, [$($features)?], [$($turn)?])
                    })*
                    _ => unreachable!("the program has no kernels for {level:?}"),
                }
            }
        }
    };
}

// Each instruction level includes the features of all lower levels, except those of `AvxVnni`.
kernels! {
    #[cfg(all(target_arch = "x86_64", any(all_levels, level = "amx")))]
    Amx {
        features: "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16",
        f32: avx512::Avx512,
        bf16: amx::AmxBf16,
        codes: amx::AmxDots,
        turn: amx::hardware::Turn::begin(),
    }
    #[cfg(all(target_arch = "x86_64", any(all_levels, level = "avx512bf16")))]
    Avx512Bf16 {
        features: "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16",
        f32: avx512::Avx512,
        bf16: avx512_bf16::Avx512Bf16,
        codes: avx512::vnni::Vnni,
    }
    #[cfg(all(target_arch = "x86_64", any(all_levels, level = "avx512vnni")))]
    Avx512Vnni {
        features: "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
        f32: avx512::Avx512,
        bf16: avx512::Avx512Wide,
        codes: avx512::vnni::Vnni,
    }
    #[cfg(all(target_arch = "x86_64", any(all_levels, level = "avx512")))]
    Avx512 {
        features: "avx512f,avx512bw,avx512dq,avx512vl",
        f32: avx512::Avx512,
        bf16: avx512::Avx512Wide,
        codes: avx2::codes::Avx2Dots,
    }
    #[cfg(all(target_arch = "x86_64", any(all_levels, level = "avxvnni")))]
    AvxVnni {
        features: "avx2,fma,f16c,avxvnni",
        f32: avx2::Avx2,
        bf16: avx2::Avx2,
        codes: avxvnni::AvxVnni,
    }
    #[cfg(all(target_arch = "x86_64", any(all_levels, level = "avx2")))]
    Avx2 {
        features: "avx2,fma,f16c",
        f32: avx2::Avx2,
        bf16: avx2::Avx2,
        codes: avx2::codes::Avx2Dots,
    }
    Baseline {
        f32: Plain,
        bf16: Plain,
        codes: Portable,
    }
}

/// The highest permitted instruction level, as an index into [`Level::ALL`], or [`PREFERRED`].
static LIMIT: AtomicUsize = AtomicUsize::new(PREFERRED);
/// The limit that selects the fastest instruction level, which is not necessarily the highest.
const PREFERRED: usize = usize::MAX;

impl Level {
    /// True if the processor supports this instruction level, and the program has kernels for it.
    pub(crate) fn is_there(self) -> bool {
        self.is_built() && self.is_in_processor()
    }

    /// The instruction level in use.
    pub(crate) fn current() -> Self {
        Self::within(LIMIT.load(Ordering::Relaxed))
    }

    /// Returns the highest usable instruction level that `limit` permits, an index into
    /// [`Level::ALL`]. For [`PREFERRED`], returns the fastest one.
    fn within(limit: usize) -> Self {
        let found = match Self::ALL.get(limit..) {
            Some(levels) => levels.iter().find(|level| level.is_there()),
            None => Self::ALL.iter().find(|level| level.is_there() && level.is_fast()),
        };
        found.copied().unwrap_or(Self::Baseline)
    }

    /// Permits only instruction levels up to the one of this name from now on. Returns false if the
    /// program has no kernels for a level of this name.
    pub(crate) fn limit(name: &str) -> bool {
        let limit = Self::ALL.iter().position(|level| level.name() == name && level.is_built());
        if let Some(limit) = limit {
            LIMIT.store(limit, Ordering::Relaxed);
        }
        limit.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::Format;

    #[test]
    fn a_level_that_is_there_is_used_and_nothing_better_than_asked_for() {
        for (limit, &asked) in Level::ALL.iter().enumerate() {
            let level = Level::within(limit);
            let place = Level::ALL.iter().position(|&other| other == level);
            assert!(level.is_there() && place >= Some(limit), "{asked:?} {level:?}");
            assert!(!asked.is_there() || level == asked, "{asked:?} {level:?}");
        }
        assert!(Level::within(PREFERRED).is_fast());
        assert_eq!(Level::within(Level::ALL.len() - 1), Level::Baseline);
    }

    /// Work that stores the number of rows per tile.
    struct Heights<'a>(&'a mut [usize; 2]);

    impl<E: Element> Work<E> for Heights<'_> {
        unsafe fn compute<K: Kernel<E>, D: Dots>(self) {
            *self.0 = [K::ROWS, D::rows(Format::Int8)];
        }
    }

    #[test]
    fn every_level_computes_with_its_own_kernels() {
        for &level in Level::ALL.iter().filter(|level| level.is_there()) {
            let (mut floats, mut halves) = ([0; 2], [0; 2]);
            // SAFETY: the processor supports the instruction level.
            unsafe {
                f32::compute(level, Heights(&mut floats));
                Bf16::compute(level, Heights(&mut halves));
            }
            let wanted = match level.name() {
                "amx" => ([12, 32], [32, 32]),
                "avx512bf16" | "avx512vnni" => ([12, 12], [12, 12]),
                "avx512" => ([12, 6], [12, 6]),
                "avxvnni" | "avx2" => ([6, 6], [6, 6]),
                _ => ([4, 4], [4, 4]),
            };
            assert_eq!((floats, halves), wanted, "{level:?}");
        }
    }
}
