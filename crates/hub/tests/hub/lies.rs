//! Servers that send wrong responses. Each gives a one-line error, and no wrong file is kept.

use std::fs;

use super::server::{Answer, Asked, Server, sha256};
use super::{SMALL, blobs, bytes, error};

/// Downloads a model while `change` falsifies the responses for its weights. Returns the error, and
/// the number of times that the weights were requested.
fn told(change: impl Fn(&Asked, &mut Answer) + Send + Sync + 'static) -> (String, usize) {
    let weights = bytes(300_000);
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &weights)];
    let server = Server::changed(&files, move |asked, answer, _| {
        if asked.path.ends_with("model.safetensors") {
            change(asked, answer);
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let text = error(&server, cache.path());
    assert!(!text.contains('\n'));
    let left: Vec<String> = blobs(cache.path());
    let mut honest = vec![sha256(SMALL[0].1), sha256(SMALL[1].1)];
    honest.sort();
    assert_eq!(left, honest, "{text}");
    (text, server.downloads("model.safetensors").len())
}

#[test]
fn other_bytes() {
    let (text, downloads) = told(|asked, answer| {
        if asked.is_download() {
            answer.body[7] ^= 1;
        }
    });
    assert!(text.starts_with("model.safetensors of org/name is not what http://127."), "{text}");
    assert!(text.contains("its hash is "), "{text}");
    assert_eq!(downloads, 1);
}

#[test]
fn another_length() {
    let (text, _) = told(|asked, answer| {
        if asked.is_download() {
            answer.body.truncate(1000);
        }
    });
    assert!(text.contains("300 kB announced, 1.0 kB sent"), "{text}");
}

#[test]
fn a_body_without_an_end() {
    let (text, _) = told(|asked, answer| {
        if asked.is_download() {
            let chunk = [b"10000\r\n".to_vec(), vec![7; 0x10000], b"\r\n".to_vec()].concat();
            answer.body = chunk.repeat(20);
            answer.set("transfer-encoding", "chunked");
        }
    });
    assert!(text.contains("more was sent than the announced 300 kB"), "{text}");
}

#[test]
fn ranges_of_elsewhere() {
    let (text, _) = told(|asked, answer| {
        if asked.is_download() {
            if asked.start.is_some() {
                answer.set("content-range", "bytes 0-299999/300000");
            } else {
                answer.cut = Some(100_000);
            }
        }
    });
    assert!(text.contains("it sends \"bytes 0-299999/300000\""), "{text}");
}

#[test]
fn an_address_that_is_a_file() {
    for location in ["file:///etc/passwd", "ftp://x/y", "data:,x"] {
        let (text, _) = told(move |asked, answer| {
            if asked.is_download() {
                *answer = Answer::new(302, &[("location", location)]);
            }
        });
        assert!(text.contains("which is not followed"), "{text}");
    }
}

#[test]
fn an_address_that_sends_to_itself() {
    let (text, _) = told(|asked, answer| {
        *answer = Answer::new(307, &[("location", &asked.path)]);
    });
    assert!(text.contains("redirects too often"), "{text}");
}

#[test]
fn an_etag_that_is_a_path() {
    for etag in ["\"../../../escaped\"", "\"a/b\"", "\"..\"", "\"\""] {
        let (text, _) = told(move |_, answer| answer.set("etag", etag));
        assert!(text.contains("as an ETag"), "{text}");
    }
}

#[test]
fn an_encoding_that_nobody_asked_for() {
    let (text, _) = told(|asked, answer| {
        if asked.is_download() {
            answer.set("content-encoding", "gzip");
        }
    });
    assert!(text.contains("in an encoding that was not requested"), "{text}");
}

#[test]
fn a_range_without_a_length() {
    let (text, _) = told(|asked, answer| {
        if asked.method == "HEAD" || asked.start.is_some() {
            answer.set("transfer-encoding", "chunked");
            answer.set("content-range", "bytes 1-7/*");
            answer.body = b"0\r\n\r\n".to_vec();
        }
    });
    assert!(text.contains("a file without a length"), "{text}");
}

/// A mirror that compresses or generates its responses does not send their lengths.
#[test]
fn mirrors_without_lengths_are_read() {
    let weights = bytes(300_000);
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &weights)];
    for ranges in [true, false] {
        let server = Server::changed(&files, move |asked, answer, _| {
            if !asked.path.contains("/resolve/") {
                return;
            }
            if !ranges && asked.start.is_some() {
                let whole = bytes(300_000);
                let is_weights = asked.path.ends_with("model.safetensors");
                let small = SMALL.iter().find(|(name, _)| asked.path.ends_with(name));
                answer.body = if is_weights { whole } else { small.expect("a file").1.to_vec() };
                answer.status = 200;
                answer.headers.retain(|(name, _)| *name != "content-range");
            }
            answer.set("transfer-encoding", "chunked");
            let size = format!("{:x}\r\n", answer.body.len());
            answer.body = [size.as_bytes(), &answer.body, b"\r\n0\r\n\r\n"].concat();
        });
        let cache = tempfile::tempdir().expect("a folder");
        let found = super::find(&server, cache.path()).expect("a model");
        let here = fs::read(found.path.join("model.safetensors")).expect("the weights");
        assert!(here == weights, "ranges: {ranges}");
    }
}

