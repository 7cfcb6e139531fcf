//! The masks of a step: which tokens its masked rows may sample. They follow the plan, when the tokens before them are known.

use crate::frame::{FrameError, Kind, encode};

/// Offset of a row that may sample everything.
const EVERYTHING: i32 = -1;
/// Offset of a row whose mask is in the frame.
const INLINE: i32 = -2;

/// One mask for each masked row of a plan, in row order; used again from step to step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepMasks {
    step: u64,
    /// Words of a mask.
    width: usize,
    /// The masks one after the other.
    words: Vec<u32>,
    /// One a row: its mask says something.
    masked: Vec<bool>,
}

impl StepMasks {
    /// Makes room for `rows` masks over `vocabulary` tokens, for step `step`. Until they are written, everything is allowed.
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

    /// Each row's mask, to be written: bit `i % 32` of word `i / 32` says whether token `i` may come; and whether the mask says anything.
    pub fn rows_mut(&mut self) -> impl ExactSizeIterator<Item = (&mut [u32], &mut bool)> {
        self.words.chunks_exact_mut(self.width.max(1)).zip(&mut self.masked)
    }

    /// Each row's mask; `None`: everything is allowed.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Option<&[u32]>> {
        let masks = self.words.chunks_exact(self.width.max(1));
        masks.zip(&self.masked).map(|(mask, &masked)| masked.then_some(mask))
    }

    /// Writes the frame to `out`, replacing what it holds. `place` gets each mask and answers the byte offset in the arena where it put it,
    /// or `None` to leave it in the frame (the arena is full).
    ///
    /// # Errors
    /// The frame would be larger than a reader takes.
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
