//! Determines the family of a model from its template and vocabulary, or from the value of a flag.
//! The flag accepts the names that other servers use.

use crate::family::{self, Body, CALLS, Calls, REASONING, Reasoning};
use crate::schema::Tools;

/// The formats of a model's calls and reasoning. `None` if the model does not write them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dialect {
    pub(crate) calls: Option<&'static Calls>,
    pub(crate) reasoning: Option<&'static Reasoning>,
}

/// The value of a flag that selects the format of calls or the format of reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// The family is detected.
    Auto,
    /// No family: nothing is parsed.
    None,
    /// The family with this name.
    Named(String),
}

/// The error for a name that no family has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownName {
    name: String,
    known: Vec<&'static str>,
}

impl std::fmt::Display for UnknownName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, known } = self;
        write!(f, "{name:?} is not one of auto, none, {}", known.join(", "))
    }
}

impl std::error::Error for UnknownName {}

impl Choice {
    /// Parses the value of a command-line flag.
    pub fn new(name: Option<&str>) -> Self {
        match name {
            None | Some("auto") => Self::Auto,
            Some("none" | "") => Self::None,
            Some(name) => Self::Named(name.to_owned()),
        }
    }
}

/// The properties of a model that reveal its family.
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// The source of the model's chat template; empty if there is none.
    pub template: &'a str,
    /// Returns whether the model's tokenizer has a token with this text.
    pub has_token: &'a dyn Fn(&str) -> bool,
}

impl Evidence<'_> {
    fn has(&self, text: &str) -> bool {
        self.template.contains(text)
    }

    fn calls(&self) -> Option<&'static Calls> {
        // Marks that only one family writes are tested first. `<tool_call>` is tested last, because
        // many families write it.
        let found: &Calls = if self.has("<|channel|>") && self.has("<|message|>") {
            &family::HARMONY
        } else if self.has("<|tool_call>") {
            &family::GEMMA4
        } else if self.has("<start_function_call>") {
            &family::FUNCTION_GEMMA
        } else if self.has("｜DSML｜") || (self.has_token)("｜DSML｜") {
            if self.has("DSML｜tool_calls") { &family::DEEPSEEK_V4 } else { &family::DEEPSEEK_V32 }
        } else if self.has("<｜tool▁calls▁begin｜>") {
            if self.has("```json") { &family::DEEPSEEK_V3 } else { &family::DEEPSEEK_V31 }
        } else if self.has("<|tool_calls_section_begin|>") {
            &family::KIMI_K2
        } else if self.has("<minimax:tool_call>") {
            &family::MINIMAX_M2
        } else if self.has("<arg_key>") {
            let tight = self.has("</arg_key><arg_value>");
            if tight { &family::GLM47 } else { &family::GLM45 }
        } else if self.has("<function=") {
            &family::QWEN3_CODER
        } else if self.has("[TOOL_CALLS]") {
            let named = self.has("[ARGS]") || (self.has_token)("[ARGS]");
            if named { &family::MISTRAL_NAMED } else { &family::MISTRAL }
        } else if self.has("<|python_start|>") || self.has("[func_name1(params_name1=") {
            &family::PYTHONIC
        } else if self.has("<tool_call>") {
            &family::HERMES
        } else if self.has("<|python_tag|>")
            || self.has("\"parameters\": dictionary of argument name")
        {
            &family::LLAMA3_JSON
        } else {
            return None;
        };
        Some(found)
    }

    fn reasoning(&self) -> Option<&'static Reasoning> {
        let known = |text: &str| self.has(text) || (self.has_token)(text);
        if self.has("<|channel|>") && self.has("<|message|>") {
            Some(&family::HARMONY_THINK)
        } else if self.has("<|channel>") {
            Some(&family::GEMMA4_THINK)
        } else if known("[THINK]") {
            Some(&family::MISTRAL_THINK)
        } else if self.has("<think>")
            || self.has("</think>")
            || ["<think>", "</think>"].into_iter().all(self.has_token)
        {
            Some(&family::THINK)
        } else {
            None
        }
    }
}

