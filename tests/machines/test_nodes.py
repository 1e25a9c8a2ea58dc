# SPDX-License-Identifier: Apache-2.0
"""`zaya verify --nodes`: which nodes pass, the findings in a node's record, and one real run of two "nodes"."""

import json
import shlex
import subprocess
import sys
import time

import pytest

from zaya_plugin import cli
from zaya_plugin.machines import check_process, nodes
from zaya_plugin.machines.nodes import Node, judge, node_of, rounds


def node(name, gemm=500.0, pairs=(), **figures):
    given = {"gemm_tflops": {"cuda:0": gemm, "cuda:1": 500.0}, "all_reduce_gb_per_s": {"": 300.0}}
    figures = {figure: {"": value} for figure, value in figures.items()}
    return Node(name, figures=given | figures | ({"pair_gb_per_s": dict(pairs)} if pairs else {}))


def reasons(nodes, slower=0.1, **least):
    judge(nodes, least, slower)
    return {entry.node: [reason for _, reason in entry.failures] for entry in nodes}


def test_a_node_below_its_peers_or_a_threshold_fails_and_names_the_device():
    result = reasons([node("n1"), node("n2", 440.0), node("n3", 460.0)])
    assert result == {"n1": [], "n2": ["gemm_tflops of cuda:0 is 440, 12% below the others' median 500"], "n3": []}
    result = reasons([node("n1"), node("n2", 460.0)], gemm_tflops=470.0, storage_mb_per_s=1.0)
    assert result["n2"] == ["gemm_tflops of cuda:0 is 460, the threshold 470", "storage_mb_per_s was not measured"]
    assert result["n1"] == ["storage_mb_per_s was not measured"]
    assert reasons([node("n1", storage_mb_per_s=100.0), node("n2", storage_mb_per_s=60.0)]) == {"n1": [], "n2": []}
    disks = [node("n1", storage_mb_per_s=100.0), node("n2", storage_mb_per_s=40.0)]
    assert reasons(disks, slower=0.95) == {
        "n1": [],
        "n2": [],
    }  # --slower is for storage too, where it is more than a half
    assert reasons(disks)["n2"] == ["storage_mb_per_s is 40, 60% below the others' median 100"]
    amd = Node("n1", machine="AMD Instinct MI300X", figures={"gemm_tflops": {"cuda:0": 599.0}})
    assert reasons([amd]) == {"n1": ["gemm_tflops of cuda:0 is 599, the threshold 600"]}


def test_a_node_with_fewer_rails_has_amds_code():
    nodes = [node("n1", rails=8.0), node("n2", rails=7.0), node("n3", rails=8.0)]
    judge(nodes, {}, 0.1)
    assert [entry.failures for entry in nodes] == [[], [["210", "rails is 7, 12% below the others' median 8"]], []]


def test_the_node_that_is_slow_with_each_partner_is_the_cause():
    pairs = {
        "n1": {"n2": 48.0, "n4": 50.0},
        "n2": {"n1": 48.0, "n3": 9.0},
        "n3": {"n2": 9.0, "n4": 0.0},
        "n4": {"n3": 0.0, "n1": 50.0},
    }
    result = reasons([node(name, pairs=rates) for name, rates in pairs.items()])
    assert [name for name, entry in result.items() if entry] == ["n3"]
    assert result["n3"] == ["the all-reduce is slow or fails with each partner (GB/s: n2 9, n4 failed)"]


@pytest.mark.parametrize("number", range(1, 9))
def test_each_node_has_two_partners_and_one_at_a_time(number):
    names = [f"n{i}" for i in range(number)]
    result = rounds(names)
    partners = {name: set() for name in names}
    for pairs in result:
        used = [name for pair in pairs for name in pair]
        assert len(used) == len(set(used))
        for one, other in pairs:
            partners[one].add(other)
            partners[other].add(one)
    assert {len(entry) for entry in partners.values()} == {min(2, number - 1)}


