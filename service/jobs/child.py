"""Processes of the service's own that do what may hang, crash or be ended: they are killed, the service goes on.

Not ``multiprocessing``: its fresh processes run the caller's main module again. A child here is a plain interpreter
that is given one end of a socket pair. When the service dies, however it dies, its end closes and the child ends.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

_RUN = "import sys; from service.jobs.child import run; run(sys.argv[1], int(sys.argv[2]))"
END_TIMEOUT_S = 5.0


class Channel:
    """Messages in both directions, each a pickle of our own making. Sending is thread-safe.

    ``EOFError`` or an ``OSError`` says that the other side is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; waits while the other side doesn't read."""
        self.send_packed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_packed(self, message: bytes) -> None:
        """Send what is pickled already."""
        with self._sending:
            self._connection.send_bytes(message)

    def receive(self) -> Any:
        """The next message."""
        return pickle.loads(self.receive_packed())  # noqa: S301 - what our own process wrote

    def receive_packed(self) -> bytes:
        """The next message, still pickled."""
        return self._connection.recv_bytes()

    def waits(self, timeout_s: float) -> bool:
        """Whether there is a message, or the end, within this time."""
        return self._connection.poll(timeout_s)

    def close(self) -> None:
        """End this side."""
        with suppress(OSError):
            self._connection.close()


class Child:
    """A running process, the leader of a process group of its own, and the channel to it."""

    def __init__(self, function: str) -> None:
        """Start ``module:function``, which gets a ``Channel`` and returns when there is nothing left to do."""
        ours, theirs = Pipe(duplex=True)
        # -P and no empty entries: nothing may be imported from the working directory, which can be a checkpoint's.
        path = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, sys.path)))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a text of ours
                [sys.executable, "-P", "-c", _RUN, function, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.channel = Channel(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> int:
        """End the process and those that it started, whatever they do; its status, negative for a signal."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.channel.close()
        return self._process.wait()

    def close(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Let the process end by itself, since its channel does, and kill it when it doesn't."""
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.kill()

    def status(self, timeout_s: float = END_TIMEOUT_S) -> int | None:
        """How the process ended; None when it hasn't within this time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None


def told_status(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "stopped answering"
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def run(function: str, descriptor: int) -> None:
    """The main program of a child."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides, and ends its children
    module, _, name = function.partition(":")
    channel = Channel(Connection(descriptor))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        getattr(importlib.import_module(module), name)(channel)
