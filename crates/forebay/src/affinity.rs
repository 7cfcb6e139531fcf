//! The processors that the brain and the hands run on.

use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// The value of `--cpu-affinity`, in the notation of vLLM's and SGLang's CPU backends. It is lists
/// of processors as in taskset, with `|` between replicas, and `;` between the ranks of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AffinityFlag {
    /// The hands get equal parts of the processors that the process may use.
    Auto,
    /// `[brain=LIST|]LIST[;LIST...][|LIST[;LIST...]...]`
    Lists {
        /// The processors of the brain; empty: any.
        brain: Vec<usize>,
        /// The processors of each replica's ranks.
        replicas: Vec<Vec<Vec<usize>>>,
    },
}

/// Processors by number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Affinity {
    /// The processors of all threads of the brain; empty: any.
    pub(crate) brain: Vec<usize>,
    /// The processors of each hand, replica by replica and rank by rank; none: any.
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

/// `0-3,8` is 0, 1, 2, 3 and 8.
fn cpu_list(text: &str) -> Result<Vec<usize>, String> {
    let wrong = || format!("`{text}` is not a list of processors such as 0-3,8");
    let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
    let mut cpus = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last >= CpuSet::MAX_CPU {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    Ok(cpus.into_iter().collect())
}

impl AffinityFlag {
    /// The processors of each of the `ranks` hands of `replicas` replicas.
    pub(crate) fn resolve(&self, replicas: u32, ranks: u32) -> Result<Affinity> {
        let (of_each, ranks) = (replicas as usize, ranks as usize);
        let count = of_each * ranks;
        let allowed = allowed()?;
        match self {
            Self::Auto => {
                let cores = cores(&allowed);
                let each = cores.len() / count;
                ensure!(each > 0, "--cpu-affinity auto: {} cores for {count} hands", cores.len());
                let hands = cores.chunks(each).take(count).map(<[_]>::concat).collect();
                Ok(Affinity { brain: Vec::new(), hands })
            }
            Self::Lists { brain, replicas } => {
                /// Makes `count` values of `given`, which are as many, or one for all.
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
                let all = || brain.iter().chain(hands.iter().flatten());
                if let Some(cpu) = all().find(|cpu| !allowed.contains(cpu)) {
                    bail!("--cpu-affinity: the process may not run on processor {cpu}");
                }
                Ok(Affinity { brain: brain.clone(), hands })
            }
        }
    }
}

/// Keeps this thread, and all that it starts from now on, on these processors.
pub(crate) fn pin(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set).context("--cpu-affinity")
}

/// Compute threads of each of several hands without processors of their own: equal parts of the
/// cores.
pub(crate) fn threads_each(replicas: u32) -> Result<u32> {
    let cores = u32::try_from(core_count()?).unwrap_or(u32::MAX);
    Ok((cores / replicas).max(1))
}

/// Cores that this process may use.
pub(crate) fn core_count() -> Result<usize> {
    Ok(cores(&allowed()?).len())
}

fn allowed() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("the processors of this process")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Processors by core: hardware threads of one core belong together.
fn cores(cpus: &[usize]) -> Vec<Vec<usize>> {
    let siblings = |cpu: usize| {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let text = std::fs::read_to_string(Path::new(&file)).ok()?;
        cpu_list(text.trim()).ok()
    };
    let mut cores: Vec<Vec<usize>> = Vec::new();
    let mut seen: BTreeSet<usize> = BTreeSet::new();
    for &cpu in cpus {
        if seen.contains(&cpu) {
            continue;
        }
        let of_core = siblings(cpu).unwrap_or_else(|| vec![cpu]);
        let core: Vec<usize> = of_core.into_iter().filter(|other| cpus.contains(other)).collect();
        seen.extend(&core);
        cores.push(core);
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<AffinityFlag, String> {
        text.parse()
    }

    #[test]
    fn lists_are_read_as_taskset_reads_them() {
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
        let all = allowed().expect("processors");
        let first = all[0];
        let one = parse(&first.to_string()).expect("a list");
        assert_eq!(one.resolve(3, 1).expect("fits").hands, vec![vec![first]; 3]);
        let two = parse(&format!("{first}|{first}")).expect("lists");
        assert!(two.resolve(2, 1).is_ok() && two.resolve(3, 1).is_err());
        assert_eq!(two.resolve(2, 2).expect("one list for the ranks of each").hands.len(), 4);
        let ranks = parse(&format!("{first};{first}")).expect("lists");
        assert!(ranks.resolve(1, 2).is_ok() && ranks.resolve(3, 2).is_ok());
        assert!(ranks.resolve(1, 3).is_err());
        let away = (0..CpuSet::MAX_CPU).find(|cpu| !all.contains(cpu)).expect("not all");
        assert!(parse(&away.to_string()).expect("a list").resolve(1, 1).is_err());
    }

    #[test]
    fn equal_parts_overlap_nowhere() {
        let count = u32::try_from(cores(&allowed().expect("processors")).len()).expect("few");
        let parts = AffinityFlag::Auto.resolve(1, count).expect("a core each").hands;
        let cpus: Vec<usize> = parts.concat();
        assert_eq!(cpus.iter().collect::<BTreeSet<_>>().len(), cpus.len());
        assert!(AffinityFlag::Auto.resolve(count + 1, 1).is_err());
        assert_eq!(threads_each(count).expect("cores"), 1);
    }
}
