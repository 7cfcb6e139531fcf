//! The memory of a model's ranks: the weights and pages of each rank.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// The memory of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    /// Bytes of the rank's weights, in the format in which they are computed.
    pub weight_bytes: u64,
    /// Bytes of a page of the main pool, over all of its layers. Layers with a sliding window may
    /// have a second pool; then the main pool does not contain them.
    pub page_bytes: u64,
    /// The number of pages of the main pool.
    pub page_count: u32,
    /// Bytes of a page of the second pool, for layers with a sliding window.
    #[serde(default)]
    pub window_page_bytes: u64,
    /// The number of pages of the second pool; 0: all layers share the main pool.
    #[serde(default)]
    pub window_page_count: u32,
    /// Bytes of all pages of both pools.
    pub kv_bytes: u64,
    /// Bytes of the recurrent states of all slots and state pages; 0: the model has no such states.
    #[serde(default)]
    pub state_bytes: u64,
}

/// The memory of a model that is served by one group of ranks, or by several equal groups.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// The name of the model.
    pub model: String,
    /// The kind of device.
    pub device: String,
    /// The data type in which the model is computed.
    pub dtype: String,
    /// The data type of keys and values; `None`: it is `dtype`.
    pub kv_cache_dtype: Option<String>,
    /// Tokens per page.
    pub page_size: u32,
    /// The total number of replicas.
    pub replicas: u32,
    /// The number of groups of ranks.
    pub groups: u32,
    /// The ranks of one group.
    pub ranks: Vec<RankMemory>,
}

impl Memory {
    /// The number of tokens for which each replica has pages. A rank only has pages for its own
    /// replica's tokens, even in a step group.
    #[must_use]
    pub fn replica_tokens(&self) -> u64 {
        let pages = self.ranks.iter().map(|rank| rank.page_count).min().unwrap_or(0);
        u64::from(pages) * u64::from(self.page_size)
    }

    /// The number of tokens for which all replicas together have pages.
    #[must_use]
    pub fn all_tokens(&self) -> u64 {
        u64::from(self.replicas) * self.replica_tokens()
    }

    /// Bytes of the weights of all ranks in all groups.
    #[must_use]
    pub fn all_weight_bytes(&self) -> u64 {
        let group: u64 = self.ranks.iter().map(|rank| rank.weight_bytes).sum();
        u64::from(self.groups) * group
    }

    /// Formats the memory as a table.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { model, device, dtype, page_size, replicas, groups, ranks, .. } = self;
        let kept =
            self.kv_cache_dtype.as_ref().map_or_else(String::new, |kept| format!(" in {kept}"));
        let mut text =
            format!("Model     {model}: {dtype} on {device}, pages of {page_size} tokens{kept}\n");
        let hands = *groups as usize * ranks.len();
        let arranged = match (*replicas, *groups, ranks.len()) {
            (1, _, 1) => "one rank".to_owned(),
            (1, _, _) => "the ranks of one replica, which is divided among them".to_owned(),
            (all, 1, count) if all as usize == count => {
                "a step group, each a replica; their experts are divided".to_owned()
            }
            (all, _, 1) => format!("{all} replicas of one rank"),
            (all, _, count) => format!("{all} replicas, each divided among {count} ranks"),
        };
        let _ = writeln!(text, "Hands     {hands}: {arranged}\n");
        let _ = writeln!(
            text,
            "{:>6}  {:>12}  {:>10}  {:>8}  {:>12}",
            "rank", "weights GB", "page KB", "pages", "pages GB"
        );
        for (number, rank) in ranks.iter().enumerate() {
            let _ = writeln!(
                text,
                "{number:>6}  {:>12.4}  {:>10.1}  {:>8}  {:>12.4}",
                gb(rank.weight_bytes),
                rank.page_bytes as f64 / 1e3,
                rank.page_count,
                gb(rank.kv_bytes),
            );
        }
        let each = self.replica_tokens();
        let room = match replicas {
            1 => format!("{each} tokens"),
            _ => format!("{each} tokens for each replica, {} in all", self.all_tokens()),
        };
        let _ = writeln!(text, "\nRoom for  {room}");
        let _ = writeln!(text, "Weights   {:.4} GB in all hands", gb(self.all_weight_bytes()));
        for (number, rank) in ranks.iter().enumerate().filter(|(_, it)| it.window_page_count > 0) {
            let _ = writeln!(
                text,
                "Windows   {} pages of {:.1} KB on rank {number}, which are among its pages GB",
                rank.window_page_count,
                rank.window_page_bytes as f64 / 1e3,
            );
        }
        let states: u64 = ranks.iter().map(|rank| rank.state_bytes).sum();
        if states > 0 {
            let all = gb(u64::from(*groups) * states);
            let _ = writeln!(text, "States    {all:.4} GB in all hands");
        }
        text
    }
}

