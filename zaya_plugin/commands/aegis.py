# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis status|report|explain`: print a run's state or its account, or the cause of a failure in logs. They start
nothing and ask no process.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from zaya_plugin.aegis import explain as logs
from zaya_plugin.aegis import report as tables
from zaya_plugin.aegis import status as present
from zaya_plugin.aegis.bookkeeping import account
from zaya_plugin.aegis.diagnose.rules import Rules
from zaya_plugin.aegis.journal import find, read
from zaya_plugin.commands.live import show_live
from zaya_plugin.commands.parser import command, option
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.progress import bar
from zaya_plugin.pictures.files import check_picture, write_picture

RUN_DIR = option("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, or its folder aegis")


@command("aegis status", RUN_DIR, option("--watch", action="store_true", help="show it again every two seconds"))
def status(options: argparse.Namespace) -> int:
    """Shows a run under `zaya aegis run`: phase, step, nodes, the last failure and the decision.

    examples:
      zaya aegis status runs/mine            once
      zaya aegis status runs/mine --watch    every two seconds until the run ends or Ctrl-C; once without a terminal

    --watch requires `pip install 'zaya_plugin[terminal]'`.

    Exit codes: 0 the run trains, starts or has ended well; 1 trouble: it has ended with an error, it is down because of
    a failure, or nothing was heard of it for 10 minutes (and 20 steps); 2 a mistake on the command line.
    """
    journal, code = find(options.run_dir), 0

    def render(*_: int) -> tuple[str, bool]:
        nonlocal code
        metrics = present.last_metrics(journal.resolve().parent.parent)
        lines, code, has_ended = present.status(read(journal), time.time(), metrics)
        return "\n".join(lines), has_ended

    if options.watch and sys.stdout.isatty():
        show_live(render)
    else:
        print(render()[0])
    return code


@command(
    "aegis report",
    RUN_DIR,
    option(
        "--output", type=Path, metavar="FILE", help="write a page with a timeline (.html) or a picture of it (.png)"
    ),
    option("--json", action="store_true", help="print one JSON object instead of tables"),
)
def report(options: argparse.Namespace) -> None:
    """Reads the journal of a run that `zaya aegis run` supervises or has supervised, and prints the share of the time
    that was training, the cost of each class of failures, and how long detection and recovery took. It changes nothing;
    a run that has not ended is reported up to the last line of its journal.

    Effective training time (ETTR, arXiv 2509.16293): seconds of training that was kept / seconds; validation and saving
    count as training, steps that a restart makes again do not count the first time. Goodput: steps that were kept x
    median seconds of a step (of its stage) / seconds; slow steps, validation and saving lower it. Uptime: seconds in
    which ranks were running / seconds. Lost by cause: steps made again, and seconds from the last step that was kept to
    the first step of the next attempt; the same times ranks, as GPU hours. Time to detect: from the cause's time on its
    node (of a hang: the last step) to the `symptom` line. Time to recover: from there to the next first step.

    examples:
      zaya aegis report runs/mine                        tables
      zaya aegis report runs/mine --output report.html   the same and a timeline, as one page that loads nothing
      zaya aegis report runs/mine --json                 for a program

    Exit codes: 0, 2 a mistake on the command line.
    """
    if options.output is not None:
        check_picture(options.output)
    journal = find(options.run_dir)
    with bar("journal", journal.stat().st_size) as shown:
        result = account(read(journal, shown.update))
    if options.output is not None:
        from zaya_plugin.aegis.page import page
        from zaya_plugin.runs.plot import step_panels
        from zaya_plugin.runs.run_data import is_run, read_run

        folder = journal.resolve().parent
        place = folder.parent if folder.name == "aegis" else folder
        content = page(result, place.name)
        if is_run(place):
            panels, content.notes = step_panels([read_run(place)], [place.name])
            content.panels += panels
        write_picture(content, options.output)
    print(json.dumps(tables.as_json(result), indent=1) if options.json else tables.as_text(result))


@command(
    "aegis explain",
    option("folder", nargs="?", type=Path, metavar="DIR", help="a folder of logs"),
    option("--rules", action="append", type=Path, default=[], metavar="FILE", help="rows of your own (YAML)"),
    option("--rule", metavar="NAME", help="print the meaning of a class instead"),
    option("--json", action="store_true", help="print one JSON list, an element for each attempt"),
)
def explain(options: argparse.Namespace) -> None:
    """Reads the logs below DIR (of ranks, kernels, torchrun and SLURM), names the first cause of the failure with its
    evidence, and prints what `zaya aegis run` would have done; for a supervised run, what it did by its journal. Starts
    nothing, and needs no device.

    A file belongs to the kernel when its name has dmesg, kern, messages, syslog or journal in it, or its lines look
    like it. The rank comes from the file's name (rank3.log) or from the line ([rank3]:, or srun's label). The node
    comes from the name of the folder or the file (n1/dmesg.log, dmesg-n1.log). Lines without a time take that of the
    line before.

    examples:
      zaya aegis explain runs/zaya1/aegis              what ended each attempt of a supervised run
      zaya aegis explain logs --rules mine.yaml        with rows of your own
      zaya aegis explain logs --json                   for a program
      zaya aegis explain --rule ring_timeout           what a class means, and what a person does
      zaya aegis explain                               all classes

    Exit codes: 0, 2 a mistake on the command line.
    """
    rules = Rules.load(options.rules)
    if options.rule is not None:
        if options.rule not in rules:
            raise mistake(
                "--rule", options.rule, problem="no such class of failures", fix="zaya aegis explain prints all names"
            )
        rule = rules[options.rule]
        print(json.dumps(dataclasses.asdict(rule)) if options.json else logs.show_rule(rule))
        return
    if options.folder is None:
        width = max(len(rule.name) for rule in rules)
        print("\n".join(f"{rule.name:{width}}  {rule.role:12} {rule.action:8}  {rule.explain}" for rule in rules))
        return
    if not options.folder.is_dir():
        raise mistake(
            "DIR",
            os.fspath(options.folder),
            problem="is a file" if options.folder.exists() else "does not exist",
            fix="name a folder of logs",
        )
    attempts = logs.explain(options.folder, rules)
    if options.json:
        print(json.dumps(logs.as_json(attempts), indent=1))
    else:
        print("\n\n".join(logs.show(one, rules) for one in attempts))
    sys.stdout.flush()
