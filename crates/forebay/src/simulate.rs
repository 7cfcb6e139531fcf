//! The simulated device: its configuration, and the commands for its profiles.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use forebay_sim::{
    Bus, CopyModel, Fit, KvModel, Profile, SaveOrder, SimClock, SimConfig, SimText, SparseModel,
    StateModel, Timing, fit, read_samples,
};
use forebay_text::Tokenizer;

use crate::model::{Model, Pooling};
use crate::resolve::{HostSize, Resolved, Simulated, hot_row_tokens, sim_tower};
use crate::script::Answers;

/// The smallest number of words. If a vocabulary has fewer, other tokens are added, since the text
/// would be monotonous.
const MIN_WORDS: usize = 64;
/// The largest number of words. More words would only add rare ones, since vocabularies are roughly
/// sorted by frequency.
const MAX_WORDS: usize = 2048;

/// Creates the configuration of the simulated device that replaces a group's hands.
pub(crate) fn config(
    resolved: &Resolved,
    simulated: &Simulated,
    model: &Model,
    tokenizer: &Arc<Tokenizer>,
    clock: SimClock,
    replica: u64,
    save_order: SaveOrder,
) -> Result<SimConfig> {
    let hand = &resolved.hand;
    let profile = &simulated.content;
    let words = words(tokenizer, model.vocab_size);
    if words.is_empty() {
        bail!("the tokenizer has no token that a simulated device could say");
    }
    let end = model.eos_token_ids.iter().find(|&&id| (id as u32) < model.vocab_size);
    let text = match end {
        Some(&end) => SimText::ending(words, end, simulated.output_tokens),
        None => SimText::endless(words),
    };
    let text = match &simulated.script {
        Some(file) => {
            let script = Answers::read(file, tokenizer, end.copied(), model.vocab_size)?;
            text.scripted(Arc::new(script))
        }
        None => text,
    };
    let keeps_nothing = model.pooling.as_ref().is_some_and(Pooling::whole_prompts);
    let page_size = hand.page_size;
    let hot_row_tokens = hot_row_tokens(hand, profile)?;
    let is_sparse = hand.hot_row_tokens.is_some();
    if profile.states.bytes > 0 && (is_sparse || simulated.tokens_a_row > 1) {
        bail!(
            "{}: a model with recurrent states has neither sparse decoding nor several tokens a row",
            profile.model
        );
    }
    let host = HostSize::from_hand(hand);
    let page_count = match host {
        _ if keeps_nothing => 0,
        Some(HostSize::Ratio(ratio)) if is_sparse && hand.max_total_tokens.is_none() => {
            profile.sparse_page_count(page_size, ratio)
        }
        _ => profile.page_count(page_size, hand.max_total_tokens),
    };
    let state_pages = hand.state_pages.unwrap_or(u32::MAX).min(profile.states.pages);
    let [host_pages, host_state_pages] = match host {
        Some(_) if hand.copy_gbps.is_some() || hand.kv_checksum => {
            bail!("--debug-kv-... is for a hand: profiles say how fast a simulated device copies")
        }
        Some(size) => size.pages(profile, [page_count, state_pages], page_size)?,
        None => [0; 2],
    };
    Ok(SimConfig {
        clock,
        timing: Timing {
            model: profile.time,
            copy: profile.copy,
            bytes: profile.page_bytes(page_size, is_sparse),
            sparse: profile.sparse,
            states: profile.states,
            ranks: resolved.device.arrangement.tp_size(),
            save_order,
        },
        bus: Bus::default(),
        hot_row_tokens,
        seed: hand.seed.wrapping_add(replica),
        load_us: (profile.load_s * 1e6) as u64,
        page_count,
        host_pages,
        host_state_pages,
        vocab_size: model.vocab_size,
        hidden_size: model.hidden_size(),
        text: text.with_vectors(model.pooling.as_ref().map_or(1, |pooling| pooling.size)),
        tokens_a_row: simulated.tokens_a_row,
        tower: sim_tower(model, hand.image_pool_tokens),
        state_pages,
        device: format!("simulated {}", profile.device),
    })
}

