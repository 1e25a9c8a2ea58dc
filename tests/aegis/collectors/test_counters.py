# SPDX-License-Identifier: Apache-2.0
"""GPU, link, RDMA and host counters on recorded trees: growth is evidence, absolute values and defects are not."""

import json
import os
import stat
import sys

import pytest

from zaya_plugin.aegis.collectors.gpu import DEFECT, AmdSmi, GpuSysfs
from zaya_plugin.aegis.collectors.host import Host
from zaya_plugin.aegis.collectors.network import LEAST_GROWTH, Links, Packets, Rdma, statistics


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def told(collector, now=1000.0):
    return [(e.rule, e.values) for e in collector.poll(now)]


@pytest.fixture
def gpus(tmp_path):
    """Two MI300X and the server's own display chip."""
    for card, vendor in (("card0", "0x1a03"), ("card1", "0x1002"), ("card2", "0x1002")):
        write(tmp_path / f"sys/class/drm/{card}/device/vendor", f"{vendor}\n")
        write(tmp_path / f"sys/class/drm/{card}-DP-1/status", "disconnected\n")
    errors(tmp_path, "card1", "umc", ue=3, ce=500)
    errors(tmp_path, "card1", "xgmi_wafl", ue=0, ce=0)
    return tmp_path


def errors(root, card, block, ue=0, ce=0, de=None):
    text = f"ue: {ue}\nce: {ce}\n" + ("" if de is None else f"de: {de}\n")
    write(root / f"sys/class/drm/{card}/device/ras/{block}_err_count", text)


def test_gpu_errors_are_reported_when_they_grow(gpus):
    collector = GpuSysfs("n1", gpus)
    assert told(collector) == [] == told(collector)  # old errors
    errors(gpus, "card1", "umc", ue=4, ce=510, de=0)
    assert told(collector) == [("counter_ue", {"gpu": "card1", "block": "umc", "kind": "ue", "growth": 1})]
    errors(gpus, "card1", "umc", ue=4, ce=600, de=2)
    assert [(rule, values["growth"]) for rule, values in told(collector)] == [
        ("counter_ce", 100),
        ("counter_deferred", 2),
    ]
    errors(gpus, "card1", "xgmi_wafl", ue=1)
    assert [rule for rule, _ in told(collector)] == ["counter_xgmi"] and told(collector) == []
    errors(gpus, "card1", "umc", ue=0)  # after a reset of the GPU
    assert told(collector) == []


def test_the_defect_of_the_report_is_no_error(gpus):
    collector, total = GpuSysfs("n1", gpus), 500
    assert told(collector) == []
    for query in range(5):
        total += DEFECT
        errors(gpus, "card1", "umc", ue=3 + DEFECT * query, ce=total)
        assert told(collector) == []
    errors(gpus, "card1", "umc", ue=3 + DEFECT * 5 + 2, ce=total)
    assert [(rule, values["growth"]) for rule, values in told(collector)] == [("counter_ue", 2)]


def test_a_gpu_that_is_gone_is_named(gpus):
    collector = GpuSysfs("n1", gpus)
    assert told(collector) == []
    (gpus / "sys/class/drm/card2/device/vendor").unlink()
    assert told(collector) == [("gpu_missing", {"gpu": "card2", "left": 1})] and told(collector) == []


def test_without_a_gpu_there_is_nothing(tmp_path):
    assert told(GpuSysfs("n1", tmp_path)) == [] == told(AmdSmi("n1", "no-such-amd-smi"))


METRIC = {
    "gpu": 0,
    "power": {"socket_power": {"value": 700, "unit": "W"}, "throttle_status": "N/A"},
    "ecc": {"total_correctable_count": 5, "total_uncorrectable_count": 0, "total_deferred_count": "N/A"},
    "ecc_blocks": {
        "UMC": {"correctable": 5, "uncorrectable": 0},
        "XGMI_WAFL": {"correctable_count": 0, "uncorrectable_count": 0},
    },
    "pcie": {"replay_count": 0, "nak_sent_count": "N/A"},
    "throttle": {"ppt_accumulated": 10, "hbm_thermal_accumulated": "N/A", "prochot_accumulated": 0},
    "xgmi_err": "N/A",
}


