"""The reporter, which collects launched steps and sends their results."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Protocol

from forebay.protocol.connection import Connection

if TYPE_CHECKING:
    from forebay.runner.launched import Launched

IN_FLIGHT = 2
"""Launched steps that wait for a reporter's thread; the brain has no more in flight."""


class Reporter(Protocol):
    """Sends the results of launched steps, in order."""

    def report(self, launched: Launched) -> None:
        """Takes over a step."""

    def close(self) -> None:
        """Returns when all steps were reported that were taken over; raises what went wrong with them."""


class DirectReporter:
    """For a device that is done with a step when it is launched: a second thread would only cost turns."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, launched: Launched) -> None:
        self._connection.send(launched.collect().encode())

    def close(self) -> None:
        pass


class ThreadReporter:
    """For a device that computes beside the host: waits and sends on a thread of its own, so that launches go on."""

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
                # The rest is only taken off the queue, so that nobody waits for a place in it.
                continue
            try:
                self._connection.send(launched.collect().encode())
            except BaseException as error:
                self._error = error
                # Whoever waits for the next plan gets the end of the stream in its place, and closes.
                self._connection.hear_no_more()


def reporter(connection: Connection, beside_host: bool) -> Reporter:
    """The reporter for a device that computes beside the host, or does not."""
    return ThreadReporter(connection) if beside_host else DirectReporter(connection)
