# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.lab`: breaks a small supervised run in many ways on this machine, and checks that it recovers.

Leg 1 runs two nodes and a spare as network namespaces (without root as groups of processes), leg 2 a real SLURM. Each
run's losses must be those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zaya_plugin import __version__
from zaya_plugin.config.option_numbers import DAY, real_number
from zaya_plugin.errors import mistake

NODES = ("n1", "n2", "n3")
END_SECONDS = 900.0  # for a run after its fault; a machine may be busy with other work
EXAMPLES = """\
examples:
  python -m tests.lab                                 all faults that this machine can make, some 25 minutes
  python -m tests.lab --list                          the faults, and what is left out here and why
  python -m tests.lab --only sigkill_rank,link_flap
  python -m tests.lab --markdown table.md --output results
  python -m tests.lab --soak 30                       no fault: nothing may be decided
  python -m tests.lab --hour                          a fault every 3 minutes: effective training time

Exit codes: 0 all faults that were tried are recovered, 1 one is not, 2 a mistake on the command line."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    found = argparse.ArgumentParser(
        "python -m tests.lab",
        description="Break a small supervised run in many ways on this machine, and check that it recovers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--only", metavar="NAME[,NAME]", help="these faults alone")
    add("--list", action="store_true", help="print the faults and what the machine lacks, and stop")
    add("--output", type=Path, metavar="DIR", help="keep journals, logs and results.json there (default: removed)")
    add("--json", action="store_true", help="print the results as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the results as a table")
    add(
        "--soak", type=real_number(0.1, DAY / 60), metavar="MINUTES", help="run without a fault: nothing may be decided"
    )
    add(
        "--hour",
        type=real_number(0.1, DAY / 60),
        nargs="?",
        const=60.0,
        metavar="MINUTES",
        help="a fault every 3 minutes (default: 60)",
    )
    add("--cache", type=Path, metavar="DIR", help="of downloaded packages and the data (default: the user's cache)")
    add("--no-download", action="store_true", help="leave out what needs packages that are not in the cache")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the lab and return its exit code."""
    from tests.lab.machine import MEANS, Machine

    options = parser().parse_args(argv)
    faults = chosen(options.only)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = (options.cache or Path(base) / "zaya_plugin" / "lab").absolute()
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else (lambda t: print(t, flush=True))
    signal.signal(signal.SIGTERM, _interrupt)
    machine = Machine(cache, download=not options.no_download)
    for name, why in machine.why.items():
        if why is not None:
            say(f"not on this machine: {MEANS[name]} ({why})")
    if options.list:
        for each in faults.values():
            lacks = machine.lacks(each.needs)
            print(f"{each.name:24}  {each.text}" + (f"  [left out: {'; '.join(lacks)}]" if lacks else ""))
        return 0
    with tempfile.TemporaryDirectory(prefix="zaya-lab-") as temporary:
        output = options.output.absolute() if options.output else Path(temporary) / "results"
        output.mkdir(parents=True, exist_ok=True)
        if options.soak or options.hour:
            from tests.lab.endurance import hour, soak

            found = (
                soak(machine, output, options.soak, say) if options.soak else hour(machine, output, options.hour, say)
            )
            (output / "endurance.json").write_text(json.dumps(found | origin(argv), indent=1) + "\n")
            print(json.dumps(found, indent=1))
            return 0 if found["ok"] else 1
        results = try_all(faults, machine, output, say)
    from tests.lab.results import table, to_json

    found = {**origin(argv), "results": to_json(results)}
    if options.output:
        (output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        made = f"Made by `{found['command']}` at commit {found['commit']}.\n\n"
        options.markdown.write_text(made + table(results))
    if options.json:
        print(json.dumps(found, indent=1))
    tried = [result for result in results if not result.left_out]
    failed = [result.name for result in tried if not result.ok]
    say(f"{len(tried) - len(failed)} of {len(tried)} recovered, {len(results) - len(tried)} left out")
    return 1 if failed else 0


def chosen(only: str | None) -> dict:
    """Return the faults that were asked for, by name. Raises ValueError for an unknown name."""
    from tests.lab import slurm_faults as slurm
    from tests.lab.faults import FAULTS

    every = {**FAULTS, **slurm.FAULTS}
    if only is None:
        return every
    names = [name for name in only.split(",") if name]
    if unknown := [name for name in names if name not in every] or (None if names else [only]):
        raise mistake(
            "--only", unknown[0], problem="no such fault", allowed=", ".join(every), fix="python -m tests.lab --list"
        )
    return {name: every[name] for name in names}


def try_all(faults: dict, machine, output: Path, say) -> list:
    """Try each fault, and return the results."""
    from tests.lab import supervised_run as training
    from tests.lab.results import Result, line

    data = training.make_data(machine.cache)
    results, undisturbed = [], None
    for fault in faults.values():
        if lacks := machine.lacks(("linux", *fault.needs)):
            results.append(Result(fault.name, fault.text, left_out="; ".join(lacks)))
        else:
            if undisturbed is None:
                undisturbed = _undisturbed(machine, output / "undisturbed", data)
                say(f"undisturbed run: {len(undisturbed[0])} steps, {undisturbed[1]:.1f} s from start to first step")
            results.append(_try(fault, machine, output / fault.name, data, *undisturbed))
        say(line(results[-1]))
    return results


def _undisturbed(machine, folder: Path, data: Path) -> tuple[dict, float]:
    """Return the steps of a run without a fault, and the seconds from its start to its first step."""
    from tests.lab import supervised_run as training
    from tests.lab.stand import Stand, remove

    remove(folder)
    with Stand(folder, NODES, machine.why["network"] is None) as stand:
        folder.mkdir(parents=True)
        run = training.Run(stand, folder / "trial", data)
        run.start()
        code = run.finish(END_SECONDS)
        if code != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}; see {folder}/trial/*.log")
        return training.rows(run.run_dir), seconds_to_first_step(run.journal())


def seconds_to_first_step(journal: list[dict]) -> float:
    """Return the seconds from the first attempt of a journal to its first step."""
    at = {row["kind"]: row["time"] for row in reversed(journal)}
    return at["first_step"] - at["attempt"]


def _try(fault, machine, folder: Path, data: Path, reference: dict, start: float):
    from tests.lab import slurm_faults as slurm
    from tests.lab import supervised_run as training
    from tests.lab.faults import Trial
    from tests.lab.results import Result, judge
    from tests.lab.stand import Stand, remove

    remove(folder)
    folder.mkdir(parents=True)
    if isinstance(fault, slurm.SlurmFault):
        with Stand(folder, NODES, network=False) as stand:
            try:
                with slurm.Cluster(machine.cache, stand) as cluster:
                    return fault.tried(cluster, folder, data, reference, start)
            except (TimeoutError, OSError) as error:
                return Result(fault.name, fault.text, wrong=[f"{error}; see {folder.name}"])
    with Stand(folder, NODES, machine.why["network"] is None) as stand:
        trial = Trial(stand, folder / "trial", data, machine)
        with trial.later:
            try:
                injected = fault.inject(trial)
                code = trial.run.finish(END_SECONDS)
            except (TimeoutError, OSError) as error:
                return Result(fault.name, fault.text, wrong=[f"{error}; see {folder.name}"])
        run = trial.run
        return judge(
            fault, run.journal(), injected, code, training.difference(training.rows(run.run_dir), reference), start
        )


def origin(argv: list[str] | None) -> dict[str, str]:
    """Return the command, the commit and the date of results."""
    here = Path(__file__).resolve().parents[2]
    done = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    command = shlex.join(["python", "-m", "tests.lab", *(sys.argv[1:] if argv is None else argv)])
    return {"command": command, "commit": done.stdout.strip() or __version__, "date": time.strftime("%Y-%m-%d")}


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
