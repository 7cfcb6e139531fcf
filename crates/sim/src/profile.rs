//! The times of a device, as measured or calculated.

use std::path::Path;

use forebay_protocol::Direction;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::copies::PageBytes;
use crate::load::StepLoad;
use crate::states::StateModel;
use crate::timeline::SparseModel;

/// The model of a step's time, in microseconds: `step_us + max(weights_us, token_us * tokens) +
/// row_us * rows + context_us * context + attention_us * attention`.
///
/// The maximum is the roofline (Williams, Waterman, Patterson 2009) of the matrix multiplications.
/// A step reads all weights, however few tokens it computes. This hides the arithmetic of the
/// tokens until there are many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceModel {
    /// The time of every step: launches, sampling, and all other work that does not depend on its
    /// content.
    pub step_us: f64,
    /// The time to read the weights.
    pub weights_us: f64,
    /// The time per computed token.
    pub token_us: f64,
    /// The time per row.
    pub row_us: f64,
    /// The time per position whose keys and values are read.
    pub context_us: f64,
    /// The time per pair of a computed position and a position that it attends to.
    pub attention_us: f64,
    /// The time that the host works on a plan before its rows can start. It is hidden while the
    /// device computes, unless the host has to wait for something.
    pub host_us: f64,
    /// The time per position of an image and layer of the vision tower.
    pub tower_us: f64,
    /// The standard deviation of the logarithm of a step's time: 0.1 is about 10 % jitter.
    pub jitter_sigma: f64,
}

impl DeviceModel {
    /// A device whose steps take no time.
    pub const INSTANT: Self = Self {
        step_us: 0.0,
        weights_us: 0.0,
        token_us: 0.0,
        row_us: 0.0,
        context_us: 0.0,
        attention_us: 0.0,
        host_us: 0.0,
        tower_us: 0.0,
        jitter_sigma: 0.0,
    };

    /// Returns the time of a step without jitter in microseconds. With jitter it is the median.
    #[must_use]
    pub fn median_us(&self, load: &StepLoad) -> f64 {
        self.step_us
            + self.weights_us.max(self.token_us * f64::from(load.tokens()))
            + self.row_us * f64::from(load.rows)
            + self.context_us * load.context as f64
            + self.attention_us * load.attention as f64
    }

    fn check(&self) -> Result<(), String> {
        let fields = [
            ("step_us", self.step_us),
            ("weights_us", self.weights_us),
            ("token_us", self.token_us),
            ("row_us", self.row_us),
            ("context_us", self.context_us),
            ("attention_us", self.attention_us),
            ("host_us", self.host_us),
            ("tower_us", self.tower_us),
            ("jitter_sigma", self.jitter_sigma),
        ];
        match fields.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some((name, value)) => Err(format!("{name} = {value}: expected a number from 0 on")),
            None if self.jitter_sigma > 1.0 => Err("jitter_sigma is above 1".to_owned()),
            None => Ok(()),
        }
    }
}

/// Log-normal noise with median 1, as a function of the seed and the step's number.
#[derive(Debug, Clone, Copy)]
pub struct Jitter {
    sigma: f64,
    seed: u64,
    /// The number of ranks that compute a step together. Each has separate noise.
    ranks: u32,
}

impl Jitter {
    /// Creates noise whose logarithm has the standard deviation `sigma`.
    #[must_use]
    pub fn new(sigma: f64, seed: u64) -> Self {
        Self { sigma, seed, ranks: 1 }
    }

    /// Sets the number of ranks. A step takes as long as its slowest rank.
    #[must_use]
    pub fn of_ranks(self, ranks: u32) -> Self {
        Self { ranks: ranks.max(1), ..self }
    }

    /// Returns the factor for the time of step `step`.
    #[must_use]
    pub fn factor(&self, step: u64) -> f64 {
        if self.sigma == 0.0 {
            return 1.0;
        }
        (0..self.ranks.into()).map(|rank| self.factor_of(rank, step)).fold(0.0, f64::max)
    }

    fn factor_of(&self, rank: u64, step: u64) -> f64 {
        // Two uniform 32-bit numbers, converted to a normal one (Box and Muller 1958).
        let seed = if rank == 0 { self.seed } else { splitmix(self.seed ^ rank) };
        let bits = splitmix(splitmix(seed) ^ step);
        let unit = |bits: u64| ((bits & 0xffff_ffff) as f64 + 0.5) / 4_294_967_296.0;
        let radius = (-2.0 * unit(bits).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * unit(bits >> 32)).cos();
        (self.sigma * normal).exp()
    }
}

