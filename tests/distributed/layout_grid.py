# SPDX-License-Identifier: Apache-2.0
"""Running a layout from a common checkpoint and comparing it with one rank. See layouts.py for the grid."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.layouts import ONE, Layout
from tests.distributed.rank_server import RankServers
from tests.running import MICRO

NEAR = 1e-3  # probabilities this close may change order with the order of a sum
COMMON, LAST = 2, 5  # the step of the common checkpoint, and the last step that is compared


@dataclass(frozen=True)
class Difference:
    """A layout against one rank.

    flips: choices of an expert (of `choices`: tokens x layers x steps) that fell otherwise; near_ties: where a sequence
    first flipped, one rank's choice was close; gradients: by key, the largest ||a - b|| / ||b|| of all steps; replicas:
    the largest such difference between ranks that hold the same gradient; balancing: the same counts for the balancing
    biases.
    """

    flips: int
    choices: int
    near_ties: bool
    loss: float
    gradients: dict[str, float]
    replicas: float
    balancing: bool

    def worst(self) -> tuple[float, str]:
        """The largest gradient difference and its parameter."""
        return max((value, key) for key, value in self.gradients.items())


def run_job(
    servers: RankServers,
    run_dir: Path,
    ranks: int,
    recipe: tuple[str, ...],
    save_at: int | None = None,
    forced: str | None = None,
    gradients: bool = False,
    traffic: bool = False,
) -> dict:
    """What layout_run.py kept of a run of `recipe` in run_dir; its job, result and logs lie next to that."""
    run_dir.mkdir(exist_ok=True)
    job, out = run_dir.parent / f"{run_dir.name}.json", run_dir.parent / f"{run_dir.name}.pt"
    recipe = [*recipe, f"run_dir={run_dir}", f"nproc={ranks}"]
    job.write_text(
        json.dumps(
            dict(recipe=recipe, out=str(out), save_at=save_at, forced=forced, gradients=gradients, traffic=traffic)
        )
    )
    servers.run(ranks, job)
    return torch.load(out)


class Grid:
    """One rank's run, its checkpoint of step COMMON, and runs of layouts that start from there.

    Args: directory for everything; data, a prepared data set; recipe, overrides that all runs share, on top of base;
    last, the last step; gradients, whether they are compared; servers, where ranks run: one of its own for the CPU by
    default.
    """

    def __init__(
        self,
        directory: Path,
        data: Path,
        recipe: tuple[str, ...] = (),
        last: int = LAST,
        gradients: bool = True,
        base: tuple[str, ...] = MICRO,
        servers: RankServers | None = None,
    ):
        self.directory, self.data, self.last, self.gradients = directory, data, last, gradients
        directory.mkdir(exist_ok=True)
        self.recipe = (
            *base,
            f"data.path={data}",
            "stage.eval_iters=0",
            f"exit_interval={last}",
            f"checkpoint.save_interval={COMMON}",
            *recipe,
        )
        self.own_servers = RankServers() if servers is None else None
        self.servers = servers or self.own_servers
        self.one = self._run(ONE, save_at=COMMON)

    def close(self) -> None:
        """End the processes that were started for this grid."""
        if self.own_servers is not None:
            self.own_servers.close()

    def run(self, layout: Layout, forced: bool = False, traffic: bool = False, save_at: int | None = None) -> dict:
        """What layout_run.py kept of `layout`, steps COMMON + 1 to the last.

        Args: forced, under one rank's routing; traffic, count what is sent and keep no gradients, whose gathering would
        count; save_at, the step whose checkpoint is written.
        """
        name = layout.name + forced * "-forced" + traffic * "-traffic"
        checkpoints = self.directory / name / "checkpoints"
        checkpoints.mkdir(parents=True)
        source = self.directory / ONE.name / "checkpoints"
        (checkpoints / f"iter_{COMMON:07d}").symlink_to(source / f"iter_{COMMON:07d}")
        shutil.copy(source / "latest_checkpointed_iteration.txt", checkpoints)
        ids = str(self.directory / f"{ONE.name}.from_common.pt") if forced else None
        return self._run(layout, name=name, save_at=save_at, forced=ids, traffic=traffic)

    def saved(self, layout: Layout, step: int) -> dict[str, torch.Size]:
        """Shapes of the tensors in a checkpoint of `layout`, by key."""
        stored = FileSystemReader(self.directory / layout.name / "checkpoints" / f"iter_{step:07d}").read_metadata()
        return {key: entry.size for key, entry in stored.state_dict_metadata.items() if hasattr(entry, "size")}

    def _run(
        self,
        layout: Layout,
        name: str | None = None,
        save_at: int | None = None,
        forced: str | None = None,
        traffic: bool = False,
    ) -> dict:
        name = name or layout.name
        job = dict(save_at=save_at, forced=forced, gradients=self.gradients and not traffic, traffic=traffic)
        result = run_job(self.servers, self.directory / name, layout.ranks, (*self.recipe, *layout.overrides), **job)
        if layout is ONE:  # the others start at COMMON and count from 0
            result["reported"] = result["reported"][COMMON:]
            result["gradients"] = result["gradients"][COMMON:]
            for kind in ("ids", "margins"):
                kept = {(step - COMMON, key): table for (step, key), table in result[kind].items() if step >= COMMON}
                result[kind] = kept
            torch.save({"ids": result["ids"]}, self.directory / f"{name}.from_common.pt")
        return result

    def compare(self, other: dict) -> Difference:
        """`other` (a result of `run`) against one rank."""
        one = self.one
        steps = list(range(COMMON + 1, self.last + 1))
        assert [row["step"] for row in other["reported"]] == [row["step"] for row in one["reported"]] == steps
        assert other["ids"].keys() == one["ids"].keys(), "other sequences were trained on"
        flipped = {key: other["ids"][key] != ids for key, ids in one["ids"].items()}
        loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(other["reported"], one["reported"], strict=True))
        balancing = all(
            torch.equal(a["tokens_per_expert"], b["tokens_per_expert"])
            for a, b in zip(other["reported"], one["reported"], strict=True)
        )
        gradients: dict[str, float] = {}
        for a, b in zip(other["gradients"], one["gradients"], strict=True):
            assert a.keys() == b.keys()
            for key in a:
                gradients[key] = max(gradients.get(key, 0.0), _relative(a[key], b[key]))
        return Difference(
            flips=sum(int(table.sum()) for table in flipped.values()),
            choices=sum(table.numel() for table in flipped.values()),
            near_ties=all(
                _near_tie(table, one["margins"][key]) for key, table in flipped.items() if _first_step(key, flipped)
            ),
            loss=loss,
            gradients=gradients,
            replicas=other["replicas"],
            balancing=balancing,
        )


def _first_step(key: tuple[int, bytes], flipped: dict) -> bool:
    """Whether nothing flipped in the steps before: later ones start from other weights."""
    return not any(bool(table.any()) for (step, _), table in flipped.items() if step < key[0])


def _near_tie(flipped: torch.Tensor, margins: torch.Tensor) -> bool:
    """Whether the choices that flipped in the first layer that has any were close; [L, s] both. Later layers see its
    output.
    """
    layers = flipped.any(dim=1).nonzero()
    return len(layers) == 0 or bool((margins[layers[0, 0]][flipped[layers[0, 0]]] < NEAR).all())


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = b.norm().item()
    return (a - b).norm().item() / scale if scale else a.norm().item()
