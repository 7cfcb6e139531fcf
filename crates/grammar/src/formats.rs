//! Replaces string formats for which llguidance's patterns allow too much: 29 February in every
//! year, and a 60th second at any time.

use serde_json::{Map, Value, json};

/// Matches a date of the Gregorian calendar, from the year 1 on.
const DATE: &str = concat!(
    r"(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-",
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    // Leap years: divisible by 4, but by 100 only if by 400.
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)",
);
/// Matches a time of day with its UTC offset, without leap seconds.
const TIME: &str = concat!(
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?",
    r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
);

/// Replaces the formats `date`, `time` and `date-time` by patterns.
pub(crate) fn spell_out(schema: &mut Map<String, Value>) {
    let pattern = match schema.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("time") => format!("^{TIME}$"),
        Some("date-time") => format!("^{DATE}[tT]{TIME}$"),
        _ => return,
    };
    schema.remove("format");
    if !schema.contains_key("pattern") {
        schema.insert("pattern".to_owned(), pattern.into());
        return;
    }
    let both = schema.entry("allOf").or_insert_with(|| json!([]));
    if let Some(all) = both.as_array_mut() {
        all.push(json!({ "pattern": pattern }));
    }
}

/// Returns the regular expression for a whole string of format `name`. Some expressions allow less
/// than the standard; none allows more.
pub(crate) fn plain(name: &str) -> Option<&'static str> {
    Some(match name {
        "uuid" => r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
        "email" => {
            r"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+"
        }
        "hostname" => r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)*",
        "ipv4" => {
            r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
        }
        "uri" => {
            r"[A-Za-z][A-Za-z0-9+.\-]*://[A-Za-z0-9.\-]+(:[0-9]{1,4})?(/[A-Za-z0-9._~!$&'()*+,;=:@?/\-]*)?"
        }
        _ => return None,
    })
}
