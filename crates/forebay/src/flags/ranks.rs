//! Flags about the ranks of a model, for `serve` and `plan`.

use anyhow::{Result, bail};
use clap::Args;
use serde::{Serialize, Serializer};

#[derive(Debug, Args)]
pub(crate) struct RankFlags {
    /// Number of replicas: whole copies of the model, each with its own hands and scheduler. Limits
    /// on steps, running requests and the KV pool apply to each replica; the queue's limit applies
    /// to all replicas together.
    #[arg(long, visible_alias = "data-parallel-size", value_name = "REPLICAS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) dp_size: u32,
    /// Number of ranks of each replica, among which the model is divided; on CUDA, a rank has one
    /// GPU. On CPUs this is for tests, and slower than a single rank.
    #[arg(long, visible_alias = "tensor-parallel-size", value_name = "RANKS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) tp_size: u32,
    /// Give each of the --tp-size ranks whole experts instead of a slice of every expert. With
    /// --dp-size and one rank per replica, this flag means --enable-dp-attention, as in vLLM.
    #[arg(long, visible_alias = "enable-ep-moe")]
    pub(crate) enable_expert_parallel: bool,
    /// For mixture-of-experts models: the replicas of --dp-size divide the experts among them, and
    /// share nothing else. They compute each step together, and restart together when one dies.
    /// --tp-size is 1 or, as in SGLang, equal to --dp-size.
    #[arg(long)]
    pub(crate) enable_dp_attention: bool,
    /// Number of ranks among which whole experts are divided; 1: experts are sliced like other
    /// matrices.
    #[arg(long, visible_alias = "expert-parallel-size", value_name = "RANKS")]
    pub(crate) ep_size: Option<u32>,
}

/// The replicas, and the hands of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrangement {
    /// The number of replicas, each with a scheduler.
    pub(crate) replicas: u32,
    /// The number of groups of ranks that start and fail together.
    pub(crate) groups: u32,
    /// The number of ranks of each group.
    pub(crate) ranks: u32,
    /// True if each rank has some of the experts, rather than a slice of every expert.
    pub(crate) expert_parallel: bool,
}

impl Arrangement {
    /// The number of replicas in a group: the number of ranks in a step group, otherwise 1.
    pub(crate) fn members(self) -> u32 {
        self.replicas / self.groups
    }

    /// True if each group is a step group, whose ranks each schedule their own requests.
    pub(crate) fn step_group(self) -> bool {
        self.members() > 1
    }

    /// The number of ranks among which a replica is divided.
    pub(crate) fn tp_size(self) -> u32 {
        if self.step_group() { 1 } else { self.ranks }
    }

    /// The total number of hands.
    pub(crate) fn hands(self) -> u32 {
        self.groups.saturating_mul(self.ranks)
    }
}

impl Serialize for Arrangement {
    /// Serialises the arrangement as the names and values of the equivalent flags.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Sizes {
            dp_size: u32,
            tp_size: u32,
            ep_size: u32,
            enable_dp_attention: bool,
        }
        let sizes = Sizes {
            dp_size: self.replicas,
            tp_size: self.tp_size(),
            ep_size: if self.expert_parallel { self.ranks } else { 1 },
            enable_dp_attention: self.step_group(),
        };
        sizes.serialize(serializer)
    }
}

impl RankFlags {
    /// Returns how many replicas, groups and ranks the flags specify.
    ///
    /// # Errors
    /// The flags contradict each other.
    pub(crate) fn arrangement(&self) -> Result<Arrangement> {
        let (replicas, ranks) = (self.dp_size, self.tp_size);
        if self.ep_size == Some(1) && self.enable_expert_parallel {
            bail!("--ep-size 1 and --enable-expert-parallel exclude each other");
        }
        let several = replicas > 1 && ranks == 1;
        let wanted = self.enable_expert_parallel || self.ep_size.is_some_and(|size| size > 1);
        if self.enable_dp_attention || (several && wanted) {
            return self.step_group();
        }
        let expert_parallel = match self.ep_size {
            Some(size) if size > 1 && size != ranks => bail!(
                "--ep-size {size}: experts are divided among all ranks of a replica: 1 or --tp-size ({ranks})"
            ),
            Some(size) => size > 1,
            None => self.enable_expert_parallel,
        };
        if expert_parallel && ranks == 1 {
            bail!(
                "--enable-expert-parallel is for several ranks: --tp-size or --dp-size says how many"
            );
        }
        Ok(Arrangement { replicas, groups: replicas, ranks, expert_parallel })
    }

