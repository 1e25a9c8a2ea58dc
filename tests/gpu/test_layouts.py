# SPDX-License-Identifier: Apache-2.0
"""The grid of parallel layouts on GPUs of one host: bf16 through NCCL, 20 steps, losses within 2e-2 of one rank and the
first gradient norm within 2 %; memory by layout.

All layouts that were selected run side by side, ZAYA_LAYOUTS_AT_ONCE (4) of each kind at a time, and say so as they end
(pytest -s). ZAYA_LAYOUT_RESULTS=<file> keeps a JSON record of each, added as it ends. A layout that needs more GPUs
than there are is left out. Speeds mean nothing in this test. Layouts of whole documents run compiled, as attention to
documents must be; the others eagerly.
"""

import json
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.distributed.layout_grid import COMMON, Grid, run_job
from tests.distributed.layouts import FULL, PACKED, QUICK, RECOMPUTED, SLOW, layout
from tests.distributed.packed_corpus import boundaries, short_documents
from tests.distributed.rank_server import GPU, RankServers
from tests.running import zaya
from zaya_plugin.plan import memory, parallelism
from zaya_plugin.plan.flops import Shape

STEPS, LOSS, NORM = 20, 2e-2, 2e-2
AT_ONCE = int(os.environ.get("ZAYA_LAYOUTS_AT_ONCE", "4"))
# Sizes that the kernels take: heads of 16 channels, rows of 16 bytes, blocks of 128 rows.
BASE = (
    "experiment=cpu_demo",
    "cluster=gpu",
    "optim=adamw",  # Muon does not take tensor parallelism
    "stage.seq_length=512",
    "stage.micro_batch_size=2",
    "stage.global_batch_size=8",
    "stage.train_iters=60",
    "optim.lr=1e-3",
    "optim.lr_warmup_iters=10",
    "checkpoint.keep_last=0",
    "logger=none",
)
# ZAYA1-base's width in four layers, its optimizer states in full, three steps.
WIDE_SHAPE = Shape(4, 2048, 8, 2, 128, 16, 2048, 256, 65_536)
WIDE = (
    "experiment=zaya1_base",
    "cluster=gpu",
    "optim=adamw",
    "model.num_layers=4",
    "model.make_vocab_size_divisible_by=65536",
    "stage.global_batch_size=4",
    "stage.train_iters=3",
    "optim.lr_warmup_iters=1",
    "stage.eval_iters=0",
    "checkpoint.save_interval=null",
    "checkpoint.keep_last=0",
    "logger=none",
)
MEMORY = (
    (layout("one", 1), {}),
    (layout("dp2", 2), {"data": 2}),
    (
        layout("dp2-whole-optimizer", 2, "parallel.use_distributed_optimizer=false"),
        {"data": 2, "distributed_optimizer": False},
    ),
    (layout("cp2", 2, cp=2), {"context": 2}),
    (layout("ep2", 2, ep=2), {"data": 2, "expert": 2}),
    (layout("tp2", 2, tp=2), {"tensor": 2}),
    (layout("pp2", 2, pp=2), {"pipeline": 2}),
    (layout("ep4", 4, ep=4), {"data": 4, "expert": 4}),
    (layout("pp2ep2", 4, pp=2, ep=2), {"data": 2, "pipeline": 2, "expert": 2}),
)
# Local modules on one rank are what these are compared with too.
TE = ("cluster.transformer_impl=transformer_engine", "cluster.core_attention=transformer_engine")
PACKED_TE = layout("te", 1, *TE), layout("te-cp2", 2, *TE, cp=2)
PLAIN_TE = (
    *PACKED_TE,
    layout("te-recomputed", 1, *TE, *FULL),
    layout("te-deterministic", 1, *TE, "cluster.deterministic=true"),
    layout("te-dp2", 2, *TE),
    layout("te-tp2", 2, *TE, tp=2),
    layout("te-ep2", 2, *TE, ep=2),
)
GRID = {"plain": QUICK + SLOW + RECOMPUTED + PLAIN_TE, "packed": QUICK + SLOW + PACKED_TE}
CASES = [("memory", each) for each, _ in MEMORY] + [(kind, each) for kind, layouts in GRID.items() for each in layouts]
IDS = [f"{kind}-{each.name}-{each.ranks}gpu" for kind, each in CASES]


def runs_here(layout) -> bool:
    """Whether this machine has the layout's GPUs and packages."""
    packages = find_spec("transformer_engine") is not None or not layout.name.startswith("te")
    return packages and layout.ranks <= torch.cuda.device_count()


