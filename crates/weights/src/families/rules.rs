//! Rules that map a file's tensor names to weight names. The same interpreter applies them to
//! safetensors and GGUF.

use std::ops::Range;

use super::shape::{Attention, Mixer, Shape};
use crate::error::ModelError;

/// The largest number of digits of a layer or expert index.
const MOST_DIGITS: usize = 9;
/// The name prefix of a tower's weights, which are skipped if the decoder is served without its
/// tower.
const TOWER: &str = "visual.";

/// Joins two tables. `N` is the total number of rules.
pub(super) const fn joined<const N: usize>(first: &[Rule], second: &[Rule]) -> [Rule; N] {
    let mut rules = [Rule::spare(""); N];
    let mut at = 0;
    while at < N {
        rules[at] = if at < first.len() { first[at] } else { second[at - first.len()] };
        at += 1;
    }
    rules
}

/// A rule for tensors whose name matches a pattern.
///
/// In a pattern, `#` matches a layer index, `*` matches `weight` or `bias`, and `**` matches one or
/// more name components. In the weight's name, each placeholder is replaced by its match. `@` is
/// the index of an expert, from the tensor's name or in a stack of experts. A fused tensor has one
/// rule per weight.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    stored: &'static str,
    /// The name of the weight; empty: the tensor is not read.
    weight: &'static str,
    take: Take,
}

impl Rule {
    /// Creates a rule for a weight that is a part of a tensor.
    #[must_use]
    pub const fn new(stored: &'static str, weight: &'static str, take: Take) -> Self {
        Self { stored, weight, take }
    }

    /// Creates a rule that renames a tensor. If both patterns contain `**`, the new name is then
    /// matched with the later rules with `**`, and with all rules without it.
    #[must_use]
    pub const fn renamed(stored: &'static str, weight: &'static str) -> Self {
        Self::new(stored, weight, Take::ALL)
    }

    /// Creates a rule for a tensor that is not read.
    #[must_use]
    pub const fn spare(stored: &'static str) -> Self {
        Self::new(stored, "", Take::ALL)
    }
}

/// Which part of a tensor is a weight, and how its values change. Fields are applied in order.
#[derive(Debug, Clone, Copy)]
pub struct Take {
    /// Returns true if the layer with this index has the weight.
    only: fn(&Shape, usize) -> bool,
    /// True if the tensor is a stack of all experts: `[experts, rows, columns]` of matrices, or
    /// `[experts, elements]` of vectors.
    stack: bool,
    turned: Turned,
    rows: Rows,
    /// The number of heads whose two halves of rows are interleaved; `None`: rows are not
    /// reordered.
    pairs: Option<fn(&Attention) -> usize>,
    /// True if the weight is a vector of all the tensor's elements.
    flat: bool,
    /// If the weight's heads join rows of several tensors: the index of this tensor among them, and
    /// their number.
    joined: Option<(usize, usize)>,
    times: f32,
    plus: f32,
    log: bool,
}

/// Whether a matrix is transposed.
#[derive(Debug, Clone, Copy)]
enum Turned {
    Never,
    Always,
    /// Transposed if the function returns true for the rows and columns of the matrix.
    Where(fn(&Shape, [usize; 2]) -> bool),
}

/// Which rows of a matrix belong to the weight.
#[derive(Debug, Clone, Copy)]
enum Rows {
    All,
    Range(fn(&Attention) -> Range<usize>),
    Blocks(fn(&Mixer) -> Option<RowBlocks>),
    Share { number: usize, of: usize },
    Every { first: usize, step: usize },
}

/// Blocks of consecutive rows at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBlocks {
    /// The first row.
    pub first: usize,
    /// The number of rows per block.
    pub width: usize,
    /// The number of rows from the start of one block to the start of the next.
    pub step: usize,
    /// The number of blocks.
    pub count: usize,
}

impl Take {
    /// The whole tensor.
    pub const ALL: Self = Self {
        only: |_, _| true,
        stack: false,
        turned: Turned::Never,
        rows: Rows::All,
        pairs: None,
        flat: false,
        joined: None,
        times: 1.0,
        plus: 0.0,
        log: false,
    };
    /// Takes the matrix or vector of each expert from a stack.
    pub const EACH_EXPERT: Self = Self { stack: true, ..Self::ALL };

