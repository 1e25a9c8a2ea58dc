# SPDX-License-Identifier: Apache-2.0
"""An operator with several implementations: picks one, and checks it against torch where it runs for the first time.

    _scale = Operator("scale", torch=reference.scale, triton="hip_ops.triton_kernels.scale:scale", hip="hip_ops.hip_kernels.scale:scale",
                      example=lambda device: (torch.randn(3, 5, device=device), 2.0))
    y = _scale(x, 2.0)

It belongs inside the implementation of a `torch.library.custom_op`, which torch.compile and fake tensors do not look into. Where a fake or meta
tensor comes all the same the torch reference runs, unchecked.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

import hip_ops
from hip_ops import backend
from hip_ops.build import BuildError
from hip_ops.compilers import CompilerNotFound
from hip_ops.self_check import difference

logger = logging.getLogger("hip_ops")
OPERATORS: dict[str, "Operator"] = {}
_checking = threading.RLock()  # autograd's threads may come to the first use together


class Operator:
    """Callable with the arguments of its reference; see the module's text.

    torch: the reference. triton, hip: "module:function", imported at first use, or None where there is no such version.
    example: device -> arguments of a small call that passes through all of the kernel (tails, several tiles). It may use torch's global
        random generator, which is seeded for it and put back.
    compare, tolerance: as in `self_check.difference`.
    """

    def __init__(
        self,
        name: str,
        *,
        torch: Callable,
        triton: str | None = None,
        hip: str | None = None,
        example: Callable[[torch.device], tuple],
        compare: Callable[[list, list], str | None] | None = None,
        tolerance: float | None = None,
    ):
        assert name not in OPERATORS, f"there is an operator {name} already"
        self.name = name
        self.reference = torch
        self.versions = {"triton": triton, "hip": hip}
        self.example, self.compare, self.tolerance = example, compare, tolerance
        self.results: dict[tuple[torch.device, str], str] = {}  # "passed", or why not
        self._chosen: dict[tuple[torch.device, str], Callable] = {}
        OPERATORS[name] = self

    def __call__(self, *arguments: Any) -> Any:
        tensor = arguments[0] if type(arguments[0]) is torch.Tensor else _first_tensor(arguments)
        assert tensor is not None, f"{self.name} was called without a tensor"
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return self.reference(*arguments)
        return self.implementation(tensor.device)(*arguments)

    def implementation(self, device: torch.device) -> Callable:
        """What runs on `device` under the present backend. The first call for both checks it, and imports or builds what it needs.

        Raises ValueError where a backend asked for by name cannot be had, and RuntimeError during the capture of a graph.
        """
        key = (device, backend.requested()[0])
        chosen = self._chosen.get(key)
        if chosen is None:
            with _checking:
                chosen = self._chosen.get(key) or self._choose(device)
                self._chosen[key] = chosen
        return chosen

    def _choose(self, device: torch.device) -> Callable:
        choice = backend.choose(device)
        for name in choice.order:
            if name == "torch":
                return self.reference
            if self.versions[name] is None:
                if choice.explicit:
                    others = ", ".join([*(other for other, version in self.versions.items() if version), "torch"])
                    raise ValueError(
                        f"hip_ops: {self.name} has no {name} version; set HIP_OPS_BACKEND to one that it has ({others}) or to auto"
                    )
                continue
            return self._checked(name, device, explicit=choice.explicit)
        return self.reference

    def _checked(self, name: str, device: torch.device, *, explicit: bool) -> Callable:
        known = self.results.get((device, name))
        if device.type == "cuda" and known is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"hip_ops: {self.name} was first used on {device} while a graph is captured, and must be compared with torch before: "
                f"call hip_ops.warm_up({str(device)!r}) ahead of the capture"
            )
        try:
            module, function = self.versions[name].split(":")
            candidate = getattr(importlib.import_module(module), function)
            if known is None:
                known = (
                    difference(
                        candidate, self.reference, self.example, device, compare=self.compare, tolerance=self.tolerance
                    )
                    or "passed"
                )
        except (BuildError, CompilerNotFound, ImportError, OSError) as error:
            if explicit:
                raise ValueError(
                    f"hip_ops: backend {name!r} cannot be had for {self.name} on {device}: {error}"
                ) from error
            known = f"{type(error).__name__}: {error}"
        except (
            Exception
        ) as error:  # a launch that fails, a compiler of Triton that does: whatever it is, torch still works
            known = f"{type(error).__name__}: {error}"
        self.results[device, name] = known
        if known == "passed":
            return candidate
        logger.warning(
            "hip_ops: the %s version of %s failed its self-check on %s; torch runs instead, slower. %s",
            name,
            self.name,
            device,
            known,
        )
        return self.reference


def _first_tensor(values: Iterable) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            found = _first_tensor(value)
            if found is not None:
                return found
    return None


def all_operators() -> list[Operator]:
    """Those of the package, their modules imported."""
    for module in sorted(set(hip_ops.EXPORTS.values())):
        importlib.import_module(f"hip_ops.{module}")
    return list(OPERATORS.values())


def warm_up(device: torch.device | str, operators: Iterable[Operator] | None = None) -> dict[str, str]:
    """Checks all operators on `device` now, rather than each at its first use; needed before the capture of a graph.

    Returns what came out for each: "passed", "torch" where there was nothing to check, "no hip version" where a backend was asked for by name
    that this operator lacks, or what was wrong.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    said = {}
    for each in all_operators() if operators is None else operators:
        choice = backend.choose(device)
        if choice.explicit and each.versions.get(choice.backend, "torch") is None:
            said[each.name] = f"no {choice.backend} version"
            continue
        each.implementation(device)
        order = choice.order
        said[each.name] = next(
            (each.results[device, name] for name in order if (device, name) in each.results), "torch"
        )
    return said
