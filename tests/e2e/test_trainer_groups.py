"""Weights that a trainer broadcasts over a Gloo process group: an update is applied whole or not at all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from forebay.distributed.trainer import join
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.processes import children, command_line
from tests.e2e.server import ROOT, Server
from tests.e2e.test_tensors import NORM, folder_of, saved, trained
from tests.e2e.test_tensors import send as send_whole
from tests.e2e.test_weights import ADMIN, generate
from tests.e2e.waiting import eventually

GROUP = "weight_update_group"


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Frees the names of process groups for the next test."""
    yield
    for group in list(c10d._world.pg_map):
        dist.destroy_process_group(group)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait for the trainer."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def init(server: Server, port: int, **more: Any) -> httpx2.Response:
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    return server.post("/init_weights_update_group", body | more, headers=ADMIN)


def meet(server: Server, pool: ThreadPoolExecutor, name: str = GROUP) -> dist.ProcessGroup:
    """Makes a group of the trainer, which is this process, and the server."""
    port = free_port()
    answer = pool.submit(init, server, port, group_name=name)
    group = join("127.0.0.1", port, rank=0, world_size=2, name=name, seconds=60)
    found = answer.result()
    assert found.status_code == 200, found.text
    assert found.json()["success"]
    return group


def order(server: Server, tensors: Mapping[str, torch.Tensor], **more: Any) -> httpx2.Response:
    """Announces tensors to the server."""
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        **more,
    }
    return server.post("/update_weights_from_distributed", body, headers=ADMIN)


def send(
    server: Server,
    pool: ThreadPoolExecutor,
    group: dist.ProcessGroup,
    tensors: Mapping[str, torch.Tensor],
    **more: Any,
) -> Any:
    """Sends an update as trainers do: announces tensors, and broadcasts each of them meanwhile."""
    answer = pool.submit(order, server, tensors, **more)
    _broadcast(tensors.values(), group)
    found = answer.result()
    assert found.status_code == 200, found.text
    return found.json()


def _broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0, group=group)


def receiver(server: Server) -> int:
    """The process id of the server's rank in the group."""
    [found] = [pid for pid in children(server.pid) if "forebay.distributed.trainer" in command_line(pid)]
    return found


