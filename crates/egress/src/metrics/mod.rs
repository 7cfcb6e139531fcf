//! Prometheus metrics: those of vLLM's dashboards, with the same names, labels and buckets, and our
//! own.
//!
//! The engine's counters are read when metrics are scraped. Egress threads record the metrics of
//! requests.

mod adapters;
mod http;
mod parts;
mod pd;
mod sources;

use std::time::{Duration, Instant};

use forebay_engine::PlaceStats;
use forebay_grammar::GrammarStats;
use forebay_replicas::ReplicaReport;
use forebay_text::TextStats;
use parking_lot::Mutex;
use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Counter, CounterVec, Encoder, Gauge, Histogram, HistogramOpts, Opts, Registry, TextEncoder,
};

pub(crate) use self::adapters::AdapterUse;
pub use self::adapters::{AdapterCounts, AdapterLoad};
use self::http::HttpMetrics;
pub use self::parts::{IntakeStats, PartStats};
pub use self::pd::{FetchCounts, PdCounts, SentCounts};
use self::sources::{
    ACCEPTED_AT, COUNTERS, GAUGES, GRAMMAR_COUNTERS, GRAMMAR_GAUGES, HOST_COUNTERS, INTAKE_GAUGES,
    LOG_COUNTERS, PD_LOCAL, PROMPT_SOURCES, ROLES, Read, SPARSE_ROWS, Source, TEXT_COUNTERS,
    TEXT_GAUGES, TRANSFERS, WAITING,
};

/// The bucket bounds of vLLM's histogram of the time to first token, in seconds.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// The bucket bounds of vLLM's histograms of the time between tokens, in seconds.
const BETWEEN_TOKENS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
/// The bucket bounds of vLLM's histograms of a request's phases, in seconds.
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Returns the bucket bounds 1, 2, 5, 10, 20, 50, ... up to `most`.
fn one_two_five(most: u32) -> Vec<f64> {
    let decades = (0..).map(|exponent| 10f64.powi(exponent));
    let bounds = decades.flat_map(|decade| [decade, 2.0 * decade, 5.0 * decade]);
    bounds.take_while(|&bound| bound <= f64::from(most.max(1))).collect()
}

/// The timestamps and counts of a request, for metrics.
#[derive(Debug)]
pub(crate) struct Timeline {
    arrived: Instant,
    submitted: Instant,
    queued: Option<Duration>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    prompt_tokens: u32,
    cached_tokens: u32,
    /// The number of tokens generated so far.
    pub(crate) generated: u32,
}

impl Timeline {
    /// Starts the timeline of a request that is submitted now.
    pub(crate) fn new(arrived: Instant, prompt_tokens: u32) -> Self {
        Self {
            arrived,
            submitted: Instant::now(),
            queued: None,
            first_token: None,
            last_token: None,
            prompt_tokens,
            cached_tokens: 0,
            generated: 0,
        }
    }

    /// Records how long the request waited for its first step, and how many of its prompt tokens
    /// were cached.
    pub(crate) fn admitted(&mut self, queue_us: u64, cached_tokens: u32) {
        self.queued = Some(Duration::from_micros(queue_us));
        self.cached_tokens = cached_tokens;
    }
}

/// All metrics of `/metrics`.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: RequestMetrics,
    http: HttpMetrics,
    replicas: Vec<Mutex<ReadMetrics<ReplicaReport>>>,
    text: Mutex<ReadMetrics<TextStats>>,
    grammars: Mutex<ReadMetrics<GrammarStats>>,
    intake: Mutex<ReadMetrics<IntakeStats>>,
    log: Mutex<ReadMetrics<u64>>,
}

#[derive(Debug)]
struct RequestMetrics {
    success: CounterVec,
    first_token: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    end_to_end: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prompt_tokens: Histogram,
    computed_tokens: Histogram,
    generation_tokens: Histogram,
    choices: Histogram,
}