def test_a_record_becomes_figures_and_failures():
    rates = {"gemm_tflops": {"cuda:0": 300.0}, "copy_tb_per_s": {"cuda:0": 4.0}}
    rows = [
        ("environment", "wrong", "7 of 8 devices; libamdhip64 is mapped twice", [], {}),
        ("rates", "slow", "cuda:0: gemm_tflops 300", [], rates),
        ("links", "wrong", "port rdma1/1 is 1: DOWN; rail eth1 is down; card0: PCIe link of width 8 of 16", [], {}),
        ("storage", "pass", "900 MB/s", ["storage /x: nfs4"], {"storage_mb_per_s": {"": 900.0}}),
    ]
    keys = ("check", "state", "reason", "details", "compared")
    checks = [dict(zip(keys, row, strict=True)) for row in rows]
    node = node_of("n1", {"machine": {"name": "AMD"}, "running": "all_reduce", "checks": checks})
    assert node.failures == [
        ["", "it did not end: all_reduce"],
        ["004", "environment: 7 of 8 devices"],
        ["", "environment: libamdhip64 is mapped twice"],
        ["201", "links: port rdma1/1 is 1: DOWN"],
        ["202", "links: rail eth1 is down"],
        ["308", "links: card0: PCIe link of width 8 of 16"],
    ]
    assert node.figures == rates | {"storage_mb_per_s": {"": 900.0}} and node.machine == "AMD"
    assert node.notes == ["rates: cuda:0: gemm_tflops 300", "storage /x: nfs4"]


# In place of ssh: writes the record of a node, whose name states its fault, or the result of a pair.
LAUNCHER = """
import json, os, sys, time
node, words = sys.argv[1], sys.argv[2:]
if "zaya_plugin.machines.collective_rank" in words:  # of a pair
    if words[-4] == "0":
        rate = 40.0 if {"env", "NCCL_IB_TC=104", "NCCL_IB_GID_INDEX=1"} <= {*words} else 4.0
        open(words[-2] + "/result.json", "w").write(json.dumps({"sizes": [{"gb_per_s": rate, "right": True}]}))
    sys.exit(0)
compared = {"gemm_tflops": {"cuda:0": 300.0 if node == "slow" else 500.0}}
check = {"check": "rates", "state": "pass", "reason": "", "details": [], "compared": compared}
record = {"machine": {}, "running": "storage" if node == "stuck" else "", "checks": [check]}
if node == "gone":
    sys.exit(255)
open(words[-1], "w").write(json.dumps(record))
if node == "stuck":
    time.sleep(600)
"""


class Clock:
    """The clock of the processes of a command: the time of the nodes is over when only `stuck`, which has written its
    record, still runs.
    """

    sleep, time_ns = time.sleep, time.time_ns

    def __init__(self, record):
        self.record, self.started = record, []

    def popen(self, *positional, **named):
        self.started.append(POPEN(*positional, **named))
        return self.started[-1]

    def monotonic(self):
        running = [process for process in self.started if process.poll() is None]
        late = len(self.started) == 6 and len(running) == 1 and self.record.exists() and self.record.read_text()
        return time.monotonic() + (nodes.SECONDS if late else 0)


POPEN = subprocess.Popen


