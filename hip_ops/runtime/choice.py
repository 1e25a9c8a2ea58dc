# SPDX-License-Identifier: Apache-2.0
"""The choice among the versions of a computation on a device.

Each version is compared with the reference before its first use on a device (self_check.py). One that fails is skipped
with a warning; one that was requested by name raises ValueError, unless it is in NOT_RUN.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from hip_ops.errors import mistake, warn_once
from hip_ops.runtime.build import prebuilt, shipped
from hip_ops.runtime.code_objects import serves
from hip_ops.runtime.compilers import CompilerNotFound, find_compiler
from hip_ops.runtime.launchers import target_of
from hip_ops.runtime.self_check import PLAIN_CALL, Condition, differences, plain_arithmetic, seeded
from hip_ops.versions import ANY_ORDER, NOT_RUN, Request, selection

logger = logging.getLogger("hip_ops")
_checking = threading.RLock()  # autograd's threads may reach the first use together


def missing(version: str, device: torch.device, named: bool) -> str | None:
    """Return why `version` is not available on `device`, or None. named: requested by name, not through auto."""
    if version == "hip":
        return _hip(device, named)
    if version == "compiled" and device.type == "cpu":
        return "torch.compile is not used on a CPU"
    if version in ("triton", "compiled") and importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it comes with the GPU builds of torch)"
    if version == "compiled" and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1 disables torch.compile"
    if version == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton compiles for GPUs (TRITON_INTERPRET=1 runs it in an interpreter)"
    return None


def _hip(device: torch.device, named: bool) -> str | None:
    if not named and (device.type == "cpu" or torch.version.hip is None):
        return f"on {'a CPU' if device.type == 'cpu' else 'NVIDIA'} its build is slow and only verifies the kernels"
    try:
        target = target_of(device)
        if shipped(target)[0]:
            return None
    except ValueError as error:
        return str(error)
    try:
        find_compiler(target)
    except CompilerNotFound as error:
        if prebuilt(target) is None:
            return (
                f"{error}; and the cache holds no library for {target} (`python -m hip_ops build` on a machine that "
                "has a compiler)"
            )
    return None


class Versions:
    """The versions of one computation: the choice among them on a device, their comparison with the reference, and the
    report. This class does not call them. `Operator` does, and is registered with torch; CoreAttention of zaya_plugin
    is the other subclass. A subclass defines `__call__` and `_function_of`, and may replace `request`, `_order`,
    `_failure`, `_candidate` and `last`.

    Args:
        name: in messages. folder: the key of `kernel_overrides` that requests a version; operators of one folder share
            it. versions: names, best first.
        reference: the definition. example: device -> arguments of a small call that passes through all of the kernel
            (tails, several tiles). It may use torch's global random generator, which is seeded before and restored
            after. A tuple of functions gives several calls.
        compare, tolerance, written: as in `self_check.differences`.
        more_examples, tolerances: version -> further examples, and a tolerance of its own.
        fits: version -> function that returns whether the version takes these arguments; a version without one takes
            all.
        prefers: version -> function that returns whether the version is also the fastest. Not used where it is
            requested by name.
        available: version -> function of the device that returns why the version is not available, or None; for
            optional packages.
    """

    last = "reference"  # the version that takes every call, for which the other versions need no function of `fits`

    def __init__(
        self,
        name: str,
        folder: str,
        versions: Sequence[str],
        *,
        reference: Callable,
        example: Callable[[torch.device], tuple] | tuple[Callable[[torch.device], tuple], ...],
        compare: Callable[[list, list, float | None], str | None] | None = None,
        tolerance: float | None = None,
        written: Callable[[list], Any] | None = None,
        more_examples: dict[str, tuple[Callable[[torch.device], tuple], ...]] | None = None,
        tolerances: dict[str, float] | None = None,
        fits: dict[str, Callable[..., bool]] | None = None,
        prefers: dict[str, Callable[..., bool]] | None = None,
        available: dict[str, Callable[[torch.device], str | None]] | None = None,
    ):
        self.name, self.folder, self.versions, self.reference = name, folder, tuple(versions), reference
        self.setting = f"kernel_overrides.{folder}"  # which requests a version
        self.examples = example if isinstance(example, tuple) else (example,)
        self.compare, self.tolerance, self.written = compare, tolerance, written
        self.more_examples, self.tolerances = more_examples or {}, tolerances or {}
        self.fits, self.prefers, self.available = fits or {}, prefers or {}, available or {}
        for by_version in (self.more_examples, self.tolerances, self.fits, self.prefers, self.available):
            assert by_version.keys() <= {*self.versions}, f"{self.name} has no versions {[*by_version]}"
        self.results: dict[tuple[torch.device, str], str] = {}  # "passed", or the failure
        self.choices: dict[tuple[torch.device, Request], str] = {}  # the chosen version and the reason
        self._names: dict[tuple[torch.device, Request], list[str]] = {}
        self._chosen: dict[tuple[torch.device, Request], list[tuple[Callable | None, Callable]]] = {}
        # Devices on which the compiled version is not compared before its first call.
        self._unchecked: set[torch.device] = set()

    def request(self) -> Request:
        """Return the version that is requested now."""
        return selection().of(self.folder)

    def _candidate(self, version: str) -> Callable:
        """Return the function of `version` as the self-check calls it."""
        return self._function_of(version)

    def implementations(self, device: torch.device) -> list[tuple[Callable | None, Callable]]:
        """Return the functions of the versions that run on `device` under the current selection, best first, each after
        a function that returns whether the version gets a call, or None where it gets every call.

        The first call checks them and imports or builds what they need. Raises ValueError where a version requested by
        name is not available or fails its self-check, and RuntimeError while a graph is captured.
        """
        key = (device, self.request())
        entries = self._chosen.get(key)
        if entries is None:
            with _checking:
                entries = self._chosen.get(key)
                if entries is None:
                    names, self.choices[key] = self._choose(*key, check=True)
                    self._names[key] = names
                    entries = [self._entry(name, *key) for name in names]
                    if names[-1] == "reference":
                        # A version whose function of `prefers` declines a call is still faster than the reference. So
                        # it is tried a second time, right before the reference, with its function of `fits`.
                        slower = [name for name in names if name in self.prefers and name != key[1].version]
                        entries[-1:-1] = [(self.fits[name], self._function_of(name)) for name in slower]
                    self._chosen[key] = entries
                    logger.info("hip_ops: %s on %s: %s", self.name, device, self.choices[key])
        return entries

    def _entry(self, version: str, device: torch.device, request: Request) -> tuple[Callable | None, Callable]:
        """Return one entry of `implementations`: the function of `prefers` or `fits`, or None, and that of the version.

        A compiled version that `_choose` has not compared is compared at its first call; if it fails, the reference
        runs.
        """
        fits = self.fits.get(version)
        if version != request.version:
            fits = self.prefers.get(version, fits)
        if (device, version) in self.results or version != "compiled":
            return fits, self._function_of(version)
        self._unchecked.add(device)

        def checked_at_first_call(*arguments):
            with _checking:
                failed = self._failure(version, device, check=True)
            return (self.reference if failed else self._function_of(version))(*arguments)

        return fits, checked_at_first_call

    def choice(self, device: torch.device, check: bool = True) -> str:
        """Say which version runs on `device` and why. check=False: without running or building
        anything; an operator whose versions are packages imports them.

        Raises ValueError where a version requested by name is not available.
        """
        key = (device, self.request())
        if check:
            self.implementations(device)
            if device in self._unchecked:  # a compiled version behind another one: compared now, not at its first call
                with _checking:
                    self._failure("compiled", device, check=True)
        return self.choices[key] if key in self.choices else self._choose(*key, check=False)[1]

    def first(self, device: torch.device) -> str:
        """Return the version that gets a call first on `device`, without running or building anything. Raises
        ValueError as `choice`.
        """
        return self._choose(device, self.request(), check=False)[0][0]

    def running(self, device: torch.device) -> tuple[str, ...]:
        """Return the names of the versions that run on `device`, best first, as `implementations` has checked them.

        A later one runs where the earlier ones do not take a call. Raises ValueError as `choice`.
        """
        self.implementations(device)
        names = self._names[device, self.request()]
        return tuple(dict.fromkeys(self.last if self._failure(name, device, check=False) else name for name in names))

    def _choose(self, device: torch.device, request: Request, check: bool) -> tuple[list[str], str]:
        """Return the names of the available versions up to the first that takes every call, and a text with them and
        the reason.

        check: compare each with the reference first. A version requested by name that is not available or fails raises
        ValueError; one in NOT_RUN that fails is skipped.
        """
        chosen, skipped, allowed = [], [], dict.fromkeys(("auto", *self.versions, self.last))
        if request.version not in ("auto", *self.versions, self.last):
            skipped.append(f"it has no version {request.version!r}")
        for version in self._order(device, request):
            named = version == request.version
            # Compiling takes seconds per operator, so behind another version it waits for the first call that needs it.
            checked = check and not (version == "compiled" and chosen)
            unavailable = self._missing(version, device, named)
            why_not = unavailable or self._failure(version, device, checked)
            if why_not is None:
                chosen.append(version)
                if version not in self.fits:
                    break
            elif named and (unavailable or version not in NOT_RUN):
                problem = f"version {version!r} of {self.name} is not available on {device}: {why_not}"
                raise mistake(request.source, problem, f"{', '.join(allowed)}, where available", "request auto")
            else:
                skipped.append(f"no {version}: {why_not.splitlines()[0]}")
        if not chosen:
            problem = f"no version of {self.name} is available on {device}: {'; '.join(skipped)}"
            raise mistake(request.source, problem, ", ".join(allowed), "request another version")
        served = "triton" in chosen and serves(self.folder, device)
        text = ", then ".join(
            name
            + " from shipped objects" * (served and name == "triton")
            + " where it takes the arguments" * (name in self.fits)
            for name in chosen
        )
        return chosen, f"{text} ({'; '.join([request.source, *skipped])})"

    def _order(self, device: torch.device, request: Request) -> tuple[str, ...]:
        """Return the names of the versions in the order in which they are tried: the requested one, then those of
        auto. On a CPU auto is the reference alone.
        """
        run = (version for version in self.versions if version not in NOT_RUN)
        auto = ("reference",) if device.type == "cpu" else (*run, "reference")
        if request.version in self.versions or request.version == "reference":
            return (request.version, *(version for version in auto if version != request.version))
        return auto

    def _missing(self, version: str, device: torch.device, named: bool) -> str | None:
        if version == "triton" and serves(self.folder, device):
            return None  # shipped objects need no Triton; calls that none fits fall through to the next version
        of_package = self.available.get(version)
        return missing(version, device, named) or (of_package(device) if of_package else None)

    def _failure(self, version: str, device: torch.device, check: bool) -> str | None:
        """Return the failure of the self-check of `version` on `device`, or None. The check runs once per process and
        device; check=False reads the result of an earlier check and runs none.
        """
        if version == "reference" or not check and (device, version) not in self.results:
            return None
        result = self.results.get((device, version))
        if result is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"hip_ops: {self.name} was first used on {device} while a graph is captured. It must be compared "
                    "with its reference "
                    f"before. Fix: call hip_ops.warm_up({str(device)!r}) before the capture"
                )
            result = self.results[device, version] = self._check(version, device)
        return None if result == "passed" else f"it failed its self-check: {result}"

    def difference(self, candidate: Callable, device: torch.device, version: str | None = None) -> str | None:
        """Return None if `candidate` agrees with the reference on all examples of `version`, otherwise both numbers at
        the worst place. Raises the candidate's errors.
        """
        return self.differences(candidate, device, (PLAIN_CALL,), version)[0]

    def differences(
        self, candidate: Callable, device: torch.device, conditions: Sequence[Condition], version: str | None = None
    ) -> list[str | None]:
        """Return for each condition what `difference` returns for the plain call."""
        options = {"compare": self.compare, "tolerance": self.tolerances.get(version, self.tolerance)}
        options |= {"written": self.written, "repeats": version not in ANY_ORDER}
        result_texts: list[str | None] = [None] * len(conditions)
        for example in self.examples_of(version):
            places = [place for place, text in enumerate(result_texts) if text is None]
            remaining = [conditions[place] for place in places]
            texts = differences(candidate, self.reference, example, device, remaining, **options) if places else []
            for place, text in zip(places, texts, strict=True):
                result_texts[place] = text
        return result_texts

    def examples_of(self, version: str | None) -> tuple[Callable[[torch.device], tuple], ...]:
        """Return the examples with which `version` is compared."""
        return (*self.examples, *self.more_examples.get(version, ()))

    def compiles_triton(self, device: torch.device) -> bool:
        """Return whether the self-check on `device` is still to come and makes Triton compile kernels."""
        key = (device, self.request())
        if "triton" not in self.versions or key in self._chosen or (device, "triton") in self.results:
            return False
        return not serves(self.folder, device) and "triton" in self._choose(*key, check=False)[0]

    def call_ahead(self, version: str, *arguments: Any) -> None:
        """Call `version` and drop the result; an error is only logged, because the self-check reports it."""
        try:
            self._candidate(version)(*arguments)
        except Exception as error:
            logger.info("hip_ops: version %s of %s failed ahead of its self-check: %s", version, self.name, error)

    def _check(self, version: str, device: torch.device) -> str:
        try:
            problem = self.difference(self._candidate(version), device, version)
        except Exception as error:  # a failed build, launch or compilation; other versions still work
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            return "passed"
        text = "hip_ops: version %s of %s failed its self-check on %s and is not used. %s"
        warn_once((device, version, problem), text, version, self.name, device, problem)
        return problem


def compile_side_by_side(computations: Iterable[Versions], device: torch.device) -> None:
    """Call the Triton versions as their self-checks on `device` will, in one thread for each folder of operators, so that
    Triton compiles several kernels at once: most of a compilation runs without Python's lock.

    Operators of a folder share kernels, which two threads would compile twice; and Triton 3.8 unloads the first of two,
    which may be running.
    """
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":  # its interpreter runs one kernel at a time
        return
    compiling = [versions for versions in computations if versions.compiles_triton(device)]
    if not compiling or torch.cuda.is_current_stream_capturing():
        return
    stream, folders = torch.cuda.current_stream(device), {}
    for versions in compiling:
        calls = folders.setdefault(versions.folder, [])
        for example in versions.examples_of("triton"):
            with contextlib.suppress(Exception), seeded(device), plain_arithmetic(device):  # the self-check reports it
                calls.append(functools.partial(versions.call_ahead, "triton", *example(device)))

    def run(calls: list[Callable[[], None]]) -> None:
        with torch.cuda.stream(stream), plain_arithmetic(device):
            while calls:
                calls.pop(0)()

    with ThreadPoolExecutor(len(folders)) as pool:
        try:
            wait([pool.submit(run, calls) for calls in folders.values()])
        finally:  # all are done, unless Ctrl-C ended the wait: then no other call starts
            for calls in folders.values():
                calls.clear()
