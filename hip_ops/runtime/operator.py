# SPDX-License-Identifier: Apache-2.0
"""An operator: its declaration, its registration with torch, and the choice among its versions.

    _scale = Operator(
        reference.scale,
        takes="x [n, h] bf16|fp32",
        example=lambda device: (torch.randn(3, 5, device=device), 2.0),
    )
    y = _scale(x, 2.0)

`reference` is the definition, in `hip_ops/ops/<operator>/reference.py`; its annotations are the schema of the torch
operator `hip_ops::scale`, and on meta tensors it gives the shapes and dtypes of fake results. The other versions are
the functions of the same name in hip.py, triton.py, ... beside it, as hip_ops/versions.py lists them. Each is compared
with the reference before its first use on a device. One that fails is skipped with a warning; one that was requested by
name raises ValueError, unless it is in NOT_RUN.

The way of a call: `Operator.__call__`, `Operator.run`, `Versions.implementations` (at the first call: `_choose`, which
runs the self-checks), the first version whose function of `fits` accepts the arguments.

A call bypasses torch's dispatcher where nothing can observe it: the dispatcher costs the host more than the kernels
take on the device. The registered operator is called where something may observe or replace operators by name:
compilers, tracers, modes, transforms, fake and meta tensors and other subclasses. Both ways give the same results,
gradients and errors.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map

from hip_ops.errors import mistake
from hip_ops.runtime import availability
from hip_ops.runtime.compiled import compile_function
from hip_ops.runtime.declaration import Declaration, Rule
from hip_ops.runtime.library import identity
from hip_ops.runtime.selection import Request, selection
from hip_ops.runtime.self_check import PLAIN_CALL, Condition, differences
from hip_ops.versions import ANY_ORDER, NOT_RUN, VERSIONS

logger = logging.getLogger("hip_ops")
OPERATORS: dict[str, Operator] = {}
_checking = threading.RLock()  # autograd's threads may reach the first use together
_warnings: set[tuple[torch.device, str, str]] = set()  # one warning for a failed build, not one per operator
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OTHERS = frozenset((int, float, bool, str, NoneType, torch.dtype))
_LISTS = frozenset((list, tuple))
LIBRARY, TRITON = "library of the HIP kernels", "Triton"  # what versions come from, beside the operators in `running`


def unobserved() -> bool:
    """Return whether no compiler, tracer, transform or mode is active in this thread."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


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
                        # it is asked a second time, right before the reference, with its function of `fits`.
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
            missing = self._missing(version, device, named)
            why_not = missing or self._failure(version, device, checked)
            if why_not is None:
                chosen.append(version)
                if version not in self.fits:
                    break
            elif named and (missing or version not in NOT_RUN):
                problem = f"version {version!r} of {self.name} is not available on {device}: {why_not}"
                raise mistake(request.source, problem, f"{', '.join(allowed)}, where available", "request auto")
            else:
                skipped.append(f"no {version}: {why_not.splitlines()[0]}")
        if not chosen:
            problem = f"no version of {self.name} is available on {device}: {'; '.join(skipped)}"
            raise mistake(request.source, problem, ", ".join(allowed), "request another version")
        text = ", then ".join(name + " where it takes the arguments" * (name in self.fits) for name in chosen)
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
        reason = availability.missing(version, device, named)
        if reason is None and version in self.available:
            reason = self.available[version](device)
        return reason

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
        for example in (*self.examples, *self.more_examples.get(version, ())):
            places = [place for place, text in enumerate(result_texts) if text is None]
            remaining = [conditions[place] for place in places]
            texts = differences(candidate, self.reference, example, device, remaining, **options) if places else []
            for place, text in zip(places, texts, strict=True):
                result_texts[place] = text
        return result_texts

    def _check(self, version: str, device: torch.device) -> str:
        try:
            problem = self.difference(self._candidate(version), device, version)
        except Exception as error:  # a failed build, launch or compilation; other versions still work
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            return "passed"
        if (device, version, problem) not in _warnings:
            _warnings.add((device, version, problem))
            text = "hip_ops: version %s of %s failed its self-check on %s and is not used. %s"
            logger.warning(text, version, self.name, device, problem)
        return problem


