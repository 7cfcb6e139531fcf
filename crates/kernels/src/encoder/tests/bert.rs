//! Tests of an encoder's public interface: results match a reference computation, and input is
//! checked.

use super::*;
use crate::packing::Unfit;
use crate::pool::Threads;

fn threads() -> Arc<Threads> {
    Arc::new(team(2))
}

fn bert(naive: &Naive<f32>) -> Result<Bert, Unfit> {
    Bert::new(naive.sizes, naive.weights(), &threads())
}

#[test]
fn it_is_the_formula() {
    let kinds = ACTIVATIONS.into_iter().zip([(false, 0), (true, 0), (true, 2)]);
    for (activation, (first, scores)) in kinds {
        let sizes = BertSizes { activation, first, scores, ..SMALL };
        let naive = Naive::<f32>::new(Model { sizes, seed: 3 });
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
    let good = SMALL;
    let naive = Naive::<f32>::new(Model { sizes: good, seed: 3 });
    let fits = |sizes, weights| Bert::new(sizes, weights, &threads()).is_ok();
    assert!(fits(good, naive.weights()));
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
        assert!(!fits(wrong, naive.weights()), "{wrong:?}");
    }
    let mut short = naive.weights();
    short.layers[1].up.bias = room(&[0.0_f32; 63]);
    assert!(!fits(good, short));
    let mut none = naive.weights();
    none.layers.clear();
    assert!(!fits(good, none));
    let sizes = BertSizes { first: true, scores: 1, ..SMALL };
    let mut rounded = Naive::<f32>::new(Model { sizes, seed: 3 }).weights();
    if let Some((pooler, _)) = &mut rounded.score {
        pooler.matrix.storage = Storage::Int8;
    }
    assert!(!fits(sizes, rounded));

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
