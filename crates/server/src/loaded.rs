//! The end of the model's load.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

/// The time between two questions to the engine, by one task for all that wait.
const PERIOD: Duration = Duration::from_millis(10);

/// The end of the model's load. It has a task only after the first waiter.
#[derive(Debug, Default)]
pub(crate) struct ModelLoad(OnceLock<watch::Receiver<bool>>);

impl ModelLoad {
    /// Waits until the model has been loaded, or cannot be, as `is_loading` reports.
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
        // A dropped sender has sent the last value, or the server ends.
        let _ = told.clone().wait_for(|&loaded| loaded).await;
    }
}
