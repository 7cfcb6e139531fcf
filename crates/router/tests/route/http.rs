//! A minimal HTTP implementation that lets the tests control every byte.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A timeout that a step of a test reaches only if the test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A request or a response: the first line, headers in lower case, and the body.
#[derive(Debug, Clone, Default)]
pub(crate) struct Message {
    pub(crate) first: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// True if the body was complete according to the message's headers.
    pub(crate) whole: bool,
}

impl Message {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn status(&self) -> u16 {
        self.first.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub(crate) fn path(&self) -> &str {
        self.first.split(' ').nth(1).unwrap()
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{self:?}"))
    }

    /// Returns the events of a stream without the last one, which has to be `[DONE]`.
    pub(crate) fn events(&self) -> Vec<serde_json::Value> {
        assert!(self.whole, "{self:?}");
        let mut events: Vec<&str> = self
            .text()
            .split("\n\n")
            .filter(|event| !event.is_empty())
            .map(|event| event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?}")))
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{self:?}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// Reads a head. `None`: the connection was closed before it.
pub(crate) fn read_head(reader: &mut impl BufRead) -> Option<Message> {
    let mut message = Message::default();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end();
        if line.is_empty() {
            return Some(message);
        }
        match line.split_once(": ") {
            Some((name, value)) if !message.first.is_empty() => {
                message.headers.push((name.to_ascii_lowercase(), value.to_owned()));
            }
            _ => message.first = line.to_owned(),
        }
    }
}

/// Reads the body that the message's head announces.
pub(crate) fn read_body(reader: &mut impl BufRead, message: &mut Message) {
    if let Some(length) = message.header("content-length").map(|value| value.parse().unwrap()) {
        message.body = vec![0; length];
        message.whole = reader.read_exact(&mut message.body).is_ok();
    } else if message.header("transfer-encoding").is_some() {
        while let Some(chunk) = read_chunk(reader) {
            if chunk.is_empty() {
                message.whole = true;
                return;
            }
            message.body.extend(chunk);
        }
    } else {
        message.whole = true;
    }
}

/// Reads a chunk; the last one is empty. `None`: the connection was closed.
pub(crate) fn read_chunk(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let size = usize::from_str_radix(line.trim(), 16).ok()?;
    let mut chunk = vec![0; size + 2];
    reader.read_exact(&mut chunk).ok()?;
    chunk.truncate(size);
    Some(chunk)
}

/// A client's connection.
pub(crate) struct Client(pub(crate) BufReader<TcpStream>);

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(socket))
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[&str], body: &[u8]) {
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        self.0.get_mut().write_all(&[head.as_bytes(), body].concat()).unwrap();
    }

    pub(crate) fn head(&mut self) -> Message {
        read_head(&mut self.0).expect("a response")
    }

    pub(crate) fn answer(&mut self) -> Message {
        let mut message = self.head();
        read_body(&mut self.0, &mut message);
        message
    }
}

/// Sends one request on a new connection.
pub(crate) fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &[u8],
) -> Message {
    let mut client = Client::connect(address);
    client.send(method, path, headers, body);
    client.answer()
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &str) -> Message {
    ask(address, "POST", path, &[], body.as_bytes())
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Message {
    ask(address, "GET", path, &[], b"")
}
