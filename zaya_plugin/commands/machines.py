# SPDX-License-Identifier: Apache-2.0
"""`zaya doctor` and `zaya verify`, with and without --nodes: the command lines. No torch import.

The way of a check: a row of checks.py, a process of check_process.py, its Outcome, the page and the record of
examination.py; nodes.py compares the records of several nodes.
"""

import argparse
import contextlib
import json
import signal
from pathlib import Path

from zaya_plugin.commands.parser import command, option
from zaya_plugin.config.run_directory import check_creatable
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import DAY, real_number
from zaya_plugin.ground.parent_death import on_end_signals
from zaya_plugin.machines import nodes
from zaya_plugin.machines.checks import CHECKS, DOCTOR, DOCTOR_ALL, NODES, VERIFY, Check, checks_of
from zaya_plugin.machines.examination import doctor_page, examine, is_wrong, problems_of, summary
from zaya_plugin.machines.page import content
from zaya_plugin.pictures.files import LIBRARIES, check_picture, write_picture

RECORD = "verify.json"
NODES_GROUP = "several nodes"  # heading of the options that require --nodes


@command(
    "doctor",
    option("--json", action="store_true", help="print everything as JSON"),
    option("--all", action="store_true", help="print kernels, host changes and optional packages too"),
    option("--strict", action="store_true", help="return exit status 1 for warnings too"),
)
def doctor(options: argparse.Namespace) -> int:
    """Says whether training can start: known problems, the packages that training needs, hosts and devices; with --all
    also kernels, optional packages, and every change of a host with its reason. It changes nothing and measures
    nothing. Exit status: 0, training can start; 1, a required package is missing or broken, or a known problem is an
    error.

    examples:
      zaya doctor                           whether training can start, and what matters for it
      zaya doctor --all                     everything
      zaya doctor --json > report.json      everything, for a bug report or a script
      zaya doctor --strict && zaya train experiment=cpu_demo
    """
    checks = checks_of(DOCTOR, *([DOCTOR_ALL] if options.all or options.json else []))
    with ended_by_signals():
        record = examine(checks, options.command)
    if options.json:
        print(json.dumps(record, indent=2, default=str))
    else:
        more = "" if options.all else "\n\n--all adds kernels, host changes and optional packages"
        print(doctor_page(record) + more)
    return int(is_wrong(record) or options.strict and bool(problems_of(record)))


