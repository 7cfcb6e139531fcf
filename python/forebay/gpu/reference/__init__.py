"""The operators of `forebay.gpu` in PyTorch, with the same arguments. Tests compare the kernels with them.

They run on every device and never wait for it. No shape of a tensor depends on values. They are not fast.
"""

from forebay.gpu.reference.attention import attend
from forebay.gpu.reference.grouped import experts
from forebay.gpu.reference.layers import (
    add_norm,
    gate,
    keep_index_keys,
    keep_latent,
    one_row,
    one_row_gated,
    rotate_and_keep,
)
from forebay.gpu.reference.low_rank import add_low_rank
from forebay.gpu.reference.quantised import expand, experts_of_codes, product, quantise
from forebay.gpu.reference.recurrent import convolve, gated_norm, recur
from forebay.gpu.reference.sampling import (
    adjust,
    ask,
    count_tokens,
    draw,
    greedy,
    keep,
    likely,
    penalise,
    tell_likely,
)
from forebay.gpu.reference.sparse import READS_HOST, attend_chosen, choose, clear_slots, gather, open_hot_rows, resolve
from forebay.gpu.reference.tables import apply_slots, move_words, prepare, write_table

COMPILES = False

__all__ = [
    "COMPILES",
    "READS_HOST",
    "add_low_rank",
    "add_norm",
    "adjust",
    "apply_slots",
    "ask",
    "attend",
    "attend_chosen",
    "choose",
    "clear_slots",
    "convolve",
    "count_tokens",
    "draw",
    "expand",
    "experts",
    "experts_of_codes",
    "gate",
    "gated_norm",
    "gather",
    "greedy",
    "keep",
    "keep_index_keys",
    "keep_latent",
    "likely",
    "move_words",
    "one_row",
    "one_row_gated",
    "open_hot_rows",
    "penalise",
    "prepare",
    "product",
    "quantise",
    "recur",
    "resolve",
    "rotate_and_keep",
    "tell_likely",
    "write_table",
]
