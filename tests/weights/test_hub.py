"""Models of the hub, downloaded by the command that the brain runs from a stand-in for it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forebay.weights.hub import HubModel
from tests.weights.hub_server import COMMIT, Hub, serve
from tests.weights.support import run_fetch, tiny_directory, tiny_gguf

NAME = "some-org/tiny-model"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve(Hub(NAME, tiny_directory(tmp_path / "repository", shards=2))) as hub:
        yield hub


def fetch(hub: Hub, home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "FOREBAY_CACHE": str(home / "forebay")}
    return run_fetch(*arguments, environment=variables | {"NO_PROXY": "127.0.0.1"} | environment)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def message(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_a_model_is_downloaded_once_and_only_what_is_needed(hub: Hub, tmp_path: Path) -> None:
    (hub.directory / "pytorch_model.bin").write_bytes(b"pickle")
    (hub.directory / "README.md").write_text("read me")
    (hub.directory / "original").mkdir()
    (hub.directory / "original" / "params.json").write_text("{}")
    done = fetch(hub, tmp_path, NAME)
    found = answer(done)
    assert (found["name"], found["format"], found["chat_template"]) == (NAME, "safetensors", "{{ messages }}")
    assert found["eos_token_ids"] == [256, 257]
    files = [Path(file) for file in found["files"]]
    assert [file.name for file in files] == [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for file in [*files, Path(found["tokenizer"])]:
        assert file.read_bytes() == (hub.directory / file.name).read_bytes()
    assert Path(found["directory"]).is_relative_to(tmp_path / "hub")
    downloaded = {
        path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path
    }
    assert downloaded == {path.name for path in hub.directory.iterdir()} - {
        "pytorch_model.bin",
        "README.md",
        "original",
    }
    assert "100%" in done.stderr

    hub.requests.clear()
    assert answer(fetch(hub, tmp_path, NAME)) == found
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_download_goes_on_where_the_connection_was_cut(hub: Hub, tmp_path: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    # The client keeps whole chunks of 10 MiB.
    save_file({"model.weight_0": torch.arange(4 << 20, dtype=torch.float32)}, hub.directory / name)
    hub.cut[name] = 15 << 20
    found = answer(fetch(hub, tmp_path, NAME))
    assert Path(found["files"][0]).read_bytes() == (hub.directory / name).read_bytes()
    first, second = hub.downloads(name)
    assert first is None
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= 15 << 20


def test_offline_uses_what_was_downloaded(hub: Hub, tmp_path: Path) -> None:
    online = answer(fetch(hub, tmp_path, NAME))
    hub.requests.clear()
    assert answer(fetch(hub, tmp_path, NAME, "--offline")) == online
    assert answer(fetch(hub, tmp_path, NAME, HF_HUB_OFFLINE="1")) == online
    assert not hub.requests


def test_offline_says_that_it_is_not_there(hub: Hub, tmp_path: Path) -> None:
    assert "is not in the cache, and offline nothing is downloaded" in message(fetch(hub, tmp_path, NAME, "--offline"))
    found = answer(fetch(hub, tmp_path, NAME))
    Path(found["files"][1]).unlink()
    text = message(fetch(hub, tmp_path, NAME, "--offline"))
    assert "not complete in the cache" in text
    assert "model-00002-of-00002.safetensors" in text


def test_without_a_network_the_cache_is_used(hub: Hub, tmp_path: Path) -> None:
    online = answer(fetch(hub, tmp_path, NAME))
    # A port of a server that is gone.
    with serve(Hub(NAME, hub.directory)) as gone:
        nowhere = gone.endpoint
    done = fetch(hub, tmp_path, NAME, HF_ENDPOINT=nowhere)
    assert answer(done) == online
    assert "looking for it in the cache" in done.stderr
    text = message(fetch(hub, tmp_path, "some-org/other", HF_ENDPOINT=nowhere))
    assert "can't be downloaded from" in text
    assert "check the network, HF_ENDPOINT" in text


def test_the_cache_may_be_elsewhere(hub: Hub, tmp_path: Path) -> None:
    found = answer(fetch(hub, tmp_path / "home", NAME, "--cache-dir", str(tmp_path / "chosen")))
    assert Path(found["directory"]).is_relative_to(tmp_path / "chosen" / "hub")
    assert found["cache"] == str(tmp_path / "chosen")
    usual = answer(fetch(hub, tmp_path / "home", NAME))
    assert usual["cache"] == str(tmp_path / "home" / "forebay")


def test_revisions(hub: Hub, tmp_path: Path) -> None:
    assert answer(fetch(hub, tmp_path, f"{NAME}@{COMMIT}"))["name"] == NAME
    assert answer(fetch(hub, tmp_path, NAME, "--revision", COMMIT))["name"] == NAME
    assert "has no revision 'v9'" in message(fetch(hub, tmp_path, f"{NAME}@v9"))


def test_what_the_hub_refuses_is_explained(hub: Hub, tmp_path: Path) -> None:
    assert "other/model is not at http://" in message(fetch(hub, tmp_path, "other/model"))
    hub.gated = True
    text = message(fetch(hub, tmp_path, NAME))
    assert f"accept its terms at {hub.endpoint}/{NAME}" in text
    assert "HF_TOKEN" in text


def test_a_token_opens_what_is_private(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    assert "HF_TOKEN holds no token" in message(fetch(hub, tmp_path, NAME))
    assert answer(fetch(hub, tmp_path, NAME, HF_TOKEN="secret"))["name"] == NAME


@pytest.mark.parametrize(
    ("keep", "config", "expected"),
    [
        (["config.json", "model-00001-of-00002.safetensors"], None, "no tokenizer.json"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], None, "only pickle files"),
        (["tokenizer.json", "pytorch_model.bin"], None, "only pickle files"),
        (["config.json", "tokenizer.json"], None, "no weights"),
        ([], "BertForMaskedLM", "the architecture BertForMaskedLM is not supported"),
    ],
)
def test_what_can_not_be_run_is_not_downloaded(
    hub: Hub, tmp_path: Path, keep: list[str], config: str | None, expected: str
) -> None:
    (hub.directory / "pytorch_model.bin").write_bytes(b"pickle")
    if config is not None:
        (hub.directory / "config.json").write_text(json.dumps({"architectures": [config]}))
    for path in list(hub.directory.iterdir()):
        if keep and path.name not in keep:
            path.unlink()
    assert expected in message(fetch(hub, tmp_path, NAME))
    downloads = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert all(path.endswith("/config.json") for path in downloads)


def test_gguf_files_are_chosen_by_name(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for quant in ("Q4_K", "Q4_K_M", "Q8_0"):
        tiny_gguf(repository / f"tiny-{quant}.gguf", metadata={"general.name": quant})
    (repository / "config.json").write_text("{}")
    with serve(Hub(NAME, repository)) as hub:
        text = message(fetch(hub, tmp_path, NAME))
        assert "several GGUF files" in text
        assert "tiny-Q4_K.gguf, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in text
        assert "no GGUF file 'Q2_K'" in message(fetch(hub, tmp_path, f"{NAME}:Q2_K"))
        found = answer(fetch(hub, tmp_path, f"{NAME}:q4_k"))
        assert [Path(file).name for file in found["files"]] == ["tiny-Q4_K.gguf"]
        assert (found["name"], found["format"], found["vocab_size"]) == (NAME, "gguf", 258)
        found = answer(fetch(hub, tmp_path, f"{NAME}/tiny-Q8_0.gguf"))
        assert [Path(file).name for file in found["files"]] == ["tiny-Q8_0.gguf"]
        downloads = {
            path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "resolve" in path
        }
        assert downloads == {"tiny-Q4_K.gguf", "tiny-Q8_0.gguf"}
        assert answer(fetch(hub, tmp_path, f"{NAME}:Q8_0", "--offline")) == found


def test_names() -> None:
    assert HubModel.parse("a/b") == HubModel("a/b")
    assert HubModel.parse("a/b@refs/pr/1") == HubModel("a/b", "refs/pr/1")
    assert HubModel.parse("a/b@v1", "v2") == HubModel("a/b", "v2")
    assert HubModel.parse("a/b:Q4_K_M") == HubModel("a/b", quant="Q4_K_M")
    assert HubModel.parse("a/b@v1:Q4_K_M") == HubModel("a/b", "v1", quant="Q4_K_M")
    assert HubModel.parse("a/b.GGUF/sub/c-Q4.gguf") == HubModel("a/b.GGUF", file="sub/c-Q4.gguf")
    for text in ("a", "a/b/c", "a/b:", "a/b@", "/a/b", "a b/c", ""):
        assert HubModel.parse(text) is None
