//! Text to token ids and back.

use super::param::{flag, param, text};
use crate::limits::{Bound, IDS, NAME_BYTES, PROMPTS, Param};

pub(super) const TOKENIZE: &[Param] = &[
    text("model", NAME_BYTES),
    param("prompt", Bound::Strings { count: PROMPTS, each: usize::MAX, total: usize::MAX }),
    param("content", Bound::Prompt),
    flag("add_special_tokens"),
    flag("add_special"),
    flag("return_token_strs"),
    flag("with_pieces"),
];

pub(super) const DETOKENIZE: &[Param] =
    &[text("model", NAME_BYTES), param("tokens", Bound::Ids(IDS))];
