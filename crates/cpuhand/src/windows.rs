//! Layers with a window. They read only the last positions of a request, and may have separate
//! pages, the window part.

use forebay_kernels::{AttentionSizes, Sizes};
use forebay_protocol::{HandConfig, main_page_count, window_page_count};
use forebay_weights::Shape;

use crate::parts::DecoderParts;
use crate::pooled::kind;

/// The layers of a model whose window is shorter than the context.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct WindowLayers {
    /// The longest of their windows; 0 if there are no such layers.
    pub(crate) window: u32,
    /// The number of pages of the window part relative to the main part; `None` if all layers share
    /// one pool.
    ratio: Option<f64>,
    /// The reason for a single pool although separate pages were requested; otherwise empty.
    pub(crate) one_pool: &'static str,
    page_size: u32,
    context_length: u32,
}

impl WindowLayers {
    /// Finds the layers with a window, and decides whether they get separate pages.
    pub(crate) fn new(config: &HandConfig, shape: &Shape, states: bool) -> Self {
        let &HandConfig { page_size, context_length, window_ratio, .. } = config;
        let layers = 0..shape.layers.len();
        let windows = layers.filter_map(|layer| shape.mixer(layer).attention()?.window);
        let windows = windows.filter_map(|window| u32::try_from(window).ok());
        let window = windows.filter(|&window| window < context_length).max().unwrap_or(0);
        let mut found = Self { window, page_size, context_length, ..Self::default() };
        if window == 0 || window_ratio.is_none() {
            return found;
        }
        let HandConfig { host_bytes, host_ratio, host_pages, .. } = config;
        let has_tier = host_bytes.is_some() || host_ratio.is_some() || host_pages.is_some();
        found.one_pool = if has_tier {
            "blocks of the host tier are whole pages"
        } else if states {
            "its recurrent layers keep states beside the pages"
        } else if kind(config).is_some() {
            "it pools"
        } else if shares_with_others(shape) {
            "layers with a window share keys and values with others"
        } else {
            ""
        };
        found.ratio = window_ratio.filter(|_| found.one_pool.is_empty());
        found
    }

    /// True if layers with this attention use pages of the window part.
    pub(crate) fn holds(&self, attention: &AttentionSizes) -> bool {
        let shorter = |window| window < self.context_length as usize;
        self.ratio.is_some() && attention.window.is_some_and(shorter)
    }

    /// The number of pages of the window part for this many pages of the main part; 0 without a
    /// window part.
    pub(crate) fn count(&self, pages: u32) -> u32 {
        let count = |ratio| window_page_count(pages, ratio, self.window, self.page_size);
        self.ratio.map_or(0, count)
    }

    /// Bytes of this many pages of the main part, of the corresponding pages of the window part,
    /// and of the null page.
    pub(crate) fn bytes(&self, pages: u32, [main, window]: [u64; 2]) -> u64 {
        u64::from(pages) * main + u64::from(self.count(pages)) * window + self.null_bytes(window)
    }

    /// The number of pages of the main part, at most `most`, that fit into this many bytes.
    pub(crate) fn fitting(&self, bytes: u64, most: u32, [main, window]: [u64; 2]) -> u32 {
        let left = bytes.saturating_sub(self.null_bytes(window));
        main_page_count(left, most, (main, window), |pages| self.count(pages))
    }

    fn null_bytes(&self, window: u64) -> u64 {
        if self.ratio.is_some() { window } else { 0 }
    }
}

/// True if a layer with a window reads the keys of a layer without one, or the reverse.
fn shares_with_others(shape: &Shape) -> bool {
    let has_window = |layer: usize| {
        shape.mixer(layer).attention().is_some_and(|attention| attention.window.is_some())
    };
    let mut layers = shape.layers.iter().enumerate();
    layers.any(|(layer, of)| {
        of.keys_of.is_some_and(|keys| has_window(usize::from(keys)) != has_window(layer))
    })
}

/// Bytes of a page of the main part, and of a page of the window part, over the layers of each.
pub(crate) fn page_bytes(parts: &DecoderParts<'_>, sizes: &Sizes) -> [u64; 2] {
    // With these counts, the window part has only its null page.
    let one = Sizes { page_count: 1, window_page_count: 0, ..sizes.clone() };
    let mut bytes = [0; 2];
    for (layer, &kind) in parts.kind_of.iter().enumerate() {
        if parts.keeps_pages(layer) {
            let part = usize::from(one.attentions[kind].in_window_part);
            let [keys, values] = one.pool_bytes(kind);
            bytes[part] += (keys + values) as u64;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shape(changes: &serde_json::Value) -> Shape {
        let mut config = json!({
            "architectures": ["Gemma3ForCausalLM"], "vocab_size": 131, "hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 33,
        });
        let config = config.as_object_mut().expect("an object");
        config.extend(changes.as_object().cloned().unwrap_or_default());
        Shape::from_config(config).expect("a shape")
    }

    fn config(ratio: Option<f64>) -> HandConfig {
        HandConfig {
            page_size: 16,
            context_length: 100,
            window_ratio: ratio,
            ..HandConfig::default()
        }
    }

    #[test]
    fn windows_that_are_shorter_than_the_context_have_a_part() {
        let gemma = shape(&json!({}));
        let layers = WindowLayers::new(&config(Some(0.5)), &gemma, false);
        assert_eq!((layers.window, layers.one_pool), (33, ""));
        assert_eq!((layers.count(100), layers.count(6), layers.count(2)), (50, 4, 2));
        assert_eq!(layers.bytes(100, [10, 3]), 1000 + 150 + 3);
        assert_eq!(
            (layers.fitting(1153, 200, [10, 3]), layers.fitting(1152, 200, [10, 3])),
            (100, 99)
        );
        let parts = DecoderParts::new(&gemma).expect("it is served");
        let held = parts.attention_sizes().into_iter().map(|it| layers.holds(&it));
        assert_eq!(held.collect::<Vec<_>>(), [true, false]);
        let long = shape(&json!({"sliding_window": 100}));
        assert_eq!(WindowLayers::new(&config(Some(0.5)), &long, false).window, 0);
    }

    #[test]
    fn others_have_one_pool_and_say_why() {
        let gemma = shape(&json!({}));
        let off = WindowLayers::new(&config(None), &gemma, false);
        assert_eq!((off.window, off.one_pool, off.count(100)), (33, "", 0));
        assert_eq!((off.bytes(100, [10, 0]), off.fitting(1005, 200, [10, 0])), (1000, 100));
        let tier = HandConfig { host_ratio: Some(2.0), ..config(Some(0.5)) };
        let tier = WindowLayers::new(&tier, &gemma, false);
        assert!(tier.one_pool.contains("host tier") && tier.count(100) == 0);
        let states = WindowLayers::new(&config(Some(0.5)), &gemma, true);
        assert!(states.one_pool.contains("recurrent") && states.count(100) == 0);
    }
}
