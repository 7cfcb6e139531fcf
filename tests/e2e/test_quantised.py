"""`--quantization`: the same tokens in any batch, what /server_info reports, and what is refused at start."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest

from forebay.gpu.choose import VARIABLE
from tests.e2e.client import cut, native_one_by_one, native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model, TinyModel
from tests.e2e.reference import clear_cases, prompts
from tests.e2e.waiting import eventually
from tests.hand.stored_models import Format, awq, fp8_blocks, gptq, quantised

START_S = 60
FP8 = ["--kv-cache-dtype", "fp8", "--device", "deferred"]


@pytest.mark.parametrize(("name", "quantization"), [("llama", "w8a8_int8"), ("smollm2", "gguf")])
def test_tokens_depend_on_the_request_alone(serve: Serve, models: Models, name: str, quantization: str) -> None:
    model = models(name)
    server = serve(model, "--quantization", quantization, "--dtype", "bfloat16", "--chunked-prefill-size", "32")
    count = 16 if name == "llama" else 8
    asked = [
        {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
        for prompt in prompts(model, count, 90, seed=4)
    ]
    tokens = [answer["output_ids"] for answer in native_one_by_one(server, asked)]
    shuffled = random.Random(1).sample(list(zip(asked, tokens, strict=True)), count)
    for size in (count, 3):
        for some in cut(shuffled, size):
            found = native_together(server, [request for request, _ in some])
            assert [answer["output_ids"] for answer in found] == [wanted for _, wanted in some]
    assert server.http.get("/server_info").json()["config"]["quantization"] == quantization


def test_a_file_is_served_in_its_own_blocks(serve: Serve, models: Models) -> None:
    model = models("smollm2")
    asked = [
        {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
        for prompt in prompts(model, 4, 40, seed=5)
    ]

    def answers(*flags: str) -> tuple[list[list[int]], str, str]:
        server = serve(model, "--dtype", "auto", *flags)
        given = [answer["output_ids"] for answer in native_together(server, asked)]
        blocks: str = server.http.get("/server_info").json()["facts"]["blocks"]
        eventually(lambda: "Forebay serves" in server.log(), "the banner is written")
        server.kill()
        return given, blocks, server.log()

    by_itself, insisted = answers(), answers("--quantization", "gguf")
    assert by_itself[:2] == insisted[:2]
    assert "Q4_1" in by_itself[1]
    assert re.search(r"file's blocks \(--quantization none: in (bfloat16|float32)\): \d+ Q4_1", by_itself[2])
    plain = answers("--quantization", "none")
    assert plain[1] == ""
    assert "file's blocks" not in plain[2]
    assert plain[0] == answers("--dtype", plain_type(by_itself[2]))[0]


class StoredModel(TinyModel):
    """A random model in a quantized checkpoint; its reference has the dequantized weights."""

    def __init__(self, directory: Path, form: Format) -> None:
        super().__init__("llama", directory)
        quantised(directory, self._model, form)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form.config}))


@pytest.mark.parametrize(
    ("form", "flag"),
    [(fp8_blocks(16), "fp8"), (awq(32), None), (gptq(32, desc_act=True), "gptq_marlin")],
    ids=["fp8", "awq", "gptq"],
)
def test_a_quantised_checkpoint_needs_no_python(serve: Serve, tmp_path: Path, form: Format, flag: str | None) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\nexit 1\n")
    python.chmod(0o755)
    model = StoredModel(tmp_path / "model", form)
    named = () if flag is None else ("--quantization", flag)
    server = serve(model, "--python", str(python), *named)
    cases = clear_cases(model, 6, 40, range(8, 16), seed=3)
    asked = [
        {
            "input_ids": case.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": len(case.tokens), "ignore_eos": True},
        }
        for case in cases
    ]
    for _ in range(2):
        assert [answer["output_ids"] for answer in native_together(server, asked)] == [case.tokens for case in cases]
        # The next hand reads the weights that this one has packed.
        hand = server.hand()
        assert hand is not None
        os.kill(hand, signal.SIGKILL)
    assert server.http.get("/server_info").json()["config"]["hand"] == "rust"
    assert not (tmp_path / "starts").exists()


def plain_type(log: str) -> str:
    """The type that the banner offers as the alternative."""
    found = re.search(r"--quantization none: in (\w+)", log)
    assert found
    return found[1]


def test_keys_and_values_of_8_bits_are_the_same_to_all(serve: Serve, models: Models) -> None:
    model = models("qwen3")
    asked = [
        {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
        for prompt in prompts(model, 12, 90, seed=6)
    ]
    codes = ("--kv-cache-dtype", "int8", "--chunked-prefill-size", "32")
    server = serve(model, *codes)
    info = server.http.get("/server_info").json()
    assert info["config"]["kv_cache_dtype"] == "int8"
    assert info["config"]["hand"] == "rust"
    wanted = [answer["output_ids"] for answer in native_one_by_one(server, asked)]
    # The second time, with pages of the first run.
    assert [answer["output_ids"] for answer in native_together(server, asked)] == wanted
    server.kill()
    # Too few pages for all requests: pages move to the host and back.
    tier = ("--enable-hierarchical-cache", "--debug-kv-checksum", "--hicache-ratio", "8", "--max-total-tokens", "256")
    server = serve(model, *codes, *tier)
    for _ in range(2):
        assert [answer["output_ids"] for answer in native_together(server, asked, held=True)] == wanted
    assert server.metric("forebay:restores_total") > 0
    assert server.metric("forebay:copies_failed_total") == 0
    apart = serve(model, *codes, "--pd", "1:1", "--pd-local-tokens", "0", "--debug-kv-checksum", "--threads", "1")
    assert [answer["output_ids"] for answer in native_together(apart, asked)] == wanted
    assert apart.metric("forebay:pd_handed_total") == len(asked)
    assert apart.metric("forebay:copies_failed_total") == 0
    plain = serve(model)
    bytes_of = [one.http.get("/server_info").json()["facts"]["page_bytes"] for one in (server, plain)]
    assert bytes_of[0] * 64 == bytes_of[1] * 17


def test_keys_and_values_as_8_bit_floats_are_the_same_to_all(
    serve: Serve, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use GPU operators in their PyTorch form, which needs no GPU.
    monkeypatch.setenv(VARIABLE, "reference")
    model = models("qwen3")
    asked = [
        {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
        for prompt in prompts(model, 8, 60, seed=6)
    ]
    twins = ("--device", "deferred", "--attention-backend", "triton", "--chunked-prefill-size", "32")
    tier = ("--enable-hierarchical-cache", "--debug-kv-checksum", "--hicache-ratio", "8", "--max-total-tokens", "256")
    server = serve(model, *twins, "--kv-cache-dtype", "fp8", *tier)
    wanted = [answer["output_ids"] for answer in native_one_by_one(server, asked)]
    # Again, with too few pages for all requests: pages move to the host and back.
    for _ in range(2):
        assert [answer["output_ids"] for answer in native_together(server, asked, held=True)] == wanted
    assert server.metric("forebay:restores_total") > 0
    assert server.metric("forebay:copies_failed_total") == 0
    info = server.http.get("/server_info").json()
    assert info["config"]["kv_cache_dtype"] == "fp8_e4m3"
    plain = serve(model, *twins).http.get("/server_info").json()
    assert plain["config"]["dtype"] == "float32"
    assert plain["facts"]["page_bytes"] == 4 * info["facts"]["page_bytes"]


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("llama", ["--kv-cache-dtype", "int8"], "heads of a multiple of 32: there are 16 and 16"),
        ("qwen3", ["--kv-cache-dtype", "q8_0", "--page-size", "8"], "pages of a multiple of 16 tokens"),
        ("qwen3", ["--kv-cache-dtype", "int8", "--tp-size", "2"], "compiled kernels of one rank on a CPU"),
        ("qwen3", ["--kv-cache-dtype", "int8", "--hand", "torch"], "for the Rust hand on a CPU"),
        ("llama", ["--quantization", "w8a8_int8", "--hand", "torch"], "computed by the Rust hand on a CPU"),
        ("qwen3", ["--kv-cache-dtype", "fp8_e5m2"], "possible values: auto, int8, fp8_e4m3"),
        ("qwen3", ["--kv-cache-dtype", "fp8", "--device", "cpu"], "for a GPU's kernels: leave it off, or use int8"),
        ("qwen3", [*FP8, "--attention-backend", "torch"], "is for --attention-backend triton, not torch"),
        ("deepseek-v3", FP8, "has latent rows: leave it off"),
        ("llama", ["--quantization", "gguf"], "the model is in safetensors"),
        ("smollm2", ["--quantization", "gguf", "--load-format", "dummy"], "--load-format dummy loads none"),
        (
            "llama",
            ["--quantization", "fp4"],
            "possible values: auto, none, w8a8_int8, gguf, fp8, awq, gptq, compressed-tensors",
        ),
        (
            "llama",
            ["--quantization", "awq_marlin"],
            "awq is not what the model has: the checkpoint has no quantization",
        ),
        ("llama", ["--quantization", "gptq", "--hand", "torch"], "gptq is not what the model has"),
        ("llama", ["--quantization", "fp8", "--device", "cpu"], "fp8 makes 8-bit floats for a GPU's kernels"),
    ],
)
def test_what_does_not_go_together_is_said_at_start(
    serve: Serve, models: Models, name: str, flags: list[str], message: str
) -> None:
    server = serve(models(name), *flags, healthy=False)
    assert server.process.wait(START_S) != 0
    assert message in server.log()


def test_a_simulated_device_has_no_use_for_it(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim", "--quantization", "w8a8_int8", "--kv-cache-dtype", "int8")
    assert "without effect on a simulated device: " in server.log()
    assert "--quantization" in server.log()
    assert "--kv-cache-dtype" in server.log()
    config = server.http.get("/server_info").json()["config"]
    assert (config["quantization"], config["kv_cache_dtype"]) == (None, "auto")
