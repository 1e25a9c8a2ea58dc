# SPDX-License-Identifier: Apache-2.0
"""`zaya bench hbm|gemm|mlp|tune`: rates of one device's memory and matrix products. No torch import."""

from __future__ import annotations

import importlib
from pathlib import Path

from zaya_plugin.commands.parser import Option, Parser, option
from zaya_plugin.config.run_directory import check_creatable
from zaya_plugin.config.train_help import DEMO_DATA
from zaya_plugin.ground.option_numbers import MOST_STEPS, MOST_TOKENS, message_size, whole_number

OUTPUT = option(
    "--output", type=Path, default=Path("runs/bench"), metavar="DIR", help="folder of the JSON and PNG (runs/bench)"
)
COMMIT = option("--commit", metavar="TEXT", help="commit for the record, where there is no git checkout")

HBM = """\
Measures the bandwidth of a device's memory: BabelStream's copy, scale, add and triad over fp32 arrays of growing size.

Every array that is read or written counts once. Every result is checked. Shares are of the copy rate in the recipe
that names the device (machine.copy_tb_per_s) and of the vendor's data sheet. Without an accelerator the CPU's memory is
measured. Exit code 1: a result is wrong."""
HBM_EXAMPLES = """\
examples:
  zaya bench hbm                                      the first accelerator, arrays of 64 KiB to 4 GiB
  CUDA_VISIBLE_DEVICES=3 zaya bench hbm --output /shared/bench
  zaya bench hbm --max-bytes 16M                      quick, in the caches"""
GEMM = """\
Measures the matrix products of a recipe with the sizes and layouts of its layout and micro-batch: forward, dgrad, wgrad,
and the products of Newton-Schulz (as whole products; training computes one triangle of the symmetric ones).

Next to each product it measures the sizes rounded up to multiples of 64, 128 and 256, where they differ. Square products
of growing size show at how many operations the device is saturated. Shares are of the large product, which
`zaya verify` measures too. Every result is checked. Exit code 1: a result is wrong."""
GEMM_EXAMPLES = f"""\
examples:
  zaya bench gemm experiment=zaya1_base cluster=gpu stage.micro_batch_size=4
  zaya bench gemm experiment=zaya1_base cluster=gpu model.moe_ffn_hidden_size=4000     what a better size gives
  zaya bench gemm experiment=cpu_demo                          on this machine's CPU, with the vocabulary of its data:
    {DEMO_DATA}"""
MLP = """\
Measures a chain of bf16 MLPs, and compares it with 732 TFLOP/s a device: the 750 PFLOP/s that AMD published for 1,024
MI300X (ROCm 6.4, November 2025). The sizes of that workload are not public; the defaults are large enough to saturate
any device of today. Results are checked. Exit code 1: a result is wrong."""
MLP_EXAMPLES = """\
examples:
  zaya bench mlp
  zaya bench mlp --hidden 4096 --ffn 14336 --tokens 16384 --layers 8"""

TUNE = """\
Chooses the library's kernel for the matrix products of a recipe that training calls through torch (projections, head,
the router's first layer), and writes files with which training uses them: by torch's TunableOp on every accelerator,
and on ROCm by hipBLASLt's offline tuning too, in Primus' three stages and with its file names. Prints rates before and
after, and the recipe keys (cluster.environment) that use the files.

The files are for this device and these versions of torch and ROCm: elsewhere both libraries ignore them, and on a CPU
there is nothing to tune. On CUDA, TunableOp has one candidate, torch's own choice. The ROCm part has not run on ROCm.
Exit code 1: a result is wrong, or torch does not accept its own file."""
TUNE_EXAMPLES = """\
examples:
  zaya bench tune experiment=zaya1_base cluster=mi300x_8 --output runs/tuned
  zaya bench tune experiment=zaya1_base cluster=gpu model.num_layers=8 stage.micro_batch_size=4"""


def _command(name: str, description: str, examples: str, *rows: Option, recipe: bool = False) -> Parser:
    """Return the parser of a command whose module in zaya_plugin/bench has its name."""

    def run(options) -> int:
        check_creatable(options.output, "--output")
        return importlib.import_module(f"zaya_plugin.bench.{name}").run(options)

    return Parser(f"bench {name}", run, description, examples, *rows, OUTPUT, COMMIT, recipe=recipe)


def hbm() -> Parser:
    most = option(
        "--max-bytes", type=message_size, metavar="SIZE", help="of the largest arrays (default: 4 GiB, on a CPU 64 MiB)"
    )
    return _command("hbm", HBM, HBM_EXAMPLES, most)


def gemm() -> Parser:
    return _command("gemm", GEMM, GEMM_EXAMPLES, recipe=True)


def mlp() -> Parser:
    count = {"type": whole_number(1, MOST_TOKENS), "metavar": "N"}
    return _command(
        "mlp",
        MLP,
        MLP_EXAMPLES,
        option("--hidden", help="inputs and outputs of an MLP (8192, on a CPU 128)", **count),
        option("--ffn", help="channels inside an MLP (32768, on a CPU 256)", **count),
        option("--tokens", help="rows of the largest measurement (8192, on a CPU 128)", **count),
        option("--layers", type=whole_number(1, MOST_STEPS), metavar="N", help="MLPs of the chain (4, on a CPU 2)"),
    )


def tune() -> Parser:
    return _command("tune", TUNE, TUNE_EXAMPLES, recipe=True)
