//! `forebay chat`: a conversation in a terminal, with a running server or with a server that it
//! starts. `forebay run-batch`: processes a file of requests in the same way. `forebay ls URL`:
//! lists a server's models.
//!
//! `link` speaks HTTP over TCP, TLS or a Unix socket. `answer` reads streamed answers, and `turns`
//! keeps the conversation. `server` starts a server, and `terminal` reads input lines.

mod answer;
mod batch;
mod link;
mod served;
mod server;
mod terminal;
mod turns;

use std::io::{self, IsTerminal, Read};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use tokio::runtime::Builder;

pub use crate::batch::{BatchArgs, run_batch};
use crate::link::Link;
pub use crate::served::{ServedModel, served_models};
use crate::server::StartedServer;
use crate::terminal::Terminal;
use crate::turns::{Conversation, Sampling};

/// The flags of `forebay chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// URL of a running server, such as http://127.0.0.1:8000, or a model (as in `forebay serve`).
    /// For a model a server is started, and stopped afterwards.
    #[arg(value_name = "URL or MODEL", default_value = "smollm2")]
    target: String,
    /// Send this message, print the answer and exit. `-` reads the message from stdin.
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// System message, which precedes the conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Name of the model at the server [default: the first that it lists].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// API key that the server requires.
    #[arg(long, env = "FOREBAY_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    #[command(flatten)]
    sampling: Sampling,
    /// Flags for the started server (those of `serve`), after `--`.
    #[arg(last = true, value_name = "FLAGS")]
    serve: Vec<String>,
}

impl ChatArgs {
    /// Returns the model; `None`: the argument is a server's URL.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        (!is_url(&self.target)).then_some(&self.target)
    }

    /// Returns the flags for a new server.
    #[must_use]
    pub fn serve_flags(&self) -> &[String] {
        &self.serve
    }
}

fn is_url(target: &str) -> bool {
    ["http://", "https://"].iter().any(|scheme| target.starts_with(scheme))
}

/// Chats until the user exits. `program` is the path of this program, for starting a server.
///
/// # Errors
/// The server cannot be reached or started, returns an error, or closes the connection.
pub fn chat(args: &ChatArgs, program: PathBuf) -> Result<()> {
    let said = match args.prompt.as_deref() {
        Some("-") => Some(piped()?),
        Some(text) => Some(text.to_owned()),
        // Piped input is one message, as in `cat letter.txt | forebay chat`.
        None if !io::stdin().is_terminal() => Some(piped()?),
        None => None,
    };
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let started = match is_url(&args.target) {
            true if !args.serve.is_empty() => bail!(
                "flags of `serve` are for a server that is started: {} runs already",
                args.target
            ),
            true => None,
            false => Some(StartedServer::start(program, &args.target, &args.serve).await?),
        };
        let link = match &started {
            Some(server) => server.link(),
            None => Link::to(&args.target, args.api_key.as_deref())?,
        };
        let talked = talk(&link, args, said).await;
        if let Some(server) = started {
            server.stop().await;
        }
        talked
    })
}

async fn talk(link: &Link, args: &ChatArgs, said: Option<String>) -> Result<()> {
    let model = match &args.model {
        Some(model) => model.clone(),
        None => link.first_model().await?,
    };
    let mut conversation = Conversation::new(model, args.system.clone(), args.sampling.clone());
    match said {
        Some(text) => {
            conversation.say(&text);
            conversation.answer(link, &mut io::stdout(), false).await.map(drop)
        }
        None => Terminal::new(link)?.run(&mut conversation).await,
    }
}

fn piped() -> Result<String> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).context("stdin")?;
    if text.trim().is_empty() {
        bail!("nothing is said: stdin is empty");
    }
    Ok(text)
}