    /// Transposes the matrix.
    #[must_use]
    pub const fn transposed(self) -> Self {
        Self { turned: Turned::Always, ..self }
    }

    /// Transposes the matrix if the function returns true for its rows and columns, for files in
    /// which both layouts occur.
    #[must_use]
    pub const fn transposed_where(self, turned: fn(&Shape, [usize; 2]) -> bool) -> Self {
        Self { turned: Turned::Where(turned), ..self }
    }

    /// Takes a range of rows that depends on the layer's attention, as in a fused projection.
    #[must_use]
    pub const fn rows(self, range: fn(&Attention) -> Range<usize>) -> Self {
        Self { rows: Rows::Range(range), ..self }
    }

    /// Takes blocks of rows that depend on the layer's mixer.
    #[must_use]
    pub const fn blocks(self, blocks: fn(&Mixer) -> Option<RowBlocks>) -> Self {
        Self { rows: Rows::Blocks(blocks), ..self }
    }

    /// Restricts the rule to the layers for which the function returns true.
    #[must_use]
    pub const fn only(self, only: fn(&Shape, usize) -> bool) -> Self {
        Self { only, ..self }
    }

    /// Divides the rows into `of` equal shares, and takes the share with index `number`.
    #[must_use]
    pub const fn share(self, number: usize, of: usize) -> Self {
        Self { rows: Rows::Share { number, of }, ..self }
    }

    /// Takes every `step`-th row, starting at `first`.
    #[must_use]
    pub const fn every(self, first: usize, step: usize) -> Self {
        Self { rows: Rows::Every { first, step }, ..self }
    }

    /// Reorders the rows of heads whose two halves are interleaved, as in the original Llama code.
    #[must_use]
    pub const fn pairs(self, heads: fn(&Attention) -> usize) -> Self {
        Self { pairs: Some(heads), ..self }
    }

    /// Takes all elements as a vector, whatever the dimensions of the tensor.
    #[must_use]
    pub const fn flat(self) -> Self {
        Self { flat: true, ..self }
    }

    /// Takes a stack `[heads, rows, columns]`, which is tensor `number` of `of` tensors. The weight
    /// concatenates each head's rows from these tensors in the order of their numbers.
    #[must_use]
    pub const fn joined(self, number: usize, of: usize) -> Self {
        Self { joined: Some((number, of)), ..self }
    }

    /// Multiplies the values by a constant.
    #[must_use]
    pub const fn times(self, factor: f32) -> Self {
        Self { times: factor, ..self }
    }

    /// Takes the logarithm, after `times` and `plus`, for files that store decays without it.
    #[must_use]
    pub const fn log(self) -> Self {
        Self { log: true, ..self }
    }

    /// Adds a constant to the values, such as the 1 of Gemma's norms.
    #[must_use]
    pub const fn plus(self, term: f32) -> Self {
        Self { plus: term, ..self }
    }
}

/// Returns the rows of queries in a fused projection of queries, keys and values.
#[must_use]
pub fn fused_queries(attention: &Attention) -> Range<usize> {
    0..attention.heads * attention.head_dim
}

/// Returns the rows of keys in a fused projection of queries, keys and values.
#[must_use]
pub fn fused_keys(attention: &Attention) -> Range<usize> {
    let first = attention.heads * attention.head_dim;
    first..first + attention.kv_heads * attention.head_dim
}

/// Returns the rows of values in a fused projection of queries, keys and values.
#[must_use]
pub fn fused_values(attention: &Attention) -> Range<usize> {
    let first = (attention.heads + attention.kv_heads) * attention.head_dim;
    first..first + attention.kv_heads * attention.value_dim
}

/// A weight of the model, and where it is in a tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Weight {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) part: TensorPart,
}

