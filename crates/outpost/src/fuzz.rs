//! Fuzz tests: feeds damaged messages to the parsers of both ends of an outpost's connections. Each
//! parser has to accept or refuse a message without a panic and within its memory limit.

use std::io::Cursor;

use serde::de::DeserializeOwned;

use crate::bulk::{HEAD_BYTES, Head, PIECE_BYTES};
use crate::damage::{Damage, Peak, messages};
use crate::messages::{
    Answer, Collectives, FromOutpost, HandOrder, KNOCK_BYTES, Knock, Purpose, ToOutpost, read,
    write,
};

/// The number of messages in an ordinary run. `make test-fuzz-outposts` sets another number.
const MESSAGES: u64 = 20_000;

/// Reads messages of one kind until the first error. Returns the number of messages.
async fn all<T: DeserializeOwned>(bytes: &[u8]) -> usize {
    let mut stream = Cursor::new(bytes);
    let mut count = 0;
    while read::<T>(&mut stream).await.is_ok() {
        count += 1;
    }
    count
}

async fn seeds() -> Vec<Vec<u8>> {
    let env = vec![("FOREBAY_X".to_owned(), "é\"\\".to_owned()); 3];
    let collectives = Collectives::Machine;
    let order = HandOrder { id: u64::MAX, place: 3, hand: "torch".into(), env, collectives };
    let mut seeds = vec![Vec::new(); 8];
    let (id, status) = (7, "exit status 3".to_owned());
    write(&mut seeds[0], &Answer::Welcome).await.expect("written");
    write(&mut seeds[0], &Answer::Refused("no\n".repeat(50))).await.expect("written");
    write(&mut seeds[1], &Purpose::Join { name: "here".into(), hands: 8 }).await.expect("written");
    write(&mut seeds[2], &Purpose::Rank { id }).await.expect("written");
    write(&mut seeds[2], &Purpose::Bulk { id }).await.expect("written");
    write(&mut seeds[3], &ToOutpost::Ping).await.expect("written");
    write(&mut seeds[3], &ToOutpost::Mirror { id, bytes: 1 << 28 }).await.expect("written");
    write(&mut seeds[4], &ToOutpost::Spawn(order)).await.expect("written");
    write(&mut seeds[5], &FromOutpost::Pong).await.expect("written");
    let ended = FromOutpost::Ended { id, status, out_of_memory: true };
    write(&mut seeds[5], &ended).await.expect("written");
    let deep = "[".repeat(2000);
    seeds[6] = [&(deep.len() as u32).to_le_bytes(), deep.as_bytes()].concat();
    seeds[7] = Knock::bytes(&[7; 32]).to_vec();
    seeds
}

#[test]
fn damaged_messages_are_refused_by_both_ends() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let seeds = seeds().await;
        let (mut damage, before) = (Damage::new(), Peak::now());
        let (mut taken, mut refused) = (0, 0);
        for number in 0..messages(MESSAGES) {
            let mut bytes = seeds[number as usize % seeds.len()].clone();
            damage.apply(&mut bytes);
            let of = [
                all::<Purpose>(&bytes).await,
                all::<FromOutpost>(&bytes).await,
                all::<Answer>(&bytes).await,
                all::<ToOutpost>(&bytes).await,
            ];
            let found: usize = of.iter().sum();
            taken += found;
            refused += usize::from(found == 0);
            if let Some(first) = bytes.first_chunk::<KNOCK_BYTES>() {
                let _ = Knock::read(first);
            }
        }
        println!("{taken} messages taken, {refused} refused");
        assert!(taken > 0 && refused > 0, "both happen, else nothing was tried");
        before.check();
    });
}

#[test]
fn damaged_heads_never_lead_out_of_the_arena() {
    let (mut damage, mut inside) = (Damage::new(), 0);
    for _ in 0..messages(MESSAGES) {
        let arena = (damage.next() >> (33 + damage.below(28))) as u32;
        let mut bytes = [0; HEAD_BYTES];
        let shift = damage.below(64);
        bytes.copy_from_slice(&(damage.next() >> shift).to_le_bytes());
        let length = 1 + damage.below(2 * PIECE_BYTES) as u32;
        if damage.below(2) == 0 {
            bytes[4..].copy_from_slice(&length.to_le_bytes());
        }
        if let Ok(Head { offset, length }) = Head::read(bytes, arena) {
            inside += 1;
            assert!(u64::from(offset) + u64::from(length) <= u64::from(arena));
            assert!((1..=PIECE_BYTES).contains(&(length as usize)));
            assert_eq!(Head { offset, length }.bytes(), bytes);
        }
    }
    assert!(inside > 0, "some are right");
}
