//! The route of a prefill server: it computes a prompt, and sends its blocks as they are saved.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use bytes::Bytes;
use forebay_api::{ApiError, ErrorBody};
use forebay_engine::{BlockHash, Loan, LoanReply};
use forebay_http::ClientId;
use hyper::body::Frame;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use super::parts::layout;
use super::side::{Pd, PrefillSide};
use super::tier::{PageKind, PageSizes, TierPages};
use super::wire::{ALIVE, BLOCK, END, PrefillRequest, STATE, header};
use crate::call::Call;
use crate::limits::{Upload, whole};
use crate::peers::Peer;
use crate::reply::Failure;
use crate::state::Shared;
use crate::submission::Submission;

/// The interval at which saved blocks are looked for.
const POLL: Duration = Duration::from_millis(5);
/// The longest time without a frame.
const QUIET: Duration = Duration::from_secs(1);
/// The maximum number of blocks that are lent at a time.
const LENT: usize = 64;
/// The maximum size of a response chunk in bytes.
const PIECE: usize = 256 << 10;
/// The maximum number of response chunks that may be queued.
const AHEAD: usize = 4;

/// Computes a prompt for a decode server.
///
/// The response is a sequence of frames with the prompt's blocks. Each block is sent once it is
/// saved in this server's host tier, in the format of the tier. Closing the connection aborts the
/// request. Only routers, and servers with a router's key, may use this route.
#[utoipa::path(
    post,
    path = "/pd/prefill",
    operation_id = "pd_prefill",
    request_body = PrefillRequest,
    responses(
        (status = 200, description = "Frames", content_type = "application/octet-stream"),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn prefill(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let Some(Pd::Prefill(side)) = &state.pd else {
        let reason = "this server was not started with --disaggregation-mode prefill".to_owned();
        return Err(Failure(ApiError::NotImplemented { reason }));
    };
    let (body, _charge) = whole(body, &state).await?;
    let wanted: PrefillRequest = serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid("body", format!("the body: {error}")))?;
    let limits = state.admit()?;
    let names = wanted_blocks(&state, side, &wanted)?;
    let PrefillRequest { prompt, priority, .. } = wanted;
    let submission = Submission::of_one_token(&state, prompt, priority, limits)?;
    let peer = Peer::of_server(ClientId(wanted.client), wanted.salt, wanted.background);
    let call = Call::start(&state, vec![submission], false, arrived, &peer).await?;
    side.sent.prompt();
    let (out, frames) = mpsc::channel(AHEAD);
    let sending = BlockSender { state: Arc::clone(&state), names, sent: 0, out, spoke: arrived };
    tokio::spawn(sending.run(call.named("pd")));
    let mut response = Response::new(Body::new(Frames(frames)));
    let bytes = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(CONTENT_TYPE, bytes);
    Ok(response)
}

/// Returns the names of the blocks that a decode server lacks.
fn wanted_blocks(
    state: &Shared,
    side: &PrefillSide,
    wanted: &PrefillRequest,
) -> Result<Vec<BlockHash>, ApiError> {
    let facts = state.engine.facts();
    let size = facts.as_ref().map_or(1, |facts| facts.page_size.max(1)) as usize;
    let own = facts.and_then(|facts| layout(&side.model, &facts));
    if own.as_ref() != Some(&wanted.layout) {
        let own = own.unwrap_or_else(|| "nothing that another server reads".into());
        let theirs = &wanted.layout;
        let reason =
            format!("the layouts of pages differ: [{theirs}] at the decode server, [{own}] here");
        return Err(ApiError::invalid("layout", reason));
    }
    if wanted.names != state.config.sharing.namer.id() {
        let reason =
            "blocks have other names there: give both servers the same --cache-secret-file";
        return Err(ApiError::invalid("names", reason));
    }
    let blocks = wanted.prompt.len().saturating_sub(1) / size;
    let mut names = state.engine.block_names(wanted.salt, &wanted.prompt);
    names.truncate(blocks);
    if wanted.skip >= names.len() {
        return Err(ApiError::invalid("skip", "`skip`: no block is left of the prompt"));
    }
    Ok(names.split_off(wanted.skip))
}

/// The decode server has disconnected, or the model has failed.
struct SendError;

impl From<io::Error> for SendError {
    fn from(error: io::Error) -> Self {
        tracing::warn!("a page for a decode server can't be read: {error}");
        Self
    }
}

/// Sends the blocks of a prompt to a decode server.
struct BlockSender {
    state: Shared,
    /// The blocks to send.
    names: Vec<BlockHash>,
    /// The number of blocks that were sent.
    sent: usize,
    out: mpsc::Sender<Bytes>,
    /// The time of the last frame.
    spoke: Instant,
}

impl BlockSender {
    /// Sends blocks until all were sent, or no more will be saved. The last frame is sent only on
    /// success: without it the decode server detects a failure.
    async fn run(mut self, mut call: Call) {
        let out = self.out.clone();
        tokio::select! {
            // When either branch ends, the call is dropped, which ends the request.
            _ = self.send_all(&mut call) => {}
            () = out.closed() => {}
        }
    }

