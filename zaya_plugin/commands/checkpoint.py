# SPDX-License-Identifier: Apache-2.0
"""`zaya checkpoint list|show|verify|prune|adopt|reshape`: the checkpoints of a run, from outside. Starts no ranks;
needs no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zaya_plugin.checkpoint import manifest, on_disk, places
from zaya_plugin.checkpoint.reading import folder_of
from zaya_plugin.commands.parser import STEP, Option, Parser, option
from zaya_plugin.commands.table import COMMANDS
from zaya_plugin.config.run_directory import checkpoints_of, iterations
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import MOST_RANKS, MOST_STEPS, real_number, whole_number
from zaya_plugin.ground.progress import bar

DESCRIPTION = """

RUN is a run directory, or a directory of iter_* folders. A checkpoint of this version has a manifest with the size and
the checksum of every file. list and show compare names and sizes; verify reads all files. Checkpoints of earlier
versions and of other programs have none: they are compared with their own index; adopt writes a manifest for them."""
CODES = "\n\nExit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line."
Action = Callable[[Path, list[int], argparse.Namespace], int]
FACT_CHARACTERS, NAMED_FILES = 100, 16  # at most, of the output of `show`
LEFT = {
    manifest.UNFINISHED: "a save that has not ended",
    manifest.REMOVED: "a removal that has not ended",
    manifest.FAILED: "put aside, because two starts from it had failed at the same step, or by a roll back",
    manifest.DAMAGED: "put aside at a start, because its content does not have its checksums",
    manifest.REPLACED: "put aside by a save of its step, because it was damaged or of another run",
}


def _parser(name: str, action: Action, examples: str, *options: Option) -> Parser:
    purpose = COMMANDS[f"checkpoint {name}"][1]
    return Parser(
        f"checkpoint {name}",
        lambda options: _run(action, options),
        f"{purpose[0].upper()}{purpose[1:]}.{DESCRIPTION}",
        f"examples:\n{examples}{CODES}",
        option("run_dir", type=Path, metavar="RUN", help="a run directory, or a directory of iter_* folders"),
        *options,
    )


def list_() -> Parser:
    return _parser("list", _list, "  zaya checkpoint list runs/zaya1")


def show() -> Parser:
    return _parser(
        "show",
        _show,
        "  zaya checkpoint show runs/zaya1 --step 12000",
        STEP,
        option("--json", action="store_true", help="print all of it: every file's checksum, the recipe's values"),
    )


def verify() -> Parser:
    examples = """\
  zaya checkpoint verify runs/zaya1 --all
  zaya checkpoint verify runs/zaya1 --limit 2             before a restart, on each node: fills its page cache"""
    return _parser(
        "verify",
        _verify,
        examples,
        STEP,
        option("--all", action="store_true", help="all checkpoints"),
        option("--limit", type=real_number(1e-6, 1e6), metavar="GB/S", help="read no faster than this"),
    )


def prune() -> Parser:
    examples = "  zaya checkpoint prune runs/zaya1 --keep-last 3 --keep-every 10000 --dry-run"
    steps = whole_number(1, MOST_STEPS)
    return _parser(
        "prune",
        _prune,
        examples,
        option("--keep-last", type=steps, default=3, help="keep this many of the newest; default: 3"),
        option("--keep-every", type=steps, help="also keep those at multiples of this many steps"),
        option("--dry-run", action="store_true", help="print the folders that would be removed"),
    )


def adopt() -> Parser:
    return _parser("adopt", _adopt, "  zaya checkpoint adopt runs/old --step 500", STEP)


def reshape() -> Parser:
    examples = """\
  zaya checkpoint reshape runs/old --output runs/new --files 64       for 64 ranks: runs/new/checkpoints/iter_*

The same command again continues an interrupted one."""
    return _parser(
        "reshape",
        _reshape,
        examples,
        STEP,
        option("--output", type=Path, required=True, metavar="DIR", help="the run directory of the new checkpoint"),
        option(
            "--files",
            type=whole_number(1, MOST_RANKS),
            required=True,
            help="number of files; usually one for each rank that will load them",
        ),
    )


def _run(action: Action, options: argparse.Namespace) -> int:
    """Run `action` on the directory of checkpoints and the chosen steps, which no run removes until it ends."""
    step, every = getattr(options, "step", None), getattr(options, "all", False)
    if step is not None and every:
        raise mistake("--all", problem=f"--step {step} was given too", allowed="one of the two")
    places.require_answer(options.run_dir, "RUN")
    directory = checkpoints_of(options.run_dir)
    places.require_answer(directory, "RUN")
    newest = folder_of(options.run_dir, step, "RUN")
    directory = newest.parent
    chosen = iterations(directory) if every else [on_disk.iteration_of(newest)]
    loaded = on_disk.latest(directory)[0] if action is _verify and step is None else None
    if loaded not in (None, *chosen):  # where the newest is damaged: what the next start loads
        chosen.insert(0, loaded)
    with contextlib.ExitStack() as held:
        for step in chosen:
            held.enter_context(manifest.hold(on_disk.folder(directory, step)) or contextlib.nullcontext())
        return action(directory, chosen, options)


def _list(directory: Path, _: list[int], options: argparse.Namespace) -> int:
    broken = False
    for step in iterations(directory):
        folder = on_disk.folder(directory, step)
        damage = on_disk.problems(directory, step)
        if not folder.is_dir():
            continue  # its run has removed it
        state = (
            "damaged: " + "; ".join(damage)
            if damage
            else "complete" + ", no manifest" * (not on_disk.has_manifest(folder))
        )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        print(f"{step:>9}  {_size(sum(file['bytes'] for file in _files(folder).values())):>9}  {when}  {state}")
        broken |= bool(damage)
    for end, reason in LEFT.items():
        for left in sorted(directory.glob(f"iter_*{end}")):
            print(f"{left.name}: {reason}")
    return int(broken)


def _show(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    folder = on_disk.folder(directory, steps[0])
    damage = on_disk.problems(directory, steps[0])
    try:
        content = manifest.read(folder)
    except ValueError:  # without a manifest, or it is damaged
        content = {"files": _files(folder)}
    if options.json:
        print(json.dumps({"folder": str(folder), "problems": damage, **content}, indent=1))
        return int(bool(damage))
    files = content.pop("files")
    print(folder)
    for name, text in _rows(content):
        print(f"  {name:19} {text}")
    sizes = [file["bytes"] for file in files.values()]
    print(f"  {'files':19} {len(files)}, {_size(sum(sizes))}, the largest of {_size(max(sizes, default=0))}")
    for name, file in files.items() if len(files) <= NAMED_FILES else ():
        print(f"  {_size(file['bytes']):>16} {file.get('xxh3_128', 'no checksum'):32}  {name}")
    print("complete" if not damage else "damaged: " + "; ".join(damage))
    return int(bool(damage))


def _rows(content: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the lines of a manifest's facts, but for the recipe's values."""
    for key, value in content.items():
        if key in (manifest.RECIPE, "xxh3_128") or value is None:
            continue
        if isinstance(value, dict) and any(isinstance(one, dict) for one in value.values()):
            yield from _rows(value, f"{prefix}{key}.")
        else:
            text = ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)
            yield prefix + key, text if len(text) <= FACT_CHARACTERS else text[: FACT_CHARACTERS - 3] + "..."


