//! The cost of writing one chunk to each of N sockets: one `send` per socket, or one io_uring
//! submission for many sockets. `cargo bench -p forebay-server --bench socket_writes`.
//!
//! The sockets are TCP connections over loopback. A second thread reads them, woken by epoll. Times
//! are CPU times of the writing thread. The next column adds the CPU time of all other threads,
//! such as the kernel's io_uring workers, but not that of the reader. Rounds of the two methods
//! alternate; results are medians over the rounds.
#![expect(
    unsafe_code,
    reason = "io_uring's submission queue takes pointers to what is to be written"
)]

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use rustix::event::epoll;
use rustix::net::SendFlags;
use rustix::time::{ClockId, clock_gettime};

/// About the length of a chat chunk in a stream.
const CHUNK: [u8; 240] = [b'x'; 240];
const SOCKETS: [usize; 4] = [64, 512, 2048, 4096];
/// The number of entries of the ring, and so the maximum number of writes per submission.
const RING: u32 = 1024;
const ROUNDS: usize = 9;
const CHUNKS_A_ROUND: usize = 60_000;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let mut ring = match IoUring::new(RING) {
        Ok(ring) => Some(ring),
        Err(error) => {
            println!("io_uring is not available here ({error}): only send is measured");
            None
        }
    };
    println!(
        "CPU us a chunk, median of {ROUNDS} alternating rounds of about {CHUNKS_A_ROUND} chunks"
    );
    println!("sockets  way       writer  all threads but the reader  ratio");
    for sockets in SOCKETS {
        let mut lines = Lines::open(sockets)?;
        let mut send = Vec::new();
        let mut uring = Vec::new();
        for _ in 0..ROUNDS {
            send.push(lines.round(Lines::send_each)?);
            if let Some(ring) = &mut ring {
                uring.push(lines.round(|lines| lines.submit(ring))?);
            }
        }
        let send = median(&mut send);
        print(sockets, "send", send, 1.0);
        if !uring.is_empty() {
            let uring = median(&mut uring);
            print(sockets, "io_uring", uring, uring.writer / send.writer);
        }
    }
    Ok(())
}

fn print(sockets: usize, way: &str, cost: Cost, ratio: f64) {
    let Cost { writer, others } = cost;
    println!("{sockets:7}  {way:8} {writer:7.2}  {:26.2}  {ratio:5.2}", writer + others);
}

/// CPU microseconds per chunk.
#[derive(Debug, Clone, Copy)]
struct Cost {
    writer: f64,
    /// CPU time of threads that are neither the writer nor the reader.
    others: f64,
}

fn median(costs: &mut [Cost]) -> Cost {
    costs.sort_by(|a, b| a.writer.total_cmp(&b.writer));
    costs[costs.len() / 2]
}

struct Lines {
    sockets: Vec<TcpStream>,
    received: Arc<AtomicU64>,
    reader_cpu: Arc<AtomicU64>,
    sent: u64,
}

impl Lines {
    fn open(count: usize) -> Outcome<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (mut sockets, mut clients) = (Vec::new(), Vec::new());
        for _ in 0..count {
            clients.push(TcpStream::connect(address)?);
            let socket = listener.accept()?.0;
            socket.set_nodelay(true)?;
            socket.set_nonblocking(true)?;
            sockets.push(socket);
        }
        let received = Arc::new(AtomicU64::new(0));
        let reader_cpu = Arc::new(AtomicU64::new(0));
        let (counter, used) = (Arc::clone(&received), Arc::clone(&reader_cpu));
        std::thread::spawn(move || read_all(&clients, &counter, &used).expect("the reader reads"));
        Ok(Self { sockets, received, reader_cpu, sent: 0 })
    }

    /// Repeatedly writes one chunk to every socket, and waits until all chunks are read.
    fn round(&mut self, mut write: impl FnMut(&mut Self) -> Outcome<()>) -> Outcome<Cost> {
        let steps = CHUNKS_A_ROUND.div_ceil(self.sockets.len());
        let mut writer = Duration::ZERO;
        let before = (cpu(ClockId::ProcessCPUTime), self.reader_cpu.load(Ordering::Acquire));
        for _ in 0..steps {
            let from = cpu(ClockId::ThreadCPUTime);
            write(self)?;
            writer += cpu(ClockId::ThreadCPUTime) - from;
            self.sent += (self.sockets.len() * CHUNK.len()) as u64;
            let start = Instant::now();
            while self.received.load(Ordering::Acquire) < self.sent {
                assert!(start.elapsed() < Duration::from_secs(10), "chunks are lost");
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let reader = Duration::from_nanos(self.reader_cpu.load(Ordering::Acquire) - before.1);
        let others = (cpu(ClockId::ProcessCPUTime) - before.0).saturating_sub(reader + writer);
        let a_chunk = 1e6 / (steps * self.sockets.len()) as f64;
        Ok(Cost { writer: writer.as_secs_f64() * a_chunk, others: others.as_secs_f64() * a_chunk })
    }

    fn send_each(&mut self) -> Outcome<()> {
        for socket in &self.sockets {
            let sent =
                rustix::net::send(socket, &CHUNK, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
            assert_eq!(sent, CHUNK.len());
        }
        Ok(())
    }

    fn submit(&mut self, ring: &mut IoUring) -> Outcome<()> {
        for group in self.sockets.chunks(RING as usize) {
            for socket in group {
                let entry = opcode::Send::new(
                    types::Fd(socket.as_raw_fd()),
                    CHUNK.as_ptr(),
                    CHUNK.len() as u32,
                )
                .flags((SendFlags::DONTWAIT | SendFlags::NOSIGNAL).bits().cast_signed())
                .build();
                // SAFETY: the chunk is a constant and the sockets outlive the wait below.
                unsafe { ring.submission().push(&entry) }?;
            }
            ring.submit_and_wait(group.len())?;
            for done in ring.completion() {
                assert_eq!(done.result(), CHUNK.len() as i32);
            }
        }
        Ok(())
    }
}

fn read_all(clients: &[TcpStream], received: &AtomicU64, used: &AtomicU64) -> io::Result<()> {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (index, client) in clients.iter().enumerate() {
        client.set_nonblocking(true)?;
        epoll::add(&poll, client, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)?;
    }
    let mut events = Vec::with_capacity(1024);
    let mut buffer = [0; 4096];
    loop {
        events.clear();
        epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let client = &clients[event.data.u64() as usize];
            match rustix::net::recv(client, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Ok(()),
                Ok((_, count)) => received.fetch_add(count as u64, Ordering::AcqRel),
                Err(rustix::io::Errno::AGAIN) => 0,
                Err(error) => return Err(error.into()),
            };
        }
        used.store(cpu(ClockId::ThreadCPUTime).as_nanos() as u64, Ordering::Release);
    }
}

/// Returns the CPU time of the clock's thread or process.
fn cpu(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}
