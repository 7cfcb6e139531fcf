//! The weights of recurrent layers.

use forebay_kernels::{Bytes, RecurrenceWeights};
use forebay_weights::{ModelError, Recurrence, StateNorm, TorchNumber};

use super::Plan;
use crate::parts::recurrence_sizes;

impl Plan {
    /// The weights of a recurrence whose names begin with `at`.
    pub(super) fn recurrence(
        &mut self,
        at: &str,
        hidden: usize,
        of: &Recurrence,
    ) -> Result<(), ModelError> {
        let name = |(name, rows): (&str, usize)| (format!("{at}.{name}"), rows);
        let (keys, values, heads) = (of.keys(), of.values(), of.heads);
        let (inputs, channels) = match heads {
            0 => (
                ["in_proj_q", "in_proj_k", "in_proj_v"].map(|name| (name, values)).to_vec(),
                vec![("conv_v", values)],
            ),
            _ => {
                let inputs = [
                    ("in_proj_q", keys),
                    ("in_proj_k", keys),
                    ("in_proj_v", values),
                    ("in_proj_z", values),
                    ("in_proj_a", heads),
                ];
                let strengths = of.delta.then_some(("in_proj_b", heads));
                let channels = vec![("conv_q", keys), ("conv_k", keys), ("conv_v", values)];
                (inputs.into_iter().chain(strengths).collect(), channels)
            }
        };
        let inputs: Vec<_> = inputs.into_iter().map(name).collect();
        self.linear(&inputs, hidden, of.bias, false)?;
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
        let skip = (!of.delta).then_some("D");
        let of_heads = ["A_log", "dt_bias"].into_iter().chain(skip);
        for vector in of_heads.filter(|_| heads > 0) {
            self.norm_of_size(format!("{at}.{vector}"), heads, TorchNumber::Float32);
        }
        if of.norm != StateNorm::None {
            let size = if of.delta { of.value_dim } else { values };
            self.norm_of_size(format!("{at}.norm.weight"), size, self.number);
        }
        Ok(())
    }
}

/// The weights of a recurrence besides its two products. `get` finds one by its name.
pub(super) fn weights(
    of: &Recurrence,
    get: impl Fn(&str) -> Result<Bytes, ModelError>,
) -> Result<RecurrenceWeights, ModelError> {
    let optional = |there: bool, name: &str| there.then(|| get(name)).transpose();
    let (has_heads, conv) = (of.heads > 0, if of.heads == 0 { "conv_v" } else { "conv_q" });
    Ok(RecurrenceWeights {
        sizes: recurrence_sizes(of),
        conv: get(&format!("{conv}.weight"))?,
        conv_bias: optional(of.conv_bias, &format!("{conv}.bias"))?,
        decay: optional(has_heads, "A_log")?,
        step_bias: optional(has_heads, "dt_bias")?,
        skip: optional(has_heads && !of.delta, "D")?,
        norm: optional(of.norm != StateNorm::None, "norm.weight")?,
    })
}
