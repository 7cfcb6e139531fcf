//! The front for callers in Rust. Its results are those of the C interface, and it checks its
//! input.

use std::sync::Arc;

use super::super::front::{
    Bert, BertActivation, BertLayer, BertLinear, BertNorm, BertSizes, BertWeights, Texts,
};
use super::*;
use crate::decoder::{Bytes, Matrix};
use crate::memory::Room;
use crate::packing::{Dtype, Storage, Unfit};
use crate::pool::Threads;

fn room<E: Copy>(values: &[E]) -> Bytes {
    let mut room = Room::new(size_of_val(values)).expect("room");
    // SAFETY: numbers, as bytes.
    room.copy_from_slice(unsafe {
        std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values))
    });
    Arc::new(room)
}

fn norm(of: &Scales<f32>) -> BertNorm {
    BertNorm { weight: room(&of.weight), bias: room(&of.bias) }
}

fn linear(of: &Dense<f32>) -> BertLinear {
    let matrix = Matrix { storage: Storage::Plain, packed: room(&of.packed) };
    BertLinear { matrix, bias: room(&of.bias) }
}

fn weights(of: &Naive<f32>) -> BertWeights {
    let layer = |block: &Block<f32>| BertLayer {
        qkv: linear(&block.qkv),
        output: linear(&block.output),
        attention_norm: norm(&block.attention_norm),
        up: linear(&block.up),
        down: linear(&block.down),
        output_norm: norm(&block.output_norm),
    };
    let [words, places, texts] = &of.tables;
    BertWeights {
        words: room(words),
        places: room(places),
        texts: room(texts),
        norm: norm(&of.norm),
        layers: of.blocks.iter().map(layer).collect(),
        score: (of.sizes.scores > 0).then(|| (linear(&of.pooler), linear(&of.classifier))),
    }
}

fn sizes(of: &Sizes) -> BertSizes {
    BertSizes {
        dtype: Dtype::Float32,
        hidden: of.hidden,
        heads: of.heads,
        intermediate: of.intermediate,
        vocabulary: VOCABULARY,
        positions: POSITIONS,
        kinds: 2,
        activation: match of.activation {
            0 => BertActivation::Gelu,
            1 => BertActivation::GeluTanh,
            _ => BertActivation::Relu,
        },
        first: of.first,
        scores: of.scores,
        eps: EPS,
    }
}

fn threads() -> Arc<Threads> {
    Arc::new(Threads::new(2).expect("threads"))
}

fn bert(naive: &Naive<f32>) -> Result<Bert, Unfit> {
    Bert::new(sizes(&naive.sizes), weights(naive), &threads())
}

#[test]
fn it_is_the_formula() {
    for (activation, first, scores) in [(0, false, 0), (1, true, 0), (2, true, 2)] {
        let naive = Naive::<f32>::new(Sizes { activation, first, scores, ..SMALL });
        let mut bert = bert(&naive).expect("possible");
        let prompts = prompts(&[7, 1, 40], 5);
        let stride = 41;
        let mut tokens = vec![-1; 3 * stride];
        for (slot, prompt) in prompts.iter().enumerate() {
            tokens[slot * stride..][..prompt.tokens.len()].copy_from_slice(&prompt.tokens);
        }
        let column = |of: fn(&Prompt) -> usize| -> Vec<i64> {
            prompts.iter().map(|prompt| of(prompt) as i64).collect()
        };
        let texts = Texts {
            slot: &[0, 1, 2],
            length: &column(|prompt| prompt.tokens.len()),
            segment: &column(|prompt| prompt.segment),
            tokens: &tokens,
            token_stride: stride,
        };
        let mut vectors = vec![f32::NAN; 3 * bert.width()];
        bert.encode(&texts, &mut vectors).expect("in order");
        for (found, prompt) in vectors.chunks_exact(bert.width()).zip(&prompts) {
            let exact = naive.vector(prompt);
            assert_eq!(found.len(), exact.len());
            for (&found, exact) in found.iter().zip(exact) {
                assert!((f64::from(found) - exact).abs() < 1e-4, "{found} {exact}");
            }
        }
    }
}

#[test]
fn whatever_it_is_given_is_checked() {
    let naive = Naive::<f32>::new(SMALL);
    let good = sizes(&SMALL);
    let fits = |sizes, weights| Bert::new(sizes, weights, &threads()).is_ok();
    assert!(fits(good, weights(&naive)));
    for wrong in [
        BertSizes { hidden: 64, ..good },
        BertSizes { heads: 3, ..good },
        BertSizes { heads: 32, ..good },
        BertSizes { intermediate: 66, ..good },
        BertSizes { positions: POSITIONS + 1, ..good },
        BertSizes { kinds: 0, ..good },
        BertSizes { scores: 1, ..good },
        BertSizes { dtype: Dtype::Bfloat16, ..good },
    ] {
        assert!(!fits(wrong, weights(&naive)), "{wrong:?}");
    }
    let mut short = weights(&naive);
    short.layers[1].up.bias = room(&[0.0_f32; 63]);
    assert!(!fits(good, short));
    let mut none = weights(&naive);
    none.layers.clear();
    assert!(!fits(good, none));
    let scoring = Naive::<f32>::new(Sizes { first: true, scores: 1, ..SMALL });
    let mut rounded = weights(&scoring);
    if let Some((pooler, _)) = &mut rounded.score {
        pooler.matrix.storage = Storage::Int8;
    }
    assert!(!fits(sizes(&scoring.sizes), rounded));

    let mut bert = bert(&naive).expect("possible");
    let tokens = vec![1; 2 * 200];
    let texts =
        Texts { slot: &[1], length: &[200], segment: &[0], tokens: &tokens, token_stride: 200 };
    let mut room = vec![0.0; SMALL.hidden];
    let mut why = |texts: &Texts<'_>, room: &mut [f32]| {
        bert.encode(texts, room).map_err(|error| error.to_string())
    };
    assert_eq!(why(&Texts { length: &[3], ..texts }, &mut room), Ok(()));
    for (texts, reason) in [
        (texts, "longer than the model"),
        (Texts { length: &[201], ..texts }, "201 tokens"),
        (Texts { length: &[0], ..texts }, "empty"),
        (Texts { length: &[], ..texts }, "equally long"),
        (Texts { slot: &[2], length: &[3], ..texts }, "slot 2"),
        (Texts { slot: &[-1], length: &[3], ..texts }, "slot -1"),
        (Texts { tokens: &[-1; 400], length: &[3], ..texts }, "vocabulary"),
    ] {
        let found = why(&texts, &mut room);
        assert!(found.as_ref().is_err_and(|why| why.contains(reason)), "{found:?} {reason}");
    }
    let short = why(&Texts { length: &[3], ..texts }, &mut [0.0; 3]);
    assert!(short.is_err_and(|why| why.contains("room")));
}