/// The part of a tensor that is a weight. All dimensions but the last are treated as rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TensorPart {
    /// The first row of the matrix in the tensor.
    pub(crate) base: usize,
    /// Rows and columns of the matrix.
    pub(crate) matrix: [usize; 2],
    /// True if the matrix is transposed before its rows are selected.
    pub(crate) transposed: bool,
    /// The rows of the weight: the first row, the rows per block, the distance between the starts
    /// of blocks, and the total number of rows.
    pub(crate) first: usize,
    pub(crate) width: usize,
    pub(crate) step: usize,
    pub(crate) rows: usize,
    /// The number of heads whose two halves of rows are interleaved; `None`: rows are in order.
    pub(crate) pairs: Option<usize>,
    /// The tensor's index and the number of tensors, if the weight joins rows of several tensors.
    pub(crate) joined: Option<(usize, usize)>,
    pub(crate) times: f32,
    pub(crate) plus: f32,
    /// True if the logarithm is taken after `times` and `plus`.
    pub(crate) log: bool,
}

impl TensorPart {
    /// The whole tensor.
    pub(crate) fn whole(shape: &[usize]) -> Self {
        let columns = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product();
        Self {
            base: 0,
            matrix: [rows, columns],
            transposed: false,
            first: 0,
            width: 1,
            step: 1,
            rows,
            pairs: None,
            joined: None,
            times: 1.0,
            plus: 0.0,
            log: false,
        }
    }

    /// Returns the row of the matrix that becomes row `row` of the weight.
    pub(crate) fn row(&self, row: usize) -> usize {
        self.first + row / self.width * self.step + row % self.width
    }

    /// The number of rows in each run of the weight's rows that are consecutive in the matrix.
    pub(crate) fn run(&self) -> usize {
        if self.step == self.width { self.rows } else { self.width }
    }

    /// The number of columns of the weight.
    pub(crate) fn columns(&self) -> usize {
        self.matrix[usize::from(!self.transposed)]
    }

    /// True if the weight is a whole tensor of this shape, with unchanged values.
    pub(crate) fn is_whole(&self, shape: &[usize]) -> bool {
        *self == Self::whole(shape)
    }

    /// True if the weight consists of whole rows of the tensor, with unchanged values.
    pub(crate) fn is_rows(&self) -> bool {
        !self.transposed && self.times == 1.0 && self.plus == 0.0 && !self.log
    }
}

/// Returns the weights in a tensor; `None`: no rule matches its name.
///
/// # Errors
/// A rule does not fit the tensor's shape.
pub(crate) fn weights_of(
    tables: [&[Rule]; 2],
    (name, stored): (&str, &[usize]),
    shape: &Shape,
) -> Result<Option<Vec<Weight>>, ModelError> {
    let found = weights_by_rules(tables, (name, stored), shape)?;
    if shape.factors.is_empty() {
        return Ok(found);
    }
    let whole = || {
        vec![Weight {
            name: name.to_owned(),
            shape: stored.to_vec(),
            part: TensorPart::whole(stored),
        }]
    };
    let mut weights = found.unwrap_or_else(whole);
    for weight in &mut weights {
        let end = weight.name.strip_prefix("model.layers.").and_then(|it| it.split_once('.'));
        if let Some(factor) = end.and_then(|(_, end)| shape.factors.get(end)) {
            weight.part.times *= *factor as f32;
        }
    }
    Ok(Some(weights))
}

fn weights_by_rules(
    tables: [&[Rule]; 2],
    (name, stored): (&str, &[usize]),
    shape: &Shape,
) -> Result<Option<Vec<Weight>>, ModelError> {
    let (mut name, mut is_renamed) = (name.to_owned(), false);
    // Rules for prefixes (with `**`) come first. Each applies at most once.
    for rule in tables.into_iter().flatten().filter(|rule| rule.stored.contains("**")) {
        if let Some(found) = fit(rule.stored, &name) {
            if rule.weight.is_empty() {
                return Ok(Some(Vec::new()));
            }
            name = found.name(rule.weight, 0);
            is_renamed = true;
        }
    }
    if shape.tower.is_none() && name.starts_with(TOWER) {
        return Ok(Some(Vec::new()));
    }
    for table in tables {
        let fitting = table.iter().filter(|rule| !rule.stored.contains("**"));
        let fitting: Vec<(&Rule, Fit)> =
            fitting.filter_map(|rule| Some((rule, fit(rule.stored, &name)?))).collect();
        if !fitting.is_empty() {
            let mut weights = Vec::new();
            for (rule, found) in fitting.iter().filter(|(rule, _)| !rule.weight.is_empty()) {
                rule.apply(found, (&name, stored), shape, &mut weights)?;
            }
            return Ok(Some(weights));
        }
    }
    let whole = || vec![Weight { name, shape: stored.to_vec(), part: TensorPart::whole(stored) }];
    Ok(is_renamed.then(whole))
}

