# SPDX-License-Identifier: Apache-2.0
"""Kills training runs at random points of their saves, and checks that nothing durable is lost.

`python -m tests.faults.random_kills --count 200 --seed 1` makes 200 runs of one or two ranks, with the seeds 1 to 200;
three of eight write to checkpoint.local_path first and upload. In each, SIGKILL comes at a random point of copying,
writing, committing, uploading or pruning a checkpoint (tests.faults.killed_writer), to a rank, its writer, both, or all
processes. The run is then started again until it ends. Checked for each: the restart resumes from the newest checkpoint
whose files have the checksums of its manifest, also if only its name or its uploads were missing; every checkpoint that
was reported as saved was durable; no writer outlives its rank; the last checkpoint's tensors equal those of a run
without a kill, to the bit. `--seed N --count 1` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash
from tqdm import tqdm

from tests.faults import killed_writer
from tests.faults.micro_curriculum import SMALL
from zaya_plugin.checkpoint import manifest, on_disk, places

STEPS = 6
VICTIMS = ("rank", "writer", "rank and writer", "other rank", "all")
RUN = ("experiment=cpu_demo", *SMALL, f"stage.train_iters={STEPS}", "checkpoint.keep_last=1", "resume=auto")
LAUNCHER_SECONDS = 10.0  # from the end of a rank that failed to SIGKILL for the others
PATIENCE = 120.0  # seconds for a run, and for its processes to end


@dataclass
class Kill:
    """Where a run is killed: the call of a phase of a save by the rank (or by its writer), and who is killed."""

    rank: int
    phase: str
    save: int
    call: int
    who: str

    def __str__(self) -> str:
        return f"{self.phase} {self.save}.{self.call:03d} of rank {self.rank}, kills {self.who}"


class Failed(AssertionError):
    """A run lost something."""


class Lab:
    """Runs of one number of ranks, forked from this process, which has imported torch and Megatron.

    Attributes:
        points: (rank, phase, save) -> points, of the run without a kill.
        digest: of that run's last checkpoint.
    """

    def __init__(self, folder: Path, corpus: Path, world: int, local: bool):
        self.folder, self.corpus, self.world, self.local = folder, corpus, world, local
        self.folder.mkdir()
        run_dir = folder / "undisturbed"
        codes = self.run(run_dir, {}, folder / "undisturbed.log")
        if any(codes):
            raise Failed((folder / "undisturbed.log").read_text()[-4000:])
        self.points: dict[tuple[int, str, int], int] = {}
        for path in (run_dir / "points").glob("points_*.json"):
            rank = int(path.name.split("_")[1])
            for phase, save, count in json.loads(path.read_text()):
                self.points[rank, phase, save] = count
        self.digest = digest(last(run_dir)[1])

    def choose(self, seed: int) -> Kill:
        """Choose a phase, then a point of it, and who is killed."""
        chance = random.Random(seed)
        phase = chance.choice(sorted({phase for _, phase, _ in self.points}))
        rank, _, save = chance.choice(sorted(key for key in self.points if key[1] == phase))
        who = chance.choice([each for each in VICTIMS if self.world > 1 or each != "other rank"])
        return Kill(rank, phase, save, chance.randrange(self.points[rank, phase, save]), who)

    def run(self, run_dir: Path, at: dict, log: Path, kill: Callable | None = None) -> list[int]:
        """Start the ranks and wait for them. Return their exit codes.

        at: the point, as in KILL_AT. kill: called with the ranks' process ids and the file of the point that was
        reached.
        """
        notes = run_dir / "points"
        shutil.rmtree(notes, ignore_errors=True)
        notes.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        ranks = [self._fork(rank, port, run_dir, notes, at, log) for rank in range(self.world)]
        codes: dict[int, int] = {}
        end, failed_at = time.monotonic() + PATIENCE, None
        while len(codes) < self.world:
            for pid in set(ranks) - codes.keys():
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if kill and (notes / "reached").exists():
                kill([pid for pid in ranks if pid not in codes], ranks, notes)
                kill = None
            if any(
                codes.values()
            ):  # as torchrun does; a rank that waits for the dead one's file waits for its deadline
                failed_at = failed_at or time.monotonic()
                if time.monotonic() > failed_at + LAUNCHER_SECONDS:
                    for pid in set(ranks) - codes.keys():
                        os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                for pid in set(ranks) - codes.keys():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                raise Failed(f"the run did not end within {PATIENCE:g} s")
            time.sleep(0.002)
        writers = [int(path.name.removeprefix("writer_")) for path in notes.glob("writer_*")]
        while any(lives(pid) for pid in writers):
            if time.monotonic() > end:
                raise Failed("a writer outlives its rank")
            time.sleep(0.01)
        return [codes[pid] for pid in ranks]

    def _fork(self, rank: int, port: int, run_dir: Path, notes: Path, at: dict, log: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.world), LOCAL_RANK=str(rank))
            os.environ.update(LOCAL_WORLD_SIZE=str(self.world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            from zaya_plugin.cli import main as zaya

            killed_writer.install(notes, at)
            local = [f"checkpoint.local_path={run_dir / 'local'}"] if self.local else []
            code = zaya(["train", *RUN, *local, f"run_dir={run_dir}", f"data.path={self.corpus}"])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def trial(self, seed: int) -> str:
        """Kill one run, start it again, and compare. Return what happened."""
        kill = self.choose(seed)
        run_dir, log = self.folder / f"seed{seed}", self.folder / f"seed{seed}.log"
        at = {name: getattr(kill, name) for name in ("rank", "phase", "save", "call")}
        reached: dict = {}

        def strike(alive: list[int], ranks: list[int], notes: Path) -> None:
            reached.update(json.loads((notes / "reached").read_text()))
            own, writer = ranks[kill.rank], reached["pid"]
            if kill.phase == "copying":  # a rank has stopped; its writer may still be starting
                writer = wait_for(lambda: writer_of(kill.rank, notes))
            victims = {
                "rank": [own],
                "writer": [writer],
                "rank and writer": [writer, own],
                "other rank": [pid for pid in ranks if pid != own],
                "all": [*ranks, writer],
            }[kill.who]
            for pid in victims:
                if pid in alive or pid == writer:
                    send(pid, signal.SIGKILL)
            send(reached["pid"], signal.SIGCONT)

        codes = self.run(run_dir, at, log, strike)
        text = log.read_text()
        if not reached:
            raise Failed(f"{kill}: the point was not reached: {codes}\n{text[-3000:]}")
        promised = [int(step) for step in re.findall(r"step (\d+): checkpoint saved", text)]
        story = f"{kill} at {reached['point']}; codes {codes}"
        if any(codes):
            newest = durable(run_dir)
            if promised and (newest is None or newest < promised[-1]):
                raise Failed(f"{story}: step {promised[-1]} was reported as saved, the newest durable is {newest}")
            again = self.folder / f"seed{seed}.again.log"
            codes = self.run(run_dir, {"phase": ""}, again)
            output = again.read_text()
            resumed = re.findall(r"continuing after step (\d+)", output)
            if any(codes) or resumed[:1] != ([] if newest is None else [str(newest)]):
                raise Failed(f"{story}: durable {newest}, resumed {resumed}, codes {codes}\n{output[-4000:]}")
            story += f"; resumed from {newest or 'the start'}"
            if left := [path.name for path in (run_dir / "checkpoints").glob("iter_*.*")]:
                raise Failed(f"{story}: left {left}")
        elif kill.who != "writer":  # nothing survives SIGKILL; at the end of a run another rank may have left before
            story += "; the killed rank had ended before"
        found, folder = last(run_dir)
        if found != STEPS or digest(folder) != self.digest:
            raise Failed(f"{story}: the tensors of step {found} are not those of the undisturbed run")
        shutil.rmtree(run_dir)
        return story


def writer_of(rank: int, notes: Path) -> int | None:
    """Return the process id of a rank's writer, once it runs."""
    for path in notes.glob("writer_*"):
        if path.read_text() == str(rank):
            return int(path.name.removeprefix("writer_"))
    return None