    async fn send_all(&mut self, call: &mut Call) -> Result<(), SendError> {
        let computed = call.collect();
        tokio::pin!(computed);
        let mut ended = false;
        // A state is kept only at the end of the prompt, and blocks are useless without it.
        let whole = self.state.engine.facts().is_some_and(|facts| facts.hand.state_bytes > 0);
        while self.sent < self.names.len() {
            // `will_save` is queried before blocks are lent, so that blocks that are saved in
            // between are still sent.
            let more = !ended || self.will_save().await;
            let progress = (!whole || !more) && self.send_saved().await?;
            if progress {
                continue;
            }
            if !more {
                break;
            }
            tokio::select! {
                result = &mut computed, if !ended => {
                    result.map_err(|_| SendError)?;
                    ended = true;
                }
                () = sleep(POLL) => {}
            }
            if self.spoke.elapsed() >= QUIET {
                self.frame(header(ALIVE, 0, 0).to_vec()).await?;
            }
        }
        self.frame(header(END, 0, 0).to_vec()).await
    }

    /// Sends the next blocks that are in a host tier. Returns false if no tier has the next block.
    async fn send_saved(&mut self) -> Result<bool, SendError> {
        let all = &self.names[self.sent..];
        let has_states = self.state.engine.facts().is_some_and(|it| it.hand.state_bytes > 0);
        // A state is lent with the blocks before it.
        let most = if has_states { all.len() } else { all.len().min(LENT) };
        let Some(loan) = self.lend(all[..most].to_vec()).await else { return Ok(false) };
        let pages = self.pages(&loan)?;
        let before = self.sent;
        let mut state = None;
        while let Some(&name) = self.names.get(self.sent)
            && let Some(page) = loan.page(name)
        {
            self.page(&pages, (PageKind::Block, page), name).await?;
            if let Some(page) = loan.state(name) {
                state = Some((name, page));
            }
            self.sent += 1;
        }
        if let Some((name, page)) = state {
            self.page(&pages, (PageKind::State, page), name).await?;
            // No block may follow the state.
            self.names.truncate(self.sent);
        }
        Ok(self.sent > before)
    }

    /// Opens the host tier of a loan.
    fn pages(&self, loan: &Loan) -> Result<TierPages, SendError> {
        let (Some(Pd::Prefill(side)), Some(facts)) = (&self.state.pd, self.state.engine.facts())
        else {
            return Err(SendError);
        };
        let tier = side.tiers.get(loan.lender() as usize).ok_or(SendError)?;
        Ok(TierPages::open(Arc::clone(tier), PageSizes::new(&facts))?)
    }

    /// Sends a page with its note, in chunks.
    async fn page(
        &mut self,
        pages: &TierPages,
        (kind, page): (PageKind, u32),
        name: BlockHash,
    ) -> Result<(), SendError> {
        let length = pages.sizes().record(kind);
        let number = if kind == PageKind::Block { BLOCK } else { STATE };
        let mut piece = header(number, length, name.number()).to_vec();
        let mut at = 0;
        while at < length {
            let (from, left) = (piece.len(), usize::try_from(length - at).unwrap_or(usize::MAX));
            let now = left.min(PIECE - from);
            piece.resize(from + now, 0);
            pages.read((kind, page), at, &mut piece[from..])?;
            at += now as u64;
            self.frame(std::mem::take(&mut piece)).await?;
        }
        if let (PageKind::Block, Some(Pd::Prefill(side))) = (kind, &self.state.pd) {
            side.sent.block(length);
        }
        Ok(())
    }

    async fn frame(&mut self, bytes: Vec<u8>) -> Result<(), SendError> {
        let sent = self.out.send(bytes.into()).await;
        self.spoke = Instant::now();
        sent.map_err(|_| SendError)
    }

    /// Borrows leading blocks that a replica has saved.
    async fn lend(&self, names: Vec<BlockHash>) -> Option<Arc<Loan>> {
        for handle in self.state.engine.handles() {
            let (tell, told) = oneshot::channel();
            // The decode server may have disconnected.
            let reply = LoanReply::new(move |loan| _ = tell.send(loan));
            handle.lend(names.clone(), reply);
            if let Ok(Some(loan)) = told.await {
                return Some(loan);
            }
        }
        None
    }

    /// True if a replica is saving, or will save, one of the remaining blocks.
    async fn will_save(&self) -> bool {
        for handle in self.state.engine.handles() {
            let (tell, told) = oneshot::channel();
            let names = self.names[self.sent..].to_vec();
            handle.will_save(names, Box::new(move |saves| _ = tell.send(saves)));
            if told.await.unwrap_or(false) {
                return true;
            }
        }
        false
    }
}

/// The chunks of a response.
struct Frames(mpsc::Receiver<Bytes>);

impl HttpBody for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}
