//! The instructions that are used.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(target_arch = "x86_64")]
use crate::x86;

/// The instructions of this processor, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Baseline,
}

/// The level that is not to be exceeded, as its place in [`Level::ALL`], or [`PREFERRED`].
static LIMIT: AtomicUsize = AtomicUsize::new(PREFERRED);
/// The fastest level, which need not be the best.
const PREFERRED: usize = usize::MAX;

impl Level {
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Amx,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Bf16,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Vnni,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::AvxVnni,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        Self::Baseline,
    ];

    /// The one to use.
    pub(crate) fn current() -> Self {
        let best = Self::detect();
        match LIMIT.load(Ordering::Relaxed) {
            #[cfg(target_arch = "x86_64")]
            PREFERRED if best == Self::Avx512Bf16 && !x86::pairs_are_fast() => Self::Avx512Vnni,
            PREFERRED => best,
            limit => match best.max(Self::ALL[limit]) {
                // The only level that better ones need not have.
                #[cfg(target_arch = "x86_64")]
                Self::AvxVnni if !x86::has_avx_vnni() => Self::Avx2,
                level => level,
            },
        }
    }

    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq") {
                if !is_x86_feature_detected!("avx512vnni") {
                    return Self::Avx512;
                }
                // Every processor with these has the former too.
                if is_x86_feature_detected!("avx512bf16") {
                    if x86::Hardware::is_there() {
                        return Self::Amx;
                    }
                    return Self::Avx512Bf16;
                }
                return Self::Avx512Vnni;
            }
            if x86::has_avx_vnni() {
                return Self::AvxVnni;
            }
            if x86::has_avx2() {
                return Self::Avx2;
            }
        }
        Self::Baseline
    }

    pub(crate) fn name(self) -> &'static CStr {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => c"amx",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => c"avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => c"avx512vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => c"avx512",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => c"avxvnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => c"avx2",
            Self::Baseline => c"baseline",
        }
    }

    /// Uses nothing better than the level of this name from now on, or none: the fastest again.
    /// False if there is no such level.
    pub(crate) fn limit(name: Option<&CStr>) -> bool {
        let limit = match name {
            None => Some(PREFERRED),
            Some(name) => Self::ALL.iter().position(|level| level.name() == name),
        };
        if let Some(limit) = limit {
            LIMIT.store(limit, Ordering::Relaxed);
        }
        limit.is_some()
    }
}
