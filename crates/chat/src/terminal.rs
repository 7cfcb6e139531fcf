//! Input lines of the user, and the commands in them.

use std::io::{self, Write};

use anyhow::Result;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};
use tokio::task::spawn_blocking;

use crate::link::Link;
use crate::turns::{AnswerEnd, Conversation};

const PROMPT: &str = "> ";
/// The prompt before each further line of a message.
const MORE: &str = ". ";
const HELP: &str = "\
/new            begin a new conversation
/again          have the last answer written again
/system [TEXT]  begin a new conversation, with something that the model is told before
/exit           end, as Ctrl-D does
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer.";

type Lines = Editor<(), MemHistory>;

/// The command that a line contains.
#[derive(Debug, PartialEq, Eq)]
enum Wish<'a> {
    Nothing,
    Help,
    New,
    Again,
    System(&'a str),
    Exit,
    Unknown(&'a str),
    Say(&'a str),
}

fn wish(line: &str) -> Wish<'_> {
    let line = line.trim();
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    match word {
        "" => Wish::Nothing,
        "/help" | "/?" => Wish::Help,
        "/new" | "/clear" | "/reset" => Wish::New,
        "/again" | "/retry" => Wish::Again,
        "/system" => Wish::System(rest.trim()),
        "/exit" | "/quit" | "/bye" => Wish::Exit,
        // A word with another `/` is taken for a path, so the line is a message, not a mistyped
        // command.
        _ if word.starts_with('/') && !word[1..].contains('/') => Wish::Unknown(word),
        _ => Wish::Say(line),
    }
}

/// A chat between the terminal's user and a server.
pub(crate) struct Terminal<'a> {
    link: &'a Link,
    lines: Option<Lines>,
}

impl<'a> Terminal<'a> {
    pub(crate) fn new(link: &'a Link) -> Result<Self> {
        let config = Config::builder().auto_add_history(true).build();
        let lines = Editor::with_history(config, MemHistory::new())?;
        Ok(Self { link, lines: Some(lines) })
    }

    /// Reads lines and answers them until the user exits.
    pub(crate) async fn run(&mut self, conversation: &mut Conversation) -> Result<()> {
        println!("{} at {}. /help says what can be typed.", conversation.model, self.link.name());
        while let Some(line) = self.read().await? {
            match wish(&line) {
                Wish::Nothing => {}
                Wish::Help => println!("{HELP}"),
                Wish::New => {
                    conversation.clear();
                    println!("A new conversation.");
                }
                Wish::System(text) => {
                    conversation.set_system(text);
                    println!("A new conversation.");
                }
                Wish::Again if conversation.take_back() => self.answer(conversation).await?,
                Wish::Again => println!("There is no answer yet."),
                Wish::Exit => return Ok(()),
                Wish::Unknown(word) => println!("{word} is not known; /help says what is."),
                Wish::Say(text) => {
                    conversation.say(text);
                    self.answer(conversation).await?;
                }
            }
        }
        Ok(())
    }

    async fn answer(&self, conversation: &mut Conversation) -> Result<()> {
        let mut out = io::stdout();
        match conversation.answer(self.link, &mut out, true).await {
            Ok(AnswerEnd::Whole(end)) => writeln!(out, "\x1b[2m{}\x1b[0m", end.line())?,
            Ok(AnswerEnd::Stopped) => writeln!(out, "\x1b[2mstopped\x1b[0m")?,
            // The next try may succeed, and the line stays in the history.
            Err(error) => writeln!(out, "error: {error:#}")?,
        }
        Ok(())
    }

    /// Reads a message of one or several lines; `None` at the end of input.
    async fn read(&mut self) -> Result<Option<String>> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { PROMPT } else { MORE };
            // Reads on another thread, so that signals and the server's exit are handled in the
            // meantime.
            let Some(mut lines) = self.lines.take() else { return Ok(None) };
            let (read, lines) = spawn_blocking(move || (lines.readline(prompt), lines)).await?;
            self.lines = Some(lines);
            match read {
                Ok(line) => match line.strip_suffix('\\') {
                    Some(part) => text += &format!("{part}\n"),
                    None => return Ok(Some(text + &line)),
                },
                // Ctrl-C discards the line, not the conversation.
                Err(ReadlineError::Interrupted) => text.clear(),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_wishes() {
        for (line, expected) in [
            ("  ", Wish::Nothing),
            ("/help", Wish::Help),
            ("/new", Wish::New),
            ("/system  Be short. ", Wish::System("Be short.")),
            ("/system", Wish::System("")),
            ("/bye", Wish::Exit),
            ("/nwe", Wish::Unknown("/nwe")),
            ("/etc/passwd is what?", Wish::Say("/etc/passwd is what?")),
            ("Hello there ", Wish::Say("Hello there")),
            ("1/2", Wish::Say("1/2")),
        ] {
            assert_eq!(wish(line), expected, "{line}");
        }
    }
}
