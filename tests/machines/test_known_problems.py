# SPDX-License-Identifier: Apache-2.0
"""Each known problem is found from its facts, and not from similar facts without the problem."""

from dataclasses import replace

import pytest
from packaging.version import Version

from zaya_plugin.machines.known_problems import RULES, Facts, problems

MODULES = {"triton": True, "psutil": True, "primus": False, "primus.core": False}
HEALTHY = Facts(modules=MODULES, core=Version("0.19.2"), training=True)
MI300X = replace(HEALTHY, hip="7.1.25424", archs=("gfx942:sramecc+:xnack-",), environ={"HSA_NO_SCRATCH_RECLAIM": "1"})


def names(facts: Facts) -> list[str]:
    return [problem["name"] for problem in problems(facts)]


def test_healthy_environments_have_none():
    assert names(HEALTHY) == [] and names(MI300X) == []
    assert names(Facts()) == []


CASES = [
    ("missing-package", dict(missing=("torch",)), dict()),
    ("megatron-release", dict(core=Version("0.21.0")), dict(core=Version("0.20.0"))),
    ("megatron-release", dict(core=Version("0.15.3")), dict()),
    ("mixed-megatron", dict(mixed=True), dict()),
    ("no-zaya-train", dict(core=Version("0.16.0rc0")), dict()),
    ("no-zaya-train", dict(training=False), dict()),
    (
        "triton",
        dict(modules=MODULES | {"triton": False}),
        dict(modules=MODULES | {"triton": False}, core=Version("0.17.0")),
    ),
    ("psutil", dict(modules=MODULES | {"psutil": False}), dict()),
    (
        "broken-transformer-engine",
        dict(failures={"transformer_engine": "RuntimeError: Found empty `transformer-engine` meta package"}),
        dict(failures={"transformer_engine": "ImportError: libcuda.so.1"}),
    ),
    (
        "no-transformer-engine",
        dict(failures={"transformer_engine": "ModuleNotFoundError: No module named 'onnxscript'"}),
        dict(failures={"transformer_engine": "OSError: libnccl.so.2"}),
    ),
    ("mixed-cudnn", dict(failures={"cudnn": "RuntimeError: cuDNN version incompatibility"}), dict(failures={})),
    ("wrong-aiter", dict(versions={"aiter": "0.13.20191203"}), dict(versions={"amd-aiter": "0.1.14.post1"})),
    (
        "wrong-primus",
        dict(modules=MODULES | {"primus": True}),
        dict(modules=MODULES | {"primus": True, "primus.core": True}),
    ),
    ("async-save-rocm", dict(hip="7.0.51831-a3e329ad8", archs=("gfx90a",)), dict(hip="7.1.25424", archs=("gfx90a",))),
    ("async-save-rocm", dict(hip="7.0.51831abc", archs=("gfx90a",)), dict(hip="7.1.25424abc", archs=("gfx90a",))),
    ("async-save-rocm", dict(hip="6.4.43483-a187df25c", archs=("gfx90a",)), dict(hip="7.15.0", archs=("gfx90a",))),
    (
        "stale-mha",
        dict(hip="7.1", archs=("gfx90a",), versions={"amd-aiter": "0.1.14", "transformer-engine": "2.13.0"}),
        dict(hip="7.1", archs=("gfx90a",), versions={"amd-aiter": "0.1.14", "transformer-engine": "2.15.0.dev0"}),
    ),
    ("scratch-reclaim", dict(hip="7.1", archs=("gfx942",)), dict(hip="7.1", archs=("gfx950",))),
    (
        "wide-stores",
        dict(hip="7.1", archs=("gfx942",), versions={"pytorch-triton-rocm": "3.5.1+gita272dfa8"}),
        dict(hip="7.1", archs=("gfx90a",), versions={"pytorch-triton-rocm": "3.5.1+gita272dfa8"}),
    ),
    (
        "wide-stores",
        dict(hip="7.1", archs=("gfx950:sramecc+:xnack-",), versions={"triton": "3.7.1"}),
        dict(hip="7.1", archs=("gfx950:sramecc+:xnack-",), versions={"triton": "3.8.0"}),
    ),
    (
        "wide-stores",
        dict(hip="7.1", archs=("gfx942:sramecc+:xnack-",), versions={"triton": "3.7.1"}),
        dict(hip="7.1", archs=("gfx942:sramecc+:xnack-",), versions={"triton": "3.8.0"}),
    ),
    ("devices-hidden", dict(hip="7.1", environ={"HIP_VISIBLE_DEVICES": ""}), dict(cuda="13.0", archs=("sm_90",))),
    (
        "dynamo-off",
        dict(archs=("sm_90",), environ={"TORCHDYNAMO_DISABLE": "1"}),
        dict(environ={"TORCHDYNAMO_DISABLE": "1"}),
    ),
    ("primus-patches", dict(environ={"PRIMUS_PATCHES": "none"}), dict(environ={"PRIMUS_PATCHES": "all"})),
    ("patch-range", dict(unfit=("a.b",)), dict()),
]


@pytest.mark.parametrize("name, wrong, right", CASES)
def test_a_problem_is_found_where_it_is_and_not_next_to_it(name, wrong, right):
    assert name in names(replace(HEALTHY, **wrong))
    assert name not in names(replace(HEALTHY, **right))


def test_every_rule_has_a_case():
    assert {name for name, _, _ in CASES} == {
        problem["name"] for _, wrong, _ in CASES for problem in problems(replace(HEALTHY, **wrong))
    }
    assert len(RULES) == len({name for name, _, _ in CASES})


def test_errors_come_first_and_say_what_to_do():
    outcome = problems(replace(HEALTHY, core=Version("0.15.0"), modules=MODULES | {"psutil": False}))
    assert [entry["severity"] for entry in outcome] == sorted(
        (p["severity"] for p in outcome), key=lambda s: s != "error"
    )
    assert all(len(entry["why"]) > 20 and len(entry["remedy"]) > 10 and entry["evidence"] for entry in outcome)
