//! Sets the page counts in the configuration of the next hand.

use forebay_protocol::{HandConfig, Ready};

/// Gives the next hand exactly the page counts of this hand, however much memory is free by then.
/// The scheduler was set up with these counts, and host pages keep their indices.
pub(crate) fn keep(config: &mut HandConfig, facts: &Ready) {
    config.max_total_tokens = Some(u64::from(facts.page_count) * u64::from(config.page_size));
    config.host_pages = (facts.host_page_count > 0).then_some(facts.host_page_count);
    if facts.state_bytes > 0 {
        config.state_pages = Some(facts.state_page_count);
        config.host_state_pages = config.host_pages.map(|_| facts.host_state_page_count);
    }
}

/// Limits the next hand to `pages` pages and `host_pages` host pages, and its state pages in
/// proportion. On a GPU only the host's memory has run out, so the number of hot pages does not
/// change.
pub(crate) fn lower(config: &mut HandConfig, pages: u32, host_pages: u32) {
    if config.device != "cuda" {
        let tokens = u64::from(pages) * u64::from(config.page_size);
        let before = config.max_total_tokens.replace(tokens);
        config.state_pages = in_proportion(config.state_pages, tokens, before);
    }
    if host_pages > 0 {
        let before = config.host_pages.replace(host_pages).map(u64::from);
        config.host_state_pages = in_proportion(config.host_state_pages, host_pages.into(), before);
    }
}

fn in_proportion(states: Option<u32>, now: u64, before: Option<u64>) -> Option<u32> {
    let states = states?;
    let Some(before) = before.filter(|&before| before > now) else { return Some(states) };
    // Keep at least one state page if there were any.
    let part = (u64::from(states) * now / before).max(states.min(1).into());
    u32::try_from(part).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_pages_are_lowered_with_the_others() {
        let mut config =
            HandConfig { page_size: 16, device: "cpu".into(), ..HandConfig::default() };
        let facts = Ready {
            page_count: 100,
            host_page_count: 200,
            state_page_count: 8,
            state_bytes: 1,
            host_state_page_count: 16,
            ..Ready::default()
        };
        keep(&mut config, &facts);
        let counts = |config: &HandConfig| {
            (config.max_total_tokens, config.state_pages, config.host_state_pages)
        };
        assert_eq!(counts(&config), (Some(1600), Some(8), Some(16)));
        lower(&mut config, 75, 150);
        assert_eq!(counts(&config), (Some(1200), Some(6), Some(12)));
        assert_eq!(config.host_pages, Some(150));
        lower(&mut config, 75, 150);
        assert_eq!(counts(&config), (Some(1200), Some(6), Some(12)), "as many as before");
        let mut stateless = HandConfig { page_size: 16, ..HandConfig::default() };
        keep(&mut stateless, &Ready { page_count: 9, ..Ready::default() });
        lower(&mut stateless, 6, 0);
        assert_eq!(counts(&stateless), (Some(96), None, None));
    }
}