@command(
    "verify",
    option(
        "--output",
        type=Path,
        default=Path(RECORD),
        metavar="FILE",
        help=f"the record as JSON ({RECORD}); with the suffix .html or .png a picture too",
    ),
    option("--only", metavar="CHECK,CHECK", help="run these checks alone"),
    option("--list", action="store_true", help="print the checks and stop"),
    option("--bundle", type=Path, metavar="RUN_DIR", help="pack a run for a question, with the record, and stop"),
    option("--device", choices=("auto", "cpu"), default="auto", help="cpu: the CPU; auto: all devices of torch"),
    option("--storage", type=Path, metavar="DIR", help="a folder of data or checkpoints (default: that of --output)"),
    option(
        "--nodes",
        nargs="?",
        const=True,
        metavar="A,B",
        group=NODES_GROUP,
        help="default: the nodes of the SLURM job, else this machine",
    ),
    option(
        "--launcher",
        metavar="COMMAND",
        group=NODES_GROUP,
        help=f"starts a program on {{node}} (default under SLURM: {nodes.SRUN})",
    ),
    option(
        "--min",
        type=nodes.threshold,
        action="append",
        default=[],
        metavar="FIGURE=VALUE",
        group=NODES_GROUP,
        help="a threshold, such as gemm_tflops=600",
    ),
    option(
        "--slower",
        type=real_number(0, 1),
        metavar="SHARE",
        group=NODES_GROUP,
        help=f"below the others' median (default: {nodes.SLOWER})",
    ),
    option(
        "--seconds",
        type=real_number(1, DAY),
        metavar="S",
        group=NODES_GROUP,
        help=f"for one node's checks (default: {nodes.SECONDS:.0f})",
    ),
    option(
        "--dry-run", action="store_true", group=NODES_GROUP, help="print the commands that would be started, and stop"
    ),
    recipe=True,
)
def verify(options: argparse.Namespace) -> int:
    """The first hour on a new machine: examines the environment, the kernels and a short training on this machine, and
    says pass, slow or wrong for each check. Every check has a size for a GPU and a small one for a CPU.

      pass         as expected
      slow         right, and slower than expected; the reason names both figures
      wrong        a wrong result, a crash or a hang; do not train before it is understood
      unsupported  it fails, and the recipe of this machine does not use it; training is not concerned
      skipped      not possible on this machine; the reason says what is missing

    A check runs in a process of its own with a time limit, so no check can end the command. Expected rates are those of
    the cluster recipes (machine.*); those of the MI300X are predictions. docs/mi300x.md says what to do with each
    result.

    --nodes examines several nodes: their environment, rates, links and storage, then an all-reduce of pairs of nodes. A
    node fails if a check is wrong, a figure is below --min, or a figure is more than --slower below the median of the
    other nodes. Words of a recipe, before --nodes, give the pairs its cluster.environment, as a training has it. In the
    folder of the record it writes passing_nodes.txt and failing_nodes.txt (one name a line) and nodes/.

    examples:
      zaya verify                                    all checks; writes verify.json, the file to send with a question
      zaya verify --output verify.html               and a page of it, next to verify.json
      zaya verify --list                             the table of checks, with their sizes and verdicts
      zaya verify --only environment,rates,rms_norm --output rates.json
      zaya verify --nodes --output runs/mine/verify/verify.json        in a SLURM job: all of its nodes, by srun
      zaya verify --nodes n1,n2,n3 --launcher 'ssh {node}' --output /shared/v/verify.json           without SLURM
      zaya verify experiment=zaya1_base cluster=mi300x_128x8 --nodes   pairs with the variables of this recipe
      zaya verify --nodes --min gemm_tflops=600 --min copy_tb_per_s=3 --dry-run             the commands it would run
      zaya aegis run --exclude "$(paste -sd, runs/mine/verify/failing_nodes.txt)" -- zaya train ...
      zaya verify --bundle runs/mine                 support-mine.tar.gz: the run's recipe, logs and metrics, verify.json,
                                                     doctor's report. Secrets are removed by patterns; look through
                                                     it before you send it. Measures nothing

    Figures for --min: gemm_tflops and copy_tb_per_s (each device), all_reduce_gb_per_s (within the node), pair_gb_per_s
    (between two nodes), rails, rail_gb_per_s, storage_mb_per_s. Defaults on an MI300X, from AMD's Primus node_smoke:
    gemm_tflops=600, copy_tb_per_s=2, all_reduce_gb_per_s=100.

    Exit codes: 0 nothing is wrong (slow and unsupported checks do not count), 1 a check is wrong or a node fails,
    2 a mistake on the command line.
    """
    if options.nodes is not None and options.bundle is not None:
        raise mistake("--bundle", options.bundle, problem="packs the record of this node", fix="leave --nodes out")
    for name in ("launcher", "min", "slower", "seconds", "dry_run"):
        value = getattr(options, name)
        if options.nodes is None and value is not None and value is not False and value != []:
            raise mistake(
                f"--{name.replace('_', '-')}",
                problem="requires --nodes",
                fix=options.command.replace("zaya verify", "zaya verify --nodes", 1),
            )
    if options.nodes is None and options.overrides:
        raise mistake(
            options.overrides[0],
            problem="is of the pairs of nodes, and requires --nodes behind the words of the recipe",
            fix=f"{options.command} --nodes",
        )
    checks = chosen(options.only, VERIFY if options.nodes is None else NODES)
    if options.list:
        print("\n".join(map(described, CHECKS.values() if options.only is None else checks)))
        return 0
    if (picture := options.output if options.output.suffix in LIBRARIES else None) is not None:
        if options.bundle is not None or options.dry_run:
            what = "--bundle" if options.bundle is not None else "--dry-run"
            raise mistake("--output", picture, problem=f"{what} draws no picture", fix="--output verify.json")
        check_picture(picture)
        options.output = picture.with_suffix(".json")
    check_output(options.output)
    storage = (options.storage or options.output.parent).absolute()
    if options.storage is not None and "storage" not in [check.name for check in checks]:
        raise mistake("--storage", options.storage, problem="no check reads it", fix="--only storage, or --nodes")
    if options.nodes is not None:
        code = nodes.examine_nodes(options, checks, storage, options.command)
        _draw(options.output, picture)
        return code
    if options.bundle is not None:
        from zaya_plugin.machines.support_bundle import pack

        print(
            f"written: {pack(options.bundle, options.output)}. Look through it before you send it: secrets were "
            "removed by patterns"
        )
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        record = examine(checks, options.command, options.device, storage, options.output)
    print(summary(record, options.output))
    _draw(options.output, picture)
    return int(is_wrong(record))


def _draw(record: Path, picture: Path | None) -> None:
    """Draw a record that has been written."""
    if picture is not None:
        write_picture(content(json.loads(record.read_text())), picture)
        print(f"written: {picture}")


def check_output(output: Path) -> None:
    """Raise ValueError if the record cannot be written. The record is renamed to `output`, also over /dev/null."""
    if output.exists() and not output.is_file():
        raise mistake(
            "--output",
            output,
            problem="is a folder" if output.is_dir() else "not a regular file, and would be replaced by one",
            allowed="a file, new or written before",
            fix=f"--output {RECORD}",
        )
    check_creatable(output.parent, "--output")


def chosen(only: str | None, command: str) -> list[Check]:
    """Return the checks in `only`, in the order of the table, or those of `command`; raises ValueError for an unknown
    one.
    """
    if only is None:
        return checks_of(command)
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in CHECKS:
            raise mistake("--only", name, problem="no such check", allowed=", ".join(CHECKS), fix="zaya verify --list")
    return [check for name, check in CHECKS.items() if name in names]


def described(check: Check) -> str:
    """Return a row of the table as text."""
    sizes = f"on a CPU: {check.on_cpu}; on a GPU: {check.on_gpu}; " if check.on_cpu else ""
    needs = f"needs {check.needs}; " if check.needs else ""
    lines = [check.measures, check.verdict, f"{sizes}{needs}at most {check.limit_s} s; {', '.join(check.commands)}"]
    return f"{check.name:22}" + f"\n{'':22}".join(filter(None, lines))


@contextlib.contextmanager
def ended_by_signals():
    """Leave by an exception on every signal that ends a program, as Python does on SIGINT, so that `examine` closes its
    process and its folder. Guards (ground/processes.py) are for signals that no program can handle.
    """

    def leave(number: int, frame) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = on_end_signals(leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
