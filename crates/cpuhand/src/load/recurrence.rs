//! The weights of recurrent layers.

use forebay_kernels::{Bytes, Matrix, RecurrenceWeights};
use forebay_weights::{ModelError, Recurrence, StateNorm, TorchNumber};

use super::Plan;
use crate::parts::recurrence_sizes;

impl Plan {
    /// Adds the weights of a recurrence whose names begin with `at`.
    pub(super) fn recurrence(
        &mut self,
        at: &str,
        hidden: usize,
        of: &Recurrence,
    ) -> Result<(), ModelError> {
        let name = |(name, rows): (&str, usize)| (format!("{at}.{name}"), rows);
        let (keys, values, heads) = (of.keys(), of.values(), of.heads);
        let decays = recurrence_sizes(of).decays();
        let (inputs, channels) = match heads {
            0 => (
                ["in_proj_q", "in_proj_k", "in_proj_v"].map(|name| (name, values)).to_vec(),
                vec![("conv_v", values)],
            ),
            _ => {
                let [gates, steps] = match of.low_rank {
                    0 => [("in_proj_z", values), ("in_proj_a", decays)],
                    rank => [("low_z", rank), ("low_a", rank)],
                };
                let [queries, all_keys] = [("in_proj_q", keys), ("in_proj_k", keys)];
                let inputs = [queries, all_keys, ("in_proj_v", values), gates, steps];
                let strengths = of.delta.then_some(("in_proj_b", heads));
                let channels = vec![("conv_q", keys), ("conv_k", keys), ("conv_v", values)];
                (inputs.into_iter().chain(strengths).collect(), channels)
            }
        };
        let inputs: Vec<_> = inputs.into_iter().map(name).collect();
        self.linear(&inputs, hidden, of.bias, false)?;
        if of.low_rank > 0 {
            self.linear(&[name(("in_proj_z", values))], of.low_rank, false, false)?;
            self.linear(&[name(("in_proj_a", decays))], of.low_rank, false, false)?;
        }
        self.linear(&[name(("out_proj", hidden))], values, of.bias, false)?;
        let parts = |kind: &str, columns: Option<usize>| {
            let part = |&(name, rows): &(&str, usize)| {
                let shape = std::iter::once(rows).chain(columns).collect();
                (format!("{at}.{name}.{kind}"), shape)
            };
            channels.iter().map(part).collect::<Vec<(String, Vec<usize>)>>()
        };
        self.vector(&parts("weight", Some(of.taps)));
        if of.conv_bias {
            self.vector(&parts("bias", None));
        }
        let skip = (!of.delta).then_some(("D", heads));
        let of_heads = [("A_log", heads), ("dt_bias", decays)].into_iter().chain(skip);
        for (vector, size) in of_heads.filter(|_| heads > 0) {
            self.norm_of_size(format!("{at}.{vector}"), size, TorchNumber::Float32);
        }
        if of.norm != StateNorm::None {
            let size = if of.delta { of.value_dim } else { values };
            self.norm_of_size(format!("{at}.norm.weight"), size, self.number);
        }
        Ok(())
    }
}

/// Assembles the weights of a recurrence, except for its input and output projections. `get` and
/// `matrix` return a weight by its name.
pub(super) fn weights(
    of: &Recurrence,
    get: impl Fn(&str) -> Result<Bytes, ModelError>,
    matrix: impl Fn(&str) -> Result<Matrix, ModelError>,
) -> Result<RecurrenceWeights, ModelError> {
    let low = || Ok::<_, ModelError>([matrix("in_proj_z.weight")?, matrix("in_proj_a.weight")?]);
    let optional = |there: bool, name: &str| there.then(|| get(name)).transpose();
    let (has_heads, conv) = (of.heads > 0, if of.heads == 0 { "conv_v" } else { "conv_q" });
    Ok(RecurrenceWeights {
        sizes: recurrence_sizes(of),
        conv: get(&format!("{conv}.weight"))?,
        conv_bias: optional(of.conv_bias, &format!("{conv}.bias"))?,
        decay: optional(has_heads, "A_log")?,
        step_bias: optional(has_heads, "dt_bias")?,
        low: (of.low_rank > 0).then(low).transpose()?,
        skip: optional(has_heads && !of.delta, "D")?,
        norm: optional(of.norm != StateNorm::None, "norm.weight")?,
    })
}
