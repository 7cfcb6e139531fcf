"""A tiny random gpt-oss in a chat: its channels, and calls in its own notation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.e2e.conftest import Serve
from tests.e2e.models import TOKENIZER, VOCABULARY, Model, TinyModel
from tests.e2e.server import Server

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ASK = {"messages": [{"role": "user", "content": "Weather?"}], "seed": 3, "max_tokens": 100}


class TinyGptOss(TinyModel):
    """A tiny gpt-oss whose last tokens are the marks of channels."""

    def __init__(self, directory: Path) -> None:
        super().__init__("gpt-oss", directory)
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        # The marks replace the last tokens of the vocabulary, because the model has no further ids.
        made = json.loads(tokenizer.to_str())
        words = made["model"]["vocab"]
        for word in [word for word, number in words.items() if number >= VOCABULARY - len(MARKS)]:
            del words[word]
        made["model"]["merges"] = [
            merge for merge in made["model"]["merges"] if "".join(merge).replace(" ", "") in words
        ]
        made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in words]
        tokenizer = Tokenizer.from_str(json.dumps(made))
        tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
        assert tokenizer.get_vocab_size() <= VOCABULARY
        tokenizer.save(str(directory / "tokenizer.json"))
        self.tokenizer = tokenizer
        ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        settings = {"eos_token": "<|return|>", "chat_template": TEMPLATE}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return TinyGptOss(tmp_path_factory.mktemp("models") / "tiny-harmony")


@pytest.fixture(scope="module")
def server(model: Model, serve_for_module: Serve) -> Server:
    return serve_for_module(model, "--max-total-tokens", "4096")


def test_a_call_is_in_a_channel_of_its_own(server: Server, model: Model) -> None:
    # A random model would reason without an end.
    end = str(model.tokenizer.token_to_id("<|end|>"))
    body = {**ASK, "tools": [WEATHER], "tool_choice": "required", "logit_bias": {end: 30}}
    choice = server.ask("/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    given = json.loads(call["function"]["arguments"])
    assert given.keys() == {"city", "days"}
    assert given["days"] in (1, 2)
    assert not any(mark in json.dumps(choice) for mark in MARKS)


def test_a_chat_has_an_end_and_no_marks(server: Server) -> None:
    choice = server.ask("/v1/chat/completions", {**ASK, "max_tokens": 24})["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    assert not any(mark in json.dumps(choice) for mark in MARKS)
    assert server.http.get("/server_info").json()["config"]["hand"] == "rust"
