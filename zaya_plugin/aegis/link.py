# SPDX-License-Identifier: Apache-2.0
"""Messages between agents and the decider: lines over TCP that only holders of the run's secret can write.

Each side begins with a line that holds a random number of its own (nonce). Both numbers and the secret give the key of
this connection, so lines that were recorded on another one are worth nothing. A line is `<MAC> <JSON>`; the MAC
(HMAC-SHA256) covers the direction, the number of the line and the JSON, so a line cannot be repeated, left out,
reordered or sent back. The content is not encrypted: it is what a rank's log holds, on the cluster's own network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import parsed, printable
from zaya_plugin.ground.errors import mistake

HELLO, REFUSED = b"zaya-aegis-1 ", b"refused "
HELLO_BYTES = 200  # the longest first line
LINE_BYTES = 2**20  # the longest line: some thousand lines of evidence
FIRST_BYTES = 2**16  # the longest line of a peer that has not proved that it holds the secret
WAITING_BYTES = 2**24  # a peer that reads nothing while so much is sent is given up
HANDSHAKE_SECONDS = 5.0
SECRET_BYTES = 32


class LinkError(Exception):
    """The connection cannot be used any more; the text is the reason."""


def read_secret(path: Path) -> bytes:
    """Return the run's secret. Raises ValueError if others can read the file, or if it is too short."""
    try:
        mode, content = os.stat(path).st_mode, path.read_bytes().strip()
    except OSError as error:
        raise mistake(str(path), problem=f"the run's secret cannot be read ({error.strerror})") from None
    if mode & 0o077:
        problem = f"others can read it (mode {mode & 0o777:o})"
        raise mistake(str(path), problem=problem, allowed="mode 600", fix=f"chmod 600 {path}")
    if len(content) < SECRET_BYTES:
        problem = f"holds {len(content)} bytes"
        raise mistake(str(path), problem=problem, allowed=f"{SECRET_BYTES} or more", fix="remove it: it is made again")
    return content


def make_secret(path: Path) -> bytes:
    """Return the run's secret, written by the first of all nodes that ask: the folder is on a shared file system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        own = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        with open(os.open(own, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
        try:
            os.link(own, path)  # fails where another node was faster; whole at once
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return read_secret(path)


def fingerprint(secret: bytes) -> str:
    """Return a name for the supervised run that does not reveal its secret."""
    return hashlib.sha256(b"zaya aegis run " + secret).hexdigest()[:16]


class Link:
    """One end of a connection; never blocks.

    Attributes:
        ready: whether the peer has proved that it holds the secret.
        peer: its address, for messages to a person.
    """

    def __init__(self, sock: socket.socket, secret: bytes, server: bool):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.secret, self.server = sock, secret, server
        self.ready, self.since = False, time.monotonic()
        self.peer = "{}:{}".format(*sock.getpeername()[:2])
        self._nonce = secrets.token_hex(16).encode()
        self._key: bytes | None = None
        self._sent = self._received = 0
        self._waiting: list[bytes] = []  # bodies before the key is known
        self._out, self._in = bytearray(HELLO + self._nonce + b"\n"), bytearray()
        self.flush()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether `flush` has bytes to write."""
        return bool(self._out)

    @property
    def late(self) -> bool:
        """Whether the peer has not proved that it holds the secret in the time that it has."""
        return not self.ready and time.monotonic() - self.since > HANDSHAKE_SECONDS

    def send(self, body: dict[str, Any]) -> None:
        """Queue a message and write as much as the peer reads now. Raises LinkError."""
        text = json.dumps(body).encode()
        if len(text) > LINE_BYTES - 80:
            raise ValueError(f"a message of {len(text)} bytes")
        if self._key is None:
            self._waiting.append(text)
        else:
            self._sign(text)
        self.flush()

    def flush(self) -> None:
        """Write as much as the peer reads now. Raises LinkError."""
        while self._out:
            try:
                done = self.socket.send(self._out[: 2**16])
            except BlockingIOError:
                break
            except OSError as error:
                raise LinkError(f"closed ({error.strerror})") from None
            del self._out[:done]
        if len(self._out) > WAITING_BYTES:
            raise LinkError("reads nothing")

    def receive(self) -> list[dict[str, Any]]:
        """Return the whole messages that have arrived. Raises LinkError at the end of the connection, after messages
        before it were returned, and for a line that the secret does not explain.
        """
        closed = None
        while len(self._in) <= LINE_BYTES:
            try:
                data = self.socket.recv(2**16)
            except BlockingIOError:
                break
            except OSError as error:
                closed = f"closed ({error.strerror})"
                break
            if not data:
                closed = "closed"
                break
            self._in += data
        messages = []
        while (end := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            if (body := self._line(line)) is not None:
                messages.append(body)
        if len(self._in) > (LINE_BYTES if self.ready else HELLO_BYTES if self._key is None else FIRST_BYTES):
            raise LinkError("sent a line that is too long")
        if closed and not messages:
            raise LinkError(closed)
        return messages

    def refuse(self, reason: str) -> None:
        """Send the reason of the refusal, and close. The peer cannot verify its sender."""
        try:
            self.socket.send(REFUSED + reason.encode() + b"\n")
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        self.socket.close()

    def _line(self, line: bytes) -> dict[str, Any] | None:
        if self._key is None:
            if line.startswith(REFUSED):
                raise LinkError(f"refused: {printable(line[len(REFUSED) : 120])}")
            nonce = line.removeprefix(HELLO)
            if len(nonce) != 32 or not line.startswith(HELLO):
                raise LinkError("not a peer of zaya aegis of this version")
            both = self._nonce, nonce
            client, server = reversed(both) if self.server else both
            self._key = hmac.digest(self.secret, HELLO + client + b" " + server, "sha256")
            for text in self._waiting:
                self._sign(text)
            self._waiting.clear()
            self.flush()
            return None
        if not self.ready and line.startswith(REFUSED):
            raise LinkError(f"refused: {printable(line[len(REFUSED) : 120])}")
        mac, _, text = line.partition(b" ")
        expected = self._mac(not self.server, self._received, text)
        if not hmac.compare_digest(mac, expected):
            if self.ready:
                raise LinkError("a message that was changed, repeated or made by another")
            raise LinkError("wrong secret")
        self._received += 1
        self.ready = True
        try:
            body = parsed(text)
        except ValueError:
            raise LinkError("a message that is not JSON") from None
        if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
            raise LinkError("a message without a kind")
        return body

    def _sign(self, text: bytes) -> None:
        self._out += self._mac(self.server, self._sent, text) + b" " + text + b"\n"
        self._sent += 1

    def _mac(self, by_server: bool, number: int, text: bytes) -> bytes:
        head = b"%d %d " % (by_server, number)
        return hmac.new(self._key, head + text, hashlib.sha256).hexdigest().encode()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: a free one. Raises OSError if the address is not this machine's, or in use."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]
