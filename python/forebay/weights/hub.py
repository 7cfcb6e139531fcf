"""Models of the Hugging Face hub: which files of a repository are wanted, and getting them into the hub's cache.

Downloading, resuming, tokens, `HF_ENDPOINT` and `HF_HOME` are `huggingface_hub`'s business. Here is the choice of
files and an answer in one line to everything that can go wrong.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forebay.weights.config import shape_of
from forebay.weights.describe import (
    INDEX,
    describe_directory,
    describe_gguf,
    gguf_parts,
    safetensors_names,
)
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.files import read_json
from forebay.weights.pooling import pooling_files
from forebay.weights.vision import PREPROCESSOR_FILES

__all__ = ["HubModel", "describe_hub_model"]

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[^:@]+?))?(?:/(?P<file>[^:@]+\.gguf)|:(?P<quant>[A-Za-z0-9_.-]+))?"
)
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    *PREPROCESSOR_FILES,
    INDEX,
]

_ANSWER_SECONDS = 20.0

T = TypeVar("T")


@dataclass(frozen=True)
class HubModel:
    """What `org/name`, `org/name@revision`, `org/name:QUANT` and `org/name/file.gguf` name."""

    repository: str
    revision: str | None = None
    file: str | None = None
    quant: str | None = None

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> HubModel | None:
        """None for what can't be a name on the hub. `revision` wins over the one in the text."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            return None
        return cls(match["repository"], revision or match["revision"], match["file"], match["quant"])


def describe_hub_model(
    model: HubModel,
    cache: Path,
    *,
    hub_cache: Path | None,
    offline: bool,
    weights: bool = True,
    embedding: bool = False,
) -> dict[str, Any]:
    """Downloads what is missing, safetensors only if `weights`, and describes the model. Raises ModelError.

    With `embedding` a model that could generate is one that pools. `hub_cache` is a folder in the layout of
    `huggingface_hub`; None is the one that the environment names.
    """
    if offline:
        # Read once, when huggingface_hub is imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    snapshot = _Snapshot(model, hub_cache, offline=offline or constants.HF_HUB_OFFLINE)
    names = snapshot.names()
    try:
        return _describe_snapshot(model, snapshot, names, cache, weights=weights, embedding=embedding)
    except UnsupportedModelError:
        raise
    except ModelError as error:
        if not snapshot.offline:
            raise
        raise ModelError(
            f"{model.repository} is not complete in the cache, and offline nothing is downloaded: {error}"
        ) from error


def _describe_snapshot(
    model: HubModel, snapshot: _Snapshot, names: list[str], cache: Path, *, weights: bool, embedding: bool
) -> dict[str, Any]:
    ggufs = _chosen_ggufs(model, names)
    if ggufs:
        directory = snapshot.download(ggufs)
        return describe_gguf(gguf_parts(directory / ggufs[0]), model.repository, cache, embedding=embedding)
    files = safetensors_names(names) if weights else []
    for needed in ("config.json", "tokenizer.json"):
        if needed not in names:
            raise ModelError(f"{model.repository} has no {needed}, without which its weights can't be used")
    # First what is small: a model that can't be run should say so before gigabytes are downloaded.
    shape_of(read_json(snapshot.download(["config.json"]) / "config.json"))
    small = [name for name in _SMALL_FILES if name in names] + pooling_files(names)
    directory = snapshot.download(small + files)
    return describe_directory(directory, model.repository, weights=weights, embedding=embedding)


