//! Writes the tables of `docs/features.md` about families: `make families`.

use std::path::Path;

use forebay_weights::families::{families_page, not_served_page};

fn main() -> std::io::Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/features.md");
    let mut page = std::fs::read_to_string(&path)?;
    for (mark, table) in [("families", families_page()), ("not served", not_served_page())] {
        let begin = format!("<!-- {mark}: made by `make families` -->\n");
        let (before, rest) = page.split_once(&begin).expect("the page has the mark");
        let (_, after) = rest.split_once("<!-- end -->").expect("the mark has an end");
        page = format!("{before}{begin}\n{table}\n<!-- end -->{after}");
    }
    std::fs::write(path, page)
}
