//! The tables of families in `docs/features.md`.

use std::fmt::Write as _;

use super::{ALL, NOT_SERVED};

/// Returns the table of the families that are served.
#[must_use]
pub fn families_page() -> String {
    let mut page = String::from(
        "| family | architecture | attention | layers | weights | computed by | quantised |\n|---|---|---|---|---|---|---|\n",
    );
    for family in ALL {
        let weights = if family.gguf.is_some() { "safetensors, GGUF" } else { "safetensors" };
        let (by, quantised) =
            if family.compiled { ("compiled kernels", "yes") } else { ("PyTorch", "no") };
        let _ = writeln!(
            page,
            "| {} | `{}` | {} | {} | {weights} | {by} | {quantised} |",
            family.title, family.architecture, family.attention, family.layers
        );
    }
    page
}

/// Returns the table of known architectures that no hand serves.
#[must_use]
pub fn not_served_page() -> String {
    let mut page = String::from("| architecture | in GGUF files | reason |\n|---|---|---|\n");
    for (name, gguf, why) in NOT_SERVED {
        let gguf = if gguf.is_empty() { String::new() } else { format!("`{gguf}`") };
        let _ = writeln!(page, "| `{name}` | {gguf} | {why} |");
    }
    page
}
