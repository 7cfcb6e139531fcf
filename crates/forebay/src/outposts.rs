//! `--listen-hands` and `--placement`: accepts hands on other machines.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use forebay_hand::Site;
use forebay_outpost::{Credentials, Outposts};
use forebay_server::Guard;
use tracing::{error, info};

use crate::flags::{Placement, ReplicaFlags};
use crate::placement::{Asked, Door, Placed, Placer};
use crate::resolve::Resolved;
use crate::{hands, worker};

/// The site on which remote hands run, and Ray's outposts, which have to outlive these hands.
pub(crate) type Elsewhere = (Option<Arc<dyn Site>>, Option<Placed>);

/// Starts a thread that accepts hands on other machines. With `--placement`, also starts outposts
/// in a cluster.
///
/// # Errors
/// The address is not available, the token's files are invalid, or there is no cluster.
pub(crate) fn open(
    flags: &ReplicaFlags,
    python: &Path,
    resolved: &Resolved,
    guard: &Guard,
) -> Result<Elsewhere> {
    let placer = match flags.placement {
        Some(Placement::Ray) => Some(Placer::new(python, asked(flags, resolved))?),
        None => None,
    };
    // Ray's nodes are given the port, so any free port will do.
    let near = placer.as_ref().map(|placer| SocketAddr::new(placer.address, 0));
    let Some(address) = flags.listen_hands.or(near) else { return Ok((None, None)) };
    let credentials = match &flags.join_token_file {
        Some(file) => Credentials::open(file)
            .with_context(|| format!("--join-token-file {}", file.display()))?,
        None => Credentials::make()?,
    };
    let listener =
        TcpListener::bind(address).with_context(|| format!("--listen-hands {address}"))?;
    let address = listener.local_addr()?;
    let (outposts, serving) = Outposts::listen(listener, &credentials)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut serving = Box::pin(serving);
    guard.spawn("outposts", move || {
        if let Err(error) = runtime.block_on(serving.as_mut()) {
            error!("hands can't join any more: {error}");
        }
    })?;
    match &flags.join_token_file {
        Some(token) => {
            let (named, token) = (named(address), token.display());
            info!("hands join at {address}: forebay worker --join {named} --token-file {token}");
        }
        None => info!("hands join at {address}"),
    }
    let site = outposts.site(resolved.choice.hand, flags.collective_interface.as_deref());
    let placed = placer.map(|placer| {
        let host = if address.ip().is_unspecified() { placer.address } else { address.ip() };
        let join = SocketAddr::new(host, address.port()).to_string();
        placer.open(Door { join, token: credentials.token().to_string() }, guard)
    });
    Ok((Some(site), placed.transpose()?))
}

/// The address in a form that can be typed on other machines.
fn named(address: SocketAddr) -> String {
    match address.ip().is_unspecified() {
        true => format!("{}:{}", worker::host_name(), address.port()),
        false => address.to_string(),
    }
}

fn asked(flags: &ReplicaFlags, resolved: &Resolved) -> Asked {
    let arrangement = resolved.device.arrangement;
    Asked {
        replicas: arrangement.groups,
        ranks: arrangement.ranks,
        cuda: resolved.device.cuda(),
        apart: flags.collective_interface.is_some(),
        program: hands::own_program(),
    }
}
