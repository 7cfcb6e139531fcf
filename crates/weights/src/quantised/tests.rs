//! Tests of quantised matrices in files: every element is compared with its definition, and damaged
//! files are read.

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::codes::CodeForm;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::families::Shape;
use crate::tensor::TorchNumber;

const MODULE: &str = "model.layers.0.self_attn.o_proj";
const WEIGHT: &str = "model.layers.0.self_attn.o_proj.weight";
const AWQ_ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Returns the value of an element, given its row and input.
type Definition = fn(&Files, usize, usize) -> f32;

/// The tensors of one matrix, by name suffix, and its config.
#[derive(Clone)]
struct Files {
    config: Value,
    shape: [usize; 2],
    tensors: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>,
}

impl Files {
    fn new(config: Value, shape: [usize; 2]) -> Self {
        Self { config, shape, tensors: Vec::new() }
    }

    /// Adds a tensor of random bits. Scales get small values.
    fn with(mut self, end: &'static str, dtype: Dtype, shape: &[usize]) -> Self {
        let mut state = 0x9e37_79b9_u32 ^ end.len() as u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let count: usize = shape.iter().product();
        let bytes = (0..count).flat_map(|_| match dtype {
            Dtype::F16 => f16::from_f32(next() as f32 / 1e8 - 0.05).to_le_bytes().to_vec(),
            Dtype::BF16 => bf16::from_f32(next() as f32 / 1e8).to_le_bytes().to_vec(),
            Dtype::F32 => (next() as f32 / 1e8).to_le_bytes().to_vec(),
            Dtype::I32 => (next() << 16 ^ next()).to_le_bytes().to_vec(),
            _ => vec![next() as u8],
        });
        let bytes = bytes.collect();
        self.tensors.push((end, dtype, shape.to_vec(), bytes));
        self
    }

    /// Adds a tensor with these integers.
    fn listing(mut self, end: &'static str, values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensors.push((end, Dtype::I32, vec![values.len()], bytes));
        self
    }

    fn bytes(&self, end: &str) -> &[u8] {
        let found = self.tensors.iter().find(|(other, ..)| *other == end);
        &found.expect("a tensor").3
    }

    fn has(&self, end: &str) -> bool {
        self.tensors.iter().any(|(other, ..)| *other == end)
    }

    /// Returns an element of a float tensor.
    fn number(&self, end: &str, at: usize) -> f32 {
        let (_, dtype, _, bytes) =
            self.tensors.iter().find(|(other, ..)| *other == end).expect("a tensor");
        let of = |size: usize| &bytes[at * size..][..size];
        match dtype {
            Dtype::F16 => f16::from_le_bytes(of(2).try_into().expect("two")).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes(of(2).try_into().expect("two")).to_f32(),
            _ => f32::from_le_bytes(of(4).try_into().expect("four")),
        }
    }

    /// Returns a 4-bit code from a tensor of words.
    fn nibble(&self, end: &str, word: usize, place: usize) -> f32 {
        f32::from(self.bytes(end)[word * 4 + place / 2] >> (place % 2 * 4) & 15)
    }

    /// Returns the group of an input.
    fn group(&self, end: &str, size: usize, input: usize) -> usize {
        if !self.has(end) {
            return input / size;
        }
        usize::from(self.bytes(end)[input * 4])
    }

    fn write(&self, path: &Path) -> Vec<PathBuf> {
        let views = self.tensors.iter().map(|(end, dtype, shape, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor");
            (format!("{MODULE}.{end}"), view)
        });
        let file = safetensors::serialize(views, None);
        std::fs::write(path, file.expect("a file")).expect("written");
        vec![path.to_owned()]
    }

    fn of_model(&self) -> Shape {
        let config = json!({"architectures": ["LlamaForCausalLM"], "vocab_size": 3,
            "hidden_size": 48, "intermediate_size": 6, "num_hidden_layers": 1,
            "num_attention_heads": 2, "quantization_config": self.config});
        Shape::from_config(config.as_object().expect("an object")).expect("a model")
    }

    fn open(&self, folder: &Path) -> Result<Checkpoint, ModelError> {
        let files = self.write(&folder.join("m.safetensors"));
        Checkpoint::open("safetensors", &files, &self.of_model())
    }

