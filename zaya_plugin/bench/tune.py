# SPDX-License-Identifier: Apache-2.0
"""`zaya bench tune`: choose the library's kernel for each matrix product of a recipe, and write files that training reads.

Two tuners work in the same three stages: record the shapes, tune them, use the file. torch's TunableOp
(torch.cuda.tunable) does it on every accelerator; on CUDA it has one candidate. hipBLASLt's offline tuning follows
Primus' stages (PRIMUS_HIPBLASLT_TUNING_STAGE, examples/offline_tune) with its file names, so Primus can go on with the
folder. A file is for one device and one version of torch and ROCm: both libraries refuse it elsewhere.

    python -m zaya_plugin.bench.tune <products as JSON | file.csv>

runs one stage in a process of its own, because the libraries read their variables once: it calls the products, or tunes
those that TunableOp has recorded.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from zaya_plugin.bench.gemm import product_rates, products_of
from zaya_plugin.bench.probes import product
from zaya_plugin.bench.results import WRONG, Column, Line, any_wrong, device_name, dtype_of, finish, only_device
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan.products import Product

UNTUNED, RESULTS = "tunableop_untuned{}.csv", "tunableop_results{}.csv"  # torch adds the number of the device
SHAPES, OVERRIDE = "gemm_shape/dump_hipblaslt_gemm_shape_0.txt", "gemm_tune/tune_hipblas_gemm_results.txt"
TUNABLE, OVERRIDE_VARIABLE = "PYTORCH_TUNABLEOP_", "HIPBLASLT_TUNING_OVERRIDE_FILE"
# As Primus' examples/offline_tune: all solutions, but for those slower than 1 / 0.7 of the best in a first trial.
BENCH_OPTIONS = "--rotating 512 --cold_iters 20 --iters 20 --requested_solution -1 --skip_slow_solution_ratio 0.7"
REPLACED = {"--algo_method", "--solution_index"}  # by BENCH_OPTIONS, both with their values
COLUMNS = {"transA", "transB", "batch_count", "m", "n", "k", "a_type", "compute_type", "solution_index"}


def bench_command(line: str, program: str) -> list[str]:
    """Return the command that tunes one product, from a line of hipBLASLt's log; [] for a line of something else."""
    words = shlex.split(line)
    if not words or Path(words[0]).name != "hipblaslt-bench":
        return []
    kept = [word for before, word in zip(words, words[1:], strict=False) if not {before, word} & REPLACED]
    return [program, *kept, *BENCH_OPTIONS.split()]


def read_override(path: Path) -> tuple[str, list[dict[str, str]]]:
    """Return the version of hipBLASLt and the tuned products of a file that hipblaslt-bench wrote; raises ValueError for
    another file. hipBLASLt ignores a file of another version.
    """
    first, *lines = path.read_text().splitlines() or [""]
    pairs = zip(lines[::2], lines[1::2], strict=False)
    rows = [dict(zip(*(line.strip().split(",") for line in pair), strict=False)) for pair in pairs]
    version = first.partition("Git Version: ")[2]
    if not version or not rows or any(not COLUMNS <= {*row} for row in rows):
        allowed = f"a first line with its Git Version, then lines in pairs with {', '.join(sorted(COLUMNS))}"
        raise mistake(str(path), problem="is no tuning file of hipBLASLt", allowed=allowed, fix="zaya bench tune again")
    return version, rows


