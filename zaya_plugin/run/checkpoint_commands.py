# SPDX-License-Identifier: Apache-2.0
"""`zaya checkpoint list|show|verify|warm|prune|adopt|reshape`: the checkpoints of a run, from outside. Starts no ranks;
needs no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from zaya_plugin.checkpoint import manifest, on_disk, places
from zaya_plugin.checkpoint.progress import bar
from zaya_plugin.checkpoint.reading import folder_of
from zaya_plugin.config.run_directory import checkpoints_of, iterations
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import MOST_RANKS, MOST_STEPS, real_number, whole_number

WHAT = """\
Looks at the checkpoints of a run. RUN is a run directory, or a directory of iter_* folders.

A checkpoint of this version has a manifest with the size and the checksum of every file. list and show compare names
and sizes; verify reads all files. Checkpoints of earlier versions and of other programs have none: they are compared
with their own index, and adopt writes a manifest for them. reshape writes a checkpoint anew, in another number of files,
for a restart at another number of ranks; the same command again continues an interrupted one."""
EXAMPLES = """\
examples:
  zaya checkpoint list runs/zaya1                         each checkpoint, and whether it is complete
  zaya checkpoint show runs/zaya1                         the newest one's files, and the run that wrote it
  zaya checkpoint verify runs/zaya1 --step 12000          compare the checksums of one, --all: of all
  zaya checkpoint warm runs/zaya1 --limit 2               read what a restart needs into this node's page cache
  zaya checkpoint prune runs/zaya1 --keep-last 3 --keep-every 10000 --dry-run
  zaya checkpoint adopt runs/old --step 500               trust a checkpoint as it is, and write its manifest
  zaya checkpoint reshape runs/old --output runs/new --files 64       for 64 ranks: runs/new/checkpoints/iter_*

