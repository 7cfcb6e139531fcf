//! Prompts of completions: text or token ids, one or many.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

use crate::error::ApiError;

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A text to be tokenised.
    Text(String),
    /// Token ids, each below the vocabulary size.
    Tokens(Vec<i32>),
}

/// The `prompt` parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompts {
    /// A string.
    Text(String),
    /// A list of strings.
    Texts(Vec<String>),
    /// A list of token ids.
    Tokens(Vec<i32>),
    /// A list of lists of token ids.
    TokenLists(Vec<Vec<i32>>),
}

impl Default for Prompts {
    fn default() -> Self {
        Self::Texts(Vec::new())
    }
}

impl Prompts {
    /// True if the parameter is a list of prompts.
    pub fn is_many(&self) -> bool {
        matches!(self, Self::Texts(_) | Self::TokenLists(_))
    }

    /// True if the single prompt, or the list of prompts, is empty.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Texts(texts) => texts.is_empty(),
            Self::Tokens(ids) => ids.is_empty(),
            Self::TokenLists(lists) => lists.is_empty(),
        }
    }

    /// Checks the ids against the vocabulary and returns the prompts one by one.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] names the parameter at fault, `param` or one of its elements: there is
    /// no prompt, a list of ids is empty, or an id is out of range.
    pub fn validate(self, param: &str, vocab_size: u32) -> Result<Vec<Prompt>, ApiError> {
        let prompts: Vec<Prompt> = match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::Tokens(ids) => {
                check_ids(&ids, param, vocab_size)?;
                vec![Prompt::Tokens(ids)]
            }
            Self::TokenLists(lists) => {
                for (index, ids) in lists.iter().enumerate() {
                    check_ids(ids, &format!("{param}[{index}]"), vocab_size)?;
                }
                lists.into_iter().map(Prompt::Tokens).collect()
            }
        };
        if prompts.is_empty() {
            return Err(ApiError::invalid(param, format!("`{param}`: at least one is needed")));
        }
        Ok(prompts)
    }
}

fn check_ids(ids: &[i32], param: &str, vocab_size: u32) -> Result<(), ApiError> {
    if ids.is_empty() {
        return Err(ApiError::invalid(param, format!("`{param}`: at least one token is needed")));
    }
    let Some(bad) = ids.iter().position(|&id| !in_vocabulary(id, vocab_size)) else {
        return Ok(());
    };
    Err(ApiError::invalid(
        format!("{param}[{bad}]"),
        format!("`{param}[{bad}]`: token id {} is not below {vocab_size}", ids[bad]),
    ))
}

/// True if `id` is within the vocabulary.
pub(crate) fn in_vocabulary(id: i32, vocab_size: u32) -> bool {
    u32::try_from(id).is_ok_and(|id| id < vocab_size)
}

/// An element of the `prompt` list. All elements must have the type of the first one.
enum Element {
    Text(String),
    Id(i32),
    Ids(Vec<i32>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }
            fn visit_str<E>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Text(text.to_owned()))
            }
            fn visit_string<E>(self, text: String) -> Result<Element, E> {
                Ok(Element::Text(text))
            }
            fn visit_i64<E: Error>(self, id: i64) -> Result<Element, E> {
                let out_of_range = || E::custom(format_args!("token id {id} is out of range"));
                i32::try_from(id).map(Element::Id).map_err(|_| out_of_range())
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
                let out_of_range = || E::custom(format_args!("token id {id} is out of range"));
                i32::try_from(id).map(Element::Id).map_err(|_| out_of_range())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element()? {
                    ids.push(id);
                }
                Ok(Element::Ids(ids))
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of strings, or a list (of lists) of token ids")
            }
            fn visit_str<E>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts::Text(text.to_owned()))
            }
            fn visit_string<E>(self, text: String) -> Result<Prompts, E> {
                Ok(Prompts::Text(text))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompts, A::Error> {
                let mut prompts = match seq.next_element()? {
                    None => return Ok(Prompts::Texts(Vec::new())),
                    Some(Element::Text(text)) => Prompts::Texts(vec![text]),
                    Some(Element::Id(id)) => Prompts::Tokens(vec![id]),
                    Some(Element::Ids(ids)) => Prompts::TokenLists(vec![ids]),
                };
                while let Some(element) = seq.next_element()? {
                    match (&mut prompts, element) {
                        (Prompts::Texts(texts), Element::Text(text)) => texts.push(text),
                        (Prompts::Tokens(ids), Element::Id(id)) => ids.push(id),
                        (Prompts::TokenLists(lists), Element::Ids(ids)) => lists.push(ids),
                        _ => return Err(A::Error::custom("the elements have different types")),
                    }
                }
                Ok(prompts)
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}

/// A string or a list of strings, as in `stop`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings(pub Vec<String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = Strings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E>(self, text: &str) -> Result<Strings, E> {
                Ok(Strings(vec![text.to_owned()]))
            }
            fn visit_unit<E>(self) -> Result<Strings, E> {
                Ok(Strings::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Strings, A::Error> {
                let mut strings = Vec::new();
                while let Some(text) = seq.next_element()? {
                    strings.push(text);
                }
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_any(StringsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CompletionRequest;

    fn prompts(json: &str) -> Prompts {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn four_shapes() {
        assert_eq!(prompts(r#""a""#), Prompts::Text("a".into()));
        assert_eq!(prompts(r#"["a","\n"]"#), Prompts::Texts(vec!["a".into(), "\n".into()]));
        assert_eq!(prompts("[1,2]"), Prompts::Tokens(vec![1, 2]));
        assert_eq!(prompts("[[1],[2,3]]"), Prompts::TokenLists(vec![vec![1], vec![2, 3]]));
    }

    #[test]
    fn wrong_shapes_point_at_the_element() {
        let cases = [
            (r#"{"prompt":["a",1]}"#, "prompt"),
            (r#"{"prompt":[1,{}]}"#, "prompt[1]"),
            (r#"{"prompt":[[1,"x"]]}"#, "prompt[0][1]"),
            (r#"{"prompt":[1,99999999999]}"#, "prompt[1]"),
            (r#"{"prompt":7}"#, "prompt"),
        ];
        for (body, expected) in cases {
            match crate::parse_request::<CompletionRequest>(body.as_bytes(), |_| Ok(())) {
                Err(ApiError::Invalid { param, .. }) => assert_eq!(param, expected, "{body}"),
                other => panic!("{body}: {other:?}"),
            }
        }
    }

    #[test]
    fn ids_are_checked_against_the_vocabulary() {
        let param = |prompts: Prompts| match prompts.validate("prompt", 10) {
            Err(ApiError::Invalid { param, .. }) => param,
            other => panic!("{other:?}"),
        };
        assert_eq!(param(Prompts::Tokens(vec![9, 10])), "prompt[1]");
        assert_eq!(param(Prompts::Tokens(vec![-1])), "prompt[0]");
        assert_eq!(param(Prompts::Tokens(vec![])), "prompt");
        assert_eq!(param(Prompts::Texts(vec![])), "prompt");
        assert_eq!(param(Prompts::TokenLists(vec![vec![1], vec![2, 11]])), "prompt[1][1]");
        assert_eq!(
            Prompts::TokenLists(vec![vec![9]]).validate("prompt", 10),
            Ok(vec![Prompt::Tokens(vec![9])])
        );
    }
}
