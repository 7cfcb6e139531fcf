//! Replicas that compute prompts, and replicas that go on behind the first token.

use forebay_engine::Request;
use serde::Serialize;

use crate::dispatch::Asked;

/// The division of replicas by roles. The first `prefill` of them compute prompts, and the others
/// decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PdConfig {
    /// The number of replicas that compute prompts.
    #[serde(rename = "pd_prefill")]
    pub prefill: u32,
    /// A request is served by a decode replica alone if that has no more tokens to compute.
    #[serde(rename = "pd_local_tokens")]
    pub local_tokens: u32,
}

/// The reason for which one replica serves a request alone although there are roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LocalReason {
    /// The decode replica has little left to compute.
    Short,
    /// No prefill replica takes requests.
    NoPrefill,
    /// No decode replica takes requests.
    NoDecode,
    /// Its keys and values can't be lent: a prompt of embeddings.
    Kind,
    /// The client has named a replica, or asks for what needs no second one.
    Named,
}

impl LocalReason {
    /// All reasons.
    pub const ALL: [Self; 5] =
        [Self::Short, Self::NoPrefill, Self::NoDecode, Self::Kind, Self::Named];

    /// The name of the reason in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::NoPrefill => "no_prefill",
            Self::NoDecode => "no_decode",
            Self::Kind => "kind",
            Self::Named => "named",
        }
    }
}

/// The numbers of requests that one replica served alone, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LocalCounts([u64; LocalReason::ALL.len()]);

impl LocalCounts {
    pub(crate) fn count(&mut self, reason: LocalReason) {
        self.0[reason as usize] += 1;
    }

    /// The number for a reason.
    #[must_use]
    pub fn of(&self, reason: LocalReason) -> u64 {
        self.0[reason as usize]
    }
}

impl Default for PdConfig {
    /// The defaults of the flags, for one prefill replica.
    fn default() -> Self {
        Self { prefill: 1, local_tokens: 512 }
    }
}

impl PdConfig {
    /// True if a replica computes prompts for others.
    pub(crate) fn prefills(self, at: usize) -> bool {
        at < self.prefill as usize
    }

    /// Leaves those of the `open` replicas open that a request is to go to. Gives the reason if it
    /// stays there; `None`: it leaves behind its first token.
    pub(crate) fn narrow(
        self,
        asked: &Asked<'_>,
        request: &Request,
        open: &mut [bool],
    ) -> Option<LocalReason> {
        if asked.preference.replica.is_some_and(|at| open.get(at as usize) == Some(&true))
            || request.spec.pooling.is_some()
            || request.max_tokens == 0
        {
            return Some(LocalReason::Named);
        }
        let uncached = |at: usize| asked.tokens - asked.cached.get(at).copied().unwrap_or(0);
        let is_open = |at: usize| open[at];
        let any =
            |which: &dyn Fn(usize) -> bool| (0..open.len()).any(|at| is_open(at) && which(at));
        let decodes = |at: usize| !self.prefills(at);
        let near = |at: usize| decodes(at) && uncached(at) <= u64::from(self.local_tokens);
        let (reason, which): (_, &dyn Fn(usize) -> bool) = if !any(&decodes) {
            (Some(LocalReason::NoDecode), &|_| true)
        } else if request.spec.embeds.is_some() {
            (Some(LocalReason::Kind), &decodes)
        } else if any(&near) {
            (Some(LocalReason::Short), &near)
        } else if !any(&|at| self.prefills(at)) {
            (Some(LocalReason::NoPrefill), &decodes)
        } else {
            (None, &|at| self.prefills(at))
        };
        let chosen: Vec<bool> = (0..open.len()).map(|at| open[at] && which(at)).collect();
        open.copy_from_slice(&chosen);
        reason
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_engine::Preference;

    use super::*;

    const PD: PdConfig = PdConfig { prefill: 1, local_tokens: 10 };

    /// Where a request of 100 tokens goes, of which replicas have these cached, and why it stays.
    fn narrowed(
        cached: &[u64],
        mut open: [bool; 3],
        preference: &Preference,
        request: &Request,
    ) -> ([bool; 3], Option<LocalReason>) {
        let (id, tokens, room, cached) = (1, 100, 5, cached.to_vec());
        let asked = Asked { id, preference, tokens, room, cached, names: Arc::default() };
        let reason = PD.narrow(&asked, request, &mut open);
        (open, reason)
    }

    #[test]
    fn prompts_go_to_prefill_unless_a_decode_replica_has_them() {
        let (any, request) =
            (Preference::default(), Request { max_tokens: 5, ..Request::default() });
        let of = |cached: &[u64], open| narrowed(cached, open, &any, &request);
        let all = [true; 3];
        assert_eq!(of(&[], all), ([true, false, false], None));
        assert_eq!(of(&[99, 89, 0], all), ([true, false, false], None), "11 are left to compute");
        let short = Some(LocalReason::Short);
        assert_eq!(of(&[99, 89, 90], all), ([false, false, true], short));
        let without = Some(LocalReason::NoPrefill);
        assert_eq!(of(&[], [false, true, true]), ([false, true, true], without));
        let alone = Some(LocalReason::NoDecode);
        assert_eq!(of(&[], [true, false, false]), ([true, false, false], alone));
    }

    #[test]
    fn what_is_not_handed_on_stays() {
        let any = Preference::default();
        let named = Preference { replica: Some(0), ..Preference::default() };
        let request = Request { max_tokens: 5, ..Request::default() };
        let stays = Some(LocalReason::Named);
        assert_eq!(narrowed(&[], [true; 3], &named, &request), ([true; 3], stays));
        let scored = Request::default();
        assert_eq!(narrowed(&[], [true; 3], &any, &scored), ([true; 3], stays));
        let mut embedded = request.clone();
        embedded.spec.embeds = Some(0);
        let kind = Some(LocalReason::Kind);
        assert_eq!(narrowed(&[], [true; 3], &any, &embedded), ([false, true, true], kind));
    }
}
