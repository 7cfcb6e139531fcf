//! Resolves the page pools of layers with a sliding window.

use super::device::DeviceSettings;
use forebay_engine::EngineConfig;

/// Returns why all layers share one page pool, whatever the flags; `None`: layers with a window may
/// have a separate pool.
pub(crate) fn why_one_pool(engine: &EngineConfig, device: &DeviceSettings) -> Option<&'static str> {
    if engine.host_tier.is_some() {
        Some("blocks of the host tier are whole pages")
    } else if device.arrangement.ranks > 1 {
        Some("there are several ranks")
    } else {
        None
    }
}
