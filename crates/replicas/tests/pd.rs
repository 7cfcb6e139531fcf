//! Separate prefill and decode replicas, on simulated hands with host tiers, in real time.
//! Whichever hand dies, every request ends once, generates the same tokens as when it runs alone,
//! and leaves no page lent.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use forebay_engine::{
    EngineConfig, EngineRequest, EngineThread, FinishReason, HostConfig, Loan, Output, Preference,
    RequestId, Status,
};
use forebay_replicas::{
    Listeners, LocalReason, Member, PdConfig, ReplicaReport, Replicas, ReplicasConfig, Role,
};
use forebay_sim::testing::{ChannelSink, PATIENCE, Story, VOCAB, alone, request, tell, text};
use forebay_sim::{
    CopyModel, DeviceModel, PageBytes, SimClock, SimConfig, SimControl, SimExecutor, Timing,
};

/// Twice the pages of all prompts of a test, because at most half of the pages may be lent at a
/// time.
const HOST_PAGES: u32 = 6000;

struct Rig {
    replicas: Replicas,
    controls: Vec<SimControl>,
    outputs: Receiver<Vec<Output>>,
    stories: HashMap<u64, Story>,
    prompts: HashMap<u64, (Vec<i32>, u32)>,
    _threads: Vec<EngineThread>,
}

impl Rig {
    fn start(prefill: u32, decode: u32, local_tokens: u32, host_pages: u32) -> Self {
        Self::with(prefill, decode, local_tokens, host_pages, [2000; 2], 0.02)
    }

    /// Starts replicas. `pages` is the number of hot pages of each prefill replica, and of each
    /// decode replica. `gbps` is the speed of copies. At 1 GB/s, a copy of a page takes a sixth of
    /// the time that computing its tokens takes.
    fn with(
        prefill: u32,
        decode: u32,
        local_tokens: u32,
        host_pages: u32,
        pages: [u32; 2],
        gbps: f64,
    ) -> Self {
        let clock = SimClock::real();
        let (sender, outputs) = channel();
        let (mut members, mut controls) = (Vec::new(), Vec::new());
        for at in 0..prefill + decode {
            let (executor, control) = SimExecutor::new(SimConfig {
                clock: clock.clone(),
                timing: Timing {
                    model: DeviceModel { step_us: 100.0, ..DeviceModel::INSTANT },
                    copy: CopyModel {
                        save_gbps: Some(gbps),
                        restore_gbps: Some(gbps),
                        latency_us: 0.0,
                        ..CopyModel::default()
                    },
                    bytes: PageBytes { main: 1000, ..PageBytes::default() },
                    ..Timing::default()
                },
                load_us: 1000,
                host_pages,
                page_count: pages[usize::from(at >= prefill)],
                vocab_size: VOCAB,
                text: text(),
                ..SimConfig::default()
            });
            controls.push(control);
            let config = EngineConfig {
                max_running_requests: 16,
                slots: 24,
                page_size: 4,
                chunked_prefill_size: 64,
                max_queued_requests: 1000,
                context_length: 400,
                watchdog_timeout: Duration::from_secs(60),
                load_timeout: Duration::ZERO,
                mask_threads: 0,
                hand_restarts: 1000,
                host_tier: (host_pages > 0).then(HostConfig::default),
                ..EngineConfig::default()
            };
            let sink = Box::new(ChannelSink::new(sender.clone()));
            let replicas = vec![Listeners { sink, blocks: None }];
            members.push(Member { config, executor: Box::new(executor), replicas });
        }
        let pd = Some(PdConfig { prefill, local_tokens });
        let how = ReplicasConfig { pd, ..ReplicasConfig::default() };
        let started = Replicas::start(how, members, Arc::new(clock), || {});
        let (replicas, _threads) = started.expect("threads");
        let (stories, prompts) = (HashMap::new(), HashMap::new());
        let rig = Self { replicas, controls, outputs, stories, prompts, _threads };
        rig.until(|all| all.iter().all(|report| report.status == Status::Ready));
        rig
    }

    /// Polls until the reports satisfy `wanted`, because no event announces a new report.
    fn until(&self, wanted: impl Fn(&[ReplicaReport]) -> bool) {
        let began = Instant::now();
        while !wanted(&self.replicas.reports()) {
            assert!(began.elapsed() < PATIENCE, "{:?}", self.replicas.reports());
            std::thread::yield_now();
        }
    }

    fn submit(&mut self, id: u64, prompt: Vec<i32>, max_tokens: u32) {
        self.send(request(id, prompt.clone(), max_tokens), prompt, max_tokens);
    }

