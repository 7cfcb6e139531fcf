"""Changes of weights: transfer of a trainer's tensors to the server, and pauses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from forebay.llm.client import Client
from forebay.llm.connection import OCTETS
from forebay.llm.params import to_json

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["get_parameter", "pause", "resume", "update_weights"]


async def update_weights(
    client: Client, weights: Mapping[str, Tensor] | str | os.PathLike[str], version: str | None, abort: bool
) -> int:
    """Replaces the server's weights. Returns the number of requests that continue with the new weights."""
    if isinstance(weights, Mapping):
        fields = {"abort_all_requests": str(abort).lower()} | ({"weight_version": version} if version else {})
        path = f"/update_weights_from_tensor?{urlencode(fields)}"
        found = await client.ask("POST", path, serialize(weights), kind=OCTETS)
    else:
        # The server may have a different working directory.
        named = str(Path(os.fspath(weights)).absolute())
        body = {"model_path": named, "abort_all_requests": abort, "weight_version": version}
        found = await client.ask("POST", "/update_weights_from_disk", to_json(body))
    going_on: int = found["num_paused_requests"]
    return going_on


async def get_parameter(client: Client, name: str, rows: int) -> Any:
    """Returns the first rows of a parameter, as lists."""
    return await client.ask("POST", "/get_weights_by_name", to_json({"name": name, "truncate_size": rows}))


async def pause(client: Client, mode: str) -> int:
    """Pauses generation. Returns the number of requests that will continue later."""
    found = await client.ask("POST", f"/pause?{urlencode({'mode': mode, 'clear_cache': 'false'})}")
    going_on: int = found["num_paused_requests"]
    return going_on


async def resume(client: Client) -> None:
    """Continues after `pause`."""
    await client.ask("POST", "/resume")


def serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """Encodes a safetensors file. Of tensors that share memory, such as tied weights, only the first is included."""
    from safetensors.torch import save

    found: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in tensors.items():
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and same in seen:
            continue
        seen.add(same)
        own = tensor.detach().to("cpu").contiguous()
        # safetensors rejects views of a larger storage.
        found[name] = own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
    written: bytes = save(found)
    return written
