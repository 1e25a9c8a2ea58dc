# SPDX-License-Identifier: Apache-2.0
"""Checkpoints move between layouts: what a run saved in one layout is loaded in another and saved again, with the same
bits of every weight and of the optimizer's state; directly and through `zaya checkpoint reshape`.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_reshape import loaded
from tests.distributed.layouts import TWO_OPTIMIZERS, Layout, layout
from tests.distributed.rank_server import RankServers
from tests.running import MICRO, train, zaya

COMMON = ("stage.micro_batch_size=1", "stage.eval_iters=0")
MUON = ("optim=muon", "optim.muon_dtype=fp32")
ADAMW = "optim=adamw"  # under tensor parallelism, which Muon does not support
pytestmark = pytest.mark.slow

DP2 = layout("dp2", 2, *MUON)
TWO = layout("dp4-two_optimizers", 4, *MUON, TWO_OPTIMIZERS)
CP2EP2 = layout("cp2ep2", 2, *MUON, cp=2, ep=2)
TP2PP2 = layout("tp2pp2", 4, ADAMW, tp=2, pp=2)
# Saved by, in the files of, loaded by.
MOVES = (
    (DP2, "run", layout("dp4", 4, *MUON)),
    (DP2, "reshaped", layout("dp4", 4, *MUON)),
    (DP2, "run", TWO),
    (TWO, "run", DP2),
    (CP2EP2, "run", layout("pp4", 4, *MUON, pp=4)),
    (CP2EP2, "run", layout("pp2-interleaved", 2, *MUON, pp=2, stages=2)),
    (CP2EP2, "run", layout("ep8", 8, *MUON, ep=8)),
    (TP2PP2, "run", layout("one", 1, ADAMW)),
    (TP2PP2, "run", layout("cp4", 4, ADAMW, cp=4)),
    (TP2PP2, "reshaped", layout("cp4", 4, ADAMW, cp=4)),
    (TP2PP2, "run", layout("tp2ep2", 4, ADAMW, tp=2, ep=2)),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus):
    """A function of a layout: the folder with its `run` of three steps, and that checkpoint in seven files, `reshaped`."""
    folders: dict[str, Path] = {}

    def of(by: Layout) -> Path:
        if by.name not in folders:
            folder = folders[by.name] = tmp_path_factory.mktemp(by.name)
            steps = ("stage.train_iters=3", "checkpoint.save_interval=3", f"nproc={by.ranks}")
            train(folder / "run", corpus, *COMMON, *steps, *by.overrides)
            words = ("checkpoint", "reshape", str(folder / "run"), "--output", str(folder / "reshaped"), "--files", "7")
            done = zaya(*words)
            assert done.returncode == 0, done.stdout
        return folders[by.name]

    return of


def moved(servers: RankServers, source: Path, to: Path, corpus: Path, into: Layout) -> dict:
    """The tensors of the checkpoint that the ranks of `into` save after the load."""
    (to / "checkpoints").mkdir(parents=True)
    (to / "checkpoints" / "iter_0000003").symlink_to(source / "checkpoints" / "iter_0000003")
    recipe = [*MICRO, *COMMON, *into.overrides, "stage.train_iters=5", f"run_dir={to}", f"data.path={corpus}"]
    recipe += [f"nproc={into.ranks}", "resume=must"]
    job = to / "job.json"
    job.write_text(json.dumps({"program": "tests.distributed.moved_checkpoint", "recipe": recipe}))
    servers.run(into.ranks, job)
    return tensors(to / "moved")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for key, value in loaded(folder).items() if torch.is_tensor(value)}


@pytest.mark.parametrize(
    ("by", "files", "into"), MOVES, ids=[f"{by.name}-{files}-{into.name}" for by, files, into in MOVES]
)
def test_every_tensor_keeps_its_bits(servers, saved, tmp_path, corpus, by, files, into):
    folder = saved(by)
    before = tensors(folder / "run" / "checkpoints" / "iter_0000003")
    assert sum(key.startswith("optimizer.state.exp_avg.") for key in before) > 200
    after = moved(servers, folder / files, tmp_path / "to", corpus, into)
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key].dtype == value.dtype and torch.equal(after[key], value), key