/// The components of a name that matched a pattern's placeholders.
struct Fit {
    layer: Option<usize>,
    expert: Option<usize>,
    kind: String,
    rest: String,
}

impl Fit {
    /// Returns the name of a weight, for the expert with this index.
    fn name(&self, weight: &str, expert: usize) -> String {
        let part = |part: &str| match part {
            "#" => self.layer.unwrap_or_default().to_string(),
            "*" => self.kind.clone(),
            "**" => self.rest.clone(),
            "@" => expert.to_string(),
            other => other.to_owned(),
        };
        weight.split('.').map(part).collect::<Vec<_>>().join(".")
    }
}

fn fit(pattern: &str, name: &str) -> Option<Fit> {
    let patterns: Vec<&str> = pattern.split('.').collect();
    let mut parts: Vec<&str> = name.split('.').collect();
    let mut found = Fit { layer: None, expert: None, kind: String::new(), rest: String::new() };
    if let Some(at) = patterns.iter().position(|&part| part == "**") {
        let count = (parts.len() + 1).checked_sub(patterns.len()).filter(|&count| count > 0)?;
        found.rest = parts.splice(at..at + count, ["**"]).collect::<Vec<_>>().join(".");
    }
    if parts.len() != patterns.len() {
        return None;
    }
    for (&pattern, &part) in patterns.iter().zip(&parts) {
        match pattern {
            "#" => found.layer = Some(number(part)?),
            "@" => found.expert = Some(number(part)?),
            "*" if matches!(part, "weight" | "bias") => part.clone_into(&mut found.kind),
            "*" => return None,
            other if other == part => {}
            _ => return None,
        }
    }
    Some(found)
}

/// Returns the layer index in the name of a weight or of a GGUF tensor.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let name = name.strip_prefix("layers.").or_else(|| name.strip_prefix("blk."))?;
    number(name.split_once('.')?.0)
}

fn number(text: &str) -> Option<usize> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits && text.len() <= MOST_DIGITS).then(|| text.parse().ok())?
}

impl Rule {
    fn apply(
        &self,
        found: &Fit,
        (name, stored): (&str, &[usize]),
        shape: &Shape,
        weights: &mut Vec<Weight>,
    ) -> Result<(), ModelError> {
        let take = &self.take;
        if found.layer.is_some_and(|layer| !shape.has_place_for(layer)) {
            return Ok(());
        }
        let is_computed = |layer: &usize| *layer < shape.layers.len();
        if found.layer.filter(is_computed).is_some_and(|layer| !(take.only)(shape, layer)) {
            return Ok(());
        }
        if let Some(joined) = take.joined {
            let &[heads, rows, columns] = stored else {
                return Err(ModelError::broken(format!(
                    "the model's files have {name} of {stored:?}, and a stack of heads is wanted"
                )));
            };
            let part = TensorPart { joined: Some(joined), ..TensorPart::whole(stored) };
            let transposed = take.transposes(stored, shape);
            let part = TensorPart { matrix: [rows, columns], transposed, ..part };
            let shape = match transposed {
                true => vec![heads, columns, rows],
                false => vec![heads, rows, columns],
            };
            weights.push(Weight { name: found.name(self.weight, 0), shape, part });
            return Ok(());
        }
        if !take.stack {
            let part = take.part(0, stored, name, found.layer, shape)?;
            let name = found.name(self.weight, found.expert.unwrap_or(0));
            let shape = match take.flat {
                true => vec![part.rows * part.columns()],
                false => part.shape(stored),
            };
            weights.push(Weight { name, shape, part });
            return Ok(());
        }
        let experts = found.layer.and_then(|layer| shape.experts(layer));
        let wanted = experts.map_or(0, |experts| experts.count);
        let (&[count, ref matrix @ ..], 2..=3) = (stored, stored.len()) else {
            return Err(no_stack(name, stored, wanted));
        };
        if count != wanted {
            return Err(no_stack(name, stored, wanted));
        }
        for expert in 0..count {
            let part = take.part(expert * matrix[0], matrix, name, found.layer, shape)?;
            let name = found.name(self.weight, expert);
            weights.push(Weight { name, shape: part.shape(matrix), part });
        }
        Ok(())
    }
}

