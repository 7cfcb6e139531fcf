//! Checks the tables of docs/api.md and docs/trust.md that are generated from the parameter tables.
//!
//! With `RECORD=1` the test writes the tables instead.

use std::collections::BTreeSet;
use std::path::PathBuf;

use forebay_api::limits::{Bound, DEPTH, Param, Params, VALUES};
use forebay_api::{Field, ROUTES};

/// The generated text of a page between two markers.
struct Generated {
    page: &'static str,
    /// The name in both markers.
    name: &'static str,
    text: String,
}

impl Generated {
    fn check(&self) {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(self.page);
        let page = std::fs::read_to_string(&path).expect("a page");
        let begin = format!("<!-- {}: made by crates/api/tests/pages.rs -->\n", self.name);
        let end = format!("<!-- end of {} -->", self.name);
        let start = page.find(&begin).expect("a mark") + begin.len();
        let stop = start + page[start..].find(&end).expect("a mark of the end");
        if std::env::var_os("RECORD").is_some() {
            let made = [&page[..start], &self.text, &page[stop..]].concat();
            std::fs::write(&path, made).expect("a page");
            return;
        }
        assert_eq!(&page[start..stop], self.text, "RECORD=1 writes {} anew", self.page);
    }
}

fn fields(path: &str) -> Vec<Field> {
    let route = ROUTES.iter().find(|route| route.path == path).expect("a route");
    (route.fields)().into_iter().filter(|field| !(field.is_served && field.is_hidden)).collect()
}

#[test]
fn fields_of_chat_and_completions() {
    let (chat, completions) = (fields("/v1/chat/completions"), fields("/v1/completions"));
    let fate = |name: &str, of: &[Field], other: &[Field]| {
        let find =
            |list: &[Field]| list.iter().find(|field| field.name == name).map(|f| f.is_served);
        match (find(of), find(other)) {
            (Some(true), _) => "yes",
            (Some(false), _) => "400",
            (None, Some(true)) => "-",
            (None, _) => "named",
        }
    };
    let mut text = "| field | chat | completions | |\n|---|---|---|---|\n".to_owned();
    let (served, refused): (Vec<&Field>, Vec<&Field>) =
        chat.iter().chain(&completions).partition(|field| field.is_served);
    let mut named = BTreeSet::new();
    for field in served.into_iter().chain(refused) {
        if !named.insert(field.name) {
            continue;
        }
        let (name, told) = (field.name, [field.description, field.note].join(" "));
        let [of_chat, of_completions] =
            [fate(name, &chat, &completions), fate(name, &completions, &chat)];
        text += &format!("| `{name}` | {of_chat} | {of_completions} | {} |\n", told.trim());
    }
    let table = Generated { page: "api.md", name: "fields of chat and completions", text };
    table.check();
}

/// Formats a number with spaces between its thousands.
fn shown(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) && digits.len() > 4 {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// Describes a limit in words; `None` if the value has no size, or only the model limits it.
fn limit(bound: Bound) -> Option<String> {
    let entries = |most: usize| Some(format!("{} entries", shown(most)));
    match bound {
        Bound::Number { least, most } if most < f64::from(i32::MAX) => {
            let from =
                if least > 0.0 && least < 1e-9 { "above 0".into() } else { least.to_string() };
            Some(format!("from {from} to {most}"))
        }
        Bound::Text(most) => Some(format!("{} bytes", shown(most))),
        Bound::Form(most) => Some(format!("{} bytes as text", shown(most))),
        Bound::Strings { count, total: usize::MAX, .. } => entries(count),
        Bound::Strings { count, each, total } => {
            let all = format!("{} strings, {} bytes in all", shown(count), shown(total));
            Some(if each < total { format!("{all}, {} each", shown(each)) } else { all })
        }
        Bound::Ids(most) | Bound::Biases(most) | Bound::Prompts(most) | Bound::Embeds(most) => {
            entries(most)
        }
        Bound::Documents(most, _) | Bound::Objects(most, _) | Bound::Messages(most, _) => {
            entries(most)
        }
        Bound::Tree => {
            Some(format!("{} values together, nested at most {DEPTH} deep", shown(VALUES)))
        }
        _ => None,
    }
}

/// Adds the parameters that have a limit. A parameter inside an object gets the object's name as a
/// prefix.
fn add(found: &mut Vec<(String, BTreeSet<String>)>, path: &str, params: Params) {
    for Param { name, bound } in params.iter().flat_map(|group| group.iter()) {
        let name = format!("{path}{name}");
        if let Some(limit) = limit(*bound) {
            match found.iter_mut().find(|(known, _)| *known == limit) {
                Some((_, names)) => _ = names.insert(name.clone()),
                None => found.push((limit, BTreeSet::from([name.clone()]))),
            }
        }
        match *bound {
            Bound::Object(within) | Bound::Objects(_, within) => {
                add(found, &format!("{name}."), within);
            }
            Bound::Messages(_, within) | Bound::Content(within) | Bound::Documents(_, within) => {
                add(found, &format!("{name}[]."), within);
            }
            _ => {}
        }
    }
}

#[test]
fn limits_of_parameters() {
    let mut found = Vec::new();
    for route in ROUTES {
        add(&mut found, "", route.params);
    }
    let mut text = "| parameter | limit |\n|---|---|\n".to_owned();
    for (limit, names) in found {
        let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
        text += &format!("| {} | {limit} |\n", names.join(", "));
    }
    Generated { page: "trust.md", name: "limits of parameters", text }.check();
}
