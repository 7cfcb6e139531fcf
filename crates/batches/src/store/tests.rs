use std::fs;
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::objects::BatchStatus;

const DAY: u64 = 24 * 3600;

fn config(folder: &Path) -> BatchConfig {
    BatchConfig {
        batch_dir: folder.to_owned(),
        batch_max_bytes: 250,
        batch_key_bytes: 200,
        batch_max_file_bytes: 150,
        batch_max_requests: 100,
        batch_concurrency: 3,
        batch_ttl: 30 * DAY,
        longest_line: 1000,
    }
}

fn open() -> (Arc<BatchStore>, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    (Arc::new(BatchStore::open(config(folder.path()), 0).unwrap()), folder)
}

fn send(store: &Arc<BatchStore>, owner: &Owner, bytes: usize) -> Result<FileObject, StoreError> {
    let mut upload = store.upload(owner)?;
    upload.write(&vec![b'x'; bytes])?;
    upload.finish("in.jsonl", Some("batch"), None, 0)
}

fn new(input_file_id: &str) -> NewBatch {
    NewBatch {
        input_file_id: input_file_id.into(),
        endpoint: "/v1/completions".into(),
        completion_window: "24h".into(),
        metadata: None,
    }
}

fn count(folder: &TempDir) -> usize {
    fs::read_dir(folder.path().join("files")).unwrap().count()
}

#[test]
fn nobody_finds_what_another_key_has() {
    let (store, _folder) = open();
    let (one, two) = (store.owner(Some("one")), store.owner(Some("two")));
    let file = send(&store, &one, 10).unwrap();
    let batch = store.create(&one, new(&file.id), 0).unwrap();
    for stranger in [&two, &store.owner(None)] {
        let unknown =
            |error| matches!(error, StoreError::UnknownFile(_) | StoreError::UnknownBatch(_));
        assert!(unknown(store.file(stranger, &file.id, 0).unwrap_err()));
        assert!(unknown(store.content(stranger, &file.id, 0).unwrap_err()));
        assert!(unknown(store.delete_file(stranger, &file.id, 0).unwrap_err()));
        assert!(unknown(store.create(stranger, new(&file.id), 0).unwrap_err()));
        assert!(unknown(store.batch(stranger, &batch.id, 0).unwrap_err()));
        assert!(unknown(store.cancel(stranger, &batch.id, 0).unwrap_err()));
        assert!(store.files(stranger, 0).is_empty() && store.batches(stranger, 0).is_empty());
    }
    assert_eq!(store.files(&one, 0), [file]);
    assert_eq!(store.batches(&one, 0), [batch]);
    // The name of an owner does not contain the key.
    let text = format!("{one:?}");
    assert!(!text.contains("one"));
}

#[test]
fn bytes_are_bounded_for_a_file_a_key_and_all() {
    let (store, folder) = open();
    let (one, two) = (store.owner(Some("one")), store.owner(Some("two")));
    assert!(matches!(send(&store, &one, 151), Err(StoreError::TooLarge(150))));
    let first = send(&store, &one, 150).unwrap();
    assert!(matches!(send(&store, &one, 51), Err(StoreError::Full(_))));
    assert!(matches!(send(&store, &two, 101), Err(StoreError::Full(_))));
    assert_eq!((store.bytes(), count(&folder)), (150, 2), "a refused upload leaves no file");
    store.delete_file(&one, &first.id, 0).unwrap();
    assert_eq!((store.bytes(), count(&folder)), (0, 0));
    send(&store, &two, 101).unwrap();
}

#[test]
fn fields_are_checked() {
    let (store, folder) = open();
    let owner = store.owner(None);
    let finish = |purpose, name: &str, bytes: usize, after| {
        let mut upload = store.upload(&owner).unwrap();
        upload.write(&vec![b'x'; bytes]).unwrap();
        upload.finish(name, purpose, after, 0)
    };
    let batch = Some("batch");
    for (purpose, name, bytes, after, wrong) in [
        (None, "a", 1, None, "purpose"),
        (Some("fine-tune"), "a", 1, None, "purpose"),
        (batch, &*"a".repeat(256), 1, None, "filename"),
        (batch, "a", 0, None, "file"),
        (batch, "a", 1, Some(3599), "expires_after[seconds]"),
        (batch, "a", 1, Some(u64::MAX), "expires_after[seconds]"),
    ] {
        let error = finish(purpose, name, bytes, after).unwrap_err();
        assert!(matches!(error, StoreError::Invalid { param, .. } if param == wrong), "{error}");
    }
    assert_eq!((count(&folder), store.bytes()), (0, 0));
    let file = finish(batch, "a", 1, Some(3600)).unwrap();
    assert_eq!(file.expires_at, 3600);
    let create = |change: fn(&mut NewBatch)| {
        let mut wish = new(&file.id);
        change(&mut wish);
        store.create(&owner, wish, 0)
    };
    let pairs = |count: usize, key: usize, value: usize| {
        (0..count).map(|at| (format!("{at:0key$}"), "v".repeat(value))).collect::<BTreeMap<_, _>>()
    };
    let invalid = |result: Result<BatchObject, StoreError>| match result.unwrap_err() {
        StoreError::Invalid { param, .. } => param,
        other => panic!("{other}"),
    };
    assert_eq!(invalid(create(|wish| wish.endpoint = "/flush_cache".into())), "endpoint");
    for window in
        ["", "24", "h", "0h", "721h", "31d", "-1h", "24 h", "18446744073709551615d", "1\u{e9}"]
    {
        let mut wish = new(&file.id);
        wish.completion_window = window.into();
        assert_eq!(invalid(store.create(&owner, wish, 0)), "completion_window", "{window}");
    }
    for (count, key, value) in [(17, 2, 2), (1, 65, 2), (1, 2, 513)] {
        let mut wish = new(&file.id);
        wish.metadata = Some(pairs(count, key, value));
        assert_eq!(invalid(store.create(&owner, wish, 0)), "metadata");
    }
    let mut wish = new(&file.id);
    (wish.metadata, wish.completion_window) = (Some(pairs(16, 64, 512)), "7d".into());
    assert_eq!(store.create(&owner, wish, 5).unwrap().expires_at, 5 + 7 * DAY);
}

