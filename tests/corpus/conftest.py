# SPDX-License-Identifier: Apache-2.0
"""The small corpus of these tests."""

from tests.prepared_corpus import contents, corpus, prepared, read_tokens, run, start, texts  # noqa: F401
