//! The formats in which model families write tool calls and reasoning. Both the parser and the
//! grammar of a family are generated from one description.

/// How a family marks its reasoning.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reasoning {
    /// vLLM's name for the parser of this format.
    pub(crate) name: &'static str,
    /// Other names for the format, such as SGLang's.
    pub(crate) aliases: &'static [&'static str],
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    /// True if an answer starts with reasoning even if neither the prompt nor the answer contains
    /// the opening mark.
    pub(crate) begins: bool,
    /// True if the marks are special tokens, which ordinary text never contains.
    pub(crate) special: bool,
}

/// The tool-call format of a family. The texts contain the white space that the model usually
/// writes; parsers accept any white space.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Calls {
    /// vLLM's name for the parser of this format.
    pub(crate) name: &'static str,
    /// Other names for the format, such as SGLang's.
    pub(crate) aliases: &'static [&'static str],
    /// The text before all calls, and the text after them.
    pub(crate) section: (&'static str, &'static str),
    /// The text before each call, and the text after it.
    pub(crate) call: (&'static str, &'static str),
    /// The text between two calls.
    pub(crate) between: &'static str,
    /// True if the marks around a call are special tokens, which text and arguments never contain.
    pub(crate) special: bool,
    /// The character with which an answer may start a call without a mark; `None` if calls need a
    /// mark.
    pub(crate) bare: Option<char>,
    /// True if an answer that consists of a single JSON object may be a call without any mark.
    pub(crate) alone: bool,
    pub(crate) body: Body,
    pub(crate) ids: Ids,
}

