# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for gfx942 with no GPU, so that their code objects run in the emulator and obey the same
budgets. Where the package ships an object for a kernel, its bytes run.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hip_ops.runtime.code_objects import Call, shipped_objects
from tests.gfx942.emulator import Buffer, Counters, Device
from tests.gfx942.toolchain import ARCH, cache_directory


@dataclass(frozen=True)
class TritonObject:
    """A compiled Triton kernel.

    shared: dynamic LDS in bytes (the ELF note says 0). launch() adds the trailing scratch pointers of Triton's argument
    list. keywords: constants and options that it was compiled with.
    """

    path: Path
    name: str
    shared: int
    threads: int
    trailing_pointers: int
    keywords: Mapping[str, object]

    def launch(self, device: Device, grid, args: Sequence[Buffer | np.generic]) -> Counters:
        """args: the run-time arguments in order, without constexprs and without arguments that were specialised to
        1.
        """
        return device.launch(
            self.path,
            self.name,
            grid,
            (self.threads, 1, 1),
            [*args, *[None] * self.trailing_pointers],
            shared=self.shared,
        )


def compiled_kernel(
    fn,
    target: tuple,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    divisible_by_16: Sequence[str] = (),
    small: Sequence[str] = (),
    **options,
):
    """Triton's compilation of a @triton.jit function for `target`, the arguments of a GPUTarget; no such device is
    needed.

    signature: name -> "*bf16", "*fp32", "i32", "i64", "fp32"; constexprs: name -> value (their signature entry is added
    in these files). divisible_by_16: names of pointers and sizes that the launcher would find divisible by 16, which is
    what makes accesses wide. options: of Triton's back end (num_warps, num_stages, waves_per_eu, ...).
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    full = {
        name: "constexpr" if name in constexprs else signature[name]
        for name in fn.arg_names
        if name in constexprs or name in signature
    }
    missing = [name for name in fn.arg_names if name not in full]
    if missing:
        raise ValueError(f"{fn.__name__}: no signature for {', '.join(missing)}")
    attributes = {
        (place,): [["tt.divisibility", 16]] * (name in divisible_by_16) + [["tt.pointer_range", 32]] * (name in small)
        for place, name in enumerate(fn.arg_names)
        if name in {*divisible_by_16, *small}
    }
    source = ASTSource(fn=fn, signature=full, constexprs=dict(constexprs), attrs=attributes)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # lines and paths would be in the object
        return triton.compile(source, target=GPUTarget(*target), options=options)


def shipped_object(call: Call) -> TritonObject | None:
    """The object that the package ships for a call, if its sources are those of today."""
    objects, _ = shipped_objects(ARCH)
    one = objects.fitting(call) if objects else None
    if one is None or not call.covers(one.call):  # a stronger form of the call is another test's case
        return None
    return TritonObject(
        objects.folder / one.file, one.kernel, one.shared, one.threads, one.trailing_pointers, one.keywords
    )


def triton_code_object(
    fn,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    divisible_by_16: Sequence[str] = (),
    small: Sequence[str] = (),
    **options,
) -> TritonObject:
    """The object that the package ships for such a call, or one that is compiled now."""
    properties = {
        name: "D" * (name in divisible_by_16) + "S" * (name in small) for name in fn.arg_names if name not in constexprs
    }
    keywords = dict(constexprs) | {"num_warps": num_warps, "num_stages": num_stages} | options
    call = Call(
        fn.__name__, tuple(keywords.items()), tuple((signature.get(name, ""), has) for name, has in properties.items())
    )
    return shipped_object(call) or compiled_object(
        fn, signature, constexprs, divisible_by_16, small, ARCH, num_warps=num_warps, num_stages=num_stages, **options
    )


def compiled_object(
    fn,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    divisible_by_16: Sequence[str],
    small: Sequence[str],
    target: str = "gfx942",
    **options,
) -> TritonObject:
    """`compiled_kernel` for an AMD target, kept as a file."""
    compiled = compiled_kernel(fn, ("hip", target, 64), signature, constexprs, divisible_by_16, small, **options)
    binary = compiled.asm["hsaco"]
    path = cache_directory() / f"triton-{fn.__name__}-{hashlib.sha256(binary).hexdigest()[:20]}.co"
    if not path.is_file():
        partial = path.with_suffix(f".{id(binary)}.partial")
        partial.write_bytes(binary)
        partial.rename(path)
    from tests.gfx942.emulator.code_object import open_code_object

    name = compiled.metadata.name
    visible = [
        argument
        for argument in open_code_object(path).kernels[name].arguments
        if not argument.kind.startswith("hidden_")
    ]
    given = sum(name not in constexprs for name in fn.arg_names)
    return TritonObject(
        path,
        name,
        compiled.metadata.shared,
        64 * compiled.metadata.num_warps,
        len(visible) - given,
        dict(constexprs) | options,
    )
