# SPDX-License-Identifier: Apache-2.0
"""A ZAYA1-base-width model of as many layers as fit: 50 training steps, then our step beside transformers'.

    python3 benchmarks/step_vs_transformers.py

Trains in bf16 on the sources of Python's standard library with `zaya train`, the table padded to ZAYA1's 262,272 rows,
and measures forward and backward of our model and of transformers' ZayaForCausalLM of the same depth with the trained
weights on the same text. Prints a table and one line of JSON and writes it to benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from result_record import commit_of
from step_report import pretty, ratios, summary_of_training, table

from zaya_plugin.plan.flops import Shape, count_parameters, training_flops

HERE = Path(__file__).resolve().parent
VOCABULARY = 262_272
# AdamW as Megatron runs it here: bf16 weight 2, fp32 gradient 4, fp32 weight 4, two fp32 moments 8; torch's foreach
# update needs a square root of the second moment for all parameters at once, 4 more.
BYTES_A_PARAMETER = 22
# Left for the CUDA context, NCCL and fragments; the activations of one micro-batch fit where the square roots were.
RESERVED_BYTES = 3 * 2**30


def shape_of(recipe, layers: int, vocabulary: int) -> Shape:
    """Sizes of the recipe's model with `layers` layers."""
    m = recipe.model
    return Shape(
        num_layers=layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups,
        kv_channels=m.kv_channels,
        num_experts=m.num_experts,
        moe_ffn_hidden_size=m.moe_ffn_hidden_size,
        router_hidden_size=m.router_hidden_size,
        vocab_size=vocabulary,
    )


def most_layers(recipe, memory: int, vocabulary: int) -> int:
    """Layers whose training state fits into `memory` bytes by arithmetic; the run itself has the last word."""
    layers = recipe.model.num_layers
    while layers > 1:
        parameters = sum(count_parameters(shape_of(recipe, layers, vocabulary)).values())
        if parameters * BYTES_A_PARAMETER + RESERVED_BYTES <= memory:
            break
        layers -= 1
    return layers


def zaya(*arguments: str) -> subprocess.CompletedProcess:
    """The console script, which need not be installed."""
    command = [sys.executable, "-m", "zaya_plugin.cli", *arguments]
    print("+ zaya", shlex.join(arguments), file=sys.stderr, flush=True)
    return subprocess.run(command, stdout=sys.stderr)


