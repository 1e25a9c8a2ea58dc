# SPDX-License-Identifier: Apache-2.0
"""Each known problem is seen from its facts, and not from facts that nearly have it; the facts are read from the
machine.
"""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

from zaya_plugin import compat
from zaya_plugin.machines import installed, known_problems
from zaya_plugin.machines.checks import Setting
from zaya_plugin.machines.facts import Facts
from zaya_plugin.machines.known_problems import RULES, problems
from zaya_plugin.run.surroundings import REQUIRED

ROOT = Path(__file__).parents[2]
CPU_SETTING = Setting("cpu", 0, "CPU x86_64", Path("unused"), chosen="cpu")
MODULES = {"triton": True, "psutil": True, "primus": False, "primus.core": False}
HEALTHY = Facts(modules=MODULES, core=Version("0.19.2"), training=True)
GFX942 = "gfx942:sramecc+:xnack-"
ROCM = dict(
    hip="7.2.53211",
    archs=(GFX942,) * 8,
    kfd=("gfx942",) * 8,
    compiled_archs=("gfx90a", "gfx942"),
    nccl="2.27.7",
    runtimes=("/opt/rocm/lib/libamdhip64.so.7",),
    networks=("ionic_0", "ionic_1"),
    shm_bytes=64 * 2**30,
    versions={"torch": "2.11.0+rocm7.2", "triton": "3.8.0+git0263a6a6.rocm7.2", "transformers": "5.24.0"},
    environ={"HSA_NO_SCRATCH_RECLAIM": "1", "GPU_MAX_HW_QUEUES": "4", "PRIMUS_PATCHES": "all"},
    caches={"/local/.triton/cache": "ext4"},
)
MI300X = replace(HEALTHY, **ROCM)


def rocm(versions=(), environ=(), **facts) -> dict:
    """Return the facts of a healthy MI300X node with these changes."""
    merged = {"versions": {**ROCM["versions"], **dict(versions)}, "environ": {**ROCM["environ"], **dict(environ)}}
    return {**ROCM, **merged, **facts}


def names(facts: Facts) -> list[str]:
    return [problem["name"] for problem in problems(facts)]


def test_healthy_environments_have_none():
    assert names(HEALTHY) == [] and names(MI300X) == [] and names(Facts()) == []


