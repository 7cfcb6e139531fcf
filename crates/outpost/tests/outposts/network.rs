//! A network between an outpost and its brain that fails on demand.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use forebay_outpost::WorkSettings;

use crate::rig::*;

pub(crate) const CUT: u8 = 1;
pub(crate) const SILENT: u8 = 2;
/// Breaks only the newest connection, which is that of a rank.
pub(crate) const LAST_CUT: u8 = 3;

/// A network between an outpost and its brain.
pub(crate) struct Network {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<AtomicU8>,
}

impl Network {
    pub(crate) fn to(brain: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("no error");
        let address = listener.local_addr().expect("no error");
        let state = Arc::new(AtomicU8::new(0));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            let newest = Arc::new(AtomicUsize::new(0));
            for near in listener.incoming().flatten() {
                let number = newest.fetch_add(1, Ordering::SeqCst) + 1;
                let Ok(far) = TcpStream::connect(brain) else { continue };
                for (from, to) in [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))] {
                    let (from, to) = (from.expect("no error"), to.expect("no error"));
                    let (state, newest) = (Arc::clone(&shared), Arc::clone(&newest));
                    let is_last = move || newest.load(Ordering::SeqCst) == number;
                    thread::spawn(move || carry(from, to, &state, is_last));
                }
            }
        });
        Self { address, state }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, state: &AtomicU8, is_last: impl Fn() -> bool) {
    from.set_read_timeout(Some(Duration::from_millis(5))).expect("no error");
    let mut buffer = [0; 4096];
    loop {
        let state = match state.load(Ordering::SeqCst) {
            LAST_CUT if is_last() => CUT,
            state => state,
        };
        match state {
            CUT => {
                let _ = to.shutdown(std::net::Shutdown::Both);
                return;
            }
            // Both connections stay open, but no more bytes arrive.
            SILENT => thread::sleep(Duration::from_millis(5)),
            _ => match from.read(&mut buffer) {
                Ok(0) => {
                    let _ = to.shutdown(std::net::Shutdown::Write);
                    return;
                }
                Ok(count) => {
                    if to.write_all(&buffer[..count]).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            },
        }
    }
}

#[test]
fn a_network_that_breaks_or_falls_silent_ends_the_hands_on_both_sides() {
    for (state, behaviour, limit) in [
        (CUT, "cut", Duration::from_secs(1)),
        (LAST_CUT, "last-cut", Duration::from_secs(1)),
        (SILENT, "silent", Duration::from_secs(7)),
    ] {
        let brain = Brain::start();
        let network = Network::to(brain.address);
        let settings = WorkSettings { brain: network.address.to_string(), ..brain.settings(1) };
        let _outpost = Outpost::start(settings);
        let mut executor = brain.executor(behaviour, 1);
        ready(&mut executor);
        assert_eq!(step(&mut executor, 1, &[3; 2]), [0]);
        assert_eq!(hands_of(behaviour), 1);
        network.state.store(state, Ordering::SeqCst);
        let (reason, after) = death(&mut executor);
        assert!(reason.contains("outpost here"), "{reason}");
        assert!(after < limit, "{behaviour}: {after:?}");
        eventually("the hand is gone", || hands_of(behaviour) == 0);
        // Once the network works again, the brain uses the outpost again.
        network.state.store(0, Ordering::SeqCst);
        ready(&mut executor);
    }
}
