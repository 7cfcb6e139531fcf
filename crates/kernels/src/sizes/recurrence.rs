//! The sizes of a recurrence.

/// The order of gate and norm at the output of a recurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateGate {
    /// A gate without a norm.
    Alone,
    /// The gate follows the norm.
    BehindNorm,
    /// The gate precedes the norm.
    BeforeNorm,
}

/// The sizes of a recurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrenceSizes {
    /// The number of heads of the state; 0 if there is only a convolution between two gates.
    pub heads: usize,
    /// The number of heads of keys and queries.
    pub key_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head; without heads, the channels of the convolution.
    pub value_dim: usize,
    /// True if head `h` uses key head `h` modulo the number of key heads; false if heads that share
    /// a key head are adjacent.
    pub tiled: bool,
    /// True if each element of a head's keys has its own decay (Kimi Linear, 2025); false if each
    /// head has a single decay.
    pub channel_decay: bool,
    /// True if the state's old value for a key is subtracted first (delta rule).
    pub delta: bool,
    /// The number of taps of the convolution.
    pub taps: usize,
    /// The order of gate and norm at the output.
    pub gate: StateGate,
    /// True if the gate is `sigmoid(x)`; false if it is `x * sigmoid(x)`.
    pub sigmoid_gate: bool,
    /// The low rank of the gates and of the decays; 0 if the input projection computes both
    /// directly.
    pub low_rank: usize,
    /// The number of elements that are normalised together.
    pub norm_size: usize,
}

impl RecurrenceSizes {
    /// Bytes of one row of both state tables: last inputs of the convolution, and states of heads.
    #[must_use]
    pub fn row_bytes(&self) -> [usize; 2] {
        let inputs = (self.taps - 1) * self.channels();
        [inputs, self.heads * self.key_dim * self.value_dim].map(|count| count * size_of::<f32>())
    }

    /// The number of outputs of the input projection, and the number of inputs of the output
    /// projection.
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

    /// The key head that a head uses.
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

    /// The index of the first gate among the outputs of the input projection.
    pub(crate) fn gates(&self) -> usize {
        if self.heads == 0 { 0 } else { self.channels() }
    }

    /// The index of the first *strength* among the outputs of the input projection. A strength is
    /// the weight of a head's new value in the update of its state. The strengths follow the gates
    /// and decays, or the low-rank forms of these.
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
