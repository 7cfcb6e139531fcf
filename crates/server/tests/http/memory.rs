//! An arena for payloads in the memory of the test.

use std::io;
use std::sync::Arc;

use forebay_engine::{Payload, Payloads, TierMemory};
use parking_lot::Mutex;

/// The arena's bytes, and the ranges in use. A clone shares the same memory.
#[derive(Clone, Default)]
pub(crate) struct Memory(Arc<Inner>);

#[derive(Default)]
struct Inner {
    bytes: Mutex<Vec<u8>>,
    /// Offset and length of each range in use, in order.
    taken: Mutex<Vec<(usize, usize)>>,
    freed: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

impl Memory {
    pub(crate) fn new(capacity: usize) -> Self {
        let memory = Self::default();
        memory.0.bytes.lock().resize(capacity, 0xff);
        memory
    }

    pub(crate) fn read(&self, offset: u32, bytes: usize) -> Vec<u8> {
        self.0.bytes.lock()[offset as usize..offset as usize + bytes].to_vec()
    }
}

impl Payloads for Memory {
    fn capacity(&self) -> usize {
        self.0.bytes.lock().len()
    }

    fn used(&self) -> usize {
        self.0.taken.lock().iter().map(|(_, bytes)| bytes).sum()
    }

    fn reserve(&self, bytes: usize) -> Option<Box<dyn Payload>> {
        let capacity = self.capacity();
        let mut taken = self.0.taken.lock();
        let ends = taken.iter().map(|(offset, bytes)| offset + bytes);
        let starts: Vec<usize> = [0].into_iter().chain(ends).collect();
        let gap = (0..starts.len()).find(|&at| {
            let end = taken.get(at).map_or(capacity, |(offset, _)| *offset);
            end - starts[at] >= bytes
        })?;
        let offset = starts[gap];
        taken.insert(gap, (offset, bytes));
        Some(Box::new(Part { offset, bytes, memory: self.clone() }))
    }

    fn on_freed(&self, notify: Box<dyn Fn() + Send + Sync>) {
        *self.0.freed.lock() = Some(notify);
    }
}

struct Part {
    offset: usize,
    bytes: usize,
    memory: Memory,
}

impl Payload for Part {
    fn offset(&self) -> u32 {
        self.offset as u32
    }

    fn write(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        assert!(at + bytes.len() <= self.bytes);
        let first = self.offset + at;
        self.memory.0.bytes.lock()[first..first + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, at: usize, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(self.bytes.saturating_sub(at));
        let first = self.offset + at;
        into[..count].copy_from_slice(&self.memory.0.bytes.lock()[first..first + count]);
        Ok(count)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.memory.0.taken.lock().retain(|&(offset, _)| offset != self.offset);
        if let Some(notify) = &*self.memory.0.freed.lock() {
            notify();
        }
    }
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {}", self.bytes, self.offset)
    }
}

/// A fake host tier in the memory of the test.
#[derive(Debug, Default)]
pub(crate) struct Tier(Mutex<Vec<u8>>);

impl TierMemory for Tier {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().len() as u64)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        let mut memory = self.0.lock();
        let bytes = memory.len().max(bytes as usize);
        memory.resize(bytes, 0);
        Ok(())
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.0.lock()[at as usize..][..into.len()]);
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.lock()[at as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}