def test_failing_nodes_are_written_and_a_node_that_hangs_says_where(tmp_path, capsys, monkeypatch):
    clock = Clock(tmp_path / "out" / "nodes" / "stuck.json")
    monkeypatch.setattr(check_process, "time", clock)
    monkeypatch.setattr(check_process.subprocess, "Popen", clock.popen)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    words = ["verify", "cluster=mi300x_128x8", "cluster.environment.NCCL_IB_TC=104"]
    words += ["--output", str(tmp_path / "out" / "verify.json"), "--nodes", "n1,n2,n3,slow,gone,stuck"]
    words += ["--launcher", shlex.join([sys.executable, "-S", str(tmp_path / "launcher.py"), "{node}"])]
    assert cli.main(words) == 1
    assert (tmp_path / "out" / "passing_nodes.txt").read_text() == "n1\nn2\nn3\n"
    assert (tmp_path / "out" / "failing_nodes.txt").read_text() == "gone\nslow\nstuck\n"
    record = json.loads((tmp_path / "out" / "verify.json").read_text())
    result = {node["node"]: node for node in record["nodes"]}
    assert result["gone"]["failures"] == [["", "no report, exit code 255; see nodes/gone.log"]]
    assert result["stuck"]["failures"] == [["", "it did not end: storage"]]
    assert "40% below the others' median 500" in result["slow"]["failures"][0][1]
    assert result["n1"]["figures"]["pair_gb_per_s"] == {"n2": 40.0, "slow": 40.0}
    assert "3 of 6 nodes pass" in capsys.readouterr().out
    assert cli.main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("zaya_plugin.cli verify --only environment,rates,all_reduce,links,storage") == 6
        and "pairs, round 1: gone with n1" in out
        and " NCCL_IB_TC" in out
    )


@pytest.mark.slow
def test_two_nodes_of_this_machine_for_real(tmp_path, capsys):
    output = str(tmp_path / "verify.json")
    words = ["verify", "--output", output, "--nodes", "n1,n2", "--launcher", "env NODE={node}", "--device", "cpu"]
    code = cli.main([*words, "--slower", "0.95", "--min", "gemm_tflops=0.001"])
    out = capsys.readouterr().out
    assert code == 0, out
    result = json.loads((tmp_path / "verify.json").read_text())["nodes"]
    assert [sorted(entry["figures"]) for entry in result] == 2 * [
        ["all_reduce_gb_per_s", "copy_tb_per_s", "gemm_tflops", "pair_gb_per_s", "rails", "storage_mb_per_s"]
    ]
    pairs = [node["figures"]["pair_gb_per_s"] for node in result]
    assert pairs[0]["n2"] == pairs[1]["n1"] > 0.001
    assert (tmp_path / "passing_nodes.txt").read_text() == "n1\nn2\n"
    silent = ["--launcher", "sh -c 'sleep 60' {node}", "--seconds", "1"]
    assert cli.main([*words, *silent]) == 1
    assert capsys.readouterr().out.count("no report in time; see nodes/n") == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "n1,n2"], "--launcher: is required for several nodes outside of SLURM"),
        (["--nodes=-oProxyCommand=x"], "not a valid node name"),
        (["--nodes", "--slower", "2"], "--slower: '2' is not a number from 0 to 1"),
        (["--nodes", "--min", "gemm"], "--min: 'gemm' is not a figure: gemm_tflops, "),
        (["--nodes", "--launcher", "ssh '{node}"], "cannot be read (No closing quotation)"),
        (["--min", "rails=8"], "--min: requires --nodes. Fix: zaya verify --nodes --output "),
        (["--slower", "0"], "--slower: requires --nodes. Fix: "),
        (["cluster=mi300x_128x8"], "cluster=mi300x_128x8: is of the pairs of nodes, and requires --nodes"),
        (
            ["cluster.environment.NCCL_A='a b'", "--nodes", "n1", "--launcher", "env NODE={node}"],
            "NCCL_A=a b: cannot be passed to another node",
        ),
        (["--nodes", "n1", "--bundle", "runs/mine"], "--bundle=runs/mine: packs the record of this node"),
    ],
)
def test_mistakes_of_the_user(tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert cli.main(["verify", "--output", str(tmp_path / "verify.json"), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_slurm_job_starts_a_step_on_each_of_its_nodes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[08-10],m1")
    assert cli.main(["verify", "--nodes", "--output", str(tmp_path / "out" / "verify.json"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("--nodelist=")[2].split()[0] for line in lines[:4]] == ["m1", "n08", "n09", "n10"]
    assert not (tmp_path / "out").exists()
