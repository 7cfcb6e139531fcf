//! The data type of the KV cache, as far as the device and the model support it.

use anyhow::{Result, bail};

use crate::flags::KvCacheDtype;
use crate::model::Model;

/// Returns the flag's value, if hands on this kind of device support it.
pub(crate) fn kv_cache_dtype(flag: KvCacheDtype, device: &str, ranks: u32) -> Result<KvCacheDtype> {
    match flag {
        KvCacheDtype::Int8 if device == "cuda" => bail!(
            "--kv-cache-dtype int8 is for the compiled kernels of a CPU: leave it off, or use fp8_e4m3 on a GPU"
        ),
        KvCacheDtype::Int8 if ranks > 1 => bail!(
            "--kv-cache-dtype int8 is for the compiled kernels of one rank on a CPU, and there are {ranks}: leave it off"
        ),
        KvCacheDtype::Fp8E4m3 if device == "cpu" => bail!(
            "--kv-cache-dtype fp8_e4m3 is for a GPU's kernels: leave it off, or use int8 on a CPU"
        ),
        given => Ok(given),
    }
}

/// Refuses an 8-bit float KV cache for models and kernels that do not support it.
pub(crate) fn check_floats(
    flag: KvCacheDtype,
    model: &Model,
    attention_backend: Option<&str>,
) -> Result<()> {
    const FLAG: &str = "--kv-cache-dtype fp8_e4m3";
    if flag != KvCacheDtype::Fp8E4m3 {
        return Ok(());
    }
    if let Some(other) = attention_backend.filter(|&name| name != "triton") {
        bail!("{FLAG} is for --attention-backend triton, not {other}: leave one of them off");
    }
    if model.pooling.is_some() {
        bail!("{FLAG} is for models that generate, and {} pools: leave it off", model.name);
    }
    if model.is_latent() {
        bail!("{FLAG} is for keys and values, and {} has latent rows: leave it off", model.name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use KvCacheDtype::{Auto, Fp8E4m3, Int8};

    use super::*;

    #[test]
    fn a_device_has_its_own_numbers_of_8_bits() {
        for (flag, device, ranks) in [
            (Auto, "cpu", 2),
            (Auto, "cuda", 1),
            (Int8, "cpu", 1),
            (Fp8E4m3, "cuda", 1),
            (Fp8E4m3, "cuda", 2),
            (Fp8E4m3, "deferred", 1),
        ] {
            assert_eq!(kv_cache_dtype(flag, device, ranks).ok(), Some(flag));
        }
        for (flag, device, ranks, other) in [
            (Int8, "cuda", 1, "fp8_e4m3 on a GPU"),
            (Int8, "cpu", 2, "there are 2"),
            (Fp8E4m3, "cpu", 1, "int8 on a CPU"),
        ] {
            let refused = kv_cache_dtype(flag, device, ranks).expect_err("refused").to_string();
            assert!(refused.contains(other) && !refused.contains('\n'), "{refused}");
        }
    }
}
