//! Checks that the files generated from the column declarations are up to date.

#[path = "../examples/columns.rs"]
#[allow(dead_code, reason = "the program's main function")]
mod columns;

#[test]
fn python_and_the_page_have_the_declared_columns() {
    for (path, text) in columns::files().expect("the page") {
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == text, "{} is stale: run `make columns`", path.display());
    }
}