class Operator(Versions):
    """An operator, called with the arguments of its reference; the module's docstring explains it.

    Args:
        reference: the definition. Its arguments are positional, without defaults; the first is a tensor or a list of
            tensors. Its module names the operator's folder, by which versions are chosen.
        takes, rule: as `Declaration`.
        mutates: names of the arguments that it writes to.
        choosing: example, compare, tolerance, written, more_examples, tolerances, fits, prefers and available, as
            `Versions`. Calls whose first tensor is fp64 run the reference.
        without: versions of the folder that this operator does not have.
    """

    def __init__(
        self,
        reference: Callable,
        *,
        takes: str = "",
        rule: Rule | None = None,
        mutates: Sequence[str] = (),
        without: Sequence[str] = (),
        **choosing: Any,
    ):
        assert reference.__name__ not in OPERATORS, f"there is an operator {reference.__name__} already"
        self.module = reference.__module__.rpartition(".")[0]
        folder = self.module.rpartition(".")[2]
        versions = [version for version in VERSIONS[folder] if version not in without]
        super().__init__(reference.__name__, folder, versions, reference=reference, **choosing)
        signature = inspect.signature(reference)
        # torch leaves out arguments that equal their default.
        assert all(p.default is p.empty for p in signature.parameters.values()), f"{self.name}: defaults"
        parameters = list(signature.parameters)
        self.declaration = Declaration(self.name, parameters, takes, rule)
        self._compiled: Callable | None = None
        self._mutated = tuple(parameters.index(name) for name in mutates)
        schema = torch.library.infer_schema(reference, mutates_args=tuple(mutates))
        self.registered = torch.library.custom_op(
            f"hip_ops::{self.name}", self.run, mutates_args=tuple(mutates), schema=schema
        )
        self.registered.register_fake(self._fake)
        # The autograd function that `register_autograd` makes, for calls past torch's dispatcher.
        self._function: type[torch.autograd.Function] | None = None
        OPERATORS[self.name] = self

    def register_autograd(self, gradients: Callable, *, setup_context: Callable) -> None:
        """Register gradients, as torch.library does: `gradients(ctx, *gradients of results)`, `setup_context(ctx,
        inputs, output)`.
        """
        assert not self._mutated, self.name
        self.registered.register_autograd(gradients, setup_context=setup_context)
        run = self.run

        def forward(ctx, *arguments):
            results = run(*arguments)
            setup_context(ctx, arguments, results)
            return results

        methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        # Profiles show this name for nodes of the backward pass.
        self._function = type(f"hip_ops_{self.name}", (torch.autograd.Function,), methods)

    def __call__(self, *arguments: Any) -> Any:
        """Call `run`: through torch's registered operator where something may observe the call, through the autograd
        function where a gradient is recorded, otherwise directly.
        """
        if not unobserved():
            return self.registered(*arguments)
        differentiated = listed = False
        for argument in arguments:
            kind = type(argument)
            if kind in _TENSORS:
                differentiated = differentiated or argument.requires_grad
            elif kind in _LISTS:
                listed = True
                if any([type(item) not in _TENSORS and type(item) not in _OTHERS for item in argument]):
                    return self.registered(*arguments)
            elif kind not in _OTHERS:
                return self.registered(*arguments)
        if (_first_tensor(arguments) if listed else arguments[0]).is_meta:
            return self.registered(*arguments)
        if (differentiated or listed) and torch.is_grad_enabled():
            # Without registered gradients, results of torch's operator cannot be differentiated.
            if self._function is None or listed:
                return self.registered(*arguments)
            return self._function.apply(*arguments)
        results = self.run(*arguments)
        for place in self._mutated:
            if arguments[place] is not None:
                increment_version(arguments[place])
        return results

    def _fake(self, *arguments: Any) -> Any:
        """Check the arguments and return contiguous empty results, as the reference gives them on meta tensors."""
        self.declaration.check(arguments)
        if not self.registered._opoverload._schema.returns:
            return None
        first = _first_tensor(arguments)
        results = self.reference(*(_on_meta(argument) for argument in arguments))
        return tree_map(lambda result: first.new_empty(result.shape, dtype=result.dtype), results)

    def run(self, *arguments: Any) -> Any:
        """Check the arguments and call the first version that takes them, without gradients; fp64 calls the
        reference.
        """
        self.declaration.check(arguments)
        first = arguments[0] if isinstance(arguments[0], Tensor) else _first_tensor(arguments)
        if first.dtype == torch.float64:
            return self.reference(*arguments)
        for place, (fits, function) in enumerate(self.implementations(first.device)):
            if fits is None or fits(*arguments):
                if place:
                    self._warn_if_requested(first)
                return function(*arguments)
        raise AssertionError("the last version takes every call")

    def _warn_if_requested(self, first: Tensor) -> None:
        """Warn once if a version that was requested by name does not take a call. first: the call's first tensor."""
        request = self.request()
        key = (first.device, request.version, f"{self.name} of {request.source}")
        if request.version in self.versions and key not in _warnings:
            _warnings.add(key)
            text = "hip_ops: %s: this version of %s does not take %s %s; such calls run another version"
            logger.warning(text, request.source, self.name, str(first.dtype).removeprefix("torch."), tuple(first.shape))

    def _function_of(self, version: str) -> Callable:
        """Return the function of `version`: `<operator>` of hip_ops/ops/<folder>/<version>.py, imported here. compiled
        is made from the reference.
        """
        if version == "reference":
            return self.reference
        if version == "compiled":
            if self._compiled is None:
                self._compiled = compile_function(self.reference)
            return self._compiled
        return getattr(importlib.import_module(f"{self.module}.{version}"), self.reference.__name__)