@pytest.mark.parametrize("hand", ["rust", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_server_goes_on_with_broadcast_tensors(
    serve: Serve, tiny: Model, pool: ThreadPoolExecutor, tmp_path: Path, hand: str
) -> None:
    flags = ("--admin-api-key", "admin", "--page-size", "4", "--dp-size", "2", "--hand", hand)
    server = serve(tiny, *flags)
    first = generate(server)
    group = meet(server, pool)
    new = trained(tiny, 1)
    answer = send(server, pool, group, new, weight_version="1")
    assert answer == {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    second = generate(server)
    assert second == (generate(serve(saved(tiny, new, tmp_path / "one"), "--hand", hand))[0], "1")
    assert second[0] != first[0]
    # Some tensors in bfloat16, announced in two parts: nothing is loaded before the second part.
    some = {name: tensor.bfloat16() for name, tensor in trained(tiny, 2).items() if ".layers.0." in name}
    halves = [dict(list(some.items())[at::2]) for at in (0, 1)]
    assert "more" in send(server, pool, group, halves[0], more=True)["message"]
    assert generate(server) == second
    held = server.post("/update_weights_from_tensor", {"serialized_named_tensors": ""}, headers=ADMIN)
    assert held.status_code == 409
    assert send(server, pool, group, halves[1], weight_version="2")["success"]
    mixed = {**new, **{name: tensor.float() for name, tensor in some.items()}}
    third = generate(server)
    assert third == (generate(serve(saved(tiny, mixed, tmp_path / "two"), "--hand", hand))[0], "2")
    killed = set(server.hands())
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    # A request that is in flight at both deaths would be given up, so wait for both hands first.
    eventually(lambda: len(set(server.hands()) - killed) == 2, "both hands are back")
    for _ in range(4):
        assert generate(server) == third
    rank = receiver(server)
    body = {"group_name": GROUP}
    assert server.post("/destroy_weights_update_group", body, headers=ADMIN).json()["success"]
    assert not Path(f"/proc/{rank}").exists()
    assert server.post("/destroy_weights_update_group", body, headers=ADMIN).status_code == 400
    dist.destroy_process_group(group)
    # A new group with another name.
    group = meet(server, pool, "second")
    assert send(server, pool, group, {NORM: new[NORM]}, group_name="second", weight_version="3")["success"]
    rank, folder = receiver(server), folder_of(server)
    assert folder is not None
    assert server.terminate() == 0
    eventually(lambda: not Path(f"/proc/{rank}").exists(), "the server's rank ends with it")
    assert not folder.exists()


def test_a_death_in_the_middle_leaves_the_last_weights(serve: Serve, tiny: Model, pool: ThreadPoolExecutor) -> None:
    server = serve(tiny, "--admin-api-key", "admin")
    first = generate(server)
    new = trained(tiny, 1)
    group = meet(server, pool)
    answer = pool.submit(order, server, new, weight_version="1")
    tensors = list(new.values())
    _broadcast(tensors[: len(tensors) // 2], group)
    os.kill(receiver(server), signal.SIGKILL)
    refused = answer.result()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "names")
    assert "the group weight_update_group is left" in refused.json()["error"]["message"]
    with pytest.raises(RuntimeError):
        _broadcast(tensors, group)
    dist.destroy_process_group(group)
    assert generate(server) == first
    assert order(server, new).json()["error"]["param"] == "group_name"
    # The hand dies during the load: the update is applied whole or not at all.
    group = meet(server, pool)
    other = serve(tiny, "--admin-api-key", "admin")
    expected = first
    for number in range(4):
        trained_now = trained(tiny, number)
        answer = pool.submit(order, server, trained_now, weight_version=f"step {number}")
        _broadcast(trained_now.values(), group)
        # Kill the old hand, then perhaps the hand that starts next.
        for _ in range(1 + number % 2):
            for pid in server.hands():
                os.kill(pid, signal.SIGKILL)
        if answer.result().status_code == 200:
            assert send_whole(other, trained_now).status_code == 200
            expected = (generate(other)[0], f"step {number}")
        assert generate(server) == expected


TRAINER = """
import sys, torch, torch.distributed as dist
from forebay.distributed.trainer import join
group = join("127.0.0.1", int(sys.argv[1]), rank=0, world_size=2)
print("joined", flush=True)
sys.stdin.readline()
"""


def test_the_end_of_the_trainer_is_told_at_once(serve: Serve, tiny: Model, pool: ThreadPoolExecutor) -> None:
    server = serve(tiny, "--admin-api-key", "admin")
    first = generate(server)
    port = free_port()
    joined: Future[httpx2.Response] = pool.submit(init, server, port)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-c", TRAINER, str(port)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "joined\n"
        assert joined.result().status_code == 200
        assert init(server, port).status_code == 409
        answer = pool.submit(order, server, trained(tiny, 1))
        trainer.kill()
    assert answer.result().status_code == 400
    assert generate(server) == first
    group = meet(server, pool)
    assert send(server, pool, group, trained(tiny, 1), weight_version="1")["success"]


def test_what_is_not_served_is_said(serve: Serve, models: Models, pool: ThreadPoolExecutor) -> None:
    tiny = models("llama")
    server = serve(tiny, "--admin-api-key", "admin")

    def refused(answer: httpx2.Response, why: str, status: int = 400) -> None:
        assert answer.status_code == status, answer.text
        assert why in answer.json()["error"]["message"]

    refused(init(server, 1, backend="nccl"), "make the group with gloo", 501)
    body = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
    refused(server.post("/init_weights_update_group", body, headers=ADMIN), '"nccl"', 501)
    refused(init(server, 1, rank_offset=0), "the trainer is rank 0")
    refused(init(server, 1, world_size=1), "`rank_offset` is 1")
    refused(init(server, 70_000), "the body")
    norm = {NORM: trained(tiny, 1)[NORM]}
    refused(order(server, norm), "there is no group weight_update_group")
    refused(order(server, norm, load_format="flattened_bucket"), "`load_format`")
    refused(order(server, norm, shapes=[]), "have 1, 1 and 0 entries")
    refused(order(server, {}), "have 0, 0 and 0 entries")
    for path in ("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"):
        assert server.post(path, {}).status_code == 401
    group = meet(server, pool)
    refused(order(server, norm, group_name="other"), "there is no group other")
    refused(order(server, norm, shapes=[[1 << 40]]), "larger than the checkpoint")
    with pytest.raises(RuntimeError):
        # The server receives nothing, so the trainer's broadcast fails instead of waiting.
        dist.broadcast(norm[NORM], src=0, group=group)
    dist.destroy_process_group(group)
    first = generate(server)
    group = meet(server, pool)
    wrong = {"other": torch.zeros(4)}
    answer = pool.submit(order, server, wrong)
    dist.broadcast(wrong["other"], src=0, group=group)
    refused(answer.result(), "the served checkpoint has no tensor other")
    assert generate(server) == first
    assert send(server, pool, group, norm)["success"], "the group still works after a refused update"