def wait_for(find: Callable[[], int | None]) -> int:
    """Return what `find` finds."""
    end = time.monotonic() + PATIENCE
    while (found := find()) is None:
        if time.monotonic() > end:
            raise Failed("a writer has not started")
        time.sleep(0.01)
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def lives(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def last(run_dir: Path) -> tuple[int | None, Path | None]:
    """Return the newest checkpoint whose files have the sizes and checksums of its manifest."""
    for path in sorted((run_dir / "checkpoints").glob("iter_*"), reverse=True):
        if re.fullmatch(r"iter_\d{7}", path.name) and not manifest.problems(path) and not manifest.damaged(path):
            return int(path.name.removeprefix("iter_")), path
    return None, None


def durable(run_dir: Path) -> int | None:
    """Return the newest step from which a start can continue: of a complete checkpoint, or of one with a manifest whose
    files are whole at either place, and which lacks only its name or its uploads.
    """
    checkpoints = run_dir / "checkpoints"
    local = places.local_folder(run_dir / "local", checkpoints)
    found = {last(run_dir)[0]}
    for folder in checkpoints.glob(f"iter_*{manifest.UNFINISHED}"):
        name = folder.name.partition(".")[0]
        with contextlib.suppress(ValueError):
            files = manifest.read(folder)["files"]
            sources = folder, local / folder.name, local / name
            if all(any(is_whole(path / name, file) for path in sources) for name, file in files.items()):
                found.add(on_disk.iteration_of(folder.with_name(name)))
    return max((step for step in found if step is not None), default=None)


def is_whole(path: Path, file: dict) -> bool:
    """Whether a file has the size and the checksum that its manifest states."""
    return path.is_file() and manifest.describe(path) == file


def digest(folder: Path) -> str:
    """Return a checksum over the names and values of a checkpoint's tensors."""
    import io

    import torch

    found = xxhash.xxh3_128()
    index = pickle.loads((folder / ".metadata").read_bytes())
    for place, stored in sorted(index.storage_data.items(), key=lambda item: (item[0].fqn, str(item[0].offset))):
        if place.offset is None:
            continue
        with open(folder / stored.relative_path, "rb") as file:
            file.seek(stored.offset)
            values = torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)
        found.update(f"{place.fqn} {place.offset} {values.dtype}".encode())
        found.update(values.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def prepared_corpus(folder: Path) -> Path:
    """Prepare a small corpus of this project's own text."""
    from zaya_plugin.cli import main as zaya

    text = folder / "text.jsonl"
    lines = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("checkpoint/*.py"))]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 4))
    output = folder / "corpus"
    arguments = ["--train-bpe", "300", "--valid-fraction", "0.2", "--workers", "1"]
    if zaya(["data", "prepare", "--input", str(text), "--output", str(output), *arguments]):
        raise SystemExit("the corpus could not be prepared")
    return output


