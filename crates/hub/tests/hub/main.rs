//! Downloads from a simulated hub: a correct one, one with failures, and one with wrong responses.

mod lies;
mod server;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, SystemTime};

use forebay_hub::{Found, Hub, HubError, Interpreter, ModelName, Progress, Settings};
use server::{COMMIT, REPOSITORY, Server, sha256};

const SMALL: [(&str, &[u8]); 2] = [("config.json", b"{}"), ("tokenizer.json", b"{\"model\": {}}")];

/// Returns pseudo-random bytes without repetition.
fn bytes(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn settings(server: &Server, cache: &Path) -> Settings {
    Settings {
        endpoint: server.endpoint.clone(),
        token: None,
        hub_cache: cache.join("hub"),
        cache: cache.to_owned(),
        offline: false,
        patience: Duration::from_secs(5),
        at_a_time: 4,
    }
}

fn find_with(settings: Settings, name: &str) -> Result<Found, HubError> {
    let interpreter =
        Interpreter { path: PathBuf::from("/nowhere/bin/python3"), prepare: |_: &mut Command| () };
    let hub = Hub::new(settings, Progress::silent(), interpreter)?;
    let mut found = hub.find(&ModelName::parse(name, None)?, true)?;
    hub.complete(&mut found)?;
    Ok(found)
}

fn find(server: &Server, cache: &Path) -> Result<Found, HubError> {
    find_with(settings(server, cache), REPOSITORY)
}

fn error(server: &Server, cache: &Path) -> String {
    find(server, cache).expect_err("an error").to_string()
}

/// Returns the names of all files in the cache's folder of blobs.
fn blobs(cache: &Path) -> Vec<String> {
    let folder = cache.join("hub/models--org--name/blobs");
    let entries = fs::read_dir(folder).map(|entries| entries.flatten().collect::<Vec<_>>());
    let name = |entry: fs::DirEntry| entry.file_name().into_string().expect("UTF-8");
    let mut names: Vec<String> = entries.unwrap_or_default().into_iter().map(name).collect();
    names.sort();
    names
}

#[test]
fn a_model_is_laid_out_as_the_hubs_own_library_does() {
    let weights = bytes(300_000);
    let server = Server::start(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", &weights),
        ("README.md", b"read me"),
        ("pytorch_model.bin", b"pickle"),
        ("1_Pooling/config.json", b"{\"a\": 1}"),
    ]);
    let cache = tempfile::tempdir().expect("a folder");
    let found = find(&server, cache.path()).unwrap();
    let folder = cache.path().join("hub/models--org--name");
    assert_eq!(found.path, folder.join("snapshots").join(COMMIT));
    assert_eq!(found.name.as_deref(), Some(REPOSITORY));
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
    let link = fs::read_link(found.path.join("1_Pooling/config.json")).unwrap();
    let blob = sha256(b"{\"a\": 1}");
    assert_eq!(link, Path::new("../../../blobs").join(&blob));
    // Two of the files have the same content.
    let mut expected = vec![sha256(b"{}"), sha256(&weights), blob];
    expected.sort();
    assert_eq!(blobs(cache.path()), expected);

    let before = server.asked().len();
    find(&server, cache.path()).unwrap();
    let asked = server.asked();
    assert_eq!(asked.len(), before + 1, "only the list is asked for");
    find_with(Settings { offline: true, ..settings(&server, cache.path()) }, REPOSITORY).unwrap();
    assert_eq!(server.asked().len(), asked.len());
}

#[test]
fn a_revision_is_named_in_one_piece() {
    let server = Server::start(&[SMALL[0], SMALL[1], ("model.safetensors", b"w")]);
    let cache = tempfile::tempdir().expect("a folder");
    find_with(settings(&server, cache.path()), "org/name@pr/1").unwrap();
    let kept = cache.path().join("hub/models--org--name/refs/pr/1");
    assert_eq!(fs::read_to_string(kept).unwrap(), COMMIT);
    let error = find_with(settings(&server, cache.path()), "org/name@v9").unwrap_err();
    assert_eq!(error.to_string(), "org/name has no revision 'v9'");
    let error = find_with(settings(&server, cache.path()), "org/name@../../x").unwrap_err();
    assert_eq!(error.to_string(), "org/name has no revision '../../x'");
}

