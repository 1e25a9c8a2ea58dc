# SPDX-License-Identifier: Apache-2.0
"""Test `zaya bench collectives`: results of every element, rccl-tests' and Primus' figures, groups, and a sweep."""

import json
from argparse import Namespace

import pytest
import torch
import torch.distributed as distributed

from tests.running import zaya
from zaya_plugin.bench import collectives, collectives_rank
from zaya_plugin.bench.collectives import OPERATIONS, PRIMUS_COLUMNS, Partition, partitions, row_of
from zaya_plugin.config.schema import MachineConfig
from zaya_plugin.plan.expected_step import collective_seconds, link_rate

RCCL_TESTS = ["size", "type", "redop", "time", "algBw", "busBw", "#wrong", "gpus", "name"]
SWEEP = Namespace(least=1024, most=0, factor=4, command="zaya bench collectives")


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_expected_elements_are_those_of_the_definition(op):
    """Three ranks; their buffers joined and added by hand."""
    ranks, part = 3, 300
    count = part * (ranks if OPERATIONS[op].whole_input else 1)
    given = [collectives.value(torch.arange(count), rank) for rank in range(ranks)]
    assert [numbers[252].item() for numbers in given] == [1, 2, 3]
    by_hand = {
        "all_reduce": lambda rank: sum(given),
        "reduce_scatter": lambda rank: sum(given)[rank * part : (rank + 1) * part],
        "all_gather": lambda rank: torch.cat(given),
        "broadcast": lambda rank: given[0],
        "all_to_all": lambda rank: torch.cat([numbers[rank * part : (rank + 1) * part] for numbers in given]),
    }[op]
    for rank in range(ranks):
        index = torch.arange(by_hand(rank).numel())
        assert torch.equal(collectives.expected(op, index, rank, ranks, part), by_hand(rank))


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_wrong_element_is_counted(op, monkeypatch):
    monkeypatch.setattr(collectives, "CHECKED_AT_ONCE", 100)  # several chunks
    (row,) = collectives.measure(op, [1024], torch.device("cpu"))
    assert (row["#wrong"], row["size"], row["gpus"], row["name"]) == (0, 1024, 1, OPERATIONS[op].name)
    make = collectives.call_of

    def with_fault(op, source, target, group):
        call = make(op, source, target, group)

        def faulty():
            call()
            target[[0, -1]] += 1

        return faulty

    monkeypatch.setattr(collectives, "call_of", with_fault)
    assert collectives.measure(op, [1024], torch.device("cpu"))[0]["#wrong"] == 2


def test_sizes_end_at_the_free_memory_with_a_line(monkeypatch):
    lines = []
    monkeypatch.setattr(collectives, "free_bytes", lambda device: 10_000)
    rows = collectives.measure("all_to_all", [1024, 2048, 8192], torch.device("cpu"), say=lines.append)
    assert [row["size"] for row in rows] == [1024, 2048]  # two buffers in 90 % of 10,000 bytes
    assert lines == ["all_to_all of 1 rank: 8,192 bytes and more do not fit into the free memory (4,500 do)"]


def test_a_row_has_the_figures_of_rccl_tests_and_of_primus():
    times = [[0.001, 0.003, 0.002, 0], [0.002, 0.002, 0.006, 5]]  # two ranks, three calls, and wrong elements
    rows = {op: row_of(op, Partition(2), 8_000_000, times, ["a", "b"]) for op in OPERATIONS}
    for op, factor, primus in (
        ("all_reduce", 1.0, 1.0),
        ("reduce_scatter", 0.5, 0.25),  # Primus counts the bytes of one rank's part
        ("all_gather", 0.5, 0.25),
        ("broadcast", 1.0, 0.5),  # Primus' factor is (n - 1) / n
        ("all_to_all", 0.5, 0.5),
    ):
        row = rows[op]
        assert list(row)[:9] == RCCL_TESTS and list(row)[11:] == list(PRIMUS_COLUMNS)
        assert row["time"] == pytest.approx(16_000 / 6) and row["#wrong"] == 5 and row["gpus"] == row["world"] == 2
        assert row["algBw"] == pytest.approx(3.0) and row["busBw"] == pytest.approx(3.0 * factor)
        # the slower rank of each call: 2, 3 and 6 ms
        assert [row["p50_ms"], row["min_ms"], row["max_ms"]] == pytest.approx([3.0, 2.0, 6.0])
        assert row["p95_ms"] == pytest.approx(5.7) and row["eff_gbps"] == pytest.approx(8 / 3 * primus)
        assert row["slowest_rank"] == "r1@b" and row["rank_p95_spread_ms"] == pytest.approx((5.6 - 2.9) / 2)
    assert [rows[op]["redop"] for op in OPERATIONS] == ["sum", "sum", "none", "none", "none"]


