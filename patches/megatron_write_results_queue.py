# SPDX-License-Identifier: Apache-2.0
"""megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue: returns a queue.Queue for saves
inside the rank.

Megatron's checkpoint writer answers through the queue of a multiprocessing manager, also where it runs in the rank
itself (without --async-save). That manager is one more Python process for each rank: half a gigabyte with torch in it,
and seconds until it is up at the first save. It never ends if the rank is killed.
"""

import functools
import queue
import sys

from zaya_plugin import compat
from zaya_plugin.patches.registry import MEGATRON, Patch


def in_this_process(stock):
    own: queue.Queue = queue.Queue()

    @functools.wraps(stock)
    def get_write_results_queue(mp_mode: str = "spawn"):
        # Where Megatron's arguments or megatron.training are missing, the save may be asynchronous.
        args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        return stock(mp_mode) if getattr(args, "async_save", True) else own

    return get_write_results_queue


PATCH = Patch(
    symbol="megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
    make=in_this_process,
    scope="always",
    condition=lambda: compat.at_least("0.19"),
    reason=(
        "starts a manager process of 0.5 GB in each rank for saves inside the rank, and leaves it behind if the rank "
        "is killed"
    ),
    upstream=MEGATRON + "core/dist_checkpointing/strategies/filesystem_async.py",
    until="synchronous saves use a queue inside the rank",
)
