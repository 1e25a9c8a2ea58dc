# SPDX-License-Identifier: Apache-2.0
"""Test the checks `rates`, `links` and `storage`, each with its fault, and the expected rates of a device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zaya_plugin.bench import probes
from zaya_plugin.machines import hardware
from zaya_plugin.machines.checks import Setting
from zaya_plugin.plan.known_machine import full_device_name, machine_of

CPU_SETTING = Setting("cpu", 0, "CPU x86_64", Path("unused"), chosen="cpu")


def test_rates_of_this_machine_and_a_slow_copy(monkeypatch):
    outcome = hardware.rates(CPU_SETTING)
    assert outcome.state == "pass" and outcome.figures["cpu"]["copy_tb_per_s"] > 1e-3
    assert outcome.figures["cpu"]["wrong"] == ()
    monkeypatch.setattr(probes, "stream", lambda *given: probes.Measured(1e9, 2.0, 0, 1))
    outcome = hardware.rates(CPU_SETTING)
    assert outcome.state == "slow" and "copy_tb_per_s 0.0005, expected 0.001" in outcome.reason


def test_a_product_or_copy_with_wrong_numbers_is_wrong(monkeypatch):
    product, copy = torch.mm, torch.Tensor.copy_

    def damaged(left, right, **named):
        out = product(left, right, **named)
        out[7, 9] += 1
        return out

    monkeypatch.setattr(torch, "mm", damaged)
    outcome = hardware.rates(CPU_SETTING)
    assert outcome.state == "wrong"
    assert outcome.reason == "cpu: 1 of 262,144 elements of a product are wrong"
    monkeypatch.setattr(torch, "mm", product)

    def forgetful(target, source):
        copy(target, source)
        return target.index_fill_(0, torch.tensor([5]), 0) if target.dim() == 1 else target

    monkeypatch.setattr(torch.Tensor, "copy_", forgetful)
    assert hardware.rates(CPU_SETTING).reason == "cpu: 1 of 8,388,608 numbers of a copy differ"


@pytest.mark.parametrize(
    ("name", "copy", "state", "kind"),
    [
        ("AMD Instinct MI300X", 4.0e12, "pass", "PREDICTION"),
        ("AMD Instinct MI300X", 2.0e12, "slow", "PREDICTION"),
        ("NVIDIA H200", 4.0e12, "pass", "measured"),
        ("NVIDIA B300", 1.0e12, "pass", "none"),
    ],
)
def test_a_device_is_compared_with_its_recipe(monkeypatch, name, copy, state, kind):
    monkeypatch.setattr(probes, "measure", lambda device, dtype: probes.Rates(700e12, copy))
    outcome = hardware.rates(Setting("cuda", 2, name, Path("unused")))
    assert outcome.state == state and list(outcome.figures) == ["cuda:0", "cuda:1"]
    assert outcome.expected["kind"].startswith(kind)


@pytest.mark.parametrize(
    "name, architecture, units, gib, expected",
    [
        ("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", 304, 192, "MI300X"),  # no amdgpu.ids in the container
        ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304, 192, "MI300X"),
        ("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", 304, 256, None),  # an MI325X
        ("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", 38, 24, None),  # a partition
        ("AMD Radeon Graphics", "gfx1100", 304, 192, None),
        ("AMD Radeon Graphics", "gfx950:sramecc+:xnack-", 256, 288, "MI355X"),
        ("AMD Instinct MI355X", "gfx950:sramecc+:xnack-", 256, 288, "MI355X"),
        ("AMD Instinct MI350X", "gfx950:sramecc+:xnack-", 256, 288, None),
        ("AMD Radeon Graphics", "gfx950:sramecc+:xnack-", 32, 36, None),  # a partition
        ("NVIDIA H200", "", 132, 140, "H200"),
    ],
)
def test_a_device_is_known_without_its_name(name, architecture, units, gib, expected):
    outcome = machine_of(full_device_name(name, architecture, units, gib))
    assert (outcome and outcome.name) == expected


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
    root, setting = a_root(tmp_path, files), replace(CPU_SETTING, storage=tmp_path)
    outcome = hardware.links(setting, root)
    assert outcome.state == "wrong" and outcome.reason.split("; ") == [
        "port rdma1/1 is 1: DOWN",
        "rail eth1 is down",
        "card0: PCIe link of width 8 of 16",
        "card0: 2 uncorrectable errors in umc",
    ]
    assert outcome.compared == {"rails": {"": 2.0}, "rail_gb_per_s": {"rdma0/1": 50.0}}
    outcome = hardware.storage(setting, root)
    assert outcome.state == "pass" and outcome.compared["storage_mb_per_s"][""] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert outcome.details == [f"storage {tmp_path}: nfs4 of 10.0.0.9 over eth0, a rail of the training network"]
    outcome = hardware.storage(replace(setting, storage=tmp_path / "none"), root)
    assert outcome.state == "wrong" and "cannot be written" in outcome.reason


def test_a_machine_without_rails_has_no_wrong_link(tmp_path):
    outcome = hardware.links(CPU_SETTING, tmp_path)
    assert (outcome.state, outcome.compared) == ("pass", {"rails": {"": 0.0}})
