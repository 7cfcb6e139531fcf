//! The masks of a step: the tokens that its masked rows may sample. They follow the plan, when the
//! tokens before them are known.

use crate::frame::{Frame, FrameError, Kind, encode};

/// Offset of a row that may sample everything.
const EVERYTHING: i32 = -1;
/// Offset of a row whose mask is in the frame.
const INLINE: i32 = -2;

/// One mask for each masked row of a plan, in row order. Its memory is reused from step to step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepMasks {
    step: u64,
    /// Words of a mask.
    width: usize,
    /// The masks one after the other.
    words: Vec<u32>,
    /// A flag for each row, true if its mask restricts anything.
    masked: Vec<bool>,
}

impl StepMasks {
    /// Makes room for `rows` masks over `vocabulary` tokens, for step `step`. Everything is allowed
    /// in masks that are not written yet.
    pub fn begin(&mut self, step: u64, rows: usize, vocabulary: u32) {
        self.step = step;
        self.width = vocabulary.div_ceil(u32::BITS) as usize;
        self.words.resize(rows * self.width, 0);
        self.masked.clear();
        self.masked.resize(rows, false);
    }

    /// The plan's step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Each row's mask, to be written, and a flag. Bit `i % 32` of word `i / 32` is set if token
    /// `i` may come. The flag is true if the mask restricts anything.
    pub fn rows_mut(&mut self) -> impl ExactSizeIterator<Item = (&mut [u32], &mut bool)> {
        self.words.chunks_exact_mut(self.width.max(1)).zip(&mut self.masked)
    }

    /// Each row's mask; `None`: everything is allowed.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Option<&[u32]>> {
        let masks = self.words.chunks_exact(self.width.max(1));
        masks.zip(&self.masked).map(|(mask, &masked)| masked.then_some(mask))
    }

    /// Writes the frame to `out`, whose old content is lost. `place` gets each mask and gives its
    /// byte offset in the arena. With `None`, because the arena is full, the mask stays in the
    /// frame.
    ///
    /// # Errors
    /// The frame would be too large for a reader.
    pub fn encode_spilling(
        &self,
        out: &mut Vec<u8>,
        mut place: impl FnMut(&[u32]) -> Option<u32>,
    ) -> Result<(), FrameError> {
        let (mut offsets, mut inline) = (Vec::with_capacity(self.masked.len()), Vec::new());
        for mask in self.rows() {
            let placed = mask.map(&mut place);
            offsets.push(match (mask, placed.flatten()) {
                (None, _) => EVERYTHING,
                (Some(_), Some(offset)) => offset.cast_signed(),
                (Some(mask), None) => {
                    inline.extend(mask.iter().map(|word| word.cast_signed()));
                    INLINE
                }
            });
        }
        encode(Kind::Masks, self.step, &[&offsets, &inline], out)
    }
}

/// The place of a row's mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskPlace {
    /// There is no mask, because everything is allowed.
    Everything,
    /// The mask is at this byte of the arena.
    Arena(u32),
    /// The mask is in the frame, so many masks after the first.
    Inline(usize),
}

/// The masks of a step on the hand's side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedMasks {
    /// The plan's step.
    pub step: u64,
    /// The places, one for each masked row, in row order.
    pub places: Vec<MaskPlace>,
    /// The masks in the frame, one after the other.
    words: Vec<u32>,
}

impl ReceivedMasks {
    /// Reads a frame of masks.
    ///
    /// # Errors
    /// The frame is of another kind, a column is not known, or an offset is invalid.
    pub fn decode(frame: &Frame) -> Result<Self, FrameError> {
        if frame.header().kind != Kind::Masks {
            return Err(FrameError::Malformed("not a masks frame"));
        }
        let [offsets, words] = frame.known::<2>()?;
        let mut inline = 0..;
        let place = |&offset: &i32| match offset {
            EVERYTHING => Ok(MaskPlace::Everything),
            INLINE => Ok(MaskPlace::Inline(inline.next().unwrap_or_default())),
            offset => u32::try_from(offset)
                .map(MaskPlace::Arena)
                .map_err(|_| FrameError::Malformed("a mask's offset")),
        };
        let places = offsets.iter().map(place).collect::<Result<_, _>>()?;
        let words = words.iter().map(|word| word.cast_unsigned()).collect();
        Ok(Self { step: frame.header().step, places, words })
    }

    /// The mask with this index in the frame, of `width` words; `None`: there is none.
    #[must_use]
    pub fn inline(&self, index: usize, width: usize) -> Option<&[u32]> {
        self.words.get(index * width..(index + 1) * width)
    }
}