Exit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line."""


WIDEST, MOST_FILES = 100, 16  # of what `show` prints: characters of a fact, and files by name
LEFT = {
    manifest.UNFINISHED: "a save that has not ended",
    manifest.REMOVED: "a removal that has not ended",
    manifest.FAILED: "put aside, because two starts from it had failed at the same step, or by a roll back",
    manifest.DAMAGED: "put aside at a start, because its content does not have its checksums",
    manifest.REPLACED: "put aside by a save of its step, because it was damaged or of another run",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each refuses the options of others."""
    out = argparse.ArgumentParser(
        "zaya checkpoint", description=WHAT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = out.add_subparsers(dest="command", required=True)

    def add(name: str, what: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=what, description=what)
        one.add_argument("run", type=Path, metavar="RUN", help="a run directory, or a directory of iter_* folders")
        if name not in ("list", "prune"):
            one.add_argument("--step", type=whole_number(0, MOST_STEPS), help="this checkpoint; default: the newest")
        if name in ("verify", "warm"):
            one.add_argument("--limit", type=real_number(1e-6, 1e6), metavar="GB/S", help="read no faster than this")
        return one

    add("list", "print each checkpoint, and whether it is complete")
    one = add("show", "print what a checkpoint's manifest states: the run that wrote it, its data and files")
    one.add_argument("--json", action="store_true", help="print all of it: every file's checksum, the recipe's values")
    one = add("verify", "read all files of a checkpoint and compare their checksums")
    one.add_argument("--all", action="store_true", help="all checkpoints")
    add("warm", "read what a restart needs into this node's page cache")
    one = add("prune", "remove old checkpoints that are complete and have a manifest")
    one.add_argument(
        "--keep-last", type=whole_number(0, MOST_STEPS), default=3, help="keep so many of the newest; default: 3"
    )
    one.add_argument(
        "--keep-every", type=whole_number(1, MOST_STEPS), help="also keep those at multiples of so many steps"
    )
    one.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    add("adopt", "trust a checkpoint as it is, and write its manifest")
    one = add("reshape", "write a checkpoint anew in another number of files")
    one.add_argument("--output", type=Path, metavar="DIR", help="the run directory of the new checkpoint")
    one.add_argument(
        "--files", type=whole_number(0, MOST_RANKS), help="so many files; usually one for each rank that will load them"
    )
    return out


def main(words: list[str]) -> int:
    """Run `zaya checkpoint`; raises ValueError for a user's mistake."""
    options = parser().parse_args(words)
    step, every = getattr(options, "step", None), getattr(options, "all", False)
    if step is not None and every:
        raise mistake("--all", problem=f"--step {step} was given too", allowed="one of the two")
    places.require_answer(options.run, "RUN")
    directory = checkpoints_of(options.run)
    places.require_answer(directory, "RUN")
    newest = folder_of(options.run, step, "RUN")
    directory = newest.parent
    if options.command == "warm" and step is None:  # what a restart reads
        newest = on_disk.folder(directory, on_disk.latest(directory)[0])
    if getattr(options, "keep_last", 1) < 1:
        raise mistake("--keep-last", options.keep_last, problem="would remove every checkpoint", allowed="1 or more")
    chosen = iterations(directory) if every else [on_disk.iteration_of(newest)]
    with contextlib.ExitStack() as held:  # a run does not remove them meanwhile
        for step in chosen:
            held.enter_context(manifest.hold(on_disk.folder(directory, step)) or contextlib.nullcontext())
        return COMMANDS[options.command](directory, chosen, options)


def list_(directory: Path, _: list[int], options: argparse.Namespace) -> int:
    broken = False
    for step in iterations(directory):
        folder = on_disk.folder(directory, step)
        damage = on_disk.problems(directory, step)
        if not folder.is_dir():
            continue  # the run has removed it meanwhile
        state = (
            "damaged: " + "; ".join(damage)
            if damage
            else "complete" + ", no manifest" * (not on_disk.has_manifest(folder))
        )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        print(f"{step:>9}  {_size(sum(file['bytes'] for file in _files(folder).values())):>9}  {when}  {state}")
        broken |= bool(damage)
    for end, what in LEFT.items():
        for left in sorted(directory.glob(f"iter_*{end}")):
            print(f"{left.name}: {what}")
    return int(broken)


def show(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    folder = on_disk.folder(directory, steps[0])
    damage = on_disk.problems(directory, steps[0])
    try:
        content = manifest.read(folder)
    except ValueError:  # without a manifest, or it is damaged, which `found` says
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
    for name, file in files.items() if len(files) <= MOST_FILES else ():
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
            yield prefix + key, text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def verify(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    broken = False
    for step in steps:
        folder = on_disk.folder(directory, step)
        if not folder.is_dir():
            print(f"{folder.name}: was removed meanwhile")
            continue
        damage = _damage(directory, step, options.limit)
        intact = (
            "intact"
            if on_disk.has_manifest(folder)
            else "complete by its own index; without a manifest no content is checked"
        )
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


def warm(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    (step,) = steps
    folder = on_disk.folder(directory, step)
    if not on_disk.has_manifest(folder):
        raise mistake("RUN", options.run, problem=f"{folder} has no manifest", fix="zaya checkpoint adopt")
    if damage := on_disk.problems(directory, step):
        print(f"{folder}: damaged\n  " + "\n  ".join(damage))
        return 1
    files, began = manifest.read(folder)["files"], time.monotonic()
    damage = _damaged(folder, files, options.limit)
    seconds = max(time.monotonic() - began, 1e-3)
    size = sum(file["bytes"] for file in files.values())
    print(f"{folder.name}: read {_size(size)} in {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s")
    print(*(f"damaged: {text}" for text in damage), sep="\n", end="\n" * bool(damage))
    return int(bool(damage))


def prune(directory: Path, _: list[int], options: argparse.Namespace) -> int:
    for step in on_disk.removable(directory, options.keep_last, options.keep_every):
        folder = on_disk.folder(directory, step)
        if options.dry_run:
            print(f"would remove {folder}")
        elif on_disk.remove(directory, step):
            print(f"removed {folder}", flush=True)
        else:
            print(f"{folder} stays: another program is reading it", flush=True)
    return 0


def adopt(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    folder = on_disk.folder(directory, steps[0])
    if damage := on_disk.problems(directory, steps[0]):
        print(f"{folder}: damaged\n  " + "\n  ".join(damage))
        return 1
    if on_disk.has_manifest(folder):
        print(f"{folder} has a manifest")
        return 0
    files = {path.name: manifest.describe(path) for path in folder.iterdir() if path.is_file()}
    manifest.write(folder, steps[0], files, adopted=True)
    print(f"{folder}: manifest written, {len(files)} files")
    return 0


def reshape(directory: Path, steps: list[int], options: argparse.Namespace) -> int:
    if options.output is None:
        raise mistake("--output", problem="was not given", fix="--output <run directory of the new checkpoint>")
    if options.files is None or options.files < 1:
        raise mistake("--files", options.files, problem="not a number of files", allowed="1 or more", fix="--files 8")
    from zaya_plugin.checkpoint.reshape import reshape as write_anew

    source = on_disk.folder(directory, steps[0])
    final = on_disk.folder(checkpoints_of(options.output), steps[0])
    if damage := _damage(directory, steps[0]):
        print(f"{source}: damaged\n  " + "\n  ".join(damage))
        return 1
    if not on_disk.has_manifest(source):
        print(f"{source} has no manifest: complete by its own index, its content is not checked")
    total = sum(path.stat().st_size for path in source.glob("*.distcp"))
    with bar(final.name, total) as shown:
        kept, files = write_anew(source, final, options.files, shown.update)
    before = f", {kept} of them written before" if kept else ""
    print(f"{final}: {files} files{before}; to train on: run_dir={options.output} resume=must")
    return 0


COMMANDS = {
    "list": list_,
    "show": show,
    "verify": verify,
    "warm": warm,
    "prune": prune,
    "adopt": adopt,
    "reshape": reshape,
}


def _damage(directory: Path, step: int, limit: float | None = None) -> list[str]:
    """Return what is wrong with a checkpoint; reads all files if it has a manifest."""
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
