//! The sizes of a recurrence.

/// The place of the gate of a recurrence's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateGate {
    /// There is a gate and no norm.
    Alone,
    /// Behind the norm.
    BehindNorm,
    /// In front of the norm.
    BeforeNorm,
}

/// The sizes of a recurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrenceSizes {
    /// The number of heads of the state; 0: there is only a convolution between two gates.
    pub heads: usize,
    /// The number of heads of keys and queries.
    pub key_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head; without heads, of the convolution.
    pub value_dim: usize,
    /// True if heads that share a key head are as far apart as there are key heads; false: they are
    /// neighbours.
    pub tiled: bool,
    /// True if each element of a head's keys has its own decay; false: each head has one (Kimi
    /// Linear, 2025).
    pub channel_decay: bool,
    /// True if the state's old value for a key is subtracted first.
    pub delta: bool,
    /// Taps of the convolution.
    pub taps: usize,
    /// The place of the output's gate.
    pub gate: StateGate,
    /// True if the gate is a sigmoid; false: it is `x * sigmoid(x)`.
    pub sigmoid_gate: bool,
    /// The low rank of the gates and of the decays; 0: the first product computes both directly.
    pub low_rank: usize,
    /// The number of elements that are normalised together.
    pub norm_size: usize,
}

impl RecurrenceSizes {
    /// Bytes of one row of the states' tables: last inputs of the convolution, and heads' states.
    #[must_use]
    pub fn row_bytes(&self) -> [usize; 2] {
        let inputs = (self.taps - 1) * self.channels();
        [inputs, self.heads * self.key_dim * self.value_dim].map(|count| count * size_of::<f32>())
    }

    /// Outputs of the first product, and inputs of the second.
    #[must_use]
    pub fn widths(&self) -> (usize, usize) {
        (self.projected(), self.values())
    }

    pub(crate) fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    pub(crate) fn values(&self) -> usize {
        self.heads.max(1) * self.value_dim
    }

    /// The key head of a head.
    pub(crate) fn key_of(&self, head: usize) -> usize {
        match self.tiled {
            true => head % self.key_heads,
            false => head / (self.heads / self.key_heads),
        }
    }

    pub(crate) fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// The number of decays.
    #[must_use]
    pub fn decays(&self) -> usize {
        self.heads * if self.channel_decay { self.key_dim } else { 1 }
    }

    /// The first of the gates among the outputs of the first product.
    pub(crate) fn gates(&self) -> usize {
        if self.heads == 0 { 0 } else { self.channels() }
    }

    /// The first of the strengths among the outputs of the first product. Gates and decays, or
    /// their low ranks, are in front of them.
    pub(crate) fn strengths(&self) -> usize {
        self.channels()
            + match self.low_rank {
                0 => self.values() + self.decays(),
                low => 2 * low,
            }
    }

    fn projected(&self) -> usize {
        match self.heads {
            0 => 3 * self.values(),
            heads => self.strengths() + if self.delta { heads } else { 0 },
        }
    }
}
