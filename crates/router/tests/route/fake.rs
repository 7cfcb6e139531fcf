//! Fake backends that follow a script of acts, including faults.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_api::peer::{LoadReport, QueuedDispatch, RouterTag, read_ids, write_comment};

use crate::http::{Message, read_body, read_head};

/// How a backend handles one request.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// A JSON answer.
    Answer(u16, String),
    /// Closes the connection before any answer.
    DieFirst,
    /// Closes the connection after the head of a stream.
    DieAfterHead,
    /// Sends a body of this content type with these bytes, then closes the connection.
    DieAfter(&'static str, Vec<u8>),
    /// A complete stream in the format of other engines.
    Stream(Vec<u8>),
    /// A Forebay stream of this many tokens, cut off after this many bytes.
    Tokens(u32, usize),
    /// The first bytes of a Forebay stream, and then nothing.
    HangAfterTokens(usize),
    /// No answer. Waits until the client closes the connection.
    Hang,
    /// The first bytes of a stream, and then nothing.
    HangAfter(Vec<u8>),
    /// A JSON answer once the gate opens.
    Wait(Arc<Gate>),
    /// Another act once the gate opens.
    Held(Arc<Gate>, Box<Act>),
    /// Queues the request with this many tokens. It is answered when the test computes the queue,
    /// unless the client closes the connection earlier.
    Queue(u64),
    /// The backend dies.
    Die,
    /// A JSON answer with this header.
    Refuse(u16, &'static str),
    /// The first bytes of a Forebay stream, as in `HangAfterTokens`, and then these bytes for ever.
    Flood(usize, &'static [u8]),
    /// A head that contains a header of this many bytes.
    LongHead(usize),
    /// These bytes in place of a head.
    Garbage(Vec<u8>),
}

/// A gate at which acts wait until it is opened.
#[derive(Debug)]
pub(crate) struct Gate(Mutex<Receiver<()>>);

impl Gate {
    /// Creates a gate, and a sender. The gate opens when the sender is used or dropped.
    pub(crate) fn new() -> (Arc<Self>, Sender<()>) {
        let (sender, receiver) = channel();
        (Arc::new(Self(Mutex::new(receiver))), sender)
    }
}

/// A body that contains this text kills the backend, unless the script has an act for the request.
pub(crate) const POISON: &str = "poison";

#[derive(Default)]
struct State {
    script: Arc<Mutex<VecDeque<Act>>>,
    seen: Mutex<Vec<Message>>,
    /// True if health checks succeed.
    healthy: AtomicBool,
    /// True if the backend responds to nothing.
    deaf: AtomicBool,
    brain: bool,
    /// All connections, to be closed when the backend dies.
    sockets: Mutex<Vec<TcpStream>>,
    dead: AtomicBool,
    /// A random number that identifies the process.
    epoch: AtomicU64,
    connections: AtomicUsize,
    /// The number of bytes sent by `Act::Flood`.
    flooded: AtomicUsize,
    /// The number of spaces after load reports and health responses.
    padding: AtomicUsize,
    reports: AtomicUsize,
    /// The list of models for routers. With `None` the route does not exist.
    models: Mutex<Option<String>>,
    /// The server info for routers, as in SGLang. With `None` the route does not exist.
    info: Mutex<Option<String>>,
    /// The disaggregation mode that a Forebay server reports; `None` if it computes whole requests.
    mode: Mutex<Option<String>>,
    /// The clients' requests that the backend has handled.
    spans: Mutex<Vec<Span>>,
    queue: Mutex<Queue>,
    alive: AtomicUsize,
    most_alive: AtomicUsize,
    hung_up: Mutex<Option<Sender<()>>>,
}

/// A client's request, the act for it, and the time at which the backend was done.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub(crate) request: Message,
    pub(crate) act: Act,
    pub(crate) end: Instant,
}

/// The queue that a Forebay server reports.
#[derive(Default)]
struct Queue {
    /// The number of prompt tokens to compute; `None` if the server reports no load.
    ahead: Option<u64>,
    /// The number of requests from other routers.
    others: u32,
    /// The tokens of each waiting dispatch, by sequence number.
    waiting: BTreeMap<u64, u64>,
    /// The sequence number of the last dispatch (`seen`), and that of the last report (`at`).
    seen: u64,
    at: u64,
    /// True if the test has computed the queue.
    computed: bool,
}

/// The number of tokens of a Forebay server's stream.
pub(crate) const TOKENS: u32 = 6;

/// A fake backend. Without a scripted act it answers correctly.
pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
}