/// The format of a single call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// `{"name": ..., "arguments": {...}}`. The parameter is the key that the family writes in
    /// place of `arguments`.
    Object(&'static str),
    /// A JSON list of objects as in `Object`, with the same parameter.
    List(&'static str),
    /// The name, a mark, and the arguments as JSON.
    Named(Named),
    /// Each argument is an element between tags.
    Tagged(Tagged),
    /// `name(a=1, b="x")`.
    Python,
    /// `call:name{a:1,b:<quote>x<quote>}`. The parameter is the text that is written for `<quote>`.
    Unquoted(&'static str),
    /// Messages to other recipients, in OpenAI's Harmony format.
    Channels,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// The text before the name that a grammar makes the model write.
    pub(crate) before: &'static str,
    /// The last mark before the name. The parser skips all text up to this mark.
    pub(crate) skip: &'static str,
    /// The mark after the name.
    pub(crate) name_end: &'static str,
    /// The text between the name and the arguments.
    pub(crate) separator: &'static str,
    /// The text after the arguments.
    pub(crate) after: &'static str,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tagged {
    /// The texts before and after the name.
    pub(crate) name: (&'static str, &'static str),
    /// The texts before and after an argument's name.
    pub(crate) key: (&'static str, &'static str),
    /// The marks before and after a value. If the first is empty, the value directly follows the
    /// mark after the argument's name.
    pub(crate) value: (&'static str, &'static str),
    /// The text after the last argument.
    pub(crate) end: &'static str,
    /// True if each argument declares whether it is a string: `string="true">`.
    pub(crate) declares: bool,
}

/// The format of call ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Ids {
    /// Ids in OpenAI's format: the prompt contains no ids, or the model accepts any.
    #[default]
    Free,
    /// Nine letters and digits.
    Nine,
    /// `functions.NAME:NUMBER`, which the model itself writes.
    Counted,
}

const NO_MARKS: Calls = Calls {
    name: "",
    aliases: &[],
    section: ("", ""),
    call: ("", ""),
    between: "",
    special: false,
    bare: None,
    alone: false,
    body: Body::Python,
    ids: Ids::Free,
};

pub(crate) const HERMES: Calls = Calls {
    name: "hermes",
    aliases: &["qwen25", "qwen"],
    call: ("<tool_call>\n", "\n</tool_call>"),
    between: "\n",
    // Qwen2.5-Coder usually omits the marks.
    alone: true,
    body: Body::Object("arguments"),
    ..NO_MARKS
};

/// The format that a system message describes if the model's template does not support tools.
pub(crate) const GENERIC: Calls = Calls { name: "generic", aliases: &[], ..HERMES };

pub(crate) const QWEN3_CODER: Calls = Calls {
    name: "qwen3_coder",
    aliases: &["qwen3_xml"],
    call: ("<tool_call>\n", "\n</tool_call>"),
    between: "\n",
    body: Body::Tagged(Tagged {
        name: ("<function=", ">\n"),
        key: ("<parameter=", ">"),
        value: ("\n", "\n</parameter>\n"),
        end: "</function>",
        declares: false,
    }),
    ..NO_MARKS
};

pub(crate) const LLAMA3_JSON: Calls = Calls {
    name: "llama3_json",
    aliases: &["llama3", "llama4_json"],
    call: ("<|python_tag|>", ""),
    between: "; ",
    special: true,
    bare: Some('{'),
    body: Body::Object("parameters"),
    ..NO_MARKS
};

pub(crate) const PYTHONIC: Calls = Calls {
    name: "pythonic",
    aliases: &["llama4_pythonic", "llama4"],
    section: ("<|python_start|>", "<|python_end|>"),
    between: ", ",
    special: true,
    bare: Some('['),
    body: Body::Python,
    ..NO_MARKS
};

pub(crate) const MISTRAL: Calls = Calls {
    name: "mistral",
    section: ("[TOOL_CALLS]", ""),
    between: ", ",
    special: true,
    body: Body::List("arguments"),
    ids: Ids::Nine,
    ..NO_MARKS
};

/// The format of Mistral's models whose tokenizers are from 2025 or later.
pub(crate) const MISTRAL_NAMED: Calls = Calls {
    name: "mistral",
    call: ("[TOOL_CALLS]", ""),
    special: true,
    body: Body::Named(Named {
        before: "",
        skip: "",
        name_end: "[ARGS]",
        separator: "[ARGS]",
        after: "",
    }),
    ids: Ids::Nine,
    ..NO_MARKS
};

const DEEPSEEK: Calls = Calls {
    section: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call: ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    special: true,
    ..NO_MARKS
};

pub(crate) const DEEPSEEK_V3: Calls = Calls {
    name: "deepseek_v3",
    aliases: &["deepseekv3"],
    between: "\n",
    body: Body::Named(Named {
        before: "function<｜tool▁sep｜>",
        skip: "<｜tool▁sep｜>",
        name_end: "\n",
        separator: "\n```json\n",
        after: "\n```",
    }),
    ..DEEPSEEK
};

pub(crate) const DEEPSEEK_V31: Calls = Calls {
    name: "deepseek_v31",
    aliases: &["deepseekv31"],
    body: Body::Named(Named {
        before: "",
        skip: "",
        name_end: "<｜tool▁sep｜>",
        separator: "<｜tool▁sep｜>",
        after: "",
    }),
    ..DEEPSEEK
};

pub(crate) const DEEPSEEK_V32: Calls = Calls {
    name: "deepseek_v32",
    aliases: &["deepseekv32"],
    section: ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    body: Body::Tagged(DSML),
    ..NO_MARKS
};

pub(crate) const DEEPSEEK_V4: Calls = Calls {
    name: "deepseek_v4",
    aliases: &["deepseekv4"],
    section: ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
    body: Body::Tagged(DSML),
    ..NO_MARKS
};

const DSML: Tagged = Tagged {
    name: ("<｜DSML｜invoke name=\"", "\">\n"),
    key: ("<｜DSML｜parameter name=\"", "\" string=\""),
    value: ("", "</｜DSML｜parameter>\n"),
    end: "</｜DSML｜invoke>\n",
    declares: true,
};

pub(crate) const GLM45: Calls = Calls {
    name: "glm45",
    aliases: &["glm"],
    call: ("<tool_call>", "</tool_call>"),
    between: "\n",
    body: Body::Tagged(Tagged {
        name: ("", "\n"),
        key: ("<arg_key>", "</arg_key>\n"),
        value: ("<arg_value>", "</arg_value>\n"),
        end: "",
        declares: false,
    }),
    ..NO_MARKS
};

/// GLM-4.7 writes the same format without line feeds.
pub(crate) const GLM47: Calls = Calls {
    name: "glm47",
    aliases: &[],
    call: ("<tool_call>", "</tool_call>"),
    body: Body::Tagged(Tagged {
        name: ("", ""),
        key: ("<arg_key>", "</arg_key>"),
        value: ("<arg_value>", "</arg_value>"),
        end: "",
        declares: false,
    }),
    ..NO_MARKS
};

pub(crate) const KIMI_K2: Calls = Calls {
    name: "kimi_k2",
    section: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call: ("<|tool_call_begin|>", "<|tool_call_end|>"),
    special: true,
    body: Body::Named(Named {
        before: "",
        skip: "",
        name_end: "<|tool_call_argument_begin|>",
        separator: "<|tool_call_argument_begin|>",
        after: "",
    }),
    ids: Ids::Counted,
    ..NO_MARKS
};

pub(crate) const MINIMAX_M2: Calls = Calls {
    name: "minimax_m2",
    aliases: &["minimax-m2"],
    section: ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    body: Body::Tagged(Tagged {
        name: ("<invoke name=\"", "\">\n"),
        key: ("<parameter name=\"", "\">"),
        value: ("", "</parameter>\n"),
        end: "</invoke>\n",
        declares: false,
    }),
    ..NO_MARKS
};

pub(crate) const GEMMA4: Calls = Calls {
    name: "gemma4",
    call: ("<|tool_call>", "<tool_call|>"),
    special: true,
    body: Body::Unquoted("<|\"|>"),
    ..NO_MARKS
};

pub(crate) const FUNCTION_GEMMA: Calls = Calls {
    name: "functiongemma",
    call: ("<start_function_call>", "<end_function_call>"),
    special: true,
    body: Body::Unquoted("<escape>"),
    ..NO_MARKS
};

pub(crate) const HARMONY: Calls =
    Calls { name: "openai", aliases: &["gpt-oss", "gpt_oss"], body: Body::Channels, ..NO_MARKS };

/// All formats of calls. If several formats have the same name, the name selects the one that the
/// model's template or vocabulary points to, or else the first one.
pub(crate) const CALLS: &[&Calls] = &[
    &HERMES,
    &QWEN3_CODER,
    &LLAMA3_JSON,
    &PYTHONIC,
    &MISTRAL,
    &MISTRAL_NAMED,
    &DEEPSEEK_V3,
    &DEEPSEEK_V31,
    &DEEPSEEK_V32,
    &DEEPSEEK_V4,
    &GLM45,
    &GLM47,
    &KIMI_K2,
    &MINIMAX_M2,
    &GEMMA4,
    &FUNCTION_GEMMA,
    &HARMONY,
    &GENERIC,
];

/// `<think>`, which is written by the prompt, by the model, or not at all.
pub(crate) const THINK: Reasoning = Reasoning {
    name: "qwen3",
    aliases: &[
        "deepseek_v3",
        "deepseek-v3",
        "deepseek-v31",
        "deepseek_v31",
        "deepseek_v32",
        "glm45",
        "glm47",
        "kimi_k2",
        "qwen3-thinking",
        "qwen3_coder",
        "nemotron_v3",
        "nemotron_3",
        "interns1",
        "step3",
    ],
    open: "<think>",
    close: "</think>",
    begins: false,
    special: false,
};

/// The reasoning of models whose answers start with reasoning, even without the opening mark.
pub(crate) const THINK_FIRST: Reasoning = Reasoning {
    name: "deepseek_r1",
    aliases: &["deepseek-r1", "minimax_m2", "minimax", "minimax_m2_append_think"],
    begins: true,
    ..THINK
};

pub(crate) const MISTRAL_THINK: Reasoning = Reasoning {
    name: "mistral",
    aliases: &["magistral"],
    open: "[THINK]",
    close: "[/THINK]",
    begins: false,
    special: true,
};

pub(crate) const GEMMA4_THINK: Reasoning = Reasoning {
    name: "gemma4",
    aliases: &[],
    open: "<|channel>thought\n",
    close: "<channel|>",
    begins: false,
    special: true,
};

pub(crate) const HARMONY_THINK: Reasoning = Reasoning {
    name: "openai_gptoss",
    aliases: &["gpt-oss", "gpt_oss"],
    open: "",
    close: "",
    begins: false,
    special: true,
};

/// All formats of reasoning.
pub(crate) const REASONING: &[&Reasoning] =
    &[&THINK, &THINK_FIRST, &MISTRAL_THINK, &GEMMA4_THINK, &HARMONY_THINK];

/// The marks of Harmony.
pub(crate) mod harmony {
    pub(crate) const START: &str = "<|start|>";
    pub(crate) const CHANNEL: &str = "<|channel|>";
    pub(crate) const MESSAGE: &str = "<|message|>";
    pub(crate) const CONSTRAIN: &str = "<|constrain|>";
    pub(crate) const END: &str = "<|end|>";
    pub(crate) const RETURN: &str = "<|return|>";
    pub(crate) const CALL: &str = "<|call|>";
    pub(crate) const ALL: [&str; 7] = [START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL];
}

impl Calls {
    /// Returns the marks that this family writes, without white space around them.
    pub(crate) fn marks(&self) -> Vec<&'static str> {
        if self.body == Body::Channels {
            return harmony::ALL.to_vec();
        }
        let mut marks = vec![self.section.0, self.section.1, self.call.0, self.call.1];
        match &self.body {
            Body::Named(named) => {
                // Models with older Mistral tokenizers write the id of the call between name and
                // arguments.
                marks.extend([named.before, named.skip, named.name_end, "[CALL_ID]"]);
            }
            Body::Tagged(tags) => {
                let Tagged { name, key, value, end, .. } = tags;
                marks.extend([name.0, name.1, key.0, key.1, value.0, value.1, end]);
            }
            Body::Unquoted(quote) => marks.push(quote),
            Body::Object(_) | Body::List(_) | Body::Python | Body::Channels => {}
        }
        let marks = marks.into_iter().map(str::trim);
        marks.filter(|mark| !mark.is_empty()).collect()
    }
}
