//! How the chat template of each family writes an assistant's message. This part of a template
//! shows earlier answers to the model, so the model was trained to write the same format.

use std::collections::BTreeMap;

use forebay_dialect::{Part, Parts};
use forebay_text::{ChatRender, ChatTemplate};
use serde_json::{Value, json};

/// The content of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<(String, Value)>,
}

impl Answer {
    /// Formats the answer as a family's template does.
    pub(crate) fn written(&self, family: &Family) -> String {
        let calls = self.calls.iter().enumerate().map(|(number, (name, arguments))| {
            json!({"id": number, "type": "function", "function": {"name": name, "arguments": arguments}})
        });
        let message = json!({
            "role": "assistant",
            "content": self.content,
            "reasoning_content": self.reasoning,
            "tool_calls": calls.collect::<Vec<_>>(),
        });
        let template =
            ChatTemplate::new(family.turn, None, None, &BTreeMap::new()).expect("a template");
        template.render(&ChatRender::new(&json!([message]))).expect("text")
    }

    /// Combines the parts of an answer.
    pub(crate) fn read(parts: &Parts) -> Self {
        let mut answer = Self::default();
        let mut arguments = Vec::new();
        for part in parts.iter() {
            match part {
                Part::Content(text) => answer.content.push_str(text),
                Part::Reasoning(text) => answer.reasoning.push_str(text),
                Part::Call { index, name, .. } => {
                    assert_eq!(index as usize, answer.calls.len());
                    answer.calls.push((name.to_owned(), Value::Null));
                    arguments.push(String::new());
                }
                Part::Arguments { index, text } => {
                    assert_eq!(index as usize + 1, answer.calls.len());
                    arguments[index as usize].push_str(text);
                }
            }
        }
        for ((_, value), text) in answer.calls.iter_mut().zip(arguments) {
            *value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        }
        answer
    }
}

/// A model family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Family {
    /// vLLM's name for the parser of the family's calls.
    pub(crate) name: &'static str,
    /// The template of the assistant's message, after the prompt.
    pub(crate) turn: &'static str,
    /// The end of the prompt, directly before the answer.
    pub(crate) prompt: &'static str,
    /// Marks that must never appear in a parsed answer.
    pub(crate) marks: &'static [&'static str],
    /// The parts that an assistant's message of this family can contain.
    has: Has,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Has {
    All,
    NoReasoning,
    /// Text or calls, but not both.
    Either,
}

impl Family {
    /// Returns the answer without the parts that an assistant's message of the family cannot
    /// contain.
    pub(crate) fn can(&self, mut answer: Answer) -> Answer {
        if self.has != Has::All {
            answer.reasoning.clear();
        }
        if self.has == Has::Either && !answer.calls.is_empty() {
            answer.content.clear();
        }
        answer
    }
}

macro_rules! turn {
    ($before:expr, $calls:literal) => {
        concat!(
            $before,
            "{%- for c in m.tool_calls -%}{%- set f = c.function -%}",
            $calls,
            "{%- endfor -%}"
        )
    };
}
macro_rules! think {
    () => {
        "{%- set m = messages[-1] -%}{%- if m.reasoning_content -%}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}{{- m.content -}}"
    };
}
macro_rules! plain {
    () => {
        "{%- set m = messages[-1] -%}{{- m.content -}}"
    };
}

