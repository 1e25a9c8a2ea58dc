# SPDX-License-Identifier: Apache-2.0
"""ZAYA in a clone of Primus with the Megatron that it pins (core 0.16.0rc0), on the CPU, against `zaya train` on
0.19.

One rank gives the same losses bit for bit. Of several each holds other pieces of the buffers than in 0.19, so that the
gradient norm, which clips, is summed in another order: the last digits may differ, but a stop and a resume must leave
no trace.

Needs ZAYA_PRIMUS=<clone of AMD-AGI/Primus with third_party/Megatron-LM> and its requirement loguru. Both are copied in
part, since Megatron's compiled module goes next to its source; nothing in them is changed.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aegis.journals import lines
from tests.hosts.test_pretrain_gpt import ROOT, SIX, float32, scalars
from tests.running import MICRO, kill_supervised_rank, train, zaya
from zaya_plugin.run.primus_export import launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    if not (given := os.environ.get("ZAYA_PRIMUS")):
        pytest.skip("ZAYA_PRIMUS names no clone of Primus")
    if importlib.util.find_spec("loguru") is None:
        pytest.skip("Primus needs loguru: pip install loguru")
    copy = tmp_path_factory.mktemp("primus")
    shutil.copytree(Path(given) / "primus", copy / "primus", ignore=shutil.ignore_patterns("__pycache__"))
    megatron, here = Path(given) / "third_party" / "Megatron-LM", copy / "third_party" / "Megatron-LM"
    shutil.copytree(megatron / "megatron", here / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        shutil.copy(megatron / script, here)
    import megatron.core.datasets.helpers_cpp as compiled

    shutil.copy(compiled.__file__, here / "megatron" / "core" / "datasets")
    return copy


def exported(clone: Path, run_dir: Path, data: Path, *overrides: str, ranks: int, spec: bool = False):
    """`zaya export primus`; the environment and the command of one of its ranks, or of torchrun's."""
    flags = ("--spec",) if spec else ()
    done = zaya(
        "export",
        "primus",
        *flags,
        *MICRO,
        f"run_dir={run_dir}",
        f"data.path={data}",
        *overrides,
        "logger.tensorboard=true",
        f"nproc={ranks}",
    )
    assert done.returncode == 0, done.stdout
    backend = clone / "third_party" / "Megatron-LM"
    search = os.pathsep.join(str(path) for path in (clone, backend, ROOT, os.environ.get("PYTHONPATH")) if path)
    environment = {
        **os.environ,
        "PYTHONPATH": search,
        "BACKEND_PATH": str(backend),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment["TORCHDYNAMO_DISABLE"] = "1"
    script = str(Path(__file__).with_name("primus_on_cpu.py") if spec else launcher())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
    return environment, [*launch, "train", "pretrain", "--config", str(run_dir / "primus.yaml")]


def primus(clone: Path, run_dir: Path, data: Path, *overrides: str, ranks: int, words: tuple = (), spec: bool = False):
    """Primus with an exported experiment and `words`; the exit code and its output."""
    environment, command = exported(clone, run_dir, data, *overrides, ranks=ranks, spec=spec)
    out = subprocess.run(
        [*command, *words],
        cwd=run_dir,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    return out.returncode, out.stdout


def test_muon_stopped_and_continued(clone, tmp_path, corpus):
    overrides = (*SIX, "optim=muon", "optim.overrides=['*router* lr_mult=0.5']")
    own = train(tmp_path / "own", corpus, *overrides, "nproc=2").steps()
    run_dir, straight = tmp_path / "team" / "guest", tmp_path / "team" / "straight"
    code, output = primus(clone, straight, corpus, *overrides, ranks=2)
    assert code == 0, output[-6000:]
    code, output = primus(clone, run_dir, corpus, *overrides, ranks=2, words=("--exit_interval", "3"))
    assert code == 0, output[-6000:]
    code, output = primus(clone, run_dir, corpus, *overrides, ranks=2)
    assert code == 0, output[-6000:]
    assert "resumes from step 3, optimizer muon, megatron.core 0.16.0rc0" in output and "in the recipe" not in output
    guest, whole = scalars(run_dir / "tensorboard"), scalars(straight / "tensorboard")
    for tag in ("lm loss", "grad-norm", "learning-rate"):
        assert guest[tag] == whole[tag] and set(guest[tag]) == set(range(1, 7)), tag
    assert guest["lm loss"] == pytest.approx({step: row["loss"] for step, row in own.items()}, rel=2e-6)
    assert guest["grad-norm"] == pytest.approx({step: row["grad_norm"] for step, row in own.items()}, rel=2e-5)


def test_one_rank_has_the_bits_of_zaya_train(clone, tmp_path, corpus):
    own = train(tmp_path / "own", corpus, *SIX, "nproc=1").steps()
    code, output = primus(clone, tmp_path / "team" / "one", corpus, *SIX, ranks=1)
    assert code == 0, output[-6000:]
    guest = scalars(tmp_path / "team" / "one" / "tensorboard")
    assert guest["lm loss"] == float32({step: row["loss"] for step, row in own.items()})
    assert guest["grad-norm"] == float32({step: row["grad_norm"] for step, row in own.items()})


def test_a_stage_takes_over_from_the_one_before(clone, tmp_path, corpus):
    second = (*SIX, "stage.seq_length=64", "stage.rotary_base=1000000", "optim.lr=5e-4", "seed=5")
    before = tmp_path / "own_before"
    start = train(before, corpus, *SIX, "nproc=1").steps()[1]["loss"]
    own = train(tmp_path / "own", corpus, *second, f"handover.from_run={before}", "nproc=1").steps()
    first, run_dir = tmp_path / "team" / "first", tmp_path / "team" / "second"
    for place, overrides in ((first, SIX), (run_dir, (*second, f"handover.from_run={first}"))):
        code, output = primus(clone, place, corpus, *overrides, ranks=1)
        assert code == 0, output[-6000:]
    losses = scalars(run_dir / "tensorboard")["lm loss"]
    assert losses == float32({step: row["loss"] for step, row in own.items()}) and losses[1] < start - 0.1
    # 0.19 writes checkpoints that 0.16 cannot read, and a message says so
    code, output = primus(clone, tmp_path / "team" / "third", corpus, *second, f"handover.from_run={before}", ranks=1)
    assert code != 0 and "it was written by a later Megatron, and megatron.core 0.16.0rc0 cannot read it" in output


def test_stock_primus_with_the_spec(clone, tmp_path, corpus):
    own = train(tmp_path / "own", corpus, *SIX, "nproc=1").steps()
    run_dir = tmp_path / "team" / "guest"
    code, output = primus(clone, run_dir, corpus, *SIX, ranks=1, spec=True)
    assert code == 0, output[-6000:]
    assert scalars(run_dir / "tensorboard")["lm loss"] == float32({step: row["loss"] for step, row in own.items()})


def test_a_wrong_key_on_the_command_line_ends_the_run(clone, tmp_path, corpus):
    code, output = primus(
        clone,
        tmp_path / "team" / "wrong",
        corpus,
        *SIX,
        ranks=1,
        words=("--moe_router_topkk", "2", "--mock_data", "true"),
    )
    assert code != 0
    assert (
        "moe_router_topkk=2: neither Megatron nor Primus nor the plugin reads it. Allowed: moe_router_topk is the "
        "nearest" in output
    )
    assert "mock_data=true: " in output and "Allowed: false. Fix: mock_data: false in the experiment." in output
    assert not (tmp_path / "team" / "wrong" / "checkpoints").exists()


def test_the_supervisor_starts_it_again(clone, tmp_path, corpus):
    """`zaya aegis run` around torchrun around Primus, as around primus-cli: a rank is killed, and the losses are those
    of a run that was left alone. Its data are read by processes, which must not keep it from leaving.
    """
    overrides = ("stage.train_iters=200", "checkpoint.save_interval=50", "stage.eval_interval=200")
    overrides = (*overrides, "data.num_workers=1")
    straight, run_dir, journal = tmp_path / "team" / "straight", tmp_path / "team" / "guest", tmp_path / "aegis"
    code, output = primus(clone, straight, corpus, *overrides, ranks=2)
    assert code == 0, output[-6000:]
    environment, command = exported(clone, run_dir, corpus, *overrides, ranks=2)
    temporary, log = tmp_path / "tmp", tmp_path / "supervisor.log"
    temporary.mkdir()
    options = ["--ranks-per-node", "2", "--output", str(journal)]
    with log.open("w") as file:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "zaya_plugin.cli", "aegis", "run", *options, "--", *command],
            cwd=run_dir,
            env={**environment, "TMPDIR": str(temporary)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        kill_supervised_rank(supervisor, temporary, 1, 60, log)
        assert supervisor.wait(600) == 0, log.read_text()[-6000:]
    finally:
        supervisor.terminate()
        supervisor.wait()
    rows = lines(journal / "journal.jsonl")
    assert [(row["cause"], row["rank"]) for row in rows if row["kind"] == "diagnosis"] == [("sigkill", 1)]
    assert [row["action"] for row in rows if row["kind"] == "decision"] == ["restart"]
    assert [row["after"] for row in rows if row["kind"] == "first_step"] == [0, 50]
    guest, whole = scalars(run_dir / "tensorboard"), scalars(straight / "tensorboard")
    assert guest["lm loss"] == whole["lm loss"] and set(guest["lm loss"]) == set(range(1, 201))