#[test]
fn a_cut_download_goes_on() {
    let weights = bytes(5 << 20);
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &weights)];
    // Every connection is cut after 1.5 MB.
    let server = Server::changed(&files, |asked, answer, _| {
        if asked.is_download() && asked.path.ends_with("model.safetensors") {
            answer.cut = Some(3 << 19);
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let found = find(&server, cache.path()).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
    let step = 3 << 19;
    let starts = [None, Some(step), Some(2 * step), Some(3 * step)];
    assert_eq!(server.downloads("model.safetensors"), starts);
}

#[test]
fn what_an_earlier_run_left_is_used() {
    let weights = bytes(300_000);
    let server = Server::start(&[SMALL[0], SMALL[1], ("model.safetensors", &weights)]);
    let cache = tempfile::tempdir().expect("a folder");
    let folder = cache.path().join("hub/models--org--name/blobs");
    fs::create_dir_all(&folder).unwrap();
    let partial = folder.join(format!("{}.incomplete", sha256(&weights)));
    fs::write(&partial, &weights[..100_000]).unwrap();
    let found = find(&server, cache.path()).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
    assert_eq!(server.downloads("model.safetensors"), [Some(100_000)]);
    assert!(!partial.exists());
}

#[test]
fn what_an_earlier_run_left_may_be_damaged() {
    let weights = bytes(300_000);
    for left in [vec![0; 100_000], bytes(300_000).split_off(1), vec![0; 300_000], vec![0; 400_000]]
    {
        let server = Server::start(&[SMALL[0], SMALL[1], ("model.safetensors", &weights)]);
        let cache = tempfile::tempdir().expect("a folder");
        let folder = cache.path().join("hub/models--org--name/blobs");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("{}.incomplete", sha256(&weights))), left).unwrap();
        let found = find(&server, cache.path()).unwrap();
        assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
        assert_eq!(server.downloads("model.safetensors").last(), Some(&None));
    }
}

