//! The messages between a decode server and a prefill server.
//!
//! The request is JSON. The response is a sequence of frames. A frame is a kind and a length of 32
//! bits each, a name of 128 bits, and bytes, all little-endian. A block's bytes are its page and
//! then its note, as the host tier has them. The blocks come in the order of the prompt, each once.
//! The state after one of the blocks may follow. A frame [`ALIVE`] is a keep-alive, and [`END`] is
//! the last frame.

use std::io;

use forebay_engine::BlockHash;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use super::room::Reservation;
use super::tier::{PageKind, PageSizes};

/// The path of the prefill servers' route.
pub(crate) const PATH: &str = "/pd/prefill";
/// The size in bytes of a frame's header.
pub(crate) const HEADER: usize = 24;
/// The kinds of frames.
pub(crate) const ALIVE: u32 = 0;
pub(crate) const BLOCK: u32 = 1;
pub(crate) const STATE: u32 = 2;
pub(crate) const END: u32 = 3;
/// The maximum number of [`ALIVE`] frames: those of an hour, as a prefill server sends one per
/// second.
const MOST_ALIVE: usize = 3600;

/// A decode server's request for the blocks of a prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PrefillRequest {
    /// Identifies everything on which the bytes of a page depend. It must be equal on both servers.
    pub(crate) layout: String,
    /// Identifies the secret with which blocks are named; equal on servers with the same secret.
    pub(crate) names: u64,
    /// The salt of the request.
    pub(crate) salt: u64,
    /// The tokens of the blocks, and one more token.
    pub(crate) prompt: Vec<i32>,
    /// The number of leading blocks that the decode server has.
    #[serde(default)]
    pub(crate) skip: usize,
    /// The client whose share the request uses.
    #[serde(default)]
    pub(crate) client: u64,
    /// The priority; a request with a larger value is scheduled sooner.
    #[serde(default)]
    pub(crate) priority: i32,
    /// True for background work.
    #[serde(default)]
    pub(crate) background: bool,
}

/// Encodes the header of a frame.
pub(crate) fn header(kind: u32, length: u64, name: u128) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    // A page has less than 4 GiB.
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    bytes[8..].copy_from_slice(&name.to_le_bytes());
    bytes
}

/// The reason why a response is unusable.
#[derive(Debug, Error)]
pub(crate) enum WireError {
    /// The response violates the protocol of this module.
    #[error("it sends {0}")]
    Frame(&'static str),
    /// There is no memory for the bytes.
    #[error("its bytes can't be kept: {0}")]
    Memory(#[from] io::Error),
}

/// A page of which a part has arrived.
#[derive(Debug)]
struct PartialPage {
    place: (PageKind, u32),
    so_far: u64,
    all: u64,
}

/// Writes the blocks of a response to reserved pages. Checks the length of each frame before its
/// bytes arrive.
#[derive(Debug)]
pub(crate) struct BlockReceiver<'names, 'pages> {
    /// The names of the requested blocks.
    names: &'names [BlockHash],
    reserved: &'pages Reservation,
    sizes: PageSizes,
    head: [u8; HEADER],
    /// The number of bytes of the next frame's header that have arrived.
    filled: usize,
    coming: Option<PartialPage>,
    /// The number of blocks that have arrived completely.
    blocks: usize,
    /// The index of the block whose following state has arrived completely.
    state: Option<usize>,
    /// The index of the block whose following state has begun to arrive.
    state_after: Option<usize>,
    alive: usize,
    ended: bool,
}

impl<'names, 'pages> BlockReceiver<'names, 'pages> {
    pub(crate) fn new(names: &'names [BlockHash], reserved: &'pages Reservation) -> Self {
        let sizes = reserved.pages().sizes();
        Self {
            names,
            reserved,
            sizes,
            head: [0; HEADER],
            filled: 0,
            coming: None,
            blocks: 0,
            state: None,
            state_after: None,
            alive: 0,
            ended: false,
        }
    }

    /// Returns the names of the blocks that have arrived completely.
    pub(crate) fn blocks(&self) -> &'names [BlockHash] {
        &self.names[..self.blocks]
    }

    /// Returns the name of the block that the received state follows; empty until the state has
    /// arrived completely.
    pub(crate) fn states(&self) -> &'names [BlockHash] {
        self.state.map_or(&[], |at| &self.names[at..=at])
    }

