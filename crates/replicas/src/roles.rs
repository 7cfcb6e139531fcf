//! The roles of replicas: some compute prompts, others continue requests after the first token.

use forebay_balance::{Ask, LocalReason, Role, RoleRule};
use forebay_engine::Request;
use serde::Serialize;

use crate::dispatch::RequestProfile;

/// Settings of the roles of replicas. At the start, the first `prefill` replicas compute prompts,
/// and the others decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PdConfig {
    /// The number of replicas that compute prompts.
    #[serde(rename = "pd_prefill")]
    pub prefill: u32,
    /// A decode replica serves a request alone if at most this many tokens are left to compute.
    #[serde(rename = "pd_local_tokens")]
    pub local_tokens: u32,
}

impl Default for PdConfig {
    /// The defaults of the flags, for one prefill replica.
    fn default() -> Self {
        Self { prefill: 1, local_tokens: 512 }
    }
}

/// The number of requests that one replica served alone, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LocalCounts([u64; LocalReason::ALL.len()]);

impl LocalCounts {
    pub(crate) fn count(&mut self, reason: LocalReason) {
        self.0[reason as usize] += 1;
    }

    /// The number of requests for one reason.
    #[must_use]
    pub fn of(&self, reason: LocalReason) -> u64 {
        self.0[reason as usize]
    }
}

/// Returns the roles of all replicas at the start. Without a configuration each replica has both
/// roles.
pub(crate) fn at_start(pd: Option<PdConfig>, replicas: usize) -> Vec<Role> {
    let of = |at: usize| match pd {
        None => Role::Both,
        Some(pd) if at < pd.prefill as usize => Role::Prefill,
        Some(_) => Role::Decode,
    };
    (0..replicas).map(of).collect()
}

/// Narrows the `open` replicas to those that may get the request. Returns a reason if the request
/// is not to be handed on, whichever replica is chosen.
pub(crate) fn narrow(
    rule: &RoleRule<'_>,
    asked: &RequestProfile<'_>,
    request: &Request,
    open: &mut [bool],
) -> Option<LocalReason> {
    if asked.preference.replica.is_some_and(|at| open.get(at as usize) == Some(&true))
        || request.spec.pooling.is_some()
        || request.max_tokens == 0
    {
        return Some(LocalReason::Named);
    }
    let ask = Ask { tokens: asked.tokens, cached: &asked.cached };
    rule.narrow(&ask, request.spec.embeds.is_none(), open)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_engine::Preference;

    use super::*;

    #[test]
    fn what_is_not_handed_on_stays() {
        let roles = at_start(Some(PdConfig { prefill: 1, local_tokens: 10 }), 3);
        assert_eq!(roles, [Role::Prefill, Role::Decode, Role::Decode]);
        assert_eq!(at_start(None, 2), [Role::Both; 2]);
        let rule = RoleRule { roles: &roles, local_tokens: 10 };
        let narrowed = |preference: &Preference, request: &Request| {
            let (names, cached, borrows) = (Arc::default(), Vec::new(), true);
            let asked =
                RequestProfile { id: 1, preference, tokens: 100, room: 5, cached, names, borrows };
            let mut open = [true; 3];
            let reason = narrow(&rule, &asked, request, &mut open);
            (open, reason)
        };
        let any = Preference::default();
        let named = Preference { replica: Some(0), ..Preference::default() };
        let request = Request { max_tokens: 5, ..Request::default() };
        let stays = Some(LocalReason::Named);
        assert_eq!(narrowed(&any, &request), ([true, false, false], None));
        assert_eq!(narrowed(&named, &request), ([true; 3], stays));
        assert_eq!(narrowed(&any, &Request::default()), ([true; 3], stays), "of no tokens");
        let mut embedded = request.clone();
        embedded.spec.embeds = Some(0);
        let kind = Some(LocalReason::Kind);
        assert_eq!(narrowed(&any, &embedded), ([false, true, true], kind));
    }
}
