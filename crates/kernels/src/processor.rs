//! The instruction levels, and detection of the levels that the processor supports. The build
//! script includes this file, so it uses no other part of the crate.

macro_rules! levels {
    ($($(#[$target:meta])* $level:ident: $name:literal, $has:path, $fast:path;)*) => {
        /// A level of processor instructions, best first.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Level {
            $($(#[$target])* $level,)*
        }

        impl Level {
            /// The names of all levels, including those of other processor architectures.
            #[allow(dead_code, reason = "the build script compares names with it")]
            pub(crate) const NAMES: &[&str] = &[$($name,)*];
            /// All levels of this architecture, best first.
            pub(crate) const ALL: &[Self] = &[$($(#[$target])* Self::$level,)*];

            pub(crate) fn name(self) -> &'static str {
                match self {
                    $($(#[$target])* Self::$level => $name,)*
                }
            }

            /// The processor's fastest instruction level, whether or not the program has kernels
            /// for it.
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

            /// True if no lower level is faster on the processor.
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

    /// True if the processor has AVX2, and the features that are used with it. Some processors have
    /// AVX2 only.
    pub(crate) fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    /// True if the processor has AVX2 and 256-bit byte dot products.
    pub(crate) fn has_avx_vnni() -> bool {
        has_avx2() && is_x86_feature_detected!("avxvnni")
    }

    /// True if the processor has the AVX-512 extensions that are used.
    pub(crate) fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq")
    }

    /// True if the processor has the AVX-512 extensions that are used, and 512-bit byte dot
    /// products.
    pub(crate) fn has_avx512_vnni() -> bool {
        has_avx512() && is_x86_feature_detected!("avx512vnni")
    }

    /// True if the processor has the AVX-512 extensions that are used, byte dot products, and dot
    /// products of bfloat16 pairs.
    pub(crate) fn has_avx512_bf16() -> bool {
        has_avx512_vnni() && is_x86_feature_detected!("avx512bf16")
    }

    /// True if the processor's dot products of bfloat16 pairs are fast. On Intel they exist for
    /// compatibility: they take two cycles, while two `f32` multiply-adds of the same width take
    /// one. Intel's fast instructions are its matrix extensions. On AMD they are twice as fast as
    /// multiply-adds.
    pub(super) fn is_avx512_bf16_fast() -> bool {
        static FAST: OnceLock<bool> = OnceLock::new();
        // CPUID traps to the hypervisor in a virtual machine, which is slow, so it runs only once.
        *FAST.get_or_init(|| __cpuid(0).ebx.to_le_bytes() != *b"Genu")
    }

    /// True if the processor has tiles of bfloat16 and of bytes with the features that are used
    /// with them, and Linux lets this process use them. Tiles take 8 KiB per thread, which Linux
    /// reserves only for processes that request them (since 5.16).
    pub(crate) fn has_amx() -> bool {
        static THERE: OnceLock<bool> = OnceLock::new();
        *THERE.get_or_init(|| {
            // Bits of CPUID leaf 7: AMX-BF16, AMX-TILE and AMX-INT8.
            const WANTED: u32 = 1 << 22 | 1 << 24 | 1 << 25;
            has_avx512_bf16() && __cpuid_count(7, 0).edx & WANTED == WANTED && are_tiles_permitted()
        })
    }

    fn are_tiles_permitted() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
        const XFEATURE_XTILEDATA: u64 = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: the system call changes only the permissions of the process.
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
