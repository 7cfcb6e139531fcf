//! Groups requests by client and prompt length, and measures how long the requests of each group
//! wait for those of the others.
//!
//! While a request waits for its first token, its replica computes prompts of other requests. For
//! each pair of groups, this counts the second group's prompt tokens that are computed while a
//! request of the first group waits. The mean shows how long the first group waits for the second.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::outcome::Latency;
use crate::traffic::{Arrival, Traffic};

/// The largest prompt length of each class. Longer prompts form one more class.
const CLASSES: [u32; 3] = [1024, 8192, 65_536];
/// The largest number of groups by client. If there would be more, groups are by length only.
const MOST: usize = 12;

/// The client and the length class of a group's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    client: Option<u64>,
    class: usize,
}

/// The groups, and the assignment of requests to them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Groups {
    kinds: Vec<Kind>,
    /// The index of each request's group.
    of: Vec<usize>,
}

impl Groups {
    pub(crate) fn new(traffic: &Traffic) -> Self {
        let class = |input| CLASSES.iter().position(|&most| input <= most).unwrap_or(CLASSES.len());
        let kinds_of = |by_client: bool| {
            let kind = move |arrival: &Arrival| Kind {
                client: by_client.then_some(arrival.client),
                class: class(arrival.input),
            };
            traffic.arrivals.iter().map(kind)
        };
        let kinds = |by_client| kinds_of(by_client).collect::<BTreeSet<Kind>>();
        let by_client = kinds(true).len() <= MOST;
        let kinds: Vec<Kind> = kinds(by_client).into_iter().collect();
        let of = kinds_of(by_client).map(|kind| kinds.partition_point(|&other| other < kind));
        Self { of: of.collect(), kinds }
    }
}

/// The prompt tokens that replicas computed while requests waited.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waits {
    groups: Groups,
    /// Prompt tokens computed so far, by replica and group.
    computed: Vec<Vec<u64>>,
    /// For each request: the counts of its replica at the request's arrival, and the prompt tokens
    /// of the request that were computed so far.
    since: Vec<(Vec<u64>, u64)>,
    /// For each pair of groups: prompt tokens of the second group that were computed while requests
    /// of the first group waited.
    waited: Vec<Vec<u64>>,
}

impl Waits {
    pub(crate) fn new(groups: Groups, replicas: u32) -> Self {
        let kinds = groups.kinds.len();
        Self {
            computed: vec![vec![0; kinds]; replicas as usize],
            since: vec![(Vec::new(), 0); groups.of.len()],
            waited: vec![vec![0; kinds]; kinds],
            groups,
        }
    }

    /// Records that a request starts to wait at a replica.
    pub(crate) fn arrived(&mut self, id: u64, at: usize) {
        self.since[id as usize] = (self.computed[at].clone(), 0);
    }

    /// Records that a replica has computed tokens of a request's prompt.
    pub(crate) fn prefilled(&mut self, id: u64, at: usize, tokens: u32) {
        self.computed[at][self.groups.of[id as usize]] += u64::from(tokens);
        self.since[id as usize].1 += u64::from(tokens);
    }

    /// Records that a request has got its first token.
    pub(crate) fn first_token(&mut self, id: u64, at: usize) {
        let group = self.groups.of[id as usize];
        let (since, own) = std::mem::take(&mut self.since[id as usize]);
        for (other, &before) in since.iter().enumerate() {
            let own = if other == group { own } else { 0 };
            let others = self.computed[at][other].saturating_sub(before + own);
            self.waited[group][other] += others;
        }
    }

    /// The outcome of each group. `latency` computes the latencies of the requests with these ids.
    pub(crate) fn outcomes(&self, latency: impl Fn(&[usize]) -> Latency) -> Vec<GroupOutcome> {
        let kinds = self.groups.kinds.iter().enumerate();
        let outcomes = kinds.map(|(group, kind)| {
            let of = self.groups.of.iter().enumerate().filter(|&(_, &of)| of == group);
            let members: Vec<usize> = of.map(|(id, _)| id).collect();
            let mean = |&tokens: &u64| tokens as f64 / members.len().max(1) as f64;
            GroupOutcome {
                client: kind.client,
                prompts_from: kind.class.checked_sub(1).map_or(1, |below| CLASSES[below] + 1),
                prompts_to: CLASSES.get(kind.class).copied(),
                requests: members.len(),
                ttft_ms: latency(&members),
                waited_for_tokens: self.waited[group].iter().map(mean).collect(),
            }
        });
        outcomes.collect()
    }
}

