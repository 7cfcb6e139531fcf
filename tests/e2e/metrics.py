"""A reader of Prometheus's text format, as far as the tests need it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line of the text."""

    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """The samples of one response of /metrics."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.samples: list[Sample] = []
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                name, kind = line.split()[2:]
                assert name not in self.types, f"{name} is declared twice"
                self.types[name] = kind
            elif line and not line.startswith("#"):
                match = _SAMPLE.fullmatch(line)
                assert match, f"not a sample: {line!r}"
                labels = dict(_LABEL.findall(match["labels"] or ""))
                self.samples.append(Sample(match["name"], labels, float(match["value"])))

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels."""
        fitting = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert fitting, f"/metrics has no {name} with {labels}"
        return sum(fitting)
