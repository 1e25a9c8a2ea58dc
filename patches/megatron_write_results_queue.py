# SPDX-License-Identifier: Apache-2.0
"""megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue: no process for a queue within one.

Megatron's checkpoint writer answers through the queue of a multiprocessing manager, also where it runs in the rank itself
(--async-save not given). That manager is one more Python process a rank, half a gigabyte with torch in it and seconds until it
is up at the first save; and it stays for ever if the rank is killed. A save in the rank itself needs a queue.Queue.
"""

from zaya_plugin import compat
from zaya_plugin.patches.registry import Patch


def install() -> None:
    import functools
    import queue
    import sys

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    stock = filesystem_async.get_write_results_queue
    in_this_process: queue.Queue = queue.Queue()

    @functools.wraps(stock)
    def get_write_results_queue(mp_mode: str = "spawn"):
        # A program without Megatron's arguments, or without megatron.training, may save in any way.
        args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        return stock(mp_mode) if getattr(args, "async_save", True) else in_this_process

    filesystem_async.get_write_results_queue = get_write_results_queue


PATCH = Patch(
    symbol="megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
    scope="always",
    wanted=lambda: compat.at_least("0.19"),
    reason="starts a manager process of 0.5 GB a rank for saves that do not leave the rank, and leaves it behind if that is killed",
    install=install,
)
