//! Disaggregated prefill in a simulation: requests that leave their prefill replica, loans, and
//! backpressure.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use forebay_balance::Pressure;
use forebay_scheduler::{Loan, LoanId};

use crate::pd::{Division, PdSplit};
use crate::router::Route;
use crate::simulate::Simulation;

/// The state of disaggregated prefill in a simulation.
pub(crate) struct HandOver {
    division: Division,
    pub(crate) pressure: Pressure,
    /// Requests that have left their prefill replica but are not handed on yet, as (replica,
    /// request id).
    left: VecDeque<(usize, u64)>,
    /// Receives returned loans, as (lender, loan).
    returned: Receiver<(usize, LoanId)>,
    /// True while prefill replicas do not admit prompts that will be handed on.
    held: bool,
    pub(crate) holds: u64,
    pub(crate) handed: u64,
    pub(crate) lent_blocks: u64,
}

impl HandOver {
    pub(crate) fn new(
        division: Division,
        replicas: u32,
        returned: Receiver<(usize, LoanId)>,
    ) -> Self {
        Self {
            division,
            pressure: Pressure::new(replicas as usize),
            left: VecDeque::new(),
            returned,
            held: false,
            holds: 0,
            handed: 0,
            lent_blocks: 0,
        }
    }

    /// The split of `replicas` replicas into prefill and decode replicas.
    pub(crate) fn split(&self, replicas: u32) -> PdSplit {
        let prefill = self.division.prefill;
        PdSplit { prefill, decode: replicas - prefill }
    }

    /// Records that a request leaves a prefill replica.
    pub(crate) fn left(&mut self, from: usize, id: u64) {
        self.left.push_back((from, id));
    }
}

impl Simulation {
    /// Hands on requests that have left, takes back returned loans, and holds prompts while decode
    /// replicas are full.
    pub(crate) fn settle(&mut self, now_us: u64) {
        while let Some(handing) = &mut self.handing {
            while let Ok((lender, loan)) = handing.returned.try_recv() {
                self.replicas[lender].take_back(loan);
            }
            let first = handing.division.prefill as usize;
            if let Some((from, id)) = handing.left.pop_front() {
                self.hand_on(from, id, now_us);
                continue;
            }
            let held = handing.pressure.exceeds(|at| at >= first);
            if handing.held == held {
                return;
            }
            handing.held = held;
            handing.holds += u64::from(held);
            for at in 0..first {
                self.replicas[at].hold_leaving(held);
                if !held {
                    self.feed(at, now_us);
                }
            }
        }
    }

    /// Lends a request blocks of another replica, before it is submitted to its own replica.
    pub(crate) fn borrow(&mut self, route: &Route) -> Option<Arc<Loan>> {
        let (lender, first) = route.lender?;
        let loan = self.replicas[lender].lend(route.names.get(first..)?)?;
        self.handing.iter_mut().for_each(|handing| handing.lent_blocks += loan.blocks() as u64);
        Some(loan)
    }

    fn hand_on(&mut self, from: usize, id: u64, now_us: u64) {
        let Some(request) = self.replicas[from].hand_on(id) else { return };
        let to = self.routing.route_on(&request);
        self.lives[id as usize].handed = true;
        if let Some(handing) = &mut self.handing {
            handing.handed += 1;
            handing.lent_blocks += request.loan.as_ref().map_or(0, |loan| loan.blocks() as u64);
            let tokens = (request.prompt.len() + request.generated.len()) as u64;
            handing.pressure.handed(id, to, tokens);
        }
        self.note_room(to);
        self.replicas[to].take(request);
        self.feed(to, now_us);
    }

