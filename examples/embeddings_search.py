"""Searches a few texts by meaning.

python embeddings_search.py [MODEL]

The model is an embedding model: an encoder, or a decoder such as Qwen/Qwen3-Embedding-0.6B. Vectors have length 1, so
the dot product of two vectors is their similarity.
"""

import sys

from forebay import LLM

TEXTS = [
    "A forebay is the pool right in front of a turbine.",
    "The cat sleeps on the sofa.",
    "Bread is baked of flour, water and yeast.",
]
QUESTIONS = ["How do I make dough?", "Where does water wait before it drives a machine?", "What does my pet do?"]


def main() -> None:
    """Prints the closest text for each question."""
    model = sys.argv[1] if len(sys.argv) > 1 else "sentence-transformers/all-MiniLM-L6-v2"
    with LLM(model) as llm:
        vectors = [output.outputs.embedding for output in llm.embed([*TEXTS, *QUESTIONS], use_tqdm=False)]
    known, asked = vectors[: len(TEXTS)], vectors[len(TEXTS) :]
    for question, vector in zip(QUESTIONS, asked, strict=True):
        scores = [sum(a * b for a, b in zip(vector, other, strict=True)) for other in known]
        best = max(range(len(TEXTS)), key=scores.__getitem__)
        print(f"{question} -> {TEXTS[best]} ({scores[best]:.2f})")


if __name__ == "__main__":
    main()