    /// Returns the error of opening or reading a matrix.
    fn refused(&self) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let mut bytes = vec![0; self.shape[0] * self.shape[1] * 4];
        let read = self
            .open(folder.path())
            .and_then(|it| it.read(WEIGHT, TorchNumber::Float32, &mut bytes));
        let said = read.expect_err("no matrix").to_string();
        assert!(!said.contains('\n'), "{said}");
        said
    }
}

fn fp8(block: Option<[usize; 2]>, codes: Dtype, scale: (Dtype, &[usize])) -> Files {
    let config = json!({"quant_method": "fp8", "weight_block_size": block});
    let end = if block.is_some() { "weight_scale_inv" } else { "weight_scale" };
    Files::new(config, [21, 40]).with("weight", codes, &[21, 40]).with(end, scale.0, scale.1)
}

fn gptq(changes: &Value) -> Files {
    let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 16});
    let more = changes.as_object().cloned().unwrap_or_default();
    config.as_object_mut().expect("an object").extend(more);
    let files = Files::new(config, [24, 48]).with("qweight", Dtype::I32, &[6, 24]);
    files.with("qzeros", Dtype::I32, &[3, 3]).with("scales", Dtype::F16, &[3, 24])
}

fn awq() -> Files {
    let config = json!({"quant_method": "awq", "bits": 4, "group_size": 16});
    let files = Files::new(config, [24, 48]).with("qweight", Dtype::I32, &[48, 3]);
    files.with("qzeros", Dtype::I32, &[3, 3]).with("scales", Dtype::F16, &[3, 24])
}

/// Returns files in which the rows do not fill the last word, and the last group has half the
/// inputs.
fn packed(group: Option<usize>, order: Option<&str>) -> Files {
    let strategy = if group.is_some() { "group" } else { "channel" };
    let weights = json!({"num_bits": 4, "type": "int", "strategy": strategy,
        "group_size": group, "actorder": order});
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"a": {"weights": weights, "input_activations": null}}});
    let groups = group.map_or(1, |_| 3);
    let files = Files::new(config, [21, 40]).with("weight_packed", Dtype::I32, &[21, 5]);
    files.with("weight_scale", Dtype::BF16, &[21, groups]).listing("weight_shape", &[21, 40])
}

/// Returns a shuffled group index per input.
fn shuffled(inputs: usize) -> Vec<i32> {
    (0..inputs).map(|input| (input * 7 % inputs / 16) as i32).collect()
}

