//! Removes `{% generation %}`, the tag with which transformers marks assistant text for training
//! masks.

/// Replaces `{% generation %}` and `{% endgeneration %}` in the source by a `with` block, which
/// opens a scope, as the tag does, and has no other effect. Whitespace control marks are kept;
/// comments, raw blocks and strings stay unchanged.
pub(crate) fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut raw = false;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = match rest.as_bytes().get(1) {
            Some(b'#') if !raw => rest.find("#}").map_or(rest.len(), |end| end + 2),
            Some(b'{') if !raw => tag_length(rest, "}}"),
            Some(b'%') => {
                let length = tag_length(rest, "%}");
                let tag = &rest[..length];
                let name = tag_name(tag);
                match name {
                    "raw" => raw = true,
                    "endraw" => raw = false,
                    _ => {}
                }
                let replacement = match name {
                    "generation" => Some("with"),
                    "endgeneration" => Some("endwith"),
                    _ => None,
                };
                if let Some(replacement) = replacement.filter(|_| !raw) {
                    out.push_str(&tag.replacen(name, replacement, 1));
                    rest = &rest[length..];
                    continue;
                }
                // Inside a raw block only the end tag counts: other text may have unbalanced
                // quotes.
                if raw && name != "raw" { 1 } else { length }
            }
            _ => 1,
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out.push_str(rest);
    out
}

/// Returns the length of the tag at the start of `text`, including its `end`. An `end` inside a
/// string does not count.
fn tag_length(text: &str, end: &str) -> usize {
    let mut quote = None;
    let mut skip = false;
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            _ if skip => skip = false,
            Some(_) if c == '\\' => skip = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if text[at..].starts_with(end) => return at + end.len(),
            None if c == '\'' || c == '"' => quote = Some(c),
            None => {}
        }
    }
    text.len()
}

/// Returns the first word of a `{% tag %}`.
fn tag_name(tag: &str) -> &str {
    let inner = tag.trim_start_matches("{%").trim_start_matches(['-', '+']).trim_start();
    let end = inner.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(inner.len());
    &inner[..end]
}

#[cfg(test)]
mod tests {
    use super::without_generation_marks;

    #[test]
    fn only_tags_are_replaced() {
        let cases = [
            ("a{% generation %}b{%- endgeneration -%}c", "a{% with %}b{%- endwith -%}c"),
            ("{%-generation-%}{%endgeneration%}", "{%-with-%}{%endwith%}"),
            ("{# {% generation %} #}", "{# {% generation %} #}"),
            ("{% raw %}{% generation %}'{% endraw %}", "{% raw %}{% generation %}'{% endraw %}"),
            ("{{ '{% generation %}' }}", "{{ '{% generation %}' }}"),
            ("{{ 'it\\'s }}' }}{% generation %}", "{{ 'it\\'s }}' }}{% with %}"),
            ("{% set generation = 1 %}{ % {", "{% set generation = 1 %}{ % {"),
            (
                "{% raw %}{% it's %}{% endraw %}{% generation %}",
                "{% raw %}{% it's %}{% endraw %}{% with %}",
            ),
            ("{% unclosed", "{% unclosed"),
        ];
        for (source, expected) in cases {
            assert_eq!(without_generation_marks(source), expected);
        }
    }
}