/// Returns token ids that make readable text in any order: lower-case words with a leading space,
/// or the closest tokens of this vocabulary.
fn words(tokenizer: &Tokenizer, vocab_size: u32) -> Vec<i32> {
    let known = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX).min(vocab_size);
    let ids: Vec<i32> = (0..known.cast_signed()).filter(|&id| !tokenizer.is_special(id)).collect();
    let word = |bytes: &[u8]| {
        let letters = bytes.strip_prefix(b" ");
        letters.is_some_and(|l| l.len() > 1 && l.iter().all(u8::is_ascii_lowercase))
    };
    let readable =
        |bytes: &[u8]| !bytes.is_empty() && bytes.iter().all(|b| (b' '..=b'~').contains(b));
    let those = |fits: &dyn Fn(&[u8]) -> bool| -> Vec<i32> {
        ids.iter().copied().filter(|&id| fits(&tokenizer.token_bytes(id))).collect()
    };
    let found = [those(&word), those(&readable)].into_iter().find(|w| w.len() >= MIN_WORDS);
    let mut words = found.unwrap_or(ids);
    words.truncate(MAX_WORDS);
    words
}

/// Flags of `sim fit`.
#[derive(Debug, Args)]
pub(crate) struct FitFlags {
    /// Recordings of `serve --record-steps`, or CSV files with the columns rows, prefill_tokens,
    /// context and step_us (optionally decode_rows and attention).
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// File for the profile, which is named after the file [default: print the profile].
    #[arg(short, long, value_name = "FILE.toml")]
    output: Option<PathBuf>,
    /// The device that was measured.
    #[arg(long, value_name = "TEXT")]
    device_name: String,
    /// The model that was computed, and its data type.
    #[arg(long, value_name = "TEXT")]
    model: String,
    /// Size of the KV pool in positions (the pages that `serve` logs when the hand is ready, times
    /// the page size).
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    kv_tokens: u64,
    /// Seconds for which the simulated device loads the model.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    load_seconds: f64,
    /// How the steps were measured, for the profile's `origin`.
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

/// Flags of `sim profiles`.
#[derive(Debug, Args)]
pub(crate) struct ProfilesFlags {
    /// Print this profile as a file, which can be edited to make another.
    #[arg(value_name = "NAME|FILE")]
    name: Option<String>,
}

/// Runs `forebay sim fit`.
pub(crate) fn run_fit(flags: &FitFlags) -> Result<()> {
    let mut samples = Vec::new();
    for file in &flags.files {
        samples.extend(read_samples(file)?);
    }
    let fitted = fit(&samples)?;
    eprintln!("{}", summary(&fitted));
    let note = flags.note.as_ref().map_or(String::new(), |note| format!("{note} "));
    let version = env!("CARGO_PKG_VERSION");
    let profile = Profile {
        name: String::new(),
        origin: format!("{note}Fitted by forebay {version} sim fit: {}.", summary(&fitted)),
        device: flags.device_name.clone(),
        model: flags.model.clone(),
        kv_tokens: flags.kv_tokens,
        load_s: flags.load_seconds,
        time: fitted.model,
        kv: KvModel::default(),
        copy: CopyModel::default(),
        sparse: SparseModel::default(),
        states: StateModel::default(),
    };
    let text = profile.to_toml()?;
    // `serve` will check this file by the same rules, so report errors now.
    Profile::from_toml("fitted", &text)?;
    match &flags.output {
        Some(file) => std::fs::write(file, text).with_context(|| file.display().to_string()),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

fn summary(fit: &Fit) -> String {
    let [p50, p90, p99] = fit.error_percentiles.map(|error| 100.0 * error);
    format!(
        "{} steps, {} outliers left out, R2 {:.4}, relative error {p50:.1} % at the median, {p90:.1} % at p90, {p99:.1} % at p99",
        fit.samples, fit.outliers, fit.r2
    )
}

/// Runs `forebay sim profiles`.
pub(crate) fn run_profiles(flags: &ProfilesFlags) -> Result<()> {
    if let Some(name) = &flags.name {
        print!("{}", Profile::find(name)?.to_toml()?);
        return Ok(());
    }
    for profile in Profile::built_in()? {
        println!("{}", profile.name);
        println!("  device  {}", profile.device);
        println!("  model   {}", profile.model);
        println!("  pool    {} tokens", profile.kv_tokens);
        println!("  origin  {}\n", profile.origin);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn words_can_be_read_and_are_no_special_tokens() {
        let file = "../text/tests/data/tiny-llama-tokenizer.json";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let tokenizer = Tokenizer::from_file(&path).expect("tokenizer");
        let all = words(&tokenizer, u32::MAX);
        assert!(all.len() >= MIN_WORDS);
        let text = tokenizer.decode(&all, false).expect("text");
        assert!(text.bytes().all(|b| b == b' ' || b.is_ascii_lowercase()), "{text}");
        assert!(all.iter().all(|&id| !tokenizer.is_special(id)));
        let below = words(&tokenizer, 500);
        assert!(below.iter().all(|id| (0..500).contains(id)), "ids of the model's head only");
    }
}