#[test]
fn a_server_without_ranges_starts_again() {
    let weights = bytes(300_000);
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &weights)];
    let whole = weights.clone();
    let server = Server::changed(&files, move |asked, answer, _| {
        if asked.is_download() && asked.path.ends_with("model.safetensors") {
            if asked.start.is_some() {
                (answer.status, answer.body) = (200, whole.clone());
            } else {
                answer.cut = Some(100_000);
            }
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let found = find(&server, cache.path()).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn a_server_that_is_busy_is_asked_again() {
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", b"weights")];
    let server = Server::changed(&files, |asked, answer, number| {
        if asked.path.contains("/resolve/") && number % 2 == 1 {
            *answer = server::Answer::new(503, &[("retry-after", "0")]);
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let found = find_with(Settings { at_a_time: 1, ..settings(&server, cache.path()) }, REPOSITORY);
    assert_eq!(fs::read(found.unwrap().path.join("model.safetensors")).unwrap(), b"weights");
}

#[test]
fn a_file_that_changes_meanwhile_is_the_new_one() {
    let (old, new) = (bytes(300_000), bytes(400_000).split_off(50_000));
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &old)];
    let server = Server::changed(&files, |asked, answer, _| {
        if asked.is_download() && asked.path.ends_with("safetensors") && asked.start.is_none() {
            answer.cut = Some(100_000);
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let changing = {
        let (server, new) = (server.clone(), new.clone());
        std::thread::spawn(move || {
            while server.downloads("model.safetensors").is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            server.put("model.safetensors", &new);
        })
    };
    let found = find(&server, cache.path()).unwrap();
    changing.join().unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), new);
    let mut expected = vec![sha256(SMALL[0].1), sha256(SMALL[1].1), sha256(&new)];
    expected.sort();
    assert_eq!(blobs(cache.path()), expected, "no part of the old file is left");
}

#[test]
fn of_two_at_once_one_downloads() {
    let weights = bytes(3 << 20);
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &weights)];
    let server = Server::changed(&files, |asked, _, _| {
        if asked.is_download() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let barrier = Arc::new(Barrier::new(3));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (settings, barrier) = (settings(&server, cache.path()), Arc::clone(&barrier));
            std::thread::spawn(move || {
                barrier.wait();
                find_with(settings, REPOSITORY).map(|found| found.path)
            })
        })
        .collect();
    for thread in threads {
        let path = thread.join().unwrap().unwrap();
        assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    }
    assert_eq!(server.downloads("model.safetensors"), [None]);
}

#[test]
fn offline_nothing_is_asked() {
    let server = Server::start(&[
        SMALL[0],
        SMALL[1],
        ("a.safetensors", b"a"),
        ("b.safetensors", b"b"),
        (
            "model.safetensors.index.json",
            br#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#,
        ),
    ]);
    let cache = tempfile::tempdir().expect("a folder");
    let offline = || Settings { offline: true, ..settings(&server, cache.path()) };
    let error = find_with(offline(), REPOSITORY).unwrap_err().to_string();
    assert_eq!(error, "org/name is not in the cache, and offline nothing is downloaded");
    let found = find(&server, cache.path()).unwrap();
    fs::remove_file(found.path.join("b.safetensors")).unwrap();
    let before = server.asked().len();
    let error = find_with(offline(), REPOSITORY).unwrap_err().to_string();
    assert_eq!(
        error,
        "org/name is not complete in the cache, and offline nothing is downloaded: org/name lacks b.safetensors of model.safetensors.index.json"
    );
    assert_eq!(server.asked().len(), before);
    find(&server, cache.path()).unwrap();
    find_with(offline(), REPOSITORY).unwrap();
}

#[test]
fn without_a_network_the_cache_is_used() {
    let server = Server::start(&[SMALL[0], SMALL[1], ("model.safetensors", b"w")]);
    let cache = tempfile::tempdir().expect("a folder");
    // A port on which no server listens any more.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("http://{gone}");
    let nowhere = || Settings { endpoint: endpoint.clone(), ..settings(&server, cache.path()) };
    let error = find_with(nowhere(), REPOSITORY).unwrap_err().to_string();
    let expected = format!("org/name can't be downloaded from {endpoint} (");
    assert!(error.starts_with(&expected), "{error}");
    assert!(error.contains("refused"), "{error}");
    let online = find(&server, cache.path()).unwrap();
    assert_eq!(find_with(nowhere(), REPOSITORY).unwrap().path, online.path);
}

#[test]
fn a_token_goes_to_the_hub_alone() {
    let elsewhere = Server::start(&[("config.json", b"{}"), ("model.safetensors", b"weights")]);
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", b"weights")];
    let to = elsewhere.endpoint.clone();
    let server = Server::changed(&files, move |asked, answer, _| {
        if asked.token.as_deref() != Some("Bearer secret") {
            *answer = server::Answer::new(401, &[("x-error-code", "RepoNotFound")]);
        } else if asked.path.ends_with("model.safetensors") {
            let (size, etag) = (answer.body.len().to_string(), sha256(&answer.body));
            *answer =
                server::Answer::new(302, &[("x-linked-size", &size), ("x-linked-etag", &etag)]);
            answer.set("location", &format!("{to}{}", asked.path));
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let text = error(&server, cache.path());
    assert!(text.contains("it is private and HF_TOKEN holds no token that may read it"), "{text}");
    let token = Some("secret".to_owned());
    let found = find_with(Settings { token, ..settings(&server, cache.path()) }, REPOSITORY);
    assert_eq!(fs::read(found.unwrap().path.join("model.safetensors")).unwrap(), b"weights");
    let asked = elsewhere.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert_eq!(asked[0].token, None);
}

#[test]
fn use_is_noted() {
    let server = Server::start(&[SMALL[0], SMALL[1], ("model.safetensors", b"w")]);
    let cache = tempfile::tempdir().expect("a folder");
    let path = find(&server, cache.path()).unwrap().path.join("model.safetensors");
    let long_ago = SystemTime::now() - Duration::from_secs(1_000_000);
    let times = fs::FileTimes::new().set_accessed(long_ago).set_modified(long_ago);
    fs::File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
    find_with(Settings { offline: true, ..settings(&server, cache.path()) }, REPOSITORY).unwrap();
    let used = fs::metadata(&path).unwrap();
    assert!(used.accessed().unwrap() > long_ago + Duration::from_secs(900_000));
    assert!(used.modified().unwrap() < long_ago + Duration::from_secs(10));
}

#[test]
fn a_mirror_may_name_contents_as_it_likes() {
    let (old, new) = (bytes(300_000), bytes(300_001).split_off(1));
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &old)];
    let changed = AtomicBool::new(false);
    let (before, after) = (old.clone(), new.clone());
    let server = Server::changed(&files, move |asked, answer, _| {
        if !asked.path.ends_with("model.safetensors") {
            return;
        }
        if asked.start.is_some() {
            changed.store(true, Ordering::Relaxed);
        }
        let now = changed.load(Ordering::Relaxed);
        answer.set("etag", if now { "W/\"v2\"" } else { "W/\"v1\"" });
        let content = if now { &after } else { &before };
        answer.body = content[asked.start.unwrap_or(0)..].to_vec();
        if asked.is_download() && !now {
            answer.cut = Some(100_000);
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let found = find(&server, cache.path()).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), new);
    assert!(blobs(cache.path()).contains(&"v2".to_owned()));
    assert_eq!(blobs(cache.path()).len(), 3);
}

#[test]
fn a_mirror_may_send_everything_elsewhere() {
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", b"weights")];
    let elsewhere = Server::start(&files);
    let to = elsewhere.endpoint.clone();
    let server = Server::changed(&files, move |asked, answer, _| {
        *answer = server::Answer::new(308, &[]);
        answer.set("location", &format!("{to}{}", asked.path));
    });
    let cache = tempfile::tempdir().expect("a folder");
    let found = find(&server, cache.path()).unwrap();
    assert_eq!(fs::read(found.path.join("model.safetensors")).unwrap(), b"weights");
}
