"""Qwen2.5-Coder-0.5B writes patches by calls of a custom tool, whose grammar constrains them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import coder
from tests.e2e.client import openai_client
from tests.e2e.conftest import Serve
from tests.e2e.models import TOKENIZER, Model

pytestmark = pytest.mark.skipif(coder.missing() is not None, reason=coder.missing() or "")

# The grammar of Codex's tool of this name.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
ADD = r"\*\*\* Add File: .+\n(\+.*\n)+"
DELETE = r"\*\*\* Delete File: .+\n"
CHANGE = r"((@@|@@ .+)\n|[+\- ].*\n)+(\*\*\* End of File\n)?"
UPDATE = rf"\*\*\* Update File: .+\n(\*\*\* Move to: .+\n)?({CHANGE})?"
WHOLE = re.compile(rf"\*\*\* Begin Patch\n({ADD}|{DELETE}|{UPDATE})+\*\*\* End Patch\n?")
TOOL: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. A patch begins with *** Begin Patch and ends with *** End Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
}
ASKED = [
    "Add a file hello.py that prints hello.",
    "Delete the file old.txt.",
    "Add a file add.py with a function that adds two numbers.",
    "Rename the variable x to count in main.py, whose only line is: x = 1",
    "Add a README.md with one line.",
    'Add a file quote.py with the line: print("a \\"b\\" \\\\ c")',
    "Add a .gitignore with three entries.",
    "In app.py replace the line 'debug = True' by 'debug = False'.",
]


@pytest.mark.slow
def test_every_finished_call_has_the_form_of_its_grammar(serve: Serve) -> None:
    coder.build()
    model = Model("coder", coder.original(), TOKENIZER)
    server = serve(model, "--quantization", "gguf", "--served-model-name", "coder")
    client = openai_client(server)
    finished = 0
    for number, question in enumerate(ASKED * 3):
        answer = client.responses.create(
            model="coder",
            input=question,
            tools=[TOOL],
            tool_choice="required" if number % 2 else {"type": "custom", "name": "apply_patch"},
            max_output_tokens=160,
            temperature=[0.0, 0.7, 1.0][number // len(ASKED)],
        )
        for item in answer.output:
            assert item.type == "custom_tool_call", answer.model_dump_json()
            if item.status == "completed":  # type: ignore[attr-defined]
                assert WHOLE.fullmatch(item.input), item.input
                finished += 1
    assert finished >= len(ASKED), f"{finished} calls are complete"
