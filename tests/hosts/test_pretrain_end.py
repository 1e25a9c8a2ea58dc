# SPDX-License-Identifier: Apache-2.0
"""In which order a run ends: what is reported, the graphs, then the memory that they sent from; and what an error
leaves out.
"""

from types import SimpleNamespace

import pytest

import zaya_plugin.patches

zaya_plugin.patches.apply()  # before Megatron is imported


@pytest.fixture
def ended(monkeypatch):
    """Runs `pretrain.run` around a loop that does what it is given; `.calls` is what was called, in order."""

    from zaya_plugin.hosts import pretrain

    def of(loop):
        calls = of.calls = []

        def note(name):
            return lambda *positional, **named: calls.append(name)

        steps = SimpleNamespace(flush=note("flush"), poll=note("poll"))
        trainer = SimpleNamespace(
            hooks=lambda build_optimizer: [],
            check=lambda: None,
            datasets=None,
            model=None,
            steps=steps,
            routing=None,
            step=4,
            refused=None,
            ended_early=lambda: None,
            saved=SimpleNamespace(finish=note("checkpoint"), saver=SimpleNamespace(close=note("writer"))),
        )
        for name, value in {
            "megatron_arguments": lambda *_: {},
            "parse_arguments": lambda values: SimpleNamespace(curr_iteration=4, rank=0, world_size=1),
            "Trainer": lambda *_: trainer,
            "pretrain_cfg_container_from_args": lambda args: None,
            "release_graphs": note("graphs"),
        }.items():
            monkeypatch.setattr(pretrain, name, value)
        monkeypatch.setattr(pretrain.loader_processes, "end", note("loaders"))
        monkeypatch.setattr(pretrain.registered_buffers, "end_with_release", note("end with release"))
        monkeypatch.setattr(pretrain.registered_buffers, "release", note("memory"))

        def pretrained(*_, **__):
            calls.append("pretrain")
            loop()

        monkeypatch.setattr(pretrain.training, "pretrain", pretrained)
        lifecycle = SimpleNamespace(ended=lambda error: None)
        sources = SimpleNamespace(tokenizer_arguments=lambda: {})
        pretrain.run(
            SimpleNamespace(cluster=SimpleNamespace(deterministic=False)),
            sources,
            lifecycle,
            SimpleNamespace(close=note("reporter")),
        )

    return of


def leave(code):
    def pretrain():
        raise SystemExit(code)

    return pretrain


def fail():
    raise RuntimeError("a device is gone")


@pytest.mark.parametrize("pretrain", [lambda: None, leave(0)], ids=["by itself", "exit condition"])
def test_a_run_that_ends_well_gives_up_its_graphs_and_then_their_memory(ended, pretrain):
    ended(pretrain)
    assert ended.calls == [
        "end with release",
        "pretrain",
        "flush",
        "checkpoint",
        "loaders",
        "writer",
        "graphs",
        "reporter",
        "memory",
    ]


def test_megatrons_rerun_machine_finds_its_checkpoint_complete(ended):
    with pytest.raises(SystemExit) as left:
        ended(leave(16))
    assert left.value.code == 16
    assert ended.calls == [
        "end with release",
        "pretrain",
        "checkpoint",
        "poll",
        "loaders",
        "writer",
        "graphs",
        "reporter",
    ]


def test_after_an_error_nothing_waits_for_other_ranks(ended):
    with pytest.raises(RuntimeError):
        ended(fail)
    assert ended.calls == ["end with release", "pretrain", "poll", "loaders", "writer", "graphs", "reporter"]