/// The outcome of a group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct GroupOutcome {
    /// The client; `None`: there are so many groups that requests are grouped by length only.
    client: Option<u64>,
    /// The smallest prompt length of the group's length class, in tokens.
    prompts_from: u32,
    /// The largest prompt length of the class, in tokens; `None`: there is no limit.
    prompts_to: Option<u32>,
    requests: usize,
    /// Time to the first token.
    ttft_ms: Latency,
    /// By the index of the other group: the mean number of its prompt tokens that were computed
    /// while a request of this group waited for its first token. The request's own tokens do not
    /// count.
    waited_for_tokens: Vec<f64>,
}

/// Prints the groups of an outcome, and how long they wait for each other, unless there is only
/// one.
pub(crate) fn print(groups: &[GroupOutcome]) {
    if groups.len() < 2 {
        return;
    }
    println!("\nGroups of requests, and the prompt tokens of others that one waits for:");
    let names: Vec<String> = (1..=groups.len()).map(|number| format!("of {number}")).collect();
    let columns: String = names.iter().map(|name| format!(" {name:>8}")).collect();
    println!(
        "{:>2}  {:>8}  {:>14}  {:>8}  {:>8} {:>8} {:>8} {columns}",
        "", "client", "prompt tokens", "requests", "TTFT p50", "p90", "p99"
    );
    for (number, group) in (1..).zip(groups) {
        let ms = |value: Option<f64>| value.map_or("never".to_owned(), |ms| format!("{ms:.0}"));
        let client = group.client.map_or("any".to_owned(), |client| client.to_string());
        let to = group.prompts_to.map_or("more".to_owned(), |to| to.to_string());
        let waits: String = group.waited_for_tokens.iter().map(|t| format!(" {t:>8.0}")).collect();
        println!(
            "{number:>2}  {client:>8}  {:>14}  {:>8}  {:>8} {:>8} {:>8} {waits}",
            format!("{}-{to}", group.prompts_from),
            group.requests,
            ms(group.ttft_ms.p50),
            ms(group.ttft_ms.p90),
            ms(group.ttft_ms.p99),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn arrival(client: u64, input: u32) -> Arrival {
        let (blocks, images) = (Vec::new(), Arc::default());
        Arrival { at_us: 0, input, output: 1, blocks, images, client }
    }

    #[test]
    fn a_request_waits_for_what_others_compute_meanwhile() {
        let arrivals = vec![arrival(7, 100_000), arrival(8, 200), arrival(8, 1024)];
        let groups = Groups::new(&Traffic { arrivals });
        let mut waits = Waits::new(groups, 1);
        waits.arrived(0, 0);
        waits.prefilled(0, 0, 5000);
        waits.arrived(1, 0);
        waits.arrived(2, 0);
        waits.prefilled(0, 0, 1000);
        waits.prefilled(1, 0, 200);
        waits.first_token(1, 0);
        waits.prefilled(2, 0, 1024);
        waits.first_token(2, 0);
        let outcomes = waits.outcomes(|_| Latency::default());
        let long = |outcome: &GroupOutcome| (outcome.client, outcome.prompts_from);
        assert_eq!(
            outcomes.iter().map(long).collect::<Vec<_>>(),
            [(Some(7), 65_537), (Some(8), 1)]
        );
        // The second request waits for 1000 tokens of the long request. The third also waits for
        // 200 tokens of the second request, which is in its group.
        assert_eq!(outcomes[1].waited_for_tokens, [1000.0, 100.0]);
    }

    #[test]
    fn many_clients_are_grouped_by_length_only() {
        let arrivals = (0..30).map(|client| arrival(client, 200)).collect();
        let groups = Groups::new(&Traffic { arrivals });
        assert_eq!(groups.kinds, [Kind { client: None, class: 0 }]);
    }
}
