//! The innermost loops, with a file or a folder per instruction set. The table in
//! [`crate::dispatch`] states which of them each instruction level uses.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avxvnni;
#[cfg(target_arch = "x86_64")]
mod operands;
pub(crate) mod plain;

#[cfg(test)]
pub(crate) mod tests;
