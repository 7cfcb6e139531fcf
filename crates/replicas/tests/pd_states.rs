//! Separate prefill and decode replicas with recurrent states, on simulated hands that reject a row
//! if the state before it is missing. A state is lent together with its blocks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use forebay_engine::{EngineConfig, FinishReason, HostConfig, Output, Status};
use forebay_replicas::{Listeners, Member, PdConfig, ReplicaReport, Replicas, ReplicasConfig};
use forebay_sim::testing::{ChannelSink, PATIENCE, Story, VOCAB, alone, request, tell, text};
use forebay_sim::{
    CopyModel, DeviceModel, PageBytes, SimClock, SimConfig, SimExecutor, StateModel, Timing,
};

const REQUESTS: u64 = 60;

/// Creates a prefill replica and a decode replica.
fn members(host_state_pages: u32, clock: &SimClock, outputs: &Sender<Vec<Output>>) -> Vec<Member> {
    let member = |_| {
        let states = StateModel { bytes: 5000, pages: 200, copy_gbps: None };
        let (executor, _) = SimExecutor::new(SimConfig {
            clock: clock.clone(),
            timing: Timing {
                model: DeviceModel { step_us: 100.0, ..DeviceModel::INSTANT },
                copy: CopyModel {
                    save_gbps: Some(0.1),
                    restore_gbps: Some(0.1),
                    ..CopyModel::default()
                },
                bytes: PageBytes { main: 1000, state: 5000, ..PageBytes::default() },
                states,
                ..Timing::default()
            },
            load_us: 1000,
            page_count: 2000,
            host_pages: 6000,
            state_pages: 200,
            host_state_pages,
            vocab_size: VOCAB,
            text: text(),
            ..SimConfig::default()
        });
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
            is_recurrent: true,
            host_tier: Some(HostConfig::default()),
            ..EngineConfig::default()
        };
        let sink = Box::new(ChannelSink::new(outputs.clone()));
        let replicas = vec![Listeners { sink, blocks: None }];
        Member { config, executor: Box::new(executor), replicas }
    };
    (0..2).map(member).collect()
}

fn prompt(id: u64) -> Vec<i32> {
    let length = 1 + (id as usize * 37) % 120;
    (0..length as i32).map(|at| (id as i32 * 7 + at) % 1000).collect()
}

/// Polls until the reports satisfy `wanted`, because no event announces a new report.
fn until(replicas: &Replicas, wanted: impl Fn(&ReplicaReport) -> bool) {
    let began = Instant::now();
    while !replicas.reports().iter().all(&wanted) {
        assert!(began.elapsed() < PATIENCE, "{:?}", replicas.reports());
        std::thread::yield_now();
    }
}

/// Serves all requests. Returns the reports of both replicas, once nothing is lent any more.
fn serve(host_state_pages: u32) -> Vec<ReplicaReport> {
    let (clock, (sender, outputs)) = (SimClock::real(), channel());
    let members = members(host_state_pages, &clock, &sender);
    let pd = Some(PdConfig { prefill: 1, local_tokens: 0 });
    let how = ReplicasConfig { pd, ..ReplicasConfig::default() };
    let (replicas, _threads) =
        Replicas::start(how, members, Arc::new(clock), || {}).expect("threads");
    until(&replicas, |report| report.status == Status::Ready);
    let tokens = |id: u64| 2 + (id as u32 * 13) % 60;
    for id in 0..REQUESTS {
        replicas.submit(request(id, prompt(id), tokens(id))).expect("room");
    }
    let (mut stories, mut ended): (HashMap<u64, Story>, _) = (HashMap::new(), 0);
    while ended < REQUESTS {
        let outputs = outputs.recv_timeout(PATIENCE).expect("outputs");
        ended += tell(&mut stories, outputs).len() as u64;
    }
    for id in 0..REQUESTS {
        assert_eq!(stories[&id].tokens, alone(prompt(id), tokens(id)), "request {id}");
        assert_eq!(stories[&id].end, Some(FinishReason::Length), "request {id}");
    }
    until(&replicas, |report| {
        let stats = &report.stats.scheduler;
        stats.host.lent_pages + stats.host.copies_outstanding + stats.states.pages_held == 0
    });
    replicas.reports()
}

#[test]
fn a_state_is_lent_with_its_blocks() {
    let reports = serve(2000);
    // A replica may serve a few requests alone if the other one has no room for them.
    assert!(reports[0].stats.hand.handed >= REQUESTS - 3, "{:?}", reports[0].stats.hand);
    let decode = &reports[1].stats.scheduler;
    assert!(decode.states.restored > REQUESTS / 2, "{decode:?}");
    let computed = decode.prompt_tokens;
    assert!(computed <= 4 * REQUESTS, "{computed}: at most the tokens that are on no full page");
}

#[test]
fn where_no_state_can_be_lent_prompts_are_computed() {
    let reports = serve(0);
    // A replica may serve a few requests alone if the other one has no room for them.
    assert!(reports[0].stats.hand.handed >= REQUESTS - 3, "{:?}", reports[0].stats.hand);
    let decode = &reports[1].stats.scheduler;
    assert_eq!((decode.states.restored, decode.host.blocks_restored), (0, 0));
}
