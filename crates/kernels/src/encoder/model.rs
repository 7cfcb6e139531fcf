//! An encoder with its buffers, and the computation of a batch.

use std::fmt;
use std::sync::Arc;

use super::bert::Texts;
use super::pass::{Layer, Norm, Pass, QUEUES_A_LAYER, Score, Token};
use super::weights::{BertActivation, BertLayer, BertLinear, BertNorm, BertSizes, BertWeights};
use crate::attention::{self, Queries, Scratch};
use crate::codes::{CodesRoom, SHARED};
use crate::element::{Element, widened};
use crate::memory::grow;
use crate::owned::Owned;
use crate::pages::{Held, Pool, Shape};
use crate::pool::Threads;
use crate::team::Queue;
use crate::tile::GROUP;
use crate::weights::Bytes;

/// Why a batch was not computed. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// A token is not in the vocabulary.
    Token,
    /// A prompt is empty, or longer than the encoder's position table.
    Length,
    /// A prompt is a pair of texts, but the encoder has only one token type.
    Pair,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Token => "a row has a token that is not of the vocabulary",
            Self::Length => "a row is empty, or longer than the model",
            Self::Pair => "a row has a second text, and the model knows one",
        })
    }
}

struct OwnedNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl OwnedNorm {
    fn new<E: Element>(of: &BertNorm) -> Self {
        Self { weight: widened::<E>(&of.weight), bias: widened::<E>(&of.bias) }
    }

    fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.weight, bias: &self.bias }
    }
}

struct OwnedLayer {
    qkv: Owned,
    output: Owned,
    attention_norm: OwnedNorm,
    up: Owned,
    down: Owned,
    output_norm: OwnedNorm,
}

fn owned<E: Element>(of: &BertLinear, outputs: usize, inputs: usize) -> Owned {
    Owned::new::<E>(&of.matrix, (outputs, inputs), Some(&of.bias))
}

impl OwnedLayer {
    fn new<E: Element>(of: &BertLayer, sizes: &BertSizes) -> Self {
        let &BertSizes { hidden, intermediate, .. } = sizes;
        Self {
            qkv: owned::<E>(&of.qkv, 3 * hidden, hidden),
            output: owned::<E>(&of.output, hidden, hidden),
            attention_norm: OwnedNorm::new::<E>(&of.attention_norm),
            up: owned::<E>(&of.up, intermediate, hidden),
            down: owned::<E>(&of.down, hidden, intermediate),
            output_norm: OwnedNorm::new::<E>(&of.output_norm),
        }
    }

    fn is_quantised(&self) -> bool {
        [&self.qkv, &self.output, &self.up, &self.down].into_iter().any(Owned::is_quantised)
    }

    fn layer<E>(&self) -> Layer<'_, E> {
        Layer {
            qkv: self.qkv.matrix(),
            output: self.output.matrix(),
            attention_norm: self.attention_norm.norm(),
            up: self.up.matrix(),
            down: self.down.matrix(),
            output_norm: self.output_norm.norm(),
        }
    }
}

/// An encoder with its buffers. Batches are computed one at a time.
pub(super) struct Encoder<E> {
    shape: Shape,
    hidden: usize,
    intermediate: usize,
    vocabulary: usize,
    positions: usize,
    kinds: usize,
    activation: BertActivation,
    /// True if a prompt's vector is its first state; false if it is the mean of its states.
    first: bool,
    eps: f32,
    words: Bytes,
    places: Bytes,
    texts: Bytes,
    norm: OwnedNorm,
    layers: Vec<OwnedLayer>,
    score: Option<(Owned, Owned)>,
    /// True if any matrix is quantised.
    quantised: bool,
    threads: Arc<Threads>,
    work: Work<E>,
}

/// Buffers of a batch, reused from batch to batch.
struct Work<E> {
    tokens: Vec<Token<E>>,
    /// The first token of each prompt, and the end of the last prompt.
    starts: Vec<usize>,
    /// The page numbers of all prompts; each prompt's pages are consecutive.
    pages: Vec<i32>,
    x: Vec<f32>,
    pooled: Vec<f32>,
    normed: Vec<E>,
    wide: Vec<f32>,
    attended: Vec<E>,
    activated: Vec<E>,
    /// The keys of the layer that is being computed.
    keys: Vec<E>,
    values: Vec<E>,
    arranged: Vec<f32>,
    /// Rows as codes for quantised matrices, with their scales and sums.
    codes: Vec<i8>,
    code_scales: Vec<f32>,
    code_sums: Vec<i32>,
    attention: attention::Work,
    /// The attention of the last layer, in which only the first state of each prompt is used.
    last_attention: attention::Work,
    queues: Vec<Queue>,
    scratch: Vec<Scratch<E>>,
}

