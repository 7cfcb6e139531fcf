//! Counts responses by status, with the metric names of FastAPI's instrumentation, which vLLM's
//! dashboards use.

use std::time::Duration;

use prometheus::{CounterVec, HistogramOpts, HistogramVec, Opts, Registry};

/// The upper bounds of the histogram's buckets, in seconds.
const BOUNDS: &[f64] = &[0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0];

#[derive(Debug)]
pub(super) struct HttpMetrics {
    requests: CounterVec,
    duration: HistogramVec,
}

impl HttpMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let opts = Opts::new("http_requests_total", "Answers by route, method and status.");
        let requests = CounterVec::new(opts, &["handler", "method", "status"])?;
        let help = "Time from a request's head to that of its answer in seconds.";
        let opts = HistogramOpts::new("http_request_duration_seconds", help);
        let duration = HistogramVec::new(opts.buckets(BOUNDS.to_vec()), &["handler", "method"])?;
        registry.register(Box::new(requests.clone()))?;
        registry.register(Box::new(duration.clone()))?;
        Ok(Self { requests, duration })
    }

    pub(super) fn answered(&self, handler: &str, method: &str, status: u16, took: Duration) {
        let class = match status {
            100..200 => "1xx",
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            _ => "5xx",
        };
        self.requests.with_label_values(&[handler, method, class]).inc();
        self.duration.with_label_values(&[handler, method]).observe(took.as_secs_f64());
    }
}
