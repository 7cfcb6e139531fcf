"""`python -m forebay.needs`: prints the packages that a hand in Python lacks here, or nothing."""

from importlib.util import find_spec

PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers")
"""The packages of `pip install 'forebay[torch]'` that every hand in Python imports."""
FOR_TOKENIZERS = ("protobuf", "sentencepiece", "tiktoken")
"""Those that only tokenizers in other forms than `tokenizer.json` need. An error names them where one is missing."""


def missing() -> list[str]:
    """The packages that can't be imported. None is imported, since PyTorch takes seconds."""
    return [name for name in PACKAGES if find_spec(name) is None]


if __name__ == "__main__":
    print(*missing())
