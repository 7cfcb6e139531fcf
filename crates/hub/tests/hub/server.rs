//! A simulated hub, which sends wrong responses on demand.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(crate) const REPOSITORY: &str = "org/name";

/// The parts of a request that tests check.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) start: Option<usize>,
    pub(crate) token: Option<String>,
}

impl Asked {
    /// True if the request downloads a file.
    pub(crate) fn is_download(&self) -> bool {
        self.method == "GET" && self.path.contains("/resolve/")
    }
}

/// A response. Its status and headers are written unchanged.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// The number of bytes of the body after which the connection is cut.
    pub(crate) cut: Option<usize>,
}

impl Answer {
    pub(crate) fn new(status: u16, headers: &[(&'static str, &str)]) -> Self {
        let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Self { status, headers, body: Vec::new(), cut: None }
    }

    pub(crate) fn set(&mut self, name: &'static str, value: &str) {
        self.headers.retain(|(other, _)| *other != name);
        self.headers.push((name, value.to_owned()));
    }
}

/// A function that changes responses. It gets the request, the response, and the request's index.
pub(crate) type Change = Box<dyn Fn(&Asked, &mut Answer, usize) + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) endpoint: String,
    state: Arc<State>,
}

struct State {
    files: Mutex<BTreeMap<String, Vec<u8>>>,
    asked: Mutex<Vec<Asked>>,
    change: Change,
}

impl Server {
    pub(crate) fn start(files: &[(&str, &[u8])]) -> Self {
        Self::changed(files, |_, _, _| ())
    }

    /// Starts a server whose responses `change` modifies before they are sent.
    pub(crate) fn changed(
        files: &[(&str, &[u8])],
        change: impl Fn(&Asked, &mut Answer, usize) + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let files = files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec()));
        let state = Arc::new(State {
            files: Mutex::new(files.collect()),
            asked: Mutex::default(),
            change: Box::new(change),
        });
        let server = Self { endpoint, state };
        let accepting = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = accepting.clone();
                thread::spawn(move || server.talk(&stream));
            }
        });
        server
    }

    pub(crate) fn put(&self, name: &str, content: &[u8]) {
        self.state.files.lock().expect("no panic").insert(name.to_owned(), content.to_vec());
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.state.asked.lock().expect("no panic").clone()
    }

    /// Returns the first byte that each download of `name` requested.
    pub(crate) fn downloads(&self, name: &str) -> Vec<Option<usize>> {
        let of = |asked: &Asked| asked.is_download() && asked.path.ends_with(name);
        self.asked().into_iter().filter(of).map(|asked| asked.start).collect()
    }

    fn talk(&self, stream: &TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        loop {
            let asked = read(&mut reader)?;
            let number = {
                let mut all = self.state.asked.lock().expect("no panic");
                all.push(asked.clone());
                all.len() - 1
            };
            let mut answer = self.answer(&asked);
            (self.state.change)(&asked, &mut answer, number);
            write(stream, &asked, &answer)?;
        }
    }

    fn answer(&self, asked: &Asked) -> Answer {
        let files = self.state.files.lock().expect("no panic");
        if let Some(rest) = asked.path.strip_prefix("/api/models/") {
            let (repository, revision) = rest.split_once("/revision/").unwrap_or((rest, "main"));
            if repository != REPOSITORY {
                return Answer::new(401, &[("x-error-code", "RepoNotFound")]);
            }
            if !["main", "pr%2F1", COMMIT].contains(&revision) {
                return Answer::new(404, &[("x-error-code", "RevisionNotFound")]);
            }
            let names: Vec<String> =
                files.keys().map(|name| format!(r#"{{"rfilename":{name:?}}}"#)).collect();
            let mut answer = Answer::new(200, &[]);
            answer.body =
                format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, names.join(",")).into_bytes();
            return answer;
        }
        let name = asked.path.strip_prefix(&format!("/{REPOSITORY}/resolve/{COMMIT}/"));
        let Some(content) = name.and_then(|name| files.get(&name.replace("%20", " "))) else {
            return Answer::new(404, &[("x-error-code", "EntryNotFound")]);
        };
        let start = asked.start.unwrap_or(0);
        if start > 0 && start >= content.len() {
            return Answer::new(416, &[]);
        }
        let mut answer = Answer::new(if asked.start.is_some() { 206 } else { 200 }, &[]);
        answer.set("etag", &format!("\"{}\"", sha256(content)));
        if asked.start.is_some() {
            let range = format!("bytes {start}-{}/{}", content.len() - 1, content.len());
            answer.set("content-range", &range);
        }
        answer.body = content[start..].to_vec();
        answer
    }
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Asked> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let mut asked = Asked { method: words.next()?, path: words.next()?, start: None, token: None };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else { return Some(asked) };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let digits: String = value.chars().filter(char::is_ascii_digit).collect();
                asked.start = digits.parse().ok();
            }
            "authorization" => asked.token = Some(value.to_owned()),
            _ => {}
        }
    }
}

fn write(mut stream: &TcpStream, asked: &Asked, answer: &Answer) -> Option<()> {
    let mut head = format!("HTTP/1.1 {} X\r\n", answer.status);
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let told = |name: &str| answer.headers.iter().any(|(other, _)| *other == name);
    if !told("content-length") && !told("transfer-encoding") {
        head += &format!("content-length: {}\r\n", answer.body.len());
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    if asked.method == "HEAD" {
        return Some(());
    }
    let end = answer.cut.unwrap_or(answer.body.len()).min(answer.body.len());
    stream.write_all(&answer.body[..end]).ok()?;
    if answer.cut.is_some() {
        stream.shutdown(Shutdown::Write).ok()?;
        // Read what remains, because closing with unread bytes could discard the response.
        let _ = stream.take(1 << 20).read_to_end(&mut Vec::new());
        return None;
    }
    Some(())
}

pub(crate) fn sha256(content: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, content);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
