//! `forebay route`: turns flags into the router's configuration, and runs the router.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use forebay_capacity::MoveArgs;
use forebay_router::{
    AllowedBackends, BodyLimits, BreakerConfig, HealthConfig, PairConfig, PairEngine, Policy,
    PrefillServer, RetryConfig, Router, RouterConfig, Sources, Thresholds, Watch,
};
use forebay_server::Guard;
use tokio::runtime::Builder;
use tracing::info;

use crate::flags::{LineFlags, access, keys, seconds};
use crate::{descriptors, listening, logs, signals};

#[derive(Debug, Args)]
pub(crate) struct RouteFlags {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// Proxy threads; each can use one core.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Seconds for running requests to finish after SIGTERM.
    #[arg(long, default_value = "30", value_parser = seconds)]
    drain_timeout: Duration,
    /// Longest time in seconds for a request's head to arrive, and again for its body. An idle
    /// connection is closed after the same time.
    #[arg(long, default_value = "60", value_parser = seconds)]
    receive_timeout: Duration,
    /// Largest number of simultaneous client connections [default: what the limit of open files
    /// allows, if each needs another connection to a backend].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: Option<u32>,
    /// Host names that requests may use, comma-separated. `*.example.com` matches subdomains, `*`
    /// any name. [default: any; for a router without API keys on a loopback address, only that
    /// address and localhost]
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    allowed_hosts: Vec<String>,
    /// Do not serve the web page at `/`. The API routes that the page uses remain.
    #[arg(long)]
    no_webui: bool,
    #[command(flatten)]
    bodies: BodyFlags,
    #[command(flatten)]
    keys: KeyFlags,
    /// Longest time in seconds for a request.
    #[arg(long, default_value = "1800", value_parser = seconds)]
    request_timeout_secs: Duration,
    #[command(flatten)]
    backends: BackendFlags,
    #[command(flatten)]
    pairs: PairFlags,
    #[command(flatten)]
    choice: ChoiceFlags,
    #[command(flatten)]
    trouble: TroubleFlags,
    #[command(flatten)]
    log: LineFlags,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Backends")]
struct BackendFlags {
    /// Backend URLs, such as http://10.0.0.1:8000,http://10.0.0.2:8000.
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "URL", visible_alias = "worker-urls")]
    backends: Vec<String>,
    /// File with backend URLs, one per line. It is read again when it changes.
    #[arg(long, value_name = "FILE")]
    backends_file: Option<PathBuf>,
    /// Host names that are resolved repeatedly, such as workers.internal:8000. Each address is a
    /// backend.
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "NAME:PORT")]
    backends_dns: Vec<String>,
    /// Seconds between two checks of the file, and between two resolutions of the host names.
    #[arg(long, default_value = "5", value_parser = seconds)]
    backends_interval: Duration,
    /// Key with which backends may register: POST /backends {"url", "ttl"}, DELETE /backends
    /// {"url"}, with `Authorization: Bearer KEY`.
    #[arg(long, env = "FOREBAY_REGISTRATION_KEY", hide_env_values = true, value_name = "KEY")]
    registration_key: Option<String>,
    /// Backends that may register, such as 10.0.0.0/8,*.brains.internal:8000 [default: any].
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "HOST")]
    allowed_backends: Vec<AllowedBackends>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Pairs of prefill and decode servers")]
struct PairFlags {
    /// Servers that compute prompts, in place of --backends: `forebay serve` with
    /// --disaggregation-mode `prefill`, or servers of SGLang or vLLM. For SGLang, a URL may be
    /// followed by its bootstrap port, as in http://10.0.0.1:8000 8998.
    #[arg(
        long,
        value_delimiter = ',',
        num_args = 1..,
        value_name = "URL",
        requires = "decode",
        conflicts_with_all = ["backends", "backends_file", "backends_dns", "registration_key"]
    )]
    prefill: Vec<String>,
    /// Servers of the same engine that continue after the prompt: `forebay serve` with
    /// --disaggregation-mode `decode`, or servers of SGLang or vLLM. They send the answers that
    /// clients get.
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "URL", requires = "prefill")]
    decode: Vec<String>,
    /// Engine of these servers [default: the router queries each server].
    #[arg(long, value_enum, value_name = "ENGINE", requires = "prefill")]
    pd_engine: Option<PairEngine>,
    /// Policy that chooses a prefill server [default: that of --policy].
    #[arg(long, value_enum, value_name = "POLICY", requires = "prefill")]
    prefill_policy: Option<Policy>,
    /// Policy that chooses a decode server [default: that of --policy].
    #[arg(long, value_enum, value_name = "POLICY", requires = "prefill")]
    decode_policy: Option<Policy>,
}

