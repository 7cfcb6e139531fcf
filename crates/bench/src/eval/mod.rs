//! An accuracy test of a served model: few-shot GSM8K (Cobbe et al. 2021). Questions are sent and
//! scored as in SGLang's `few_shot_gsm8k`, except that the examples come from the training
//! questions, so no example is scored.

mod exam;
mod score;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::client::{
    Client, Clock, Dialect, Live, PlannedRequest, RequestOptions, ServerFlags, Target,
};
use crate::item::{Prompt, WorkItem};
use crate::record::Record;

use exam::{Exam, STOP};
use score::{Answer, Score};

/// Flags of `forebay eval gsm8k`.
#[derive(Debug, Clone, Args)]
pub struct Gsm8kArgs {
    /// Name of the model in requests [default: the first model that /v1/models lists].
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// GSM8K's test questions, one JSON object per line.
    #[arg(long, value_name = "FILE")]
    pub data_path: PathBuf,
    /// GSM8K's training questions. The first ones are the examples in each prompt.
    #[arg(long, value_name = "FILE")]
    pub train_path: PathBuf,
    /// Number of examples in each prompt.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub num_shots: usize,
    /// Number of questions to send, from the first on.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub num_questions: usize,
    /// Largest number of concurrent requests.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub parallel: u32,
    /// Largest number of tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Number of retries of a failed request. A request that never succeeds is reported, and counts
    /// as neither right nor wrong.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub retries: u32,
    /// Timeout of a request in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 21600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// File for the results and the settings, as a JSON object.
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// File for all prompts and answers, one JSON object per line.
    #[arg(long, value_name = "FILE")]
    pub raw_result_file: Option<PathBuf>,
    /// The server to evaluate.
    #[command(flatten)]
    pub server: ServerFlags,
}

/// The content of `--output-file`.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    task: &'static str,
    backend: &'static str,
    base_url: String,
    model: &'a str,
    num_shots: usize,
    parallel: u32,
    max_new_tokens: u32,
    #[serde(flatten)]
    score: &'a Score,
    /// The number of retried requests.
    retried: u64,
    date: String,
    forebay_version: &'static str,
}

/// Sends the questions. Prints the accuracy, the share of invalid answers, latency and output
/// throughput, and writes the files.
///
/// # Errors
/// The question files can't be used, the server can't be found, a file can't be written, or a
/// request failed. After a failed request, the results of all other requests are still printed and
/// written.
pub fn gsm8k(args: &Gsm8kArgs) -> Result<()> {
    let questions = exam::read(&args.data_path)?;
    let examples = exam::read(&args.train_path)?;
    let exam = Exam::new(&questions, &examples, args.num_shots, args.num_questions)?;
    let dialect = args.server.backend.dialect();
    ensure!(dialect != Dialect::Embeddings, "embeddings answer no question");
    for path in [&args.output_file, &args.raw_result_file].into_iter().flatten() {
        check_writable(path)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (model, run) = runtime.block_on(async {
        let client = Client::new(Target::new(&args.server)?, Duration::from_secs(args.timeout));
        let model = match &args.model {
            Some(model) => model.clone(),
            None => {
                client
                    .first_model()
                    .await
                    .context("the server does not say its model; give --model")?
                    .0
            }
        };
        let run = ask(args, client, &model, &exam.prompts).await?;
        anyhow::Ok((model, run))
    })?;
    let start = run.records.iter().map(|record| record.sent_us).min().unwrap_or(0);
    let end = run.records.iter().map(|record| record.end_us).max().unwrap_or(0);
    let asked = exam.prompts.into_iter().zip(exam.labels).zip(run.records).enumerate();
    let answers: Vec<_> = asked
        .map(|(index, ((prompt, label), record))| Answer::new(index, prompt, label, record))
        .collect();
    let score = Score::new(&answers, (end - start) as f64 / 1e6);
    println!("{score}");
    if let Some(path) = &args.raw_result_file {
        let lines: Vec<_> = answers.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        fs::write(path, lines.join("\n") + "\n").with_context(|| cannot_write(path))?;
    }
    if let Some(path) = &args.output_file {
        let summary = Summary {
            task: "gsm8k",
            backend: args.server.backend.name(),
            base_url: args.server.url(),
            model: &model,
            num_shots: args.num_shots,
            parallel: args.parallel,
            max_new_tokens: args.max_new_tokens,
            score: &score,
            retried: run.retried,
            date: jiff::Timestamp::now().to_string(),
            forebay_version: env!("CARGO_PKG_VERSION"),
        };
        let text = serde_json::to_string_pretty(&summary)? + "\n";
        fs::write(path, text).with_context(|| cannot_write(path))?;
    }
    if score.failed > 0 {
        bail!("{} of {} requests failed", score.failed, score.num_questions);
    }
    Ok(())
}

/// Checks before the run that the file can be written, without changing its content.
fn check_writable(path: &Path) -> Result<()> {
    let mut options = File::options();
    options.create(true).append(true).open(path).with_context(|| cannot_write(path))?;
    Ok(())
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// The answers of a run.
struct Run {
    /// The records, one for each prompt, in the order of the prompts.
    records: Vec<Record>,
    retried: u64,
}

/// Sends all prompts, `--parallel` at a time. As soon as a request ends, the next is sent.
async fn ask(args: &Gsm8kArgs, client: Client, model: &str, prompts: &[String]) -> Result<Run> {
    let options = RequestOptions {
        model: model.to_owned(),
        temperature: 0.0,
        stop: STOP.map(str::to_owned).to_vec(),
        ..RequestOptions::default()
    };
    let bodies: Vec<Bytes> = prompts
        .iter()
        .map(|prompt| {
            let prompt = Prompt::Text(prompt.clone());
            let output_tokens = args.max_new_tokens;
            let item = WorkItem { prompt, text_tokens: 0, output_tokens, arrival: None };
            options.body(args.server.backend, &item)
        })
        .collect::<Result<_>>()?;
    let (client, live, clock) = (Arc::new(client), Arc::new(Live::default()), Clock::start());
    let retries = args.retries;
    let progress = ProgressBar::new(bodies.len() as u64).with_style(ProgressStyle::with_template(
        "{elapsed_precise} {wide_bar} {pos}/{len} answers, {msg}",
    )?);
    let mut waiting = bodies.into_iter().enumerate();
    let mut asking = JoinSet::new();
    let mut records = vec![Record::default(); prompts.len()];
    let (mut retried, mut failed) = (0, 0);
    progress.set_message("none failed");
    loop {
        while asking.len() < args.parallel as usize
            && let Some((index, body)) = waiting.next()
        {
            let (client, live) = (Arc::clone(&client), Arc::clone(&live));
            asking.spawn(async move {
                let mut again = 0;
                let mut reply = client.send(body.clone(), 1, clock, &live).await;
                while !reply.succeeded() && again < retries {
                    again += 1;
                    reply = client.send(body.clone(), 1, clock, &live).await;
                }
                (index, reply, again)
            });
        }
        let Some(joined) = asking.join_next().await else { break };
        let (index, reply, again) = joined?;
        retried += u64::from(again);
        if !reply.succeeded() {
            failed += 1;
            progress.set_message(format!("{failed} failed"));
        }
        let intended = reply.sent_us;
        let asked =
            PlannedRequest { output_tokens: args.max_new_tokens, ..PlannedRequest::default() };
        (records[index], _) = reply.into_record(intended, &asked);
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(Run { records, retried })
}
