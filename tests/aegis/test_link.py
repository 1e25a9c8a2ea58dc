# SPDX-License-Identifier: Apache-2.0
"""Only holders of the secret are heard, each message once and in order."""

import os
import select
import socket

import pytest

from zaya_plugin.aegis import link
from zaya_plugin.aegis.link import LinkError

SECRET = b"s" * 32


def pair(server_secret=SECRET):
    """A connected client and server."""
    listening = link.listen("127.0.0.1", 0)
    client = link.Link(socket.create_connection(listening.getsockname()), SECRET, server=False)
    listening.setblocking(True)
    server = link.Link(listening.accept()[0], server_secret, server=True)
    listening.close()
    for end in (client, server):  # a message waits until its own end has the other's nonce
        assert readable(end) and end.receive() == []
    return client, server


def readable(end, seconds=60.0):
    """Whether bytes, or the end of the connection, have arrived."""
    return bool(select.select([end], [], [], seconds)[0])


def received(end, count=1):
    """The next messages of an end, or the LinkError."""
    found = []
    while len(found) < count and (end._in or readable(end)):
        found += end.receive()
    return found


def raw(end):
    """The bytes that have arrived at an end."""
    assert readable(end)
    return end.socket.recv(2**20)


def talking():
    client, server = pair()
    client.send({"kind": "one"})
    assert received(server) == [{"kind": "one"}] and server.ready
    server.send({"kind": "two", "n": 2})
    assert received(client) == [{"kind": "two", "n": 2}] and client.ready
    return client, server


def test_messages_arrive_whole_and_in_order():
    client, server = talking()
    sent = [{"kind": "evidence", "n": n, "text": "x" * 5000} for n in range(100)]
    for body in sent:
        client.send(body)
    assert received(server, 100) == sent
    assert not readable(client, 0)


def test_another_secret_is_refused_with_the_reason():
    client, server = pair(b"t" * 32)
    client.send({"kind": "join"})
    with pytest.raises(LinkError, match="wrong secret"):
        received(server)
    server.refuse("wrong secret")
    with pytest.raises(LinkError, match="refused: wrong secret"):
        received(client)


def test_a_line_that_was_recorded_is_refused_later_and_elsewhere():
    client, server = talking()
    client.send({"kind": "stop"})
    line = raw(server)
    assert line.count(b"\n") == 1
    server._in += line  # its first arrival
    assert received(server) == [{"kind": "stop"}]
    server._in += line
    with pytest.raises(LinkError, match="changed, repeated"):
        received(server)
    _, other = talking()
    other._in += line
    with pytest.raises(LinkError, match="changed, repeated"):
        received(other)


def test_a_changed_line_a_missing_one_and_one_sent_back_are_refused():
    client, server = talking()
    client.send({"kind": "exit", "code": 1})
    server._in += raw(server).replace(b'"code": 1', b'"code": 0')
    with pytest.raises(LinkError, match="changed"):
        received(server)
    client, server = talking()
    client.send({"kind": "first"})
    raw(server)
    client.send({"kind": "second"})
    with pytest.raises(LinkError, match="changed"):
        received(server)
    client, server = talking()
    client.send({"kind": "own"})
    client._in += raw(server)
    with pytest.raises(LinkError, match="changed"):
        received(client)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n", "not a peer"),
        (b"\xff" * 5000, "too long"),
        (link.HELLO + b"1" * 31 + b"\n", "not a peer"),
        (link.HELLO + b"1" * 32 + b"\n" + b"x" * 200_000, "too long"),
        (link.HELLO + b"1" * 32 + b"\n{}\n", "wrong secret"),
        (link.HELLO + b"1" * 32 + b"\n" + b"0" * 64 + b' {"kind": "join"}\n', "wrong secret"),
    ],
)
def test_strangers_are_refused_before_they_cost_memory(sent, said):
    listening = link.listen("127.0.0.1", 0)
    stranger = socket.create_connection(listening.getsockname())
    listening.setblocking(True)
    server = link.Link(listening.accept()[0], SECRET, server=True)
    stranger.sendall(sent)
    with pytest.raises(LinkError, match=said):
        received(server)
    assert not server.ready and len(server._in) < 2**21


def test_a_signed_message_may_be_no_message_and_none_is_too_long():
    client, server = talking()
    client._sign(b"[1]")
    client.flush()
    with pytest.raises(LinkError, match="without a kind"):
        received(server)
    client, server = talking()
    client._sign(b"{{")
    client.flush()
    with pytest.raises(LinkError, match="not JSON"):
        received(server)
    with pytest.raises(ValueError, match="bytes"):
        client.send({"kind": "x", "text": "x" * link.LINE_BYTES})


def test_who_says_nothing_is_late_and_who_reads_nothing_is_given_up(monkeypatch):
    client, server = pair()
    assert not server.late
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", -1)
    assert server.late
    client, server = talking()
    with pytest.raises(LinkError, match="reads nothing"):
        for _ in range(100):
            client.send({"kind": "x", "text": "x" * 900_000})


def test_the_end_of_a_connection_is_reported_after_its_last_message():
    client, server = talking()
    client.send({"kind": "last"})
    client.close()
    assert received(server) == [{"kind": "last"}]
    with pytest.raises(LinkError, match="closed"):
        received(server)


def test_the_secret_is_made_once_and_for_its_user_alone(tmp_path):
    path = tmp_path / "aegis" / "secret"
    first = link.make_secret(path)
    assert link.make_secret(path) == first == link.read_secret(path) and len(first) == 64
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(path.parent) == ["secret"]
    assert link.fingerprint(first).encode() not in first and len(link.fingerprint(first)) == 16
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"mode 640.*chmod 600"):
        link.read_secret(path)
    path.unlink()
    path.touch(0o600)
    with pytest.raises(ValueError, match="holds 0 bytes"):
        link.read_secret(path)


@pytest.mark.parametrize("server", [True, False])
def test_a_stranger_writes_no_escape_sequences_to_the_terminal(server):
    listening = link.listen("127.0.0.1", 0)
    stranger = socket.create_connection(listening.getsockname())
    listening.setblocking(True)
    end = link.Link(listening.accept()[0], SECRET, server=server)
    stranger.sendall(b"refused \x1b]0;owned\x07\x1b[2J\n")
    with pytest.raises(LinkError) as error:
        received(end)
    assert str(error.value).isprintable() and "owned" in str(error.value)
    for each in (listening, stranger, end.socket):
        each.close()