impl PairFlags {
    fn config(&self) -> Result<PairConfig> {
        let mut prefill: Vec<PrefillServer> = Vec::new();
        for word in &self.prefill {
            let is_port = word.bytes().all(|byte| byte.is_ascii_digit());
            if !is_port && word != "none" {
                prefill.push(PrefillServer { url: word.clone(), bootstrap_port: None });
                continue;
            }
            let Some(last) = prefill.last_mut() else {
                bail!("--prefill {word}: a bootstrap port stands behind the URL of its server");
            };
            if is_port {
                let port = word.parse().ok().filter(|&port: &u16| port > 0);
                let Some(port) = port else { bail!("--prefill: {word} is not a port") };
                last.bootstrap_port = Some(port);
            }
        }
        Ok(PairConfig {
            prefill,
            decode: self.decode.clone(),
            engine: self.pd_engine,
            prefill_policy: self.prefill_policy,
            decode_policy: self.decode_policy,
        })
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Bodies of requests")]
struct BodyFlags {
    /// Largest request body in bytes.
    #[arg(long, default_value_t = 64 << 20, visible_alias = "max-body-bytes")]
    max_payload_size: usize,
    /// Largest request body in bytes, without `prompt_embeds` and images.
    #[arg(long, default_value_t = 4 << 20)]
    max_json_bytes: usize,
    /// Largest total size in bytes of all request bodies; further requests get 429.
    #[arg(long, default_value_t = 1 << 30)]
    max_request_bytes_in_flight: usize,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Keys")]
struct KeyFlags {
    /// API keys. Clients send one as `Authorization: Bearer KEY`, and the router forwards it. The
    /// router's own requests to backends use the first key.
    #[arg(long, env = "FOREBAY_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with API keys, one per line.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Key for /backends, /v1/loads and /metrics [default: any client's key].
    #[arg(long, env = "FOREBAY_ADMIN_API_KEY", hide_env_values = true, value_name = "KEY")]
    admin_api_key: Option<String>,
    /// Key that the router sends to servers. They need the same --router-key.
    #[arg(long, env = "FOREBAY_ROUTER_KEY", hide_env_values = true, value_name = "KEY")]
    router_key: Option<String>,
    /// Let clients with different keys share cached prompts. The backends need this flag too.
    #[arg(long)]
    share_cache_across_keys: bool,
}

impl KeyFlags {
    /// Returns all client keys, from `--api-key` and from the file.
    fn all(&self) -> Result<Vec<String>> {
        keys("--api-key", &self.api_key, self.api_key_file.as_deref())
    }

    /// The keys that may be given only once: the admin key and the router key.
    fn single(&self) -> Result<(Option<String>, Option<String>)> {
        for (flag, key) in
            [("--admin-api-key", &self.admin_api_key), ("--router-key", &self.router_key)]
        {
            keys(flag, key.as_slice(), None)?;
        }
        Ok((self.admin_api_key.clone(), self.router_key.clone()))
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Routing")]
struct ChoiceFlags {
    /// Policy that chooses a backend.
    #[arg(long, value_enum, default_value_t)]
    policy: Policy,
    /// cache_aware: smallest cached share of a prompt for which the router prefers the backend with
    /// the cached prefix.
    #[arg(long, default_value_t = 0.3)]
    cache_threshold: f32,
    /// cache_aware: difference in requests between backends up to which the cached prefix decides.
    #[arg(long, default_value_t = 64)]
    balance_abs_threshold: u32,
    /// cache_aware: ratio of loads between backends up to which the cached prefix decides. Loads
    /// decide only if both limits are exceeded.
    #[arg(long, default_value_t = 1.5)]
    balance_rel_threshold: f32,
    /// For measurements: poll each backend's load at this interval in seconds, instead of using the
    /// reports in responses.
    #[arg(long, value_parser = seconds, value_name = "SECONDS", conflicts_with = "no_load_acknowledgement")]
    load_watch_interval: Option<Duration>,
    /// For measurements: when a load report arrives, discard the requests that were dispatched
    /// after the report was made.
    #[arg(long)]
    no_load_acknowledgement: bool,
    #[command(flatten)]
    moves: MoveArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Failures")]
struct TroubleFlags {
    /// Largest number of retries of a request that has no output yet.
    #[arg(long, default_value_t = 5)]
    retry_max_retries: u32,
    /// Milliseconds to wait before the second round of attempts, after every backend was tried.
    #[arg(long, default_value_t = 50)]
    retry_initial_backoff_ms: u64,
    /// Longest wait between two rounds of attempts, in milliseconds.
    #[arg(long, default_value_t = 30_000)]
    retry_max_backoff_ms: u64,
    /// Factor by which each wait between rounds is longer than the previous one.
    #[arg(long, default_value_t = 1.5)]
    retry_backoff_multiplier: f64,
    /// Share by which each wait varies at random, from 0 to 1.
    #[arg(long, default_value_t = 0.2, value_parser = share)]
    retry_jitter_factor: f64,
    /// Give up after one attempt. Broken streams are still continued by other servers.
    #[arg(long)]
    disable_retries: bool,
    /// Seconds for which a request whose backend died waits for another backend.
    #[arg(long, default_value = "30", value_parser = seconds)]
    trial_wait_secs: Duration,
    /// Number of failures that open a backend's circuit breaker. Failures of one client's requests
    /// count for at most half of this number.
    #[arg(long, default_value_t = 10)]
    cb_failure_threshold: usize,
    /// Number of successes that close an open circuit breaker.
    #[arg(long, default_value_t = 3)]
    cb_success_threshold: usize,
    /// Seconds for which a circuit breaker stays open.
    #[arg(long, default_value = "60", value_parser = seconds)]
    cb_timeout_duration_secs: Duration,
    /// Seconds for which the circuit breaker counts a failure.
    #[arg(long, default_value = "120", value_parser = seconds)]
    cb_window_duration_secs: Duration,
    /// Keep sending requests to failing backends.
    #[arg(long)]
    disable_circuit_breaker: bool,
    /// Path that a backend answers with 200 while it accepts requests.
    #[arg(long, default_value = "/health", value_name = "PATH")]
    health_check_endpoint: String,
    /// Seconds between two health checks.
    #[arg(long, default_value = "5", value_parser = seconds)]
    health_check_interval_secs: Duration,
    /// Longest time in seconds for a health check.
    #[arg(long, default_value = "5", value_parser = seconds)]
    health_check_timeout_secs: Duration,
    /// Number of consecutive health checks without an answer after which a backend gets no
    /// requests. A backend that answers with an error, or refuses connections, is excluded
    /// immediately.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    health_failure_threshold: u32,
    /// Number of consecutive successful health checks after which a backend gets requests again.
    #[arg(long, default_value_t = 2)]
    health_success_threshold: u32,
    /// Longest time in seconds to open a connection to a backend.
    #[arg(long, default_value = "5", value_parser = seconds)]
    connect_timeout_secs: Duration,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share @ 0.0..=1.0) => Ok(share),
        _ => Err("not between 0 and 1".to_owned()),
    }
}

impl RouteFlags {
    /// Creates the router's configuration. `limit`: the largest number of open files.
    fn config(&self, limit: u64, loopback: Option<&str>) -> Result<RouterConfig> {
        let Self { backends, choice, trouble, bodies, keys, .. } = self;
        let (admin_key, router_key) = keys.single()?;
        let api_keys = keys.all()?;
        let local = loopback.filter(|_| api_keys.is_empty());
        let millis = Duration::from_millis;
        Ok(RouterConfig {
            policy: choice.policy,
            thresholds: Thresholds {
                cache: choice.cache_threshold,
                balance_abs: choice.balance_abs_threshold,
                balance_rel: choice.balance_rel_threshold,
            },
            watch: match choice.load_watch_interval {
                Some(interval) => Watch::Polled(interval),
                None if choice.no_load_acknowledgement => Watch::Unacknowledged,
                None => Watch::Acknowledged,
            },
            queue_moves: !choice.moves.disable_queue_moves,
            sources: Sources {
                urls: backends.backends.clone(),
                file: backends.backends_file.clone(),
                dns: backends.backends_dns.clone(),
                interval: backends.backends_interval,
                registration_key: backends.registration_key.clone(),
                allowed: backends.allowed_backends.clone(),
            },
            pairs: self.pairs.config()?,
            health: HealthConfig {
                path: trouble.health_check_endpoint.clone(),
                interval: trouble.health_check_interval_secs,
                timeout: trouble.health_check_timeout_secs,
                failures: trouble.health_failure_threshold,
                successes: trouble.health_success_threshold,
            },
            breaker: BreakerConfig {
                failures: match trouble.disable_circuit_breaker {
                    true => 0,
                    false => trouble.cb_failure_threshold,
                },
                successes: trouble.cb_success_threshold,
                pause: trouble.cb_timeout_duration_secs,
                window: trouble.cb_window_duration_secs,
            },
            retry: RetryConfig {
                retries: if trouble.disable_retries { 0 } else { trouble.retry_max_retries },
                first_pause: millis(trouble.retry_initial_backoff_ms),
                last_pause: millis(trouble.retry_max_backoff_ms),
                factor: trouble.retry_backoff_multiplier,
                jitter: trouble.retry_jitter_factor,
            },
            trial_wait: trouble.trial_wait_secs,
            request_timeout: self.request_timeout_secs,
            connect_timeout: trouble.connect_timeout_secs,
            receive_timeout: self.receive_timeout,
            // Each client connection needs another connection to a backend.
            max_connections: descriptors::connections(self.max_connections, limit / 2, 0)?,
            bodies: BodyLimits {
                whole: bodies.max_payload_size,
                json: bodies.max_json_bytes,
                all: bodies.max_request_bytes_in_flight,
            },
            drain_timeout: self.drain_timeout,
            access: access(&self.allowed_hosts, &[], local),
            api_keys,
            admin_key,
            router_key,
            share_cache_across_keys: keys.share_cache_across_keys,
            webui: !self.no_webui,
            threads: self.threads.into(),
        })
    }
}

/// Runs the router until a signal.
pub(crate) fn run(flags: &RouteFlags) -> Result<()> {
    let guard = Guard::default();
    let logs = logs::init(&flags.log, None, &guard)?;
    logs::warn_of_visible_keys();
    let listener = listening::tcp(&flags.host, flags.port)?;
    let address = listener.local_addr()?;
    let loopback = listening::loopback(address.ip());
    let config = flags.config(descriptors::raise(), loopback.as_deref())?;
    // This runtime counts signals. It keeps running while the router is being stopped.
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("signals")
        .enable_all()
        .build()?;
    // Start counting before any request is served, so that no signal is missed.
    let told = runtime.block_on(async { signals::count() })?;
    let router = Router::start(config, listener)?;
    logs.lines().push_always(format!("Routing on http://{address}\n").as_bytes());
    runtime.block_on(async {
        tokio::select! {
            () = signals::another(told.clone()) => {}
            () = guard.failed() => {}
            () = router.broken() => {}
        }
    });
    info!("draining");
    let whole = router.stop(signals::another(told));
    runtime.shutdown_background();
    drop(logs);
    match guard.cause() {
        Some(cause) => bail!("{cause}"),
        None if !whole => bail!("a part of the router panicked"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        flags: RouteFlags,
    }

    fn config(arguments: &[&str]) -> RouterConfig {
        Only::try_parse_from([&["route"], arguments].concat())
            .unwrap()
            .flags
            .config(1 << 20, None)
            .unwrap()
    }

    #[test]
    fn flags_become_the_configuration() {
        let plain = config(&["--backends", "a:1,b:2"]);
        assert_eq!(plain.sources.urls, ["a:1", "b:2"]);
        assert_eq!(plain.breaker, BreakerConfig::default());
        assert_eq!(plain.retry, RetryConfig::default());
        assert_eq!(plain.health, HealthConfig::default());
        assert_eq!(plain.thresholds, Thresholds::default());
        assert_eq!((plain.watch, plain.policy), (Watch::Acknowledged, Policy::CacheAware));
        assert!(plain.queue_moves && !config(&["--disable-queue-moves"]).queue_moves);
        assert_eq!(plain.bodies, BodyLimits::default());
        let other =
            config(&["--worker-urls", "a:1", "--load-watch-interval", "0.02", "--disable-retries"]);
        assert_eq!(other.watch, Watch::Polled(Duration::from_millis(20)));
        assert_eq!(other.retry.retries, 0);
        let breaker = config(&["--disable-circuit-breaker", "--policy", "power_of_two"]);
        assert_eq!((breaker.breaker.failures, breaker.policy), (0, Policy::PowerOfTwo));
    }

    #[test]
    fn pairs_are_named_as_for_the_router_of_sglang_too() {
        let server = |url: &str, bootstrap_port| PrefillServer { url: url.into(), bootstrap_port };
        let ours = config(&["--prefill", "a:1,b:1", "--decode", "c:1,d:1"]).pairs;
        assert_eq!(ours.prefill, [server("a:1", None), server("b:1", None)]);
        assert_eq!(
            (ours.decode.as_slice(), ours.engine),
            (&["c:1".into(), "d:1".into()][..], None)
        );
        let words = "--prefill a:1 8998 --prefill b:1 none --prefill c:1 --decode d:1 --decode e:1 \
                     --prefill-policy random --pd-engine sglang";
        let theirs = config(&words.split_whitespace().collect::<Vec<_>>()).pairs;
        let expected = [server("a:1", Some(8998)), server("b:1", None), server("c:1", None)];
        assert_eq!((&theirs.prefill[..], theirs.decode.len()), (&expected[..], 2));
        assert_eq!(theirs.engine, Some(PairEngine::SgLang));
        assert_eq!((theirs.prefill_policy, theirs.decode_policy), (Some(Policy::Random), None));
        for wrong in ["--prefill a:1", "--decode a:1", "--prefill a:1 --decode b:1 --backends c:1"]
        {
            let words = std::iter::once("route").chain(wrong.split(' '));
            assert!(Only::try_parse_from(words).is_err(), "{wrong}");
        }
        for wrong in ["--prefill 8998 --decode b:1", "--prefill a:1 99999 --decode b:1"] {
            let words = std::iter::once("route").chain(wrong.split(' '));
            let only = Only::try_parse_from(words).unwrap();
            assert!(only.flags.config(1 << 20, None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn keys_come_from_flags_and_from_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "two\n\n three \n").unwrap();
        let path = file.path().to_str().unwrap();
        let found = config(&["--api-key", "one", "--api-key-file", path, "--router-key", "r"]);
        assert_eq!(found.api_keys, ["one", "two", "three"]);
        assert_eq!(found.router_key.as_deref(), Some("r"));
        std::fs::write(file.path(), "\n").unwrap();
        let empty = Only::try_parse_from(["route", "--api-key-file", path]).unwrap();
        assert!(empty.flags.config(1 << 20, None).unwrap_err().to_string().contains("no key"));
        for flag in ["--api-key", "--admin-api-key", "--router-key"] {
            // An empty environment variable must not remove the protection.
            let open = Only::try_parse_from(["route", flag, ""]).unwrap();
            let refused = open.flags.config(1 << 20, None).unwrap_err().to_string();
            assert!(refused.starts_with(flag), "{refused}");
        }
    }

    #[test]
    fn two_ways_to_know_the_load_are_too_many() {
        let both = ["route", "--load-watch-interval", "1", "--no-load-acknowledgement"];
        assert!(Only::try_parse_from(both).is_err());
        assert!(Only::try_parse_from(["route", "--retry-jitter-factor", "2"]).is_err());
    }
}
