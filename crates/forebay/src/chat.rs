//! `forebay chat`. The model is downloaded here, where a terminal shows the progress. The crate
//! `chat` does the rest.

use anyhow::{Context, Result, bail};
use clap::Parser;
use forebay_chat::ChatArgs;
use forebay_hub::{ModelName, Settings};

use crate::command::{Command, Flags};
use crate::flags::{Device, LoadFormat, ServeFlags};
use crate::model::find_python;
use crate::models::hub;

/// Chats until the user ends it.
pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    if let Some(model) = args.model() {
        let serving = ["forebay", "serve", model].into_iter();
        let serving = serving.chain(args.serve_flags().iter().map(String::as_str));
        match Flags::try_parse_from(serving)?.command {
            Command::Serve(flags) => download(model, &flags)?,
            _ => bail!("`serve` was asked for"),
        }
    }
    forebay_chat::chat(args, std::env::current_exe().context("this program")?)
}

/// Downloads missing files, as `serve` would with these flags.
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
