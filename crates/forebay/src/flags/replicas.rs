//! Flags about replicas, and the ranks of each.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use forebay_balance::Method;
use serde::Serialize;

use super::duration::seconds;
use crate::affinity::AffinityFlag;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub(crate) enum LoadBalance {
    /// One after the other.
    RoundRobin,
    /// The fewest requests.
    #[value(alias = "total_requests")]
    ShortestQueue,
    /// The fewest tokens left to compute and to generate.
    TotalTokens,
    /// The longest cached beginning, weighed against imbalance; else the fewest requests.
    #[default]
    #[value(alias = "auto")]
    PrefixAware,
}

impl From<LoadBalance> for Method {
    fn from(flag: LoadBalance) -> Self {
        match flag {
            LoadBalance::RoundRobin => Self::RoundRobin,
            LoadBalance::ShortestQueue => Self::ShortestQueue,
            LoadBalance::TotalTokens => Self::TotalTokens,
            LoadBalance::PrefixAware => Self::PrefixAware,
        }
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Replicas")]
pub(crate) struct ReplicaFlags {
    /// Whole copies of the model, each with a hand and a scheduler of its own. Limits of a step, of
    /// running requests and of the KV pool are each one's; the queue's is that of all together.
    #[arg(long, visible_alias = "data-parallel-size", value_name = "REPLICAS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) dp_size: u32,
    /// The policy that chooses a replica for a request that names none.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) load_balance_method: LoadBalance,
    /// Look at the replicas' loads only every so many seconds and know nothing in between, with
    /// `shortest_queue`. The flag is there to measure the worth of exact loads. 0: loads are exact.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds)]
    pub(crate) load_watch_interval: Duration,
    /// Ranks of each replica: the model is divided among them. On CPUs that is for tests, and
    /// slower than one.
    #[arg(long, visible_alias = "tensor-parallel-size", value_name = "RANKS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) tp_size: u32,
    /// Give each rank whole experts, in place of a part of each; as many ranks as --tp-size. With
    /// --dp-size and one rank a replica it means --enable-dp-attention, as in vLLM.
    #[arg(long, visible_alias = "enable-ep-moe")]
    pub(crate) enable_expert_parallel: bool,
    /// For a mixture of experts: the replicas of --dp-size share the experts, of which each has
    /// some, and nothing else. Each has requests, pages and the rest of the model of its own. They
    /// compute in step, and when one ends, all end. --tp-size is 1 or, as in SGLang, --dp-size.
    #[arg(long)]
    pub(crate) enable_dp_attention: bool,
    /// The number of ranks by which experts are divided, whole; 1: experts are divided like other
    /// matrices.
    #[arg(long, visible_alias = "expert-parallel-size", value_name = "RANKS")]
    pub(crate) ep_size: Option<u32>,
    #[command(flatten)]
    pub(crate) unknown: ElsewhereFlags,
    /// Run all hands on other machines, which join at this address with `forebay worker --join`.
    /// --tp-size and --dp-size set the number of hands. Without the flag nothing listens for hands.
    #[arg(long, value_name = "ADDR:PORT", requires = "join_token_file")]
    pub(crate) listen_hands: Option<SocketAddr>,
    /// The file with the token that opens --listen-hands. It and FILE.key, which is the brain's
    /// alone, are made if neither is there.
    #[arg(long, value_name = "FILE", requires = "listen_hands")]
    pub(crate) join_token_file: Option<PathBuf>,
    /// Let the ranks of a replica be on several machines if none has room for all of them. They
    /// talk to each other in the clear, over the network interface of this name. Without the flag
    /// they are on one machine, and use its loopback interface.
    #[arg(long, value_name = "NAME", value_parser = crate::collectives::interface)]
    pub(crate) collective_interface: Option<String>,
    /// Have a cluster run the machines' workers. `ray` asks the Ray cluster of this machine, or of
    /// RAY_ADDRESS, for a GPU a hand. With --device `cpu` it asks for a processor a hand. Workers
    /// join at this machine's address in the cluster, or at --listen-hands.
    #[arg(long, value_enum, value_name = "WHO")]
    pub(crate) placement: Option<Placement>,
    /// Processors of the brain's threads and of each hand: `[brain=LIST|]LIST|LIST...`, such as
    /// `brain=0-1|2-15|16-31`. There is one list a replica or one for all, with `;` between those
    /// of its ranks. `auto` divides the cores among the hands [default: any].
    #[arg(long, value_name = "LISTS")]
    pub(crate) cpu_affinity: Option<AffinityFlag>,
}

/// Flags by which others spread a group over machines: they are known, so that a command line that
/// was written for another server is answered with a reason.
#[derive(Debug, Args)]
pub(crate) struct ElsewhereFlags {
    #[arg(long, hide = true)]
    nnodes: Option<u32>,
    #[arg(long, hide = true)]
    node_rank: Option<u32>,
    #[arg(long, hide = true)]
    master_addr: Option<String>,
    #[arg(long, visible_alias = "nccl-init-addr", hide = true)]
    dist_init_addr: Option<String>,
    #[arg(long, visible_alias = "pp-size", hide = true)]
    pipeline_parallel_size: Option<u32>,
}

impl ElsewhereFlags {
    /// The first that asks for more than one machine, or for what is not there.
    fn given(&self) -> Option<(&'static str, &'static str)> {
        const MACHINES: &str = "other machines run `forebay worker --join HOST:7711 --token-file FILE`, and this one --listen-hands 0.0.0.0:7711 --join-token-file FILE; with --collective-interface ranks of one replica may be on several";
        let several = |number: Option<u32>| number.is_some_and(|number| number > 1);
        [
            ("--nnodes", several(self.nnodes), MACHINES),
            ("--node-rank", self.node_rank.is_some_and(|rank| rank > 0), MACHINES),
            ("--master-addr", self.master_addr.is_some(), MACHINES),
            ("--dist-init-addr", self.dist_init_addr.is_some(), MACHINES),
            (
                "--pipeline-parallel-size",
                several(self.pipeline_parallel_size),
                "layers are not divided among ranks; --tp-size divides each of them",
            ),
        ]
        .into_iter()
        .find_map(|(flag, given, reason)| given.then_some((flag, reason)))
    }
}

/// The cluster that runs outposts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Placement {
    Ray,
}

/// The replicas, and the hands of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrangement {
    /// Replicas, each with a scheduler.
    pub(crate) replicas: u32,
    /// Groups of ranks that live and die together.
    pub(crate) groups: u32,
    /// Ranks of each group.
    pub(crate) ranks: u32,
    /// Each rank has some of the experts, whole.
    pub(crate) expert_parallel: bool,
}

