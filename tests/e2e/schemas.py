"""JSON schemas for answers: those of the JSON Schema Test Suite, and made-up ones with all keywords."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.e2e.server import ROOT

SUITE = ROOT / "crates/grammar/tests/data/json-schema-test-suite"
DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri")

Schema = dict[str, Any]


def of_the_suite() -> Iterator[Schema]:
    """The suite's schemas, each with the draft that it is for."""
    for draft, uri in DRAFTS.items():
        for line in (SUITE / f"{draft}.jsonl").read_text().strip().split("\n"):
            schema = json.loads(line)["schema"]
            if isinstance(schema, dict):
                yield {"$schema": uri, **schema}


def made_up(count: int, seed: int) -> Iterator[Schema]:
    """Schemas with many restrictions on small values, so that answers end soon."""
    maker = _Maker(random.Random(seed))
    for _ in range(count):
        yield maker.top()


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def top(self) -> Schema:
        schema = self.value(0)
        if self._chance.random() < 0.3:
            schema = {"$defs": {"part": self.value(1), "leaf": self.string()}, **self.object(1)}
            schema["properties"]["part"] = {"$ref": "#/$defs/part"}
            schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf", "description": "beside a reference"}
            schema["required"] = list(schema["properties"])
        return schema

    def value(self, depth: int) -> Schema:
        kinds = [self.string, self.integer, self.number, self.constant, self.enum, self.simple]
        if depth < 3:
            deeper = [self.object, self.array, self.tuple, self.any_of, self.all_of, self.one_of, self.mapping]
            return self._chance.choice(deeper * 2 + [lambda _, leaf=leaf: leaf() for leaf in kinds])(depth)
        return self._chance.choice(kinds)()

    def string(self) -> Schema:
        chance = self._chance
        least = chance.randrange(4)
        kind = chance.randrange(4)
        if kind == 0:
            return {"type": "string", "format": chance.choice(FORMATS), "maxLength": 60}
        if kind == 1:
            patterns = ["^[a-c]{2,4}$", "^(ab|cd)+$", "^[0-9]{3}-[A-Z]{2}$", "x", "^a|b$", r"^\d+\.\d{2}$", "é+"]
            return {"type": "string", "pattern": chance.choice(patterns), "maxLength": 12}
        return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(9)}

    def integer(self) -> Schema:
        low = self._chance.randrange(-200, 200)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + self._chance.randrange(500)}
        if self._chance.random() < 0.3:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 40, "multipleOf": 7}
        return schema

    def number(self) -> Schema:
        low = round(self._chance.uniform(-5, 5), 2)
        if self._chance.random() < 0.3:
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + 3.5}
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + 10}

    def constant(self) -> Schema:
        return {
            "const": self._chance.choice(["a", 'quo"te', 7, -1.5, None, True, [1, "b"], {"c": {"d": []}}, "é\n", ""])
        }

    def enum(self) -> Schema:
        return {"enum": self._chance.sample(["red", "green", 1, 2.5, None, False, [0], {"k": "v"}, "日本"], 4)}

    def simple(self) -> Schema:
        return {"type": self._chance.choice(["null", "boolean", ["boolean", "null"], ["integer", "boolean"]])}

    def object(self, depth: int) -> Schema:
        names = self._chance.sample(["id", "name", "a b", "größe", 'q"', "tags", "x/y"], self._chance.randrange(1, 5))
        properties = {name: self.value(depth + 1) for name in names}
        schema: Schema = {"type": "object", "properties": properties}
        schema["required"] = self._chance.sample(names, self._chance.randrange(len(names) + 1))
        more = self._chance.randrange(4)
        if more:
            schema["additionalProperties"] = False if more < 3 else self.value(3)
        if more == 2:
            schema["maxProperties"] = len(names)
            schema["minProperties"] = min(1, len(names))
        return schema

    def mapping(self, depth: int) -> Schema:
        schema: Schema = {"type": "object", "minProperties": self._chance.randrange(3), "maxProperties": 3}
        if self._chance.random() < 0.5:
            schema["patternProperties"] = {"^[a-d]{1,3}$": self.value(depth + 1)}
            schema["additionalProperties"] = False
        else:
            schema["additionalProperties"] = self.value(3)
        return schema

    def array(self, depth: int) -> Schema:
        least = self._chance.randrange(3)
        return {
            "type": "array",
            "items": self.value(depth + 1),
            "minItems": least,
            "maxItems": least + self._chance.randrange(3),
        }

    def tuple(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "prefixItems": [self.value(depth + 1) for _ in range(2)], "minItems": 2}
        return {**schema, "items": False} if self._chance.random() < 0.5 else {**schema, "maxItems": 3}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth + 1) for _ in range(self._chance.randrange(1, 4))]}

    def one_of(self, depth: int) -> Schema:
        kinds = ["circle", "square", "line"]
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "size": self.value(depth + 1)},
                    "required": ["kind", "size"],
                    "additionalProperties": False,
                }
                for kind in kinds[: self._chance.randrange(2, 4)]
            ]
        }

    def all_of(self, depth: int) -> Schema:
        first: Schema = {"type": "object", "properties": {"a": self.value(depth + 1)}, "required": ["a"]}
        second: Schema = {"properties": {"b": self.value(depth + 1)}, "required": ["b"], "additionalProperties": False}
        second["properties"]["a"] = {}
        return {"allOf": [first, second]}