NO_TRITON = MODULES | {"triton": False}
MHA = {"amd-aiter": "0.1.14", "transformer-engine": "2.13.0"}
CUDA = dict(cuda="13.0", archs=("sm_90",))
EXPANDABLE = "max_split_size_mb:512,expandable_segments:True"
# A rule, facts that have its problem, and facts that nearly have it: each condition of a rule is false in one of them.
CASES = [
    ("missing-package", dict(missing=("torch",)), dict(versions={"torch": "2.13.0"})),
    ("cuda-torch-on-amd", rocm({"torch": "2.12.0+cu130"}, hip=None, cuda="13.0", archs=()), rocm(archs=())),
    (
        "cuda-torch-on-amd",
        dict(cuda="13.0", kfd=("gfx942",), versions={"torch": "2.12.0"}),
        dict(cuda="13.0", kfd=("gfx1103",), versions={"torch": "2.12.0"}),  # a laptop with Radeon graphics
    ),
    (
        "cuda-torch-on-amd",
        dict(cuda="13.0", kfd=("gfx950",)),
        dict(kfd=("gfx950",), versions={"torch": "2.12.0+cpu"}),  # a torch for the CPU, on purpose
        dict(cuda="13.0", kfd=("gfx950",), archs=("sm_90",)),
    ),
    ("hidden-torch", dict(outer_torch="/tmp/zaya does not see /opt/venv/torch"), dict(versions={"torch": "2.12.0"})),
    ("megatron-release", dict(core=Version("0.21.0")), dict(core=Version("0.20.0"))),
    ("megatron-release", dict(core=Version("0.15.3")), dict(core=Version("0.16.0rc0"))),
    ("mixed-megatron", dict(mixed=True), dict(training=False)),
    ("no-zaya-train", dict(core=Version("0.16.0rc0")), dict(core=Version("0.19.0"))),
    ("no-zaya-train", dict(training=False), dict(training=False, core=None)),
    ("no-zaya-train", rocm(training=False), rocm(core=Version("0.20.0"))),
    ("triton", dict(modules=NO_TRITON), dict(modules=NO_TRITON, core=Version("0.17.0"))),
    ("foreign-triton", rocm({"triton": "3.8.0"}), dict(cuda="13.0", versions={"triton": "3.8.0"})),
    (
        "old-triton",
        rocm({"triton": "3.4.0+rocm7.1"}),
        rocm({"triton": "3.5.0+rocm7.2"}),
        CUDA | dict(versions={"triton": "3.4.0"}),
    ),
    ("old-triton", rocm({"triton": None, "pytorch-triton-rocm": "3.3.1"}), rocm({"pytorch-triton-rocm": "3.5.1"})),
    ("wide-stores", rocm({"triton-rocm": "3.7.1"}), rocm({"triton-rocm": "3.7.1"}, archs=("gfx90a",))),
    ("wide-stores", rocm({"triton": "3.7.1"}, archs=("gfx950",)), rocm({"triton": "3.8.0"}, archs=("gfx950",))),
    ("wide-stores", rocm({"triton": "3.7.1+gita272dfa8"}), rocm({"triton": "3.8.0+gita272dfa8"})),
    ("psutil", dict(modules=MODULES | {"psutil": False}), dict(modules=MODULES | {"psutil": False}, core=None)),
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
    (
        "mixed-cudnn",
        dict(failures={"cudnn": "RuntimeError: cuDNN version incompatibility"}),
        dict(failures={"transformer_engine": "RuntimeError: cuDNN version incompatibility"}),
    ),
    (
        "wrong-aiter",
        dict(versions={"aiter": "0.13.20191203"}),
        dict(versions={"amd-aiter": "0.1.14.post1"}),
        dict(versions={"aiter": "0.13", "amd-aiter": "0.1.14"}),
    ),
    ("aiter-backward", rocm(MHA), rocm(MHA | {"transformer-engine": "2.15.0.dev0"})),
    ("aiter-backward", rocm(MHA), rocm({"transformer-engine": "2.13.0"}), CUDA | dict(versions=MHA)),
    (
        "wrong-primus",
        dict(modules=MODULES | {"primus": True}),
        dict(modules=MODULES | {"primus": True, "primus.core": True}),
    ),
    ("primus-patches", dict(environ={"PRIMUS_PATCHES": "none"}), dict(environ={"PRIMUS_PATCHES": "All"})),
    ("patch-range", dict(unfit=("a.b",)), dict(core=Version("0.20.0"))),
    ("dynamo-off", rocm(environ={"TORCHDYNAMO_DISABLE": "1"}), dict(environ={"TORCHDYNAMO_DISABLE": "1"})),
    ("no-zaya-in-transformers", rocm({"transformers": "4.55.0"}), rocm({"transformers": "5.13.0"})),
    ("old-peft", rocm({"peft": "0.21.2"}), rocm({"peft": "0.21.2", "transformers": "5.23.0"})),
    ("old-peft", rocm({"peft": "0.21.2"}), rocm({"peft": "0.22.0"})),
    (
        "wandb-protobuf",
        dict(versions={"wandb": "0.26.0", "protobuf": "6.32.0"}),
        dict(versions={"wandb": "0.26.1", "protobuf": "6.32.0"}),
    ),
    ("devices-hidden", rocm(environ={"HIP_VISIBLE_DEVICES": ""}, archs=()), dict(cuda="13.0", archs=("sm_90",))),
    (
        "kfd-denied",
        rocm(kfd_denied=True, archs=()),
        rocm(kfd_denied=True),
        rocm(archs=()),
        rocm(kfd_denied=True, archs=(), kfd=("gfx1103",)),
    ),
    (
        "visible-twice",
        rocm(environ={"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}),
        rocm(environ={"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}),
        rocm(environ={"ROCR_VISIBLE_DEVICES": "0,1"}),
        CUDA | dict(environ={"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}),
    ),
    (
        "other-architecture",
        rocm(environ={"HSA_OVERRIDE_GFX_VERSION": "9.0.10"}),
        rocm(environ={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, kfd=("gfx1103",)),
    ),
    ("no-code-for-device", rocm(archs=("gfx950",) * 8), rocm(archs=("gfx90a",))),
    ("partitioned", rocm(partitions=("CPX", "NPS4")), dict(partitions=("CPX",))),
    (
        "two-hip-runtimes",
        rocm(runtimes=("/a/libamdhip64.so.6", "/b/libamdhip64.so.7")),
        rocm(runtimes=("/a/libamdhip64.so.6",)),
        CUDA | dict(runtimes=("/a/libamdhip64.so.6", "/b/libamdhip64.so.7")),
    ),
    ("rccl-deadlock", rocm(nccl="2.30.4", hip="7.14.60850"), rocm(nccl="2.30.4", hip="7.13.0")),
    ("rccl-deadlock", rocm(nccl="2.30.4", hip="7.15.0"), rocm(nccl="2.29.7", hip="7.15.0")),
    ("rccl-deadlock", rocm(nccl="2.30.4", hip="7.15.0"), dict(nccl="2.30.4", cuda="13.0", archs=("sm_90",))),
    ("rccl-on-pollara", rocm(hip="7.1.52802-26aae437f6"), rocm(hip="7.1.52802-26aae437f6", networks=("mlx5_0",))),
    (
        "rccl-on-pollara",
        rocm(hip="7.1.25424abc"),
        rocm(hip="7.2.26015abc"),
        rocm(hip="7.0.51831"),
        dict(networks=("ionic_0",)),
    ),
    ("capture-on-rocm", rocm({"torch": "2.10.0+rocm7.2.4"}), dict(cuda="13.0", versions={"torch": "2.10.0+cu130"})),
    (
        "expandable-segments",
        rocm(environ={"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}),
        rocm({"torch": "2.10.0"}, environ={"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}),
        rocm({"torch": None}, environ={"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}),
        CUDA | dict(versions={"torch": "2.12.0"}, environ={"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}),
    ),
    (
        "expandable-segments",
        rocm(environ={"PYTORCH_HIP_ALLOC_CONF": EXPANDABLE}),
        rocm(environ={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    ),
    ("hardware-queues", rocm(environ={"GPU_MAX_HW_QUEUES": "1"}), rocm(environ={"GPU_MAX_HW_QUEUES": "2"})),
    ("hardware-queues", rocm(environ={"GPU_MAX_HW_QUEUES": "16"}), dict(environ={"GPU_MAX_HW_QUEUES": "16"})),
    ("async-save-rocm", rocm(hip="7.0.51831-a3e329ad8"), rocm(hip="7.1.25424")),
    ("async-save-rocm", rocm(hip="6.4.43483abc"), rocm(hip="7.15.0")),
    ("scratch-reclaim", {**ROCM, "environ": {}}, rocm(environ={"HSA_NO_SCRATCH_RECLAIM": "1"}, hip="7.1.25424")),
    (
        "scratch-reclaim",
        rocm(environ={"HSA_NO_SCRATCH_RECLAIM": "0"}),
        rocm(environ={"HSA_NO_SCRATCH_RECLAIM": "0"}, archs=("gfx950",)),
    ),
    (
        "serial-launches",
        rocm(environ={"AMD_SERIALIZE_KERNEL": "3"}),
        rocm(environ={"AMD_SERIALIZE_KERNEL": "0"}),
        dict(environ={"CUDA_LAUNCH_BLOCKING": "1"}),
    ),
    (
        "no-peer-access",
        rocm(environ={"NCCL_P2P_DISABLE": "1"}),
        rocm(environ={"NCCL_P2P_DISABLE": "1"}, archs=(GFX942,)),
    ),
    ("small-shm", rocm(shm_bytes=2**26), rocm(shm_bytes=2**26, archs=(GFX942,)), rocm(shm_bytes=None)),
    ("memlock", rocm(memlock_bytes=2**23), rocm(memlock_bytes=2**23, networks=()), rocm(memlock_bytes=2**33)),
    ("numa-balancing", rocm(numa_balancing=True), rocm(numa_balancing=True, kfd=())),
    ("iommu", rocm(iommu=("DMA-FQ",) * 8), rocm(iommu=("identity",) * 8), dict(iommu=("DMA",))),
    (
        "shared-kernel-cache",
        rocm(caches={"/shared/.triton/cache": "nfs4"}),
        dict(caches={"/shared/.triton/cache": "nfs4"}),
    ),
    ("noexec-kernel-cache", rocm(noexec=("/tmp/torchinductor_a is mounted noexec",)), dict(noexec=("/tmp is noexec",))),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_problem_is_seen_where_it_is_and_not_next_to_it(case):
    name, wrong, *nearly = case
    assert nearly and name in names(replace(HEALTHY, **wrong))
    for facts in (replace(HEALTHY, **changes) for changes in nearly):
        assert name not in names(facts) and facts not in (HEALTHY, MI300X)


def test_every_rule_has_a_thread_a_case_and_a_near_miss():
    assert [rule.name for rule in RULES if not re.match(r"https://[a-z.]+\.[a-z]+/\S+$", rule.thread)] == []
    assert {name for name, *_ in CASES} == {rule.name for rule in RULES} and len(RULES) >= 30
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(
        len(rule.why) > 20 and len(rule.remedy) >= 10 and rule.severity in ("error", "warning") for rule in RULES
    )


# Of these pip would install PyPI's CUDA torch and Triton, the last two as what they require.
FOREIGN = r"torch|triton|zaya_plugin\[cpu\]|megatron-core(\[training\])?|transformer-engine\[pytorch\]"
INSTALL = re.compile(rf"(pip3? install|install a build)[^;,(]*(?<![\w-])({FOREIGN})(?![\w-])")


def test_no_remedy_replaces_the_torch_or_triton_of_an_amd_image():
    """Of the rules that apply where AMD's torch or devices are, by their cases as they are and moved to ROCm."""
    moved = {key: ROCM[key] for key in ("hip", "archs", "kfd")}
    seen = {}
    for _, wrong, *_ in CASES:
        for facts in (wrong, {**wrong, **moved}):
            if facts.get("hip") or facts.get("kfd"):
                seen |= {problem["name"]: problem["remedy"] for problem in problems(replace(HEALTHY, **facts))}
    assert {*seen} == {rule.name for rule in RULES}
    others = {rule.name: rule.remedy for rule in RULES if rule.remedy_on_amd}
    assert {name for name, remedy in others.items() if INSTALL.search(remedy)} == {*others}
    # by its torch; hidden by a virtual environment; a laptop with Radeon graphics
    for facts, amd in ((rocm(), True), ({"kfd": ("gfx950",)}, True), ({"kfd": ("gfx1103",)}, False), ({}, False)):
        (problem,) = problems(replace(HEALTHY, **{**facts, "training": False}))
        assert problem["name"] == "no-zaya-train" and ("docker/install.py" in problem["remedy"]) == amd
    assert {name: remedy for name, remedy in seen.items() if INSTALL.search(remedy)} == {}
    bad = (
        "pip install triton",
        "pip install 'triton>=3.8'",
        "pip install -U psutil torch",
        "pip install 'zaya_plugin[cpu]'",
        "pip install 'megatron-core[training]>=0.19.2,<0.20'",
        "pip install megatron-core",
        "install a build for this torch: transformer-engine[pytorch]",
    )
    assert all(map(INSTALL.search, bad)) and not INSTALL.search("pip uninstall transformer-engine")


def test_megatron_core_is_installed_within_its_bounds():
    """pyproject.toml's, those of the releases that `zaya train` accepts: 0.21 may not have the loop that it calls."""
    bounds = re.search(r'"(megatron-core\[training\]>[^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert bounds == compat.PACKAGE and bounds.endswith(f",<{compat.FIRST_UNSUPPORTED}")
    texts = [rule.remedy for rule in RULES] + [source for *_, source in installed.PACKAGES]
    named = [text for text in [*texts, *(remedy for _, remedy in REQUIRED)] if "megatron-core[" in text]
    assert len(named) == 4 and all(bounds in text for text in named)


def test_errors_come_first():
    outcome = problems(
        replace(MI300X, core=Version("0.15.0"), modules=MODULES | {"psutil": False}, numa_balancing=True)
    )
    assert [entry["severity"] for entry in outcome] == ["error", "error", "warning", "warning"]
    assert all(entry["evidence"] and entry["thread"] for entry in outcome)


def test_known_problems_come_with_why_remedy_and_thread(monkeypatch):
    facts = Facts(missing=("torch",), environ={"PRIMUS_PATCHES": "none"})
    monkeypatch.setattr(known_problems, "facts_of_this_environment", lambda: facts)
    outcome = known_problems.known_problems(CPU_SETTING)
    assert outcome.state == "wrong"
    assert outcome.reason == "error: missing-package (torch); warning: primus-patches (PRIMUS_PATCHES=none)"
    assert outcome.details[:2] == ["error   missing-package: torch", "        why   training imports it at its start"]
    assert outcome.details[2].startswith("        do    install it")
    assert outcome.details[3].startswith("        see   https://")
    monkeypatch.setattr(known_problems, "facts_of_this_environment", Facts)
    outcome = known_problems.known_problems(CPU_SETTING)
    assert (outcome.state, outcome.reason, outcome.details) == ("pass", "none", [])


def test_facts_of_this_environment(monkeypatch):
    patch = SimpleNamespace(symbol="a.b", applies=True, fits=False)
    monkeypatch.setattr(known_problems, "patches", lambda: [patch])
    facts = known_problems.facts_of_this_environment()
    assert facts.unfit == ("a.b",) and facts.versions["torch"] and facts.core and facts.outer_torch is None
    assert {Path(folder).name for folder in facts.caches} >= {"cache"} and facts.shm_bytes != 0

    def broken():
        raise OSError("libamdhip64.so.6: cannot open shared object file")

    monkeypatch.setattr(installed, "torch_devices", broken)
    monkeypatch.setattr(known_problems, "torch_devices", broken)
    facts = known_problems.facts_of_this_environment()
    assert facts.hip is None and facts.failures == {} and facts.nccl is None


def test_facts_of_an_amd_machine(tmp_path, tmp_path_factory, monkeypatch):
    """The files of a node with two MI300X in CPX and NPS4 behind a translating IOMMU, and of its host's settings."""
    files = {
        "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 96\ngfx_target_version 0\n",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 1216\ngfx_target_version 90402\n",
        "sys/class/kfd/kfd/topology/nodes/2/properties": "gfx_target_version 90010\n",
        "sys/bus/pci/drivers/amdgpu/0000:05:00.0/current_compute_partition": "CPX\n",
        "sys/bus/pci/drivers/amdgpu/0000:05:00.0/current_memory_partition": "NPS4\n",
        "sys/bus/pci/drivers/amdgpu/0000:05:00.0/iommu_group/type": "DMA-FQ\n",
        "sys/bus/pci/drivers/amdgpu/0000:65:00.0/current_compute_partition": "SPX\n",
        "sys/bus/pci/drivers/amdgpu/0000:65:00.0/current_memory_partition": "NPS1\n",
        "sys/class/infiniband/ionic_0/node_type": "1: CA\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/self/mountinfo": "1 1 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / /home rw - nfs4 server:/home rw\n",
    }
    local = tmp_path_factory.mktemp("local") / "link"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = known_problems.facts_of_machine(tmp_path)
    assert facts["kfd"] == ("gfx942", "gfx90a") and facts["kfd_denied"] and facts["networks"] == ("ionic_0",)
    assert facts["partitions"] == ("CPX", "NPS4") and facts["iommu"] == ("DMA-FQ", "") and facts["numa_balancing"]
    assert set(facts["caches"].values()) == {"ext4"} and facts["noexec"] == ()
    network = f"1 1 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / {tmp_path} rw - nfs4 server:/home rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(network)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(local / "cache"))
    local.symlink_to(tmp_path)
    assert set(known_problems.facts_of_machine(tmp_path)["caches"].values()) == {"nfs4"}, "behind a symbolic link"
    assert known_problems.facts_of_machine(tmp_path / "empty")["kfd"] == ()


def test_a_virtual_environment_inside_another_one(tmp_path, monkeypatch):
    """venv's --system-site-packages gives the packages of the base interpreter, not those of the outer environment."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    make = ["-m", "venv", "--without-pip"]
    subprocess.run([sys.executable, *make, outer], check=True)
    subprocess.run([outer / "bin/python", *make, "--system-site-packages", inner], check=True)
    assert known_problems.outer_torch(inner) is None, "the outer one has no torch"
    (torch,) = (path / "torch" for path in outer.glob("lib/python*/site-packages"))
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    see = "import importlib.util; print(importlib.util.find_spec('torch'))"
    seen = subprocess.run([inner / "bin/python", "-c", see], capture_output=True, text=True).stdout
    assert str(torch) not in seen and known_problems.outer_torch(inner).endswith(f"does not see {torch}")
    monkeypatch.setattr(
        known_problems.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=torch / "__init__.py")
    )
    assert known_problems.outer_torch(inner) is None, "a .pth file names its site-packages"
    (outer / "pyvenv.cfg").unlink()
    monkeypatch.undo()
    assert known_problems.outer_torch(inner) is None, "a base interpreter's packages are left out on purpose"
