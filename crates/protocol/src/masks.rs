//! The masks of a step: which tokens its masked rows may sample. They are sent after the plan, once
//! the preceding tokens are known. A row has one mask for each position at which it may return a
//! token.

use crate::frame::{Frame, FrameError, Kind, encode};

/// The offset that means that every token is allowed.
const EVERYTHING: i32 = -1;
/// The offset that means that the mask is in this frame.
const INLINE: i32 = -2;

/// The tokens that a masked row may sample at one position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowMask {
    /// Every token is allowed.
    Everything,
    /// Bit `i % 32` of word `i / 32` is set if token `i` is allowed.
    Tokens(Vec<u32>),
    /// There is no mask: the row returns no token for this position or later ones in this step.
    NoToken,
}

/// The masks of a step: one for each token that a masked row of the plan may return, in row order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepMasks {
    /// The number of the step.
    pub step: u64,
    /// The masks of the plan's masked rows, [`crate::Want::most`] of them per row.
    pub masks: Vec<RowMask>,
}

impl StepMasks {
    /// Writes the frame to `out`, replacing its content. `place` copies a mask to the arena and
    /// returns its byte offset, or returns `None` if the arena is full. In that case the mask is
    /// written into the frame.
    ///
    /// # Errors
    /// The frame would be too large for a reader.
    pub fn encode_spilling(
        &self,
        out: &mut Vec<u8>,
        mut place: impl FnMut(&[u32]) -> Option<u32>,
    ) -> Result<(), FrameError> {
        let (mut offsets, mut inline) = (Vec::with_capacity(self.masks.len()), Vec::new());
        let mut no_token = Vec::new();
        for (at, mask) in (0..).zip(&self.masks) {
            offsets.push(match mask {
                RowMask::Everything => EVERYTHING,
                RowMask::NoToken => {
                    no_token.push(at);
                    EVERYTHING
                }
                RowMask::Tokens(mask) => place(mask).map_or_else(
                    || {
                        inline.extend(mask.iter().map(|word| word.cast_signed()));
                        INLINE
                    },
                    u32::cast_signed,
                ),
            });
        }
        encode(Kind::Masks, self.step, &[&offsets, &inline, &no_token], out)
    }
}

/// Where a mask is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskPlace {
    /// There is no mask, because every token is allowed.
    Everything,
    /// The mask is at this byte of the arena.
    Arena(u32),
    /// The index of the mask among those in the frame.
    Inline(usize),
    /// There is no mask, so the row returns no token here.
    NoToken,
}

/// The masks of a step, as the hand receives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedMasks {
    /// The number of the step.
    pub step: u64,
    /// Where each mask is, in order.
    pub places: Vec<MaskPlace>,
    /// The words of the masks in the frame, one mask after another.
    words: Vec<u32>,
}

impl ReceivedMasks {
    /// Decodes a frame of masks.
    ///
    /// # Errors
    /// The frame is of another kind, has an unknown column, or an offset is invalid.
    pub fn decode(frame: &Frame) -> Result<Self, FrameError> {
        if frame.header().kind != Kind::Masks {
            return Err(FrameError::Malformed("not a masks frame"));
        }
        let [offsets, words, no_token] = frame.known::<3>()?;
        let mut inline = 0..;
        let place = |&offset: &i32| match offset {
            EVERYTHING => Ok(MaskPlace::Everything),
            INLINE => Ok(MaskPlace::Inline(inline.next().unwrap_or_default())),
            offset => u32::try_from(offset)
                .map(MaskPlace::Arena)
                .map_err(|_| FrameError::Malformed("a mask's offset")),
        };
        let mut places = offsets.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        for &row in no_token {
            let place = usize::try_from(row).ok().and_then(|row| places.get_mut(row));
            match place {
                Some(place @ MaskPlace::Everything) => *place = MaskPlace::NoToken,
                _ => return Err(FrameError::Malformed("a row without a token")),
            }
        }
        let words = words.iter().map(|word| word.cast_unsigned()).collect();
        Ok(Self { step: frame.header().step, places, words })
    }

    /// Returns the mask with this index in the frame, of `width` words; `None` if there is no such
    /// mask.
    #[must_use]
    pub fn inline(&self, index: usize, width: usize) -> Option<&[u32]> {
        self.words.get(index * width..(index + 1) * width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{HEADER_BYTES, Header};

    fn decode(offsets: &[i32], no_token: i32) -> Result<ReceivedMasks, FrameError> {
        let mut bytes = Vec::new();
        encode(Kind::Masks, 3, &[offsets, &[0, 0, 0], &[no_token]], &mut bytes)?;
        let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>().expect("a header");
        let words = body.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        ReceivedMasks::decode(&Frame::new(Header::decode(head)?, words)?)
    }

    #[test]
    fn a_row_without_a_token_is_there_and_has_no_mask() {
        let places = decode(&[INLINE, EVERYTHING], 1).expect("a good frame").places;
        assert_eq!(places, [MaskPlace::Inline(0), MaskPlace::NoToken]);
        for (offset, row) in [(INLINE, 0), (64, 0), (EVERYTHING, 2), (EVERYTHING, -1)] {
            assert!(decode(&[offset, EVERYTHING], row).is_err(), "{offset} {row}");
        }
    }
}
