//! The names of several models.

use std::collections::HashMap;

use super::ModelEntry;
use crate::names::LATEST;

/// Maps each name to the index of its model.
#[derive(Debug)]
pub(crate) struct NameIndex(HashMap<String, usize>);

impl NameIndex {
    /// Adds `:latest` names to the aliases of each model, and indexes all names.
    ///
    /// # Errors
    /// Two models have the same name.
    pub(crate) fn new(entries: &mut [ModelEntry]) -> Result<Self, String> {
        let mut index = HashMap::new();
        for (model, entry) in entries.iter_mut().enumerate() {
            let own: Vec<String> = entry.names.iter().chain(&entry.aliases).cloned().collect();
            for name in own {
                let other = index.insert(name.clone(), model).filter(|&other| other != model);
                if other.is_some() {
                    return Err(format!(
                        "the name `{name}` means two models: --served-model-name in an entry of --models-config gives one of them another name"
                    ));
                }
            }
        }
        for (model, entry) in entries.iter_mut().enumerate() {
            let own: Vec<String> = entry.names.iter().chain(&entry.aliases).cloned().collect();
            for name in own {
                let latest = name + LATEST;
                // A configured name has priority.
                if !index.contains_key(&latest) {
                    index.insert(latest.clone(), model);
                    entry.aliases.push(latest);
                }
            }
        }
        Ok(Self(index))
    }

    /// Returns the index of the model with this name.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.0.get(name).copied()
    }
}

#[cfg(test)]
mod tests {
    use forebay_api::GenerationDefaults;
    use forebay_fleet::FleetModel;
    use serde_json::Map;

    use super::*;
    use crate::facts::ModelFacts;

    fn entry(names: &[&str], aliases: &[&str]) -> ModelEntry {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        ModelEntry {
            names: owned(names),
            aliases: owned(aliases),
            root: String::new(),
            facts: ModelFacts::new("gguf", &Map::new(), None, ""),
            stored_bytes: 0,
            generates: true,
            defaults: GenerationDefaults::default(),
            template: String::new(),
            context_length: 1,
            measures: true,
            plan: FleetModel::default(),
        }
    }

    #[test]
    fn exact_names_go_before_the_suffix() {
        let mut entries = [entry(&["a", "org/a:Q4_K_M"], &["small"]), entry(&["a:latest"], &[])];
        let index = NameIndex::new(&mut entries).expect("unique names");
        for (name, model) in [
            ("a", Some(0)),
            ("small:latest", Some(0)),
            ("org/a:Q4_K_M", Some(0)),
            ("a:latest", Some(1)),
            ("a:latest:latest", Some(1)),
            ("A", None),
            ("org/a", None),
        ] {
            assert_eq!(index.find(name), model, "{name}");
        }
        assert!(entries[0].aliases.contains(&"small:latest".to_owned()));
        assert!(!entries[0].aliases.contains(&"a:latest".to_owned()));
    }

    #[test]
    fn a_name_of_two_models_is_refused() {
        let mut entries = [entry(&["a"], &["b"]), entry(&["b"], &[])];
        let error = NameIndex::new(&mut entries).expect_err("two models");
        assert!(error.contains("`b` means two models"), "{error}");
        let mut twice = [entry(&["a", "a"], &["a"])];
        assert!(NameIndex::new(&mut twice).is_ok(), "a model may have a name twice");
    }
}