class Runs:
    """All selected cases, started together; `wait` for the record of one."""

    def __init__(self, directory: Path, cases):
        self.directory, self.began = directory, time.monotonic()
        self.results = Path(os.environ.get("ZAYA_LAYOUT_RESULTS") or directory / "results.json")
        self.ended: list[dict] = []
        self.writing = threading.Lock()
        eager = {**GPU, "TORCHDYNAMO_DISABLE": "1"}
        kinds = {kind for kind, _ in cases}
        self.servers = {kind: RankServers(AT_ONCE, eager if kind == "plain" else GPU) for kind in sorted(kinds)}
        self.pools = {kind: ThreadPoolExecutor(AT_ONCE) for kind in kinds}
        self.data = {"plain": directory / "corpus"}
        done = zaya(
            "data",
            "prepare",
            "--output",
            str(self.data["plain"]),
            "--max-bytes",
            "600K",
            "--valid-fraction",
            "0.2",
            "--train-bpe",
            "512",
            "--workers",
            "1",
        )
        assert done.returncode == 0, done.stdout
        self.data["memory"] = self.data["plain"]
        self.data["packed"] = short_documents(directory, self.data["plain"] / "tokenizer", lines=16)
        # One rank of each kind first: the others wait for its checkpoint.
        self.grids = {kind: self.pools[kind].submit(self._grid, kind) for kind in kinds - {"memory"}}
        self.records: dict[tuple, Future] = {case: self.pools[case[0]].submit(self._record, *case) for case in cases}

    def _grid(self, kind: str) -> Grid:
        grid = Grid(
            self.directory / kind,
            self.data[kind],
            PACKED if kind == "packed" else (),
            last=COMMON + STEPS,
            gradients=False,
            base=BASE,
            servers=self.servers[kind],
        )
        self._say(
            f"{kind}: one rank, losses {grid.one['reported'][0]['loss']:.4f} to {grid.one['reported'][-1]['loss']:.4f}"
        )
        return grid

    def _record(self, kind: str, layout) -> dict:
        start = time.monotonic()
        record = {"kind": kind, "layout": layout.name, "ranks": layout.ranks, "overrides": layout.overrides}
        try:
            record |= self._memory(layout) if kind == "memory" else self._losses(kind, layout)
        except Exception as failed:
            record["failed"] = str(failed)[-6000:]
            self._say(f"{kind:7} {layout.name:28} FAILED: {str(failed)[-300:]}")
        record["seconds"] = round(time.monotonic() - start, 1)
        self._keep(record)
        return record

    def _keep(self, record: dict) -> None:
        versions = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        with self.writing:
            self.ended.append(record)
            device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
            written = {"device": device, "versions": versions, "results": self.ended}
            self.results.write_text(json.dumps(written, indent=1) + "\n")

    def _losses(self, kind: str, layout) -> dict:
        grid = self.grids[kind].result()
        result = grid.run(layout)
        pairs = [(a["loss"], b["loss"]) for a, b in zip(result["reported"], grid.one["reported"], strict=True)]
        assert len(pairs) == STEPS
        first = [(key, table) for key, table in grid.one["ids"].items() if key[0] == 0]
        flips = sum(int((result["ids"][key] != table).sum()) for key, table in first) / sum(t.numel() for _, t in first)
        difference = max(abs(a - b) for a, b in pairs)
        logs = sorted((self.directory / kind).glob(f"{layout.name}.json.rank*.stderr"))
        assert len(logs) == layout.ranks
        self._say(
            f"{kind:7} {layout.name:28} largest loss difference {difference:.1e}, last loss {pairs[-1][0]:.4f} (one "
            "rank "
            f"{pairs[-1][1]:.4f}), other experts in the first step {flips:.2%}"
        )
        return {
            "losses": [a for a, _ in pairs],
            "one_rank": [b for _, b in pairs],
            "largest_difference": difference,
            "first_grad_norms": [result["reported"][0]["grad_norm"], grid.one["reported"][0]["grad_norm"]],
            "warnings": [line for log in logs for line in log.read_text().splitlines() if "is not used for" in line],
            "other_experts_in_first_step": flips,
            "memory": [rank[-1:] for rank in result["memory"]],
            "documents_ending_inside": min(boundaries(result, self.data[kind])),
        }

    def _memory(self, layout) -> dict:
        recipe = (*WIDE, f"data.path={self.data['memory']}", *layout.overrides)
        result = run_job(self.servers["memory"], self.directory / f"memory-{layout.name}", layout.ranks, recipe)
        last = [rank[-1] for rank in result["memory"]]
        sizes = dict((each.name, sizes) for each, sizes in MEMORY)[layout.name]
        plan = memory.memory_plan(
            WIDE_SHAPE,
            parallelism.ParallelSizes(**sizes),
            parallelism.Batch(4096),
            optimizer=memory.Optimizer(muon=False),
        )
        predicted = {name: plan.components[name] for name in ("weights", "gradients", "optimizer")}
        self._say(
            f"memory  {layout.name:28} held {last[0]['held'] / 1e9:.2f} GB, predicted "
            f"{sum(predicted.values()) / 1e9:.2f}; peak " + ", ".join(f"{rank['peak'] / 1e9:.2f}" for rank in last)
        )
        return {"memory": last, "predicted_state": predicted, "losses": [row["loss"] for row in result["reported"]]}

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", flush=True)

    def wait(self, case) -> dict:
        record = self.records[case].result()
        assert "failed" not in record, record["failed"]
        return record


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if "case" in getattr(getattr(item, "callspec", None), "params", {}) and item.path == Path(__file__)
    ]
    runs = Runs(tmp_path_factory.mktemp("layouts"), [case for case in selected if runs_here(case[1])])
    yield runs
    for pool in runs.pools.values():
        pool.shutdown(cancel_futures=True)
    for servers in runs.servers.values():
        servers.close()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_layout(runs, case):
    kind, each = case
    if not runs_here(each):
        pytest.skip(f"needs {each.ranks} GPUs" + " and Transformer Engine" * each.name.startswith("te"))
    record = runs.wait(case)
    if kind == "memory":
        held, predicted = record["memory"][0]["held"], sum(record["predicted_state"].values())
        # what the formula leaves out is small: rows of RoPE, work space
        assert held == pytest.approx(predicted, rel=0.05)
        assert record["memory"][0]["peak"] > held
    else:
        assert record["largest_difference"] < LOSS
        norm, expected = record["first_grad_norms"]
        assert norm == pytest.approx(expected, rel=NORM)
        assert not record["warnings"], "another version of attention has run"
        assert kind == "plain" or record["documents_ending_inside"] > 0
