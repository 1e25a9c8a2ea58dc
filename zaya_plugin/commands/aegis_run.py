# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis run`: parse the command line and start this node's agent."""

import argparse
import os
import re
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zaya_plugin.aegis import link
from zaya_plugin.aegis.diagnose.rules import Rules
from zaya_plugin.aegis.journal import NAME, read
from zaya_plugin.aegis.keeper import become_keeper, listen
from zaya_plugin.aegis.protocol import Begin
from zaya_plugin.aegis.settings import Settings, is_train, only, words_of
from zaya_plugin.commands import curriculum, train
from zaya_plugin.commands.parser import command, option
from zaya_plugin.config.run_directory import check_creatable, checkpoint_path
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import (
    DAY,
    MOST_RANKS,
    MOST_RANKS_OF_A_MACHINE,
    MOST_STEPS,
    real_number,
    whole_number,
)
from zaya_plugin.run.rank_plan import first_host, port, whole_variable

KERNEL_LOG = Path("/dev/kmsg")  # missing in many containers, which is reported and no mistake


def settings_of(options: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return the settings of the command line. Raises ValueError for a mistake, also one in the recipe."""
    command = tuple(options.behind_dashes)
    if not command:
        raise mistake(
            "zaya aegis run", problem="no command was given", fix="zaya aegis run [options] -- zaya train ..."
        )
    if command[0] != "zaya" and shutil.which(command[0]) is None:
        raise mistake(
            "zaya aegis run -- COMMAND",
            command[0],
            problem="no such program on this node",
            allowed="a program on PATH, or the path of a file that can be executed",
            fix="zaya aegis run [options] -- zaya train ...",
        )
    recipe = _recipe(command) if is_train(command) else None
    start = options.start or ("rank" if recipe else "node")
    counted = next((name for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES") if environ.get(name)), None)
    in_job = whole_variable(environ, counted, 1) if counted else 0
    if options.nodes is None:
        options.nodes = max(in_job - options.spares, 1) if in_job else 1
    if recipe is None and words_of(command, "curriculum") is not None and options.nodes > 1:
        raise mistake(
            "--nodes",
            options.nodes,
            problem="`zaya curriculum` starts its stages on one node",
            fix="`zaya aegis run ... -- zaya curriculum --only STAGE ...`, once for each stage",
        )
    least = options.nodes if options.min_nodes is None else options.min_nodes
    if not 1 <= least <= options.nodes:
        raise mistake("--min-nodes", least, problem="is out of range", allowed=f"1 to --nodes={options.nodes}")
    if in_job and options.nodes + options.spares > in_job:
        raise mistake(
            "--nodes",
            options.nodes,
            problem=f"with --spares={options.spares} more nodes than the SLURM job has",
            allowed=f"{in_job} nodes together",
        )
    if options.requeue and not environ.get("SLURM_JOB_ID"):
        raise mistake("--requeue", problem="no SLURM job", allowed="inside of a job that SLURM may start again")
    from zaya_plugin.run.surroundings import device_count

    ranks = options.ranks_per_node
    if ranks is None and recipe is not None:
        ranks = recipe.nproc or recipe.cluster.gpus_per_node
    if ranks is None:
        ranks = device_count()
    if not ranks:
        raise mistake(
            "--ranks-per-node",
            problem="this machine has no accelerator; give the number of ranks",
            allowed="1 or more",
            fix="--ranks-per-node 8",
        )
    sizes, group, checkpoints = tuple(range(options.nodes, least - 1, -1)), 1, None
    if recipe is not None:
        checkpoints = checkpoint_path(recipe).absolute()
        sizes = _sizes(recipe, options.nodes, least, ranks)
        shape = recipe.parallel
        copy = shape.tensor_model_parallel_size * shape.context_parallel_size * shape.pipeline_model_parallel_size
        group = max(1, copy // ranks)
    if options.output is None and recipe is None:
        raise mistake(
            "--output", problem="is required for a command other than `zaya train`", fix="--output runs/mine/aegis"
        )
    folder = Path(options.output or Path(recipe.run_dir) / "aegis").absolute()
    check_creatable(folder, "--output")
    _check_is_of_stage(folder, command)
    host, number = _decider(options, environ)
    Rules.load(options.rules)
    try:
        hook = tuple(shlex.split(options.hook))
    except ValueError as error:
        raise mistake("--hook", options.hook, problem=f"cannot be parsed as a command ({error})") from None
    if hook and shutil.which(hook[0]) is None:
        raise mistake("--hook", options.hook, problem=f"no such program: {hook[0]}", allowed="a program and its words")
    if options.kernel_log != KERNEL_LOG and not os.access(options.kernel_log, os.R_OK):
        raise mistake("--kernel-log", options.kernel_log, problem="cannot be read", allowed="a file of kernel messages")
    node = options.node or environ.get("SLURMD_NODENAME") or socket.gethostname()
    if not all(letter.isalnum() or letter in "-_." for letter in node) or node.startswith("."):
        raise mistake("--node", node, problem="not a valid node name", allowed="letters, digits, - _ and .")
    return Settings(
        command=command,
        start_per=start,
        node=node,
        nodes=options.nodes,
        spares=options.spares,
        sizes=sizes,
        ranks_per_node=ranks,
        folder=folder,
        host=host,
        port=number,
        group=group,
        grace=options.grace,
        restarts=options.restarts,
        checkpoints=checkpoints,
        kernel_log=options.kernel_log.absolute(),
        links=tuple(name for name in options.links.split(",") if name),
        exclude=tuple(name for name in options.exclude.split(",") if name),
        rules=tuple(os.path.abspath(path) for path in options.rules),
        hook=hook,
        requeue=options.requeue,
        skip_steps=tuple(recipe.data.skip_steps) if recipe is not None else (),
    )


def _recipe(command: Sequence[str]):
    """Return the recipe that the command composes; for a curriculum, the recipe of the stage."""
    from zaya_plugin.config.compose import compose
    from zaya_plugin.run.stages import compose_curriculum

    if (words := words_of(command, "train")) is not None:
        options = train.train().read(words)
        if options.multirun:
            raise mistake(
                "--multirun",
                problem="several runs cannot be supervised by one command",
                fix="one `zaya aegis run` for each run",
            )
        for name in ("cfg", "info", "hydra_help"):
            if getattr(options, name):
                raise mistake(
                    f"--{name.replace('_', '-')}",
                    problem="prints, and trains nothing",
                    fix="the same `zaya train` without `zaya aegis run`",
                )
        return compose(options.overrides)
    options = curriculum.curriculum().read(words_of(command, "curriculum"))
    stages = {stage.name: stage.recipe for stage in compose_curriculum(options.overrides).stages}
    if options.only not in stages:
        raise mistake("--only", options.only, problem="no such stage", allowed=", ".join(stages))
    return stages[options.only]


def _check_is_of_stage(folder: Path, command: Sequence[str]) -> None:
    """Raise ValueError if the journal in `folder` is of another stage of a curriculum, whose steps and checkpoints
    would be taken for this one's.
    """
    rows = read(folder / NAME) if (folder / NAME).exists() else ()
    before = next((row.command for row in rows if isinstance(row, Begin) and row.command), command)
    words = [str(word) for word in before]
    if only(words) != only(command):
        raise mistake(
            "--output",
            folder,
            problem=f"its journal is of {shlex.join(words)}",
            allowed="a folder for each stage",
            fix="without --output it is <run_dir>/<stage>/aegis",
        )


def _sizes(recipe, nodes: int, least: int, ranks: int) -> tuple[int, ...]:
    """Return the numbers of nodes that the recipe allows, the largest first; `nodes` must be one of them."""
    from zaya_plugin.config.validate import validate

    validate(recipe, nodes * ranks)
    sizes = [nodes]
    for number in range(nodes - 1, least - 1, -1):
        try:
            validate(recipe, number * ranks)
        except ValueError:
            continue
        sizes.append(number)
    return tuple(sizes)


def _decider(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and port of the decider; port 0: a free one of this machine."""
    if options.decider is not None:
        host, _, number = options.decider.rpartition(":")
        bracketed = host.startswith("[") == host.endswith("]")
        if (
            not host.strip("[]")
            or not bracketed
            or not re.fullmatch("[0-9]{1,5}", number)
            or not 0 < int(number) < 65536
        ):
            raise mistake(
                "--decider",
                options.decider,
                problem="not an address",
                allowed="HOST:PORT, with a port from 1 to 65535",
                fix="--decider n1:29400",
            )
        return host.strip("[]"), int(number)
    hosts = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if options.nodes + options.spares == 1:
        return "127.0.0.1", 0
    if not hosts:
        raise mistake(
            "--decider",
            problem="is required for more than one node outside of SLURM",
            allowed="HOST:PORT of one of the nodes",
            fix="--decider n1:29400",
        )
    return first_host(hosts), port(environ.get("SLURM_JOB_ID", "0"))


def describe(settings: Settings) -> str:
    """Return the text of --dry-run."""
    local_ranks = settings.ranks_per_node
    once = (
        f"{settings.nodes * local_ranks} ranks"
        if settings.start_per == "rank"
        else f"once on each node, for {local_ranks} ranks"
    )
    sizes = f", or {', '.join(map(str, settings.sizes[1:]))}" if settings.sizes[1:] else ""
    return "\n".join(
        (
            f"command:   {shlex.join(settings.command)}",
            f"started:   {once}",
            f"nodes:     {settings.nodes} of {local_ranks} ranks{sizes}; spares: {settings.spares}; this one: "
            f"{settings.node}",
            f"decider:   {settings.host}:{settings.port or 'a free port'}",
            f"journal:   {settings.journal}",
            f"restarts:  {settings.restarts} in a row without a new step",
        )
    )


@command(
    "aegis run",
    option(
        "--nodes",
        type=whole_number(1, MOST_RANKS),
        metavar="N",
        help="nodes that train (default: those of the SLURM job less --spares, or 1)",
    ),
    option(
        "--spares",
        type=whole_number(0, MOST_RANKS),
        default=0,
        metavar="K",
        help="further nodes that wait to take over (default: 0)",
    ),
    option(
        "--min-nodes",
        type=whole_number(1, MOST_RANKS),
        metavar="N",
        help="least number of nodes to train with when no spare is left (default: --nodes)",
    ),
    option(
        "--ranks-per-node",
        type=whole_number(1, MOST_RANKS_OF_A_MACHINE),
        metavar="N",
        help="default: nproc= or cluster.gpus_per_node of the recipe",
    ),
    option(
        "--start",
        choices=("rank", "node"),
        help="start COMMAND once for each rank (default for `zaya train`, `zaya curriculum --only`) or node",
    ),
    option("--decider", metavar="HOST:PORT", help="node of the decider (default: the first one of the SLURM job)"),
    option("--node", metavar="NAME", help="name of this node (default: SLURM's, or the host's)"),
    option("--output", metavar="DIR", help="journal and logs, on a shared file system (default: <run_dir>/aegis)"),
    option("--kernel-log", type=Path, default=KERNEL_LOG, metavar="FILE", help="default: /dev/kmsg"),
    option("--links", default="", metavar="A,B", help="network interfaces to watch (default: all of a device)"),
    option("--exclude", default="", metavar="A,B", help="nodes that are not to be used"),
    option(
        "--grace",
        type=real_number(0, DAY),
        default=10.0,
        metavar="S",
        help="seconds for healthy ranks to save (default: 10)",
    ),
    option(
        "--restarts",
        type=whole_number(0, MOST_STEPS),
        default=10,
        metavar="N",
        help="failures in a row without a new step (default: 10)",
    ),
    option(
        "--rules", action="append", default=[], metavar="FILE", help="more classes of failures, as rules.yaml has them"
    ),
    option("--hook", default="", metavar="COMMAND", help="a program of yours for alerts; it reads JSON from its input"),
    option("--requeue", action="store_true", help="give the job back to SLURM when too few nodes are left"),
    option("--dry-run", action="store_true", help="print what would be started, and stop"),
    behind_dashes="COMMAND",
)
def run(options: argparse.Namespace) -> int:
    """Starts COMMAND on this node and keeps it running: it watches the ranks, names the cause of a failure, and starts
    them again from the last checkpoint, on another node where the node is the cause. It stops when a restart cannot
    help, and says why. Type the same command on every node, spares too.

    examples:
      zaya aegis run -- zaya train experiment=cpu_demo                      one machine
      zaya aegis run --dry-run -- zaya train experiment=cpu_demo            what would be started
      srun --ntasks-per-node=1 --kill-on-bad-exit=0 \\
          zaya aegis run --spares 2 -- zaya train experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web
                                                  in an allocation of 130 nodes: 128 train, 2 wait to take over
      srun ... zaya aegis run -- zaya curriculum --only pretrain_4k experiment=zaya1_base ...    one stage of a curriculum
      zaya aegis run --nodes 4 --decider n1:29400 -- zaya train ...         without SLURM: on n1 and on each other node
      zaya aegis run --ranks-per-node 8 --output runs/x/aegis -- primus-cli direct -- train pretrain --config x.yaml

    `zaya aegis status DIR` shows the run, `zaya aegis report DIR` sums it up. A SIGTERM (or Ctrl-C, or a
    batch system's SIGUSR1, SIGUSR2, SIGXCPU) makes the ranks save and leave; the same signal again ends them at once.

    Exit codes: 0 done, 2 a mistake on the command line, 75 the run was asked to end and has saved, else that of the
    first rank that failed, or 128 + signal.
    """
    settings = settings_of(options, os.environ)
    if options.dry_run:
        print(describe(settings))
        return 0
    listening = listen(settings)
    if settings.port == 0:
        settings = replace(settings, port=listening.getsockname()[1])
    secret = Path(os.environ.get("ZAYA_AEGIS_SECRET_FILE") or settings.folder / "secret").absolute()
    if "ZAYA_AEGIS_SECRET_FILE" in os.environ:
        link.read_secret(secret)
    else:
        link.make_secret(secret)
    become_keeper(replace(settings, secret_file=secret), listening)
