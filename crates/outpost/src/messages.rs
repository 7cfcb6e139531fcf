//! Messages between the brain and outposts, apart from the relayed frames of ranks.

use std::io;

use forebay_protocol::VERSION;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The version of these messages. The relayed frames have a separate version.
const OWN_VERSION: u16 = 3;
/// The first bytes of every connection.
const MAGIC: [u8; 4] = *b"fbw1";
/// The size of a [`Knock`] in bytes.
pub(crate) const KNOCK_BYTES: usize = 40;
/// The largest size of a message in bytes.
const LONGEST: usize = 1 << 20;

/// The first message of a connection. Its size is fixed, so that nothing has to be parsed before
/// the sender is authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Knock {
    pub(crate) versions: [u16; 2],
    pub(crate) secret: [u8; 32],
}

impl Knock {
    pub(crate) const VERSIONS: [u16; 2] = [OWN_VERSION, VERSION];

    pub(crate) fn bytes(secret: &[u8; 32]) -> [u8; KNOCK_BYTES] {
        let mut found = [0; KNOCK_BYTES];
        found[..4].copy_from_slice(&MAGIC);
        found[4..6].copy_from_slice(&OWN_VERSION.to_le_bytes());
        found[6..8].copy_from_slice(&VERSION.to_le_bytes());
        found[8..].copy_from_slice(secret);
        found
    }

    /// Reads the first message of a connection. `None`: it does not begin with [`MAGIC`], so the
    /// sender is not an outpost.
    pub(crate) fn read(bytes: &[u8; KNOCK_BYTES]) -> Option<Self> {
        let version = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut secret = [0; 32];
        secret.copy_from_slice(&bytes[8..]);
        (bytes[..4] == MAGIC).then_some(Self { versions: [version(4), version(6)], secret })
    }
}

/// The brain's response to a knock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The connection is accepted.
    Welcome,
    /// The connection is refused. The outpost must not try again, because another attempt would
    /// fail too.
    Refused(String),
}

/// The purpose of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Purpose {
    /// A machine joins as an outpost.
    Join {
        /// The name for logs.
        name: String,
        /// The largest number of hands at the same time.
        hands: u32,
    },
    /// Relays the frames of a rank that the brain has ordered.
    Rank {
        /// The id of the order.
        id: u64,
    },
    /// Transfers bytes for the mirror of the arena.
    Bulk {
        /// The id of the order.
        id: u64,
    },
}

/// A message from the brain to an outpost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToOutpost {
    /// Requests a [`FromOutpost::Pong`].
    Ping,
    /// Creates a mirror of the brain's arena, and opens a connection for its bytes. Sent once,
    /// before the first hand.
    Mirror {
        /// The id of the order, unique among all orders of the brain.
        id: u64,
        /// The size of the arena in bytes.
        bytes: u32,
    },
    /// Starts a hand.
    Spawn(HandOrder),
}

/// A message from an outpost to the brain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromOutpost {
    /// The response to a ping.
    Pong,
    /// A hand has ended, or could not be started.
    Ended {
        /// The id of the order.
        id: u64,
        /// A description of how the hand ended.
        status: String,
        /// True if the kernel killed the hand because the outpost's machine was out of memory.
        out_of_memory: bool,
    },
}

/// An order to start a hand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandOrder {
    /// The id of the order, unique among all orders of the brain.
    pub(crate) id: u64,
    /// The index of the hand on the outpost, from 0.
    pub place: u32,
    /// The kind of the hand: `rust` or `torch`.
    pub hand: String,
    /// Environment variables of the hand.
    pub env: Vec<(String, String)>,
    /// How the hand communicates with the other ranks of its group.
    pub collectives: Collectives,
}

/// How a hand communicates with the other ranks of its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collectives {
    /// There are no other ranks.
    None,
    /// All other ranks are on the same machine.
    Machine,
    /// Some ranks are on other machines, which are reached over the network interface of this name.
    /// A setting of the outpost overrides the name.
    Network(String),
}

/// Writes a message: its length in four bytes, then JSON.
pub(crate) async fn write<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).ok().filter(|length| *length as usize <= LONGEST);
    let length = length.ok_or_else(|| io::Error::other("a message that is too long"))?;
    stream.write_all(&[&length.to_le_bytes(), &*text].concat()).await?;
    stream.flush().await
}

/// Reads a message.
///
/// # Errors
/// The connection was closed, or the bytes are not a valid message.
pub(crate) async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<T> {
    let length = stream.read_u32_le().await? as usize;
    if length > LONGEST {
        return Err(io::Error::other(format!("a message of {length} bytes")));
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text).await?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wait<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        let order = HandOrder {
            id: u64::MAX,
            place: 3,
            hand: "rust".into(),
            env: vec![("A".into(), "b=c".into())],
            collectives: Collectives::Network("eth0".into()),
        };
        let mut bytes = Vec::new();
        wait(async {
            write(&mut bytes, &ToOutpost::Ping).await.unwrap();
            write(&mut bytes, &ToOutpost::Spawn(order.clone())).await.unwrap();
            let mut stream = &bytes[..];
            assert_eq!(read::<ToOutpost>(&mut stream).await.unwrap(), ToOutpost::Ping);
            let second = read::<ToOutpost>(&mut stream).await.unwrap();
            assert_eq!(second, ToOutpost::Spawn(order));
            assert!(read::<ToOutpost>(&mut stream).await.is_err(), "no message is left");
        });
    }

    #[test]
    fn a_long_message_takes_no_memory() {
        let mut stream = &u32::MAX.to_le_bytes()[..];
        let error = wait(read::<FromOutpost>(&mut stream)).unwrap_err();
        assert!(error.to_string().contains("4294967295 bytes"), "{error}");
        let status = " ".repeat(LONGEST);
        assert!(
            wait(write(
                &mut Vec::new(),
                &FromOutpost::Ended { id: 1, status, out_of_memory: false }
            ))
            .is_err()
        );
    }

    proptest! {
        #[test]
        fn a_knock_is_read_as_it_is_made(secret: [u8; 32]) {
            let read = Knock::read(&Knock::bytes(&secret));
            prop_assert_eq!(read, Some(Knock { versions: Knock::VERSIONS, secret }));
        }

        #[test]
        fn garbage_is_no_message_and_no_panic(bytes: Vec<u8>) {
            let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
            framed.extend_from_slice(&bytes);
            for garbage in [&bytes[..], &framed] {
                let mut stream = garbage;
                let _ = wait(read::<Purpose>(&mut stream));
                let mut stream = garbage;
                prop_assert!(wait(read::<HandOrder>(&mut stream)).is_err());
            }
            if let Ok(knock) = <&[u8; KNOCK_BYTES]>::try_from(&bytes[..]) {
                prop_assert!(Knock::read(knock).is_none() || bytes.starts_with(&MAGIC));
            }
        }
    }
}
