# SPDX-License-Identifier: Apache-2.0
"""The patches: each names its symbol, reason and versions; the CPU's are never applied where a GPU is."""

from collections import Counter
from pathlib import Path

import pytest

from zaya_plugin import patches
from zaya_plugin.patches import cpu, registry


def test_every_patch_says_what_why_and_for_which_versions():
    loaded = patches.describe()
    assert len(loaded) >= 15
    assert len({patch.symbol for patch in loaded}) == len(loaded)
    for patch in loaded:
        assert len(patch.reason) > 30 and patch.scope in ("cpu", "always") and patch.versions
        assert len(patch.until) > 20 and patch.upstream.startswith("https://")
        assert patch.scope == "cpu" or patch.until != patches.Patch.until, f"{patch.symbol} is for every machine"
        assert patch.fits, f"{patch.symbol} is not written for the installed {patch.package}"
        assert (patch.make is None) != (patch.enter is None)


def test_one_symbol_a_file_but_for_the_table_of_the_cpu():
    files = set(Path(patches.__file__).parent.glob("*_*.py")) - {Path(patches.__file__)}
    by_scope = Counter(patch.scope for patch in patches.describe())
    assert by_scope == {"always": len(files), "cpu": len(cpu.PATCHES)}


def test_no_cpu_patch_is_applied_where_an_accelerator_is(monkeypatch):
    monkeypatch.setattr(registry, "has_accelerator", lambda: True)
    monkeypatch.setattr(registry, "_installed", set())
    applied = []
    recorded = tuple(_recording(patch, applied) for patch in patches.describe())
    monkeypatch.setattr(registry, "describe", lambda: recorded)
    registry.apply()
    assert applied and all(patch.scope == "always" for patch in applied)
    assert not [patch for patch in recorded if patch.scope == "cpu" and patch.applies]


def _recording(patch, applied):
    import dataclasses

    return dataclasses.replace(patch, enter=lambda: applied.append(patch))


def test_without_accelerator_the_cpu_patches_apply_once(monkeypatch):
    monkeypatch.setattr(registry, "has_accelerator", lambda: False)
    monkeypatch.setattr(registry, "_installed", set())
    applied = []
    recorded = tuple(_recording(patch, applied) for patch in patches.describe())
    monkeypatch.setattr(registry, "describe", lambda: recorded)
    registry.apply()
    count = len(applied)
    registry.apply()
    assert len(applied) == count and sum(patch.scope == "cpu" for patch in applied) >= 12


def test_a_version_outside_the_range_stops_with_both_versions(monkeypatch):
    patch = patches.Patch(
        symbol="megatron.core.nothing", reason="a test", upstream="none", scope="always", versions="<0.1"
    )
    monkeypatch.setattr(registry, "describe", lambda: (patch,))
    with pytest.raises(ImportError, match=r"^megatron-core=0\..*megatron\.core\.nothing.* Allowed: <0\.1\."):
        registry.apply()
