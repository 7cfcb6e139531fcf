"""Numbers of the step protocol. Made from crates/protocol by `make columns`; a test compares the two."""

from enum import IntEnum

HEADER_BYTES = 24
ENTRY_WORDS = 2
MAX_GROUP = 256
VERSION = 5
MAX_WORDS = 67108864
MAX_WAIT_US = 1000
NO_PAGE = -1
FLAG_SAMPLE = 1
FLAG_POOL = 2
FLAG_MASKED = 4
COPY_OK = 0
COPY_FAILED = 1
PLACE_OK = 0
PLACE_FAILED_FILES = 1
PLACE_FAILED_DIGEST = 2
PLACE_FAILED_MEMORY = 3
ROW_OK = 0
ROW_NOT_FINITE = 1
COPY_SAVE = 0
COPY_RESTORE = 1
COPY_RESTORE_INDEX = 2
COPY_SAVE_STATE = 3
COPY_RESTORE_STATE = 4
SLOT_WORDS = 11
SLOT_FLOATS_WORDS = 6
PAGE_WRITE_WORDS = 3
ROW_WORDS = 4
SLOT_VALUE_WORDS = 2
COPY_WORDS = 4
SPAN_WORDS = 2
IMAGE_WORDS = 7
IMAGE_SPAN_WORDS = 6
PROMPT_LOGPROBS_WANT_WORDS = 4
STATE_COPY_WORDS = 2
PLACE_WRITE_WORDS = 3
STEP_TIMING_WORDS = 2
COPY_END_WORDS = 2
COPY_TIMING_WORDS = 2
SPARSE_ROWS_WORDS = 4
PLACE_END_WORDS = 2


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    CONFIG = 2
    PROGRESS = 3
    READY = 4
    PLAN = 5
    RESULT = 6
    FATAL = 7
    SHUTDOWN = 8
    MASKS = 9
    STORE = 10
    STORE_REPLY = 11
    PLAN_AT = 12
    ADAPTER = 13


class SlotRecord(IntEnum):
    """Index of a word in a record of `slots`."""

    SLOT = 0
    TOKEN_COUNT = 1
    PROMPT_LEN = 2
    TOP_K = 3
    SEED_LO = 4
    SEED_HI = 5
    MIN_TOTAL = 6
    LOGPROBS = 7
    STOP_COUNT = 8
    BIAS_COUNT = 9
    ARENA_OFFSET = 10


class SlotFloats(IntEnum):
    """Index of a word in a record of `slot_floats`."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5


class PageWrite(IntEnum):
    """Index of a word in a record of `page_writes`, `host_writes`, `hot_rows`, `window_writes`."""

    SLOT = 0
    INDEX = 1
    PAGE = 2


class RowRecord(IntEnum):
    """Index of a word in a record of `rows`."""

    SLOT = 0
    START = 1
    LENGTH = 2
    FLAGS = 3


class SlotValue(IntEnum):
    """Index of a word in a record of `segments`, `embeds`, `allowed_counts`, `slot_places`."""

    SLOT = 0
    VALUE = 1


class CopyRecord(IntEnum):
    """Index of a word in a record of `copies`."""

    TICKET = 0
    DIRECTION = 1
    HOT = 2
    HOST = 3


class Span(IntEnum):
    """Index of a word in a record of `copy_spans`."""

    FIRST = 0
    COUNT = 1


class ImageRecord(IntEnum):
    """Index of a word in a record of `images`."""

    IMAGE = 0
    FIRST_LAYER = 1
    END_LAYER = 2
    GRID_H = 3
    GRID_W = 4
    ARENA_OFFSET = 5
    PAGE_COUNT = 6


class ImageSpanRecord(IntEnum):
    """Index of a word in a record of `image_spans`."""

    SLOT = 0
    POSITION = 1
    GRID_H = 2
    GRID_W = 3
    ROPE = 4
    PAGE_COUNT = 5


class PromptLogprobsWant(IntEnum):
    """Index of a word in a record of `prompt_logprobs`."""

    SLOT = 0
    FIRST = 1
    COUNT = 2
    MOST = 3


class StateCopy(IntEnum):
    """Index of a word in a record of `state_loads`, `state_saves`."""

    SLOT = 0
    PAGE = 1


class PlaceWrite(IntEnum):
    """Index of a word in a record of `place_writes`."""

    TICKET = 0
    PLACE = 1
    ID = 2


class StepTiming(IntEnum):
    """Index of a word in a record of `timing`."""

    DEVICE_US = 0
    GAP_US = 1


class CopyEnd(IntEnum):
    """Index of a word in a record of `copied`."""

    TICKET = 0
    ERROR = 1


class CopyTiming(IntEnum):
    """Index of a word in a record of `copy_timing`."""

    SAVE_US = 0
    RESTORE_US = 1


class SparseRows(IntEnum):
    """Index of a word in a record of `sparse_rows`."""

    SELECTED = 0
    ON_PAGES = 1
    IN_ROWS = 2
    MISSED = 3


class PlaceEnd(IntEnum):
    """Index of a word in a record of `placed`."""

    TICKET = 0
    ERROR = 1