impl Fake {
    /// Starts a fake server of another engine than Forebay.
    pub(crate) fn other() -> Self {
        Self::start(State::default())
    }

    /// Starts a fake Forebay server.
    pub(crate) fn brain() -> Self {
        Self::start(State { brain: true, ..State::default() })
    }

    /// Starts Forebay servers with a common script: each request takes the next act.
    pub(crate) fn brains(count: usize) -> Vec<Self> {
        let script: Arc<Mutex<VecDeque<Act>>> = Arc::default();
        let brain = || State { brain: true, script: Arc::clone(&script), ..State::default() };
        (0..count).map(|_| Self::start(brain())).collect()
    }

    fn start(state: State) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(state);
        state.healthy.store(true, Ordering::SeqCst);
        // 0 means that the epoch is unknown.
        state.epoch.store(1, Ordering::SeqCst);
        let fake = Self { address, state };
        fake.listen(listener);
        fake
    }

    fn listen(&self, listener: TcpListener) {
        let shared = Arc::clone(&self.state);
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let (state, socket) = (Arc::clone(&shared), socket.unwrap());
                if state.dead.load(Ordering::SeqCst) {
                    // From here on new connections are refused; existing ones are closed.
                    drop(listener);
                    return state.hang_up();
                }
                state.sockets.lock().unwrap().push(socket.try_clone().unwrap());
                std::thread::spawn(move || state.serve(socket));
            }
        });
    }

    /// Ends the process: the port is closed, and all connections break.
    pub(crate) fn die(&self) {
        self.state.die(self.address);
    }

    /// Replaces the process, which keeps the listening socket: all connections break, but the port
    /// is never closed.
    pub(crate) fn restart(&self) {
        self.state.epoch.fetch_add(1, Ordering::SeqCst);
        self.state.hang_up();
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.state.dead.load(Ordering::SeqCst)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Appends acts for the next requests.
    pub(crate) fn will(&self, acts: impl IntoIterator<Item = Act>) -> &Self {
        self.state.script.lock().unwrap().extend(acts);
        self
    }

    /// Empties the script.
    pub(crate) fn forget(&self) {
        self.state.script.lock().unwrap().clear();
    }

    /// Returns the clients' requests so far.
    pub(crate) fn seen(&self) -> Vec<Message> {
        self.state.seen.lock().unwrap().clone()
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// The number of bytes sent by `Act::Flood`.
    pub(crate) fn flooded(&self) -> usize {
        self.state.flooded.load(Ordering::SeqCst)
    }

    /// Appends this many spaces to load reports and health responses.
    pub(crate) fn pad(&self, blanks: usize) {
        self.state.padding.store(blanks, Ordering::SeqCst);
    }

    /// The number of times that the router requested the load.
    pub(crate) fn reports(&self) -> usize {
        self.state.reports.load(Ordering::SeqCst)
    }

    /// Sets the list of models: names, and digests of adapters.
    pub(crate) fn lists(&self, models: &[(&str, Option<&str>)]) {
        let card = |&(id, digest): &(&str, Option<&str>)| match digest {
            Some(digest) => serde_json::json!({"id": id, "digest": digest}),
            None => serde_json::json!({"id": id}),
        };
        let data: Vec<_> = models.iter().map(card).collect();
        let list = serde_json::json!({"object": "list", "data": data});
        *self.state.models.lock().unwrap() = Some(list.to_string());
    }

    /// Sets a list of one model, with this engine as `owned_by`.
    pub(crate) fn is_of(&self, model: &str, engine: &str) {
        let card = serde_json::json!({"id": model, "owned_by": engine});
        let list = serde_json::json!({"object": "list", "data": [card]});
        *self.state.models.lock().unwrap() = Some(list.to_string());
    }

    /// Sets the disaggregation mode that a Forebay server reports.
    pub(crate) fn has_mode(&self, mode: &str) {
        *self.state.mode.lock().unwrap() = Some(mode.to_owned());
    }

    /// Sets the server info, as in SGLang.
    pub(crate) fn tells(&self, info: &serde_json::Value) {
        *self.state.info.lock().unwrap() = Some(info.to_string());
    }

    /// Returns the clients' requests that the backend has handled.
    pub(crate) fn spans(&self) -> Vec<Span> {
        self.state.spans.lock().unwrap().clone()
    }

    /// The number of clients' requests that the backend is working on.
    pub(crate) fn alive(&self) -> usize {
        self.state.alive.load(Ordering::SeqCst)
    }

    /// Sets the reported counts of prompt tokens to compute and of other routers' requests.
    pub(crate) fn has_queue(&self, ahead: u64, others: u32) {
        let mut queue = self.state.queue.lock().unwrap();
        (queue.ahead, queue.others) = (Some(ahead), others);
    }

    /// Makes the server report that a dispatch waits, although it does not.
    pub(crate) fn claims(&self, seq: u64, tokens: u64) {
        self.state.queue.lock().unwrap().waiting.insert(seq, tokens);
    }

    /// The number of requests in the queue.
    pub(crate) fn queued(&self) -> usize {
        self.state.queue.lock().unwrap().waiting.len()
    }

    /// Answers all requests in the queue.
    pub(crate) fn compute_queue(&self) {
        self.state.queue.lock().unwrap().computed = true;
    }

    /// The largest number of simultaneous requests.
    pub(crate) fn most_alive(&self) -> usize {
        self.state.most_alive.load(Ordering::SeqCst)
    }

    pub(crate) fn set_healthy(&self, healthy: bool) {
        self.state.healthy.store(healthy, Ordering::SeqCst);
    }

    /// Makes the backend respond to nothing from now on.
    pub(crate) fn stop_listening(&self) {
        self.state.deaf.store(true, Ordering::SeqCst);
    }

    /// Returns a channel that reports when the client of a hanging request disconnects.
    pub(crate) fn hung_up(&self) -> Receiver<()> {
        let (sender, receiver) = channel();
        *self.state.hung_up.lock().unwrap() = Some(sender);
        receiver
    }
}

impl State {
    fn die(&self, address: SocketAddr) {
        if !self.dead.swap(true, Ordering::SeqCst) {
            // Wakes the listening thread.
            let _ = TcpStream::connect(address);
        }
    }

    fn hang_up(&self) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn padded(&self, body: &str) -> String {
        format!("{body}{}", " ".repeat(self.padding.load(Ordering::SeqCst)))
    }

    fn report(&self) -> LoadReport {
        let epoch = self.epoch.load(Ordering::SeqCst);
        let mut queue = self.queue.lock().unwrap();
        let Some(ahead) = queue.ahead else {
            return LoadReport { epoch, ..LoadReport::default() };
        };
        queue.at += 1;
        let own = self.alive.load(Ordering::SeqCst) as u32;
        let (at, seen, requests) = (queue.at, queue.seen, own + queue.others);
        LoadReport { epoch, at, seen, own, requests, ahead, ..LoadReport::default() }
    }

    /// Returns the body of a load report.
    fn load(&self) -> String {
        let mut load = serde_json::to_value(self.report()).unwrap();
        if let Some(mode) = &*self.mode.lock().unwrap() {
            load["disaggregation_mode"] = mode.as_str().into();
        }
        let queue = self.queue.lock().unwrap();
        let queued = queue.waiting.iter().rev();
        load["queued"] = queued
            .map(|(&seq, &tokens)| QueuedDispatch { seq, tokens })
            .map(|queued| serde_json::to_value(queued).unwrap())
            .collect();
        load.to_string()
    }

    /// Waits until the test computes the queue (returns true), or the client closes its connection
    /// (returns false).
    fn queue(&self, reader: &mut BufReader<TcpStream>, seq: u64, tokens: u64) -> bool {
        self.queue.lock().unwrap().waiting.insert(seq, tokens);
        reader.get_ref().set_read_timeout(Some(Duration::from_millis(2))).unwrap();
        let computed = loop {
            match reader.fill_buf() {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    if self.queue.lock().unwrap().computed {
                        break true;
                    }
                }
                _ => break false,
            }
        };
        reader.get_ref().set_read_timeout(None).unwrap();
        self.queue.lock().unwrap().waiting.remove(&seq);
        computed
    }

    fn serve(&self, mut socket: TcpStream) {
        self.connections.fetch_add(1, Ordering::SeqCst);
        let mut reader = BufReader::new(socket.try_clone().unwrap());
        while let Some(mut request) = read_head(&mut reader) {
            read_body(&mut reader, &mut request);
            if self.deaf.load(Ordering::SeqCst) {
                continue;
            }
            let goes_on = match request.path() {
                "/health" => {
                    let status = if self.healthy.load(Ordering::SeqCst) { 200 } else { 503 };
                    answer(&mut socket, status, &self.padded("{}"), "")
                }
                path if path.starts_with("/v1/loads") && self.brain => {
                    self.reports.fetch_add(1, Ordering::SeqCst);
                    answer(&mut socket, 200, &self.padded(&self.load()), "")
                }
                path if path.starts_with("/v1/loads") => answer(&mut socket, 404, "{}", ""),
                "/server_info" | "/get_server_info" if is_of_router(&request) => {
                    match &*self.info.lock().unwrap() {
                        Some(info) => answer(&mut socket, 200, info, ""),
                        None => answer(&mut socket, 404, "{}", ""),
                    }
                }
                // Clients' requests have a dispatch number; the router's own requests have none.
                "/v1/models" if is_of_router(&request) => match &*self.models.lock().unwrap() {
                    Some(list) => answer(&mut socket, 200, list, ""),
                    None => answer(&mut socket, 404, "{}", ""),
                },
                _ => {
                    let alive = self.alive.fetch_add(1, Ordering::SeqCst) + 1;
                    self.most_alive.fetch_max(alive, Ordering::SeqCst);
                    self.seen.lock().unwrap().push(request.clone());
                    if let Some(tag) = tag_of(&request) {
                        let mut queue = self.queue.lock().unwrap();
                        queue.seen = queue.seen.max(tag.seq);
                    }
                    let act = self.script.lock().unwrap().pop_front();
                    let poisoned = String::from_utf8_lossy(&request.body).contains(POISON);
                    let act = act.unwrap_or(match self.brain {
                        _ if poisoned => Act::Die,
                        true => Act::Tokens(TOKENS, usize::MAX),
                        false => Act::Answer(200, "{\"ok\":true}".into()),
                    });
                    let goes_on = self.act(act.clone(), &mut socket, &mut reader, &request);
                    if !goes_on {
                        // Clones of the socket would keep the connection open, so shut it down.
                        let _ = socket.shutdown(Shutdown::Both);
                    }
                    let end = Instant::now();
                    let span = Span { request, act, end };
                    self.spans.lock().unwrap().push(span);
                    self.alive.fetch_sub(1, Ordering::SeqCst);
                    goes_on
                }
            };
            if !goes_on {
                let _ = socket.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    fn act(
        &self,
        act: Act,
        socket: &mut TcpStream,
        reader: &mut BufReader<TcpStream>,
        request: &Message,
    ) -> bool {
        match act {
            Act::Answer(status, body) => answer(socket, status, &body, ""),
            Act::DieFirst => false,
            Act::Die => {
                self.die(socket.local_addr().unwrap());
                while read_head(reader).is_some() {}
                false
            }
            Act::DieAfterHead => {
                stream_head(socket, "");
                false
            }
            Act::DieAfter(kind, body) => {
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
                );
                let _ = socket.write_all(head.as_bytes());
                chunk(socket, &body);
                false
            }
            Act::Stream(body) => {
                stream_head(socket, "");
                chunk(socket, &body) && socket.write_all(b"0\r\n\r\n").is_ok()
            }
            Act::Tokens(count, most) => tokens(socket, request, self.report(), (count, most)),
            Act::HangAfterTokens(most) => {
                tokens(socket, request, self.report(), (TOKENS, most));
                while read_head(reader).is_some() {}
                false
            }
            Act::Hang => {
                while read_head(reader).is_some() {}
                if let Some(hung_up) = &*self.hung_up.lock().unwrap() {
                    let _ = hung_up.send(());
                }
                false
            }
            Act::HangAfter(half) => {
                stream_head(socket, "");
                chunk(socket, &half);
                while read_head(reader).is_some() {}
                false
            }
            Act::Refuse(status, header) => {
                answer(socket, status, "{\"error\":\"full\"}", &format!("{header}\r\n"))
            }
            Act::Flood(most, pattern) => {
                tokens(socket, request, self.report(), (TOKENS, most));
                let piece = pattern.repeat(1 + (32 << 10) / pattern.len());
                while chunk(socket, &piece) {
                    self.flooded.fetch_add(piece.len(), Ordering::SeqCst);
                }
                false
            }
            Act::LongHead(bytes) => {
                answer(socket, 200, "{}", &format!("X-A: {}\r\n", "a".repeat(bytes)))
            }
            Act::Garbage(bytes) => {
                let _ = socket.write_all(&bytes);
                false
            }
            Act::Queue(tokens) => {
                let seq = tag_of(request).unwrap().seq;
                self.queue(reader, seq, tokens) && answer(socket, 200, "{\"ok\":true}", "")
            }
            Act::Held(gate, act) => {
                let _ = gate.0.lock().unwrap().recv();
                self.act(*act, socket, reader, request)
            }
            Act::Wait(gate) => {
                let _ = gate.0.lock().unwrap().recv();
                answer(socket, 200, "{\"ok\":true}", "")
            }
        }
    }
}

fn tag_of(request: &Message) -> Option<RouterTag> {
    request.header("x-forebay-router").and_then(|tag| RouterTag::decode(tag).ok())
}

fn is_of_router(request: &Message) -> bool {
    tag_of(request).is_some_and(|tag| tag.seq == 0)
}

fn answer(socket: &mut TcpStream, status: u16, body: &str, headers: &str) -> bool {
    let length = body.len();
    let text = format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nX-Own: 1\r\n\
         X-Forebay-Secret: 1\r\n{headers}\r\n{body}"
    );
    socket.write_all(text.as_bytes()).is_ok()
}

fn stream_head(socket: &mut TcpStream, headers: &str) {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n{headers}\r\n"
    );
    let _ = socket.write_all(head.as_bytes());
}