    fn send(&mut self, request: EngineRequest, prompt: Vec<i32>, max_tokens: u32) {
        self.prompts.insert(request.id().0, (prompt, max_tokens));
        self.replicas.submit(request).expect("room");
    }

    fn next(&mut self) -> usize {
        let outputs = self.outputs.recv_timeout(PATIENCE).expect("outputs");
        tell(&mut self.stories, outputs).len()
    }

    fn follow(&mut self, mut count: usize) {
        while count > 0 {
            count -= self.next();
        }
    }

    /// Checks that every request generated the same tokens as when it runs alone, or the first of
    /// them if it was aborted.
    fn assert_exact(&self) {
        for (id, (prompt, max_tokens)) in &self.prompts {
            let (story, whole) = (&self.stories[id], alone(prompt.clone(), *max_tokens));
            if story.end == Some(FinishReason::Abort) {
                assert!(whole.starts_with(&story.tokens), "request {id}");
            } else {
                assert_eq!(story.tokens, whole, "request {id}");
                assert_eq!(story.end, Some(FinishReason::Length), "request {id}");
            }
        }
    }

    /// Waits until `count` requests have ended. After every 20 outputs, sets the role of the next
    /// replica in `changes`.
    fn follow_with_roles(&mut self, mut count: usize, changes: &[(usize, Role)]) {
        let mut outputs = 0;
        while count > 0 {
            count -= self.next();
            outputs += 1;
            if outputs % 20 == 0 {
                let (at, role) = changes[outputs / 20 % changes.len()];
                assert!(self.replicas.set_role(at, role));
            }
        }
    }

    /// Checks that no page is lent or held, and no copy is in flight.
    fn assert_idle(&self) {
        self.until(|all| {
            all.iter().all(|report| {
                let stats = &report.stats.scheduler;
                report.status == Status::Ready
                    && stats.host.lent_pages == 0
                    && stats.host.copies_outstanding == 0
                    && stats.running + stats.waiting + stats.pages_held == 0
                    && report.load.requests == 0
                    && report.ahead_tokens == 0
            })
        });
    }

    fn handed(&self) -> u64 {
        self.replicas.reports().iter().map(|report| report.stats.hand.handed).sum()
    }

    fn local(&self, reason: LocalReason) -> u64 {
        self.replicas.reports().iter().map(|report| report.local.of(reason)).sum()
    }
}

/// Returns the prompt of request `id`. Some prompts have a common prefix.
fn prompt(id: u64) -> Vec<i32> {
    let length = 1 + (id as usize * 37) % 120;
    let common = (id % 3) as i32;
    (0..length as i32)
        .map(|at| if at < 40 { common + at } else { id as i32 * 7 + at } % 1000)
        .collect()
}

#[test]
fn tokens_are_those_of_one_replica() {
    for (prefill, decode) in [(1, 1), (1, 2), (2, 1)] {
        let mut rig = Rig::start(prefill, decode, 0, HOST_PAGES);
        for id in 0..100 {
            rig.submit(id, prompt(id), 1 + (id as u32 * 13) % 60);
        }
        rig.follow(100);
        rig.assert_exact();
        rig.assert_idle();
        let single = (0..100).filter(|id| (id * 13) % 60 == 0).count() as u64;
        assert_eq!(rig.handed(), 100 - single, "all requests but those of one token are handed on");
        let reports = rig.replicas.reports();
        let (prefills, decodes) = reports.split_at(prefill as usize);
        let restored = |r: &ReplicaReport| r.stats.scheduler.host.blocks_restored;
        assert!(
            decodes.iter().map(restored).sum::<u64>() > 100,
            "the decode replicas borrow blocks"
        );
        for report in prefills {
            let steps = report.stats.scheduler.generated_tokens;
            assert!(steps <= 100, "{steps}: the prefill replicas generate one token of each");
        }
        for report in decodes {
            let stats = &report.stats;
            assert_eq!((stats.hand.replayed, stats.scheduler.recomputed_tokens), (0, 0));
            let computed = stats.scheduler.prompt_tokens;
            assert!(computed < 4 * 100, "{computed}: at most the tokens that are on no full page");
        }
    }
}

