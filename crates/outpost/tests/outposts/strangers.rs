//! Tests connections that do not come from authenticated outposts.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use forebay_outpost::{Credentials, OutpostEnd, WorkSettings};
use tokio::net::TcpSocket;

use crate::rig::*;

#[test]
fn strangers_are_few_and_have_little_time() {
    let brain = Brain::start();
    let began = Instant::now();
    let mut strangers: Vec<TcpStream> = Vec::new();
    for _ in 0..16 {
        strangers.push(TcpStream::connect(brain.address).unwrap());
    }
    // One more connection is closed immediately; the others are closed when their time limit has
    // passed.
    let mut late = TcpStream::connect(brain.address).unwrap();
    assert!(ended(&mut late), "the 17th connection is dropped");
    assert!(began.elapsed() < Duration::from_secs(3));
    assert!(strangers.iter_mut().all(ended));
    let waited = began.elapsed();
    assert!(waited > Duration::from_secs(4) && waited < Duration::from_secs(10), "{waited:?}");
    let _outpost = Outpost::start(brain.settings(1));
    ready(&mut brain.executor("echo", 1));
}

/// A connection from another address of this machine.
fn connect_from(address: &str, to: SocketAddr) -> TcpStream {
    let stream = runtime().block_on(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(address.parse().expect("an address"), 0))?;
        socket.connect(to).await?.into_std()
    });
    let stream = stream.expect("a connection");
    stream.set_nonblocking(false).expect("no error");
    stream
}

#[test]
fn strangers_at_one_address_leave_places_to_others() {
    let brain = Brain::start();
    let strangers: Vec<TcpStream> =
        (0..16).map(|_| connect_from("127.0.0.2", brain.address)).collect();
    let mut late = connect_from("127.0.0.2", brain.address);
    assert!(ended(&mut late), "the 17th connection of an address is dropped");
    let other = Credentials::make().expect("no error");
    // The connections from the other address do not keep the brain from checking this outpost's
    // secret.
    let refused = Outpost::start(brain.mixed_up(&other)).ended();
    assert!(matches!(&refused, OutpostEnd::Refused(..)), "{refused}");
    for stranger in &strangers {
        stranger.set_nonblocking(true).expect("no error");
        let waits = stranger.peek(&mut [0]).expect_err("nothing has come");
        assert_eq!(waits.kind(), io::ErrorKind::WouldBlock);
    }
}

/// Returns true once the other side has closed the connection.
fn ended(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time limit");
    match stream.read(&mut [0; 64]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn an_outpost_with_too_many_hands_is_refused() {
    let brain = Brain::start();
    for hands in [0, 257, u32::MAX] {
        let ended = Outpost::start(brain.settings(hands)).ended();
        assert!(
            matches!(&ended, OutpostEnd::Refused(_, why) if why.contains("1 to 256")),
            "{ended}"
        );
    }
}

#[test]
fn groups_that_start_together_are_not_mixed_up() {
    let brain = Brain::start();
    let _outposts: Vec<Outpost> = (0..4).map(|_| Outpost::start(brain.settings(2))).collect();
    // Each replica has a separate thread, which starts its group.
    thread::scope(|scope| {
        for _ in 0..4 {
            let mut executor = brain.executor("echo", 2);
            scope.spawn(move || {
                assert_eq!(ready(&mut executor).page_count, 100);
                assert_eq!(step(&mut executor, 1, &[7; 3]), [7]);
            });
        }
    });
}

#[test]
fn strangers_stay_outside() {
    let brain = Brain::start();
    let other = Credentials::make().expect("no error");
    // The complete token of another brain.
    let stranger = WorkSettings { token: other.token().clone(), ..brain.settings(1) };
    assert!(matches!(Outpost::start(stranger).ended(), OutpostEnd::Stranger(_)));
    // The right certificate with the secret of another brain.
    let ended = Outpost::start(brain.mixed_up(&other)).ended();
    assert!(matches!(&ended, OutpostEnd::Refused(_, why) if why.contains("secret")), "{ended}");

    // Bytes that are not TLS, and connections that send nothing, do not block other connections.
    let silent: Vec<_> =
        (0..8).map(|_| TcpStream::connect(brain.address).expect("no error")).collect();
    for seed in 0..200_u32 {
        let mut garbage = TcpStream::connect(brain.address).expect("no error");
        let bytes: Vec<u8> = (0..512).map(|at| (seed.wrapping_mul(at + 7) >> 3) as u8).collect();
        let _ = garbage.write_all(&bytes);
    }
    let _outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("echo", 1);
    ready(&mut executor);
    assert_eq!(step(&mut executor, 1, &[3; 2]), [3]);
    drop(silent);
}