def _on_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_meta(item) for item in value]
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _first_tensor(values: Iterable) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)):
            tensor = _first_tensor(value)
            if tensor is not None:
                return tensor
    return None


def all_operators() -> list[Operator]:
    """Import all operators of the package and return them."""
    for folder in VERSIONS:
        importlib.import_module(f"hip_ops.ops.{folder}")
    return list(OPERATORS.values())


def warm_up(device: torch.device | str, operators: Iterable[Versions] | None = None) -> dict[str, str]:
    """Choose and check the versions of all operators on `device` before their first use. Required before a graph is
    captured.

    Return by operator which version runs and why. Raises ValueError where a version requested by name is not
    available.
    """
    device = _indexed(device)
    return {
        operator.name: operator.choice(device) for operator in (all_operators() if operators is None else operators)
    }


def running(device: torch.device | str, others: Iterable[Versions] = ()) -> dict[str, tuple[str, ...]]:
    """Check all operators, and `others`, and return by name the versions that run, best first; and, where such a
    version uses them, the library of the HIP kernels and the release of Triton.

    A compiled version behind another one is not compiled: `warm_up` and the first call that needs it do that.
    """
    device = _indexed(device)
    chosen = {operator.name: operator.running(device) for operator in (*all_operators(), *others)}
    used = {version for versions in chosen.values() for version in versions}
    if "hip" in used and (loaded := identity(device)):
        chosen[LIBRARY] = (loaded,)
    if not used.isdisjoint(("triton", "compiled")):
        chosen[TRITON] = (importlib.import_module("triton").__version__,)
    return chosen


def report(device: torch.device | str, check: bool = True, others: Iterable[Versions] = ()) -> list[str]:
    """Return lines that say which version of each operator, and of `others`, runs on `device` and why; `check` and
    errors as in `Versions.choice`.
    """
    device = _indexed(device)
    return table({operator.name: operator.choice(device, check) for operator in (*others, *all_operators())})


def table(choices: dict[str, str]) -> list[str]:
    """Format `choices`: one line per folder whose operators agree, or one line if all operators agree."""
    folders: dict[str, dict[str, str]] = {}
    for name, choice in choices.items():
        folder = OPERATORS[name].folder if name in OPERATORS else name
        folders.setdefault(folder, {})[f"{folder}.{name}"] = choice
    rows = {}
    for folder, mine in folders.items():
        rows |= {folder: next(iter(mine.values()))} if len({*mine.values()}) == 1 else mine
    if len({*rows.values()}) == 1:
        rows = {"all operators": next(iter(rows.values()))}
    return [f"{name:{max(map(len, rows))}}  {choice}" for name, choice in rows.items()]


def _indexed(device: torch.device | str) -> torch.device:
    """Return `device` with its index, as the devices of tensors have it."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
