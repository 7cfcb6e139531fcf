//! Blocks that one replica lends to another.

use std::collections::HashMap;
use std::fmt;

use crate::hash::{BlockHash, BuildNameHasher};

/// Identifies a loan at its lender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoanId(pub u64);

/// Blocks in the host tier of another replica. Their pages keep their content until the loan is
/// dropped. The request that may read the blocks holds a reference to the loan, and so does each
/// copy operation that reads a block.
pub struct Loan {
    lender: u32,
    pages: HashMap<BlockHash, u32, BuildNameHasher>,
    /// State pages, by the block before them.
    states: HashMap<BlockHash, u32, BuildNameHasher>,
    give_back: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Loan {
    /// Creates a loan of blocks by the replica with number `lender`. `pages` contains the name and
    /// the host page of each block. `give_back` is called once, on any thread, when no reader is
    /// left.
    #[must_use]
    pub fn new(
        lender: u32,
        pages: Vec<(BlockHash, u32)>,
        give_back: Box<dyn FnOnce() + Send + Sync>,
    ) -> Self {
        let (pages, states) = (pages.into_iter().collect(), HashMap::default());
        Self { lender, pages, states, give_back: Some(give_back) }
    }

    /// Adds recurrent states to the loan. `states` contains the state page of each state, by the
    /// name of the block that the state follows.
    #[must_use]
    pub fn with_states(mut self, states: Vec<(BlockHash, u32)>) -> Self {
        self.states = states.into_iter().collect();
        self
    }

    /// The number of the replica whose host tier has the pages.
    #[must_use]
    pub fn lender(&self) -> u32 {
        self.lender
    }

    /// The page that holds a block; `None`: the block is not lent.
    #[must_use]
    pub fn page(&self, name: BlockHash) -> Option<u32> {
        self.pages.get(&name).copied()
    }

    /// The state page that holds the state after a block; `None`: that state is not lent.
    #[must_use]
    pub fn state(&self, name: BlockHash) -> Option<u32> {
        self.states.get(&name).copied()
    }

    /// The number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.pages.len()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(give_back) = self.give_back.take() {
            give_back();
        }
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({} blocks of replica {})", self.pages.len(), self.lender)
    }
}