/// Metrics whose values are read from a snapshot `S`.
#[derive(Debug)]
struct ReadMetrics<S> {
    gauges: Vec<(Gauge, Read<S>)>,
    counters: Vec<(Counter, Read<S>)>,
}

impl<S> ReadMetrics<S> {
    fn new(
        r: &Registrar,
        gauges: &[Source<S>],
        counters: &[Source<S>],
    ) -> prometheus::Result<Self> {
        let gauges = gauges.iter().map(|&(name, help, read)| Ok((r.gauge(name, help)?, read)));
        let counters =
            counters.iter().map(|&(name, help, read)| Ok((r.counter(name, help)?, read)));
        Ok(Self {
            gauges: gauges.collect::<prometheus::Result<_>>()?,
            counters: counters.collect::<prometheus::Result<_>>()?,
        })
    }

    fn read(&self, snapshot: &S) {
        for (gauge, read) in &self.gauges {
            gauge.set(read(snapshot));
        }
        for (counter, read) in &self.counters {
            // Two scrapes may apply their snapshots in reverse order, but a counter must never
            // decrease.
            counter.inc_by((read(snapshot) - counter.get()).max(0.0));
        }
    }
}

/// Registers the metrics of one model.
struct Registrar {
    registry: Registry,
    model: String,
    /// The label of the replica; 0 for metrics that belong to no replica.
    engine: String,
}

impl Registrar {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help)
            .const_label("model_name", &self.model)
            .const_label("engine", &self.engine)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<Gauge> {
        let gauge = Gauge::with_opts(self.opts(name, help))?;
        self.registry.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<Counter> {
        let counter = Counter::with_opts(self.opts(name, help))?;
        self.registry.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn histogram(&self, name: &str, help: &str, bounds: &[f64]) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts::from(self.opts(name, help)).buckets(bounds.to_vec());
        let histogram = Histogram::with_opts(opts)?;
        self.registry.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }
}

