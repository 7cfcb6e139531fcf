//! The data for the web page's engine tab: current steps, pages and requests. It is sampled four
//! times a second, and only while a viewer is connected.

mod requests;
pub(crate) mod shown;
mod snapshot;
mod tick;
mod trace;

use std::sync::Arc;

use axum::http::Response;
use forebay_api::ApiError;
use forebay_api::limits::{SHOWN_BYTES, cut};
use forebay_engine::{EngineHandle, EventKind, Moment, Status};
use forebay_webui::{Feed, FeedBody};
use serde::Serialize;

pub(crate) use crate::live::snapshot::views;
use crate::live::tick::Watch;
pub(crate) use crate::live::trace::trace;
use crate::state::Shared;

/// Opens a feed of events. It ends when the client disconnects, or when the server drains.
///
/// # Errors
/// Too many feeds are open already.
pub(crate) fn watch(state: &Shared) -> Result<Response<FeedBody>, ApiError> {
    let Some((feed, response)) = state.live.watchers.open() else {
        return Err(ApiError::Overloaded {
            reason: "too many clients read this feed already".into(),
        });
    };
    tokio::spawn(write(Arc::clone(state), feed));
    Ok(response)
}

async fn write(state: Shared, feed: Feed) {
    let mut watch = Watch::new(&state);
    let mut shown = snapshot::follow(&state);
    // The current snapshot may have been made for an earlier viewer, so wait for the next one.
    shown.mark_unchanged();
    loop {
        tokio::select! {
            changed = shown.changed() => if changed.is_err() { return },
            () = feed.left() => return,
        }
        let snapshot = Arc::clone(&shown.borrow_and_update());
        if matches!(state.status(), Status::Draining) {
            return;
        }
        if let Some(start) = watch.start(&state, &snapshot)
            && !feed.send("start", &start).await
        {
            return;
        }
        if !feed.send("tick", &watch.tick(&snapshot)).await {
            return;
        }
    }
}

/// The events of a request, from its arrival to its end.
#[derive(Serialize)]
pub(crate) struct Life {
    id: String,
    /// The replica of the last event.
    replica: usize,
    events: Vec<LifeEvent>,
}

#[derive(Serialize)]
struct LifeEvent {
    at_us: u64,
    #[serde(flatten)]
    what: EventKind,
    replica: usize,
}

/// Returns the recorded events of a request.
///
/// # Errors
/// The request is unknown, or its events are no longer kept.
pub(crate) fn life(state: &Shared, id: &str) -> Result<Life, ApiError> {
    let unknown = || ApiError::UnknownRequest { id: cut(id, SHOWN_BYTES).into_owned() };
    let number: u64 = id.parse().map_err(|_| unknown())?;
    let engines = state.engine.handles();
    let of = |(at, engine): (usize, &EngineHandle)| {
        let moments = engine.moments_of(number).into_iter();
        moments.map(move |Moment { at_us, what, .. }| LifeEvent { at_us, what, replica: at })
    };
    let mut events: Vec<LifeEvent> = engines.iter().enumerate().flat_map(of).collect();
    events.sort_by_key(|event| event.at_us);
    let replica = events.last().ok_or_else(unknown)?.replica;
    Ok(Life { id: id.to_owned(), replica, events })
}
