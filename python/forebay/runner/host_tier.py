"""The host tier of a rank: the copies in plans, and the waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from forebay.device import Device, Event
from forebay.protocol.constants import COPY_SAVE_STATE, NO_PAGE, CopyRecord
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.runner.copier import Copier
from forebay.runner.launched import Copied
from forebay.state.checks import PlanError
from forebay.state.config import RunnerConfig
from forebay.state.host import HostPool
from forebay.state.pages import KvPool
from forebay.state.recurrent import StatePages


@dataclass(frozen=True)
class HostMemory:
    """The brain's memory for the host tier."""

    descriptor: int
    """The descriptor of the anonymous file that contains the host pages."""
    socket: int
    """The descriptor of the socket that receives the brain's plans. A new plan finishes a wait for copies."""


class HostTier:
    """Checks the copies of plans, and starts them."""

    def __init__(
        self,
        config: RunnerConfig,
        device: Device,
        kv: KvPool,
        pool: HostPool,
        socket: int,
        *,
        sparse: bool,
        states: StatePages | None,
    ) -> None:
        """`socket`: see `HostMemory`. `sparse`: slots may be sparse; index keys then have separate pages.

        `states`: None if the model has no recurrent states.
        """
        self._config = config
        self._device = device
        self._pages = kv.page_count
        self._host = pool.counts
        self._socket = socket
        self._sparse = sparse
        writes = config.rank == 0 or not config.host_shared
        self._states = states
        of_config = config.copy_gbps, config.kv_checksum, config.host_lenders
        self._copier = Copier(device, kv, pool, *of_config, writes, states)

    def wait_for_saves(self) -> None:
        """By `kv_save_order`, makes the next rows wait for saves, or waits for them here. For measurements."""
        copier, order = self._copier, self._config.kv_save_order
        if order == "inline":
            copier.wait_for_saves(copier.saves)
        elif order == "fence":
            self._device.queue(partial(copier.wait_for_saves, copier.saves))

    def start(self, plan: Plan, behind: Event) -> Copied:
        """Starts the copies of a plan whose rows are computed when `behind` is reached. Raises `PlanError`."""
        copier = self._copier
        number = copier.next_plan()
        if len(plan.copies):
            self._check(plan)
            copier.submit(plan.copies, plan.copy_spans, plan.copy_sources, behind)
        if not plan.wait_us.size:
            return copier.report
        us, socket = int(plan.wait_us[0]), self._socket

        def wait() -> tuple[Int32s, Int32s, Int32s]:
            copier.wait(us, socket, number)
            return copier.report()

        return wait

    def _check(self, plan: Plan) -> None:
        pages, size = self._pages, self._config.page_size
        lenders, sources = len(self._config.host_lenders), plan.copy_sources
        if sources.max(initial=0) > lenders:
            raise PlanError(f"a copy from lender {sources.max()} of {lenders}")
        is_of_state = plan.copies[:, CopyRecord.DIRECTION] >= COPY_SAVE_STATE
        if self._states is None and is_of_state.any():
            raise PlanError("copies of states in a plan for a model that has none")
        is_own = np.full(len(plan.copies), True) if not len(sources) else sources == 0
        for host_pages, of_kind in ((self._host.pages, ~is_of_state), (self._host.state_pages, is_of_state)):
            # State pages of the device are checked elsewhere, together with their number of positions.
            hot = plan.copies[~is_of_state & of_kind, CopyRecord.HOT]
            own = plan.copies[is_own & of_kind, CopyRecord.HOST]
            if hot.max(initial=0) >= pages or own.max(initial=-1) >= host_pages:
                raise PlanError(f"a copy outside of {pages} pages and {host_pages} of the host")
        if not self._sparse and plan.copies[:, CopyRecord.HOT].min() == NO_PAGE:
            raise PlanError("a copy of index keys alone, where they have no page of their own")
        if len(plan.copy_spans) and plan.copy_spans.astype(np.int64).sum(1).max() > size:
            raise PlanError(f"a copy of positions outside of a page of {size}: {plan.copy_spans.tolist()}")