def device_of(cluster: str) -> dict:
    """Name and memory of the device, asked in a process of its own so that none of its memory stays taken."""
    if cluster == "cpu":
        return {"name": platform.processor() or platform.machine(), "memory": 4 * 2**30, "torch": None, "cuda": None}
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps(dict(name=p.name, "
        "memory=torch.cuda.mem_get_info()[0], torch=torch.__version__, cuda=torch.version.cuda or torch.version.hip)))"
    )
    return json.loads(
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    )


def overrides(options, layers: int, data: Path, run_dir: Path, vocabulary: int) -> list[str]:
    """The recipe of the training run."""
    chosen = [
        f"model={options.model}",
        f"cluster={options.cluster}",
        f"cluster.dtype={options.dtype}",
        "logger=none",
        "data=corpus",
        f"data.path={data}",
        "data.num_workers=0",
        f"run_dir={run_dir}",
        "name=step_benchmark",
        "nproc=1",
        f"model.num_layers={layers}",
        f"model.make_vocab_size_divisible_by={vocabulary}",
        f"stage.seq_length={options.seq_length}",
        "stage.micro_batch_size=1",
        "stage.global_batch_size=4",
        f"stage.train_iters={options.steps}",
        "stage.eval_iters=0",
        f"optim.lr_warmup_iters={max(1, options.steps // 10)}",
        "checkpoint.save_interval=null",
        "megatron.no_save_optim=true",  # the weights alone; nothing continues from here
        *options.override,
    ]
    if options.cluster != "cpu":
        chosen.append("cluster.environment.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return chosen


def train(options, layers: int, data: Path, work: Path, vocabulary: int) -> tuple[int, Path]:
    """Trains with `layers` layers, or one fewer at a time where the device's memory does not suffice."""
    while True:
        run_dir = work / f"run{layers}"
        if zaya("train", *overrides(options, layers, data, run_dir, vocabulary)).returncode == 0:
            return layers, run_dir
        logs = "".join(p.read_text(errors="replace") for p in sorted(run_dir.glob("logs/**/*")) if p.is_file())
        if "out of memory" not in logs or layers == 1:
            print(logs[-6000:], file=sys.stderr)
            raise SystemExit("the training run failed; see above")
        print(f"{layers} layers do not fit", file=sys.stderr, flush=True)
        layers -= 1


def measure(options, run_dir: Path, work: Path) -> dict:
    """measure_step.py on the trained weights, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    rank = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    out = work / "measured.json"
    command = [
        sys.executable,
        str(HERE / "measure_step.py"),
        "--recipe",
        str(run_dir / "recipe.yaml"),
        "--out",
        str(out),
        "--repeats",
        str(options.repeats),
        "--batches",
        *map(str, options.batches),
        "--variants",
        *options.variants,
        "--transformers-variants",
        *options.transformers_variants,
        "--profile",
        *options.profile,
    ]
    allocator = {} if options.cluster == "cpu" else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    subprocess.run(command, check=True, env={**os.environ, **rank, **allocator})
    return json.loads(out.read_text())


def command_of(options, parser: argparse.ArgumentParser) -> str:
    """The command that measures this again; where results go and what is measured is no part of it."""
    words = ["python3", "benchmarks/step_vs_transformers.py"]
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.dest not in ("help", "results", "name", "commit") and value != action.default:
            words += [action.option_strings[0], *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zaya1_base", help="model recipe")
    parser.add_argument("--layers", type=int, help="first depth that is tried; by default what fits by arithmetic")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="rows of the embedding")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4], help="sequences of a measured step")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cluster", default="gpu", help="cluster recipe; cpu is for trying this script")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--variants", nargs="+", default=["plain"], help="of step_variants.py, joined by +")
    parser.add_argument(
        "--transformers-variants",
        nargs="+",
        default=["grouped_mm", "eager"],
        help="experts implementations; +compile compiles each layer",
    )
    parser.add_argument("--profile", nargs="*", default=["plain", "grouped_mm"], help="variants that are profiled")
    parser.add_argument("--override", nargs="*", default=[], help="further overrides of the training recipe")
    parser.add_argument("--commit", default=None, help="commit that is measured, where this is no checkout")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--name", default=None, help="of the results file")
    options = parser.parse_args()
    from zaya_plugin.config.compose import load_recipe

    with tempfile.TemporaryDirectory(prefix="zaya-step-") as folder:
        work = Path(folder)
        data = work / "data"
        if zaya(
            "data",
            "prepare",
            "--input",
            "stdlib",
            "--max-bytes",
            "8M",
            "--train-bpe",
            "4096",
            "--output",
            str(data),
            "--quiet",
        ).returncode:
            raise SystemExit("the data could not be prepared")
        device = device_of(options.cluster)
        layers = options.layers
        if layers is None:
            from zaya_plugin.config.compose import compose

            recipe = compose(overrides(options, 40, data, work, options.vocabulary))
            layers = most_layers(recipe, device["memory"], options.vocabulary)
        layers, run_dir = train(options, layers, data, work, options.vocabulary)
        measured = measure(options, run_dir, work)
        shape = shape_of(load_recipe(run_dir / "recipe.yaml"), layers, options.vocabulary)
        result = {
            "device": device["name"],
            "date": datetime.date.today().isoformat(),
            "commit": commit_of(options.commit),
            "command": command_of(options, parser),
            "versions": {
                "python": platform.python_version(),
                "torch": device["torch"],
                "cuda": device["cuda"],
                "megatron-core": metadata.version("megatron-core"),
                "transformers": measured.pop("transformers_version"),
            },
            "model": {
                "layers": layers,
                "parameters": measured.pop("parameters"),
                "vocabulary": options.vocabulary,
                "gflop_a_token": round(training_flops(shape, 1, options.seq_length) / 1e9, 3),
            },
            "train": summary_of_training(run_dir),
            "ratios": ratios(measured),
            "forward_backward": measured,
        }
    print(table(result), file=sys.stderr)
    line = json.dumps(result)
    print(line)
    options.results.mkdir(parents=True, exist_ok=True)
    name = options.name or f"step_vs_transformers-{result['device'].replace(' ', '_').lower()}"
    (options.results / f"{name}.json").write_text(pretty(result))


if __name__ == "__main__":
    main()
