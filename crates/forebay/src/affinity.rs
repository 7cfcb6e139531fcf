//! Binds the brain and the hands to processors.

use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use forebay_machine::{Processors, cpu_list};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;

/// The value of `--cpu-affinity`, in the notation of vLLM's and SGLang's CPU backends. It has lists
/// of processors as for taskset, separated by `|` between replicas and by `;` between the ranks of
/// a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AffinityFlag {
    /// Divides the processors that the process may use equally among the hands.
    Auto,
    /// `[brain=LIST|]LIST[;LIST...][|LIST[;LIST...]...]`
    Lists {
        /// The processors of the brain; empty: no restriction.
        brain: Vec<usize>,
        /// The processors of each rank, by replica.
        replicas: Vec<Vec<Vec<usize>>>,
    },
}

/// Lists of processors, by processor number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Affinity {
    /// The processors of all threads of the brain; empty: no restriction.
    pub(crate) brain: Vec<usize>,
    /// The processors of each hand, by replica and rank; empty: no restriction.
    pub(crate) hands: Vec<Vec<usize>>,
}

impl FromStr for AffinityFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let mut lists = text.split('|').peekable();
        let brain = lists.peek().and_then(|first| first.trim().strip_prefix("brain="));
        let brain = brain.map(cpu_list).transpose()?.unwrap_or_default();
        if !brain.is_empty() {
            lists.next();
        }
        let ranks = |lists: &str| lists.split(';').map(cpu_list).collect::<Result<Vec<_>, _>>();
        let replicas = lists.map(ranks).collect::<Result<Vec<_>, _>>()?;
        if replicas.is_empty() {
            return Err("expected the hands' processors after those of the brain".into());
        }
        Ok(Self::Lists { brain, replicas })
    }
}

impl AffinityFlag {
    /// Returns the processors of each hand, for `replicas` replicas of `ranks` hands each.
    pub(crate) fn resolve(
        &self,
        processors: &Processors,
        replicas: u32,
        ranks: u32,
    ) -> Result<Affinity> {
        let (of_each, ranks) = (replicas as usize, ranks as usize);
        let count = of_each * ranks;
        let cores = &processors.cores;
        match self {
            Self::Auto => {
                let each = cores.len() / count;
                ensure!(
                    each > 0,
                    "--cpu-affinity auto needs a core for each hand: {} cores, {count} hands",
                    cores.len()
                );
                let hands = cores.chunks(each).take(count).map(<[_]>::concat).collect();
                Ok(Affinity { brain: Vec::new(), hands })
            }
            Self::Lists { brain, replicas } => {
                /// Extends `given` to `count` values. `given` must have `count` values, or one
                /// value for all.
                fn spread<T: Clone>(given: &[T], count: usize, of: &str) -> Result<Vec<T>> {
                    match given {
                        [one] => Ok(vec![one.clone(); count]),
                        _ if given.len() == count => Ok(given.to_vec()),
                        _ => bail!("--cpu-affinity: {} lists for {count} {of}", given.len()),
                    }
                }
                let mut hands = Vec::with_capacity(count);
                for given in spread(replicas, of_each, "replicas")? {
                    hands.extend(spread(&given, ranks, "ranks")?);
                }
                let mut all = brain.iter().chain(hands.iter().flatten());
                let own: Vec<&usize> = cores.iter().flatten().collect();
                if let Some(cpu) = all.find(|cpu| !own.contains(cpu)) {
                    bail!("--cpu-affinity: the process may not run on processor {cpu}");
                }
                Ok(Affinity { brain: brain.clone(), hands })
            }
        }
    }
}

/// Binds the calling thread, and all threads that it will start, to these processors.
pub(crate) fn pin(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set).context("--cpu-affinity")
}

/// The number of compute threads of each hand, if hands are not bound to processors: the cores,
/// within the CPU quota, are divided equally.
pub(crate) fn threads_each(processors: &Processors, hands: u32) -> u32 {
    let threads = u32::try_from(processors.threads()).unwrap_or(u32::MAX);
    (threads / hands).max(1)
}