/// Returns the next output of SplitMix64 (Steele, Lea, Flood 2014).
fn splitmix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A device that runs a model, with the times and sizes that a simulation needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The built-in name, or the name of the file without its extension.
    #[serde(skip)]
    pub name: String,
    /// The source of the values: a measurement or a calculation.
    pub origin: String,
    /// The name of the device.
    pub device: String,
    /// The name of the model, and its data type.
    pub model: String,
    /// The size of the KV pool in positions.
    pub kv_tokens: u64,
    /// Seconds from the start of the process until it is ready for plans.
    #[serde(default)]
    pub load_s: f64,
    /// The times of steps.
    pub time: DeviceModel,
    /// The sizes of keys and values.
    #[serde(default)]
    pub kv: KvModel,
    /// The speed of page copies between the device's memory and the host's.
    #[serde(default)]
    pub copy: CopyModel,
    /// The cost of rows of sparse slots, if the model has sparse attention.
    #[serde(default, skip_serializing_if = "is_dense")]
    pub sparse: SparseModel,
    /// The recurrent states, if the model has recurrent layers.
    #[serde(default, skip_serializing_if = "is_stateless")]
    pub states: StateModel,
}

fn is_stateless(states: &StateModel) -> bool {
    *states == StateModel::default()
}

fn is_dense(sparse: &SparseModel) -> bool {
    *sparse == SparseModel::default()
}

/// The sizes of keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvModel {
    /// The size of one position over all layers in bytes, without index keys; 0 if it is not known.
    pub main_bytes_token: u64,
    /// The size of one position's index keys in bytes, over all layers that have index keys.
    pub index_bytes_token: u64,
}

/// The speed of page copies: one copy engine per direction, independent of the steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CopyModel {
    /// The speed from the device to the host in GB (10^9 bytes) per second; absent if copies take
    /// no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_gbps: Option<f64>,
    /// The speed from the host to the device in GB per second; absent if copies take no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_gbps: Option<f64>,
    /// The time in microseconds that each copy takes in addition.
    pub latency_us: f64,
    /// The speed of all copies of a machine together in GB per second; absent if it is not limited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus_gbps: Option<f64>,
    /// The number of devices per machine; absent if all devices are in one machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus_devices: Option<u32>,
}

impl CopyModel {
    /// Returns the time to copy `bytes` bytes in microseconds.
    #[must_use]
    pub fn copy_us(&self, direction: Direction, bytes: u64) -> u64 {
        let gbps = match direction {
            Direction::Save | Direction::SaveState => self.save_gbps,
            Direction::Restore | Direction::RestoreIndex | Direction::RestoreState => {
                self.restore_gbps
            }
        };
        // One GB per second is a thousand bytes per microsecond.
        let moving = gbps.map_or(0.0, |gbps| bytes as f64 / (1000.0 * gbps));
        (self.latency_us + moving).round() as u64
    }

    /// Returns how long `bytes` bytes occupy the machine's bus in microseconds; `None` if the bus
    /// is not limited.
    #[must_use]
    pub fn bus_us(&self, bytes: u64) -> Option<f64> {
        self.bus_gbps.map(|gbps| bytes as f64 / (1000.0 * gbps))
    }

    fn check(&self) -> Result<(), String> {
        let speeds = [
            ("save_gbps", self.save_gbps),
            ("restore_gbps", self.restore_gbps),
            ("bus_gbps", self.bus_gbps),
        ];
        if self.bus_devices == Some(0) {
            return Err("copy.bus_devices: expected a number above 0".to_owned());
        }
        for (name, speed) in speeds {
            if speed.is_some_and(|speed| !(speed.is_finite() && speed > 0.0)) {
                return Err(format!("copy.{name}: expected a number above 0"));
            }
        }
        match self.latency_us.is_finite() && self.latency_us >= 0.0 {
            true => Ok(()),
            false => Err("copy.latency_us: expected a number from 0 on".to_owned()),
        }
    }
}

/// Why a profile could not be read.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// The name is neither built in nor a file.
    #[error("{name} is neither a profile that is built in ({built_in}) nor a file")]
    Unknown {
        /// The requested name.
        name: String,
        /// The names of all built-in profiles.
        built_in: String,
    },
    /// The file could not be read.
    #[error("{path}: {source}")]
    Read {
        /// The path of the file.
        path: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The file is not a valid profile.
    #[error("profile {name}: {reason}")]
    Malformed {
        /// The name of the profile.
        name: String,
        /// The fault and its location.
        reason: String,
    },
}

