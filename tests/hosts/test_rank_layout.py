# SPDX-License-Identifier: Apache-2.0
"""Test the layout of runs of which only some ranks are built: groups, parts of the model, shards that hold everything
once. The ranks are built in forks, since Megatron's groups belong to a process.
"""

import contextlib
import io
import json
import multiprocessing
from dataclasses import replace

import pytest

from zaya_plugin import cli
from zaya_plugin.commands.plan_report import layout_lines
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.hosts import rank_layout
from zaya_plugin.plan import parallelism, recipe_plan

DEMO = ["experiment=cpu_demo", "data.path=none", "optim=muon", "parallel.overlap_grad_reduce=true"]
SMALL = ["model.hidden_size=64", "model.kv_channels=8", "model.moe_ffn_hidden_size=32", "model.num_layers=4"]


def _forget_groups():
    """Forget the parent's groups in a fork. They stay alive, because their threads cannot be ended there."""
    from megatron.core import parallel_state
    from megatron.training.global_vars import unset_global_variables
    from torch.distributed import ProcessGroup, distributed_c10d

    unset_global_variables()
    kinds = ProcessGroup, parallel_state.GlobalMemoryBuffer, list
    groups = {name: value for name, value in vars(parallel_state).items() if isinstance(value, kinds)}
    vars(parallel_state).update(dict.fromkeys(groups))
    distributed_c10d.kept = groups, distributed_c10d._world
    distributed_c10d._world = distributed_c10d._World()


def _build(pipe, recipe, world, ranks, broken):
    _forget_groups()
    if broken:
        from zaya_plugin.optim.sharding.distributed import BufferLayout

        whole = BufferLayout.pieces
        BufferLayout.pieces = lambda layout, parameter: whole(layout, parameter)[:1]  # a piece is lost
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        rank_layout.main([recipe, str(world), *map(str, ranks)])
    pipe.send(lines.getvalue())


def built(tmp_path, words, world, broken=False):
    """Return the ranks that a run's check builds, with the shape and the layout of its recipe."""
    recipe = compose([*DEMO, *SMALL, *words])
    layout, shape = recipe_plan.layout_of(recipe, world), recipe_plan.shape_of(recipe)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    ranks = [0] if broken else parallelism.ranks_to_build(layout, world)
    child = fork.Process(target=_build, args=(theirs, str(tmp_path / "recipe.yaml"), world, ranks, broken))
    child.start()
    theirs.close()
    lines = ours.recv()
    child.join()
    return [json.loads(line) for line in lines.splitlines()], shape, layout


def _with_full_shard(rank, shape):
    """The rank's description with the largest matrix and one element more than a share in the experts' fullest shard."""
    (row,) = (row for row in rank["buffers"] if row["name"] == "experts")
    most = row["elements"] // row["shards"] + 2 * shape.moe_ffn_hidden_size * shape.hidden_size + 1
    changed = {**row, "shard_elements": [most, *row["shard_elements"][1:]]}
    return {**rank, "buffers": [changed if buffer is row else buffer for buffer in rank["buffers"]]}


def test_shards_of_instances_are_complete(tmp_path):
    words = ["parallel.num_distributed_optimizer_instances=4", "stage.global_batch_size=64", "nproc=16"]
    ranks, shape, layout = built(tmp_path, words, 16)
    assert [rank["rank"] for rank in ranks] == [0, 7, 15] and parallelism.faults_of(ranks, shape, layout) == []
    assert [[row["shard"] for row in rank["buffers"]] for rank in ranks] == [[0, 0], [3, 3], [3, 3]]
    assert {row["shards"] for rank in ranks for row in rank["buffers"]} == {4} and ranks[1]["groups"]["data"] == [16, 7]
    experts = next(row for row in ranks[0]["buffers"] if row["name"] == "experts")
    assert experts["shard_elements"][:2] == [experts["elements"] // 4] * 2 and experts["cut"] == 0
    _, by_rank, buffers, verdict = layout_lines(ranks, [], 16, 1000)
    assert "rest 3 of 4, experts 3 of 4" in by_rank.splitlines()[2] and "fullest shard / mean" in buffers
    assert buffers.splitlines()[2].split()[4] == "1.00", "the fullest shard of the experts"
    assert verdict.endswith("every one of 1,000 parameters is in exactly one shard of each instance")
    # a shard with more than a share and a whole matrix
    (fault,) = parallelism.faults_of([_with_full_shard(ranks[0], shape), *ranks[1:]], shape, layout)
    assert fault.startswith("rank 0, experts: the fullest shard has ") and fault.endswith(" of the mean")
    # a piece that is lost, and a part of the model that no rank has
    faults = parallelism.faults_of(*built(tmp_path, words, 16, broken=True))
    assert any("are not held exactly once" in line for line in faults)
    without = [{**rank, "parameters": {**rank["parameters"], "experts": 7}} for rank in ranks]
    (fault,) = parallelism.faults_of(without, shape, layout)[-1:]
    assert layout_lines(without, [fault], 16, 1000)[-1].startswith("WRONG: all parts of the model")


@pytest.mark.slow
def test_parts_of_expert_and_pipeline_parallel_ranks_are_the_whole_model(tmp_path):
    words = ["parallel.expert_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2", "nproc=8"]
    ranks, shape, layout = built(tmp_path, [*words, "stage.global_batch_size=16"], 8)
    assert [rank["rank"] for rank in ranks] == [0, 1, 3, 4, 5, 7] and parallelism.faults_of(ranks, shape, layout) == []
    assert [rank["groups"]["expert"] for rank in ranks[:2]] == [[2, 0], [2, 1]] and ranks[3]["tied"] > 0
    one_stage = parallelism.faults_of(ranks[:3], shape, replace(layout, pipeline=1))
    assert len(one_stage) == 1 and "all parts of the model have" in one_stage[0]


@pytest.mark.slow
def test_the_layout_of_1024_ranks(capsys, tmp_path):
    output = tmp_path / "plan.json"
    words = ["experiment=zaya1_base", "cluster=mi300x_128x8", "--layout", f"--output={output}"]
    assert cli.main(["plan", "run", *words]) == 0
    printed, ranks = capsys.readouterr().out, json.loads(output.read_text())["layout"]
    assert [rank["rank"] for rank in ranks] == [0, 511, 1023]
    assert "complete: every one of 8,840,488,784 parameters is in exactly one shard" in printed
    experts = [next(row for row in rank["buffers"] if row["name"] == "experts") for rank in ranks]
    assert [(row["shard"], row["shards"]) for row in experts] == [(0, 64), (63, 64), (63, 64)]
    assert all(row["shard_elements"] == [125_829_120] * 3 and row["cut"] == 0 for row in experts)
