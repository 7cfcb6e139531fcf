//! Frames: a fixed header, a table of columns by id, and the columns, all in 32-bit words.

use bytemuck::cast_slice;
use thiserror::Error;

/// The version of the protocol that this crate implements.
pub const VERSION: u16 = 5;
/// The size of the fixed header in bytes.
pub const HEADER_BYTES: usize = 24;
/// The largest number of words of a frame after its header (256 MiB). Readers reject larger frames,
/// so writers must not produce them.
pub const MAX_WORDS: u32 = 1 << 26;
/// The capacity in bytes that the buffer of an encoded frame keeps for the next frame, even after a
/// larger one.
const KEPT_BYTES: usize = 1 << 20;

/// The number of words of an entry in the table of columns: id and length.
pub const ENTRY_WORDS: usize = 2;

const MAGIC: [u8; 4] = *b"FBAY";

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// Hand to brain: the process id.
    Hello = 1,
    /// Brain to hand: the resolved configuration.
    Config = 2,
    /// Hand to brain: the progress of loading.
    Progress = 3,
    /// Hand to brain: facts about the device.
    Ready = 4,
    /// Brain to hand: one step to execute.
    Plan = 5,
    /// Hand to brain: the result of a step.
    Result = 6,
    /// Hand to brain: the error of a hand that fails.
    Fatal = 7,
    /// Brain to hand: exit.
    Shutdown = 8,
    /// Brain to hand: the tokens that the masked rows of a step may sample.
    Masks = 9,
    /// Hand to brain: a request to the store through which the ranks find each other.
    Store = 10,
    /// Brain to hand: the response of the store.
    StoreReply = 11,
    /// Brain to hand: where a step's frame is in the arena.
    PlanAt = 12,
    /// Brain to hand: announces or removes an adapter.
    Adapter = 13,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 13] = [
        Self::Hello,
        Self::Config,
        Self::Progress,
        Self::Ready,
        Self::Plan,
        Self::Result,
        Self::Fatal,
        Self::Shutdown,
        Self::Masks,
        Self::Store,
        Self::StoreReply,
        Self::PlanAt,
        Self::Adapter,
    ];
}

impl TryFrom<u16> for Kind {
    type Error = FrameError;

    fn try_from(value: u16) -> Result<Self, FrameError> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == value).ok_or(FrameError::Kind(value))
    }
}

/// Why bytes are not a frame of this protocol.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// The stream does not start with the magic bytes.
    #[error("not a Forebay frame (magic {0:02x?})")]
    Magic([u8; 4]),
    /// The peer uses another version of the protocol.
    #[error(
        "protocol version {theirs}, but this brain speaks {VERSION}: brain and hand are from different releases"
    )]
    Version {
        /// The version in the peer's header.
        theirs: u16,
    },
    /// The kind is not part of this version.
    #[error("unknown frame kind {0}")]
    Kind(u16),
    /// The frame has more words than allowed.
    #[error("frame of {0} words is over the limit")]
    TooLarge(u64),
    /// The lengths do not add up, or a column has a length that its type does not allow.
    #[error("malformed frame: {0}")]
    Malformed(&'static str),
    /// The frame has a column that its kind does not have.
    #[error("malformed frame: unknown column {0}")]
    Column(u32),
    /// The text of a JSON frame is not a valid message.
    #[error("{kind:?} frame: {reason}")]
    Message {
        /// The kind of the frame.
        kind: Kind,
        /// Why the message is invalid, with the name of the field.
        reason: String,
    },
}

/// A decoded frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind of the frame.
    pub kind: Kind,
    /// The step of the frame, or 0.
    pub step: u64,
    /// The number of columns.
    pub columns: u32,
    /// The number of words after the header.
    pub words: u32,
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// The header is malformed, or has another version.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
        let u32_at =
            |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let theirs = u16_at(4);
        if theirs != VERSION {
            return Err(FrameError::Version { theirs });
        }
        let kind = Kind::try_from(u16_at(6))?;
        let step = u64::from(u32_at(8)) | u64::from(u32_at(12)) << 32;
        let (columns, words) = (u32_at(16), u32_at(20));
        if words > MAX_WORDS {
            return Err(FrameError::TooLarge(words.into()));
        }
        if columns > words / ENTRY_WORDS as u32 {
            return Err(FrameError::Malformed("more columns than words"));
        }
        Ok(Self { kind, step, columns, words })
    }
}

/// A received frame: the header and the words after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    header: Header,
    words: Vec<i32>,
}