impl<E: Element> Encoder<E> {
    /// Creates an encoder of the element type `E`. The caller must have checked sizes and weights.
    pub(super) fn new(sizes: &BertSizes, weights: &BertWeights, threads: Arc<Threads>) -> Self {
        let &BertSizes { hidden, heads, .. } = sizes;
        let head_dim = hidden / heads;
        let scale = (head_dim as f64).powf(-0.5) as f32;
        let page_size = GROUP;
        let shape = Shape {
            heads,
            kv_heads: heads,
            head_dim,
            page_size,
            scale,
            both_ways: true,
            ..Shape::CAUSAL
        };
        let layers = weights.layers.iter().map(|layer| OwnedLayer::new::<E>(layer, sizes));
        let layers: Vec<OwnedLayer> = layers.collect();
        let mut work = Work::default();
        work.scratch.resize_with(threads.count(), || Scratch::new(&[shape]));
        // Two more queues are for the products that compute scores.
        work.queues.resize_with(QUEUES_A_LAYER * layers.len() + 2, Queue::default);
        Self {
            shape,
            hidden,
            intermediate: sizes.intermediate,
            vocabulary: sizes.vocabulary,
            positions: sizes.positions,
            kinds: sizes.kinds,
            activation: sizes.activation,
            first: sizes.first,
            eps: sizes.eps,
            words: weights.words.clone(),
            places: weights.places.clone(),
            texts: weights.texts.clone(),
            norm: OwnedNorm::new::<E>(&weights.norm),
            quantised: layers.iter().any(OwnedLayer::is_quantised),
            layers,
            score: weights.score.as_ref().map(|(pooler, classifier)| {
                (owned::<E>(pooler, hidden, hidden), owned::<E>(classifier, sizes.scores, hidden))
            }),
            threads,
            work,
        }
    }

