//! Response headers that report how the server deviated from the request: parameters without effect
//! (unless those are errors), and tools that the model's template does not render.

use std::cell::{Cell, RefCell};

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use forebay_api::ApiError;

use crate::state::Shared;

/// The header with the names of parameters that had no effect, separated by commas.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-forebay-ignored");
/// The header that is present if tools were shown to the model in a system message, because the
/// chat template does not render tools.
pub(crate) const TOOLS_HEADER: HeaderName = HeaderName::from_static("x-forebay-tools");
/// The maximum size of the header in bytes. Further names are left out.
const MOST_BYTES: usize = 1024;

tokio::task_local! {
    static NAMES: RefCell<Vec<String>>;
    static GENERIC_TOOLS: Cell<bool>;
}

/// Records that a generic system message lists the request's tools.
pub(crate) fn note_generic_tools() {
    // The server's own requests have no client to report to.
    let _ = GENERIC_TOOLS.try_with(|generic| generic.set(true));
}

/// Records that a parameter of the current request has no effect.
///
/// # Errors
/// The server was started with --strict-params.
pub(crate) fn ignore(state: &Shared, name: &str) -> Result<(), ApiError> {
    if state.config.strict_params {
        let reason = format!(
            "`{name}`: has no effect here, and the server takes no such parameters (--strict-params)"
        );
        return Err(ApiError::invalid(name, reason));
    }
    note(name.to_owned());
    Ok(())
}

/// Records a deviation from the request that is no error.
pub(crate) fn note(name: String) {
    // The server's own requests have no client to report to.
    let _ = NAMES.try_with(|names| {
        let mut names = names.borrow_mut();
        if !names.contains(&name) {
            names.push(name);
        }
    });
}

/// Runs a request, and adds headers with the parameters that had no effect.
pub(crate) async fn tell(request: Request, next: Next) -> Response {
    let answer = async {
        let response = next.run(request).await;
        (response, NAMES.with(RefCell::take), GENERIC_TOOLS.with(Cell::get))
    };
    let answer = GENERIC_TOOLS.scope(Cell::default(), answer);
    let (mut response, names, generic_tools) = NAMES.scope(RefCell::default(), answer).await;
    if generic_tools {
        response.headers_mut().insert(TOOLS_HEADER, HeaderValue::from_static("generic"));
    }
    let mut text = String::new();
    for name in names {
        // Clients choose the names, so characters that a header cannot have are left out.
        let shown: String = name.chars().filter(|c| c.is_ascii_graphic() && *c != ',').collect();
        if text.len() + shown.len() + 2 > MOST_BYTES || shown.is_empty() {
            continue;
        }
        if !text.is_empty() {
            text.push_str(", ");
        }
        text.push_str(&shown);
    }
    if let (false, Ok(value)) = (text.is_empty(), HeaderValue::from_str(&text)) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}
