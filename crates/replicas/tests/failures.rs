//! Replicas, some of which never start.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use forebay_engine::{EngineConfig, EngineThread, FinishReason, Output, Status};
use forebay_replicas::{Listeners, Member, Method, Replicas, ReplicasConfig};
use forebay_sim::testing::{ChannelSink, PATIENCE, request};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimControl, SimExecutor, SimText, Timing};

struct Rig {
    replicas: Replicas,
    controls: Vec<SimControl>,
    outputs: Receiver<Vec<Output>>,
    exit: Receiver<()>,
    _threads: Vec<EngineThread>,
}

/// Starts one replica per entry of `pages`. The entry is the number of pages of the replica.
/// `breaking` is called for each replica before it starts.
fn start(pages: &[u32], breaking: impl Fn(usize, &SimControl)) -> Rig {
    let clock = SimClock::real();
    let (sender, outputs) = channel();
    let (mut members, mut controls) = (Vec::new(), Vec::new());
    for (at, &page_count) in pages.iter().enumerate() {
        let (executor, control) = SimExecutor::new(SimConfig {
            clock: clock.clone(),
            timing: Timing {
                model: DeviceModel { step_us: 100.0, ..DeviceModel::INSTANT },
                ..Timing::default()
            },
            load_us: 1000,
            page_count,
            vocab_size: 100,
            text: SimText::endless((0..100).collect()),
            ..SimConfig::default()
        });
        breaking(at, &control);
        controls.push(control);
        members.push(Member {
            config: EngineConfig {
                max_running_requests: 16,
                slots: 24,
                page_size: 4,
                chunked_prefill_size: 64,
                max_queued_requests: 1000,
                context_length: 400,
                watchdog_timeout: Duration::from_secs(60),
                load_timeout: Duration::ZERO,
                hand_restarts: 0,
                mask_threads: 0,
                ..EngineConfig::default()
            },
            executor: Box::new(executor),
            replicas: vec![Listeners {
                sink: Box::new(ChannelSink::new(sender.clone())),
                blocks: None,
            }],
        });
    }
    let how =
        ReplicasConfig { load_balance_method: Method::RoundRobin, ..ReplicasConfig::default() };
    let (ended, exit) = channel();
    let on_exit = move || {
        // The test may have ended.
        let _ = ended.send(());
    };
    let (replicas, threads) =
        Replicas::start(how, members, Arc::new(clock), on_exit).expect("threads");
    Rig { replicas, controls, outputs, exit, _threads: threads }
}

impl Rig {
    /// Polls until the states are as wanted, because no event reports them.
    fn settled(&self, wanted: impl Fn(&[Status]) -> bool) {
        let states =
            || self.replicas.reports().into_iter().map(|r| r.status).collect::<Vec<Status>>();
        while !wanted(&states()) {
            std::thread::yield_now();
        }
    }

    /// Returns the finish reasons of the next `count` requests.
    fn ends(&self, count: usize) -> Vec<(u64, FinishReason)> {
        let mut ends = Vec::new();
        while ends.len() < count {
            let outputs = self.outputs.recv_timeout(PATIENCE).expect("outputs");
            ends.extend(outputs.into_iter().filter_map(|o| Some((o.id.0, o.finish?))));
        }
        ends
    }
}

#[test]
fn one_that_hangs_at_its_first_start_keeps_nobody_from_serving() {
    let rig = start(&[500, 500], |at, control| control.hang_starts(u32::from(at == 0)));
    rig.settled(|states| states[1] == Status::Ready);
    assert_eq!(rig.replicas.status(), Status::Ready);
    assert!(
        matches!(rig.replicas.reports()[0].status, Status::Starting(_)),
        "the replica's status is reported"
    );
    for id in 0..10 {
        rig.replicas.submit(request(id, vec![1; 5], 5)).expect("taken");
    }
    assert!(rig.ends(10).iter().all(|(_, finish)| *finish == FinishReason::Length));
}

#[test]
fn the_process_is_told_to_end_when_the_last_one_has_failed_and_not_before() {
    for starts in [[1000, 1000, 1000], [1000, 0, 0], [0, 0, 0]] {
        let rig = start(&[500; 3], |at, control| control.fail_starts(starts[at]));
        rig.settled(|states| !states.iter().any(|status| matches!(status, Status::Starting(_))));
        for (at, control) in rig.controls.iter().enumerate() {
            if starts[at] == 0 {
                assert_eq!(rig.replicas.status(), Status::Ready, "one ready replica is enough");
                assert!(rig.exit.try_recv().is_err());
                control.fail_starts(1000);
                control.kill();
                rig.settled(|states| matches!(states[at], Status::Failed(_)));
            }
        }
        rig.exit.recv_timeout(PATIENCE).expect("no replica is left");
        assert!(matches!(rig.replicas.status(), Status::Failed(_)));
    }
}

/// When the first replica is ready, the page counts of the others are not known yet.
#[test]
fn a_request_goes_where_it_fits() {
    let rig = start(&[20, 100], |_, _| {});
    rig.settled(|states| states.iter().all(|status| *status == Status::Ready));
    for id in 0..20 {
        rig.replicas.submit(request(id, vec![1; 150], 50)).expect("the second replica has room");
    }
    assert!(rig.ends(20).iter().all(|(_, finish)| *finish == FinishReason::Length));
    let sent: Vec<u64> = rig.replicas.reports().iter().map(|r| r.load.dispatched).collect();
    assert_eq!(sent, [0, 20]);
    rig.controls[1].fail_starts(1000);
    rig.replicas.submit(request(20, vec![1; 150], 200)).expect("taken");
    rig.controls[1].kill();
    let (_, finish) = &rig.ends(1)[0];
    assert!(
        matches!(finish, FinishReason::Error(_)),
        "no replica that is left has enough pages: {finish:?}"
    );
}
