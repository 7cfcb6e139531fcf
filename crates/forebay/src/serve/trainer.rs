//! A process that joins a trainer's process group as a rank, and writes the received tensors to
//! files.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use forebay_hand::without_keys;
use forebay_server::{NamedTensor, TensorReceiver, TrainerGroup};
use serde::Deserialize;
use serde_json::{Value, json};

/// Seconds for which the ranks of a group wait for each other.
const PATIENCE: u32 = 300;

/// A rank in a trainer's group. Dropping it stops its process.
pub(super) struct GroupRank {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// The process's response to an order.
#[derive(Deserialize)]
struct Answer {
    error: Option<String>,
}

impl GroupRank {
    /// Joins a group. Waits for the trainer.
    ///
    /// # Errors
    /// The interpreter or PyTorch is missing, or the ranks do not find each other.
    pub(super) fn join(python: &Path, group: &TrainerGroup) -> Result<Self> {
        crate::python::check(python)?;
        let mut command = Command::new(python);
        without_keys(&mut command);
        let mut process = command
            .args(crate::python::arguments("forebay.distributed.trainer"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| format!("cannot run {}", python.display()))?;
        let (orders, answers) = (process.stdin.take(), process.stdout.take());
        let answers = BufReader::new(answers.context("it has an output")?);
        let mut rank = Self { process, orders, answers };
        let TrainerGroup { address, port, rank: own, world_size, name } = group;
        rank.order(&json!({"join": {
            "address": address,
            "port": port,
            "rank": own,
            "world_size": world_size,
            "name": name,
            "seconds": PATIENCE,
        }}))?;
        Ok(rank)
    }

    fn order(&mut self, order: &Value) -> Result<()> {
        let ended = "the process that receives tensors has ended";
        let mut orders = self.orders.as_ref().context(ended)?;
        // This is a single write, if the pipe accepts the whole line.
        orders.write_all(format!("{order}\n").as_bytes()).context(ended)?;
        let mut line = String::new();
        self.answers.read_line(&mut line).context(ended)?;
        if line.is_empty() {
            bail!(ended);
        }
        let Answer { error } = serde_json::from_str(&line).context("it gave no answer")?;
        error.map_or(Ok(()), |error| bail!("{error}"))
    }
}

impl TensorReceiver for GroupRank {
    fn receive(&mut self, tensors: &[NamedTensor], file: &Path) -> Result<(), String> {
        let names: Vec<&str> = tensors.iter().map(|tensor| &tensor.name[..]).collect();
        let dtypes: Vec<&str> = tensors.iter().map(|tensor| &tensor.dtype[..]).collect();
        let shapes: Vec<&[u64]> = tensors.iter().map(|tensor| &tensor.shape[..]).collect();
        let order = json!({"receive": {
            "names": names, "dtypes": dtypes, "shapes": shapes, "file": file,
        }});
        self.order(&order).map_err(|error| format!("{error:#}"))
    }
}

impl Drop for GroupRank {
    fn drop(&mut self) {
        // The process exits when its stdin is closed, even in the middle of a tensor.
        drop(self.orders.take());
        if let Err(error) = self.process.wait() {
            tracing::warn!("the end of the process that receives tensors: {error}");
        }
    }
}
