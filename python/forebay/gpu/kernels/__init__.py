"""Triton kernels, one algorithm per file. Nothing else in the package imports Triton.

A kernel can be compiled and run on a GPU, compiled for an absent GPU, or run in Triton's interpreter on the CPU. The
interpreter would compute with the bit patterns of bfloat16. So every load is widened before any computation, or
converted to the type that the launch has chosen for products (`dot_type`).
"""

from forebay.gpu.kernels.apply import apply_slots, write_table
from forebay.gpu.kernels.attention import attend
from forebay.gpu.kernels.chosen import attend_chosen
from forebay.gpu.kernels.convolve import convolve
from forebay.gpu.kernels.drawing import draw
from forebay.gpu.kernels.expand import expand
from forebay.gpu.kernels.gated_norm import gated_norm
from forebay.gpu.kernels.gating import gate
from forebay.gpu.kernels.grouped import experts
from forebay.gpu.kernels.host_rows import READS_HOST, gather
from forebay.gpu.kernels.hot_rows import clear_slots, open_hot_rows, resolve
from forebay.gpu.kernels.index import choose
from forebay.gpu.kernels.inputs import prepare
from forebay.gpu.kernels.largest import greedy
from forebay.gpu.kernels.launch import COMPILES
from forebay.gpu.kernels.likely import likely, tell_likely
from forebay.gpu.kernels.low_rank import add_low_rank
from forebay.gpu.kernels.norm import add_norm
from forebay.gpu.kernels.one_row import one_row, one_row_gated
from forebay.gpu.kernels.penalise import adjust, count_tokens, penalise
from forebay.gpu.kernels.quantised import experts_of_codes, product, quantise
from forebay.gpu.kernels.recur import recur
from forebay.gpu.kernels.rotate import rotate_and_keep
from forebay.gpu.kernels.rows import keep_index_keys, keep_latent
from forebay.gpu.kernels.wishes import ask, keep
from forebay.gpu.kernels.words import move_words

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
