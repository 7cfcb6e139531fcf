use std::sync::Arc;

use super::*;

/// Layers of hidden size 8, with 8 query and 4 key elements, and an inner size of 6 where there is
/// a dense network. The third layer reads another layer's keys. The last layer has only a dense
/// network without gates.
fn sizes() -> AdapterSizes {
    let layers = [[8, 4, 4, 6, 6], [8, 4, 0, 0, 0], [8, 0, 0, 0, 0], [0, 0, 0, 0, 6]];
    AdapterSizes::new(Dtype::Float32, 8, layers)
}

fn matrices(layer: usize, module: AdaptedModule, rank: usize) -> ModuleMatrices {
    let [inputs, outputs] = sizes().of(layer, module).expect("a module");
    let (a, b) = (vec![0; 4 * rank * inputs], vec![0; 4 * rank * outputs]);
    ModuleMatrices { layer, module, rank, a, b }
}

#[test]
fn what_does_not_fit_is_refused() {
    use AdaptedModule::{Down, Gate, Key, Query, Up, Value};
    let pack = |modules| AdapterMatrices::pack(&sizes(), modules);
    let good = pack(vec![matrices(0, Up, 3), matrices(1, Query, 1)]).expect("an adapter");
    assert!(good.changes_gates() && good.beside(0, Product::Qkv).is_none());
    let up = good.beside(0, Product::GateUp).expect("a product");
    // Odd ranks are padded, and the outputs of the up projection follow those of the gate
    // projection.
    assert_eq!((up.rank, up.parts[0].first, up.parts[0].outputs), (4, 6, 6));
    assert_eq!(sizes().of(1, Down), None, "the layer has no dense part");
    assert_eq!(sizes().of(1, Value), None, "values that are keys");
    assert_eq!([Key, Value].map(|module| sizes().of(2, module)), [None; 2]);
    let ungated = pack(vec![matrices(3, Up, 2), matrices(3, Down, 2)]).expect("an adapter");
    let up = ungated.beside(3, Product::GateUp).expect("a product");
    assert_eq!((up.parts[0].first, up.parts[0].outputs, sizes().of(3, Gate)), (0, 6, None));
    for bad in [
        vec![ModuleMatrices { layer: 1, ..matrices(0, Up, 2) }],
        vec![ModuleMatrices { rank: 2, ..matrices(0, Query, 3) }],
        vec![matrices(0, Query, 0)],
        vec![matrices(0, Query, 1), matrices(0, Query, 1)],
    ] {
        assert!(matches!(pack(bad), Err(PackError::Unfit(_))));
    }
}

#[test]
fn every_token_of_an_adapter_is_in_its_group() {
    let adapter = || AdapterMatrices::pack(&sizes(), vec![matrices(0, AdaptedModule::Key, 1)]);
    let [one, other] = [(); 2].map(|()| Arc::new(adapter().expect("an adapter")));
    let rows = [Some(one.clone()), None, Some(other), Some(one)];
    let groups = Groups::of(&rows, &[2, 1, 3, 1], &[1, 2, 4, 5, 6]).expect("adapters");
    let adapted = |whole| {
        let mut buffers = Buffers::<f32>::default();
        let adapted = buffers.prepare(&groups, (7, 1, 6));
        let found = adapted.groups((0, Product::Qkv), whole).expect("a product that changes");
        let of = |group: &groups::Group<'_>| (group.tokens.clone(), group.first);
        found.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(adapted(true), [(vec![0, 1, 6], 0), (vec![3, 4, 5], 3)]);
    assert_eq!(adapted(false), [(vec![0, 4], 0), (vec![2, 3], 2)]);
    assert!(Groups::of(&[None, None], &[1, 1], &[0]).is_none());
}
