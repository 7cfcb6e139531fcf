//! Writes non-streamed responses as JSON. A response is limited by `max_unread_bytes` and by the
//! memory budget.
//!
//! A response may repeat data, such as a prompt's log-probabilities in each choice. So bytes are
//! counted while they are written. Choices are built one at a time, and each is dropped once it is
//! written. The bytes stay charged to the memory budget until they have been sent.

use std::io::{self, Write};
use std::sync::Arc;

use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use bytes::Bytes;
use forebay_api::ApiError;
use forebay_http::Charge;
use serde::Serialize;

use crate::reply::{Failure, unwritable};

/// Writes a response of at most `limit` bytes.
pub(crate) struct AnswerWriter {
    bytes: Vec<u8>,
    limit: usize,
    charge: Arc<Charge>,
    /// The error that stopped the writing.
    error: Option<ApiError>,
}

/// Bytes that wait to be sent to a client, and their charge.
struct ChargedBytes {
    bytes: Bytes,
    _charge: Arc<Charge>,
}

impl AsRef<[u8]> for ChargedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Creates a JSON response whose bytes stay charged until they have been sent.
pub(crate) fn charged(bytes: Bytes, charge: Arc<Charge>) -> Response {
    let bytes = Bytes::from_owner(ChargedBytes { bytes, _charge: charge });
    let mut response = Response::new(Body::from(bytes));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl Write for AnswerWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let all = self.bytes.len() + bytes.len();
        let admitted = if all > self.limit {
            Err(ApiError::AnswerTooLarge { limit: self.limit })
        } else {
            self.charge.answer(all).map_err(ApiError::from)
        };
        if let Err(error) = admitted {
            self.error = Some(error);
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AnswerWriter {
    /// Creates a writer for a response of at most `limit` bytes, which are charged to `charge`.
    pub(crate) fn new(limit: usize, charge: &Arc<Charge>) -> Self {
        Self { bytes: Vec::new(), limit, charge: Arc::clone(charge), error: None }
    }

    /// Writes one value as the response.
    ///
    /// # Errors
    /// The response is too large.
    pub(crate) fn value<T: Serialize>(mut self, value: &T) -> Result<Response, Failure> {
        self.json(value)?;
        Ok(self.finish())
    }

    /// Writes a list as the response. Each item is built when it is written.
    ///
    /// # Errors
    /// The response is too large.
    pub(crate) fn list<T: Serialize>(
        mut self,
        items: impl Iterator<Item = T>,
    ) -> Result<Response, Failure> {
        self.items(items)?;
        Ok(self.finish())
    }

    /// Writes `value` as the response, with `items` inserted into its empty list `field`.
    ///
    /// # Errors
    /// The response is too large.
    pub(crate) fn filled<T: Serialize>(
        mut self,
        value: &impl Serialize,
        field: &str,
        items: impl Iterator<Item = T>,
    ) -> Result<Response, Failure> {
        let frame = serde_json::to_string(value).map_err(unwritable)?;
        // Quotation marks within strings are escaped, so this text occurs in no string.
        let (before, after) = frame.split_once(&format!("\"{field}\":[]")).unwrap_or((&frame, ""));
        debug_assert!(!after.is_empty(), "the value has the list");
        self.raw(before)?;
        self.raw("\"")?;
        self.raw(field)?;
        self.raw("\":")?;
        self.items(items)?;
        self.raw(after)?;
        Ok(self.finish())
    }

    fn items<T: Serialize>(&mut self, items: impl Iterator<Item = T>) -> Result<(), Failure> {
        self.raw("[")?;
        for (at, item) in items.enumerate() {
            if at > 0 {
                self.raw(",")?;
            }
            self.json(&item)?;
        }
        self.raw("]")
    }

    fn json<T: Serialize>(&mut self, value: &T) -> Result<(), Failure> {
        serde_json::to_writer(&mut *self, value).map_err(|error| self.failure(error))
    }

    fn raw(&mut self, text: &str) -> Result<(), Failure> {
        let written = self.write_all(text.as_bytes());
        written.map_err(|error| self.failure(serde_json::Error::io(error)))
    }

    fn failure(&mut self, error: serde_json::Error) -> Failure {
        self.error.take().map_or_else(|| unwritable(error), Failure)
    }

    fn finish(self) -> Response {
        let Self { bytes, charge, .. } = self;
        // Reduce the charge to the response's size.
        charge.shrink(bytes.len());
        charged(bytes.into(), charge)
    }
}

#[cfg(test)]
mod tests {
    use forebay_http::{ByteBudget, ClientId};
    use http_body_util::BodyExt;
    use serde_json::json;

    use super::*;

    fn charge(budget: &ByteBudget) -> Arc<Charge> {
        Arc::new(budget.open(ClientId(1)))
    }

    async fn text(response: Response) -> String {
        let body = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn an_answer_is_charged_until_its_last_byte_is_gone() {
        let budget = ByteBudget::new(1 << 30);
        let of_request = charge(&budget);
        of_request.set(1 << 20).unwrap();
        let value = json!({"text": "a".repeat(5000)});
        let written = AnswerWriter::new(1 << 20, &of_request).value(&value).unwrap();
        drop(of_request);
        assert_eq!(budget.used(), value.to_string().len(), "only the answer is charged");
        let body = written.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, value.to_string());
        let rest = body.slice(4000..);
        drop(body);
        assert!(budget.used() > 5000, "a part of the answer waits");
        drop(rest);
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn a_list_is_filled_item_by_item() {
        let budget = ByteBudget::new(1 << 30);
        let head = json!({"name": "\"list\":[]", "list": [], "after": [[]]});
        for count in 0..4 {
            let items = (0..count).map(|at| json!({"at": at}));
            let all: Vec<_> = items.clone().collect();
            let filled =
                AnswerWriter::new(1000, &charge(&budget)).filled(&head, "list", items.clone());
            let expected = json!({"name": "\"list\":[]", "list": all, "after": [[]]});
            assert_eq!(text(filled.unwrap()).await, expected.to_string());
            let alone = AnswerWriter::new(1000, &charge(&budget)).list(items);
            assert_eq!(text(alone.unwrap()).await, json!(all).to_string());
        }
    }

    #[test]
    fn no_item_is_made_beyond_the_limit_or_the_budget() {
        let made = std::cell::Cell::new(0);
        let items = || {
            (0..1000).map(|_| {
                made.set(made.get() + 1);
                "x".repeat(98)
            })
        };
        let budget = ByteBudget::new(1 << 30);
        let refused = AnswerWriter::new(1000, &charge(&budget)).list(items()).unwrap_err();
        assert_eq!(refused.0, ApiError::AnswerTooLarge { limit: 1000 });
        assert_eq!(made.replace(0), 10);
        let small = ByteBudget::new(2000);
        let refused = AnswerWriter::new(1 << 20, &charge(&small)).list(items()).unwrap_err();
        assert_eq!(refused.0.status(), 413, "{refused:?}");
        assert_eq!((made.get(), small.used()), (18, 0));
    }
}
