# SPDX-License-Identifier: Apache-2.0
"""`zaya data warm` without Megatron: ranges, limits, whole files."""

import os

import pytest

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
    assert warm.main([str(prepared)]) == 0
    assert f"read {total / 1e6:,.1f} MB of 2 files in 2 reads" in capsys.readouterr().out
    read = []
    monkeypatch.setattr(warm, "read", lambda path, ranges: read.append((path, ranges)))
    assert warm.main([str(prepared), "--dry-run"]) == 0 and not read
    assert warm.main([str(prepared), "--max-bytes", "1000"]) == 0
    assert sum(end - begin for _, ranges in read for begin, end in ranges) == 1000
    assert "more do not fit into" in capsys.readouterr().out
    assert warm.main([str(prepared), "--sequence-length", "8"]) == 1
    assert "give --global-batch-size and --total-samples too" in capsys.readouterr().err


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
        options = [
            "x",
            "--global-batch-size",
            batch,
            "--node",
            node,
            "--nodes",
            nodes,
            "--ranks-per-sample",
            tensor * context,
            "--pipeline-stages",
            pipeline,
        ]
        dealt = warm.data_parallel_ranks(warm.parser().parse_args([str(option) for option in options]))
        expected = set()
        for rank in range(node * per_node, (node + 1) * per_node):
            sampler = MegatronPretrainingSampler(5 * batch, 2 * batch, micro, number_of[rank], size)
            expected |= {number for numbers in sampler for number in numbers}
        assert set(warm.samples_of(2 * batch, 5 * batch, micro, dealt)) == expected
        seen |= expected
    assert seen == set(range(2 * batch, 5 * batch)) == set(warm.samples_of(2 * batch, 5 * batch, micro, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node", "0", "--nodes", "2"], "--node asks for the samples of a node's ranks"),
        (
            [
                "--sequence-length",
                "8",
                "--global-batch-size",
                "8",
                "--total-samples",
                "8",
                "--node",
                "2",
                "--nodes",
                "2",
            ],
            "a number above it",
        ),
        (
            [
                "--sequence-length",
                "8",
                "--global-batch-size",
                "8",
                "--total-samples",
                "8",
                "--node",
                "1",
                "--nodes",
                "2",
            ],
            "16 data-parallel ranks",
        ),
    ],
)
def test_nodes_that_make_no_sense(prepared, capsys, options, message):
    assert warm.main([str(prepared), *options]) == 1
    assert message in capsys.readouterr().err


def test_every_byte_of_the_ranges_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "READ_BYTES", 1000)
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    before = int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])
    warm.read(str(path), [(0, 4096), (8192, 10_000), (9_999, 20_000)])
    after = int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])
    assert 5_905 <= after - before < 5_905 + 20_000