/// Blocks that another server has computed are borrowed like those of a replica.
#[test]
fn a_loan_of_another_server_is_restored_and_comes_back() {
    let mut rig = Rig::start(1, 1, 30, HOST_PAGES);
    let prompt: Vec<i32> = (0..100).collect();
    let mut asked = request(1, prompt.clone(), 5);
    let names = rig.replicas.block_names(asked.request.cache_salt, &prompt);
    let pages = names[..24].iter().copied().zip(0..).collect();
    let (back, has_come_back) = channel();
    let give_back = Box::new(move || back.send(()).expect("the test waits"));
    asked.request.loan = Some(Arc::new(Loan::new(2, pages, give_back)));
    asked.request.past.handed = true;
    rig.send(asked, prompt, 5);
    rig.follow(1);
    has_come_back.recv_timeout(PATIENCE).expect("the loan is given back");
    rig.assert_exact();
    rig.assert_idle();
    // The loan leaves only a few tokens to compute, so a decode replica serves the request without
    // a prefill replica.
    assert_eq!(rig.local(LocalReason::Short), 1);
    let stats = rig.replicas.reports()[1].stats;
    assert_eq!((stats.scheduler.host.blocks_restored, stats.scheduler.prompt_tokens), (24, 4));
    assert_eq!(stats.hand.replayed, 0);
}

#[test]
fn what_is_nearly_cached_or_named_or_alone_stays() {
    let mut rig = Rig::start(1, 1, 30, HOST_PAGES);
    rig.submit(1, (0..20).collect(), 5);
    rig.follow(1);
    assert_eq!((rig.handed(), rig.local(LocalReason::Short)), (0, 1));
    rig.submit(2, (100..200).collect(), 5);
    rig.follow(1);
    assert_eq!((rig.handed(), rig.local(LocalReason::Short)), (1, 1));
    let mut named = request(3, (200..300).collect(), 5);
    named.preference = Preference { replica: Some(0), ..Preference::default() };
    rig.send(named, (200..300).collect(), 5);
    rig.follow(1);
    assert_eq!((rig.handed(), rig.local(LocalReason::Named)), (1, 1));
    // By now the decode replica has the blocks of the second request.
    rig.submit(4, (100..200).collect(), 5);
    rig.follow(1);
    assert_eq!((rig.handed(), rig.local(LocalReason::Short)), (1, 2));
    rig.replicas.drain_replica(0, true);
    rig.submit(5, (300..400).collect(), 5);
    rig.follow(1);
    assert_eq!(rig.local(LocalReason::NoPrefill), 1);
    rig.replicas.drain_replica(0, false);
    rig.replicas.drain_replica(1, true);
    rig.submit(6, (400..500).collect(), 5);
    rig.follow(1);
    assert_eq!(rig.local(LocalReason::NoDecode), 1);
    rig.assert_exact();
    rig.assert_idle();
}

#[test]
fn without_host_pages_everything_is_computed_and_nothing_is_lost() {
    for host_pages in [0, 8] {
        let mut rig = Rig::start(1, 1, 0, host_pages);
        for id in 0..40 {
            rig.submit(id, prompt(id), 2 + (id as u32 * 13) % 60);
        }
        rig.follow(40);
        rig.assert_exact();
        rig.assert_idle();
        assert_eq!(rig.handed(), 40);
    }
}

#[test]
fn copies_that_fail_cost_time_only() {
    let mut rig = Rig::start(1, 1, 0, HOST_PAGES);
    for control in &rig.controls {
        control.fail_copies(300);
    }
    for id in 0..60 {
        rig.submit(id, prompt(id), 2 + (id as u32 * 13) % 60);
    }
    rig.follow(60);
    rig.assert_exact();
    rig.assert_idle();
    let failed = |at: usize| rig.replicas.reports()[at].stats.scheduler.host.copies_failed;
    assert!(failed(0) > 0 && failed(1) > 0, "{} and {}", failed(0), failed(1));
}

#[test]
fn aborted_requests_end_wherever_they_are() {
    let mut rig = Rig::start(1, 2, 0, HOST_PAGES);
    for id in 0..200 {
        rig.submit(id, prompt(id), 60);
        if id >= 5 {
            rig.replicas.abort(RequestId(id - 5));
        }
    }
    rig.follow(200);
    rig.assert_exact();
    rig.assert_idle();
}