def _chosen_ggufs(model: HubModel, names: list[str]) -> list[str]:
    """The parts of the wanted GGUF file; empty if the repository's safetensors are wanted."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if model.file is not None:
        chosen = [name for name in ggufs if name == model.file]
    elif model.quant is not None:
        word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(model.quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
        chosen = [name for name in ggufs if word.search(name)]
    elif any(name.endswith(".safetensors") for name in names) or not ggufs:
        return []
    else:
        chosen = ggufs
    whole = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", name) for name in chosen}
    if len(whole) == 1:
        stem = whole.pop()
        return [name for name in ggufs if name == chosen[0] or fnmatch.fnmatchcase(name, f"{stem}-?????-of-?????.gguf")]
    wanted = f" {model.file or model.quant!r}" if not chosen else ""
    if not ggufs:
        raise ModelError(f"{model.repository} has no GGUF files")
    problem = f"no GGUF file{wanted}" if wanted else "several GGUF files"
    raise ModelError(f"{model.repository} has {problem}; name one as {model.repository}/FILE, of: {', '.join(ggufs)}")


class _Snapshot:
    """One revision of a repository in the hub's cache."""

    def __init__(self, model: HubModel, hub_cache: Path | None, *, offline: bool) -> None:
        self._model = model
        self._hub_cache = hub_cache
        self.offline = offline

    def names(self) -> list[str]:
        """The files of the repository, or those that are cached where the hub can't be asked."""
        if self.offline:
            return self._cached_names()
        from huggingface_hub import HfApi

        def call() -> list[str]:
            # Unlike the listing of a tree this is asked once: without a network the answer is there at once.
            info = HfApi().model_info(self._model.repository, revision=self._model.revision, timeout=_ANSWER_SECONDS)
            return [sibling.rfilename for sibling in info.siblings or []]

        try:
            return sorted(_explained(self._model, call))
        except _UnreachableError as error:
            print(f"{error}; looking for it in the cache", file=sys.stderr, flush=True)
            self.offline = True
            try:
                return self._cached_names()
            except ModelError:
                raise error from None

    def _cached_names(self) -> list[str]:
        directory = self.download([])
        return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())

    def download(self, names: list[str]) -> Path:
        """The directory of the snapshot, in which these files are."""
        from huggingface_hub import snapshot_download

        progress = _progress_class()

        def call() -> str:
            return snapshot_download(
                self._model.repository,
                revision=self._model.revision,
                cache_dir=self._hub_cache,
                # Names are matched as patterns.
                allow_patterns=[re.sub(r"([\[*?])", r"[\1]", name) for name in names],
                local_files_only=self.offline,
                tqdm_class=progress,
            )

        try:
            return Path(_explained(self._model, call))
        finally:
            # snapshot_download leaves its bars open: they would be drawn once more, below our last line.
            for bar in progress.bars:
                bar.close()


class _UnreachableError(ModelError):
    """The hub did not answer."""


def _explained(model: HubModel, call: Callable[[], T]) -> T:
    """What `call` returns, with huggingface_hub's exceptions turned into one line for the user."""
    from huggingface_hub import constants, errors

    what = model.repository if model.revision is None else f"{model.repository}@{model.revision}"
    endpoint = constants.ENDPOINT
    try:
        return call()
    except errors.GatedRepoError as error:
        raise ModelError(
            f"access to {model.repository} must be asked for: accept its terms at {endpoint}/{model.repository}, then "
            "set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model.repository} has no revision {model.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{model.repository} is not at {endpoint}, or it is private and HF_TOKEN holds no token that may read it"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, errors.OfflineModeIsEnabled):
            raise _unreachable(what, endpoint, cause) from error
        raise ModelError(f"{what} is not in the cache, and offline nothing is downloaded") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{what} can't be a name on the hub: {_first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ModelError(
                f"{endpoint} refuses access to {what} ({status}): set HF_TOKEN to a token that may read it"
            ) from error
        raise _unreachable(what, endpoint, error) from error
    except Exception as error:
        # What is left comes from the HTTP library, which differs between versions, or from the file system.
        raise _unreachable(what, endpoint, error) from error


def _unreachable(what: str, endpoint: str, error: BaseException) -> _UnreachableError:
    return _UnreachableError(
        f"{what} can't be downloaded from {endpoint} ({type(error).__name__}: {_first_line(error)}); "
        "check the network, HF_ENDPOINT and the space on disk"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0]


def _progress_class() -> Any:
    from huggingface_hub.utils.tqdm import tqdm

    class Progress(tqdm):
        """Progress bars on standard error, also where it is no terminal: there seldom, as every update is a line."""

        bars: ClassVar[list[Progress]] = []

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("disable") is None:
                kwargs["disable"] = False
            if not sys.stderr.isatty():
                kwargs["mininterval"] = 5.0
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            self.bars.append(self)

    return Progress
