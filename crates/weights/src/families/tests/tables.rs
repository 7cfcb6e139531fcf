use std::path::Path;

use crate::families::{ALL, NOT_SERVED, families_page, not_served_page};

/// `cargo run -p forebay-weights --example families` writes the tables.
#[test]
fn the_page_of_features_has_the_families() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/features.md");
    let page = std::fs::read_to_string(path).expect("the page");
    for (mark, table) in [("families", families_page()), ("not served", not_served_page())] {
        let found = page.split_once(&format!("<!-- {mark}: made by `make families` -->\n"));
        let found = found.and_then(|(_, rest)| rest.split_once("<!-- end -->"));
        assert_eq!(found.map(|(found, _)| found.trim()), Some(table.trim()), "run `make families`");
    }
}

/// Families that are not the first with their `model_type`. Only `architectures` selects them.
const OF_OTHER_TYPES: [&str; 2] = ["Gemma3TextModel", "ModernBertForSequenceClassification"];

#[test]
fn no_name_means_two_families() {
    for (at, family) in ALL.iter().enumerate() {
        for other in &ALL[..at] {
            assert_ne!(family.architecture, other.architecture);
            if !OF_OTHER_TYPES.contains(&family.architecture) {
                assert_ne!(family.model_type, other.model_type);
            }
            assert_ne!(family.title, other.title);
        }
        for (name, gguf, _) in NOT_SERVED {
            assert_ne!(family.architecture, name);
            assert!(gguf.is_empty() || family.gguf_architecture() != Some(gguf));
        }
    }
}