#[test]
fn a_store_is_found_again_and_belongs_to_one_process() {
    let (store, folder) = open();
    let owner = store.owner(Some("key"));
    let file = send(&store, &owner, 10).unwrap();
    let batch = store.create(&owner, new(&file.id), 0).unwrap();
    let mut upload = store.upload(&owner).unwrap();
    upload.write(b"half").unwrap();
    assert!(BatchStore::open(config(folder.path()), 0).is_err());
    // A killed process leaves an unfinished upload.
    std::mem::forget(upload);
    let files = folder.path().join("files");
    fs::write(files.join("file-0.jsonl"), "content without a record").unwrap();
    fs::write(files.join("file-1.json"), "{").unwrap();
    let saved = tempfile::tempdir().unwrap();
    for folder_name in ["files", "batches"] {
        fs::create_dir(saved.path().join(folder_name)).unwrap();
        for entry in fs::read_dir(folder.path().join(folder_name)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), saved.path().join(folder_name).join(entry.file_name())).unwrap();
        }
    }
    fs::copy(folder.path().join("salt"), saved.path().join("salt")).unwrap();
    let again = BatchStore::open(config(saved.path()), 0).unwrap();
    assert_eq!(again.owner(Some("key")), owner);
    assert_eq!(again.files(&owner, 0), [file]);
    assert_eq!(again.batches(&owner, 0), [batch]);
    assert_eq!(again.bytes(), 10);
}

#[test]
fn old_ones_go_but_not_what_a_batch_needs() {
    let (store, folder) = open();
    let owner = store.owner(None);
    let (needed, other) = (send(&store, &owner, 10).unwrap(), send(&store, &owner, 10).unwrap());
    let batch = store.create(&owner, new(&needed.id), 0).unwrap();
    let conflict = store.delete_file(&owner, &needed.id, 0).unwrap_err();
    assert!(matches!(conflict, StoreError::Conflict(_)));
    store.expire(30 * DAY - 1);
    assert_eq!(store.files(&owner, 0).len(), 2);
    store.expire(30 * DAY);
    assert_eq!(store.files(&owner, 0), std::slice::from_ref(&needed));
    assert!(store.file(&owner, &other.id, 0).is_err());
    let job = store.next_job(&owner).unwrap().unwrap();
    store.end(&job, BatchStatus::Completed, Vec::new(), 30 * DAY).unwrap();
    store.leave(&batch.id);
    store.expire(60 * DAY - 1);
    assert_eq!(store.batches(&owner, 0).len(), 1);
    store.expire(60 * DAY);
    assert!(store.batches(&owner, 0).is_empty() && store.files(&owner, 0).is_empty());
    assert_eq!((store.bytes(), count(&folder)), (0, 0));
}

#[test]
fn objects_of_a_key_are_bounded_in_number() {
    let (store, _folder) = open();
    let owner = store.owner(None);
    let uploads: Vec<_> = (0..8).map(|_| store.upload(&owner).unwrap()).collect();
    assert!(matches!(store.upload(&owner), Err(StoreError::Conflict(_))));
    store.upload(&store.owner(Some("other"))).unwrap();
    drop(uploads);
    let file = send(&store, &owner, 1).unwrap();
    let ended = store.create(&owner, new(&file.id), 0).unwrap();
    let job = store.next_job(&owner).unwrap().unwrap();
    store.end(&job, BatchStatus::Completed, Vec::new(), 1).unwrap();
    for _ in 1..OBJECTS {
        store.create(&owner, new(&file.id), 2).unwrap();
    }
    // The oldest finished batch is deleted to make room; an unfinished batch is not.
    store.create(&owner, new(&file.id), 3).unwrap();
    assert!(store.batch(&owner, &ended.id, 3).is_err());
    assert!(matches!(store.create(&owner, new(&file.id), 3), Err(StoreError::Full(_))));
}