impl Frame {
    /// Creates a frame from its header and the words that followed it.
    ///
    /// # Errors
    /// The lengths do not add up to the number of words, or the ids do not ascend.
    pub fn new(header: Header, words: Vec<i32>) -> Result<Self, FrameError> {
        let table = ENTRY_WORDS * header.columns as usize;
        if words.len() != header.words as usize || table > words.len() {
            return Err(FrameError::Malformed("word count"));
        }
        let (mut sum, mut last) = (table as u64, 0);
        for entry in words[..table].chunks_exact(ENTRY_WORDS) {
            let id = entry[0].cast_unsigned();
            if id <= last {
                return Err(FrameError::Malformed("order of columns"));
            }
            last = id;
            sum += u64::from(entry[1].cast_unsigned());
        }
        if sum != words.len() as u64 {
            return Err(FrameError::Malformed("column lengths"));
        }
        Ok(Self { header, words })
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Iterates over the columns with their ids, in ascending order.
    pub fn columns(&self) -> impl Iterator<Item = (u32, &[i32])> {
        let (table, mut rest) = self.words.split_at(ENTRY_WORDS * self.header.columns as usize);
        table.chunks_exact(ENTRY_WORDS).map(move |entry| {
            let (column, tail) = rest.split_at(entry[1].cast_unsigned() as usize);
            rest = tail;
            (entry[0].cast_unsigned(), column)
        })
    }

    /// Returns the columns 1 to `N`. Absent columns are empty.
    ///
    /// # Errors
    /// The frame has a column beyond `N`.
    pub fn known<const N: usize>(&self) -> Result<[&[i32]; N], FrameError> {
        let mut columns = [&[] as &[i32]; N];
        for (id, column) in self.columns() {
            *columns.get_mut(id as usize - 1).ok_or(FrameError::Column(id))? = column;
        }
        Ok(columns)
    }

    /// Returns the text of a JSON frame.
    ///
    /// # Errors
    /// The frame has a second column, or the text is not UTF-8.
    pub fn json(&self) -> Result<&str, FrameError> {
        let [column] = self.known::<1>()?;
        let bytes: &[u8] = cast_slice(column);
        std::str::from_utf8(bytes).map(str::trim_end).map_err(|_| FrameError::Malformed("UTF-8"))
    }
}

/// Writes a frame whose columns have the ids 1, 2, and so on, as [`encode_columns`] does.
///
/// # Errors
/// The frame would be too large for a reader. `out` is then empty.
pub(crate) fn encode(
    kind: Kind,
    step: u64,
    columns: &[&[i32]],
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    encode_columns(kind, step, (1..).zip(columns.iter().copied()), out)
}

/// Writes a frame of columns with their ids to `out`, replacing its content. Empty columns are
/// omitted. A buffer that has grown for one large frame shrinks again.
///
/// # Errors
/// The frame would be too large for a reader. `out` is then empty.
pub(crate) fn encode_columns<'a>(
    kind: Kind,
    step: u64,
    columns: impl Iterator<Item = (u32, &'a [i32])> + Clone,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    let there = columns.filter(|(_, column)| !column.is_empty());
    let (count, words) = there.clone().fold((0, 0), |(count, words), (_, column)| {
        (count + 1, words + ENTRY_WORDS + column.len())
    });
    out.clear();
    if words > MAX_WORDS as usize {
        return Err(FrameError::TooLarge(words as u64));
    }
    let bytes = HEADER_BYTES + 4 * words;
    if out.capacity() > KEPT_BYTES && bytes < out.capacity() / 4 {
        out.shrink_to(KEPT_BYTES);
    }
    out.reserve(bytes);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(kind as u16).to_le_bytes());
    out.extend_from_slice(&step.to_le_bytes());
    out.extend_from_slice(&u32::to_le_bytes(count));
    out.extend_from_slice(&(words as u32).to_le_bytes());
    for (id, column) in there.clone() {
        out.extend_from_slice(&id.to_le_bytes());
        out.extend_from_slice(&(column.len() as u32).to_le_bytes());
    }
    for (_, column) in there {
        out.extend_from_slice(cast_slice(column));
    }
    Ok(())
}

/// Writes a frame whose only column is JSON text. Empty text gives no column, as in `shutdown`.
///
/// # Errors
/// The text is too long for a frame.
pub fn encode_json(kind: Kind, text: &str) -> Result<Vec<u8>, FrameError> {
    let mut out = Vec::new();
    let mut words = vec![i32::from_le_bytes(*b"    "); text.len().div_ceil(4)];
    bytemuck::cast_slice_mut::<i32, u8>(&mut words)[..text.len()].copy_from_slice(text.as_bytes());
    encode(kind, 0, &[&words], &mut out)?;
    Ok(out)
}

