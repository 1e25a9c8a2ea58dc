# SPDX-License-Identifier: Apache-2.0
"""Ranks for test_restore.py: real processes over gloo, forked from one that has imported torch.

`python -m tests.checkpoint.restore_ranks` reads jobs as JSON lines: {"work": function of this file, "directory": of the
checkpoints, "locals": local folder of each rank or null, "step": ...}. Ranks with one local folder are one node. It
answers each with a line of all ranks' results.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from zaya_plugin.checkpoint import manifest, places, replicas, restore


def finish(directory: Path, nodes: restore.Nodes, _: int) -> list[str]:
    return restore.finish_uploads(directory, nodes)


def finish_with_a_stale_handle(directory: Path, nodes: restore.Nodes, _: int) -> list[str]:
    """Rank 1 cannot read the manifest."""
    import torch

    if torch.distributed.get_rank() == 1:
        manifest.read = None
    return restore.finish_uploads(directory, nodes)


def replicas_differ(directory: Path, nodes: restore.Nodes, _: int) -> list[str]:
    """Compare a model whose buffers differ on rank 3, and return the result."""
    import torch

    world = torch.distributed.group.WORLD
    replicas.parallel_state = SimpleNamespace(
        get_data_parallel_group=lambda with_context_parallel: world,
        get_inter_distributed_optimizer_instance_group=lambda check_initialized: None,
    )
    rank = torch.distributed.get_rank()
    inner = torch.nn.Module()
    inner.register_buffer("balancing_step", torch.tensor(7 + (rank == 3)))
    inner.register_buffer("balancing_biases", torch.full((16,), 0.5))
    inner.register_buffer("tokens_per_expert", torch.tensor([rank]), persistent=False)
    found = []
    for model in (inner, torch.nn.Sequential(inner)):
        try:
            replicas.check_replicas([model])
        except RuntimeError as error:
            found.append(str(error))
    return found


def compare(directory: Path, nodes: restore.Nodes, step: int) -> dict:
    """Compare, link, and say what this rank has read."""
    read = []
    plain = manifest.describe
    manifest.describe = lambda path, *rest, **named: (read.append(str(path)), plain(path, *rest, **named))[1]
    compared = restore.compare(directory, step, nodes)
    loads_from = str(restore.link(directory, step, nodes, compared))
    origin = restore.origin(directory, step, nodes, compared) if compared.files and nodes.local else None
    return {
        "damaged": compared.damaged,
        "notes": compared.notes,
        "read": read,
        "loads_from": loads_from,
        "origin": origin,
    }


def load_a_copy(directory: Path, nodes: restore.Nodes, step: int) -> list[float]:
    """Load from a storage without paths, and with step 20 not on rank 1, whose copy fails."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tests.checkpoint.memory_place import MemoryPlace
    from zaya_plugin.checkpoint.checkpoints import Checkpoints

    def fails(source, target):
        raise OSError(5, "Input/output error", source.name)

    if step == 20 and torch.distributed.get_rank() == 1:
        places.copy = fails
    weights = ShardedTensor.from_rank_offsets("weights", torch.zeros(4), replica_id=torch.distributed.get_rank())
    return Checkpoints(MemoryPlace(str(directory))).load(step, {"weights": weights})["weights"].tolist()


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        if job["work"] == "load_a_copy":
            import zaya_plugin.checkpoint.checkpoints  # noqa: F401  with Megatron, once for all forks
        with tempfile.TemporaryDirectory() as folder:
            pids = [fork(job, rank, Path(folder)) for rank in range(len(job["locals"]))]
            for pid in pids:
                os.waitpid(pid, 0)
            results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(pids))]
        print(json.dumps(results), flush=True)
    os._exit(0)  # the end of an interpreter with torch and Megatron takes 1.5 s


def fork(job: dict, rank: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        import torch

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(job["locals"])
        )
        local = job["locals"][rank]
        nodes = restore.Nodes.find(None if local is None else Path(local))
        result = globals()[job["work"]](Path(job["directory"]), nodes, job.get("step"))
        (folder / f"{rank}.json").write_text(json.dumps(result))
        torch.distributed.destroy_process_group()
    except BaseException as error:
        (folder / f"{rank}.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    os._exit(0)


if __name__ == "__main__":
    main()
