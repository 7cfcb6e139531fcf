"""`python -m forebay.needs`: prints which packages a hand in Python lacks here, and nothing where it has all."""

from importlib.util import find_spec

PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "torch")
"""The packages that `pip install 'forebay[torch]'` installs, by the names that are imported."""


def missing() -> list[str]:
    """Those that can't be imported, without importing any: PyTorch takes seconds."""
    return [name for name in PACKAGES if find_spec(name) is None]


if __name__ == "__main__":
    print(*missing())
