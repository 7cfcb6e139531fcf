//! An encoder (Devlin et al. 2019): every position of a prompt sees all of it, and each prompt
//! gives one vector. Only the weights are kept from batch to batch.

mod front;
mod pass;

use std::ffi::c_void;

use crate::attention::{self, Queries, Scratch};
use crate::codes::{CodesRoom, Format, SHARED};
use crate::dispatch::{Level, Number};
use crate::element::{Bf16, Element};
use crate::matmul::Matrix;
use crate::pages::{Held, Pool, Shape};
use crate::team::{Queue, Team, TeamSpec};
use crate::tile::GROUP;

pub use self::front::{
    Bert, BertActivation, BertLayer, BertLinear, BertNorm, BertSizes, BertWeights, Texts,
};
pub(crate) use self::pass::Pass;
use self::pass::{Layer, Norm, QUEUES_A_LAYER, Score, Token};

/// One layer, as the caller describes it. Matrices are packed, vectors as in the checkpoint.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct EncoderLayerSpec {
    /// `[3 * hidden, hidden]`: queries, keys, values.
    qkv: *const c_void,
    qkv_bias: *const c_void,
    output: *const c_void,
    output_bias: *const c_void,
    attention_norm: *const c_void,
    attention_norm_bias: *const c_void,
    up: *const c_void,
    up_bias: *const c_void,
    down: *const c_void,
    down_bias: *const c_void,
    output_norm: *const c_void,
    output_norm_bias: *const c_void,
    /// The formats of the four matrices in the order above, see [`Format::of`].
    formats: [u32; 4],
}

/// An encoder, as the caller describes it. The memory that it points to lives as long as the
/// encoder.
#[repr(C)]
pub struct EncoderSpec {
    /// 0: float32, 1: bfloat16; of weights.
    dtype: u32,
    layers: u32,
    hidden: u32,
    heads: u32,
    intermediate: u32,
    vocabulary: u32,
    positions: u32,
    /// Kinds of texts.
    kinds: u32,
    /// See [`Activation`].
    activation: u32,
    /// 0: the mean of a prompt's states is its vector, 1: the first one is.
    pooling: u32,
    /// Numbers that `pooler` and `classifier` make of a vector; 0: the vector stays.
    scores: u32,
    threads: u32,
    eps: f32,
    /// `[vocabulary, hidden]`, `[positions, hidden]` and `[kinds, hidden]`, as in the checkpoint.
    words: *const c_void,
    places: *const c_void,
    texts: *const c_void,
    norm: *const c_void,
    norm_bias: *const c_void,
    pooler: *const c_void,
    pooler_bias: *const c_void,
    classifier: *const c_void,
    classifier_bias: *const c_void,
    layer: *const EncoderLayerSpec,
}

/// Prompts, as the caller describes them.
#[repr(C)]
pub struct BatchSpec {
    rows: u64,
    /// int64 `[rows]` each.
    slot: *const i64,
    length: *const i64,
    /// The position at which the second text of a pair begins; 0: there is one text.
    segment: *const i64,
    /// int32 `[slots, token_stride]`.
    tokens: *const i32,
    token_stride: u64,
    /// float32 `[rows, scores]`, or `[rows, hidden]` where vectors stay.
    vectors: *mut f32,
}

/// The function between the two products of a layer's second part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    Gelu,
    GeluTanh,
    Relu,
}

impl Activation {
    /// 0, 1 and 2, in this order.
    fn of(number: u32) -> Option<Self> {
        [Self::Gelu, Self::GeluTanh, Self::Relu].get(number as usize).copied()
    }
}

/// The reason for which a batch was not computed. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Refused {
    /// A token is not of the vocabulary.
    Token = 2,
    /// A prompt is empty, or has more positions than the encoder.
    Length = 3,
    /// A prompt has a second text, and the encoder knows one kind.
    Pair = 4,
}

struct Owned<E> {
    panels: *const E,
    format: Option<Format>,
    outputs: usize,
    inputs: usize,
    bias: Vec<f32>,
}

impl<E> Owned<E> {
    fn matrix(&self) -> Matrix<'_, E> {
        let Self { panels, format, outputs, inputs, ref bias } = *self;
        Matrix { panels, format, outputs, inputs, bias }
    }
}

struct OwnedNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl OwnedNorm {
    fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.weight, bias: &self.bias }
    }
}

struct OwnedLayer<E> {
    qkv: Owned<E>,
    output: Owned<E>,
    attention_norm: OwnedNorm,
    up: Owned<E>,
    down: Owned<E>,
    output_norm: OwnedNorm,
}

