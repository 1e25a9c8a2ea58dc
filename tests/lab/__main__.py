# SPDX-License-Identifier: Apache-2.0
"""`make lab`, or `python -m tests.lab`: breaks a small supervised run in many ways on this machine, and checks that it
recovers.

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

from tests.lab import slurm_faults
from tests.lab.endurance import endure, soak
from tests.lab.faults import FAULTS as PROCESS_FAULTS
from tests.lab.faults import Fault, Trial
from tests.lab.machine import MEANS, Machine
from tests.lab.results import Result, judge, line, table, to_json
from tests.lab.stand import NODES, Stand, new_folder
from tests.lab.supervised_run import PROJECT, Reference, Run, make_data, rows, seconds_to_first_step
from zaya_plugin.ground.option_numbers import DAY, real_number

FAULTS: dict[str, Fault] = {**PROCESS_FAULTS, **slurm_faults.FAULTS}
END_SECONDS = 900.0  # for a run after its fault; a machine may be busy with other work
EXAMPLES = """\
examples:
  make lab                                  all faults that this machine can make, some 25 minutes
  make lab FAULT='sigkill_rank link_flap'   these alone
  make lab HOUR=60                          a fault every 3 minutes: effective training time
  make lab SOAK=30                          no fault: nothing may be decided
  .venv/bin/python -m tests.lab --list      the faults, and those that are left out on this machine, with the reason

Exit codes: 0 all faults that were tried are recovered, 1 one is not, 2 a mistake on the command line."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    result = argparse.ArgumentParser(
        "python -m tests.lab",
        description="Break a small supervised run in many ways on this machine, and check that it recovers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    minutes = real_number(0.1, DAY / 60)
    choice = result.add_mutually_exclusive_group()
    add = choice.add_argument
    add("--fault", nargs="+", metavar="NAME", choices=FAULTS, default=[*FAULTS], help="these faults alone")
    add("--hour", type=minutes, metavar="MINUTES", help="a fault every 3 minutes in one long run")
    add("--soak", type=minutes, metavar="MINUTES", help="a run without a fault: nothing may be decided")
    add("--list", action="store_true", help="print the faults and what the machine lacks, and stop")
    result.add_argument(
        "--output", type=Path, metavar="DIR", help="keep journals, logs, results.json and table.md (default: removed)"
    )
    result.add_argument(
        "--no-download", action="store_true", help="leave out what needs Debian packages not yet in the cache"
    )
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the lab and return its exit code."""
    options = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "zaya_plugin" / "lab"
    machine = Machine(cache, download=not options.no_download)
    for name, reason in machine.reasons.items():
        if reason is not None:
            print(f"not on this machine: {MEANS[name][0]} ({reason})", flush=True)
    if options.list:
        for fault in FAULTS.values():
            lacks = machine.lacks(fault.needs)
            print(f"{fault.name:24}  {fault.text}" + (f"  [left out: {'; '.join(lacks)}]" if lacks else ""))
        return 0
    with tempfile.TemporaryDirectory(prefix="zaya-lab-") as temporary:
        output = options.output.absolute() if options.output else Path(temporary) / "results"
        output.mkdir(parents=True, exist_ok=True)
        if options.soak or options.hour:
            summary = soak(machine, output, options.soak) if options.soak else endure(machine, output, options.hour)
            (output / "endurance.json").write_text(json.dumps(summary | origin(argv), indent=1) + "\n")
            print(json.dumps(summary, indent=1))
            return 0 if summary["ok"] else 1
        results = try_all([FAULTS[name] for name in options.fault], machine, output)
        source = origin(argv)
        (output / "results.json").write_text(json.dumps({**source, "results": to_json(results)}, indent=1) + "\n")
        heading = f"Made by `{source['command']}` at commit {source['commit']}.\n\n"
        (output / "table.md").write_text(heading + table(results))
    left_out = sum(bool(result.left_out) for result in results)
    recovered = sum(result.ok for result in results)
    print(f"{recovered} of {len(results) - left_out} recovered, {left_out} left out")
    return 0 if recovered + left_out == len(results) else 1


def try_all(faults: list[Fault], machine: Machine, output: Path) -> list[Result]:
    """Try each fault, and return the results."""
    results, reference = [], None
    for fault in faults:
        if lacks := machine.lacks(("linux", *fault.needs)):
            result = Result(fault.name, fault.text, left_out="; ".join(lacks))
        else:
            if reference is None:
                reference = undisturbed(machine, output / "undisturbed")
                print(
                    f"undisturbed run: {len(reference.steps)} steps, {reference.start:.1f} s from start to first step",
                    flush=True,
                )
            result = try_fault(fault, machine, output / fault.name, reference)
        results.append(result)
        print(line(result), flush=True)
    return results


def undisturbed(machine: Machine, folder: Path) -> Reference:
    """Run without a fault, and return what other runs are compared with."""
    data = make_data(machine.cache)
    with Stand(new_folder(folder), NODES, machine.network) as stand:
        run = Run(stand, folder / "trial", data)
        run.start()
        if (code := run.finish(END_SECONDS)) != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}; see {folder}/trial/*.log")
        return Reference(data, rows(run.run_dir), seconds_to_first_step(run.journal()))


def try_fault(fault: Fault, machine: Machine, folder: Path, reference: Reference) -> Result:
    """Break one run in one way, and return the result."""
    of_slurm = fault.name in slurm_faults.FAULTS
    with Stand(new_folder(folder), NODES, machine.network and not of_slurm) as stand:
        try:
            if of_slurm:
                with slurm_faults.Cluster(machine.cache, stand) as cluster:
                    return fault.inject(cluster, folder, reference)
            trial = Trial(stand, folder / "trial", reference.data, machine)
            with trial.cleanup:
                injected = fault.inject(trial)
                code = trial.run.finish(END_SECONDS)
        except (TimeoutError, OSError) as error:
            return Result(fault.name, fault.text, wrong=[f"{error}; see {folder.name}"])
        run = trial.run
        return judge(fault, run.journal(), injected, code, reference.difference(rows(run.run_dir)), reference.start)


def origin(argv: list[str] | None) -> dict[str, str]:
    """Return the command, the commit and the date of results."""
    commit = subprocess.run(["git", "-C", PROJECT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    command = shlex.join(["python", "-m", "tests.lab", *(sys.argv[1:] if argv is None else argv)])
    return {"command": command, "commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    sys.exit(main())
