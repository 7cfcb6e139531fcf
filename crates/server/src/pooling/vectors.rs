//! Processing of the model's vectors: scaling, encoding, scores.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forebay_api::{EncodingFormat, Vector};

use super::model::ScoreFunction;

/// The requested format of vectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    pub(crate) dimensions: Option<usize>,
    pub(crate) normalize: bool,
    pub(crate) format: EncodingFormat,
}

/// Truncates, normalises and encodes a vector.
pub(crate) fn form(vector: Box<[f32]>, form: Form) -> Vector {
    let mut vector = vector.into_vec();
    // Truncate first, because the result must have length 1 (Kusupati et al. 2022).
    vector.truncate(form.dimensions.unwrap_or(usize::MAX));
    if form.normalize {
        let length = length(&vector);
        if length > 0.0 {
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
    }
    match form.format {
        EncodingFormat::Float => Vector::Float(vector),
        EncodingFormat::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Vector::Base64(STANDARD.encode(bytes))
        }
    }
}

/// Applies an activation to raw scores, in place.
pub(crate) fn answers(mut scores: Box<[f32]>, function: ScoreFunction) -> Box<[f32]> {
    match function {
        ScoreFunction::Identity => {}
        ScoreFunction::Sigmoid => scores.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        ScoreFunction::Softmax => {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weight = |x: f32| f64::from(x - largest).exp();
            let total: f64 = scores.iter().map(|&x| weight(x)).sum();
            scores.iter_mut().for_each(|x| *x = (weight(*x) / total) as f32);
        }
    }
    scores
}

/// Returns the scores of vectors with one element each.
pub(crate) fn scores(vectors: Vec<Box<[f32]>>, function: ScoreFunction) -> Vec<f32> {
    let first = |vector| answers(vector, function).first().copied().unwrap_or(0.0);
    vectors.into_iter().map(first).collect()
}

/// Returns the cosine of the angle between two vectors; 0 if one of them is zero.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let product: f64 = a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
    let lengths = length(a) * length(b);
    if lengths > 0.0 { (product / lengths) as f32 } else { 0.0 }
}

fn length(vector: &[f32]) -> f64 {
    vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn floats(vector: Vec<f32>, dimensions: Option<usize>, normalize: bool) -> Vec<f32> {
        let wanted = Form { dimensions, normalize, format: EncodingFormat::Float };
        match form(vector.into(), wanted) {
            Vector::Float(vector) => vector,
            Vector::Base64(text) => panic!("{text}"),
        }
    }

    #[test]
    fn a_vector_is_cut_before_it_is_normalised() {
        assert_eq!(floats(vec![3.0, 4.0, 12.0], Some(2), true), [0.6, 0.8]);
        assert_eq!(floats(vec![3.0, 4.0, 12.0], Some(2), false), [3.0, 4.0]);
        assert_eq!(floats(vec![0.0, 0.0], None, true), [0.0, 0.0]);
    }

    #[test]
    fn scores_and_cosines() {
        let of = |values: &[f32], function| {
            scores(values.iter().map(|&x| [x].into()).collect(), function)
        };
        assert_eq!(of(&[0.0, f32::MAX], ScoreFunction::Sigmoid), [0.5, 1.0]);
        assert_eq!(of(&[-2.5], ScoreFunction::Identity), [-2.5]);
        let softmax = answers([200.0, 200.0, -200.0].into(), ScoreFunction::Softmax);
        assert_eq!(*softmax, [0.5, 0.5, 0.0]);
        let two = answers([0.0, 3.0_f32.ln()].into(), ScoreFunction::Softmax);
        assert!((two[1] - 0.75).abs() < 1e-6, "{two:?}");
        assert_eq!(cosine(&[2.0, 0.0], &[0.0, 3.0]), 0.0);
        assert_eq!(cosine(&[2.0, 1.0], &[-4.0, -2.0]), -1.0);
        assert_eq!(cosine(&[0.0], &[1.0]), 0.0);
    }

    proptest! {
        #[test]
        fn base64_holds_the_same_numbers(vector in prop::collection::vec(-1e3_f32..1e3, 1..40)) {
            let wanted = Form { dimensions: None, normalize: true, format: EncodingFormat::Base64 };
            let Vector::Base64(text) = form(vector.clone().into(), wanted) else { panic!("floats") };
            let bytes = STANDARD.decode(text).unwrap();
            let read = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            prop_assert_eq!(read.collect::<Vec<_>>(), floats(vector, None, true));
        }
    }
}