    /// True after the last frame.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Processes the next bytes of the response.
    ///
    /// # Errors
    /// The response is unusable.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<(), WireError> {
        while !bytes.is_empty() {
            if self.ended {
                return Err(WireError::Frame("data after its end"));
            }
            if let Some(coming) = &mut self.coming {
                let left = usize::try_from(coming.all - coming.so_far).unwrap_or(usize::MAX);
                let (now, rest) = bytes.split_at(left.min(bytes.len()));
                self.reserved.pages().write(coming.place, coming.so_far, now)?;
                coming.so_far += now.len() as u64;
                bytes = rest;
                if coming.so_far == coming.all {
                    match coming.place.0 {
                        PageKind::Block => self.blocks += 1,
                        PageKind::State => self.state = self.state_after,
                    }
                    self.coming = None;
                }
                continue;
            }
            let (now, rest) = bytes.split_at((HEADER - self.filled).min(bytes.len()));
            self.head[self.filled..][..now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = rest;
            if self.filled == HEADER {
                self.filled = 0;
                self.begin()?;
            }
        }
        Ok(())
    }

    /// Begins the frame whose header has arrived.
    fn begin(&mut self) -> Result<(), WireError> {
        let number = |at: usize| {
            let bytes = self.head[at..at + 4].try_into().unwrap_or_default();
            u32::from_le_bytes(bytes)
        };
        let (kind, length) = (number(0), u64::from(number(4)));
        let name = u128::from_le_bytes(self.head[8..].try_into().unwrap_or_default());
        let name = BlockHash::from(name);
        match kind {
            ALIVE | END if length > 0 => Err(WireError::Frame("data in a frame without content")),
            ALIVE if self.alive == MOST_ALIVE => {
                Err(WireError::Frame("too many frames without a block"))
            }
            ALIVE => {
                self.alive += 1;
                Ok(())
            }
            END => {
                self.ended = true;
                Ok(())
            }
            BLOCK if self.names.get(self.blocks) != Some(&name) || self.state.is_some() => {
                Err(WireError::Frame("a block that is not the next one"))
            }
            BLOCK => self.expect(PageKind::Block, self.blocks, length),
            STATE => {
                let after = self.names[..self.blocks].iter().position(|&block| block == name);
                if after.is_none() || self.state.is_some() {
                    return Err(WireError::Frame("a state that was not asked for"));
                }
                self.expect(PageKind::State, 0, length)?;
                self.state_after = after;
                Ok(())
            }
            _ => Err(WireError::Frame("a frame of an unknown kind")),
        }
    }

