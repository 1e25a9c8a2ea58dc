# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a step with low-rank adapters: this package, peft on transformers, and training of all weights.

    python3 benchmarks/lora_step.py --cluster h100_8             ZAYA1-base's 40 layers, random weights and tokens
    python3 benchmarks/lora_step.py --cluster cpu --tiny         tries the script

One device. Each measurement is a process of its own. This package runs by `zaya bench step`, a step as one graph where
that is possible, as with unpacked sequences: the mean of 5 steps after 3, and the peak that the allocator gave out.
peft: LoraConfig with the same modules and target_parameters, on bf16 weights, adapters in fp32 under torch's fused
AdamW, each decoder layer compiled where that works. All weights of 40 layers do not fit into 80 GB, so --layers-full
layers are trained both ways.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from result_record import RESULTS, described, file_part

VOCABULARY, STEPS, WARMUP = 262_272, 5, 3
TINY = "model=zaya_tiny stage.seq_length=64 logger.wandb=false".split()


def recipe_words(options: argparse.Namespace, layers: int, rank: int | None) -> list[str]:
    """Return the words of the recipe of a measurement. rank: None trains all weights."""
    words = ["experiment=finetune_lora", f"cluster={options.cluster}", "nproc=1", f"model.num_layers={layers}"]
    words += [f"stage.seq_length={options.length}", f"stage.micro_batch_size={options.micro_batch}"]
    words += [f"stage.global_batch_size={options.sequences}", "optim.lr=1e-4", "optim.min_lr=1e-5"]
    words += [f"cluster.graphs={options.graphs}"]
    words += ["data.packing=none", "data.reset_position_ids=false", "parallel.recompute_granularity=null"]
    words += [f"optim.lora.rank={rank or 'null'}", "optim.name=adamw", "logger.tensorboard=false"]
    return words + (TINY if options.tiny else [])


def ours(options: argparse.Namespace, layers: int, rank: int | None) -> dict:
    """Measure this package."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["bench", "step", *recipe_words(options, layers, rank), f"run_dir={folder}/run", "--random-tokens"]
        command = [sys.executable, "-m", "zaya_plugin.cli", *words, "--output", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return {"error": done.stdout[-1500:]}
        record = json.loads((Path(folder) / "step.json").read_text())
    return {key: record["step"][key] for key in ("ms", "tokens", "allocated_gib", "reserved_gib")} | {
        "idle_ms": next(part["ms"] for part in record["parts"] if part["part"] == "idle")
    }


def peft_step(options: argparse.Namespace, layers: int, rank: int, compiled: bool) -> dict:
    """Measure peft on transformers, in this process."""
    import peft
    import transformers
    from step_vs_transformers import zaya_config

    from zaya_plugin.config.compose import compose

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    recipe = compose([*recipe_words(options, layers, rank), "data.path=none"])
    rows = VOCABULARY if not options.tiny else 512
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = transformers.ZayaForCausalLM(zaya_config(recipe, rows, device))
    torch.set_default_dtype(torch.float32)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config).train()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = parameter.data.float()
    if compiled:
        for layer in model.base_model.model.model.layers:
            layer.compile(dynamic=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=on_gpu)
    tokens = torch.randint(rows, (options.micro_batch, options.length), device=device)
    times = []
    for step in range(WARMUP + STEPS):
        if step == WARMUP and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(options.sequences // options.micro_batch):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    milliseconds = 1e3 * sum(times[WARMUP:]) / STEPS
    return {
        "ms": milliseconds,
        "tokens": options.length * options.sequences,
        "allocated_gib": gib,
        "compiled": compiled,
        "trained": sum(p.numel() for p in trained),
        "versions": f"peft {peft.__version__}, transformers {transformers.__version__}",
    }


def peft_in_a_process(layers: int, rank: int) -> dict:
    """Measure peft in a process: compiled on an accelerator, unless that fails."""
    failed = None
    for compiled in ("1", "0") if torch.cuda.is_available() else ("0",):
        command = [sys.executable, *sys.argv, "--peft", f"{layers},{rank},{compiled}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1]) | ({"compile_failed": failed} if failed else {})
        failed = done.stderr[-800:]
    return {"error": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="h100_8", help="recipe of the device")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--layers-full", type=int, default=8, help="layers that are also trained whole")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--graphs", choices=("auto", "none"), default="auto", help="cluster.graphs of this package")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--only", help="a comma-separated choice of the measurements")
    parser.add_argument("--commit", help="for the record, where there is no git checkout")
    parser.add_argument("--peft", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.layers_full, options.length, options.sequences = 2, 2, 64, 2
    if options.peft:
        layers, rank, compiled = map(int, options.peft.split(","))
        print(json.dumps(peft_step(options, layers, rank, bool(compiled))))
        return
    measurements = {
        "lora": lambda: ours(options, options.layers, options.rank),
        "peft": lambda: peft_in_a_process(options.layers, options.rank),
        "small lora": lambda: ours(options, options.layers_full, options.rank),
        "small peft": lambda: peft_in_a_process(options.layers_full, options.rank),
        "small all weights": lambda: ours(options, options.layers_full, None),
    }
    chosen = options.only.split(",") if options.only else list(measurements)
    record, results = described(options.commit), {}
    # Of each row, because the file keeps the rows of other calls.
    made = {key: record[key] for key in ("date", "commit", "command")}
    made |= {"layers": options.layers, "layers_full": options.layers_full, "micro_batch": options.micro_batch}
    for name in chosen:
        results[name] = row = measurements[name]() | made
        if "ms" in row:
            row["tokens_per_s"] = 1e3 * row["tokens"] / row["ms"]
        print(f"{name:18} {json.dumps(row)}", flush=True)
    path = RESULTS / f"lora_step-{file_part(record['device'])}-micro_batch_{options.micro_batch}.json"
    if not options.tiny:
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | record | results, indent=1) + "\n")
    rates = {name: row.get("tokens_per_s") for name, row in results.items()}
    for one, other in (("lora", "peft"), ("small lora", "small peft"), ("small lora", "small all weights")):
        if rates.get(one) and rates.get(other):
            print(f"{one} / {other}: {rates[one] / rates[other]:.2f} x tokens/s")


if __name__ == "__main__":
    main()