/// Returns a matrix of each format, and the definition of its elements.
fn forms() -> Vec<(Files, Definition)> {
    fn float(files: &Files, row: usize, input: usize) -> f32 {
        let (_, dtype, ..) = files.tensors[0];
        let form = if dtype == Dtype::F8_E5M2 { CodeForm::E5m2 } else { CodeForm::E4m3 };
        let mut value = [0.0];
        form.unpack(&files.bytes("weight")[row * 40 + input..][..1], 1, &(0..1), 1, &mut value);
        value[0]
    }
    let first: Definition = |files, row, input| {
        let group = files.group("g_idx", 16, input);
        let zero = (files.nibble("qzeros", group * 3 + row / 8, row % 8) + 1.0) % 16.0;
        let code = files.nibble("qweight", input / 8 * 24 + row, input % 8);
        (code - zero) * files.number("scales", group * 24 + row)
    };
    let second: Definition = |files, row, input| {
        let zero = files.nibble("qzeros", input / 16 * 3 + row / 8, row % 8);
        let code = files.nibble("qweight", input / 8 * 24 + row, input % 8);
        (code - zero) * files.number("scales", input / 16 * 24 + row)
    };
    let of_awq: Definition = |files, row, input| {
        let place = AWQ_ORDER[row % 8];
        let zero = files.nibble("qzeros", input / 16 * 3 + row / 8, place);
        let code = files.nibble("qweight", input * 3 + row / 8, place);
        (code - zero) * files.number("scales", input / 16 * 24 + row)
    };
    let of_packed: Definition = |files, row, input| {
        let groups = files.bytes("weight_scale").len() / 2 / 21;
        let group = if groups == 1 { 0 } else { files.group("weight_g_idx", 16, input) };
        let zero = match files.has("weight_zero_point") {
            true => files.nibble("weight_zero_point", row / 8 * groups + group, row % 8),
            false => 8.0,
        };
        let code = files.nibble("weight_packed", row * 5 + input / 8, input % 8);
        (code - zero) * files.number("weight_scale", row * groups + group)
    };
    let (e4m3, e5m2) = (Dtype::F8_E4M3, Dtype::F8_E5M2);
    let v2 = json!({"checkpoint_format": "gptq_v2"});
    let neighbours: Vec<i32> = (0..48).map(|input| input / 16).collect();
    let form = |files: Files, definition: Definition| (files, definition);
    let float_of_row: Definition =
        |files, row, input| float(files, row, input) * files.number("weight_scale", row);
    let float_of_matrix: Definition =
        |files, row, input| float(files, row, input) * files.number("weight_scale", 0);
    vec![
        form(fp8(Some([3, 16]), e4m3, (Dtype::F32, &[7, 3])), |files, row, input| {
            let block = row / 3 * 3 + input / 16;
            float(files, row, input) * files.number("weight_scale_inv", block)
        }),
        form(fp8(Some([5, 64]), e5m2, (Dtype::BF16, &[5, 1])), |files, row, input| {
            float(files, row, input) * files.number("weight_scale_inv", row / 5)
        }),
        form(fp8(None, e4m3, (Dtype::F16, &[21, 1])), float_of_row),
        form(fp8(None, e5m2, (Dtype::F32, &[21])), float_of_row),
        form(fp8(None, e4m3, (Dtype::F32, &[])), float_of_matrix),
        form(fp8(None, e4m3, (Dtype::BF16, &[1])), float_of_matrix),
        form(gptq(&json!({})), first),
        form(gptq(&json!({})).listing("g_idx", &neighbours), first),
        form(gptq(&json!({"desc_act": true})).listing("g_idx", &shuffled(48)), first),
        form(gptq(&v2), second),
        form(awq(), of_awq),
        form(packed(Some(16), None), of_packed),
        form(packed(None, None), of_packed),
        form(packed(Some(16), None).with("weight_zero_point", Dtype::I32, &[3, 3]), of_packed),
        form(
            packed(Some(16), Some("group"))
                .with("weight_zero_point", Dtype::I32, &[3, 3])
                .listing("weight_g_idx", &shuffled(40)),
            of_packed,
        ),
    ]
}

#[track_caller]
fn assert_same(found: &[f32], wanted: &[f32]) {
    assert_eq!(found.len(), wanted.len());
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let same = found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan();
        assert!(same, "{at}: {found} and {wanted}");
    }
}

