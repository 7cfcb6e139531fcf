//! The bulk connection of an outpost: the brain sends bytes of the arena, and the outpost returns
//! counts of written bytes.
//!
//! A chunk has a header of eight bytes (offset and length), followed by its data. The outpost
//! responds to each chunk with the total number of bytes that it has written so far. Chunks arrive
//! in the order in which they were sent, so an arena region may be reused as soon as the brain no
//! longer needs its bytes.

use std::io;

use forebay_engine::Payload;
use forebay_hand::Arena;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The size of a chunk's header in bytes.
pub(crate) const HEAD_BYTES: usize = 8;
/// The largest size of a chunk's data in bytes.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// The header of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// The offset in the arena.
    pub(crate) offset: u32,
    /// The size of the data in bytes, from 1 to [`PIECE_BYTES`].
    pub(crate) length: u32,
}

impl Head {
    pub(crate) fn bytes(self) -> [u8; HEAD_BYTES] {
        (u64::from(self.length) << 32 | u64::from(self.offset)).to_le_bytes()
    }

    /// Parses the header of a chunk for an arena of `arena` bytes.
    ///
    /// # Errors
    /// The chunk is empty, too long, or not within the arena.
    pub(crate) fn read(bytes: [u8; HEAD_BYTES], arena: u32) -> io::Result<Self> {
        let both = u64::from_le_bytes(bytes);
        let (offset, length) = (both as u32, (both >> 32) as u32);
        let inside = offset.checked_add(length).is_some_and(|end| end <= arena);
        if length == 0 || length as usize > PIECE_BYTES || !inside {
            return Err(io::Error::other(format!("a piece of {length} bytes at {offset}")));
        }
        Ok(Self { offset, length })
    }
}

/// Sends a payload in chunks, and returns its size in bytes. Before each chunk is sent, `written`
/// is called with the total size of the data so far, this chunk included.
///
/// # Errors
/// The connection broke, or the arena can't be read.
pub(crate) async fn send(
    payload: &dyn Payload,
    buffer: &mut Vec<u8>,
    stream: &mut (impl AsyncWrite + Unpin),
    mut written: impl FnMut(u64),
) -> io::Result<u64> {
    buffer.resize(HEAD_BYTES + PIECE_BYTES, 0);
    let mut at = 0;
    loop {
        let count = payload.read(at, &mut buffer[HEAD_BYTES..])?;
        if count == 0 {
            return Ok(at as u64);
        }
        // Arena offsets and lengths of chunks fit into 32 bits.
        let head = Head { offset: payload.offset() + at as u32, length: count as u32 };
        buffer[..HEAD_BYTES].copy_from_slice(&head.bytes());
        at += count;
        written(at as u64);
        stream.write_all(&buffer[..HEAD_BYTES + count]).await?;
        stream.flush().await?;
    }
}

/// Writes received bytes to the arena and acknowledges them, until the connection is closed.
///
/// # Errors
/// Always: the connection was closed, or the peer sent an invalid message.
pub(crate) async fn receive(
    mut reading: impl AsyncRead + Unpin,
    mut writing: impl AsyncWrite + Unpin,
    arena: &Arena,
) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    let (mut head, mut written) = ([0; HEAD_BYTES], 0_u64);
    loop {
        reading.read_exact(&mut head).await?;
        let Head { offset, length } = Head::read(head, arena.bytes())?;
        let piece = &mut piece[..length as usize];
        reading.read_exact(piece).await?;
        arena.mirror(offset, piece)?;
        written += u64::from(length);
        writing.write_u64_le(written).await?;
        writing.flush().await?;
    }
}