#[test]
fn a_file_larger_than_the_disk() {
    let (text, downloads) = told(|_, answer| answer.set("x-linked-size", "9000000000000000000"));
    assert!(text.contains(" free, and model.safetensors needs 9000000 TB"), "{text}");
    assert_eq!(downloads, 0);
}

#[test]
fn a_connection_that_always_ends() {
    let (text, downloads) = told_of_cuts();
    assert!(text.contains("can't be downloaded from"), "{text}");
    assert!(downloads < 10, "{downloads}");
}

/// Returns the error and the number of downloads if connections are cut. Unlike wrong files,
/// partial downloads are kept.
fn told_of_cuts() -> (String, usize) {
    let files: [(&str, &[u8]); 3] = [SMALL[0], SMALL[1], ("model.safetensors", &[7; 1000])];
    let server = Server::changed(&files, |asked, answer, _| {
        if asked.is_download() && asked.path.ends_with("safetensors") {
            answer.cut = Some(10);
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let text = error(&server, cache.path());
    let kept = cache.path().join("hub/models--org--name/blobs");
    let partial = kept.join(format!("{}.incomplete", sha256(&[7; 1000])));
    assert!(fs::metadata(partial).expect("it is kept").len() >= 10);
    (text, server.downloads("model.safetensors").len())
}

/// Returns the error for a repository whose list of files is `body`.
fn listed(body: &'static str) -> String {
    let server = Server::changed(&[], move |asked, answer, _| {
        if asked.path.starts_with("/api") {
            answer.body = body.as_bytes().to_vec();
        }
    });
    let cache = tempfile::tempdir().expect("a folder");
    let text = error(&server, cache.path());
    assert!(blobs(cache.path()).is_empty());
    text
}

#[test]
fn paths_that_leave() {
    for (body, path) in [
        (r#"{"sha": "c0", "siblings": [{"rfilename": "../x"}]}"#, "../x"),
        (r#"{"sha": "c0", "siblings": [{"rfilename": "/etc/x"}]}"#, "/etc/x"),
        (r#"{"sha": "c0", "siblings": [{"rfilename": "a/../../x"}]}"#, "a/../../x"),
        (r#"{"sha": "../../c0", "siblings": []}"#, "../../c0"),
    ] {
        let text = listed(body);
        assert!(text.contains(&format!("announced: {path:?} as a ")), "{text}");
    }
}

#[test]
fn lists_that_are_none() {
    for body in ["", "<html>", "[]", r#"{"siblings": []}"#] {
        assert!(listed(body).contains("is not that of a Hugging Face hub"));
    }
}

#[test]
fn refusals_are_explained() {
    for (status, headers, expected) in [
        (401, vec![("x-error-code", "GatedRepo")], "accept its terms at http"),
        (403, vec![("x-error-code", "GatedRepo")], "set HF_TOKEN to a token of that account"),
        (401, vec![], "(401): set HF_TOKEN to a token that may read it"),
        (403, vec![], "(403): set HF_TOKEN to a token that may read it"),
        (404, vec![], "org/name is not at http"),
        (500, vec![("x-error-message", "broken")], "(it answers 500: broken)"),
        (302, vec![("location", "file:///x")], "which is not followed"),
    ] {
        let server = Server::changed(&[], move |_, answer, _| {
            *answer = Answer::new(status, &headers);
        });
        let text = error(&server, tempfile::tempdir().expect("a folder").path());
        assert!(text.contains(expected), "{status}: {text}");
    }
}
