"""`python -m forebay.needs`: prints the packages that a hand in Python lacks here, or nothing."""

from importlib.util import find_spec

PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers")
"""The packages of `pip install 'forebay[torch]'` that every hand in Python imports."""
FOR_TOKENIZERS = ("protobuf", "sentencepiece", "tiktoken")
"""The packages that are only needed for tokenizers in other forms than `tokenizer.json`. An error names a missing one.
"""


def missing() -> list[str]:
    """The packages that can't be imported. This does not import them, since PyTorch takes seconds."""
    return [name for name in PACKAGES if find_spec(name) is None]


if __name__ == "__main__":
    print(*missing())
