# SPDX-License-Identifier: Apache-2.0
"""Fills Triton's cache on disk from several processes, so that a sweep over configurations compiles on all cores and
then only measures.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor


def compile_ahead(run: Callable, arguments: Iterable[tuple], processes: int | None = None) -> None:
    """Call run(*each) for each of `arguments` in new processes. Failures are ignored; the measurement meets and reports
    them again.

    run: a function of a module that can be imported, which calls the kernels once on the GPU.
    """
    arguments = list(arguments)
    processes = min(processes or (os.cpu_count() or 1) - 2, len(arguments))
    if processes < 2:
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(run, *each) for each in arguments]:
            future.exception()
