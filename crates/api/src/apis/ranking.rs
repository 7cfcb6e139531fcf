//! `/rerank` and `/score`: scores of pairs of texts.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::limits::{Bound, INPUTS, PAIR_BYTES, Param};
use crate::parameter::generation::*;
use crate::parameter::{Line, component, own, refused, tabled};
use crate::pooling::{PoolingUsage, check_inputs, check_truncate};
use crate::prompt::Strings;
use crate::salt::check_salt;
use crate::sampling::Limits;

/// A request to sort documents by relevance to a query, in the format of Jina and Cohere.
#[derive(Debug, Default)]
pub struct RerankRequest {
    /// The name of the model; `None` means the served one.
    pub model: Option<String>,
    query: String,
    documents: Vec<Document>,
    top_n: Option<usize>,
    return_documents: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    use_activation: Option<bool>,
    priority: Option<i32>,
    cache_salt: Option<String>,
}

#[rustfmt::skip]
const RERANK: &[Line<RerankRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("query", Bound::Prompt, "The query.", |r: &mut RerankRequest, v| v.put(&mut r.query)).required(),
    own("documents", Bound::Documents(INPUTS, &[DOCUMENT]), "Strings, or objects with a `text`.", |r: &mut RerankRequest, v| v.put(&mut r.documents)).required(),
    own("top_n", count(0), "Return this many of the best documents; all if absent or 0.", |r, v| v.put(&mut r.top_n)),
    own("use_activation", Bound::Flag, ACTIVATION, |r: &mut RerankRequest, v| v.put(&mut r.use_activation)).also(ACTIVATIONS),
    own("return_documents", Bound::Flag, "Return the documents' texts too; true if absent.", |r, v| v.put(&mut r.return_documents)),
    own("truncate_prompt_tokens", COUNT_OR_ALL, "Cut the documents so that each pair has at most this many tokens; -1: as many as the model takes.", |r, v| v.put(&mut r.truncate_prompt_tokens)),
    own("priority", I32, "The priority; larger is sooner, under the priority policy.", |r, v| v.put(&mut r.priority)),
    own("cache_salt", CACHE_SALT.bound, "Blocks of the texts are shared only with requests of the same salt, 1 to 256 bytes.", |r, v| v.put(&mut r.cache_salt)),
    own("user", NAME, "Accepted, without an effect.", |_, v| v.skip::<Option<String>>()),
];

tabled!(
    RerankRequest,
    "Documents to sort by their fit to a query, in the shape of Jina and Cohere.",
    [RERANK]
);

pub(crate) const DOCUMENT: &[Param] = &[param("text", Bound::Prompt)];

const ACTIVATION: &str =
    "False: the model's own scores, without a sigmoid that its authors may use.";
/// The bound of a text or a list of texts.
const TEXTS: Bound = Bound::Strings { count: INPUTS, each: usize::MAX, total: usize::MAX };

component!(Document);

/// A document of a request.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Document {
    /// The text of the document.
    Plain(String),
    /// Cohere's form.
    Object {
        /// The text of the document.
        text: String,
    },
}

