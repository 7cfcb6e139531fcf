//! Flags about replicas, and the ranks of each.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use forebay_balance::Method;
use forebay_capacity::MoveArgs;

use super::duration::seconds;
use super::pd::PdFlags;
use super::ranks::{Arrangement, RankFlags};
use crate::affinity::AffinityFlag;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum LoadBalance {
    /// Each replica in turn.
    RoundRobin,
    /// The replica with the fewest requests, waiting or running.
    #[value(alias = "total_requests")]
    ShortestQueue,
    /// The replica with the fewest tokens left to compute and to generate.
    TotalTokens,
    /// The replica with the fewest requests, unless another has so much more of the prompt cached
    /// that its longer queue pays off.
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
    #[command(flatten)]
    pub(crate) ranks: RankFlags,
    /// Policy that chooses a replica for requests that name none.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) load_balance_method: LoadBalance,
    /// For measurements, with `shortest_queue`: sample the replicas' loads at this interval in
    /// seconds. 0: use exact loads.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds)]
    pub(crate) load_watch_interval: Duration,
    #[command(flatten)]
    pub(crate) moves: MoveArgs,
    #[command(flatten)]
    pub(crate) pd: PdFlags,
    #[command(flatten)]
    pub(crate) unknown: ElsewhereFlags,
    /// Run all hands on other machines, which join at this address with `forebay worker --join`.
    /// --tp-size and --dp-size set the number of hands. Without the flag all hands run here.
    #[arg(long, value_name = "ADDR:PORT", requires = "join_token_file")]
    pub(crate) listen_hands: Option<SocketAddr>,
    /// Token file for --listen-hands. A missing file is created together with FILE.key, which stays
    /// on the server.
    #[arg(long, value_name = "FILE", requires = "listen_hands")]
    pub(crate) join_token_file: Option<PathBuf>,
    /// Network interface for replicas whose ranks do not fit on one machine. Traffic between ranks
    /// is not encrypted. Without the flag the ranks of a replica stay on one machine.
    #[arg(long, value_name = "NAME", value_parser = crate::collectives::interface)]
    pub(crate) collective_interface: Option<String>,
    /// Cluster manager that starts outposts (`forebay worker`) on its machines. `ray` requests one
    /// GPU for each hand from the Ray cluster of this machine or of RAY_ADDRESS; with --device
    /// `cpu`, one processor. Outposts join at this machine's address in the cluster, or at
    /// --listen-hands.
    #[arg(long, value_enum, value_name = "WHO")]
    pub(crate) placement: Option<Placement>,
    /// Processors of this process's threads (`brain`) and of each hand:
    /// `[brain=LIST|]LIST|LIST...`, such as `brain=0-1|2-15|16-31`. One list per replica, or one
    /// for all; `;` separates the lists of a replica's ranks. `auto` divides the cores among the
    /// hands [default: any].
    #[arg(long, value_name = "LISTS")]
    pub(crate) cpu_affinity: Option<AffinityFlag>,
}

/// Flags by which other servers distribute a group over machines. They are recognised, so that
/// command lines written for those servers get a specific error.
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
    /// The first of these flags that was given with a value that is not supported, and the message
    /// that explains why.
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

/// The cluster manager that starts outposts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Placement {
    Ray,
}

impl ReplicaFlags {
    /// The given flag that places hands on other machines; `None`: all hands run on this machine.
    pub(crate) fn elsewhere(&self) -> Option<&'static str> {
        let placed = self.placement.map(|_| "--placement");
        self.listen_hands.map(|_| "--listen-hands").or(placed)
    }

    /// Returns how many replicas, groups and ranks the flags specify.
    ///
    /// # Errors
    /// The flags contradict each other, or need a feature that Forebay lacks.
    pub(crate) fn arrangement(&self) -> Result<Arrangement> {
        if let Some((flag, reason)) = self.unknown.given() {
            bail!("{flag}: {reason}");
        }
        self.ranks.arrangement()
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

    #[test]
    fn what_is_not_there_is_said() {
        for (line, word) in [
            (
                "--nnodes 2 --node-rank 1",
                "--nnodes: other machines run `forebay worker --join HOST:7711 --token-file FILE`",
            ),
            ("--node-rank 1", "--node-rank: other machines run `forebay worker --join"),
            ("--master-addr a", "--master-addr: other machines run `forebay worker --join"),
            ("--dist-init-addr a:1", "--dist-init-addr: other machines run `forebay worker --join"),
            ("--nccl-init-addr a:1", "--dist-init-addr: other machines run `forebay worker --join"),
            ("--pp-size 2", "--pipeline-parallel-size"),
            ("--enable-dp-attention", "--dp-size says how many"),
        ] {
            let told = arrangement(line).expect_err(line);
            assert!(told.contains(word), "{line}: {told}");
        }
        let one = Arrangement { replicas: 1, groups: 1, ranks: 1, expert_parallel: false };
        assert_eq!(arrangement("--nnodes 1 --node-rank 0 --pp-size 1"), Ok(one));
    }
}
