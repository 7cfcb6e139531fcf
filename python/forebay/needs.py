"""`python -m forebay.needs`: prints the missing packages that a hand in Python requires, or nothing."""

from importlib.util import find_spec

PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers")
"""The packages of `pip install 'forebay[torch]'` that every hand in Python imports."""
FOR_TOKENIZERS = ("protobuf", "sentencepiece", "tiktoken")
"""The packages that only tokenizers in formats other than `tokenizer.json` require. An error names a missing one."""


def missing() -> list[str]:
    """Returns the packages that are not installed. It imports none of them, since importing PyTorch takes seconds."""
    return [name for name in PACKAGES if find_spec(name) is None]


if __name__ == "__main__":
    print(*missing())
