# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis preflight`: which nodes pass, what is read from a node, and one real run of two "nodes"."""

import json
import shlex
import sys
import time

import pytest

from zaya_plugin import cli
from zaya_plugin.aegis import preflight
from zaya_plugin.aegis.preflight import rounds
from zaya_plugin.aegis.preflight_node import Node, look_at_links, look_at_storage, take_verify
from zaya_plugin.aegis.preflight_verdict import judge


def node(name, gemm=500.0, pairs=(), **figures):
    given = {"gemm_tflops": {"cuda:0": gemm, "cuda:1": 500.0}, "all_reduce_gb_per_s": {"": 300.0}}
    return Node(name, figures=given | {each: {"": value} for each, value in figures.items()}, pairs=dict(pairs))


def reasons(nodes, slower=0.1, **least):
    judge(nodes, least, slower)
    return {each.node: [reason for _, reason in each.failures] for each in nodes}


def test_a_node_below_its_peers_or_a_threshold_fails_and_names_the_device():
    found = reasons([node("n1"), node("n2", 440.0), node("n3", 460.0)])
    assert found == {"n1": [], "n2": ["gemm_tflops of cuda:0 is 440, 12% below the others' median 500"], "n3": []}
    found = reasons([node("n1"), node("n2", 460.0)], gemm_tflops=470.0, storage_mb_per_s=1.0)
    assert found["n2"] == ["gemm_tflops of cuda:0 is 460, the threshold 470", "storage_mb_per_s was not measured"]
    assert found["n1"] == ["storage_mb_per_s was not measured"]
    assert reasons([node("n1", storage_mb_per_s=100.0), node("n2", storage_mb_per_s=60.0)]) == {"n1": [], "n2": []}
    disks = [node("n1", storage_mb_per_s=100.0), node("n2", storage_mb_per_s=40.0)]
    assert reasons(disks, slower=0.95) == {
        "n1": [],
        "n2": [],
    }  # --slower is for storage too, where it is more than a half
    assert reasons(disks)["n2"] == ["storage_mb_per_s is 40, 60% below the others' median 100"]
    amd = Node("n1", name="AMD Instinct MI300X", figures={"gemm_tflops": {"cuda:0": 599.0}})
    assert reasons([amd]) == {"n1": ["gemm_tflops of cuda:0 is 599, the threshold 600"]}


def test_a_node_with_fewer_rails_has_amds_code():
    nodes = [node("n1", rails=8.0), node("n2", rails=7.0), node("n3", rails=8.0)]
    judge(nodes, {}, 0.1)
    assert [each.failures for each in nodes] == [[], [["210", "rails is 7, 12% below the others' median 8"]], []]


def test_the_node_that_is_slow_with_each_partner_is_the_cause():
    pairs = {("n1", "n2"): 48.0, ("n2", "n3"): 9.0, ("n3", "n4"): None, ("n4", "n1"): 50.0}
    nodes = [node(f"n{number}") for number in range(1, 5)]
    for (one, other), rate in pairs.items():
        nodes[int(one[1]) - 1].pairs[other] = nodes[int(other[1]) - 1].pairs[one] = rate
    found = reasons(nodes)
    assert [name for name, each in found.items() if each] == ["n3"]
    assert found["n3"] == ["the all-reduce is slow or fails with each partner (GB/s: n2 9, n4 failed)"]


@pytest.mark.parametrize("number", range(1, 9))
def test_each_node_has_two_partners_and_one_at_a_time(number):
    names = [f"n{i}" for i in range(number)]
    found = rounds(names)
    partners = {name: set() for name in names}
    for pairs in found:
        used = [name for pair in pairs for name in pair]
        assert len(used) == len(set(used))
        for one, other in pairs:
            partners[one].add(other)
            partners[other].add(one)
    assert {len(each) for each in partners.values()} == {min(2, number - 1)}