    /// Computes the vector of every prompt.
    ///
    /// # Safety
    /// The prompts must lie within the table of tokens, and `vectors` must have room for the
    /// vectors of all prompts. `run` must make every member of the team compute its share.
    pub(crate) unsafe fn encode(
        &mut self,
        batch: &Texts<'_>,
        vectors: &mut [f32],
        run: impl Fn(&Threads, &Pass<'_, E>),
    ) -> Result<(), Refused> {
        self.lay_out(batch)?;
        let (hidden, count) = (self.hidden, self.work.tokens.len());
        let prompts = self.work.starts.len() - 1;
        if prompts == 0 {
            return Ok(());
        }
        let (zero, work) = (E::default(), &mut self.work);
        let widest = (3 * hidden).max(self.intermediate);
        grow(&mut work.x, count * hidden, 0.0);
        grow(&mut work.pooled, prompts * hidden, 0.0);
        grow(&mut work.normed, count * hidden, zero);
        grow(&mut work.wide, count * widest, 0.0);
        grow(&mut work.attended, count * hidden, zero);
        grow(&mut work.activated, count * self.intermediate, zero);
        let wide = count * hidden.max(self.intermediate);
        grow(&mut work.arranged, wide, 0.0);
        if self.quantised {
            grow(&mut work.codes, wide, 0);
            grow(&mut work.code_scales, wide / SHARED, 0.0);
            grow(&mut work.code_sums, wide / SHARED, 0);
        }
        let entries = work.pages.len() * GROUP;
        grow(&mut work.keys, entries * hidden, zero);
        grow(&mut work.values, entries * hidden, zero);
        work.queues.iter_mut().for_each(Queue::reset);
        let layers: Vec<Layer<'_, E>> = self.layers.iter().map(OwnedLayer::layer).collect();
        let pass = Pass {
            x: work.x.as_mut_ptr(),
            pooled: work.pooled.as_mut_ptr(),
            normed: work.normed.as_mut_ptr(),
            wide: work.wide.as_mut_ptr(),
            attended: work.attended.as_mut_ptr(),
            activated: work.activated.as_mut_ptr(),
            arranged: work.arranged.as_mut_ptr(),
            codes: CodesRoom {
                codes: work.codes.as_mut_ptr(),
                scales: work.code_scales.as_mut_ptr(),
                sums: work.code_sums.as_mut_ptr(),
            },
            scratch: work.scratch.as_mut_ptr(),
            vectors: vectors.as_mut_ptr(),
            pool: Pool { keys: work.keys.as_mut_ptr(), values: work.values.as_mut_ptr() },
            tokens: &work.tokens,
            starts: &work.starts,
            attention: work.attention.shared(),
            last_attention: work.last_attention.shared(),
            queues: &work.queues,
            shape: self.shape,
            hidden,
            eps: self.eps,
            activation: self.activation,
            first: self.first,
            norm: self.norm.norm(),
            layers: &layers,
            score: self.score.as_ref().map(|(pooler, classifier)| Score {
                pooler: pooler.matrix(),
                classifier: classifier.matrix(),
            }),
        };
        run(&self.threads, &pass);
        Ok(())
    }

    /// Locates every token, assigns pages to each prompt and divides the attention into units.
    fn lay_out(&mut self, batch: &Texts<'_>) -> Result<(), Refused> {
        let (lengths, segments) = (batch.length, batch.segment);
        let most = i64::try_from(self.positions).unwrap_or(i64::MAX);
        if lengths.iter().any(|&length| !(1..=most).contains(&length)) {
            return Err(Refused::Length);
        }
        if self.kinds < 2 && segments.iter().any(|&segment| segment > 0) {
            return Err(Refused::Pair);
        }
        let work = &mut self.work;
        work.tokens.clear();
        work.starts.clear();
        work.attention.clear();
        work.last_attention.clear();
        let pages: usize = lengths.iter().map(|&length| (length as usize).div_ceil(GROUP)).sum();
        let known = work.pages.len();
        work.pages.extend((known..pages).map(|page| page as i32));
        let mut page = 0;
        for (prompt, ((&slot, &length), &segment)) in
            batch.slot.iter().zip(lengths).zip(segments).enumerate()
        {
            let (slot, length) = (slot as usize, length as usize);
            let token = work.tokens.len();
            let ids = &batch.tokens[slot * batch.token_stride..][..length];
            for (position, &id) in ids.iter().enumerate() {
                let id = usize::try_from(id).ok().filter(|&id| id < self.vocabulary);
                let id = id.ok_or(Refused::Token)?;
                let second = segment > 0 && position as i64 >= segment;
                let row = |table: &Bytes, row: usize| {
                    table.as_ptr().cast::<E>().wrapping_add(row * self.hidden)
                };
                work.tokens.push(Token {
                    word: row(&self.words, id),
                    place: row(&self.places, position),
                    text: row(&self.texts, usize::from(second)),
                    entry: page * GROUP + position,
                });
            }
            let held = Held { pages: work.pages[page..].as_ptr(), kv_head: 0 };
            let queries = Queries { token, to: token, tokens: length, position: 0, held };
            work.attention.add(&self.shape, queries, length, false);
            let first = Queries { to: prompt, tokens: 1, ..queries };
            work.last_attention.add(&self.shape, first, length, false);
            work.starts.push(token);
            page += length.div_ceil(GROUP);
        }
        work.starts.push(work.tokens.len());
        work.attention.arrange(&self.shape);
        work.last_attention.arrange(&self.shape);
        Ok(())
    }
}

impl<E> Default for Work<E> {
    fn default() -> Self {
        Self {
            tokens: Vec::new(),
            starts: Vec::new(),
            pages: Vec::new(),
            x: Vec::new(),
            pooled: Vec::new(),
            normed: Vec::new(),
            wide: Vec::new(),
            attended: Vec::new(),
            activated: Vec::new(),
            keys: Vec::new(),
            values: Vec::new(),
            arranged: Vec::new(),
            codes: Vec::new(),
            code_scales: Vec::new(),
            code_sums: Vec::new(),
            attention: attention::Work::default(),
            last_attention: attention::Work::default(),
            queues: Vec::new(),
            scratch: Vec::new(),
        }
    }
}