impl Dialect {
    /// Returns the chosen dialect, or the one that the evidence suggests.
    ///
    /// # Errors
    /// A name is not known.
    pub fn new(
        calls: &Choice,
        reasoning: &Choice,
        evidence: Evidence<'_>,
    ) -> Result<Self, UnknownName> {
        let calls = match calls {
            Choice::Auto => evidence.calls(),
            Choice::None => None,
            Choice::Named(name) => Some(named_calls(name, evidence)?),
        };
        let reasoning = match reasoning {
            Choice::Auto => evidence.reasoning(),
            Choice::None => None,
            Choice::Named(name) => {
                let found =
                    REASONING.iter().find(|r| r.name == name || r.aliases.contains(&name.as_str()));
                Some(*found.ok_or_else(|| UnknownName {
                    name: name.clone(),
                    known: REASONING.iter().map(|reasoning| reasoning.name).collect(),
                })?)
            }
        };
        Ok(Self { calls, reasoning })
    }

    /// Returns vLLM's name for the format of calls.
    pub fn calls_name(&self) -> Option<&'static str> {
        self.calls.map(|calls| calls.name)
    }

    /// Returns vLLM's name for the format of reasoning.
    pub fn reasoning_name(&self) -> Option<&'static str> {
        self.reasoning.map(|reasoning| reasoning.name)
    }

    /// True if answers with these tools may have parts other than text.
    pub fn reads(&self, tools: &Tools) -> bool {
        let calls = self.calls.is_some() && !tools.is_empty();
        calls || self.reasoning.is_some() || self.is_harmony()
    }

    /// Returns the same dialect without reasoning, which is then parsed as text.
    #[must_use]
    pub fn without_reasoning(self) -> Self {
        Self { reasoning: None, ..self }
    }

    /// Returns the format of call ids.
    pub fn ids(&self) -> family::Ids {
        self.calls.map_or_else(Default::default, |calls| calls.ids)
    }

    /// True if a token with this text is a mark or part of one. Such tokens must be decoded to text
    /// even if they are special tokens.
    pub fn is_mark(&self, token: &str) -> bool {
        let token = token.trim();
        let calls = self.calls.map(Calls::marks).unwrap_or_default();
        let reasoning = self.reasoning.map(|reasoning| [reasoning.open, reasoning.close]);
        let mut marks = calls.into_iter().chain(reasoning.into_iter().flatten());
        let harmony = self.is_harmony() && family::harmony::ALL.contains(&token);
        !token.is_empty() && (harmony || marks.any(|mark| mark.contains(token)))
    }

    pub(crate) fn is_harmony(&self) -> bool {
        let calls = self.calls.is_some_and(|calls| calls.body == Body::Channels);
        calls || self.reasoning.is_some_and(|reasoning| *reasoning == family::HARMONY_THINK)
    }
}