def test_lines_of_verify_become_figures_and_failures():
    found = Node("n1")
    lines = [
        ("environment", "wrong", "7 of 8 devices", {}),
        ("rates", "slow", "cuda:0: gemm_tflops 300", {"cuda:0": {"gemm_tflops": 300.0, "copy_tb_per_s": 4.0}}),
        ("all_reduce", "pass", "", {"sizes": [{"gb_per_s": 1.0}, {"gb_per_s": 310.0}]}),
    ]
    rows = [dict(zip(("line", "state", "reason", "figures"), each, strict=True)) for each in lines]
    take_verify(found, {"machine": {"name": "AMD"}, "complete": False, "lines": rows})
    assert found.failures == [["", "zaya verify did not come to its end"], ["004", "environment: 7 of 8 devices"]]
    assert found.figures == {
        "gemm_tflops": {"cuda:0": 300.0},
        "copy_tb_per_s": {"cuda:0": 4.0},
        "all_reduce_gb_per_s": {"": 310.0},
    }


def a_root(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def test_links_counters_and_the_storages_network_are_read(tmp_path):
    ib, drm = "sys/class/infiniband", "sys/class/drm"
    files = {
        f"{ib}/rdma0/ports/1/state": "4: ACTIVE\n",
        f"{ib}/rdma0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        f"{ib}/rdma0/ports/1/gid_attrs/ndevs/0": "eth0\n",
        f"{ib}/rdma1/ports/1/state": "1: DOWN\n",
        f"{ib}/rdma1/ports/1/gid_attrs/ndevs/0": "eth1\n",
        "sys/class/net/eth0/operstate": "up\n",
        "sys/class/net/eth1/operstate": "down\n",
        f"{drm}/card0/device/current_link_width": "8\n",
        f"{drm}/card0/device/max_link_width": "16\n",
        f"{drm}/card0/device/ras/umc_err_count": "ue: 2\nce: 9\n",
        f"{drm}/card1/device/ras/umc_err_count": "ue: 0\nce: 9\n",
        "proc/self/mountinfo": f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {tmp_path} rw - nfs4 "
        "srv:/x rw,addr=10.0.0.9,vers=4\n",
        "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU\n"
        "eth9 00000000 0100000A 3 0 0 0 00000000 0\neth0 0000000A 00000000 1 0 0 0 00FFFFFF 0\n",
    }
    found, root = Node("n1"), a_root(tmp_path, files)
    rails = look_at_links(found, root)
    assert rails == {"eth0", "eth1"}
    assert found.failures == [
        ["201", "port rdma1/1 is 1: DOWN"],
        ["202", "rail eth1 is down"],
        ["308", "card0: PCIe link of width 8 of 16"],
        ["008", "card0: 2 uncorrectable errors in umc"],
    ]
    assert found.figures == {"rails": {"": 2.0}, "rail_gb_per_s": {"rdma0/1": 50.0}}
    look_at_storage(found, tmp_path, rails, root)
    assert found.figures["storage_mb_per_s"][""] > 0 and not (tmp_path / ".preflight.n1").exists()
    assert found.notes == [f"storage {tmp_path}: nfs4 of 10.0.0.9 over eth0, a rail of the training network"]
    look_at_storage(found, tmp_path / "none", rails, root)
    assert "cannot be written" in found.failures[-1][1]


# In place of ssh: writes the report of a node whose name says how it is, or runs the program that it is given.
LAUNCHER = """
import json, os, sys, time
node, words = sys.argv[1], sys.argv[2:]
if "zaya_plugin.verify.collective_rank" in words:  # of a pair
    if words[-4] == "0":
        open(words[-2] + "/result.json", "w").write(json.dumps({"sizes": [{"gb_per_s": 40.0, "right": True}]}))
    sys.exit(0)
report = {"node": node, "figures": {"gemm_tflops": {"cuda:0": 300.0 if node == "slow" else 500.0}}}
if node == "gone":
    sys.exit(255)
if node == "stuck":
    report["doing"] = "writing 64 MiB to /x"
open(f"{words[-3]}/{node}.json", "w").write(json.dumps(report))
if node == "stuck":
    time.sleep(600)
"""


class Clock:
    """The clock of a preflight whose node `stuck` has begun to hang when its time is over."""

    def __init__(self, report):
        self.report, self.calls = report, 0

    def monotonic(self):
        self.calls += 1
        if self.calls != 7:  # of the deadline, and of the wait for each of the other five nodes
            return time.monotonic()
        while not (self.report.exists() and self.report.read_text()):
            time.sleep(0.01)
        return time.monotonic() + preflight.SECONDS


def test_failing_nodes_are_written_and_a_node_that_hangs_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "time", Clock(tmp_path / "out" / "nodes" / "stuck.json"))
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    words = ["aegis", "preflight", "--output", str(tmp_path / "out"), "--nodes", "n1,n2,n3,slow,gone,stuck"]
    words += ["--launcher", shlex.join([sys.executable, "-S", str(tmp_path / "launcher.py"), "{node}"])]
    assert cli.main(words) == 1
    assert (tmp_path / "out" / "passing_nodes.txt").read_text() == "n1\nn2\nn3\n"
    assert (tmp_path / "out" / "failing_nodes.txt").read_text() == "gone\nslow\nstuck\n"
    found = {each["node"]: each for each in json.loads((tmp_path / "out" / "preflight.json").read_text())}
    assert found["gone"]["failures"] == [["", "no report, exit code 255; see nodes/gone.log"]]
    assert found["stuck"]["failures"] == [["", "it did not end: writing 64 MiB to /x"]]
    assert "40% below the others' median 500" in found["slow"]["failures"][0][1]
    assert found["n1"]["pairs"] == {"n2": 40.0, "slow": 40.0}
    assert "3 of 6 nodes pass" in capsys.readouterr().out
    assert cli.main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("zaya_plugin.aegis.preflight") == 6 and "pairs, round 1: gone with n1" in out