    fn expect(&mut self, kind: PageKind, nth: usize, length: u64) -> Result<(), WireError> {
        if length != self.sizes.record(kind) {
            return Err(WireError::Frame("a page of another length"));
        }
        let none = WireError::Frame("more than was asked for");
        let place = self.reserved.page(kind, nth).ok_or(none)?;
        self.coming = Some(PartialPage { place, so_far: 0, all: length });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::room::ReceivedRoom;
    use super::super::tier::TierPages;
    use super::super::tier::tests::Heap;
    use super::*;

    const SIZES: PageSizes = PageSizes { page: 6, state: 3 };

    fn names() -> Vec<BlockHash> {
        (1..=3_u128).map(BlockHash::from).collect()
    }

    fn reserved() -> Reservation {
        let pages = TierPages::create(Arc::new(Heap::default()), SIZES, [4, 1]).expect("memory");
        ReceivedRoom::new(pages, [4, 1], 1).reserve([3, 1]).expect("room")
    }

    fn frame(kind: u32, name: u128, bytes: &[u8]) -> Vec<u8> {
        [&header(kind, bytes.len() as u64, name)[..], bytes].concat()
    }

    fn whole() -> Vec<u8> {
        [
            frame(ALIVE, 0, &[]),
            frame(BLOCK, 1, &[1; 10]),
            frame(BLOCK, 2, &[2; 10]),
            frame(ALIVE, 0, &[]),
            frame(STATE, 2, &[3; 11]),
            frame(END, 0, &[]),
        ]
        .concat()
    }

    proptest! {
        /// However a response is cut into chunks, its pages arrive in the right memory.
        #[test]
        fn an_answer_comes_in_pieces_of_any_length(
            cuts in prop::collection::vec(1_usize..40, 1..60)
        ) {
            let (names, reserved, whole) = (names(), reserved(), whole());
            let mut landing = BlockReceiver::new(&names, &reserved);
            let (mut rest, mut cuts) = (&whole[..], cuts.into_iter().cycle());
            while !rest.is_empty() {
                let (now, later) = rest.split_at(cuts.next().unwrap_or(1).min(rest.len()));
                landing.push(now).expect("by the rules");
                rest = later;
            }
            prop_assert!(landing.has_ended());
            prop_assert_eq!((landing.blocks(), landing.states()), (&names[..2], &names[1..2]));
            let mut record = [0; 10];
            for (nth, value) in [(0, 1), (1, 2)] {
                let place = reserved.page(PageKind::Block, nth).expect("reserved");
                reserved.pages().read(place, 0, &mut record).expect("there");
                prop_assert_eq!(record, [value; 10]);
            }
        }
    }

    #[test]
    fn a_block_that_came_in_part_does_not_count() {
        let (names, reserved, whole) = (names(), reserved(), whole());
        let mut landing = BlockReceiver::new(&names, &reserved);
        landing.push(&whole[..HEADER + 2 * (HEADER + 10) - 1]).expect("by the rules");
        assert_eq!((landing.blocks(), landing.has_ended()), (&names[..1], false));
    }

    #[test]
    fn a_state_that_came_in_part_does_not_count() {
        let (names, reserved, whole) = (names(), reserved(), whole());
        let mut landing = BlockReceiver::new(&names, &reserved);
        let (most, rest) = whole.split_at(whole.len() - HEADER - 1);
        landing.push(most).expect("by the rules");
        assert_eq!((landing.blocks(), landing.states()), (&names[..2], &[][..]));
        landing.push(rest).expect("by the rules");
        assert_eq!(landing.states(), &names[1..2]);
    }

    #[test]
    fn lies_are_found_before_their_bytes_are_kept() {
        let long = header(BLOCK, u64::from(u32::MAX), 1).to_vec();
        let unknown = frame(4, 0, &[]);
        let lies = [
            (vec![long], "another length"),
            (vec![frame(BLOCK, 1, &[0; 9])], "another length"),
            (vec![frame(BLOCK, 2, &[0; 10])], "not the next one"),
            (vec![frame(BLOCK, 1, &[0; 10]), frame(BLOCK, 1, &[0; 10])], "not the next one"),
            (vec![frame(STATE, 1, &[0; 11])], "a state"),
            (
                vec![frame(BLOCK, 1, &[0; 10]), frame(STATE, 1, &[0; 11]), frame(STATE, 1, &[])],
                "a state",
            ),
            (vec![frame(END, 0, &[0])], "without content"),
            (vec![frame(END, 0, &[]), frame(ALIVE, 0, &[])], "after its end"),
            (vec![unknown], "unknown kind"),
            (vec![frame(ALIVE, 0, &[]); MOST_ALIVE + 1], "too many frames"),
        ];
        for (frames, what) in lies {
            let (names, reserved) = (names(), reserved());
            let mut landing = BlockReceiver::new(&names, &reserved);
            let wrong = landing.push(&frames.concat()).expect_err(what);
            assert!(wrong.to_string().contains(what), "{wrong}, and not {what}");
        }
    }

    #[test]
    fn blocks_beyond_the_reserved_pages_are_refused() {
        let names: Vec<_> = (1..=4_u128).map(BlockHash::from).collect();
        let reserved = reserved();
        let mut landing = BlockReceiver::new(&names, &reserved);
        for name in 1..=3 {
            landing.push(&frame(BLOCK, name, &[0; 10])).expect("room");
        }
        assert!(landing.push(&frame(BLOCK, 4, &[0; 10])).is_err());
    }
}