@pytest.fixture
def amd_smi(tmp_path):
    """An amd-smi that prints the files metric and bad-pages."""
    tool = tmp_path / "amd-smi"
    tool.write_text(f"#!{sys.executable} -IS\nimport sys\nprint(open({str(tmp_path)!r} + '/' + sys.argv[1]).read())\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "bad-pages").write_text("No bad pages found.")
    return tool


@pytest.mark.parametrize("form", ["list", "object", "warning first"])
def test_amd_smi_in_the_forms_of_its_versions(amd_smi, form):
    def answer(**changes):
        gpu = json.loads(json.dumps(METRIC))
        for path, value in changes.items():
            group, _, name = path.partition("__")
            gpu[group][name] = value
        text = json.dumps({"gpu_data": [gpu]} if form == "object" else [gpu])
        (amd_smi.parent / "metric").write_text("WARNING: User is missing\n" + text if form == "warning first" else text)

    collector = AmdSmi("n1", str(amd_smi))
    answer()
    assert told(collector) == []
    answer(throttle__ppt_accumulated=99999, pcie__replay_count=500, ecc__total_correctable_count="N/A")
    assert told(collector) == []  # the power limit, a few replays, a field that is not there for once
    (amd_smi.parent / "bad-pages").write_text(json.dumps([{"gpu": 0, "retired": [{"page": 1}, {"page": 2}]}]))
    answer(ecc__total_uncorrectable_count=2, throttle__hbm_thermal_accumulated=7, pcie__replay_count={"value": 1500})
    rules = [(rule, values["growth"]) for rule, values in told(collector)]
    assert rules == [("counter_ue", 2), ("counter_pcie", 1500), ("counter_bad_pages", 2)]
    answer(throttle__hbm_thermal_accumulated=9, ecc_blocks__XGMI_WAFL={"uncorrectable_count": 1})
    assert [rule for rule, _ in told(collector)] == ["counter_xgmi", "counter_throttle"]


@pytest.mark.parametrize("text", ["", "not json", "[", "null", "[1, 2]", '{"a": {"b": []}}', '"N/A"'])
def test_an_answer_of_an_unknown_form_is_no_evidence(amd_smi, text):
    (amd_smi.parent / "metric").write_text(text)
    (amd_smi.parent / "bad-pages").write_text(text)
    assert told(AmdSmi("n1", str(amd_smi))) == []


def test_an_amd_smi_that_hangs_is_reported_and_left_alone(tmp_path):
    tool = tmp_path / "amd-smi"
    tool.write_text(f"#!{sys.executable} -IS\nimport time\ntime.sleep(60)\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (late,) = AmdSmi("n1", str(tool), seconds=0.3).poll(1000.0)
    assert late.rule == "collector_late" and "does not end in 0.3 s" in late.text


def link(root, name, state="up", changes=2, downs=1, device=True):
    folder = root / "sys/class/net" / name
    if device:
        (folder / "device").mkdir(parents=True, exist_ok=True)
    write(folder / "operstate", f"{state}\n")
    write(folder / "carrier_changes", f"{changes}\n")
    if downs is not None:
        write(folder / "carrier_down_count", f"{downs}\n")


def test_a_link_that_goes_down_and_comes_back(tmp_path):
    link(tmp_path, "eth0"), link(tmp_path, "eth1", "down", 0, 0), link(tmp_path, "lo", device=False)
    links = Links("n1", root=tmp_path)
    assert told(links) == [] == told(links)  # eth1 was never up
    link(tmp_path, "eth0", "down", 3, 2)
    assert told(links, 1010.0) == [("link_down", {"interface": "eth0"})] and told(links, 1011.0) == []
    link(tmp_path, "eth0", "up", 4, 2)
    assert told(links, 1012.0) == [("link_flap", {"interface": "eth0", "seconds": 2.0, "recovered": True})]
    assert told(links) == []


@pytest.mark.parametrize("downs", [(1, 2), (None, None)])
def test_a_flap_between_two_polls_is_seen(tmp_path, downs):
    link(tmp_path, "eth0", "up", 2, downs[0])
    links = Links("n1", root=tmp_path)
    assert told(links) == []
    link(tmp_path, "eth0", "up", 4, downs[1])
    assert told(links) == [("link_flap", {"interface": "eth0", "count": 1, "recovered": True})] and told(links) == []


def test_an_interface_that_is_gone_is_down_and_named_ones_need_no_device(tmp_path):
    link(tmp_path, "veth1", device=False), link(tmp_path, "eth0")
    links = Links("n1", interfaces=("veth1",), root=tmp_path)
    assert told(links) == []
    link(tmp_path, "eth0", "down", 3, 2)  # not watched
    for path in (tmp_path / "sys/class/net/veth1").iterdir():
        path.unlink()
    os.rmdir(tmp_path / "sys/class/net/veth1")
    assert told(links) == [("link_down", {"interface": "veth1"})]


def test_infiniband_ports_count_and_roce_ports_do_not_count_twice(tmp_path):
    ports = tmp_path / "sys/class/infiniband"
    write(ports / "mlx5_0/ports/1/state", "4: ACTIVE\n")
    write(ports / "ionic_0/ports/1/state", "4: ACTIVE\n")
    write(ports / "ionic_0/ports/1/gid_attrs/ndevs/0", "eth0\n")
    link(tmp_path, "eth0")
    links = Links("n1", root=tmp_path)
    assert told(links) == []
    write(ports / "mlx5_0/ports/1/state", "1: DOWN\n")
    write(ports / "ionic_0/ports/1/state", "1: DOWN\n")
    assert told(links) == [("link_down", {"interface": "mlx5_0/1"})]


def test_a_port_is_compared_with_its_peers(tmp_path):
    def count(values, fatal=0):
        for at, value in enumerate(values):
            folder = tmp_path / f"sys/class/infiniband/bnxt_re{at}/ports/1/hw_counters"
            write(folder / "out_of_sequence", f"{value}\n")
            write(folder / "unrecoverable_err", f"{fatal if at == 2 else 0}\n")

    rdma = Rdma("n1", tmp_path, rdma="none", ethtool="none")
    count([10**6, 0, 0, 0])
    assert told(rdma) == []
    count([10**6 + 20 * LEAST_GROWTH] + [20 * LEAST_GROWTH] * 3)  # a burst on all rails
    assert told(rdma) == []
    count([10**6 + 20 * LEAST_GROWTH, 50 * LEAST_GROWTH, 20 * LEAST_GROWTH + 5, 20 * LEAST_GROWTH], fatal=1)
    found = told(rdma)
    assert ("counter_rdma", {"port": "bnxt_re1/1", "counter": "out_of_sequence", "growth": 30 * LEAST_GROWTH}) in found
    assert ("counter_rdma_fatal", {"port": "bnxt_re2/1", "counter": "unrecoverable_err", "growth": 1}) in found
    assert len(found) == 2


def test_what_rdma_statistic_prints():
    text = '[{"ifindex":0,"ifname":"ionic_0","port":1,"tx_rdma_ack_timeout":7,"rx_rdma_ucast_pkts":99,"x":"N/A"}]'
    assert list(statistics(text)) == [("ionic_0/1", "tx_rdma_ack_timeout", 7)]
    assert list(statistics("")) == [] == list(statistics("[1, null]"))


def host(root, kills=0, cgroup=None, available=500_000, full="0.00"):
    write(root / "proc/vmstat", f"nr_free_pages 1\noom_kill {kills}\n")
    write(root / "proc/meminfo", f"MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
    write(root / "proc/pressure/memory", f"some avg10=50.00 avg60=0 avg300=0 total=1\nfull avg10={full} avg60=0\n")
    write(root / "proc/self/cgroup", "12:memory:/job_1\n0::/slurm/job_1\n")
    if cgroup is not None:
        write(root / "sys/fs/cgroup/slurm/job_1/memory.events", f"oom 9\noom_kill {cgroup}\noom_group_kill 0\n")
        write(root / "sys/fs/cgroup/memory/job_1/memory.oom_control", f"oom_kill_disable 0\noom_kill {cgroup}\n")


def test_the_host(tmp_path):
    host(tmp_path, kills=3, cgroup=1)
    collector = Host("n1", tmp_path)
    assert told(collector) == []
    host(tmp_path, kills=4, cgroup=1)
    assert told(collector) == [("oom_kill", {"count": 1, "where": "the machine"})]
    host(tmp_path, kills=6, cgroup=3)
    assert told(collector) == [("oom_kill", {"count": 2, "where": "its memory cgroup"})]
    host(tmp_path, kills=6, cgroup=3, available=29_000, full="35.10")
    assert [rule for rule, _ in told(collector)] == ["memory_low", "pressure"] and told(collector) == []
    host(tmp_path, kills=6, cgroup=3)
    assert told(collector) == []
    assert told(Host("n1", tmp_path / "nothing")) == []


def test_segments_that_are_sent_again_are_reported_once_until_few_are(tmp_path):
    packets = Packets("n1", tmp_path)
    assert packets.poll(1.0) == []  # no such file

    def polled(sent, again):
        write(
            tmp_path / "proc/self/net/snmp", f"Ip: Forwarding\nIp: 1\nTcp: OutSegs RetransSegs\nTcp: {sent} {again}\n"
        )
        return told(packets)

    assert polled(10_000, 5_000) == []  # before the run
    assert polled(11_000, 5_019) == []  # 19 are few
    assert polled(12_000, 5_060) == [("packets_lost", {"sent": 2000, "again": 60})]
    assert polled(13_000, 5_100) == []
    assert polled(14_000, 5_100) == [] and polled(15_000, 5_100) == []
    assert polled(16_000, 5_141) == [("packets_lost", {"sent": 2000, "again": 41})]
    write(tmp_path / "proc/self/net/snmp", "Tcp: OutSegs\nTcp:")
    assert told(packets) == []