impl<E> OwnedLayer<E> {
    fn layer(&self) -> Layer<'_, E> {
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
pub(crate) struct Encoder<E> {
    shape: Shape,
    hidden: usize,
    intermediate: usize,
    vocabulary: usize,
    positions: usize,
    kinds: usize,
    activation: Activation,
    /// True if a prompt's first state is its vector, and not the mean.
    first: bool,
    eps: f32,
    words: *const E,
    places: *const E,
    texts: *const E,
    norm: OwnedNorm,
    layers: Vec<OwnedLayer<E>>,
    score: Option<(Owned<E>, Owned<E>)>,
    /// True if any matrix is quantised.
    quantised: bool,
    team: Team,
    work: Work<E>,
}

/// Buffers of a batch, kept from batch to batch.
struct Work<E> {
    tokens: Vec<Token<E>>,
    /// First tokens of the prompts, and the end of the last one.
    starts: Vec<usize>,
    /// The numbers of all pages: those of a prompt follow one another.
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
    /// Rows as a quantised matrix takes them: codes, their scales and sums.
    codes: Vec<i8>,
    code_scales: Vec<f32>,
    code_sums: Vec<i32>,
    attention: attention::Work,
    /// The attention of the last layer, in which only the first state of each prompt counts.
    last_attention: attention::Work,
    queues: Vec<Queue>,
    scratch: Vec<Scratch<E>>,
}

impl<E: Element> Encoder<E> {
    /// None if the kernels cannot do its sizes: inner dimensions are taken two by two, and of
    /// quantised matrices [`SHARED`] by [`SHARED`].
    ///
    /// # Safety
    /// `spec` describes what is there, and it stays there.
    pub(crate) unsafe fn new(spec: &EncoderSpec, team: Team) -> Option<Self> {
        let (hidden, heads) = (spec.hidden as usize, spec.heads as usize);
        let intermediate = spec.intermediate as usize;
        let activation = Activation::of(spec.activation)?;
        let sizes = [hidden, heads, intermediate, spec.layers as usize, spec.kinds as usize];
        if sizes.contains(&0) || !hidden.is_multiple_of(heads) {
            return None;
        }
        let head_dim = hidden / heads;
        if [hidden, head_dim, intermediate].iter().any(|size| size % 2 > 0) {
            return None;
        }
        let scale = (head_dim as f64).powf(-0.5) as f32;
        let page_size = GROUP;
        let shape = Shape { heads, kv_heads: heads, head_dim, page_size, scale, ..Shape::CAUSAL };
        let vector = |from: *const c_void, length: usize| -> Vec<f32> {
            // SAFETY: the caller's description.
            let values = unsafe { std::slice::from_raw_parts(from.cast::<E>(), length) };
            values.iter().map(|value| value.to_f32()).collect()
        };
        let owned = |(panels, format): (*const c_void, u32), bias, outputs, inputs| Owned {
            panels: panels.cast(),
            format: Format::of(format),
            outputs,
            inputs,
            bias: vector(bias, outputs),
        };
        let norm =
            |weight, bias| OwnedNorm { weight: vector(weight, hidden), bias: vector(bias, hidden) };
        // SAFETY: the caller's description.
        let layers = unsafe { std::slice::from_raw_parts(spec.layer, spec.layers as usize) };
        let inputs = [hidden, hidden, hidden, intermediate];
        let fits = |(format, inputs): (u32, usize)| {
            Format::of(format).is_none() || inputs.is_multiple_of(SHARED)
        };
        if !layers.iter().all(|layer| layer.formats.into_iter().zip(inputs).all(fits)) {
            return None;
        }
        let layer = |it: &EncoderLayerSpec| OwnedLayer {
            qkv: owned((it.qkv, it.formats[0]), it.qkv_bias, 3 * hidden, hidden),
            output: owned((it.output, it.formats[1]), it.output_bias, hidden, hidden),
            attention_norm: norm(it.attention_norm, it.attention_norm_bias),
            up: owned((it.up, it.formats[2]), it.up_bias, intermediate, hidden),
            down: owned((it.down, it.formats[3]), it.down_bias, hidden, intermediate),
            output_norm: norm(it.output_norm, it.output_norm_bias),
        };
        let score = (spec.scores > 0).then(|| {
            (
                owned((spec.pooler, 0), spec.pooler_bias, hidden, hidden),
                owned((spec.classifier, 0), spec.classifier_bias, spec.scores as usize, hidden),
            )
        });
        let mut work = Work::default();
        work.scratch.resize_with(team.threads, || Scratch::new(&[shape]));
        // Two more for what makes scores.
        work.queues.resize_with(QUEUES_A_LAYER * layers.len() + 2, Queue::default);
        Some(Self {
            shape,
            hidden,
            intermediate,
            vocabulary: spec.vocabulary as usize,
            positions: spec.positions as usize,
            kinds: spec.kinds as usize,
            activation,
            first: spec.pooling == 1,
            eps: spec.eps,
            words: spec.words.cast(),
            places: spec.places.cast(),
            texts: spec.texts.cast(),
            norm: norm(spec.norm, spec.norm_bias),
            layers: layers.iter().map(layer).collect(),
            score,
            quantised: layers.iter().flat_map(|it| it.formats).any(|it| Format::of(it).is_some()),
            team,
            work,
        })
    }

