//! The messages between a decode server and a prefill server.
//!
//! The question is JSON. The answer is a sequence of frames. A frame is a kind and a length of 32
//! bits each, a name of 128 bits, and bytes, all little-endian. A block's bytes are its page and
//! the note behind it, as the host tier has them. The blocks come in the order of the prompt, each
//! once. The state after one of them may follow. A frame [`ALIVE`] says that the rest takes longer,
//! and [`END`] that nothing more comes.

use std::io;

use forebay_engine::BlockHash;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use super::room::Reservation;
use super::tier::{PageKind, PageSizes};

/// The route of prefill servers.
pub(crate) const PATH: &str = "/pd/prefill";
/// Bytes before those of a frame.
pub(crate) const HEADER: usize = 24;
/// The kinds of frames.
pub(crate) const ALIVE: u32 = 0;
pub(crate) const BLOCK: u32 = 1;
pub(crate) const STATE: u32 = 2;
pub(crate) const END: u32 = 3;
/// Frames without bytes that may come, beside one for each other frame: those of an hour. A
/// prefill server sends one a second.
const MOST_ALIVE: usize = 3600;

/// A decode server's question.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PrefillRequest {
    /// The name of everything on which the bytes of a page depend. The servers must have the same.
    pub(crate) layout: String,
    /// A number for the names of blocks, which servers with the same secret have in common.
    pub(crate) names: u64,
    /// The salt of the request.
    pub(crate) salt: u64,
    /// The tokens of the blocks, and one more.
    pub(crate) prompt: Vec<i32>,
    /// Leading blocks that the decode server has.
    #[serde(default)]
    pub(crate) skip: usize,
    /// The client whose share the request takes.
    #[serde(default)]
    pub(crate) client: u64,
    /// The priority; larger goes first.
    #[serde(default)]
    pub(crate) priority: i32,
    /// True for work in the background.
    #[serde(default)]
    pub(crate) background: bool,
}

/// The bytes before those of a frame.
pub(crate) fn header(kind: u32, length: u64, name: u128) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    // A page has less than 4 GiB.
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    bytes[8..].copy_from_slice(&name.to_le_bytes());
    bytes
}

/// The reason for which an answer is of no use.
#[derive(Debug, Error)]
pub(crate) enum WireError {
    /// The answer violates the protocol of this module.
    #[error("it sends {0}")]
    Frame(&'static str),
    /// There is no memory for the bytes.
    #[error("its bytes can't be kept: {0}")]
    Memory(#[from] io::Error),
}

/// A page that is coming.
#[derive(Debug)]
struct PartialPage {
    place: (PageKind, u32),
    so_far: u64,
    all: u64,
}

/// Puts the blocks of an answer into reserved pages. The length of everything is known before it
/// comes.
#[derive(Debug)]
pub(crate) struct BlockReceiver<'names, 'pages> {
    /// The blocks that were asked for, and have not begun to come.
    names: &'names [BlockHash],
    reserved: &'pages Reservation,
    sizes: PageSizes,
    head: [u8; HEADER],
    /// Bytes of the next frame's head.
    filled: usize,
    coming: Option<PartialPage>,
    /// Blocks that have come whole.
    blocks: usize,
    /// The number of the block after which the state is that has come whole.
    state: Option<usize>,
    /// The same of a state that has begun to come.
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

    /// Blocks that have come whole.
    pub(crate) fn blocks(&self) -> &'names [BlockHash] {
        &self.names[..self.blocks]
    }

    /// The block after which the state is, if it has come whole.
    pub(crate) fn states(&self) -> &'names [BlockHash] {
        self.state.map_or(&[], |at| &self.names[at..=at])
    }

    /// True after the last frame.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Takes the next bytes of the answer.
    ///
    /// # Errors
    /// The answer is of no use.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<(), WireError> {
        while !bytes.is_empty() {
            if self.ended {
                return Err(WireError::Frame("more behind its end"));
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

    /// Begins the frame whose head has come.
    fn begin(&mut self) -> Result<(), WireError> {
        let number = |at: usize| {
            let bytes = self.head[at..at + 4].try_into().unwrap_or_default();
            u32::from_le_bytes(bytes)
        };
        let (kind, length) = (number(0), u64::from(number(4)));
        let name = u128::from_le_bytes(self.head[8..].try_into().unwrap_or_default());
        let name = BlockHash::from(name);
        match kind {
            ALIVE | END if length > 0 => Err(WireError::Frame("bytes where none belong")),
            ALIVE if self.alive == MOST_ALIVE => Err(WireError::Frame("no block, again and again")),
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
        /// However an answer is cut into pieces, its pages arrive at the right places.
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
            (vec![frame(END, 0, &[0])], "none belong"),
            (vec![frame(END, 0, &[]), frame(ALIVE, 0, &[])], "behind its end"),
            (vec![unknown], "unknown kind"),
            (vec![frame(ALIVE, 0, &[]); MOST_ALIVE + 1], "again and again"),
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