impl Metrics {
    /// Creates the metrics, with the model's served name and the replica as labels. Token
    /// histograms have buckets up to `context_length`.
    ///
    /// # Errors
    /// Prometheus rejects a metric.
    pub fn new(model: &str, context_length: u32, replicas: u32) -> prometheus::Result<Self> {
        let registrar = |registry: &Registry, engine: u32| Registrar {
            registry: registry.clone(),
            model: model.to_owned(),
            engine: engine.to_string(),
        };
        let registry = Registry::new();
        let r = registrar(&registry, 0);
        let success = r.opts("vllm:request_success_total", "Requests that ended, by reason.");
        let success = CounterVec::new(success, &["finished_reason"])?;
        r.registry.register(Box::new(success.clone()))?;
        for reason in ["stop", "length", "abort", "error"] {
            success.with_label_values(&[reason]);
        }
        let tokens = one_two_five(context_length);
        let requests = RequestMetrics {
            success,
            first_token: r.histogram(
                "vllm:time_to_first_token_seconds",
                "Time to first token in seconds.",
                FIRST_TOKEN,
            )?,
            inter_token: r.histogram(
                "vllm:inter_token_latency_seconds",
                "Time between two tokens of a request in seconds.",
                BETWEEN_TOKENS,
            )?,
            per_output_token: r.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per output token of a request, the first excluded, in seconds.",
                BETWEEN_TOKENS,
            )?,
            end_to_end: r.histogram(
                "vllm:e2e_request_latency_seconds",
                "End to end request latency in seconds.",
                REQUEST,
            )?,
            queue: r.histogram(
                "vllm:request_queue_time_seconds",
                "Time spent waiting for the first step in seconds.",
                REQUEST,
            )?,
            inference: r.histogram(
                "vllm:request_inference_time_seconds",
                "Time from the first step to the last token in seconds.",
                REQUEST,
            )?,
            prefill: r.histogram(
                "vllm:request_prefill_time_seconds",
                "Time from the first step to the first token in seconds.",
                REQUEST,
            )?,
            decode: r.histogram(
                "vllm:request_decode_time_seconds",
                "Time from the first to the last token in seconds.",
                REQUEST,
            )?,
            prompt_tokens: r.histogram(
                "vllm:request_prompt_tokens",
                "Prompt tokens of a request.",
                &tokens,
            )?,
            computed_tokens: r.histogram(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed: cache hits are not counted.",
                &tokens,
            )?,
            generation_tokens: r.histogram(
                "vllm:request_generation_tokens",
                "Generated tokens of a request.",
                &tokens,
            )?,
            choices: r.histogram(
                "vllm:request_params_n",
                "The n request parameter.",
                &[1.0, 2.0, 5.0, 10.0, 20.0],
            )?,
        };
        let replicas = (0..replicas).map(|replica| {
            let r = registrar(&registry, replica);
            let counters = [COUNTERS, HOST_COUNTERS].concat();
            let mut read = ReadMetrics::new(&r, GAUGES, &counters)?;
            let transfers = TRANSFERS.iter().map(|source| ("transfer_type", source));
            let rows = SPARSE_ROWS.iter().map(|source| ("found", source));
            let prompts = PROMPT_SOURCES.iter().map(|source| ("source", source));
            let waiting = WAITING.iter().map(|source| ("reason", source));
            let roles = ROLES.iter().map(|source| ("role", source));
            for (label, &(name, help, value, source)) in waiting.chain(roles) {
                let gauge = Gauge::with_opts(r.opts(name, help).const_label(label, value))?;
                registry.register(Box::new(gauge.clone()))?;
                read.gauges.push((gauge, source));
            }
            let accepted = ACCEPTED_AT.iter().map(|source| ("position", source));
            let local = PD_LOCAL.iter().map(|source| ("reason", source));
            let labelled = transfers.chain(rows).chain(prompts).chain(accepted).chain(local);
            for (label, &(name, help, value, source)) in labelled {
                let opts = r.opts(name, help).const_label(label, value);
                let counter = Counter::with_opts(opts)?;
                registry.register(Box::new(counter.clone()))?;
                read.counters.push((counter, source));
            }
            Ok(Mutex::new(read))
        });
        let replicas = replicas.collect::<prometheus::Result<_>>()?;
        let text = ReadMetrics::new(&r, TEXT_GAUGES, TEXT_COUNTERS)?;
        let grammars = ReadMetrics::new(&r, GRAMMAR_GAUGES, GRAMMAR_COUNTERS)?;
        let intake = ReadMetrics::new(&r, INTAKE_GAUGES, &[])?;
        let log = ReadMetrics::new(&r, &[], LOG_COUNTERS)?;
        // vLLM's dashboards treat a server without this metric as down. This server never sleeps.
        let sleep = r.opts("vllm:engine_sleep_state", "Whether the engine sleeps: it never does.");
        for (state, holds) in [("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)] {
            let gauge = Gauge::with_opts(sleep.clone().const_label("sleep_state", state))?;
            gauge.set(holds);
            registry.register(Box::new(gauge))?;
        }
        registry.register(Box::new(ProcessCollector::for_self()))?;
        Ok(Self {
            http: HttpMetrics::new(&registry)?,
            registry,
            requests,
            replicas,
            text: Mutex::new(text),
            grammars: Mutex::new(grammars),
            intake: Mutex::new(intake),
            log: Mutex::new(log),
        })
    }

    /// Records that the head of a response was sent, `took` after its request arrived.
    pub fn answered(&self, handler: &str, method: &str, status: u16, took: Duration) {
        self.http.answered(handler, method, status, took);
    }

    /// Records that `n` choices of a prompt were submitted.
    pub fn submitted(&self, n: u32) {
        self.requests.choices.observe(f64::from(n));
    }

    /// Records that a token arrived at `now`.
    pub(crate) fn token(&self, timeline: &mut Timeline, now: Instant) {
        match timeline.last_token {
            None => {
                timeline.first_token = Some(now);
                self.requests.first_token.observe(seconds(timeline.arrived, now));
            }
            Some(last) => self.requests.inter_token.observe(seconds(last, now)),
        }
        timeline.last_token = Some(now);
        timeline.generated += 1;
    }