    /// Computes the vector of every prompt.
    ///
    /// # Safety
    /// `batch` describes what is there; rows lie within the table of tokens; `run` lets every
    /// member of the team compute its share.
    pub(crate) unsafe fn encode(
        &mut self,
        batch: &BatchSpec,
        run: impl Fn(&Team, &Pass<'_, E>),
    ) -> Result<(), Refused> {
        // SAFETY: the caller's description.
        unsafe { self.lay_out(batch)? };
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
            vectors: batch.vectors,
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
        run(&self.team, &pass);
        Ok(())
    }

    /// Finds every token, gives each prompt pages of its own and cuts the attention into units.
    unsafe fn lay_out(&mut self, batch: &BatchSpec) -> Result<(), Refused> {
        let count = batch.rows as usize;
        // SAFETY: the caller's description.
        let column = |from: *const i64| unsafe { std::slice::from_raw_parts(from, count) };
        let (slots, lengths) = (column(batch.slot), column(batch.length));
        let segments = column(batch.segment);
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
            slots.iter().zip(lengths).zip(segments).enumerate()
        {
            let (slot, length) = (slot as usize, length as usize);
            let token = work.tokens.len();
            for position in 0..length {
                // SAFETY: rows lie within the table of tokens; numbers within those of embeddings,
                // as is checked.
                unsafe {
                    let id = *batch.tokens.add(slot * batch.token_stride as usize + position);
                    let id = usize::try_from(id).ok().filter(|&id| id < self.vocabulary);
                    let id = id.ok_or(Refused::Token)?;
                    let second = segment > 0 && position as i64 >= segment;
                    work.tokens.push(Token {
                        word: self.words.add(id * self.hidden),
                        place: self.places.add(position * self.hidden),
                        text: self.texts.add(usize::from(second) * self.hidden),
                        entry: page * GROUP + position,
                    });
                }
            }
            let held = Held { pages: work.pages[page..].as_ptr(), kv_head: 0 };
            let queries = Queries { token, to: token, tokens: length, position: 0, held };
            work.attention.add_whole(&self.shape, queries, length);
            let first = Queries { to: prompt, tokens: 1, ..queries };
            work.last_attention.add_whole(&self.shape, first, length);
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

fn grow<T: Clone>(buffer: &mut Vec<T>, length: usize, value: T) {
    if buffer.len() < length {
        buffer.resize(length, value);
    }
}

/// An encoder of either type.
pub struct AnyEncoder(Typed);

enum Typed {
    Float32(Encoder<f32>),
    Bfloat16(Encoder<Bf16>),
}

/// An encoder that computes with `spec.threads` threads; null if its sizes are some that the
/// kernels cannot do.
///
/// # Safety
/// `spec` and `team` describe valid memory; everything but the descriptions themselves stays until
/// [`fb_encoder_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_encoder_new(
    spec: *const EncoderSpec,
    team: *const TeamSpec,
) -> *mut AnyEncoder {
    // SAFETY: the caller's descriptions.
    let encoder = unsafe {
        let (spec, team) = (&*spec, &*team);
        let team = Team::of(spec.threads, team);
        match spec.dtype {
            0 => Encoder::new(spec, team).map(Typed::Float32),
            _ => Encoder::new(spec, team).map(Typed::Bfloat16),
        }
    };
    encoder.map_or(std::ptr::null_mut(), |typed| Box::into_raw(Box::new(AnyEncoder(typed))))
}

/// Frees an encoder; null is nothing.
///
/// # Safety
/// `encoder` is of [`fb_encoder_new`] and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_encoder_free(encoder: *mut AnyEncoder) {
    if !encoder.is_null() {
        // SAFETY: the caller's word.
        drop(unsafe { Box::from_raw(encoder) });
    }
}

/// Computes vectors, or scores. Returns 0, or the reason for a refusal. 2 is a token outside of the
/// vocabulary, 3 an empty or too long prompt, and 4 a second text that the encoder does not
/// support.
///
/// # Safety
/// `encoder` is of [`fb_encoder_new`] and computes nothing else. `batch` describes valid memory,
/// with rows inside the embedding table.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_encode(encoder: *mut AnyEncoder, batch: *const BatchSpec) -> i32 {
    unsafe fn typed<E: Number>(encoder: &mut Encoder<E>, batch: &BatchSpec) -> Result<(), Refused> {
        let level = Level::current();
        // SAFETY: the caller's description; once a member, and the level is there.
        unsafe {
            encoder.encode(batch, |team, pass| {
                team.run(|member| E::compute(level, (pass, &member)));
            })
        }
    }
    // SAFETY: the caller's description.
    let result = unsafe {
        match &mut (*encoder).0 {
            Typed::Float32(encoder) => typed(encoder, &*batch),
            Typed::Bfloat16(encoder) => typed(encoder, &*batch),
        }
    };
    result.map_or_else(|refused| refused as i32, |()| 0)
}

#[cfg(test)]
mod tests;
