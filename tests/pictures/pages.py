# SPDX-License-Identifier: Apache-2.0
"""Reads an HTML page: its elements, its text and its data, and checks that it is closed to the network."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

HOSTILE = "</title><script>alert(1)</script><img src=//x onerror=alert(1)>\" onload='x' ]]> \x00 <!-- &lt; {0} %s"
ALLOWED = set(
    "html head meta title style body header main h1 h2 h3 p dl div dt dd b span button label input i ul li".split()
)
ALLOWED |= set("figure figcaption table thead tbody tr th td script".split())


class Elements(HTMLParser):
    """The elements of a page with their attributes, the texts between them, and the scripts."""

    VOID = {"meta", "input"}

    def __init__(self, html):
        super().__init__()
        self.elements, self.texts, self.scripts, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []  # every element is closed

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        elif self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def data(self):
        """The documents of Bokeh: the models of the first one."""
        text = next(text for attrs, text in self.scripts if attrs.get("type") == "application/json")
        documents, _ = json.loads(text)
        (document,) = documents.values()
        return document


def read(html):
    """Return the elements of a page after checking that nothing is loaded and that only its own scripts run."""
    page = Elements(html)
    assert {tag for tag, _ in page.elements} <= ALLOWED
    names = {name for _, attrs in page.elements for name in attrs}
    assert not [name for name in names if name.startswith("on") or name in ("href", "src", "srcdoc", "action")]
    (policy,) = [
        attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    runnable = [text for attrs, text in page.scripts if "type" not in attrs]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in runnable]
    assert rules.pop("script-src").split() == [f"'sha256-{each}'" for each in hashes]
    assert rules == {"default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:"}
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style
    return page