fn no_stack(name: &str, stored: &[usize], wanted: usize) -> ModelError {
    ModelError::broken(format!(
        "the model's files have {name} of {stored:?}, and the layer has {wanted} experts"
    ))
}

impl TensorPart {
    /// Returns the weight's shape, given the shape of its tensor.
    fn shape(&self, stored: &[usize]) -> Vec<usize> {
        match stored {
            [_] => vec![self.rows * self.columns()],
            [_, _] | [_, 1, _] => vec![self.rows, self.columns()],
            _ => stored.to_vec(),
        }
    }
}

impl Take {
    /// True if the matrices of a tensor are transposed.
    fn transposes(&self, stored: &[usize], shape: &Shape) -> bool {
        match (self.turned, stored) {
            (Turned::Never, _) => false,
            (Turned::Always, _) => true,
            (Turned::Where(turned), &[.., rows, columns]) => turned(shape, [rows, columns]),
            (Turned::Where(_), _) => false,
        }
    }

    fn part(
        &self,
        base: usize,
        stored: &[usize],
        name: &str,
        layer: Option<usize>,
        shape: &Shape,
    ) -> Result<TensorPart, ModelError> {
        let unfit = |what: &str| {
            let what = format!("the model's files have {name} of {stored:?}, {what}");
            Err(ModelError::broken(what))
        };
        let transposed = self.transposes(stored, shape);
        let chooses = transposed || self.pairs.is_some() || !matches!(self.rows, Rows::All);
        let mut part = TensorPart::whole(stored);
        (part.base, part.times, part.plus) = (base, self.times, self.plus);
        part.log = self.log;
        match *stored {
            // Each element of a vector is a row.
            [elements] if chooses || self.stack => part.matrix = [elements, 1],
            // The second form is the kernel of a depthwise convolution.
            [_, _] | [_, 1, _] => {}
            _ if chooses => return unfit("and a matrix is wanted"),
            _ => return Ok(part),
        }
        part.transposed = transposed;
        let all = part.matrix[usize::from(transposed)];
        let layer = layer.filter(|&layer| layer < shape.layers.len());
        let attention = || shape.mixer(layer?).attention();
        (part.first, part.step, part.rows) = match self.rows {
            Rows::All => (0, 1, all),
            Rows::Blocks(blocks) => {
                let found = layer.and_then(|layer| blocks(shape.mixer(layer)));
                let Some(RowBlocks { first, width, step, count }) = found else {
                    return unfit("and its layer has no such rows");
                };
                if count == 0 || width == 0 || first + (count - 1) * step + width > all {
                    return unfit(&format!("and {count} blocks of {width} rows are wanted"));
                }
                if count > 1 {
                    part.width = width;
                }
                (first, if count > 1 { step } else { 1 }, count * width)
            }
            Rows::Range(range) => {
                let Some(range) = attention().map(range) else {
                    return unfit("and its layer has no heads");
                };
                if range.end > all {
                    return unfit(&format!("and its rows {range:?} are wanted"));
                }
                (range.start, 1, range.len())
            }
            Rows::Share { number, of } if all.is_multiple_of(of) => {
                (number * (all / of), 1, all / of)
            }
            Rows::Share { of, .. } => return unfit(&format!("which {of} parts can't share")),
            Rows::Every { first, step } => (first, step, all.saturating_sub(first).div_ceil(step)),
        };
        if let Some(heads) = self.pairs {
            let heads = attention().map(heads);
            let fits = heads.is_some_and(|heads| heads > 0 && part.rows.is_multiple_of(2 * heads));
            if !fits {
                return unfit("whose heads have no two halves");
            }
            part.pairs = heads;
        }
        Ok(part)
    }
}
