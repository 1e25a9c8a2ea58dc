# SPDX-License-Identifier: Apache-2.0
"""The facts of an environment, and the form of a rule that reads them. No torch import.

The rules are in package_rules.py and machine_rules.py; known_problems.py collects the facts and applies the rules.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

GITHUB = "https://github.com/"
PRIMUS = GITHUB + "AMD-AGI/Primus/"
TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm")  # distributions that hold the module triton
INSTINCT = ("gfx90a", "gfx942", "gfx950")  # architectures of AMD's accelerators
IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "PackageNotFoundError")


@dataclass(frozen=True)
class Facts:
    """The facts that the rules of known problems read.

    Attributes:
        missing: needed packages that are not installed.
        versions: of distributions as pip knows them, None where absent. modules: by name, whether it can be imported.
        core: version of megatron.core. training: whether its megatron.training is installed.
        mixed: whether megatron.training is that of another installation.
        failures: of an import of transformer_engine.pytorch and of a call of torch.backends.cudnn.version() after it.
        hip, cuda: the version that torch is built for. archs: of the accelerators that torch finds.
        compiled_archs: those that torch holds code for. nccl: version of the collectives' library, as 2.30.4.
        runtimes: files of HIP's runtime that are mapped. outer_torch: the torch of the environment from which this
            virtual environment was made, where this process does not import it.
        kfd: architectures of the AMD devices that the kernel lists. kfd_denied: /dev/kfd is absent or not writable.
        partitions: modes of AMD's devices other than SPX and NPS1. iommu: types of their IOMMU groups.
        unfit: patches that apply and are not written for the installed version.
        networks: names of RDMA devices. memlock_bytes, shm_bytes: None: no limit, or unknown.
        numa_balancing: whether Linux moves pages by itself.
        caches: folder of compiled kernels -> type of its file system. noexec: those where nothing may be executed.
    """

    missing: tuple[str, ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)
    modules: Mapping[str, bool] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    core: object | None = None
    training: bool = False
    mixed: bool = False
    failures: Mapping[str, str] = field(default_factory=dict)
    hip: str | None = None
    cuda: str | None = None
    archs: tuple[str, ...] = ()
    compiled_archs: tuple[str, ...] = ()
    nccl: str | None = None
    runtimes: tuple[str, ...] = ()
    outer_torch: str | None = None
    kfd: tuple[str, ...] = ()
    kfd_denied: bool = False
    partitions: tuple[str, ...] = ()
    iommu: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    memlock_bytes: int | None = None
    shm_bytes: int | None = None
    numa_balancing: bool = False
    caches: Mapping[str, str] = field(default_factory=dict)
    noexec: tuple[str, ...] = ()

    def has(self, *architectures: str) -> bool:
        """Return whether torch finds a device of one of these architectures."""
        return any(arch.partition(":")[0] in architectures for arch in self.archs)

    @property
    def amd(self) -> bool:
        """Whether the environment is AMD's: by its torch or, where that is hidden, by the machine's devices."""
        return bool(self.hip or self.instincts)

    @property
    def instincts(self) -> list[str]:
        """Return the architectures of AMD's accelerators that the kernel lists."""
        return [arch for arch in self.kfd if arch in INSTINCT]

    @property
    def tritons(self) -> list[tuple[str, str]]:
        """Return the installed distributions of Triton with their versions."""
        return [(name, version) for name in TRITONS if (version := self.versions.get(name))]

    def older(self, package: str, release: str) -> str | None:
        """Return "<package> <version>" where that is older than `release`."""
        version = self.versions.get(package)
        return f"{package} {version}" if before(version, release) else None

    def hip_before(self, release: str) -> bool:
        """Return whether torch is built for a HIP before `release`; of 7.0.51831-abc only the numbers are compared."""
        return self.hip is not None and before((re.match(r"\d+(\.\d+){0,2}", self.hip) or ["0"])[0], release)

    def variables(self, *names: str, value: str | None = None) -> str:
        """Return those of these variables that are set, or that have `value`, as NAME=VALUE."""
        entries = ((name, self.environ.get(name)) for name in names)
        return " ".join(f"{name}={text}" for name, text in entries if text and value in (None, text))


@dataclass(frozen=True)
class Rule:
    """A known problem.

    Attributes:
        severity: "error" (training cannot work) or "warning". find: returns the evidence, or an empty value.
        thread: public address where the problem, or what it concerns, is described.
        remedy_on_amd: takes the place of `remedy` where that would replace the torch or the Triton of an AMD image.
    """

    name: str
    severity: str
    find: Callable[[Facts], Any]
    why: str
    remedy: str
    thread: str
    remedy_on_amd: str | None = None

    def remedy_for(self, facts: Facts) -> str:
        return self.remedy_on_amd if facts.amd and self.remedy_on_amd else self.remedy


def before(version: object | None, release: str) -> bool:
    """Return whether `version` is older than `release`; False where it is absent or cannot be read."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(str(version)) < Version(release)
    except InvalidVersion:
        return False
