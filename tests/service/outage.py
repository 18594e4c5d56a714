"""A way to a server that can be cut and mended, as networks are: for outages of an exact length."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Line:
    """Listens on loopback and passes every connection on. ``cut`` ends all of them and refuses new ones."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._port = 0
        self.mend()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def mend(self) -> None:
        """Take connections, where they were taken before."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """End every connection, in the middle of whatever it carries."""
        if self._listener is not None:
            # A thread that waits in accept keeps a closed socket listening.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                theirs, _ = listener.accept()
                ours = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {theirs, ours}
                for source, sink in ((theirs, ours), (ours, theirs)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            is_first = source in self._open or sink in self._open
            self._open -= {source, sink}
        if not is_first:
            source.close()
            sink.close()