#[test]
fn the_next_turn_borrows_back_what_decode_replicas_have() {
    for prefill in [1, 2] {
        let mut rig = Rig::with(prefill, 1, 0, HOST_PAGES, [2000; 2], 1.0);
        let mut said: Vec<i32> = (0..100).collect();
        for turn in 0..4 {
            rig.submit(turn, said.clone(), 42);
            rig.follow(1);
            // Wait until all saves have finished.
            rig.assert_idle();
            let cached = rig.stories[&turn].cached_tokens as usize;
            // The last generated token of the previous turn was not computed.
            let known = if turn == 0 { 0 } else { said.len() - 10 - 1 };
            assert_eq!(cached, known / 4 * 4, "turn {turn} with {prefill} prefill replicas");
            said.extend(&rig.stories[&turn].tokens);
            said.extend((0..10).map(|at| 500 + at + turn as i32));
        }
        rig.assert_exact();
        let reports = rig.replicas.reports();
        let computed: u64 = reports[..prefill as usize]
            .iter()
            .map(|report| report.stats.scheduler.prompt_tokens)
            .sum();
        // Each turn computes its new tokens, and earlier tokens that are not on a full page.
        assert!((130..=100 + 3 * 14).contains(&computed), "{computed} were computed");
        assert_eq!(rig.handed(), 4);
    }
}

#[test]
fn a_prefill_replica_borrows_from_another_one() {
    let mut rig = Rig::start(2, 1, 0, HOST_PAGES);
    rig.submit(0, (0..200).collect(), 2);
    rig.follow(1);
    rig.assert_idle();
    // The replica with the blocks takes no new requests, so the other one serves this request.
    let has = usize::from(rig.replicas.reports()[0].stats.scheduler.prompt_tokens == 0);
    rig.replicas.drain_replica(has, true);
    rig.replicas.drain_replica(2, true);
    rig.submit(1, (0..250).collect(), 2);
    rig.follow(1);
    assert_eq!(rig.stories[&1].cached_tokens, 200);
    rig.replicas.drain_replica(has, false);
    rig.replicas.drain_replica(2, false);
    rig.assert_exact();
    rig.assert_idle();
}

#[test]
fn requests_that_are_aborted_while_they_borrow_end() {
    let mut rig = Rig::start(1, 1, 0, HOST_PAGES);
    let first: Vec<i32> = (0..200).collect();
    rig.submit(0, first.clone(), 40);
    rig.follow(1);
    rig.assert_idle();
    let said = [first, rig.stories[&0].tokens.clone()].concat();
    for id in 1..100 {
        rig.submit(id, [&said[..], &[id as i32; 20]].concat(), 60);
        rig.replicas.abort(RequestId(id));
    }
    rig.follow(99);
    rig.assert_exact();
    rig.assert_idle();
    assert!((1..100).all(|id| rig.stories[&id].end == Some(FinishReason::Abort)));
}

#[test]
fn roles_that_change_under_load_lose_nothing() {
    use Role::{Both, Decode, Prefill};
    let mut rig = Rig::start(2, 2, 0, HOST_PAGES);
    for id in 0..300 {
        rig.submit(id, prompt(id), 1 + (id as u32 * 13) % 60);
    }
    let changes =
        [(1, Decode), (2, Prefill), (0, Both), (2, Decode), (0, Prefill), (3, Both), (1, Prefill)];
    rig.follow_with_roles(300, &changes);
    rig.assert_exact();
    rig.assert_idle();
    assert!(rig.handed() > 0);
    let roles = || rig.replicas.reports().iter().map(|report| report.role).collect::<Vec<_>>();
    for at in 0..4 {
        assert!(rig.replicas.set_role(at, Both));
    }
    assert_eq!(roles(), [Both; 4]);
    assert!(!rig.replicas.set_role(4, Both), "there is no such replica");
    let (handed, both) = (rig.handed(), rig.local(LocalReason::Both));
    for id in 300..320 {
        rig.submit(id, prompt(id), 20);
    }
    rig.follow(20);
    assert_eq!((rig.handed(), rig.local(LocalReason::Both)), (handed, both + 20));
    rig.assert_exact();
    rig.assert_idle();
}

#[test]
fn prompts_wait_while_decode_replicas_have_no_pages() {
    // The decode replica has pages for two requests at a time.
    let mut rig = Rig::with(1, 1, 0, HOST_PAGES, [2000, 90], 1.0);
    for id in 0..60 {
        rig.submit(id, (0..100).map(|at| (id as i32 * 7 + at) % 1000).collect(), 60);
    }
    let (mut ended, mut most, mut held) = (0, 0, false);
    while ended < 60 {
        ended += rig.next();
        let reports = rig.replicas.reports();
        most = most.max(reports[1].ahead_tokens);
        held |= reports[0].holding;
        assert!(!reports[1].holding);
    }
    rig.assert_exact();
    rig.assert_idle();
    let reports = rig.replicas.reports();
    assert!(held && reports[0].holds > 0 && reports[1].holds == 0, "{}", reports[0].holds);
    assert_eq!(rig.handed(), 60);
    // At most as many tokens may wait as fit into the pages of the decode replica, plus the prompts
    // that the prefill replica had admitted before it stopped admitting prompts.
    assert!(most <= 90 * 4 + 4 * 100, "{most} tokens waited");
    assert!(!reports[0].holding, "no request waits any more");
}

