"""Reporters collect launched steps and send their results."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Protocol

from forebay.protocol.connection import Connection

if TYPE_CHECKING:
    from forebay.runner.launched import Launched

IN_FLIGHT = 2
"""The number of launched steps that may wait for a reporter's thread. The brain keeps no more steps in flight."""


class Reporter(Protocol):
    """Sends the results of launched steps, in order."""

    def report(self, launched: Launched) -> None:
        """Reports a launched step once it is done."""

    def close(self) -> None:
        """Waits until all steps are reported. Raises their errors."""


class DirectReporter:
    """A reporter for a device whose steps are complete when `launch` returns. A second thread would be overhead."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, launched: Launched) -> None:
        self._connection.send(launched.collect().encode())

    def close(self) -> None:
        pass


class ThreadReporter:
    """A reporter for a device that runs asynchronously to the host.

    It waits and sends on a separate thread, so that launches continue.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._error: BaseException | None = None
        self._launched: queue.Queue[Launched | None] = queue.Queue(IN_FLIGHT)
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def report(self, launched: Launched) -> None:
        self._launched.put(launched)

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (launched := self._launched.get()) is not None:
            if self._error is not None:
                # Drain the queue, so that no thread waits for room in it.
                continue
            try:
                self._connection.send(launched.collect().encode())
            except BaseException as error:
                self._error = error
                # Closes the stream for the thread that waits for the next plan, so that it stops and calls `close`.
                self._connection.hear_no_more()


def reporter(connection: Connection, beside_host: bool) -> Reporter:
    """Creates the reporter for a device. `beside_host`: the device runs asynchronously to the host."""
    return ThreadReporter(connection) if beside_host else DirectReporter(connection)
