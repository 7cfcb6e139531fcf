//! `forebay chat` and `forebay run-batch`. The model is downloaded in this process, so that the
//! terminal shows the progress; the crate `chat` does the rest.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Error, Result, bail};
use clap::Parser;
use forebay_chat::{BatchArgs, ChatArgs};
use forebay_hub::{ModelName, Settings};

use crate::command::{Command, Flags};
use crate::flags::{Device, LoadFormat, ServeFlags, foreign};
use crate::model::find_python;
use crate::models::hub;

/// Runs a chat until the user ends it.
pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    prepare(args.model(), args.serve_flags())?;
    forebay_chat::chat(args, this_program()?)
}

/// Computes the answers to a file of requests.
pub(crate) fn run_batch(args: &BatchArgs) -> Result<ExitCode> {
    prepare(args.model(), args.serve_flags())?;
    forebay_chat::run_batch(args, this_program()?)
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("this program")
}

/// Checks the flags of the server that the command will start, and downloads its model.
fn prepare(model: Option<&str>, serve_flags: &[String]) -> Result<()> {
    let Some(model) = model else { return Ok(()) };
    let serving = ["forebay", "serve", model].into_iter();
    let serving = serving.chain(serve_flags.iter().map(String::as_str)).map(OsString::from);
    let translated = foreign::translate(serving).map_err(Error::msg)?;
    for note in translated.notes {
        eprintln!("note: {note}");
    }
    match Flags::try_parse_from(translated.arguments)?.command {
        Command::Serve(flags) => download(model, &flags),
        _ => bail!("`serve` was asked for"),
    }
}

/// Downloads the model's missing files, as `serve` would with these flags.
fn download(model: &str, flags: &ServeFlags) -> Result<()> {
    let source = flags.source();
    let simulated = flags.run.device == Device::Sim;
    let weights = !simulated && flags.loading.load_format != LoadFormat::Dummy;
    let settings = Settings::from_env(source.download_dir, source.offline)?;
    let hub = hub(settings, &find_python(flags.run.python.as_deref()))?;
    let mut found = hub.find(&ModelName::parse(model, source.revision)?, weights)?;
    hub.complete(&mut found)?;
    Ok(())
}