#[test]
fn roles_that_swap_while_prompts_wait_lose_nothing() {
    // Replica 0 has pages for two requests at a time; replica 1 has more pages than it can use.
    let mut rig = Rig::with(1, 1, 0, HOST_PAGES, [90, 2000], 1.0);
    let long = |id: u64| (0..100).map(|at| (id as i32 * 7 + at) % 1000).collect();
    for id in 0..60 {
        rig.submit(id, long(id), 60);
    }
    // Prompts of replica 0 that it has not handed on yet stay there, and prompts of replica 1 are
    // handed on to replica 0.
    assert!(rig.replicas.set_role(0, Role::Decode) && rig.replicas.set_role(1, Role::Prefill));
    for id in 60..120 {
        rig.submit(id, long(id), 60);
    }
    rig.follow(120);
    rig.assert_exact();
    rig.assert_idle();
}

/// Kills the hands of `victims` in turn while requests run, each time after some tokens.
fn under_kills(victims: &[usize], kills: usize) {
    let mut rig = Rig::start(2, 2, 0, HOST_PAGES);
    let (mut next, mut ended, mut killed, mut outputs) = (0, 0, 0, 0);
    // A replica whose hand dies twice while it tries the same suspect alone has to blame that
    // suspect. So kill again only when all requests have made progress.
    let mut before: HashMap<u64, usize> = HashMap::new();
    while ended < next || killed < kills {
        while next < ended + 24 && killed < kills {
            rig.submit(next as u64, prompt(next as u64), 60);
            next += 1;
        }
        ended += rig.next();
        outputs += 1;
        before.retain(|id, tokens| {
            let story = rig.stories.get(id);
            story.is_none_or(|story| story.end.is_none() && story.tokens.len() < *tokens + 2)
        });
        let up = rig.replicas.reports().iter().all(|report| report.status == Status::Ready);
        if up && before.is_empty() && killed < kills && outputs >= 3 + killed % 7 {
            let victim = victims[killed % victims.len()];
            rig.controls[victim].kill();
            let dead = killed as u64 + 1;
            rig.until(|all| all.iter().map(|report| report.stats.hand.deaths).sum::<u64>() == dead);
            // The outputs of the dead hand may still arrive; they do not count as progress.
            while let Ok(said) = rig.outputs.try_recv() {
                ended += tell(&mut rig.stories, said).len();
            }
            let running = (0..next as u64)
                .filter(|id| rig.stories.get(id).is_none_or(|story| story.end.is_none()));
            let told = |id: u64| (id, rig.stories.get(&id).map_or(0, |story| story.tokens.len()));
            before = running.map(told).collect();
            (killed, outputs) = (killed + 1, 0);
        }
    }
    rig.assert_exact();
    rig.assert_idle();
    assert!(rig.handed() > 0);
}

#[test]
fn streams_survive_the_deaths_of_prefill_hands() {
    under_kills(&[0, 1], 50);
}

#[test]
fn streams_survive_the_deaths_of_decode_hands() {
    under_kills(&[2, 3], 50);
}

#[test]
fn streams_survive_the_deaths_of_all_hands_in_turn() {
    under_kills(&[0, 2, 1, 3], 20);
}

#[test]
fn a_prefill_hand_that_memory_ran_out_for_lends_no_more() {
    let mut rig = Rig::start(1, 1, 0, HOST_PAGES);
    let run = |rig: &mut Rig, first: u64| {
        for id in first..first + 20 {
            rig.submit(id, prompt(id), 30);
        }
        rig.follow(20);
        rig.assert_exact();
        rig.assert_idle();
        rig.replicas.reports()[1].stats.scheduler.host.blocks_restored
    };
    assert!(run(&mut rig, 0) > 0, "the decode replica borrows blocks");
    rig.controls[0].starve(1600);
    let borrowed = run(&mut rig, 20);
    assert_eq!(rig.replicas.reports()[0].stats.hand.memory_kills, 1);
    let handed = rig.handed();
    assert_eq!(run(&mut rig, 40), borrowed, "blocks in remapped memory are not borrowed");
    assert_eq!(rig.handed(), handed + 20, "requests are handed on all the same");
}