def stage(argument: str, writes: Path, **variables: str) -> None:
    """Run a stage in a process of its own that writes the file `writes`; RuntimeError with its output if it fails."""
    writes.parent.mkdir(exist_ok=True)
    writes.unlink(missing_ok=True)  # of an earlier run
    words = [sys.executable, "-m", "zaya_plugin.bench.tune", argument]
    done = subprocess.run(
        words, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode or not writes.is_file():
        raise RuntimeError(f"no {writes} by {' '.join(words)} with {variables}:\n{done.stdout}")


def tune_hipblaslt(folder: Path, products: str) -> dict:
    """Record and tune by hipBLASLt, and return what the file applies to. Not run on ROCm yet."""
    from hip_ops.runtime.rocm import find_program

    if (program := find_program("hipblaslt-bench")) is None:
        return {"skipped": "hipblaslt-bench is not installed (package hipblaslt-clients)"}
    # with 32 hipBLASLt logs every product as a command of hipblaslt-bench
    stage(products, folder / SHAPES, HIPBLASLT_LOG_MASK="32", HIPBLASLT_LOG_FILE=str(folder / SHAPES))
    (folder / OVERRIDE).parent.mkdir(exist_ok=True)
    (folder / OVERRIDE).unlink(missing_ok=True)
    environment = os.environ | {"HIPBLASLT_TUNING_FILE": str(folder / OVERRIDE)}
    for line in sorted({*(folder / SHAPES).read_text().splitlines()}):
        if command := bench_command(line, program):
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    version, rows = read_override(folder / OVERRIDE)
    return {"git_version": version, "products": len(rows)}


def run(options) -> int:
    """Tune; return 1 where a result is wrong or torch does not accept its file. options: overrides of the recipe,
    output, commit and command.
    """
    if taken := [name for name in os.environ if name.startswith((TUNABLE, "HIPBLASLT_TUNING"))]:
        problem = "is set, and would decide about the kernels that are measured"
        raise mistake(taken[0], os.environ[taken[0]], problem=problem, fix=f"unset {' '.join(taken)}")
    listed, recipe = products_of(options.overrides)
    device, dtype, folder = only_device(), dtype_of(recipe), options.output.absolute()
    if "cpu" in (device.type, recipe.cluster.device):
        problem = "tuned files are for the accelerator that made them; a CPU has nothing to tune"
        allowed = "cuda, where torch finds an accelerator"
        raise mistake("cluster.device", recipe.cluster.device, problem=problem, allowed=allowed, fix="zaya bench gemm")
    import torch
    from torch.cuda import tunable

    folder.mkdir(parents=True, exist_ok=True)
    listed = [one for one in listed if one.library]
    products = json.dumps([recipe.cluster.dtype, *map(asdict, listed)])
    before = [*product_rates(listed, device, dtype)]
    untuned, results = folder / UNTUNED.format(0), folder / RESULTS.format(0)
    on = {f"{TUNABLE}ENABLED": "1", f"{TUNABLE}UNTUNED_FILENAME": str(folder / UNTUNED.format(""))}
    in_use = {f"{TUNABLE}ENABLED": "1", f"{TUNABLE}TUNING": "0", f"{TUNABLE}FILENAME": str(folder / RESULTS.format(""))}
    stage(products, untuned, **on, **{f"{TUNABLE}TUNING": "0", f"{TUNABLE}RECORD_UNTUNED": "1"})
    stage(str(untuned), results, **in_use | {f"{TUNABLE}TUNING": "1"})
    of_rocm = tune_hipblaslt(folder, products) if torch.version.hip else {"skipped": "torch is not built for ROCm"}
    tunable.set_filename(str(results))
    tunable.enable(True)
    tunable.tuning_enable(False)
    accepted, known = tunable.read_file(str(results)), results.read_text()
    after = [*product_rates(listed, device, dtype)]
    for other in range(1, recipe.cluster.gpus_per_node):
        shutil.copy(results, folder / RESULTS.format(other))
    if "git_version" in of_rocm:
        in_use[OVERRIDE_VARIABLE] = str(folder / OVERRIDE)
    rows = [
        {
            "name": one.name,
            "direction": one.direction,
            **{key: getattr(one, key) for key in ("m", "n", "k", "calls")},
            "gflop": one.flops / 1e9,
            "recorded": "yes" if f"_{one.n}_{one.m}_{one.k}_" in known else "no",  # its matrices have columns first
            "tflops": old.rate / 1e12,
            "tuned_tflops": new.rate / 1e12,
            "gain": new.rate / old.rate,
            "wrong": old.wrong + new.wrong,
        }
        for one, old, new in zip(listed, before, after, strict=True)
    ]
    gflop = [row["gflop"] for row in rows]
    finish(
        "tune",
        options,
        device,
        rows,
        [
            Column("name", "product"),
            Column("direction", "direction"),
            *(Column(key, key, ",") for key in ("m", "n", "k", "calls")),
            Column("recorded", "TunableOp"),
            Column("tflops", "TFLOP/s", ".4g"),
            Column("tuned_tflops", "tuned", ".4g"),
            Column("gain", "gain", ".3f"),
            WRONG,
        ],
        title=f"Tuned products of {recipe.name}, {device_name(device)}",
        lines=[Line(key, gflop, [row[key] for row in rows], False) for key in ("tflops", "tuned_tflops")],
        x="GFLOP of a call",
        y="TFLOP/s",
        more={
            "accepted": accepted,
            "validators": dict(tunable.get_validators()),
            "hipblaslt": of_rocm,
            "environment": in_use,
        },
    )
    keys = " \\\n".join(f"  cluster.environment.{name}={shlex.quote(value)}" for name, value in in_use.items())
    print(
        f"torch's TunableOp {'reads' if accepted else 'REFUSES'} its file; it tunes no product with an fp32 result\n"
        f"hipBLASLt: {', '.join(f'{key} {value}' for key, value in of_rocm.items())}\n"
        f"use in a recipe, on this device with these versions alone; elsewhere both ignore the files:\n{keys}"
    )
    return any_wrong(rows) or int(not accepted)


def main(argv: list[str]) -> int:
    """Run one stage; the environment says which."""
    import torch

    if argv[0].endswith(".csv"):
        torch.cuda.tunable.tune_gemm_in_file(argv[0])
    else:
        name, *listed = json.loads(argv[0])
        for one in listed:
            product(Product(**one), torch.device("cuda", 0), torch.bfloat16 if name == "bf16" else torch.float32, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