    /// Arranges all replicas as one step group, whose ranks divide the experts among them.
    fn step_group(&self) -> Result<Arrangement> {
        let replicas = self.dp_size;
        if replicas == 1 {
            bail!(
                "--enable-dp-attention is for several replicas that share experts: --dp-size says how many"
            );
        }
        if self.tp_size != 1 && self.tp_size != replicas {
            bail!(
                "--tp-size {}: with --enable-dp-attention each rank has attention of its own, and --dp-size \
                 ({replicas}) is the number of ranks: leave --tp-size off",
                self.tp_size
            );
        }
        if let Some(size) = self.ep_size.filter(|&size| size != replicas) {
            bail!(
                "--ep-size {size}: with --enable-dp-attention all replicas share the experts: leave it off, or give --dp-size ({replicas})"
            );
        }
        Ok(Arrangement { replicas, groups: 1, ranks: replicas, expert_parallel: true })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Shell {
        #[command(flatten)]
        flags: RankFlags,
    }

    fn arrangement(line: &str) -> Result<Arrangement, String> {
        let words = std::iter::once("serve").chain(line.split_whitespace());
        let flags = Shell::try_parse_from(words).map_err(|error| error.to_string())?.flags;
        flags.arrangement().map_err(|error| error.to_string())
    }

    fn check_refused(refused: &[(&str, &str)]) {
        for (line, word) in refused {
            let told = arrangement(line).expect_err(line);
            assert!(told.contains(word), "{line}: {told}");
        }
    }

    #[test]
    fn experts_are_divided_among_all_ranks_or_none() {
        let divided = |line| arrangement(line).map(|given| given.expert_parallel);
        assert_eq!(divided(""), Ok(false));
        assert_eq!(divided("--tp-size 2 --ep-size 1"), Ok(false));
        assert_eq!(divided("--tensor-parallel-size 2 --ep-size 2"), Ok(true));
        assert_eq!(divided("--tp-size 4 --enable-expert-parallel"), Ok(true));
        assert_eq!(divided("--dp-size 2 --tp-size 4 --enable-expert-parallel"), Ok(true));
        check_refused(&[
            ("--tp-size 4 --ep-size 2", "--ep-size 2"),
            ("--enable-expert-parallel", "several ranks"),
            ("--tp-size 2 --ep-size 1 --enable-ep-moe", "exclude each other"),
        ]);
    }

    #[test]
    fn replicas_that_share_experts_are_one_group() {
        let four = Arrangement { replicas: 4, groups: 1, ranks: 4, expert_parallel: true };
        for line in [
            "--dp-size 4 --enable-dp-attention",
            "--dp-size 4 --tp-size 4 --enable-dp-attention",
            "--dp-size 4 --tp-size 4 --ep-size 4 --enable-dp-attention",
            "--data-parallel-size 4 --enable-expert-parallel",
            "--dp-size 4 --ep-size 4",
        ] {
            assert_eq!(arrangement(line), Ok(four), "{line}");
        }
        assert_eq!((four.members(), four.step_group(), four.hands()), (4, true, 4));
        let whole = arrangement("--dp-size 4 --tp-size 2").expect("replicas of two ranks");
        assert_eq!((whole.members(), whole.step_group(), whole.hands()), (1, false, 8));
        check_refused(&[
            ("--enable-dp-attention", "--dp-size"),
            ("--dp-size 4 --tp-size 8 --enable-dp-attention", "--tp-size 8"),
            ("--dp-size 4 --ep-size 2 --enable-dp-attention", "--ep-size 2"),
            ("--dp-size 4 --ep-size 2", "--ep-size 2"),
        ]);
    }
}