def _verify(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    broken = False
    for step in steps:
        folder = on_disk.folder(directory, step)
        if not folder.is_dir():
            print(f"{folder.name}: was removed by its run")
            continue
        begin = time.monotonic()
        damage = _damage(directory, step, options.limit)
        seconds = max(time.monotonic() - begin, 1e-3)
        intact = "complete by its own index; it has no manifest, so nothing was read. Fix: zaya checkpoint adopt"
        if on_disk.has_manifest(folder):
            size = sum(file["bytes"] for file in _files(folder).values())
            intact = f"intact, read {_size(size)} in {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s"
        print(f"{folder.name}: {intact}" if not damage else f"{folder.name}: damaged\n  " + "\n  ".join(damage))
        broken |= bool(damage)
    return int(broken)


def _damaged(folder: Path, files: dict, limit: float | None) -> list[str]:
    """Read files and compare their checksums, with a progress bar. limit: GB a second."""
    pace = places.Pace(None if limit is None else limit * 1e9)
    with bar(folder.name, sum(file["bytes"] for file in files.values())) as shown:

        def progress(count: int) -> None:
            shown.update(count)
            pace(count)

        return manifest.damaged(folder, list(files), progress, files)


def _prune(directory: Path, _: list[int], options: argparse.Namespace) -> int:
    for step in on_disk.removable(directory, options.keep_last, options.keep_every):
        folder = on_disk.folder(directory, step)
        if options.dry_run:
            print(f"would remove {folder}")
        elif on_disk.remove(directory, step):
            print(f"removed {folder}", flush=True)
        else:
            print(f"{folder} stays: another program is reading it", flush=True)
    return 0


def _adopt(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    folder = on_disk.folder(directory, steps[0])
    if damage := on_disk.problems(directory, steps[0]):
        print(f"{folder}: damaged\n  " + "\n  ".join(damage))
        return 1
    if on_disk.has_manifest(folder):
        print(f"{folder} has a manifest")
        return 0
    files = {}
    with bar(folder.name, sum(file["bytes"] for file in _files(folder).values())) as shown:
        for path in filter(Path.is_file, folder.iterdir()):
            files[path.name] = manifest.describe(path)
            shown.update(files[path.name]["bytes"])
    manifest.write(folder, steps[0], files, adopted=True)
    print(f"{folder}: manifest written, {len(files)} files")
    return 0


def _reshape(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    from zaya_plugin.checkpoint.reshape import reshape as reshaped

    source = on_disk.folder(directory, steps[0])
    final = on_disk.folder(checkpoints_of(options.output), steps[0])
    if damage := _damage(directory, steps[0]):
        print(f"{source}: damaged\n  " + "\n  ".join(damage))
        return 1
    if not on_disk.has_manifest(source):
        print(f"{source} has no manifest: complete by its own index, its content is not checked")
    total = sum(path.stat().st_size for path in source.glob("*.distcp"))
    with bar(final.name, total) as shown:
        kept, files = reshaped(source, final, options.files, shown.update)
    before = f", {kept} of them written before" if kept else ""
    print(f"{final}: {files} files{before}; to train on: run_dir={options.output} resume=must")
    return 0


def _damage(directory: Path, step: int, limit: float | None = None) -> list[str]:
    """Return the damage of a checkpoint; reads all files if it has a manifest."""
    folder = on_disk.folder(directory, step)
    texts = on_disk.problems(directory, step)
    if not texts and on_disk.has_manifest(folder):
        texts = _damaged(folder, manifest.read(folder)["files"], limit)
    return texts


def _files(folder: Path) -> dict[str, dict]:
    """Return the bytes of each file, as far as they can be read."""
    try:
        files = sorted((entry for entry in os.scandir(folder) if entry.is_file()), key=lambda entry: entry.name)
        return {entry.name: {"bytes": entry.stat().st_size} for entry in files}
    except OSError:  # `problems` names it
        return {}


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