const BUILT_IN: [(&str, &str); 7] = [
    ("instant", include_str!("../profiles/instant.toml")),
    ("cpu1-smollm2-135m", include_str!("../profiles/cpu1-smollm2-135m.toml")),
    ("h100-llama-3.1-8b", include_str!("../profiles/h100-llama-3.1-8b.toml")),
    ("h100-qwen3.6-35b-a3b", include_str!("../profiles/h100-qwen3.6-35b-a3b.toml")),
    ("h20x8-v3.2-bf16", include_str!("../profiles/h20x8-v3.2-bf16.toml")),
    ("h200-qwen3-0.6b", include_str!("../profiles/h200-qwen3-0.6b.toml")),
    ("h200x8-v3.2-fp8", include_str!("../profiles/h200x8-v3.2-fp8.toml")),
];

impl Profile {
    /// Returns the built-in profiles.
    ///
    /// # Errors
    /// Never fails: the tests read every built-in profile.
    pub fn built_in() -> Result<Vec<Self>, ProfileError> {
        BUILT_IN.iter().map(|(name, text)| Self::from_toml(name, text)).collect()
    }

    /// Returns the built-in profile with this name, or reads the profile from a file.
    ///
    /// # Errors
    /// There is no such profile, or it is malformed.
    pub fn find(name: &str) -> Result<Self, ProfileError> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return Self::from_toml(name, text);
        }
        let path = Path::new(name);
        if path.extension().is_none_or(|ending| ending != "toml") && !path.is_file() {
            let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
            let built_in = names.join(", ");
            return Err(ProfileError::Unknown { name: name.to_owned(), built_in });
        }
        let text = std::fs::read_to_string(path)
            .map_err(|source| ProfileError::Read { path: name.to_owned(), source })?;
        let stem = path.file_stem().map_or(name.into(), |stem| stem.to_string_lossy());
        Self::from_toml(&stem, &text)
    }

    /// Parses a profile from the content of its file.
    ///
    /// # Errors
    /// The text is not TOML, has unknown keys or lacks some, or a value is out of range.
    pub fn from_toml(name: &str, text: &str) -> Result<Self, ProfileError> {
        let malformed = |reason| ProfileError::Malformed { name: name.to_owned(), reason };
        let mut profile: Self =
            toml::from_str(text).map_err(|error| malformed(error.to_string()))?;
        profile.name = name.to_owned();
        profile.time.check().map_err(malformed)?;
        profile.copy.check().map_err(malformed)?;
        profile.sparse.check().map_err(malformed)?;
        profile.states.check().map_err(malformed)?;
        if !(profile.load_s.is_finite() && (0.0..=3600.0).contains(&profile.load_s)) {
            return Err(malformed("load_s: expected seconds, at most an hour".to_owned()));
        }
        if profile.kv_tokens == 0 {
            return Err(malformed("kv_tokens: nothing can run without a KV pool".to_owned()));
        }
        Ok(profile)
    }

    /// Returns the content of the profile's file.
    ///
    /// # Errors
    /// A number cannot be represented in TOML. This does not occur in a profile that was read or
    /// fitted.
    pub fn to_toml(&self) -> Result<String, ProfileError> {
        toml::to_string(self).map_err(|error| ProfileError::Malformed {
            name: self.name.clone(),
            reason: error.to_string(),
        })
    }

    /// Returns the size of a page. `apart` is true if index keys are in separate pages.
    #[must_use]
    pub fn page_bytes(&self, page_size: u32, apart: bool) -> PageBytes {
        let bytes = |token: u64| token * u64::from(page_size);
        let KvModel { main_bytes_token, index_bytes_token } = self.kv;
        PageBytes {
            main: bytes(main_bytes_token),
            index: bytes(index_bytes_token),
            page_size,
            apart,
            state: self.states.bytes,
        }
    }

    /// Returns the size of a host tier of `bytes` bytes, relative to the device's pages and state
    /// pages. The tier has pages and state pages in the same proportion as the device.
    #[must_use]
    pub fn host_ratio(&self, bytes: u64, [pages, state_pages]: [u32; 2], page_size: u32) -> f64 {
        let each = self.page_bytes(page_size, false);
        let device = u64::from(pages) * each.all() + u64::from(state_pages) * each.state;
        bytes as f64 / device as f64
    }

    /// Returns the number of pages in the KV pool if requests may be sparse. The device then also
    /// holds the index keys of `ratio` times as many pages. Both share the memory of
    /// [`Self::page_count`].
    #[must_use]
    pub fn sparse_page_count(&self, page_size: u32, ratio: f64) -> u32 {
        let KvModel { main_bytes_token, index_bytes_token } = self.kv;
        let (main, index) = (main_bytes_token as f64, index_bytes_token as f64);
        let tokens = self.kv_tokens as f64 * (main + index) / (main + ratio * index).max(1.0);
        ((tokens / f64::from(page_size)) as u32).max(1)
    }

    /// Returns the number of pages in the KV pool.
    #[must_use]
    pub fn page_count(&self, page_size: u32, max_total_tokens: Option<u64>) -> u32 {
        let tokens = max_total_tokens.unwrap_or(self.kv_tokens);
        u32::try_from(tokens / u64::from(page_size)).unwrap_or(u32::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profiles_can_be_read_and_tell_their_origin() {
        let profiles = Profile::built_in().expect("profiles");
        assert!(profiles.iter().all(|profile| profile.origin.len() > 20));
        assert!(profiles.iter().any(|profile| profile.time == DeviceModel::INSTANT));
        for profile in profiles {
            assert_eq!(Profile::find(&profile.name).expect("found"), profile);
        }
    }

    #[test]
    fn a_profile_survives_its_file() {
        for profile in Profile::built_in().expect("profiles") {
            let text = profile.to_toml().expect("TOML");
            assert_eq!(Profile::from_toml(&profile.name, &text).expect("read"), profile);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let (_, good) = BUILT_IN[0];
        let cases = [
            (good.replace("kv_tokens", "kv_token"), "kv_token"),
            (format!("{good}\nstep_ms = 1\n"), "step_ms"),
            (good.replace("step_us = 0.0", "step_us = -1.0"), "step_us"),
            (good.replace("step_us = 0.0", "step_us = nan"), "step_us"),
            (good.replace("step_us = 0.0", "jitter_sigma = 3"), "jitter_sigma"),
            (good.replace("load_s = 0.0", "load_s = -2.0"), "load_s"),
            (format!("{good}\n[copy]\nsave_gbps = 0.0\n"), "save_gbps"),
            (format!("{good}\n[states]\npages = 3\n"), "states.pages"),
            (format!("{good}\n[copy]\nlatency_us = -1.0\n"), "latency_us"),
        ];
        for (text, word) in cases {
            assert_ne!(text, good, "the case changes something");
            let error = Profile::from_toml("bad", &text).expect_err(word);
            assert!(error.to_string().contains(word), "{error}");
        }
        let error = Profile::find("h300").expect_err("no such profile");
        assert!(error.to_string().contains("h200-qwen3-0.6b"), "{error}");
        assert!(matches!(Profile::find("missing.toml"), Err(ProfileError::Read { .. })));
    }

    #[test]
    fn weights_hide_the_arithmetic_of_few_tokens() {
        let model = DeviceModel {
            tower_us: 0.0,
            step_us: 100.0,
            weights_us: 400.0,
            token_us: 2.0,
            row_us: 1.0,
            context_us: 0.01,
            attention_us: 0.001,
            host_us: 0.0,
            jitter_sigma: 0.0,
        };
        let load = |decode_rows: u32, prefill_tokens| StepLoad {
            rows: decode_rows,
            decode_rows,
            prefill_tokens,
            context: 1000,
            attention: 2000,
        };
        assert_eq!(model.median_us(&load(10, 0)), 100.0 + 400.0 + 10.0 + 10.0 + 2.0);
        assert_eq!(model.median_us(&load(10, 390)), 100.0 + 800.0 + 10.0 + 10.0 + 2.0);
    }

    #[test]
    fn jitter_is_log_normal_with_median_1_and_a_function_of_the_step() {
        let jitter = Jitter::new(0.2, 5);
        let logs: Vec<f64> = (0..20_000).map(|step| jitter.factor(step).ln()).collect();
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        let variance = logs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / logs.len() as f64;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance.sqrt() - 0.2).abs() < 0.01, "{variance}");
        assert_eq!(jitter.factor(3), Jitter::new(0.2, 5).factor(3));
        assert_ne!(jitter.factor(3), Jitter::new(0.2, 6).factor(3));
        assert_eq!(Jitter::new(0.0, 5).factor(3), 1.0);
    }

    #[test]
    fn a_group_s_step_is_as_long_as_its_longest_rank() {
        let one = Jitter::new(0.2, 5);
        let mean = |jitter: Jitter| (0..4000).map(|step| jitter.factor(step)).sum::<f64>() / 4000.0;
        for step in 0..100 {
            assert!(one.of_ranks(4).factor(step) >= one.factor(step));
            assert_eq!(one.of_ranks(1).factor(step), one.factor(step));
        }
        // The expected maximum of 4 and of 8 normal numbers is 1.03 and 1.42 standard deviations.
        assert!((mean(one.of_ranks(4)).ln() - 0.2 * 1.03).abs() < 0.03);
        assert!((mean(one.of_ranks(8)).ln() - 0.2 * 1.42).abs() < 0.03);
    }
}
