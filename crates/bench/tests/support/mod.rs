//! A scripted server, and a function that runs the load generator against it.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use clap::Parser;
use forebay_bench::{ServeArgs, TokenizerFinder, serve};
use forebay_text::Tokenizer;
use serde_json::{Value, json};

/// A request as the server received it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) headers: Vec<String>,
    pub(crate) body: Value,
}

/// The writing side of a connection.
pub(crate) struct Wire(TcpStream);

impl Wire {
    /// Writes bytes unchanged. Ignores errors, since the client may have closed the connection.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    /// Writes a complete response.
    pub(crate) fn answer(&mut self, status: &str, body: &str) {
        let length = body.len();
        self.raw(
            format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
                .as_bytes(),
        );
    }

    /// Writes the head of a streamed response.
    pub(crate) fn stream(&mut self) {
        self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n");
    }

    /// Writes a chunk of a stream.
    pub(crate) fn piece(&mut self, bytes: &[u8]) {
        self.raw(format!("{:x}\r\n", bytes.len()).as_bytes());
        self.raw(bytes);
        self.raw(b"\r\n");
    }

    /// Writes an event of a stream.
    pub(crate) fn event(&mut self, data: &Value) {
        self.piece(format!("data: {data}\n\n").as_bytes());
    }

    /// Writes the usual end of a stream.
    pub(crate) fn done(&mut self) {
        self.piece(b"data: [DONE]\n\n");
        self.raw(b"0\r\n\r\n");
    }

    /// Writes a stream with one token in each event and the usage at its end.
    pub(crate) fn completion(&mut self, tokens: u64) {
        self.stream();
        for _ in 0..tokens {
            self.event(&json!({"choices": [{"index": 0, "text": " a"}], "usage": null}));
        }
        self.event(
            &json!({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": tokens}}),
        );
        self.done();
    }
}

/// Serves every connection on a separate thread until the process exits. `script` responds to all
/// requests except /v1/models, and returns whether to keep the connection open.
pub(crate) fn server(
    script: impl Fn(&Request, &mut Wire) -> bool + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let script = Arc::new(script);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let script = Arc::clone(&script);
            std::thread::spawn(move || connection(stream, &*script));
        }
    });
    address
}

fn connection(stream: TcpStream, script: &impl Fn(&Request, &mut Wire) -> bool) {
    stream.set_nodelay(true).expect("an option that TCP has");
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut wire = Wire(stream);
    while let Some(request) = read(&mut reader) {
        let keep = if request.path == "/v1/models" {
            wire.answer("200 OK", r#"{"data": [{"id": "served", "root": "root-model"}]}"#);
            true
        } else {
            script(&request, &mut wire)
        };
        if !keep {
            return;
        }
    }
}

fn read(reader: &mut impl BufRead) -> Option<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_lowercase()),
        }
    }
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().expect("a length"))];
    reader.read_exact(&mut body).ok()?;
    let path = lines[0].split(' ').nth(1)?.to_owned();
    Some(Request {
        path,
        headers: lines,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
    })
}

struct Words;

impl TokenizerFinder for Words {
    fn find(&self, name: &str) -> anyhow::Result<Tokenizer> {
        anyhow::ensure!(name == "root-model", "{name} is unknown");
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../text/tests/data/tiny-llama-tokenizer.json");
        Ok(Tokenizer::from_file(&path)?)
    }
}

#[derive(Parser)]
#[command(args_override_self = true)]
struct Cli {
    #[command(flatten)]
    args: ServeArgs,
}

/// Runs the load generator with the flags in `line`. Returns the line that it appends to the result
/// file, and its error if there was one.
pub(crate) fn run(address: SocketAddr, line: &str) -> (Value, Option<String>) {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("result.jsonl");
    let base = format!(
        "bench --base-url http://{address} --no-progress --warmup-requests 0 --random-input-len 8 \
         --output-details --output-file {} {line}",
        file.display()
    );
    let cli = Cli::parse_from(base.split_whitespace());
    let error = serve(&cli.args, &Words).err().map(|error| format!("{error:#}"));
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let value = match lines[..] {
        [] => Value::Null,
        [line] => serde_json::from_str(line).expect("JSON"),
        _ => panic!("one run wrote {} lines", lines.len()),
    };
    (value, error)
}
