# SPDX-License-Identifier: Apache-2.0
"""The Hub is asked once, with a time limit; without an answer its local cache decides at once."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from zaya_plugin.data.tokenizer import check_opens, import_pretrained
from zaya_plugin.ground import hub


@pytest.fixture(autouse=True)
def online(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def silent():
    """An endpoint that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed():
    """An endpoint that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    return address


@pytest.mark.parametrize("status", [200, 404, 503])
def test_any_answer_is_an_answer(monkeypatch, status):
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub.unreachable() is None


@pytest.mark.parametrize("endpoint", ["silent", "closed"])
def test_a_name_without_a_network_is_refused_with_what_was_tried(monkeypatch, request, endpoint):
    address = request.getfixturevalue(endpoint)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    began = time.monotonic()
    for key, opens in (("data.tokenizer=", check_opens), ("--tokenizer=", lambda name: import_pretrained(name, "/no"))):
        with pytest.raises(ValueError) as refused:
            opens("organisation/no-such-name")
        text = str(refused.value)
        assert text.startswith(
            f"{key}organisation/no-such-name: is not a folder, and the local cache of the Hugging Face Hub"
        )
        assert (
            f"({address} cannot be reached: " in text
            and f"Fix: {key.replace('--tokenizer=', '--tokenizer ')}<folder>" in text
        )
    assert time.monotonic() - began < 100, "its client alone takes a minute for each"


def test_a_user_who_says_offline_is_not_asked(monkeypatch, silent):
    monkeypatch.setenv("HF_ENDPOINT", silent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.unreachable() == "HF_HUB_OFFLINE=1"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    assert hub.unreachable().startswith(f"{silent} cannot be reached: ")
    monkeypatch.setenv("HF_ENDPOINT", "no address")
    assert "cannot be reached" in hub.unreachable()