/// All families.
pub(crate) const FAMILIES: &[Family] = &[
    Family {
        name: "hermes",
        turn: turn!(
            think!(),
            r#"{{- '\n<tool_call>\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\n</tool_call>' -}}"#
        ),
        prompt: "<|im_start|>assistant\n",
        marks: &["<tool_call>", "</tool_call>", "<think>", "</think>"],
        has: Has::All,
    },
    Family {
        name: "qwen3_coder",
        turn: turn!(
            think!(),
            r#"{{- '\n<tool_call>\n<function=' + f.name + '>\n' -}}{%- for k, v in f.arguments.items() -%}{{- '<parameter=' + k + '>\n' -}}{{- v if v is string else v | tojson -}}{{- '\n</parameter>\n' -}}{%- endfor -%}{{- '</function>\n</tool_call>' -}}"#
        ),
        prompt: "<|im_start|>assistant\n",
        marks: &[
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "</function>",
            "<parameter=",
            "</parameter>",
            "<think>",
            "</think>",
        ],
        has: Has::All,
    },
    Family {
        name: "llama3_json",
        turn: concat!(
            "{#- <|python_tag|> -#}",
            turn!(
                plain!(),
                r#"{{- '; ' if not loop.first -}}{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' -}}"#
            )
        ),
        prompt: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        marks: &["<|python_tag|>"],
        has: Has::Either,
    },
    Family {
        name: "pythonic",
        turn: concat!(
            "{#- <|python_start|> -#}",
            turn!(
                plain!(),
                r#"{{- '[' if loop.first else ', ' -}}{{- f.name + '(' -}}{%- for k, v in f.arguments.items() -%}{{- ', ' if not loop.first -}}{{- k + '=' -}}{{- v | tojson -}}{%- endfor -%}{{- ')' -}}{{- ']' if loop.last -}}"#
            )
        ),
        prompt: "<|header_start|>assistant<|header_end|>\n\n",
        marks: &["<|python_start|>", "<|python_end|>"],
        has: Has::Either,
    },
    Family {
        name: "mistral",
        turn: turn!(
            plain!(),
            r#"{{- '[TOOL_CALLS][' if loop.first else ', ' -}}{{- '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + ', "id": "abcdefghi"}' -}}{{- ']' if loop.last -}}"#
        ),
        prompt: "[/INST]",
        marks: &["[TOOL_CALLS]"],
        has: Has::NoReasoning,
    },
    Family {
        name: "mistral",
        turn: "{%- set m = messages[-1] -%}{%- if m.reasoning_content -%}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif -%}{{- m.content -}}{%- for c in m.tool_calls -%}{%- set f = c.function -%}{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) -}}{%- endfor -%}",
        prompt: "[/INST]",
        marks: &["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
        has: Has::All,
    },
    Family {
        name: "deepseek_v3",
        turn: turn!(
            plain!(),
            r#"{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' -}}{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\n```json\n' + (f.arguments | tojson) + '\n```<｜tool▁call▁end｜>' -}}{{- '<｜tool▁calls▁end｜>' if loop.last -}}"#
        ),
        prompt: "<｜Assistant｜>",
        marks: &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ],
        has: Has::NoReasoning,
    },
    Family {
        name: "deepseek_v31",
        turn: "{%- set m = messages[-1] -%}{%- if m.reasoning_content -%}{{ m.reasoning_content }}{%- endif -%}{{- '</think>' -}}{{- m.content -}}{%- for c in m.tool_calls -%}{%- set f = c.function -%}{{- '<｜tool▁calls▁begin｜>' if loop.first -}}{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + (f.arguments | tojson) + '<｜tool▁call▁end｜>' -}}{{- '<｜tool▁calls▁end｜>' if loop.last -}}{%- endfor -%}",
        prompt: "<｜Assistant｜><think>",
        marks: &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "<think>",
            "</think>",
        ],
        has: Has::All,
    },
    Family {
        name: "deepseek_v32",
        turn: "{%- set m = messages[-1] -%}{{- m.reasoning_content + '</think>' + m.content -}}{%- for c in m.tool_calls -%}{%- set f = c.function -%}{{- '\\n\\n<｜DSML｜function_calls>\\n' if loop.first -}}{{- '<｜DSML｜invoke name=\"' + f.name + '\">\\n' -}}{%- for k, v in f.arguments.items() -%}{{- '<｜DSML｜parameter name=\"' + k + '\" string=\"' -}}{{- ('true\">' + v) if v is string else ('false\">' + (v | tojson)) -}}{{- '</｜DSML｜parameter>\\n' -}}{%- endfor -%}{{- '</｜DSML｜invoke>\\n' -}}{{- '</｜DSML｜function_calls>' if loop.last -}}{%- endfor -%}",
        prompt: "<｜Assistant｜><think>",
        marks: &["｜DSML｜", "<think>", "</think>"],
        has: Has::All,
    },
    Family {
        name: "glm45",
        turn: turn!(
            think!(),
            r#"{{- '\n<tool_call>' + f.name + '\n' -}}{%- for k, v in f.arguments.items() -%}{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' -}}{{- v if v is string else v | tojson -}}{{- '</arg_value>\n' -}}{%- endfor -%}{{- '</tool_call>' -}}"#
        ),
        prompt: "<|assistant|>",
        marks: &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ],
        has: Has::All,
    },
    Family {
        name: "glm47",
        turn: turn!(
            think!(),
            r#"{#- </arg_key><arg_value> -#}{{- '<tool_call>' + f.name -}}{%- for k, v in f.arguments.items() -%}{{- '<arg_key>' + k + '</arg_key><arg_value>' -}}{{- v if v is string else v | tojson -}}{{- '</arg_value>' -}}{%- endfor -%}{{- '</tool_call>' -}}"#
        ),
        prompt: "<|assistant|>",
        marks: &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ],
        has: Has::All,
    },
    Family {
        name: "kimi_k2",
        turn: turn!(
            think!(),
            r#"{{- '<|tool_calls_section_begin|>' if loop.first -}}{{- '<|tool_call_begin|>functions.' + f.name + ':' ~ loop.index0 ~ '<|tool_call_argument_begin|>' + (f.arguments | tojson) + '<|tool_call_end|>' -}}{{- '<|tool_calls_section_end|>' if loop.last -}}"#
        ),
        prompt: "<|im_assistant|>assistant<|im_middle|>",
        marks: &[
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
            "<think>",
            "</think>",
        ],
        has: Has::All,
    },
    Family {
        name: "minimax_m2",
        turn: "{%- set m = messages[-1] -%}{{- m.reasoning_content + '\\n</think>\\n\\n' + m.content -}}{%- for c in m.tool_calls -%}{%- set f = c.function -%}{{- '\\n<minimax:tool_call>\\n' if loop.first -}}{{- '<invoke name=\"' + f.name + '\">\\n' -}}{%- for k, v in f.arguments.items() -%}{{- '<parameter name=\"' + k + '\">' -}}{{- v if v is string else v | tojson -}}{{- '</parameter>\\n' -}}{%- endfor -%}{{- '</invoke>\\n' -}}{{- '</minimax:tool_call>' if loop.last -}}{%- endfor -%}",
        prompt: "]~b]ai\n<think>\n",
        marks: &[
            "minimax:tool_call>",
            "<invoke",
            "</invoke>",
            "<parameter",
            "</parameter>",
            "<think>",
            "</think>",
        ],
        has: Has::All,
    },
    Family {
        name: "gemma4",
        turn: "{%- macro value(v) -%}{%- if v is string -%}{{- '<|\"|>' + v + '<|\"|>' -}}{%- elif v is mapping -%}{{- '{' -}}{%- for k, x in v.items() -%}{{- ',' if not loop.first -}}{{- k + ':' -}}{{- value(x) -}}{%- endfor -%}{{- '}' -}}{%- elif v is iterable -%}{{- '[' -}}{%- for x in v -%}{{- ',' if not loop.first -}}{{- value(x) -}}{%- endfor -%}{{- ']' -}}{%- else -%}{{- v | tojson -}}{%- endif -%}{%- endmacro -%}{%- set m = messages[-1] -%}{%- if m.reasoning_content -%}{{ '<|channel>thought\\n' + m.reasoning_content + '<channel|>' }}{%- endif -%}{{- m.content -}}{%- for c in m.tool_calls -%}{%- set f = c.function -%}{{- '<|tool_call>call:' + f.name -}}{{- value(f.arguments) -}}{{- '<tool_call|>' -}}{%- endfor -%}",
        prompt: "<|turn>model\n",
        marks: &["<|tool_call>", "<tool_call|>", "<|\"|>", "<|channel>", "<channel|>"],
        has: Has::All,
    },
    Family {
        name: "openai",
        turn: "{%- set m = messages[-1] -%}{#- <|start|> -#}{%- if m.reasoning_content -%}{{ '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant' }}{%- endif -%}{%- if m.tool_calls -%}{%- if m.content -%}{{- '<|channel|>commentary<|message|>' + m.content + '<|end|><|start|>assistant' -}}{%- endif -%}{%- for c in m.tool_calls -%}{%- set f = c.function -%}{{- '<|start|>assistant' if not loop.first -}}{{- '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' + (f.arguments | tojson) + '<|call|>' -}}{%- endfor -%}{%- else -%}{{- '<|channel|>final<|message|>' + m.content + '<|return|>' -}}{%- endif -%}",
        prompt: "<|start|>assistant",
        marks: &[
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
        has: Has::All,
    },
];
