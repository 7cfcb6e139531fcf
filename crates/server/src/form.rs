//! Bodies of multipart forms, with bounded memory for the parser.
//!
//! The parser buffers all available data before it parses, and keeps a part's head until the head
//! is complete. So the parser gets one frame at a time, and the bytes outside the file are bounded.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use axum::Error;
use axum::body::{Body, HttpBody};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Frame;

/// The maximum number of bytes of a form without its file.
const BESIDE: u64 = 1 << 20;

/// Counts the bytes of a form's file that were read.
#[derive(Debug, Clone, Default)]
pub(crate) struct TakenBytes(Arc<AtomicU64>);

impl TakenBytes {
    pub(crate) fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A form's body that yields one frame per poll. See the module.
struct FormBody {
    body: Body,
    received: u64,
    taken: TakenBytes,
    /// True if the parser was given a frame and has not polled for another yet.
    gave: bool,
}

/// Returns the bounded body, and the counter of its file's bytes that were read.
pub(crate) fn bounded(body: Body) -> (Body, TakenBytes) {
    let taken = TakenBytes::default();
    let form = FormBody { body, received: 0, taken: taken.clone(), gave: false };
    (Body::new(form), taken)
}

impl HttpBody for FormBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if std::mem::take(&mut self.gave) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let frame = ready!(Pin::new(&mut self.body.frame()).poll(context));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.gave = true;
            self.received += data.len() as u64;
            let kept = self.received.saturating_sub(self.taken.0.load(Ordering::Relaxed));
            // The last frames of a file may not be counted as read yet.
            if kept > BESIDE + data.len() as u64 {
                let reason = format!("the form has more than {BESIDE} bytes beside its file");
                return Poll::Ready(Some(Err(Error::new(std::io::Error::other(reason)))));
            }
        }
        Poll::Ready(frame)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use axum::extract::{FromRequest, Multipart, Request};
    use http_body_util::StreamBody;

    use super::*;

    const FRAME: usize = 64 << 10;

    /// Returns a request with endless frames after `head`, the counter of read file bytes, and the
    /// number of frames that were polled.
    fn endless(head: &'static str) -> (Request, TakenBytes, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let frames = futures_util::stream::iter((0..1 << 16).map(move |at| {
            count.fetch_add(1, Ordering::Relaxed);
            let data = if at == 0 { Bytes::from(head) } else { Bytes::from(vec![b'a'; FRAME]) };
            Ok::<_, Error>(Frame::data(data))
        }));
        let (body, taken) = bounded(Body::new(StreamBody::new(frames)));
        let request = Request::post("/v1/files");
        let request = request.header("content-type", "multipart/form-data; boundary=x");
        (request.body(body).unwrap(), taken, asked)
    }

    #[tokio::test]
    async fn a_form_without_an_end_is_given_up_soon() {
        for head in ["--x\r\nname: ", "a line before all parts ", ""] {
            let (request, _, asked) = endless(head);
            let mut form = Multipart::from_request(request, &()).await.unwrap();
            assert!(form.next_field().await.is_err());
            assert!(asked.load(Ordering::Relaxed) <= 20, "{head}");
        }
    }

    #[tokio::test]
    async fn a_file_is_taken_as_it_comes() {
        let head = "--x\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\n";
        let (request, taken, asked) = endless(head);
        let mut form = Multipart::from_request(request, &()).await.unwrap();
        let mut file = form.next_field().await.unwrap().unwrap();
        let mut bytes = 0;
        // The extractor's own limit, 2 MB by default, is off on the route.
        while bytes < 28 * FRAME {
            let part = file.chunk().await.unwrap().unwrap();
            taken.add(part.len());
            bytes += part.len();
            let kept = asked.load(Ordering::Relaxed) * FRAME - bytes;
            assert!(kept <= 3 * FRAME, "{kept} bytes wait in memory");
        }
    }
}
