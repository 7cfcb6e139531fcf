"""Models of families that call tools, without weights: a simulated device serves them.

Each has a tokenizer with the family's marks, and a chat template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.e2e.models import TOKENIZER, VOCABULARY, Model

CONTEXT = 32768
_TURNS = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{%- elif m.role == 'assistant' -%}<|im_start|>assistant\n%TURN%<|im_end|>\n"
    "{%- else -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
_SYSTEM = (
    "{%- if tools -%}<|im_start|>system\nTools:"
    "{%- for t in tools -%}{{ '\n' + (t | tojson) }}{%- endfor -%}<|im_end|>\n{%- endif -%}"
)


def _template(turn: str) -> str:
    return _SYSTEM + _TURNS.replace("%TURN%", "{{- m.content or '' -}}" + turn)


def _calls(body: str, before: str = "", after: str = "") -> str:
    return (
        "{%- if m.tool_calls -%}"
        + before
        + "{%- for c in m.tool_calls -%}{%- set f = c.function -%}"
        + body
        + "{%- endfor -%}"
        + after
        + "{%- endif -%}"
    )


@dataclass(frozen=True)
class Family:
    """How a family writes reasoning and tool calls."""

    template: str
    call: str
    """The text of one call, with NAME, ARGUMENTS (JSON) and NUMBER as placeholders."""
    around: tuple[str, str] = ("", "")
    between: str = ""
    special: tuple[str, ...] = ()
    """Marks that are special tokens of the tokenizer, and so are missing in decoded text."""
    plain: tuple[str, ...] = ()
    """Marks that are tokens, but not special ones."""
    thinks: bool = True
    tags: Any = field(default=None)

    def calls(self, *calls: tuple[str, dict[str, Any]]) -> str:
        """The text of these calls."""
        written = []
        for number, (name, arguments) in enumerate(calls):
            text = json.dumps(arguments, ensure_ascii=False) if self.tags is None else self.tags(arguments)
            written.append(self.call.replace("NAME", name).replace("ARGUMENTS", text).replace("NUMBER", str(number)))
        return self.around[0] + self.between.join(written) + self.around[1]


def _tags(arguments: dict[str, Any]) -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return "".join(f"<parameter={key}>\n{value(given)}\n</parameter>\n" for key, given in arguments.items())


THINK = ("<think>", "</think>")
FAMILIES = {
    "hermes": Family(
        template=_template(
            _calls(
                """{{- '\n<tool_call>\n{"name": "' + f.name + '", "arguments": ' -}}"""
                """{{- (f.arguments | tojson) + '}\n</tool_call>' -}}"""
            )
        )
        + "{#- <think> -#}",
        call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        between="\n",
        plain=(*THINK, "<tool_call>", "</tool_call>"),
    ),
    "qwen3_coder": Family(
        template=_template(
            _calls(
                """{{- '\n<tool_call>\n<function=' + f.name + '>\n' -}}{%- for k, v in f.arguments.items() -%}"""
                """{{- '<parameter=' + k + '>\n' -}}{{- v if v is string else v | tojson -}}"""
                """{{- '\n</parameter>\n' -}}{%- endfor -%}"""
                """{{- '</function>\n</tool_call>' -}}"""
            )
        )
        + "{#- <think> -#}",
        call="<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        between="\n",
        tags=_tags,
    ),
    "llama3_json": Family(
        template=_template(
            _calls(
                """{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' -}}"""
                """{{- '; ' if not loop.last -}}"""
            )
        )
        + "{#- <|python_tag|> -#}",
        call='{"name": "NAME", "parameters": ARGUMENTS}',
        around=("<|python_tag|>", ""),
        between="; ",
        special=("<|python_tag|>",),
        thinks=False,
    ),
    "kimi_k2": Family(
        template=_template(
            _calls(
                """{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' -}}"""
                """{{- (f.arguments | tojson) + '<|tool_call_end|>' -}}""",
                "{{- '<|tool_calls_section_begin|>' -}}",
                "{{- '<|tool_calls_section_end|>' -}}",
            )
        )
        + "{#- <think> -#}",
        call="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        special=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "mistral": Family(
        template=_template(
            _calls(
                """{%- if c.id | length != 9 -%}{{ raise_exception('nine letters') }}{%- endif -%}"""
                """{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) -}}"""
            )
        ),
        call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        special=("[TOOL_CALLS]", "[ARGS]"),
        thinks=False,
    ),
}


class ToolModel(Model):
    """A model of a family without weights; a simulated device emits scripted answers."""

    def __init__(self, family: str, directory: Path, tokenizer: Path = TOKENIZER) -> None:
        self.family = FAMILIES[family]
        directory.mkdir(parents=True)
        made = Tokenizer.from_file(str(tokenizer))
        made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in self.family.special])
        made.add_tokens([AddedToken(text, normalized=False) for text in self.family.plain])
        made.save(str(directory / "tokenizer.json"))
        size = max(VOCABULARY, made.get_vocab_size())
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": 1,
            "eos_token_id": made.token_to_id("<|im_end|>"),
        }
        (directory / "config.json").write_text(json.dumps(config))
        settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": self.family.template}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        super().__init__(family, directory, directory / "tokenizer.json")
