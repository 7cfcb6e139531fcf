//! Names the order of packed weights by the sources that decide it: a program of other sources
//! reads nothing that this one keeps on disk.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// FNV-1a (Fowler, Noll, Vo) over 128 bits: no library is asked for a name.
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

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    let mut found = Vec::new();
    sources(Path::new("src"), &mut found)?;
    found.sort();
    let mut name = Name(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
    for path in found {
        name.add(path.as_os_str().as_encoded_bytes());
        name.add(&fs::read(&path)?);
    }
    // Of one kind of processor.
    name.add(env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default().as_bytes());
    println!("cargo::rustc-env=FOREBAY_KERNELS_BUILD={:032x}", name.0);
    Ok(())
}