impl Affinity {
    /// The number of compute threads of each hand, if the CPU quota is smaller than the number of
    /// the hands' cores. `None`: each hand uses all its cores.
    pub(crate) fn threads(&self, processors: &Processors) -> Option<u32> {
        let cores = |cpus: &Vec<usize>| {
            let own = processors.cores.iter();
            own.filter(|core| core.iter().any(|cpu| cpus.contains(cpu))).count()
        };
        let counts: Vec<usize> = self.hands.iter().map(cores).collect();
        let (all, least) = (counts.iter().sum::<usize>(), counts.iter().min()?);
        let each = threads_each(processors, u32::try_from(counts.len()).ok()?);
        let paid = processors.quota.is_some_and(|quota| quota.ceil() < all as f64);
        paid.then(|| each.min(u32::try_from(*least).unwrap_or(u32::MAX)).max(1))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn parse(text: &str) -> Result<AffinityFlag, String> {
        text.parse()
    }

    /// Four cores with two hardware threads each.
    fn processors(quota: Option<f64>) -> Processors {
        Processors { cores: (0..4).map(|core| vec![core, core + 4]).collect(), quota }
    }

    #[test]
    fn lists_are_those_of_replicas_and_ranks() {
        let lists = |brain: &[usize], hands: &[&[usize]]| {
            let replicas = hands.iter().map(|list| vec![list.to_vec()]).collect();
            Ok(AffinityFlag::Lists { brain: brain.to_vec(), replicas })
        };
        assert_eq!(parse("auto"), Ok(AffinityFlag::Auto));
        assert_eq!(parse("0-2,5"), lists(&[], &[&[0, 1, 2, 5]]));
        assert_eq!(parse("brain=0|1-2|3,3"), lists(&[0], &[&[1, 2], &[3]]));
        let of_ranks = vec![vec![vec![1], vec![2]], vec![vec![3], vec![4, 5]]];
        let ranks = AffinityFlag::Lists { brain: vec![0], replicas: of_ranks };
        assert_eq!(parse("brain=0|1;2|3;4-5"), Ok(ranks));
        for wrong in ["", "x", "1;", "3-1", "0|", "brain=0", "brain=|1", "0-99999", "-1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_hand_gets_a_list() {
        let processors = processors(None);
        let resolve = |text: &str, replicas, ranks| {
            parse(text).expect("lists").resolve(&processors, replicas, ranks)
        };
        assert_eq!(resolve("1", 3, 1).expect("fits").hands, vec![vec![1]; 3]);
        assert!(resolve("1|2", 2, 1).is_ok() && resolve("1|2", 3, 1).is_err());
        assert_eq!(resolve("1|2", 2, 2).expect("one list for the ranks of each").hands.len(), 4);
        assert!(resolve("1;2", 1, 2).is_ok() && resolve("1;2", 3, 2).is_ok());
        assert!(resolve("1;2", 1, 3).is_err());
        let error = resolve("8", 1, 1).expect_err("there is none").to_string();
        assert!(error.ends_with("the process may not run on processor 8"), "{error}");
    }

    #[test]
    fn equal_parts_overlap_nowhere() {
        let processors = processors(None);
        let parts = AffinityFlag::Auto.resolve(&processors, 1, 4).expect("a core each").hands;
        let cpus: Vec<usize> = parts.concat();
        assert_eq!(cpus.iter().collect::<BTreeSet<_>>().len(), 8);
        assert_eq!(parts[1], [1, 5]);
        assert!(AffinityFlag::Auto.resolve(&processors, 5, 1).is_err());
    }

    #[test]
    fn hands_share_the_time_that_there_is() {
        let each = |quota, hands| threads_each(&processors(quota), hands);
        assert_eq!((each(None, 2), each(None, 4), each(None, 9)), (2, 1, 1));
        assert_eq!((each(Some(3.0), 1), each(Some(3.0), 2), each(Some(0.5), 2)), (3, 1, 1));
        let pinned = |quota| {
            let processors = processors(quota);
            let affinity = AffinityFlag::Auto.resolve(&processors, 2, 1).expect("fits");
            affinity.threads(&processors)
        };
        assert_eq!(pinned(None), None, "each worker takes its cores");
        assert_eq!(pinned(Some(4.0)), None);
        assert_eq!((pinned(Some(2.0)), pinned(Some(0.5))), (Some(1), Some(1)));
        assert_eq!(Affinity::default().threads(&processors(Some(0.5))), None);
    }
}