fn chunk(socket: &mut TcpStream, body: &[u8]) -> bool {
    let framed = [format!("{:x}\r\n", body.len()).as_bytes(), body, b"\r\n"].concat();
    body.is_empty() || socket.write_all(&framed).is_ok()
}

/// Writes a Forebay server's stream: token 3 * i at position i, with this number as its text.
/// Resumes after the token ids in the body, and stops after `most` bytes, even within an event.
fn tokens(
    socket: &mut TcpStream,
    request: &Message,
    report: LoadReport,
    (count, most): (u32, usize),
) -> bool {
    let tag = RouterTag::decode(request.header("x-forebay-router").unwrap()).unwrap();
    let resumed = request.header("x-forebay-resume").map(|length| length.parse().unwrap());
    let from = resumed.map_or(0, |length: usize| {
        let ids = read_ids(std::str::from_utf8(&request.body[..length]).unwrap()).unwrap();
        assert_eq!(ids, (0..ids.len() as i32).map(|id| 3 * id).collect::<Vec<_>>());
        ids.len() as u32
    });
    let name = request.header("x-forebay-stream").unwrap_or("5;first").to_owned();
    let report = LoadReport { at: 1, seen: tag.seq, own: 1, requests: 1, ..report };
    let mut encoded = Vec::new();
    report.encode(&mut encoded);
    let load = String::from_utf8(encoded).unwrap();
    stream_head(socket, &format!("X-Forebay-Stream: {name}\r\nX-Forebay-Load: {load}\r\n"));
    let mut left = most;
    for position in from..count {
        let (id, last) = (3 * position as i32, position + 1 == count);
        let mut body = format!("data: {{\"name\":\"{name}\",\"text\":\"{id} \"}}\n\n").into_bytes();
        if last {
            body.extend(b"data: [DONE]\n\n");
        } else {
            write_comment(&[id], (position % 2 == 0).then_some(&report), &mut body);
        }
        if body.len() > left {
            chunk(socket, &body[..left]);
            return false;
        }
        left -= body.len();
        if !chunk(socket, &body) {
            return false;
        }
    }
    left > 0 && socket.write_all(b"0\r\n\r\n").is_ok()
}