// A derived untagged enum would buffer the whole object before it finds the text.
impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DocumentVisitor;
        impl<'de> Visitor<'de> for DocumentVisitor {
            type Value = Document;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an object with a `text`")
            }
            fn visit_str<E>(self, text: &str) -> Result<Document, E> {
                Ok(Document::Plain(text.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
                let mut found = None;
                while let Some(key) = map.next_key::<Field>()? {
                    match key {
                        Field::Text => found = Some(map.next_value()?),
                        Field::Other => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                let text = found.ok_or_else(|| serde::de::Error::missing_field("text"))?;
                Ok(Document::Object { text })
            }
        }
        deserializer.deserialize_any(DocumentVisitor)
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Field {
    Text,
    #[serde(other)]
    Other,
}

impl Document {
    fn into_text(self) -> String {
        let (Self::Plain(text) | Self::Object { text }) = self;
        text
    }
}

/// A request to score pairs of texts, in the format of vLLM.
#[derive(Debug, Default)]
pub struct ScoreRequest {
    /// The name of the model; `None` means the served one.
    pub model: Option<String>,
    text_1: Option<Strings>,
    text_2: Option<Strings>,
    queries: Option<Strings>,
    documents: Option<Strings>,
    data_1: Option<Strings>,
    data_2: Option<Strings>,
    query: Option<Strings>,
    items: Option<Strings>,
    use_activation: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    priority: Option<i32>,
    cache_salt: Option<String>,
}

#[rustfmt::skip]
const SCORE: &[Line<ScoreRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("text_1", TEXTS, "A string, which is compared with each of `text_2`, or a list of as many strings. `queries`, `data_1` and `query` are its other names.", |r, v| v.put(&mut r.text_1)),
    own("text_2", TEXTS, "A string or a list of strings. `documents`, `data_2` and `items` are its other names.", |r, v| v.put(&mut r.text_2)),
    own("queries", TEXTS, "", |r: &mut ScoreRequest, v| v.put(&mut r.queries)).hidden(),
    own("documents", TEXTS, "", |r: &mut ScoreRequest, v| v.put(&mut r.documents)).hidden(),
    own("data_1", TEXTS, "", |r: &mut ScoreRequest, v| v.put(&mut r.data_1)).hidden(),
    own("data_2", TEXTS, "", |r: &mut ScoreRequest, v| v.put(&mut r.data_2)).hidden(),
    own("query", TEXTS, "", |r: &mut ScoreRequest, v| v.put(&mut r.query)).hidden(),
    own("items", TEXTS, "", |r: &mut ScoreRequest, v| v.put(&mut r.items)).hidden(),
    own("use_activation", Bound::Flag, ACTIVATION, |r: &mut ScoreRequest, v| v.put(&mut r.use_activation)).also(ACTIVATIONS),
    refused("label_token_ids"),
    own("truncate_prompt_tokens", COUNT_OR_ALL, "Cut the second texts so that each pair has at most this many tokens; -1: as many as the model takes.", |r, v| v.put(&mut r.truncate_prompt_tokens)),
    own("priority", I32, "The priority; larger is sooner, under the priority policy.", |r, v| v.put(&mut r.priority)),
    own("cache_salt", CACHE_SALT.bound, "Blocks of the texts are shared only with requests of the same salt, 1 to 256 bytes.", |r, v| v.put(&mut r.cache_salt)),
    own("user", NAME, "Accepted, without an effect.", |_, v| v.skip::<Option<String>>()),
];

tabled!(ScoreRequest, "Texts to compare, in the shape of vLLM.", [SCORE]);

/// Pairs of texts to score, checked except for their lengths.
#[derive(Debug, PartialEq, Eq)]
pub struct Pairs {
    /// The first texts: a single one for all pairs, or one per pair.
    pub first: Vec<String>,
    /// The second texts, one per pair, at least one.
    pub second: Vec<String>,
    /// The number of tokens that a pair is truncated to; `None` for no truncation.
    pub truncate: Option<usize>,
    /// The scheduling priority.
    pub priority: i32,
    /// The salt. Cached blocks are shared only between requests with the same salt.
    pub cache_salt: Option<Arc<str>>,
    /// True if scores are returned without applying the sigmoid.
    pub raw: bool,
    /// The names of the parameters that hold `first` and `second`, for errors.
    pub params: [&'static str; 2],
}

/// A validated rerank request.
#[derive(Debug, PartialEq, Eq)]
pub struct ValidRerank {
    /// The query paired with each document.
    pub pairs: Pairs,
    /// The number of documents to return, at most the number of documents in the request.
    pub top_n: usize,
    /// True if the response includes the texts of the documents.
    pub return_documents: bool,
}

impl RerankRequest {
    /// Checks everything that can be checked before the texts are tokenised.
    ///
    /// # Errors
    /// A parameter is out of range. The error names the first such parameter.
    pub fn validate(self, limits: Limits) -> Result<ValidRerank, ApiError> {
        let second: Vec<String> = self.documents.into_iter().map(Document::into_text).collect();
        let top_n = self.top_n.filter(|&n| n > 0).unwrap_or(second.len()).min(second.len());
        let pairs = Pairs {
            first: vec![self.query],
            second,
            truncate: check_truncate(self.truncate_prompt_tokens, limits)?,
            priority: self.priority.unwrap_or(0),
            cache_salt: check_salt(self.cache_salt.as_deref())?,
            raw: self.use_activation == Some(false),
            params: ["query", "documents"],
        };
        pairs.check()?;
        Ok(ValidRerank { pairs, top_n, return_documents: self.return_documents.unwrap_or(true) })
    }
}

impl ScoreRequest {
    /// Checks everything that can be checked before the texts are tokenised.
    ///
    /// # Errors
    /// A parameter is out of range. The error names the first such parameter.
    pub fn validate(self, limits: Limits) -> Result<Pairs, ApiError> {
        let (first, first_param) = one_of(
            [
                ("text_1", self.text_1),
                ("queries", self.queries),
                ("data_1", self.data_1),
                ("query", self.query),
            ],
            "text_1",
        )?;
        // If the second texts are missing, the error names the counterpart of the parameter that
        // has the first texts.
        let other = match first_param {
            "queries" => "documents",
            "data_1" => "data_2",
            "query" => "items",
            _ => "text_2",
        };
        let (second, second_param) = one_of(
            [
                ("text_2", self.text_2),
                ("documents", self.documents),
                ("data_2", self.data_2),
                ("items", self.items),
            ],
            other,
        )?;
        let params = [first_param, second_param];
        let pairs = Pairs {
            first,
            second,
            truncate: check_truncate(self.truncate_prompt_tokens, limits)?,
            priority: self.priority.unwrap_or(0),
            cache_salt: check_salt(self.cache_salt.as_deref())?,
            raw: self.use_activation == Some(false),
            params,
        };
        pairs.check()?;
        Ok(pairs)
    }
}

/// Returns the texts given under one of several parameter names, and that name. If there are none,
/// the error names `missing`.
fn one_of(
    spellings: [(&'static str, Option<Strings>); 4],
    missing: &'static str,
) -> Result<(Vec<String>, &'static str), ApiError> {
    let mut given = spellings.into_iter().filter_map(|(name, texts)| Some((texts?.0, name)));
    match (given.next(), given.next()) {
        (Some(one), None) => Ok(one),
        (None, _) => Err(ApiError::invalid(missing, format!("`{missing}`: required and missing"))),
        (Some((_, first)), Some((_, second))) => {
            let reason = format!("`{second}`: the texts were already given as `{first}`");
            Err(ApiError::invalid(second, reason))
        }
    }
}

impl Pairs {
    fn check(&self) -> Result<(), ApiError> {
        let (first, second, param) = (self.first.len(), self.second.len(), self.params[1]);
        if second == 0 {
            return Err(ApiError::invalid(param, format!("`{param}`: at least one is needed")));
        }
        if first != 1 && first != second {
            let [name, others] = self.params;
            let reason =
                format!("`{name}`: one text or as many as `{others}` ({second}), not {first}");
            return Err(ApiError::invalid(name, reason));
        }
        check_inputs(param, second)?;
        let bytes = |texts: &[String]| texts.iter().map(String::len).sum::<usize>();
        let times = if first == second { 1 } else { second };
        let total = bytes(&self.first).saturating_mul(times).saturating_add(bytes(&self.second));
        if total > PAIR_BYTES {
            let param = self.params[0];
            let reason = format!("`{param}`: all pairs have {total} bytes, more than {PAIR_BYTES}");
            return Err(ApiError::invalid(param, reason));
        }
        Ok(())
    }

    /// Returns the first text of pair `index`.
    pub fn first_of(&self, index: usize) -> &str {
        self.first.get(index).or(self.first.first()).map_or("", String::as_str)
    }
}

/// Documents, sorted by their relevance to the query.
#[derive(Debug, Serialize, ToSchema)]
pub struct RerankResponse {
    /// `rerank-` and a random number.
    pub id: String,
    /// The name of the model.
    pub model: String,
    /// The token counts of the request.
    pub usage: PoolingUsage,
    /// The documents, the best first.
    pub results: Vec<RerankResult>,
}

/// A document with its score.
#[derive(Debug, Serialize, ToSchema)]
pub struct RerankResult {
    /// The index of the document in the request.
    pub index: usize,
    /// The document, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<RerankDocument>,
    /// The score; larger is better.
    pub relevance_score: f32,
}

/// A document of a response.
#[derive(Debug, Serialize, ToSchema)]
pub struct RerankDocument {
    /// The text of the document.
    pub text: String,
}

/// Scores of pairs.
#[derive(Debug, Serialize, ToSchema)]
pub struct ScoreResponse {
    /// `score-` and a random number.
    pub id: String,
    /// `list`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The scores, one for each pair, in order.
    pub data: Vec<ScoreData>,
    /// The token counts of the request.
    pub usage: PoolingUsage,
}

/// The score of a pair.
#[derive(Debug, Serialize, ToSchema)]
pub struct ScoreData {
    /// The index of the pair.
    pub index: usize,
    /// `score`.
    pub object: &'static str,
    /// The score; larger is better.
    pub score: f32,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::trial::{LIMITS, request};

    fn rerank(body: Value) -> Result<ValidRerank, ApiError> {
        request::<RerankRequest>(&body)?.validate(LIMITS)
    }

    fn score(body: Value) -> Result<Pairs, ApiError> {
        request::<ScoreRequest>(&body)?.validate(LIMITS)
    }

    #[test]
    fn documents_are_strings_or_objects() {
        let valid = rerank(json!({"query": "q", "documents": ["a", {"text": "b"}]})).unwrap();
        assert_eq!(valid.pairs.second, ["a", "b"]);
        assert_eq!((valid.top_n, valid.return_documents), (2, true));
        for (asked, expected) in [(1, 1), (0, 2), (9, 2)] {
            let body = json!({"query": "q", "documents": ["a", "b"], "top_n": asked});
            assert_eq!(rerank(body).unwrap().top_n, expected);
        }
    }

    #[test]
    fn one_text_goes_with_all_or_each_with_its_own() {
        let one = score(json!({"text_1": "a", "text_2": ["b", "c"]})).unwrap();
        assert_eq!([one.first_of(0), one.first_of(1)], ["a", "a"]);
        let each = score(json!({"text_1": ["a", "x"], "text_2": ["b", "c"]})).unwrap();
        assert_eq!([each.first_of(0), each.first_of(1)], ["a", "x"]);
    }

    #[test]
    fn names_of_both_texts_may_be_mixed() {
        for [first, second] in [["queries", "items"], ["query", "documents"], ["data_1", "text_2"]]
        {
            let pairs = score(json!({first: "a", second: ["b", "c"]})).unwrap();
            assert_eq!((pairs.params, pairs.second.len()), ([first, second], 2));
        }
    }

    #[test]
    fn scores_are_raw_without_the_activation() {
        for name in ["use_activation", "activation", "softmax"] {
            for (value, raw) in [(json!(false), true), (json!(true), false), (json!(null), false)] {
                let one = rerank(json!({"query": "q", "documents": ["a"], name: value})).unwrap();
                assert_eq!(one.pairs.raw, raw, "{name}: {value}");
                let one = score(json!({"text_1": "q", "text_2": ["a"], name: value})).unwrap();
                assert_eq!(one.raw, raw, "{name}: {value}");
            }
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let param = |error: ApiError| error.body().error.param.unwrap_or_default();
        for (body, expected) in [
            (json!({"documents": ["a"]}), "query"),
            (json!({"query": "q"}), "documents"),
            (json!({"query": "q", "documents": []}), "documents"),
            (json!({"query": "q", "documents": ["a", 3]}), "documents[1]"),
            (json!({"query": "q", "documents": vec!["a"; 2049]}), "documents"),
            (json!({"query": "q", "documents": ["a"], "top_n": -1}), "top_n"),
            (json!({"query": "q", "documents": ["a"], "cache_salt": ""}), "cache_salt"),
        ] {
            assert_eq!(param(rerank(body.clone()).unwrap_err()), expected, "{body}");
        }
        for (body, expected) in [
            (json!({"text_1": "a"}), "text_2"),
            (json!({"text_1": "a", "text_2": []}), "text_2"),
            (json!({"text_1": [], "text_2": ["a"]}), "text_1"),
            (json!({"queries": "a"}), "documents"),
            (json!({"items": "a"}), "text_1"),
            (json!({"queries": "a", "query": "b", "items": "c"}), "query"),
            (json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}), "text_1"),
            (
                json!({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 101}),
                "truncate_prompt_tokens",
            ),
        ] {
            assert_eq!(param(score(body.clone()).unwrap_err()), expected, "{body}");
        }
    }
}