def import_all() -> None:
    """Import what a rank imports, once for all forks."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes most of so short a run
    import torch

    torch.set_num_threads(1)
    from zaya_plugin import patches

    patches.apply_torch()
    import megatron.training  # noqa: F401
    from megatron.core.tokenizers.text.libraries import huggingface_tokenizer  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    from zaya_plugin.data import sources  # noqa: F401
    from zaya_plugin.hosts import pretrain, worker  # noqa: F401
    from zaya_plugin.run import launch  # noqa: F401
    from zaya_plugin.training import lifecycle, metrics  # noqa: F401


def main() -> int:
    """Run the trials; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="kills")
    parser.add_argument("--seed", type=int, default=1, help="of the first kill; the others follow")
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), help="of every run; default: 2 for every fourth seed, else 1"
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="write to checkpoint.local_path first, and upload, in every run; default: for three of eight seeds",
    )
    options = parser.parse_args()
    failures, labs = [], {}
    with tempfile.TemporaryDirectory(prefix="random_kills") as name:
        folder = Path(name)
        corpus = prepared_corpus(folder)
        import_all()
        seeds = tqdm(range(options.seed, options.seed + options.count), unit="kill")
        for seed in seeds:
            world = options.ranks or (2 if seed % 4 == 0 else 1)
            local = options.local or seed % 8 in (1, 4, 5)  # with one rank and with two
            if (world, local) not in labs:
                labs[world, local] = Lab(folder / f"ranks{world}{'_local' * local}", corpus, world, local)
            try:
                line = labs[world, local].trial(seed)
            except Failed as failure:
                failures.append(seed)
                line = f"FAILED: {failure}"
            seeds.write(f"seed {seed}, {world} ranks{', local_path' * local}: {line}", file=sys.stdout)
            sys.stdout.flush()
    print(
        f"{options.count - len(failures)} of {options.count} resumed from the newest durable checkpoint to equal bits"
    )
    if failures:
        print(f"failed seeds: {failures}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
