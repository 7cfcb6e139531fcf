//! The levels of instructions, and which of them the processor has. The build script includes this
//! file, so it uses no other part of the crate.

macro_rules! levels {
    ($($(#[$target:meta])* $level:ident: $name:literal, $has:path, $fast:path;)*) => {
        /// The instructions of a processor, best first.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Level {
            $($(#[$target])* $level,)*
        }

        impl Level {
            /// The names of all levels, those of other kinds of processors too.
            #[allow(dead_code, reason = "the build script compares names with it")]
            pub(crate) const NAMES: &[&str] = &[$($name,)*];
            /// Best first.
            pub(crate) const ALL: &[Self] = &[$($(#[$target])* Self::$level,)*];

            pub(crate) fn name(self) -> &'static str {
                match self {
                    $($(#[$target])* Self::$level => $name,)*
                }
            }

            /// The processor's fastest level, whether or not the program has its kernels.
            pub(crate) fn fastest() -> Self {
                let mut levels = Self::ALL.iter();
                let fastest = levels.find(|level| level.is_in_processor() && level.is_fast());
                *fastest.unwrap_or(&Self::Baseline)
            }

            /// True if the processor has the level's instructions.
            pub(crate) fn is_in_processor(self) -> bool {
                match self {
                    $($(#[$target])* Self::$level => $has(),)*
                }
            }

            /// True if no level below is faster on the processor.
            pub(crate) fn is_fast(self) -> bool {
                match self {
                    $($(#[$target])* Self::$level => $fast(),)*
                }
            }
        }
    };
}

levels! {
    #[cfg(target_arch = "x86_64")]
    Amx: "amx", has_amx, always;
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16: "avx512bf16", has_avx512_bf16, is_avx512_bf16_fast;
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni: "avx512vnni", has_avx512_vnni, always;
    #[cfg(target_arch = "x86_64")]
    Avx512: "avx512", has_avx512, always;
    #[cfg(target_arch = "x86_64")]
    AvxVnni: "avxvnni", has_avx_vnni, always;
    #[cfg(target_arch = "x86_64")]
    Avx2: "avx2", has_avx2, always;
    Baseline: "baseline", always, always;
}

/// Always true.
fn always() -> bool {
    true
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    /// True if the processor has AVX2 and the features that are used beside it; some processors
    /// have AVX2 alone.
    pub(crate) fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    /// True if the processor has dot products of bytes beside AVX2, of 256 bits.
    pub(crate) fn has_avx_vnni() -> bool {
        has_avx2() && is_x86_feature_detected!("avxvnni")
    }

    /// True if the processor has the parts of AVX-512 that are used.
    pub(crate) fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq")
    }

    /// True if the processor has dot products of bytes beside these parts.
    pub(crate) fn has_avx512_vnni() -> bool {
        has_avx512() && is_x86_feature_detected!("avx512vnni")
    }

    /// True if the processor has dot products of bfloat16 pairs, beside those of bytes.
    pub(crate) fn has_avx512_bf16() -> bool {
        has_avx512_vnni() && is_x86_feature_detected!("avx512bf16")
    }

    /// True if the processor's dot products of bfloat16 pairs are fast. Intel's exist for
    /// compatibility: they take two cycles, where two `f32` multiply-adds of the same width take
    /// one. Intel's fast instructions are its matrix extensions. AMD's are twice as fast as
    /// multiply-adds.
    pub(super) fn is_avx512_bf16_fast() -> bool {
        static FAST: OnceLock<bool> = OnceLock::new();
        // CPUID traps to the host of a virtual machine, which is slow.
        *FAST.get_or_init(|| __cpuid(0).ebx.to_le_bytes() != *b"Genu")
    }

    /// True if the processor has tiles of bfloat16 and of bytes with the features that are used
    /// beside them, and the kernel lets this process use them. They take 8 KiB a thread, which the
    /// kernel keeps only for processes that ask (Linux 5.16).
    pub(crate) fn has_amx() -> bool {
        static THERE: OnceLock<bool> = OnceLock::new();
        *THERE.get_or_init(|| {
            // Of leaf 7: AMX-BF16, AMX-TILE and AMX-INT8.
            const WANTED: u32 = 1 << 22 | 1 << 24 | 1 << 25;
            has_avx512_bf16() && __cpuid_count(7, 0).edx & WANTED == WANTED && are_tiles_permitted()
        })
    }

    fn are_tiles_permitted() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
        const XFEATURE_XTILEDATA: u64 = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: a system call that changes nothing but what the process is permitted.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack)
            );
        }
        result == 0
    }
}
