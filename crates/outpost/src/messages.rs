//! Messages between brain and outposts, besides the ranks' frames.

use std::io;

use forebay_protocol::VERSION;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The version of these messages and of the relayed frames.
const OWN_VERSION: u16 = 3;
/// Begins every connection.
const MAGIC: [u8; 4] = *b"fbw1";
/// Bytes of a [`Knock`].
pub(crate) const KNOCK_BYTES: usize = 40;
/// The largest number of bytes of a message.
const LONGEST: usize = 1 << 20;

/// The first bytes of a connection. Their number is fixed, so that nothing from a stranger has to
/// be parsed.
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

    /// The knock; `None`: it is from another program.
    pub(crate) fn read(bytes: &[u8; KNOCK_BYTES]) -> Option<Self> {
        let version = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut secret = [0; 32];
        secret.copy_from_slice(&bytes[8..]);
        (bytes[..4] == MAGIC).then_some(Self { versions: [version(4), version(6)], secret })
    }
}

/// The brain's answer to a knock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The outpost may go on.
    Welcome,
    /// The outpost must not continue, and another attempt would fail too.
    Refused(String),
}

/// The purpose of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Purpose {
    /// An outpost offers itself.
    Join {
        /// The name for people.
        name: String,
        /// The largest number of hands at a time.
        hands: u32,
    },
    /// Frames of a rank that was ordered.
    Rank {
        /// The number of the order.
        id: u64,
    },
    /// Bytes for the mirror of the arena.
    Bulk {
        /// The number of the order.
        id: u64,
    },
}

/// Brain to outpost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToOutpost {
    /// Asks for a [`FromOutpost::Pong`].
    Ping,
    /// Keep a mirror of the brain's arena, and open a connection for its bytes. Sent once, before
    /// the first hand.
    Mirror {
        /// The connection's id, unique among all that the brain has ordered.
        id: u64,
        /// Bytes of the arena.
        bytes: u32,
    },
    /// Makes a hand run.
    Spawn(HandOrder),
}

/// Outpost to brain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromOutpost {
    /// The outpost lives.
    Pong,
    /// A hand has ended, or could not be started.
    Ended {
        /// The number of the order.
        id: u64,
        /// A description of the end.
        status: String,
        /// True if the kernel killed it for lack of memory on the outpost.
        out_of_memory: bool,
    },
}

/// A hand to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandOrder {
    /// The rank's id, unique among all that the brain has ordered.
    pub(crate) id: u64,
    /// The index of the hand on the outpost, from 0.
    pub place: u32,
    /// The kind of the hand: `rust` or `torch`.
    pub hand: String,
    /// Variables of the hand.
    pub env: Vec<(String, String)>,
    /// How the hand reaches the other ranks of its group.
    pub collectives: Collectives,
}

/// How a hand reaches the other ranks of its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collectives {
    /// There are no other ranks.
    None,
    /// All other ranks are on the same machine.
    Machine,
    /// Some ranks are on other machines, behind the network interface of this name. The outpost's
    /// own setting overrides the name.
    Network(String),
}

/// Writes a message: four bytes with its length, then JSON.
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
/// The connection ended, or the bytes are not such a message.
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
