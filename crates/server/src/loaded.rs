//! Waiting for the end of the model's load.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

/// The interval at which one task polls the engine for all waiters.
const PERIOD: Duration = Duration::from_millis(10);

/// Lets tasks wait for the end of the model's load. The polling task starts with the first waiter.
#[derive(Debug, Default)]
pub(crate) struct ModelLoad(OnceLock<watch::Receiver<bool>>);

impl ModelLoad {
    /// Waits until the model is loaded or has failed to load, as `is_loading` reports.
    pub(crate) async fn wait(&self, is_loading: impl Fn() -> bool + Send + 'static) {
        let told = self.0.get_or_init(|| {
            let (tell, told) = watch::channel(false);
            tokio::spawn(async move {
                while is_loading() {
                    sleep(PERIOD).await;
                }
                let _ = tell.send(true);
            });
            told
        });
        // The sender is dropped only after its last value, or when the server stops.
        let _ = told.clone().wait_for(|&loaded| loaded).await;
    }
}
