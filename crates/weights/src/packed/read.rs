//! Reads tensors from a file of packed weights on several threads, and verifies their checksums.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::header::{Fault, Header};

struct Piece<'a> {
    name: &'a str,
    memory: &'a mut [u8],
    offset: u64,
    sum: u32,
}

/// Reads tensors into buffers, and verifies the checksum of each chunk. `each` runs a task for
/// every index, on several threads.
pub(super) fn read_all(
    path: &Path,
    header: &Header,
    into: Vec<(&str, &mut [u8])>,
    each: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
    report: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), Fault> {
    let file = File::open(path)?;
    let mut pieces = Vec::new();
    for (name, memory) in into {
        let place = header.places.get(name).filter(|place| place.bytes == memory.len());
        let Some(place) = place else {
            return Err(Fault::Header(format!("it lacks {name} of {} bytes", memory.len())));
        };
        let chunks = memory.chunks_mut(header.chunk).zip(&place.sums).enumerate();
        pieces.extend(chunks.map(|(number, (memory, &sum))| {
            let offset = place.offset + (number * header.chunk) as u64;
            Mutex::new(Piece { name, memory, offset, sum })
        }));
    }
    let total = header.places.values().map(|place| place.bytes as u64).sum();
    let done = AtomicU64::new(0);
    let fault: Mutex<Option<Fault>> = Mutex::new(None);
    each(pieces.len(), &|index| {
        // Only this thread uses the chunk of this index, and nothing panics while the lock is held.
        let (Ok(mut piece), Some(open)) =
            (pieces[index].lock(), fault.lock().ok().map(|fault| fault.is_none()))
        else {
            return;
        };
        if !open {
            return;
        }
        let (offset, sum) = (piece.offset, piece.sum);
        let read = file.read_exact_at(piece.memory, offset);
        let failed = match read {
            // Hash the chunk now, while it is still in the CPU's cache.
            Ok(()) if crc32fast::hash(piece.memory) == sum => None,
            Ok(()) => Some(Fault::Data(format!("{} is not what was written", piece.name))),
            Err(error) => Some(error.into()),
        };
        match failed {
            None => {
                let length = piece.memory.len() as u64;
                report(done.fetch_add(length, Ordering::Relaxed) + length, total);
            }
            failed => {
                if let Ok(mut fault) = fault.lock() {
                    *fault = failed;
                }
            }
        }
    });
    match fault.into_inner() {
        Ok(None) => Ok(()),
        Ok(Some(fault)) => Err(fault),
        Err(_) => Err(Fault::Header("a thread has panicked".into())),
    }
}
