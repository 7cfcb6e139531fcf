//! `--listen-hands`: hands on other machines.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use forebay_hand::Site;
use forebay_outpost::{Credentials, Outposts};
use forebay_server::Guard;
use tracing::{error, info};

use crate::config::Config;
use crate::flags::{Device, ReplicaFlags, ServeFlags};
use crate::worker;

/// Where hands join, and what opens the door.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gate<'a> {
    address: SocketAddr,
    token: &'a Path,
}

impl<'a> Gate<'a> {
    /// `None`: hands run here.
    pub(crate) fn of(flags: &'a ReplicaFlags) -> Option<Self> {
        let address = flags.listen_hands?;
        Some(Self { address, token: flags.join_token_file.as_deref()? })
    }

    /// Begins to listen, on a thread of its own.
    ///
    /// # Errors
    /// The address can't be had, or the token's files are not right.
    pub(crate) fn open(self, hand: &str, guard: &Guard) -> Result<Arc<dyn Site>> {
        let token = self.token.display();
        let credentials =
            Credentials::open(self.token).with_context(|| format!("--join-token-file {token}"))?;
        let listener = TcpListener::bind(self.address)
            .with_context(|| format!("--listen-hands {}", self.address))?;
        let address = listener.local_addr()?;
        let (outposts, serving) = Outposts::listen(listener, &credentials)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut serving = Box::pin(serving);
        guard.spawn("outposts", move || {
            if let Err(error) = runtime.block_on(serving.as_mut()) {
                error!("hands can't join any more: {error}");
            }
        })?;
        let port = address.port();
        let named = match address.ip().is_unspecified() {
            true => format!("{}:{port}", worker::host_name()),
            false => address.to_string(),
        };
        info!("hands join at {address}: forebay worker --join {named} --token-file {token}");
        Ok(outposts.site(hand))
    }
}

/// Whether everything that was asked for can be had from hands on other machines.
///
/// # Errors
/// One line for the user.
pub(crate) fn check(flags: &ServeFlags, config: &Config) -> Result<()> {
    if flags.replicas.listen_hands.is_none() {
        return Ok(());
    }
    let without = [
        (config.device == "sim", "--device sim: it has no hands"),
        (flags.run.device == Device::Deferred, "--device deferred"),
        (config.host_tier.is_some(), "a tier of host memory"),
        (flags.replicas.cpu_affinity.is_some(), "--cpu-affinity: it is of this machine"),
    ];
    match without.into_iter().find(|(given, _)| *given) {
        Some((_, what)) => bail!("--listen-hands does not go with {what}"),
        None => Ok(()),
    }
}