    /// Records that a request ended at `now`.
    pub(crate) fn finished(&self, timeline: &Timeline, reason: &str, now: Instant) {
        let metrics = &self.requests;
        metrics.success.with_label_values(&[reason]).inc();
        metrics.end_to_end.observe(seconds(timeline.arrived, now));
        metrics.prompt_tokens.observe(f64::from(timeline.prompt_tokens));
        let computed = timeline.prompt_tokens.saturating_sub(timeline.cached_tokens);
        metrics.computed_tokens.observe(f64::from(computed));
        metrics.generation_tokens.observe(f64::from(timeline.generated));
        if let Some(queued) = timeline.queued {
            metrics.queue.observe(queued.as_secs_f64());
        }
        if let (Some(first), Some(last)) = (timeline.first_token, timeline.last_token) {
            let scheduled = timeline.submitted + timeline.queued.unwrap_or_default();
            metrics.prefill.observe(seconds(scheduled, first));
            metrics.decode.observe(seconds(first, last));
            metrics.inference.observe(seconds(scheduled, last));
            if timeline.generated > 1 {
                let mean = seconds(first, last) / f64::from(timeline.generated - 1);
                metrics.per_output_token.observe(mean);
            }
        }
    }

    /// Returns the metrics in Prometheus' text format, with the current values of the `replicas`
    /// and of the server's other `parts`.
    ///
    /// # Errors
    /// The encoder fails.
    pub fn render(
        &self,
        replicas: &[ReplicaReport],
        parts: &PartStats,
    ) -> prometheus::Result<Vec<u8>> {
        for (read, report) in self.replicas.iter().zip(replicas) {
            read.lock().read(report);
        }
        self.text.lock().read(&parts.text);
        self.grammars.lock().read(&parts.grammars);
        self.intake.lock().read(&parts.intake);
        self.log.lock().read(&parts.dropped);
        let mut written = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut written)?;
        let places = replicas.iter().map(|report| {
            let PlaceStats { used, unused, coming, empty, .. } = report.stats.scheduler.places;
            used + unused + coming + empty
        });
        let places = places.max().unwrap_or(0);
        parts.adapters.iter().for_each(|adapters| adapters.write(places, &mut written));
        parts.pd.iter().for_each(|counts| counts.write(&mut written));
        Ok(written)
    }
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_engine::Stats;
    use forebay_engine::Status;
    use forebay_replicas::{Load, LocalCounts, Role};

    use super::*;

    #[test]
    fn buckets_of_tokens() {
        assert_eq!(one_two_five(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(one_two_five(99), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
    }

    #[test]
    fn exposition_has_the_names_and_types_that_dashboards_use() {
        let metrics = Metrics::new("tiny", 100, 2).unwrap();
        let start = Instant::now();
        let mut timeline = Timeline::new(start, 7);
        timeline.admitted(2_000_000, 3);
        metrics.token(&mut timeline, start + Duration::from_millis(30));
        metrics.token(&mut timeline, start + Duration::from_millis(60));
        metrics.finished(&timeline, "stop", start + Duration::from_secs(1));
        let mut stats = Stats::default();
        stats.scheduler.running = 3;
        stats.scheduler.pages_held = 1;
        stats.scheduler.pages_free = 3;
        stats.scheduler.prompt_tokens = 7;
        stats.hand.gap_us = 1_500_000;
        stats.scheduler.places.empty = 4;
        let load = |at| Arc::new(AdapterLoad::new(format!("a{at:02}")));
        let loads: Vec<Arc<AdapterLoad>> = (0..70).map(load).collect();
        loads.iter().for_each(|load| load.submitted(2));
        let mut uses: Vec<AdapterUse> =
            [1, 1, 0, 2].map(|at| AdapterUse::new(Arc::clone(&loads[at]))).into();
        uses[1].runs();
        uses[2].runs();
        uses.pop();
        let parts = PartStats {
            text: TextStats { waiting: 2, cache_hits: 5, ..TextStats::default() },
            grammars: GrammarStats { compiled: 8, trie_us: 2_500_000, ..GrammarStats::default() },
            intake: IntakeStats { in_line: 4, ..IntakeStats::default() },
            dropped: 6,
            adapters: Some(AdapterCounts { loads: loads.clone(), reads: 5, failed_reads: 1 }),
            pd: None,
        };
        let report = |stats, status| ReplicaReport {
            status,
            stats,
            load: Load { requests: 5, peak: 7, ..Load::default() },
            drained: false,
            local: LocalCounts::default(),
            role: Role::Prefill,
            ahead_tokens: 11,
            holding: true,
            holds: 3,
        };
        let lost = Status::Recovering("killed".into());
        let mut other = stats;
        other.scheduler.running = 4;
        let replicas = [report(stats, Status::Ready), report(other, lost)];
        let render = || metrics.render(&replicas, &parts).unwrap();
        render();
        let text = String::from_utf8(render()).unwrap();
        for line in [
            "# TYPE vllm:num_requests_running gauge",
            "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3",
            "vllm:num_requests_running{engine=\"1\",model_name=\"tiny\"} 4",
            "forebay:replica_role{engine=\"0\",model_name=\"tiny\",role=\"prefill\"} 1",
            "forebay:replica_role{engine=\"0\",model_name=\"tiny\",role=\"both\"} 0",
            "forebay:pd_ahead_tokens{engine=\"1\",model_name=\"tiny\"} 11",
            "forebay:pd_holding{engine=\"0\",model_name=\"tiny\"} 1",
            "forebay:pd_holds_total{engine=\"0\",model_name=\"tiny\"} 3",
            "forebay:replica_up{engine=\"0\",model_name=\"tiny\"} 1",
            "forebay:replica_up{engine=\"1\",model_name=\"tiny\"} 0",
            "forebay:replica_requests{engine=\"0\",model_name=\"tiny\"} 5",
            "forebay:replica_requests_peak{engine=\"1\",model_name=\"tiny\"} 7",
            "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.25",
            "# TYPE vllm:prompt_tokens_total counter",
            "vllm:prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 7",
            "# TYPE forebay:device_gap_seconds_total counter",
            "forebay:device_gap_seconds_total{engine=\"0\",model_name=\"tiny\"} 1.5",
            "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"tiny\"} 1",
            "vllm:request_success_total{engine=\"0\",finished_reason=\"abort\",model_name=\"tiny\"} 0",
            "# TYPE vllm:time_to_first_token_seconds histogram",
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",model_name=\"tiny\",le=\"0.04\"} 1",
            "vllm:time_to_first_token_seconds_bucket{engine=\"0\",model_name=\"tiny\",le=\"0.02\"} 0",
            "vllm:inter_token_latency_seconds_count{engine=\"0\",model_name=\"tiny\"} 1",
            "vllm:request_queue_time_seconds_sum{engine=\"0\",model_name=\"tiny\"} 2",
            "vllm:request_generation_tokens_sum{engine=\"0\",model_name=\"tiny\"} 2",
            "forebay:grammars_compiled_total{engine=\"0\",model_name=\"tiny\"} 8",
            "forebay:grammar_trie_seconds{engine=\"0\",model_name=\"tiny\"} 2.5",
            "forebay:text_inputs_waiting{engine=\"0\",model_name=\"tiny\"} 2",
            "forebay:text_cache_hits_total{engine=\"0\",model_name=\"tiny\"} 5",
            "forebay:log_lines_dropped_total{engine=\"0\",model_name=\"tiny\"} 6",
            "forebay:intake_requests_waiting{engine=\"0\",model_name=\"tiny\"} 4",
            "forebay:adapter_requests_total{adapter=\"a63\"} 2",
            "forebay:adapter_requests_total{adapter=\"other\"} 12",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        let info = "vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"a00,a01\",waiting_lora_adapters=\"a01\"} ";
        assert!(text.contains(info), "{text}");
    }
}
