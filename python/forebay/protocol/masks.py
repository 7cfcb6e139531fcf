"""The masks of a step: the tokens that its masked rows may sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.protocol.frames import Frame, Int32s, Kind, WireError, encode, ints, nothing

COLUMNS = ("offsets", "words", "no_token")
"""The columns of a masks frame, with the ids 1, 2, and so on."""
EVERYTHING = -1
"""The offset of a position at which every token may be sampled."""
INLINE = -2
"""The offset of a position whose mask is in the frame, not in the arena."""

UInt32s: TypeAlias = npt.NDArray[np.uint32]


@dataclass
class Masks:
    """The masks of one step: one for each of the `m` tokens that its masked rows may sample."""

    step: int = 0
    offsets: Int32s = ints(0)  # [m]: byte offset of the mask in the arena; or EVERYTHING, or INLINE
    words: Int32s = ints(0)  # the inline masks, concatenated
    no_token: Int32s = ints(0)  # indices of tokens that are not sampled, and have no mask
    release: Callable[[], None] = field(default=nothing, compare=False)
    """Releases the frame's buffer."""

    @classmethod
    def decode(cls, frame: Frame) -> Masks:
        """Reads a masks frame in place; raises `WireError`."""
        offsets, words, no_token = frame.expect(Kind.MASKS, len(COLUMNS))
        if len(offsets) and offsets.min() < INLINE:
            raise WireError("malformed frame: a mask's offset")
        for at in no_token.tolist():
            if not 0 <= at < len(offsets) or offsets[at] != EVERYTHING:
                raise WireError("malformed frame: a row without a token")
        return cls(frame.step, offsets, words, no_token, frame.release)

    def encode(self) -> bytes:
        """Encodes the frame."""
        return encode(Kind.MASKS, self.step, [getattr(self, name) for name in COLUMNS])

    def read(self, arena: npt.NDArray[np.uint8], vocabulary: int) -> list[UInt32s | None]:
        """Returns each mask, uint32 [words]: bit `i % 32` of word `i // 32` is for token `i`. None: all are allowed.

        Masks in the arena are views of it; inline masks are copies. Raises `WireError` for a mask outside of the arena.
        """
        width = -(-vocabulary // 32)
        inline = iter(self.words.copy().view(np.uint32).reshape(-1, width) if self._fits(width) else [])
        masks: list[UInt32s | None] = []
        for offset in self.offsets.tolist():
            if offset == EVERYTHING:
                masks.append(None)
            elif offset == INLINE:
                masks.append(next(inline))
            elif offset % 4 or offset + 4 * width > len(arena):
                raise WireError(f"a mask at byte {offset} of an arena of {len(arena)}")
            else:
                masks.append(arena[offset : offset + 4 * width].view(np.uint32))
        return masks

    def _fits(self, width: int) -> bool:
        wanted = width * int(np.count_nonzero(self.offsets == INLINE))
        if self.words.size != wanted:
            raise WireError(f"malformed frame: {self.words.size} words of masks, not {wanted}")
        return wanted > 0
