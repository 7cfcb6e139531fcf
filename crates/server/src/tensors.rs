//! Writes the tensors of an update from a request body to files, which hands read.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::HttpBody;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use forebay_api::ApiError;
use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::limits::Upload;
use crate::weight_files::TensorFolder;

/// The reason for the body's size limit. The error states it where other errors name a flag.
const LIMIT: &str = "four for each number of the served checkpoint";
/// The number of characters that are decoded at a time: a multiple of four.
const AT_ONCE: usize = 1 << 20;
/// The number of chunks of a body that may wait for the disk.
const AHEAD: usize = 4;
/// The maximum number of files per update. A client with several ranks sends one file per rank.
const MOST_FILES: usize = 64;

/// Writes a body to a file in the folder, with only a few chunks in memory. Each chunk has to
/// arrive within `patience`.
///
/// # Errors
/// The body is too large or incomplete, or the file can't be written.
pub(crate) async fn write_body(
    upload: Upload,
    folder: &TensorFolder,
    patience: Duration,
) -> Result<PathBuf, ApiError> {
    let mut body = upload.into_body()?;
    let limit = usize::try_from(folder.most_bytes).unwrap_or(usize::MAX);
    let too_large = || ApiError::BodyTooLarge { limit, flag: LIMIT };
    if body.size_hint().lower() > folder.most_bytes {
        return Err(too_large());
    }
    let path = file_in(folder, 0);
    let (sender, receiver) = mpsc::channel(AHEAD);
    let to = path.clone();
    let writer = spawn_blocking(move || write_pieces(&to, receiver));
    let receive = async move {
        let mut so_far = 0;
        loop {
            let frame = timeout(patience, body.frame()).await;
            let frame = frame.map_err(|_| ApiError::BodyTimeout { seconds: patience.as_secs() })?;
            let Some(frame) = frame else { return Ok(()) };
            let frame = frame.map_err(crate::limits::broken)?;
            let Ok(data) = frame.into_data() else { continue };
            so_far += data.len();
            if so_far > limit {
                return Err(too_large());
            }
            if sender.send(data).await.is_err() {
                // The writer reports the cause.
                return Ok(());
            }
        }
    };
    let received = receive.await;
    let written = writer.await.map_err(io::Error::other).and_then(|written| written);
    received?;
    written.map_err(|error| unwritable(&path, &error))?;
    Ok(path)
}

fn write_pieces(path: &Path, mut pieces: mpsc::Receiver<Bytes>) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    while let Some(piece) = pieces.blocking_recv() {
        file.write_all(&piece)?;
    }
    Ok(())
}

/// Decodes base64 texts into files in the folder, one file per text.
///
/// # Errors
/// A text is not base64, the number of texts is 0 or too large, or a file can't be written.
pub(crate) fn write_decoded(
    texts: &[Cow<'_, str>],
    folder: &TensorFolder,
    param: &str,
) -> Result<Vec<PathBuf>, ApiError> {
    if texts.is_empty() || texts.len() > MOST_FILES {
        let reason = format!("`{param}` has {} texts: 1 to {MOST_FILES}", texts.len());
        return Err(ApiError::invalid(param, reason));
    }
    let mut paths = Vec::with_capacity(texts.len());
    let mut decoded = Vec::with_capacity(AT_ONCE);
    for (number, text) in texts.iter().enumerate() {
        let path = file_in(folder, number);
        let failed = |error: io::Error| unwritable(&path, &error);
        let mut file = File::create_new(&path).map_err(failed)?;
        let pieces = text.as_bytes().chunks(AT_ONCE);
        let last = pieces.len().saturating_sub(1);
        for (at, piece) in pieces.enumerate() {
            let at_end = at == last || !piece.ends_with(b"=");
            decoded.clear();
            if !at_end || STANDARD.decode_vec(piece, &mut decoded).is_err() {
                let reason = format!("`{param}[{number}]` is not base64");
                return Err(ApiError::invalid(format!("{param}[{number}]"), reason));
            }
            file.write_all(&decoded).map_err(failed)?;
        }
        paths.push(path);
    }
    Ok(paths)
}

fn file_in(folder: &TensorFolder, number: usize) -> PathBuf {
    folder.path.join(format!("changed-{number}.safetensors"))
}

fn unwritable(path: &Path, error: &io::Error) -> ApiError {
    let reason = format!("the tensors can't be written to {}: {error}", path.display());
    ApiError::Internal { reason, code: Some("tensors_unwritable") }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::Body;
    use forebay_http::ClientId;

    use super::*;

    /// Creates a folder for `most_bytes` bytes, in the directory for temporary files.
    fn folder(name: &str, most_bytes: u64) -> TensorFolder {
        let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        TensorFolder { guard: Arc::new(RemovedFile(path.clone())), path, most_bytes }
    }

    struct RemovedFile(PathBuf);

    impl Drop for RemovedFile {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).expect("removed");
        }
    }

    #[test]
    fn base64_of_any_length_is_decoded_in_pieces() {
        let folder = folder("decoded", 0);
        let bytes: Vec<u8> = (0..2_000_000_u32).map(|at| (at % 251) as u8).collect();
        let texts = [Cow::from(STANDARD.encode(&bytes)), Cow::from(STANDARD.encode(b"a"))];
        let paths = write_decoded(&texts, &folder, "x").expect("files");
        assert_eq!(std::fs::read(&paths[0]).expect("a file"), bytes);
        assert_eq!(std::fs::read(&paths[1]).expect("a file"), b"a");
    }

    #[test]
    fn what_is_no_base64_is_refused_by_its_place() {
        let error = |texts: &[Cow<'_, str>]| {
            write_decoded(texts, &folder("refused", 0), "x").expect_err("refused").to_string()
        };
        assert_eq!(error(&["a?bc".into()]), "`x[0]` is not base64");
        // Two concatenated base64 texts are not one valid text.
        let joined = format!("{}==QUJD", "A".repeat(AT_ONCE - 2));
        assert_eq!(error(&[joined.into()]), "`x[0]` is not base64");
        assert_eq!(error(&[]), "`x` has 0 texts: 1 to 64");
        assert_eq!(error(&vec![Cow::from("QQ=="); 65]), "`x` has 65 texts: 1 to 64");
    }

    #[tokio::test]
    async fn a_body_goes_to_a_file_within_its_limit() {
        let patience = Duration::from_secs(9);
        let upload = |bytes: &'static [u8]| Upload::new(Body::from(bytes), ClientId(1));
        let found = folder("body", 3);
        let path = write_body(upload(b"abc"), &found, patience).await.expect("a file");
        assert_eq!(std::fs::read(path).expect("a file"), b"abc");
        let other = folder("larger-body", 3);
        let declared = write_body(upload(b"abcd"), &other, patience).await.expect_err("too large");
        assert_eq!(declared.status(), 413);
        let pieces = http_body_util::StreamBody::new(futures_util::stream::iter([
            Ok::<_, std::convert::Infallible>(hyper::body::Frame::data(Bytes::from_static(b"ab"))),
            Ok(hyper::body::Frame::data(Bytes::from_static(b"cd"))),
        ]));
        let undeclared = Upload::new(Body::new(pieces), ClientId(1));
        let found = write_body(undeclared, &other, patience).await.expect_err("too large");
        assert_eq!(found.status(), 413);
    }
}
