# SPDX-License-Identifier: Apache-2.0
"""Loads a legacy export with SGLang's own `load_weights`, on a CPU, and compares every tensor. Prints a JSON line.

    python -m tests.checkpoint.convert.sglang_load EXPORT

SGLang 0.5.23 and what it imports must be importable. It states some sizes of parallel groups only in its server, and
takes a rotary kernel of vLLM's on a CPU: this script states the first, the second is not called by a load.
"""

import json
import logging
import os
import re
import sys
import tempfile
import types
from pathlib import Path

STACKED = {"w13_weight": "linear_fc1", "w2_weight": "linear_fc2"}  # of all experts in one tensor


def build(folder: Path):
    """Return SGLang's model of an export, with NaN in every tensor."""
    import torch

    vllm, operators = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding, vllm._custom_ops = None, operators
    sys.modules |= {"vllm": vllm, "vllm._custom_ops": operators}
    from sglang.srt.configs.zaya import ZayaConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models.zaya import ZayaForCausalLM
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import ServerArgs

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = f"file://{tempfile.mkdtemp()}/store"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=store)
    get_context().set_server_args(ServerArgs(model_path="none", boundary_reduction="ar"))
    initialize_model_parallel(backend="gloo")
    config = ZayaConfig(**json.loads((folder / "config.json").read_text()))
    while True:
        try:
            model = ZayaForCausalLM(config)
            break
        except RuntimeError as error:
            if (missing := re.search(r"parallel name '(\w+)' has not", str(error))) is None:
                raise
            get_parallel().override_permanently(**{missing[1]: 0 if missing[1].endswith("rank") else 1})
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    return model


def main(folder: Path) -> dict:
    """Load and compare. Return counts, and the names that differ."""
    import torch
    from safetensors.torch import load_file

    stored = {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}
    model, warnings = build(folder), []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("sglang.srt.models.zaya").addHandler(handler)
    model.load_weights(iter(stored.items()))
    held = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if "balancing" in n}
    left, wrong, unset = dict(stored), [], []
    for name, tensor in held.items():
        if name in stored:
            wanted = left.pop(name)
        elif (which := STACKED.get(name.rpartition(".")[2])) is None:
            unset.append(name)
            continue
        else:
            layer = name.rpartition(".")[0]
            wanted = torch.stack([left.pop(f"{layer}.local_experts.{e}.{which}.weight") for e in range(len(tensor))])
        if not torch.equal(tensor.detach().float(), wanted.float()):
            wrong.append(name)
    return {
        "stored": len(stored),
        "held": len(held),
        "unset": unset,
        "wrong": wrong,
        "left": sorted(left),
        "warnings": warnings,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