def test_groups_within_nodes_of_whole_nodes_and_of_one_rank_a_node():
    assert partitions(4, 4) == [Partition(1), Partition(2), Partition(4)]
    over_nodes = partitions(8, 2)
    assert over_nodes == [Partition(1), Partition(2), Partition(4), Partition(8), Partition(2, 4), Partition(4, 2)]
    assert [Partition(2, 2).group_of(rank) for rank in range(6)] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7]]
    assert Partition(4).group_of(6) == [4, 5, 6, 7]
    for partition in over_nodes:
        assert all(rank in partition.group_of(rank) for rank in range(8))
        assert len({tuple(partition.group_of(rank)) for rank in range(8)}) == 8 // partition.ranks


def test_the_ceiling_is_the_links_of_the_group():
    xgmi = MachineConfig(name="MI300X", link_gb_per_s=336, network_gb_per_s=50)
    assert [link_rate(xgmi, ranks) for ranks in (2, 8, 16)] == [48, 336, 336] and link_rate(xgmi, 4, 8) == 50
    assert collective_seconds(xgmi, 2, 17.68e9) == pytest.approx(0.3684, rel=1e-3), "ZAYA1's gradients by one link"
    switch = MachineConfig(name="H200", link_gb_per_s=344, network_gb_per_s=50)
    assert [link_rate(switch, 2), link_rate(switch, 4, 2)] == [344, 344]


def test_sizes_are_powers_of_the_factor_and_the_largest():
    assert collectives_rank.sizes(SWEEP, "cpu")[-2:] == [2**20, 4 * 2**20]
    assert collectives_rank.sizes(SWEEP, "cuda")[:2] == [2**10, 2**12]
    assert collectives_rank.sizes(SWEEP, "cuda")[-2:] == [2**32, 2**33]


def test_the_picture_compares_collectives_of_the_largest_group():
    def row(op, partition, size):
        return row_of(op, partition, size, [[0.001, 0]] * partition.ranks, ["a"] * partition.ranks)

    groups = Partition(2), Partition(4), Partition(2, 2)
    rows = [row(op, group, size) for group in groups for op in ("all_reduce", "broadcast") for size in (1000, 2000)]
    picture = collectives_rank.picture(rows, "NVIDIA H200", 4)
    assert picture["title"] == "Collectives of 4 ranks on one node, NVIDIA H200"
    assert [(line.name, line.x, line.y) for line in picture["lines"]] == [
        ("AllReduce", (1000, 2000), pytest.approx((0.0015, 0.003))),
        ("Broadcast", (1000, 2000), pytest.approx((0.001, 0.002))),
    ]
    assert collectives_rank.picture(rows, "NVIDIA H200", 2)["title"].startswith("Collectives of 4 ranks on 2 nodes,")


@pytest.mark.parametrize("name", ["rccl.md", "rccl.csv", "rccl.jsonl"])
def test_the_table_of_primus(tmp_path, name):
    row = row_of("all_to_all", Partition(2), 4096, [[0.001, 0], [0.002, 0]], ["a", "b"])
    collectives_rank.write_table(tmp_path / name, [row], SWEEP, 2)
    lines = (tmp_path / name).read_text().splitlines()
    cells = ["a", "2", "rccl", "alltoall", "4096", "float32", "1", *["2.000"] * 4, "0.00", "r1@b", "0.500"]
    if name.endswith(".jsonl"):
        assert json.loads(lines[0]) == dict(zip(PRIMUS_COLUMNS, cells, strict=True))
    elif name.endswith(".csv"):
        assert lines == [",".join(PRIMUS_COLUMNS), ",".join(cells)]
    else:
        assert lines[0] == "# RCCL Benchmark Report" and lines[-1] == f"| {' | '.join(cells)} |"


@pytest.mark.slow
def test_a_sweep_of_four_processes_is_written_and_its_plan_is_applied(tmp_path):
    words = ("cluster=cpu", "nproc=4", "--max-bytes=16K", "--factor=16", f"--output={tmp_path}")
    done = zaya("bench", "collectives", *words, f"--table={tmp_path / 'rccl.csv'}")
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "collectives.json").read_text())
    assert record["schema"] == "zaya bench collectives/1" and record["device"].startswith("CPU")
    rows = record["rows"]
    assert {row["gpus"] for row in rows} == {1, 2, 4}
    assert {row["name"] for row in rows} == {operation.name for operation in OPERATIONS.values()}
    assert len(rows) == 2 * (3 + 5 + 5) and all(row["#wrong"] == 0 and row["time"] > 0 for row in rows)
    assert len((tmp_path / "rccl.csv").read_text().splitlines()) == 1 + len(rows)
    assert [plan["ranks"] for plan in record["bucket_plan"]] == [2, 4] and (tmp_path / "collectives.png").is_file()
    assert "4 data-parallel ranks: ddp_bucket_size=" in done.stdout
    plan = f"parallel.bucket_plan={tmp_path / 'collectives.json'}"
    train = ("train", "experiment=cpu_demo", "nproc=2", "data.path=none", f"run_dir={tmp_path}/run", plan, "--dry-run")
    assert f"{plan}: ddp_bucket_size=" in zaya(*train).stdout


def test_the_group_of_the_tests_has_one_rank():
    assert distributed.get_world_size() == 1  # which the rows above count on