fn named_calls(name: &str, evidence: Evidence<'_>) -> Result<&'static Calls, UnknownName> {
    let has = |calls: &&&Calls| calls.name == name || calls.aliases.contains(&name);
    // If several formats share the name, the one that the template uses is selected.
    if let Some(found) = evidence.calls().filter(|calls| has(&calls)) {
        return Ok(found);
    }
    if name == family::MISTRAL.name && (evidence.has_token)("[ARGS]") {
        return Ok(&family::MISTRAL_NAMED);
    }
    CALLS.iter().find(|calls| has(calls)).copied().ok_or_else(|| {
        let mut known: Vec<_> = CALLS.iter().map(|calls| calls.name).collect();
        known.dedup();
        UnknownName { name: name.to_owned(), known }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(template: &str, tokens: &[&str]) -> (Option<&'static str>, Option<&'static str>) {
        let has_token = |text: &str| tokens.contains(&text);
        let evidence = Evidence { template, has_token: &has_token };
        let dialect = Dialect::new(&Choice::Auto, &Choice::Auto, evidence).expect("a dialect");
        (dialect.calls_name(), dialect.reasoning_name())
    }

    #[test]
    fn families_are_found_by_what_only_they_write() {
        for (template, tokens, calls, reasoning) in [
            ("<tool_call> <think>", &[] as &[&str], Some("hermes"), Some("qwen3")),
            (
                "<tool_call>\n<function=x>",
                &["<think>", "</think>"],
                Some("qwen3_coder"),
                Some("qwen3"),
            ),
            ("<tool_call><arg_key></arg_key>\n<arg_value>", &[], Some("glm45"), None),
            (
                "<tool_call><arg_key></arg_key><arg_value></think>",
                &[],
                Some("glm47"),
                Some("qwen3"),
            ),
            ("[TOOL_CALLS]", &[], Some("mistral"), None),
            ("[TOOL_CALLS]", &["[ARGS]", "[THINK]"], Some("mistral"), Some("mistral")),
            ("<｜tool▁calls▁begin｜>```json", &[], Some("deepseek_v3"), None),
            ("<｜tool▁calls▁begin｜> </think>", &[], Some("deepseek_v31"), Some("qwen3")),
            ("", &["｜DSML｜"], Some("deepseek_v32"), None),
            ("<｜DSML｜tool_calls>", &[], Some("deepseek_v4"), None),
            ("<|tool_calls_section_begin|>", &[], Some("kimi_k2"), None),
            ("<minimax:tool_call><think>", &[], Some("minimax_m2"), Some("qwen3")),
            ("<|start|><|channel|><|message|>", &[], Some("openai"), Some("openai_gptoss")),
            ("<|tool_call>call:<|channel>thought", &[], Some("gemma4"), Some("gemma4")),
            ("<start_function_call>", &[], Some("functiongemma"), None),
            ("<|python_tag|>", &[], Some("llama3_json"), None),
            ("[func_name1(params_name1=", &[], Some("pythonic"), None),
            ("plain", &["<think>"], None, None),
        ] {
            assert_eq!(found(template, tokens), (calls, reasoning), "{template}");
        }
    }

    #[test]
    fn both_servers_names_overrule_what_is_found() {
        let evidence = Evidence { template: "<tool_call><think>", has_token: &|_| false };
        let named = |calls: &str, reasoning: &str| {
            let (calls, reasoning) = (Choice::new(Some(calls)), Choice::new(Some(reasoning)));
            let dialect = Dialect::new(&calls, &reasoning, evidence)?;
            Ok::<_, UnknownName>((dialect.calls_name(), dialect.reasoning_name()))
        };
        assert_eq!(
            named("qwen3_xml", "deepseek-r1"),
            Ok((Some("qwen3_coder"), Some("deepseek_r1")))
        );
        assert_eq!(named("deepseekv31", "none"), Ok((Some("deepseek_v31"), None)));
        assert_eq!(named("gpt-oss", "gpt-oss"), Ok((Some("openai"), Some("openai_gptoss"))));
        assert_eq!(named("auto", "auto"), Ok((Some("hermes"), Some("qwen3"))));
        assert!(named("nonsense", "auto").expect_err("unknown").to_string().contains("hermes"));
        assert!(
            named("auto", "nonsense").expect_err("unknown").to_string().contains("deepseek_r1")
        );
    }

    #[test]
    fn names_are_unlike_but_for_mistral() {
        let mut names = std::collections::HashSet::new();
        for calls in CALLS {
            for name in calls.aliases.iter().chain([&calls.name]) {
                assert!(names.insert(*name) || *name == "mistral", "{name}");
            }
        }
    }

    #[test]
    fn parts_of_marks_are_marks() {
        let evidence = Evidence { template: "｜DSML｜", has_token: &|_| false };
        let dialect = Dialect::new(&Choice::Auto, &Choice::Auto, evidence).expect("a dialect");
        assert!(dialect.is_mark("｜DSML｜"));
        assert!(!dialect.is_mark("<|im_end|>"));
    }
}
