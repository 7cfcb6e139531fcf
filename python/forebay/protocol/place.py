"""Frames in the arena. A large frame is written there once, and each rank receives only its offset and size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.protocol.frames import HEADER_BYTES, Frame, Header, Kind, WireError, encode

WORD = 4
ALIGNMENT = 16
IN_ARENA = (Kind.PLAN, Kind.MASKS)
"""Kinds of frames that may be in the arena."""


@dataclass(frozen=True)
class PlanAt:
    """The position of a step's frame in the arena."""

    step: int
    offset: int
    """The byte offset in the arena."""
    words: int
    """The number of words of the whole frame, header included."""

    @classmethod
    def decode(cls, frame: Frame) -> PlanAt:
        """Reads a `plan_at` frame, and releases its buffer. Raises `WireError`."""
        (place,) = frame.expect(Kind.PLAN_AT, 1)
        if len(place) != 2 or place.min() < 0 or place[0] % ALIGNMENT or place[1] * WORD < HEADER_BYTES:
            raise WireError(f"malformed frame: the place {place.tolist()}")
        offset, words = place.tolist()
        frame.release()
        return cls(frame.step, offset, words)

    def encode(self) -> bytes:
        """Encodes the frame."""
        return encode(Kind.PLAN_AT, self.step, [np.array([self.offset, self.words], np.int32)])

    def read(self, arena: npt.NDArray[np.uint8]) -> tuple[Header, npt.NDArray[np.uint8]]:
        """Returns the header, and the body as a uint8 view. Raises `WireError` if they are no frame of this step."""
        end = self.offset + WORD * self.words
        if end > len(arena):
            raise WireError(f"a frame at bytes {self.offset}..{end} of an arena of {len(arena)}")
        body = self.offset + HEADER_BYTES
        header = Header.decode(arena[self.offset : body].tobytes())
        if header.kind not in IN_ARENA or header.step != self.step or body + WORD * header.words != end:
            raise WireError(
                f"{self.words} words at byte {self.offset} of the arena are a {header.kind.name.lower()} of step "
                f"{header.step} with {header.words} words, and not a frame of step {self.step}"
            )
        return header, arena[body:end]
