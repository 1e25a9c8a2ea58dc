# SPDX-License-Identifier: Apache-2.0
"""`zaya bench tune`: choose the library's kernel for each matrix product of a recipe, and write files that training reads.

Two tuners work in the same three stages: record the shapes, tune them, use the file. torch's TunableOp
(torch.cuda.tunable) does it on every accelerator; on CUDA it has one candidate. hipBLASLt's offline tuning follows
Primus' stages (PRIMUS_HIPBLASLT_TUNING_STAGE, examples/offline_tune) with its file names, so Primus can go on with the
folder. A file is for one device and one version of torch and ROCm: both libraries refuse it elsewhere.

    python -m zaya_plugin.bench.tune <file>     one stage in a process of its own, because the libraries read their
                                                variables once: calls the products of a JSON file, or tunes a CSV file
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from zaya_plugin.bench.gemm import CALLS, dtype_of, products_of
from zaya_plugin.bench.probes import product
from zaya_plugin.bench.results import WRONG, Column, Line, any_wrong, device_name, finish, only_device, write
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan.products import Product

PRODUCTS, UNTUNED, RESULTS = "products.json", "tunableop_untuned.csv", "tunableop_results.csv"
SHAPES, OVERRIDE = "gemm_shape/dump_hipblaslt_gemm_shape_0.txt", "gemm_tune/tune_hipblas_gemm_results.txt"
TUNABLE, LOG_MASK_BENCH = "PYTORCH_TUNABLEOP_", "32"  # hipBLASLt then logs each product as a hipblaslt-bench command
OVERRIDE_VARIABLE = "HIPBLASLT_TUNING_OVERRIDE_FILE"
# As Primus' examples/offline_tune: all solutions, but for those slower than 1 / 0.7 of the best in a first trial.
BENCH_OPTIONS = "--rotating 512 --cold_iters 20 --iters 20 --requested_solution -1 --skip_slow_solution_ratio 0.7"
REPLACED = ("--algo_method", "--solution_index")  # by BENCH_OPTIONS, each with its value
COLUMNS = {"transA", "transB", "batch_count", "m", "n", "k", "a_type", "compute_type", "solution_index"}


def bench_command(line: str, program: str) -> list[str]:
    """Return the command that tunes one product, from a line of hipBLASLt's log; [] for a line of something else."""
    words = shlex.split(line)
    if not words or Path(words[0]).name != "hipblaslt-bench":
        return []
    kept = [word for before, word in zip(words, words[1:], strict=False) if not {before, word} & {*REPLACED}]
    return [program, *kept, *BENCH_OPTIONS.split()]


def read_override(path: Path) -> tuple[str, list[dict[str, str]]]:
    """Return the version of hipBLASLt and the tuned products of a file that hipblaslt-bench wrote; raises ValueError for
    another file. hipBLASLt ignores a file of another version.
    """
    first, *lines = path.read_text().splitlines() or [""]
    version, rows = first.partition("Git Version: ")[2], []
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        rows.append(dict(zip(names.strip().split(","), values.strip().split(","), strict=False)))
    if not version or not rows or any(not COLUMNS <= {*row} for row in rows):
        allowed = f"a first line with its Git Version, then lines in pairs with {', '.join(sorted(COLUMNS))}"
        raise mistake(str(path), problem="is no tuning file of hipBLASLt", allowed=allowed, fix="zaya bench tune again")
    return version, rows