/// Converts bytes to GB (10^9 bytes).
fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: RankMemory = RankMemory {
        weight_bytes: 0,
        page_bytes: 0,
        page_count: 0,
        window_page_bytes: 0,
        window_page_count: 0,
        kv_bytes: 0,
        state_bytes: 0,
    };

    fn memory(replicas: u32, groups: u32, ranks: &[(u64, u32)]) -> Memory {
        let rank = |&(weight_bytes, page_count): &(u64, u32)| {
            let kv_bytes = 6144 * u64::from(page_count);
            RankMemory { weight_bytes, page_bytes: 6144, page_count, kv_bytes, ..NONE }
        };
        Memory {
            model: "tiny".into(),
            device: "cuda".into(),
            dtype: "bfloat16".into(),
            kv_cache_dtype: None,
            page_size: 16,
            replicas,
            groups,
            ranks: ranks.iter().map(rank).collect(),
        }
    }

    #[test]
    fn a_step_group_has_the_pages_of_all_ranks_and_a_divided_replica_those_of_one() {
        let ranks = [(500_000_000, 100), (500_000_000, 100)];
        let divided = memory(1, 1, &ranks);
        assert_eq!((divided.replica_tokens(), divided.all_tokens()), (1600, 1600));
        assert_eq!(divided.all_weight_bytes(), 1_000_000_000);
        let group = memory(2, 1, &ranks);
        assert_eq!((group.replica_tokens(), group.all_tokens()), (1600, 3200));
        assert_eq!(group.all_weight_bytes(), 1_000_000_000);
        let replicas = memory(2, 2, &ranks);
        assert_eq!((replicas.all_tokens(), replicas.all_weight_bytes()), (3200, 2_000_000_000));
    }

    #[test]
    fn arrangements_are_told_apart() {
        let two = [(1, 10), (1, 10)];
        for (memory, words) in [
            (memory(1, 1, &two[..1]), "1: one rank\n"),
            (memory(1, 1, &two), "2: the ranks of one replica"),
            (memory(2, 1, &two), "2: a step group, each a replica"),
            (memory(3, 3, &two[..1]), "3: 3 replicas of one rank\n"),
            (memory(3, 3, &two), "6: 3 replicas, each divided among 2 ranks\n"),
        ] {
            let text = memory.text();
            assert!(text.contains(&format!("Hands     {words}")), "{text}");
        }
        let text = memory(2, 1, &[(500_000_000, 100), (600_000_000, 100)]).text();
        assert!(
            text.contains("     1        0.6000         6.1       100        0.0006\n"),
            "{text}"
        );
        assert!(text.ends_with(
            "Room for  1600 tokens for each replica, 3200 in all\nWeights   1.1000 GB in all hands\n"
        ));
        let mut memory = memory(1, 1, &[(1, 10)]);
        memory.ranks[0] =
            RankMemory { window_page_bytes: 2048, window_page_count: 5, ..memory.ranks[0] };
        let told = "Windows   5 pages of 2.0 KB on rank 0, which are among its pages GB\n";
        assert!(memory.text().ends_with(told), "{}", memory.text());
    }
}