impl Arrangement {
    /// Replicas of each group: one, or one a rank.
    pub(crate) fn members(self) -> u32 {
        self.replicas / self.groups
    }

    /// True if the ranks of a group have requests of their own.
    pub(crate) fn step_group(self) -> bool {
        self.members() > 1
    }

    /// Processes in all.
    pub(crate) fn hands(self) -> u32 {
        self.groups.saturating_mul(self.ranks)
    }
}

impl ReplicaFlags {
    /// The given flag by which hands run on other machines.
    pub(crate) fn elsewhere(&self) -> Option<&'static str> {
        let placed = self.placement.map(|_| "--placement");
        self.listen_hands.map(|_| "--listen-hands").or(placed)
    }

    /// The numbers of hands and replicas.
    ///
    /// # Errors
    /// The flags contradict each other, or ask for a feature that does not exist.
    pub(crate) fn arrangement(&self) -> Result<Arrangement> {
        if let Some((flag, reason)) = self.unknown.given() {
            bail!("{flag}: {reason}");
        }
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

    /// All replicas as one group that shares the experts.
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
        flags: ReplicaFlags,
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

    #[test]
    fn what_is_not_there_is_said() {
        check_refused(&[
            (
                "--nnodes 2 --node-rank 1",
                "--nnodes: other machines run `forebay worker --join HOST:7711 --token-file FILE`",
            ),
            ("--node-rank 1", "--node-rank: other machines run `forebay worker --join"),
            ("--master-addr a", "--master-addr: other machines run `forebay worker --join"),
            ("--dist-init-addr a:1", "--dist-init-addr: other machines run `forebay worker --join"),
            ("--nccl-init-addr a:1", "--dist-init-addr: other machines run `forebay worker --join"),
            ("--pp-size 2", "--pipeline-parallel-size"),
        ]);
        let one = Arrangement { replicas: 1, groups: 1, ranks: 1, expert_parallel: false };
        assert_eq!(arrangement("--nnodes 1 --node-rank 0 --pp-size 1"), Ok(one));
    }
}
