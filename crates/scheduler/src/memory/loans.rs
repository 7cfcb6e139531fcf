//! Blocks and states of the host tier that other replicas read.

use forebay_kvcache::{BlockHash, LoanId};

use super::Memory;
use super::states::StatePages;

/// Blocks of the host tier that are lent, with their pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LentBlocks {
    /// The loan. The caller has to end it with [`crate::Scheduler::take_back`].
    pub loan: LoanId,
    /// The blocks, in the order of the request.
    pub pages: Vec<(BlockHash, u32)>,
    /// With recurrent layers: the last of these blocks after which a state is lent, and the state's
    /// page. Empty for other models.
    pub states: Vec<(BlockHash, u32)>,
}

impl Memory {
    /// Lends the leading blocks of a request that are in the host tier. With recurrent layers
    /// nothing is lent unless a state is lent too.
    pub(crate) fn lend(&mut self, names: &[BlockHash]) -> Option<LentBlocks> {
        let (loan, pages) = self.tiers.lend(names)?;
        let mut states = Vec::new();
        if let Some(of) = &mut self.states {
            match of.lend(loan, &names[..pages.len()]) {
                Some(lent) => states = lent,
                None => {
                    self.tiers.take_back(loan);
                    return None;
                }
            }
        }
        Some(LentBlocks { loan, pages, states })
    }

    /// Ends a loan. Returns false if it had ended already.
    pub(crate) fn take_back(&mut self, loan: LoanId) -> bool {
        self.states.iter_mut().for_each(|states| states.take_back(loan));
        self.tiers.take_back(loan)
    }

    /// Ends all loans, because the host tier is freed.
    pub(crate) fn end_loans(&mut self) {
        self.tiers.end_loans();
        self.states.iter_mut().for_each(StatePages::end_loans);
    }
}