def stage(folder: Path, name: str, **variables: str) -> None:
    """Run a stage in a process of its own; RuntimeError with its output where it fails."""
    environment = {key: value for key, value in os.environ.items() if key != OVERRIDE_VARIABLE} | variables
    words = [sys.executable, "-m", "zaya_plugin.bench.tune", str(folder / name)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def tune_hipblaslt(folder: Path) -> dict:
    """Record and tune by hipBLASLt, and return what the file applies to. Not run on ROCm yet."""
    from hip_ops.runtime.rocm import find_program

    if (program := find_program("hipblaslt-bench")) is None:
        return {"skipped": "hipblaslt-bench is not installed (package hipblaslt-clients)"}
    for name in (SHAPES, OVERRIDE):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
    stage(folder, PRODUCTS, HIPBLASLT_LOG_MASK=LOG_MASK_BENCH, HIPBLASLT_LOG_FILE=str(folder / SHAPES))
    environment = os.environ | {"HIPBLASLT_TUNING_FILE": str(folder / OVERRIDE)}
    for line in sorted({*(folder / SHAPES).read_text().splitlines()}):
        if command := bench_command(line, program):
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    version, rows = read_override(folder / OVERRIDE)
    return {"git_version": version, "products": len(rows)}


def tune_by_torch(folder: Path) -> int:
    """Record and tune by TunableOp, and return the number of recorded products."""
    for path in folder.glob("tunableop_*.csv"):  # of an earlier run, which the library would add to
        path.unlink()
    common = {f"{TUNABLE}ENABLED": "1", f"{TUNABLE}UNTUNED_FILENAME": str(folder / UNTUNED)}
    stage(folder, PRODUCTS, **common, **{f"{TUNABLE}TUNING": "0", f"{TUNABLE}RECORD_UNTUNED": "1"})
    untuned = of_device(UNTUNED)  # the library adds the number of the device
    if not (folder / untuned).is_file():
        raise RuntimeError(f"torch's TunableOp recorded no product in {folder / untuned}")
    stage(folder, untuned, **common, **{f"{TUNABLE}TUNING": "1", f"{TUNABLE}FILENAME": str(folder / RESULTS)})
    return len({*(folder / untuned).read_text().splitlines()})


def of_device(name: str, device: int = 0) -> str:
    """Return the name of a device's file as TunableOp makes it."""
    return f"{Path(name).stem}{device}{Path(name).suffix}"


def run(options) -> int:
    """Tune; return 1 where a result is wrong or torch does not accept its file. options: overrides of the recipe,
    output, commit and command.
    """
    if taken := [name for name in os.environ if name.startswith((TUNABLE, "HIPBLASLT_TUNING"))]:
        problem = "is set, and would decide about the kernels that are measured"
        raise mistake(taken[0], os.environ[taken[0]], problem=problem, fix=f"unset {' '.join(taken)}")
    listed, recipe = products_of(options.overrides)
    device, dtype, folder = only_device(), dtype_of(recipe), options.output.absolute()
    if device.type == "cpu":
        problem = "torch finds none, and the files are for the device that made them"
        raise mistake(
            "zaya bench tune", problem=problem, allowed="a machine with an accelerator", fix="zaya bench gemm"
        )
    import torch
    from torch.cuda import tunable

    folder.mkdir(parents=True, exist_ok=True)
    listed = [one for one in listed if one.library]
    write(folder / PRODUCTS, {"dtype": str(dtype).removeprefix("torch."), "products": [asdict(p) for p in listed]})
    before = [product(one, device, dtype, CALLS[device.type]) for one in listed]
    recorded, results = tune_by_torch(folder), folder / of_device(RESULTS)
    of_rocm = tune_hipblaslt(folder) if torch.version.hip else {"skipped": "torch is not built for ROCm"}
    tunable.set_filename(str(results))
    tunable.enable(True)
    tunable.tuning_enable(False)
    accepted = tunable.read_file(str(results))
    after = [product(one, device, dtype, CALLS[device.type]) for one in listed]
    for other in range(1, recipe.cluster.gpus_per_node):
        shutil.copy(results, folder / of_device(RESULTS, other))
    environment = {f"{TUNABLE}ENABLED": "1", f"{TUNABLE}TUNING": "0", f"{TUNABLE}FILENAME": str(folder / RESULTS)}
    if "git_version" in of_rocm:
        environment[OVERRIDE_VARIABLE] = str(folder / OVERRIDE)
    rows = [
        {
            "name": one.name,
            "direction": one.direction,
            **{key: getattr(one, key) for key in ("m", "n", "k", "calls")},
            "gflop": one.flops / 1e9,
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
        rows,
        [
            Column("name", "product"),
            Column("direction", "direction"),
            *(Column(key, key, ",") for key in ("m", "n", "k", "calls")),
            Column("tflops", "TFLOP/s", ".4g"),
            Column("tuned_tflops", "tuned", ".4g"),
            Column("gain", "gain", ".3f"),
            WRONG,
        ],
        device=device,
        command=options.command,
        commit=options.commit,
        output=folder,
        title=f"Tuned products of {recipe.name}, {device_name(device)}",
        lines=[Line(key, gflop, [row[key] for row in rows], False) for key in ("tflops", "tuned_tflops")],
        x="GFLOP of a call",
        y="TFLOP/s",
        more={
            "accepted": accepted,
            "recorded": recorded,
            "validators": dict(tunable.get_validators()),
            "hipblaslt": of_rocm,
            "environment": environment,
        },
    )
    print(f"TunableOp recorded {recorded} of {len(listed)} products, and {'reads' if accepted else 'REFUSES'} its file")
    print(f"hipBLASLt: {', '.join(f'{key} {value}' for key, value in of_rocm.items())}")
    print("use in a recipe, on this device with these versions alone; elsewhere torch and hipBLASLt ignore the files:")
    print(" \\\n".join(f"  cluster.environment.{name}={shlex.quote(value)}" for name, value in environment.items()))
    return any_wrong(rows) or int(not accepted)


def main(argv: list[str]) -> int:
    """Run one stage; the environment says which."""
    import torch

    path = Path(argv[0])
    if path.suffix == ".csv":
        torch.cuda.tunable.tune_gemm_in_file(str(path))
        return 0
    content = json.loads(path.read_text())
    for one in content["products"]:
        product(Product(**one), torch.device("cuda", 0), getattr(torch, content["dtype"]), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
