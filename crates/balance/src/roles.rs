//! Targets that compute prompts, and targets that continue after the first token.

use serde::Serialize;

use crate::balancer::Ask;

/// Which part of a request's work a target takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The whole request.
    #[default]
    Both,
    /// The prompt and the first token.
    Prefill,
    /// Tokens after the first, and prompts with little to compute.
    Decode,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Both, Self::Prefill, Self::Decode];

    /// True if the target computes prompts.
    #[must_use]
    pub fn prefills(self) -> bool {
        self != Self::Decode
    }

    /// True if the target continues requests after the first token.
    #[must_use]
    pub fn decodes(self) -> bool {
        self != Self::Prefill
    }

    /// The name of the role in responses and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// The reason why one target serves a request completely although targets have roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LocalReason {
    /// The decode target has little left to compute.
    Short,
    /// No target that computes prompts accepts requests.
    NoPrefill,
    /// No target that decodes accepts requests.
    NoDecode,
    /// The request's keys and values can't be lent, because the prompt is embeddings.
    Kind,
    /// The client has named a target, or the request needs only one.
    Named,
    /// The target has both roles.
    Both,
}

impl LocalReason {
    /// All reasons.
    pub const ALL: [Self; 6] =
        [Self::Short, Self::NoPrefill, Self::NoDecode, Self::Kind, Self::Named, Self::Both];
}

/// Narrows the targets of a request by their roles.
#[derive(Debug, Clone, Copy)]
pub struct RoleRule<'a> {
    /// The role of each target.
    pub roles: &'a [Role],
    /// A decode target serves a request alone if at most this many tokens are left to compute
    /// there.
    pub local_tokens: u64,
}

impl RoleRule<'_> {
    /// Narrows the `open` targets to those that the request may go to. Returns a reason if the
    /// request is to stay at its target, whichever target is chosen. `lends`: whether its keys and
    /// values can be lent.
    pub fn narrow(&self, ask: &Ask<'_>, lends: bool, open: &mut [bool]) -> Option<LocalReason> {
        let is_open = |at: usize| open[at];
        let any =
            |which: &dyn Fn(usize) -> bool| (0..open.len()).any(|at| is_open(at) && which(at));
        let decodes = |at: usize| self.roles[at].decodes();
        let prefills = |at: usize| self.roles[at].prefills();
        let near = |at: usize| decodes(at) && ask.uncached(at) <= self.local_tokens;
        let (reason, which): (_, &dyn Fn(usize) -> bool) = if !any(&decodes) {
            (Some(LocalReason::NoDecode), &|_| true)
        } else if !lends {
            (Some(LocalReason::Kind), &decodes)
        } else if !any(&|at| self.roles[at] != Role::Both) {
            (Some(LocalReason::Both), &|_| true)
        } else if any(&near) {
            (Some(LocalReason::Short), &near)
        } else if !any(&prefills) {
            (Some(LocalReason::NoPrefill), &decodes)
        } else {
            (None, &prefills)
        };
        let chosen: Vec<bool> = (0..open.len()).map(|at| open[at] && which(at)).collect();
        open.copy_from_slice(&chosen);
        reason
    }

    /// Why a request stays at the chosen target, given the `reason` from [`Self::narrow`]; `None`:
    /// it leaves after its first token.
    #[must_use]
    pub fn stays(&self, at: usize, reason: Option<LocalReason>) -> Option<LocalReason> {
        reason.or_else(|| (self.roles[at] == Role::Both).then_some(LocalReason::Both))
    }
}

/// The target that lends blocks of a request to target `at`: the target with the most cached tokens
/// of the request. `None`: no target has more than `at`.
#[must_use]
pub fn lender(ask: &Ask<'_>, at: usize) -> Option<usize> {
    let own = ask.cached(at);
    let others = (0..ask.cached.len()).filter(|&other| ask.cached(other) > own);
    // Among equals, take the first.
    others.reduce(|best, other| if ask.cached(other) > ask.cached(best) { other } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Decode];

    /// The targets that stay open for a request of 100 tokens, and the reason if it stays.
    /// `cached`: its cached tokens at each target.
    fn narrowed(
        roles: &[Role],
        cached: &[u64],
        mut open: [bool; 3],
        lends: bool,
    ) -> ([bool; 3], Option<LocalReason>) {
        let rule = RoleRule { roles, local_tokens: 10 };
        let reason = rule.narrow(&Ask { tokens: 100, cached }, lends, &mut open);
        (open, reason)
    }

    #[test]
    fn prompts_go_to_prefill_unless_a_decode_target_has_them() {
        let of = |cached: &[u64], open| narrowed(&ROLES, cached, open, true);
        let all = [true; 3];
        assert_eq!(of(&[], all), ([true, false, false], None));
        assert_eq!(
            of(&[99, 89, 0], all),
            ([true, false, false], None),
            "11 tokens are left to compute"
        );
        let short = Some(LocalReason::Short);
        assert_eq!(of(&[99, 89, 90], all), ([false, false, true], short));
        let without = Some(LocalReason::NoPrefill);
        assert_eq!(of(&[], [false, true, true]), ([false, true, true], without));
        let alone = Some(LocalReason::NoDecode);
        assert_eq!(of(&[], [true, false, false]), ([true, false, false], alone));
        let kind = Some(LocalReason::Kind);
        assert_eq!(narrowed(&ROLES, &[], all, false), ([false, true, true], kind));
    }

    #[test]
    fn a_target_with_both_roles_takes_prompts_and_keeps_them() {
        let roles = [Role::Prefill, Role::Both, Role::Decode];
        let of = |cached: &[u64], open| narrowed(&roles, cached, open, true);
        assert_eq!(of(&[], [true; 3]), ([true, true, false], None));
        let short = Some(LocalReason::Short);
        assert_eq!(of(&[0, 95, 0], [true; 3]), ([false, true, false], short));
        let rule = RoleRule { roles: &roles, local_tokens: 10 };
        assert_eq!(rule.stays(0, None), None);
        assert_eq!(rule.stays(1, None), Some(LocalReason::Both));
        assert_eq!(rule.stays(0, Some(LocalReason::NoDecode)), Some(LocalReason::NoDecode));
        let both = [Role::Both; 3];
        let whole = Some(LocalReason::Both);
        assert_eq!(narrowed(&both, &[0, 95, 0], [true; 3], true), ([true; 3], whole));
    }

    #[test]
    fn whoever_has_most_lends_what_the_chosen_one_lacks() {
        let of = |cached: &[u64], at| lender(&Ask { tokens: 100, cached }, at);
        assert_eq!(of(&[], 0), None);
        assert_eq!(of(&[40, 40, 30], 0), None, "no other target has more");
        assert_eq!(of(&[40, 80, 90], 0), Some(2));
        assert_eq!(of(&[0, 80, 80], 0), Some(1));
        assert_eq!(of(&[0, 80, 80], 2), None);
    }
}
