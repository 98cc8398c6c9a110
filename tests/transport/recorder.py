"""Recording proxy in front of a syncer, for replay attacks."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Recorder:
    """Forward connections to a syncer, and record the bytes sent on each."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.sent: list[bytearray] = []
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                record = bytearray()
                self.sent.append(record)
                threading.Thread(target=self._forward, args=(near, far, record), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near, None), daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket, record: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if record is not None:
                    record += data
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def disconnect(self) -> None:
        for each in self._open[1:]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def replay(self, record: bytes) -> bytes:
        """Send a record on a new connection. Return the reply until the syncer closes it or is silent for a second."""
        with socket.create_connection(self._target) as raw:
            raw.settimeout(1.0)
            answer = bytearray()
            with contextlib.suppress(OSError):
                raw.sendall(record)
                while data := raw.recv(65536):
                    answer += data
            return bytes(answer)
