//! Computes a name for the order of packed weights: a hash of all sources that decide the order. So
//! a program does not read packed weights that a program built from other sources cached on disk.
//!
//! Also chooses the instruction levels to compile: `FOREBAY_LEVELS` lists their names; unset means
//! all. `native` is the fastest level of the build machine. The baseline, which every processor
//! supports, is always compiled. Compiling only `native` takes a fifth of the time of all levels.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

#[path = "src/processor.rs"]
#[allow(dead_code, unsafe_code, reason = "the crate uses all of it, and asks the kernel for tiles")]
mod processor;

use processor::Level;

/// The FNV-1a hash (Fowler, Noll, Vo) over 128 bits, written out to avoid a dependency.
struct Name(u128);

impl Name {
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
        }
    }
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            if !path.ends_with("tests") {
                sources(&path, found)?;
            }
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// The name in `FOREBAY_LEVELS` that means the build machine's fastest instruction level.
const NATIVE: &str = "native";

/// Chooses the instruction levels to compile, and sets a `cfg` flag of the crate for each.
fn choose_levels() {
    println!("cargo::rerun-if-env-changed=FOREBAY_LEVELS");
    println!("cargo::rustc-check-cfg=cfg(all_levels)");
    println!("cargo::rustc-check-cfg=cfg(level, values(any()))");
    let asked = env::var("FOREBAY_LEVELS").unwrap_or_default();
    // When cross-compiling, the build machine's instruction levels do not apply.
    let runs_here = env::var("HOST") == env::var("TARGET");
    if asked.is_empty() || (asked.split(',').any(|name| name == NATIVE) && !runs_here) {
        println!("cargo::rustc-cfg=all_levels");
        return;
    }
    for name in asked.split(',') {
        let level = match name {
            NATIVE => Some(Level::fastest()),
            _ => Level::ALL.iter().copied().find(|level| level.name() == name),
        };
        match level {
            Some(level) => println!("cargo::rustc-cfg=level=\"{}\"", level.name()),
            // An instruction level of another processor architecture is ignored.
            None if Level::NAMES.contains(&name) => {}
            None => println!("cargo::error=FOREBAY_LEVELS has no level {name:?}"),
        }
    }
}

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    choose_levels();
    let mut found = Vec::new();
    sources(Path::new("src"), &mut found)?;
    found.sort();
    let mut name = Name(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
    for path in found {
        name.add(path.as_os_str().as_encoded_bytes());
        name.add(&fs::read(&path)?);
    }
    // The order also depends on the processor architecture.
    name.add(env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default().as_bytes());
    println!("cargo::rustc-env=FOREBAY_KERNELS_BUILD={:032x}", name.0);
    Ok(())
}