    /// Records the number of tokens for which a replica still has pages.
    pub(crate) fn note_room(&mut self, at: usize) {
        if let Some(handing) = &mut self.handing {
            handing.pressure.set_room(at, self.replicas[at].room());
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_scheduler::{HostTier, SavePolicy};
    use forebay_sim::{CopyModel, DeviceModel, PageBytes, Timing};
    use proptest::prelude::*;

    use super::*;
    use crate::args::Router;
    use crate::simulate::{Life, PdRun, Run, Setup, run};
    use crate::tests::{MODEL, any_traffic, arrival, check, setup};
    use crate::traffic::Traffic;

    fn apart(model: DeviceModel, prefill: u32, local_tokens: u32) -> Setup {
        let host = HostTier {
            pages: 2000,
            policy: SavePolicy::WriteThrough,
            copies_a_step: 64,
            prefetch: 0,
            restore_preempted: true,
        };
        let copy = CopyModel {
            save_gbps: Some(10.0),
            restore_gbps: Some(10.0),
            bus_gbps: Some(15.0),
            bus_devices: Some(2),
            ..CopyModel::default()
        };
        let bytes = PageBytes { main: 1_000_000, ..PageBytes::default() };
        let division = Some(Division { prefill, local_tokens });
        let timing = Timing { model, copy, bytes, ..Timing::default() };
        Setup { timing, host: Some(host), division, ..setup(model) }
    }

    fn pd(run: &Run) -> PdRun {
        run.pd.expect("a split")
    }

    #[test]
    fn steps_beside_decode_stay_short_while_prompts_are_computed_elsewhere() {
        // Eight requests with long answers, and occasionally a long prompt with a short answer.
        let streams = (0..8_u32).map(|at| arrival(0, 100, 900, &[at]));
        let prompts = (0..20_u32).map(|at| {
            let blocks: Vec<u32> = (0..4).map(|block| 100 + 4 * at + block).collect();
            arrival(200_000 + u64::from(at) * 50_000, 2000, 2, &blocks)
        });
        let traffic = Traffic { arrivals: streams.chain(prompts).collect() };
        let gap = |setup: &Setup| {
            let run = run(setup, &traffic, 2);
            check(&run, &traffic, 16_000);
            (run.itl_us[run.itl_us.len() * 99 / 100], run)
        };
        let split = Setup { pages: 1000, token_budget: 1024, ..apart(MODEL, 1, 128) };
        let both = Setup { division: None, ..split.clone() };
        let ((apart, run), (together, _)) = (gap(&split), gap(&both));
        assert!(2 * apart < together, "{apart} and {together} us");
        assert_eq!(pd(&run).handed, 20);
        // At most half of the host tier is lent at the same time.
        assert!(pd(&run).lent_tokens > 18 * 2000, "{}", pd(&run).lent_tokens);
        // The gap between the first and the second token includes the copies of the prompt and one
        // step.
        let second = |life: &Life| life.second_us - life.first_us;
        let handed = run.lives.iter().filter(|life| life.handed);
        assert!(handed.clone().count() == 20 && handed.clone().all(|life| second(life) > 12_500));
    }

    #[test]
    fn prefill_replicas_borrow_what_others_have() {
        // The same prompt arrives repeatedly, later twice at the same time: then the second prefill
        // replica borrows the blocks of the first.
        let times = [0, 400_000, 400_000, 800_000, 800_000];
        let prompts = times.map(|at_us| arrival(at_us, 2000, 2, &[0, 1, 2, 3]));
        let traffic = Traffic { arrivals: prompts.into() };
        let setup = Setup { router: Router::LeastLoaded, ..apart(MODEL, 2, 0) };
        let run = run(&setup, &traffic, 3);
        check(&run, &traffic, 6400);
        assert_eq!(run.cached_tokens, 4 * 1984);
        assert!(
            run.host_tokens >= 1984,
            "one replica has borrowed the prompt: {}",
            run.host_tokens
        );
    }

    #[test]
    fn prompts_wait_while_decode_replicas_are_full() {
        // A replica's pool has room for two of these requests.
        let prompts = (0..30_u32).map(|at| {
            let blocks: Vec<u32> = (0..4).map(|block| 4 * at + block).collect();
            arrival(0, 2000, 400, &blocks)
        });
        let traffic = Traffic { arrivals: prompts.collect() };
        let run = run(&apart(MODEL, 2, 0), &traffic, 3);
        check(&run, &traffic, 6400);
        assert!(pd(&run).holds > 3, "{}", pd(&run).holds);
        assert_eq!(pd(&run).handed, 30);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn every_request_ends_once_with_prefill_apart(
            traffic in any_traffic(),
            (replicas, prefill) in (2..6_u32).prop_flat_map(|all| (Just(all), 1..all)),
            pages in 10..120_u32,
            host_pages in 1..200_u32,
            local_tokens in prop::sample::select(vec![0, 500]),
        ) {
            let model = DeviceModel { jitter_sigma: 0.1, ..MODEL };
            let mut setup = Setup { pages, ..apart(model, prefill, local_tokens) };
            setup.host.iter_mut().for_each(|host| host.pages = host_pages);
            let first = run(&setup, &traffic, replicas);
            check(&first, &traffic, u64::from(pages) * u64::from(setup.page_size));
            let second = run(&setup, &traffic, replicas);
            prop_assert_eq!(first.lives, second.lives);
            prop_assert_eq!(first.pd, second.pd);
        }
    }
}
