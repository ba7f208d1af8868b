"""Messages between the conductor and its own child processes: length-prefixed pickles over a private socket pair.

Pickle is safe here and only here: both ends are processes of one run, the socket has no address.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 2**20


class AsyncWire:
    """One end inside an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> AsyncWire:
        end.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=end, limit=_BUFFER_BYTES)
        return cls(reader, writer)

    async def send(self, message: Any) -> None:
        """Waits only while the other end is far behind. Raises ConnectionError when it is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        await self._writer.drain()

    def post(self, message: Any) -> None:
        """Never waits; to an end that is gone it says nothing."""
        if not self._writer.transport.is_closing():
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        """Raises EOFError when the other end is gone. A message whose receive is cancelled half-way is lost with the wire."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the other process closed the connection") from error

    def close(self) -> None:
        """At once: what the other end has not taken yet is dropped, so that one that hangs holds nobody up."""
        self._writer.transport.abort()


class BlockingWire:
    """One end inside a process that does one thing at a time (the learner)."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        self._file = end.makefile("rb", buffering=_BUFFER_BYTES)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Raises EOFError when the other end is gone."""
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError("the other process closed the connection")
        (size,) = _LENGTH.unpack(head)
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the other process closed the connection in the middle of a message")
        return pickle.loads(data)