/// Writes the frame that states where a frame of step `step` is in the arena. The written frame
/// contains the offset in bytes, a multiple of 16, and the number of words including the header.
///
/// # Errors
/// Never fails, since the frame is short. All writers have this return type.
pub fn encode_place(
    step: u64,
    offset: u32,
    words: u32,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    encode(Kind::PlanAt, step, &[&[offset.cast_signed(), words.cast_signed()]], out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header_of(bytes: &[u8]) -> Result<Header, FrameError> {
        Header::decode(bytes[..HEADER_BYTES].try_into().expect("24 bytes"))
    }

    #[test]
    fn json_survives_padding() {
        for text in ["{}", r#"{"a":1}"#, r#"{"é":"x"}"#, r#"{"abc":1234}"#] {
            let bytes = encode_json(Kind::Hello, text).expect("short");
            let header = header_of(&bytes).expect("header");
            let words = bytes[HEADER_BYTES..].chunks(4).map(bytemuck::pod_read_unaligned).collect();
            let frame = Frame::new(header, words).expect("frame");
            assert_eq!(frame.json().expect("text"), text);
        }
    }

    #[test]
    fn broken_headers_are_refused() {
        let good = encode_json(Kind::Shutdown, "").expect("short");
        assert_eq!(header_of(&good).expect("header").kind, Kind::Shutdown);
        let broken = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            header_of(&bytes)
        };
        assert!(matches!(broken(0, b'X'), Err(FrameError::Magic(_))));
        assert_eq!(broken(4, 9), Err(FrameError::Version { theirs: 9 }));
        assert_eq!(broken(6, 99), Err(FrameError::Kind(99)));
        assert!(matches!(broken(23, 255), Err(FrameError::TooLarge(_))));
        assert!(matches!(broken(16, 7), Err(FrameError::Malformed(_))));
    }

    #[test]
    fn column_lengths_must_add_up_and_ids_ascend() {
        let header = Header { kind: Kind::Plan, step: 1, columns: 2, words: 7 };
        let frame = |table: [i32; 4]| Frame::new(header, [&table[..], &[7, 8, 9]].concat());
        let good = frame([1, 1, 9, 2]).expect("a frame");
        assert_eq!(good.columns().collect::<Vec<_>>(), [(1, &[7][..]), (9, &[8, 9][..])]);
        assert_eq!(good.known::<8>(), Err(FrameError::Column(9)));
        assert_eq!(good.known::<9>().expect("nine")[8], [8, 9]);
        let lengths = Err(FrameError::Malformed("column lengths"));
        assert_eq!(frame([1, 1, 2, 1]), lengths);
        assert_eq!(frame([1, -1, 2, 2]), lengths);
        let order = Err(FrameError::Malformed("order of columns"));
        assert_eq!(frame([2, 1, 2, 2]), order);
        assert_eq!(frame([0, 1, 2, 2]), order);
        assert!(Frame::new(header, vec![1, 1, 2, 2, 0, 0]).is_err());
    }

    #[test]
    fn a_writer_makes_no_frame_that_a_reader_refuses() {
        let mut out = Vec::new();
        // One column is used eight times, so that the columns of the test take little memory.
        let column = vec![0; (MAX_WORDS / 8) as usize];
        let frame = |columns: &[&[i32]], out: &mut Vec<u8>| encode(Kind::Plan, 1, columns, out);
        let refused = frame(&[&column[..]; 8], &mut out);
        assert_eq!(refused, Err(FrameError::TooLarge(u64::from(MAX_WORDS) + 16)));
        assert_eq!((out.len(), out.capacity()), (0, 0));
        let last = column.len() - 16;
        let mut columns = [&column[..]; 8];
        columns[7] = &column[..last];
        assert_eq!(frame(&columns, &mut out), Ok(()));
        assert_eq!(header_of(&out).expect("a header that is taken").words, MAX_WORDS);
    }

    #[test]
    fn a_buffer_that_grew_for_one_frame_shrinks_with_the_next() {
        let mut out = Vec::new();
        let large = vec![0; KEPT_BYTES];
        encode(Kind::Plan, 1, &[&large], &mut out).expect("within the limit");
        assert!(out.capacity() >= 4 * KEPT_BYTES);
        encode(Kind::Plan, 2, &[&large[..100]], &mut out).expect("within the limit");
        assert!(out.capacity() <= KEPT_BYTES);
        let kept = out.as_ptr();
        encode(Kind::Plan, 3, &[&large[..1000]], &mut out).expect("within the limit");
        assert_eq!(out.as_ptr(), kept, "the kept buffer is enough for usual steps");
    }
}
