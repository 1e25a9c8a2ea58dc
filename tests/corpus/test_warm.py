# SPDX-License-Identifier: Apache-2.0
"""`zaya data warm` without Megatron: ranges, limits, whole files."""

import os

import pytest

from zaya_plugin import cli
from zaya_plugin.config.schema import ClusterConfig, ParallelConfig, Recipe, StageConfig
from zaya_plugin.corpus import warm


def test_ranges_are_joined_on_pages(monkeypatch):
    monkeypatch.setattr(warm, "GAP", 8192)
    found = warm.joined([(50_000, 50_100), (5, 10), (4000, 4100), (16_000, 17_000), (100_000, 100_001)])
    assert found == [(0, 20_480), (49_152, 53_248), (98_304, 102_400)]
    assert all(begin % 4096 == end % 4096 == 0 for begin, end in found)


def test_limit_takes_the_front():
    ranges = {"a": [(0, 100), (200, 300)], "b": [(0, 50)]}
    assert warm.within(ranges, 1000) == (ranges, 0)
    assert warm.within(ranges, 150) == ({"a": [(0, 100), (200, 250)]}, 100)


def test_whole_files_are_read(prepared, capsys, monkeypatch):
    total = sum(os.path.getsize(prepared / f"train.{suffix}") for suffix in ("bin", "idx"))
    assert cli.main(["data", "warm", str(prepared)]) == 0
    assert f"read {total / 1e6:,.1f} MB of 2 files in 2 reads" in capsys.readouterr().out
    read = []
    monkeypatch.setattr(warm, "read", lambda path, ranges, progress: read.append((path, ranges)))
    assert cli.main(["data", "warm", str(prepared), "--dry-run"]) == 0 and not read
    assert cli.main(["data", "warm", str(prepared), "--max-bytes", "1000"]) == 0
    assert sum(end - begin for _, ranges in read for begin, end in ranges) == 1000
    assert "more do not fit into" in capsys.readouterr().out
    assert cli.main(["data", "warm", "experiment=cpu_demo", f"data.path={prepared}"]) == 0
    assert f"read {total / 1e6:,.1f} MB of 2 files in 2 reads" in capsys.readouterr().out


def recipe(tensor=1, context=1, pipeline=1, nodes=3, batch=96):
    return Recipe(
        stage=StageConfig(name="s", global_batch_size=batch, micro_batch_size=2),
        cluster=ClusterConfig(name="c", num_nodes=nodes, gpus_per_node=8),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tensor, context_parallel_size=context, pipeline_model_parallel_size=pipeline
        ),
    )


@pytest.mark.parametrize(("tensor", "context", "pipeline"), [(1, 1, 1), (2, 2, 1), (1, 2, 2), (4, 1, 2)])
def test_a_node_reads_what_megatron_deals_to_its_ranks(tensor, context, pipeline):
    from megatron.core.parallel_state import RankGenerator
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    nodes, per_node, micro, batch = 3, 8, 2, 96
    ranks = nodes * per_node
    size = ranks // (tensor * context * pipeline)
    groups = RankGenerator(tp=tensor, ep=1, dp=size, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp").get_ranks("dp")
    number_of = {rank: number for group in groups for number, rank in enumerate(group)}
    seen = set()
    for node in range(nodes):
        dealt = warm.data_parallel_ranks(recipe(tensor, context, pipeline), node)
        expected = set()
        for rank in range(node * per_node, (node + 1) * per_node):
            sampler = MegatronPretrainingSampler(5 * batch, 2 * batch, micro, number_of[rank], size)
            expected |= {number for numbers in sampler for number in numbers}
        assert set(warm.samples_of(2 * batch, 5 * batch, micro, dealt)) == expected
        seen |= expected
    assert seen == set(range(2 * batch, 5 * batch)) == set(warm.samples_of(2 * batch, 5 * batch, micro, None))


def test_nodes_that_make_no_sense(prepared, capsys):
    with pytest.raises(ValueError, match="--node=2: .* Allowed: 0 to 1 .cluster.num_nodes=2"):
        warm.data_parallel_ranks(recipe(nodes=2), 2)
    with pytest.raises(ValueError, match="stage.global_batch_size=8: .* 16 data-parallel ranks"):
        warm.data_parallel_ranks(recipe(nodes=2, batch=8), 1)
    for options, message in (
        (["--node", "0"], "--node=0: the samples of steps follow from a recipe and --steps"),
        (["--from-step", "3"], "--from-step=3: the samples of steps follow"),
        (["--steps", "3"], "--steps=3: the samples of steps follow"),
    ):
        assert cli.main(["data", "warm", str(prepared), *options]) == 2
        assert message in capsys.readouterr().err


def test_every_byte_of_the_ranges_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "READ_BYTES", 1000)
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    before = int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])
    warm.read(str(path), [(0, 4096), (8192, 10_000), (9_999, 20_000)])
    after = int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])
    assert 5_905 <= after - before < 5_905 + 20_000