@pytest.mark.slow
def test_two_nodes_of_this_machine_for_real(tmp_path, capsys):
    words = ["--output", str(tmp_path), "--nodes", "n1,n2", "--launcher", "env NODE={node}", "--device", "cpu"]
    code = preflight.main([*words, "--slower", "0.95", "--min", "gemm_tflops=0.001"])
    out = capsys.readouterr().out
    assert code == 0, out
    found = json.loads((tmp_path / "preflight.json").read_text())
    assert [sorted(each["figures"]) for each in found] == 2 * [
        ["all_reduce_gb_per_s", "copy_tb_per_s", "gemm_tflops", "rails", "storage_mb_per_s"]
    ]
    assert found[0]["pairs"]["n2"] == found[1]["pairs"]["n1"] > 0.001
    assert (tmp_path / "passing_nodes.txt").read_text() == "n1\nn2\n"
    silent = ["--launcher", "sh -c 'sleep 60' {node}", "--seconds", "1"]
    assert preflight.main([*words, *silent]) == 1
    assert capsys.readouterr().out.count("no report in time; see nodes/n") == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "n1,n2"], "--launcher: is needed: several nodes, and no SLURM job"),
        (["--nodes=-oProxyCommand=x"], "is no name"),
        (["--slower", "2"], "--slower=2.0: is no share"),
        (["--min", "gemm"], "--min=gemm: is no threshold"),
        (["--launcher", "ssh '{node}"], "is not clear (No closing quotation)"),
    ],
)
def test_mistakes_of_the_user(tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert cli.main(["aegis", "preflight", "--output", str(tmp_path), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_slurm_job_starts_a_step_on_each_of_its_nodes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[08-10],m1")
    assert cli.main(["aegis", "preflight", "--output", str(tmp_path / "out"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("--nodelist=")[2].split()[0] for line in lines[:4]] == ["m1", "n08", "n09", "n10"]
    assert not (tmp_path / "out").exists()