#[test]
fn every_element_is_what_its_form_says() {
    for (files, definition) in forms() {
        let [rows, inputs] = files.shape;
        let element = |at: usize| definition(&files, at / inputs, at % inputs);
        let wanted: Vec<f32> = (0..rows * inputs).map(element).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoint = files.open(folder.path()).expect("a checkpoint");
        assert_eq!(checkpoint.shapes()[WEIGHT], [rows, inputs]);
        let mut bytes = vec![0; rows * inputs * 4];
        checkpoint.read(WEIGHT, TorchNumber::Float32, &mut bytes).expect("a matrix");
        let found: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|&it| f32::from_le_bytes(it)).collect();
        assert_same(&found, &wanted);
        let mut bytes = vec![0; rows * inputs * 2];
        checkpoint.read(WEIGHT, TorchNumber::Bfloat16, &mut bytes).expect("a matrix");
        let found: Vec<f32> =
            bytes.as_chunks::<2>().0.iter().map(|&it| bf16::from_le_bytes(it).to_f32()).collect();
        let rounded: Vec<f32> =
            wanted.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
        assert_same(&found, &rounded);
        // Any range of rows can be read, with any sizes of bands and of parts of bands.
        let matrix = &checkpoint.quantised()[0];
        for (some, sizes) in
            [(0..rows, [8, 8]), (3..rows, [16, 8]), (9..10, [8, 8]), (2..17, [24, 16])]
        {
            let mut found = Vec::new();
            let mut add = |values: &[f32]| {
                found.extend_from_slice(values);
                Ok(())
            };
            matrix.multiply_out(&some, sizes, &mut add).expect("rows");
            assert_same(&found, &wanted[some.start * inputs..some.end * inputs]);
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_in_one_line() {
    let without = |files: Files, end: &str| {
        let mut files = files;
        files.tensors.retain(|(other, ..)| *other != end);
        files
    };
    let floats = fp8(None, Dtype::F8_E4M3, (Dtype::F32, &[21]));
    let listed = |values: &[i32]| gptq(&json!({"desc_act": true})).listing("g_idx", values);
    let mut full = shuffled(48);
    full[5] = (full[5] + 1) % 3;
    let (mut beyond, mut below) = (shuffled(48), shuffled(48));
    (beyond[7], below[7]) = (3, -1);
    for (files, why) in [
        (fp8(Some([3, 16]), Dtype::F8_E4M3, (Dtype::F32, &[7, 2])), "weight_scale_inv is [7, 2]"),
        (fp8(None, Dtype::F8_E4M3, (Dtype::F32, &[20])), "weight_scale is [20]"),
        (fp8(None, Dtype::F8_E4M3, (Dtype::U8, &[21])), "weight_scale is of the type U8"),
        (without(floats, "weight_scale"), "no model.layers.0.self_attn.o_proj.weight_scale"),
        (without(awq(), "qzeros"), "no model.layers.0.self_attn.o_proj.qzeros"),
        (without(gptq(&json!({})), "scales"), "no model.layers.0.self_attn.o_proj.scales"),
        (
            without(packed(None, None), "weight_shape"),
            "no model.layers.0.self_attn.o_proj.weight_shape",
        ),
        (listed(&full), "groups that are not of 16 inputs each"),
        (listed(&beyond), "groups that are not of 16 inputs each"),
        (listed(&below), "groups that are not of 16 inputs each"),
        (listed(&[0; 48]), "groups that are not of 16 inputs each"),
        (listed(&[0; 40]), "g_idx is [40]"),
        (gptq(&json!({})).listing("g_idx", &shuffled(48)), "the config does not say so"),
        (
            without(packed(None, None), "weight_shape").listing("weight_shape", &[21, 36]),
            "is [21, 36] by its weight_shape",
        ),
        (without(awq(), "qzeros").with("qzeros", Dtype::F32, &[3, 3]), "qzeros is of the type F32"),
        (
            packed(Some(16), None).with("weight_zero_point", Dtype::I32, &[21, 3]),
            "weight_zero_point is [21, 3]",
        ),
    ] {
        let said = files.refused();
        assert!(said.contains(why), "{said}");
    }
}

proptest! {
    /// A damaged header or damaged data gives an error, or values from the bytes in the file.
    #[test]
    fn hostile_files_are_refused_or_read_within_themselves(
        form in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(),
        value in any::<u8>(), other in any::<prop::sample::Index>(), text in "[0-9,\\[\\]FIU_E]",
    ) {
        let mut forms = forms();
        let (files, _) = forms.swap_remove(form.index(forms.len()));
        let folder = tempfile::tempdir().expect("a folder");
        let paths = files.write(&folder.path().join("m.safetensors"));
        let mut bytes = std::fs::read(&paths[0]).expect("a file");
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
        // Change one byte anywhere, and one byte in the header, such that the header usually stays
        // readable.
        let (at, other) = (at.index(bytes.len()), 8 + other.index(header - 8));
        bytes[at] = value;
        bytes[other] = text.as_bytes()[0];
        std::fs::write(&paths[0], &bytes).expect("written");
        let Ok(checkpoint) = Checkpoint::open("safetensors", &paths, &files.of_model()) else {
            return Ok(());
        };
        for (name, shape) in checkpoint.shapes() {
            let elements: usize = shape.iter().product();
            prop_assert!(elements <= 2 * bytes.len(), "{shape:?} of {} bytes", bytes.len());
            let mut read = vec![0; elements * 4];
            // Success and errors are both fine, but the read has to return.
            let _ = checkpoint.read(name, TorchNumber::Float32, &mut read);
        }
    }
}
