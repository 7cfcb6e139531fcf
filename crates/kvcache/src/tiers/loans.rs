//! Pages of the host tier that other replicas read, and blocks borrowed from other replicas.
//!
//! A lent page is leased until its loan is taken back, so it keeps its content even if its block is
//! forgotten. Only a named block is lent: its save was reported as done. The borrower copies from
//! the lender's memory, and writes only to its own page.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use forebay_protocol::Direction;

use super::Tiers;
use super::copies::HostPage;
use crate::hash::BlockHash;
use crate::loan::{Loan, LoanId};
use crate::pool::{Host, Hot, Lease};

/// At most one in `LENT_SHARE` pages of the host tier may be lent.
const LENT_SHARE: u32 = 2;

/// The loans of a host tier.
#[derive(Debug, Default)]
pub(super) struct Loans {
    leases: BTreeMap<LoanId, Vec<Lease<Host>>>,
    /// The number of loans of each lent page.
    pages: HashMap<u32, u32>,
    /// The number of loans so far.
    made: u64,
    /// True if nothing is lent any more.
    ended: bool,
}

impl Tiers {
    /// Lends the leading blocks of `names` that are in the host tier, up to the first block that is
    /// not. At most half of the host tier may be lent. `None`: nothing can be lent.
    pub fn lend(&mut self, names: &[BlockHash]) -> Option<(LoanId, Vec<(BlockHash, u32)>)> {
        if self.loans.ended || self.backed.is_some() {
            return None;
        }
        let most = (self.host.size() / LENT_SHARE) as usize;
        let (mut leases, mut lent) = (Vec::new(), Vec::new());
        for &name in names {
            let Some(lease) = self.host.share(name) else { break };
            let page = lease.page();
            if !self.loans.pages.contains_key(&page) && self.loans.pages.len() >= most {
                self.host.release(lease);
                break;
            }
            *self.loans.pages.entry(page).or_default() += 1;
            leases.push(lease);
            lent.push((name, page));
        }
        if lent.is_empty() {
            return None;
        }
        let id = LoanId(self.loans.made);
        self.loans.made += 1;
        self.loans.leases.insert(id, leases);
        Some((id, lent))
    }

    /// Takes back a loan, which must have no reader any more. Returns false if there is no such
    /// loan.
    pub fn take_back(&mut self, id: LoanId) -> bool {
        let Some(mut leases) = self.loans.leases.remove(&id) else { return false };
        for lease in &leases {
            if let Some(count) = self.loans.pages.get_mut(&lease.page()) {
                *count -= 1;
                if *count == 0 {
                    self.loans.pages.remove(&lease.page());
                }
            }
        }
        self.host.release_all(&mut leases);
        true
    }

    /// The number of pages that are lent.
    #[must_use]
    pub fn lent_pages(&self) -> usize {
        self.loans.pages.len()
    }

    /// Iterates over the host pages that loans lease, once per lease.
    pub fn host_leased_by_loans(&self) -> impl Iterator<Item = u32> {
        self.loans.leases.values().flatten().map(Lease::page)
    }

    /// Ends all loans and lends nothing more, because these tiers move to other memory or are
    /// dropped. Borrowers may still read the pages in the old memory.
    pub fn end_loans(&mut self) {
        let loans: Vec<LoanId> = self.loans.leases.keys().copied().collect();
        for id in loans {
            self.take_back(id);
        }
        self.loans.ended = true;
    }

    /// Continues the loan ids of earlier tiers, so that ids stay unique.
    pub(super) fn lend_as(&mut self, earlier: &Self) {
        (self.loans.made, self.loans.ended) = (earlier.loans.made, earlier.loans.ended);
    }

    /// Forgets the names of lent blocks. Their pages stay leased.
    pub(super) fn forget_lent(&mut self) {
        for lease in self.loans.leases.values().flatten() {
            self.host.unname(lease);
        }
    }

    /// Starts to copy a lent block to a hot page. Returns its new page, and the ticket. `None`: the
    /// block is not lent, or every hot page is held.
    pub fn borrow(&mut self, name: BlockHash, loan: &Arc<Loan>) -> Option<(Lease<Hot>, u32)> {
        let page = if self.of_states { loan.state(name) } else { loan.page(name) }?;
        let hot = self.allocate()?;
        let waiter = self.hot.join(&hot);
        let source = HostPage::Lent { loan: Arc::clone(loan), page };
        let ticket = self.start(Direction::Restore, Some(name), Some(hot), source);
        self.unsent.push_back(ticket);
        Some((waiter, ticket))
    }

    /// Checks that the count of lent pages is right.
    pub(super) fn check_loans(&self) -> Result<(), String> {
        let mut counted: HashMap<u32, u32> = HashMap::new();
        for page in self.host_leased_by_loans() {
            *counted.entry(page).or_default() += 1;
        }
        if counted == self.loans.pages {
            return Ok(());
        }
        Err(format!("pages are lent as {counted:?}, and counted as {:?}", self.loans.pages))
    }
}
