# SPDX-License-Identifier: Apache-2.0
"""`--spec zaya_plugin.spec zaya_block` in Megatron's own script: the model of `zaya train`, and the guest in its loop."""

import importlib
import sys

import pytest
import torch

from tests.megatron_rank import single_rank  # noqa: F401  (a fixture of every test of this file)
from tests.running import MICRO
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.data.sources import DataSources
from zaya_plugin.run import megatron_export

MODULE = "zaya_plugin.spec"
HOOKS = (
    "setup_model_and_optimizer",
    "finalize_model_grads",
    "get_megatron_optimizer",
    "save_checkpoint",
    "load_checkpoint",
)


@pytest.fixture
def move_in(monkeypatch):
    """move_in(words) parses exported words as pretrain_gpt.py does and imports the spec; everything is put back
    afterwards.
    """
    from megatron.training import arguments, global_vars, training

    for name in HOOKS:
        monkeypatch.setattr(training, name, getattr(training, name))
    monkeypatch.setattr(
        arguments, "set_global_variables", lambda args: monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    )

    def start(words, padded_vocab_size=192):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        args = arguments.parse_and_validate_args()
        args.padded_vocab_size = padded_vocab_size
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        spec = importlib.import_module(MODULE)
        monkeypatch.delitem(sys.modules, MODULE)
        return args, spec

    return start


@pytest.fixture
def host(move_in, tmp_path):
    """host(overrides) moves into the command that is exported for them."""

    def start(*overrides, recipe_file=True, words=()):
        from zaya_plugin.hosts.command_line import command_line

        recipe = compose([*MICRO, "data.path=x", f"run_dir={tmp_path / 'run'}", *overrides])
        (tmp_path / "run").mkdir(exist_ok=True)
        if recipe_file:
            save_recipe(recipe, tmp_path / "run" / "recipe.yaml")
        lines = [["--spec", *megatron_export.SPEC], *command_line(values(recipe)), list(words)]
        return move_in([word for line in lines for word in line])

    return start


def values(recipe):
    from zaya_plugin.data import blend as prefixes

    found, names = prefixes.resolve_blend, prefixes.content_name
    prefixes.resolve_blend, prefixes.content_name = (lambda blend, split: ([blend], None)), (lambda prefixes: "name")
    try:
        return megatron_export.host_arguments(recipe, DataSources("x", "y", "t", "cache"))
    finally:
        prefixes.resolve_blend, prefixes.content_name = found, names


def seeded():
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)


@pytest.mark.parametrize("normalization", ["RMSNorm", pytest.param("LayerNorm", marks=pytest.mark.slow)])
def test_megatron_builds_the_model_of_zaya_train(host, monkeypatch, normalization):
    norms = f"model.normalization={normalization}"
    args, spec = host(norms, "optim=muon", "optim.z_loss=1e-3", "model.router_init_std=0.3", "model.balancing_lr=0.02")
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from zaya_plugin.hosts.stage_model import model_config
    from zaya_plugin.model.build import build_zaya_model
    from zaya_plugin.model.residual import norm_class

    monkeypatch.setitem(sys.modules, MODULE, spec)

    def setup(model_type, *, model_provider_func, cfg_container):
        """As Megatron's: it calls the function where the configuration has no model."""
        assert cfg_container.model is None and cfg_container.rng.seed == args.seed
        return model_provider_func(pre_process=True, post_process=True, config=None, pg_collection=None)

    container = pretrain_cfg_container_from_args(
        args, gpt_config_from_args(args)
    )  # imports the spec, as the script does
    assert container.model.transformer_layer_spec is spec.zaya_block
    seeded()
    theirs = spec.our_setup(setup, None, cfg_container=container)
    seeded()
    ours = build_zaya_model(model_config(args), vocab_size=192, max_sequence_length=32, rotary_base=args.rotary_base)
    state = {name: value for name, value in ours.state_dict().items() if value is not None}
    assert {name: value.shape for name, value in theirs.state_dict().items() if value is not None} == {
        n: v.shape for n, v in state.items()
    }
    assert all(torch.equal(theirs.state_dict()[name], value) for name, value in state.items())
    assert type(theirs.decoder.final_layernorm) is norm_class(spec.guest.config)
    assert theirs.config.normalization == normalization
    assert theirs.decoder.layers[0].config.balancing_lr == 0.02, (
        "from the recipe, since Megatron has no argument for it"
    )
    ids = torch.randint(1, 192, (2, 32), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="this script builds its model in another way"):
        spec.zaya_block(None)
    for model in (theirs, ours):
        model(ids, torch.arange(32).expand(2, -1), None, labels=ids.roll(-1, 1)).mean().backward()
    gradients = dict(ours.named_parameters())
    assert all(torch.equal(p.grad, gradients[name].grad) for name, p in theirs.named_parameters())
    # marked before the host lays out its buffers: what `zaya train` marks, under the same names
    from zaya_plugin.optim.parameter_role import role_of
    from zaya_plugin.training.optimizer import assign_optimizers

    assign_optimizers(compose([*MICRO, "optim=muon"]), ours)
    marks = [
        {n: role_of(p).matrices for n, p in model.named_parameters() if role_of(p).matrices} for model in (theirs, ours)
    ]
    assert marks[0] == marks[1] and len(marks[0]) > 100


def test_the_guest_moves_into_the_loop(host):
    from megatron.training import training

    args, spec = host("model.router_hidden_size=16")
    guest = spec.guest
    for name, method in (
        ("finalize_model_grads", "finalize"),
        ("get_megatron_optimizer", "optimizer"),
        ("save_checkpoint", "save_and_prune"),
        ("load_checkpoint", "load"),
    ):
        assert getattr(training, name).func == getattr(guest, method)
    assert training.setup_model_and_optimizer.func is spec.our_setup
    assert args.router_hidden_size == 16 and args.load is None and args.zaya["recipe"] == "cpu_demo"
    assert guest.differences == {}


def test_an_argument_that_was_appended_wins_and_is_named(host, capsys):
    _, spec = host(words=("--lr", "0.125"))
    assert spec.guest.differences == {"lr": (0.125, 0.008)}
    assert "zaya: --lr is 0.125 in the host and 0.008 in the recipe" in capsys.readouterr().out


def test_a_host_that_builds_another_optimizer_is_stopped(host):
    _, spec = host("optim=muon")
    with pytest.raises(SystemExit, match="^zaya: optim.name=muon: the host has built another optimizer"):
        spec.guest.finalize(None, [])


def test_ranks_with_other_kernels_are_stopped_before_the_first_step(host, monkeypatch):
    """Simulates a second rank, whose Newton-Schulz fell back."""
    from zaya_plugin.training import kernels

    def with_another(mine):
        chosen, *others = mine
        return [mine, (chosen | {"newton_schulz": ("triton",)}, *others)]

    monkeypatch.setattr(kernels, "gathered", with_another)
    _, spec = host()
    said = r"zaya: cluster.kernels=auto: ranks chose .*newton_schulz \(reference on rank 0; triton on rank 1\)"
    with pytest.raises(SystemExit, match=said):
        spec.guest.optimizer(lambda *unused: pytest.fail("the optimizer was built"), None, [])


def test_a_load_that_begins_from_the_start_is_stopped(host, monkeypatch):
    _, spec = host()
    guest = spec.guest
    guest.resumed_at = 5
    with pytest.raises(SystemExit, match="holds step 5 and the host would start from step 0"):
        guest.load(lambda *unused: (0, 0), None, None, None)
    assert guest.load(lambda *unused: (5, 12), None, None, None) == (5, 12)


def test_without_its_recipe_the_run_ends_with_a_message(host):
    with pytest.raises(SystemExit, match="zaya: .*recipe.yaml: the recipe does not exist.*zaya export megatron"):
        host(recipe_file=False)


def test_a_recipe_of_another_version_is_refused(host, monkeypatch, tmp_path):
    monkeypatch.setattr("zaya_plugin.config.compose.__version__", "0.0.9")  # writes
    import zaya_plugin.config.compose as compose_module

    check = compose_module.check_own_version

    def installed(path, export):
        monkeypatch.setattr(compose_module, "__version__", "0.1.0")  # reads
        check(path, export)

    monkeypatch.setattr(compose_module, "check_own_version", installed)
    fix = f"Fix: zaya export megatron experiment=<name> run_dir={tmp_path / 'run'}"
    with pytest.raises(SystemExit, match=f"was written by zaya_plugin 0.0.9. Allowed: zaya_plugin 0.1.0.*{fix}"):
        host()


def test_a_stage_before_that_is_not_finished_ends_the_run(host, tmp_path):
    with pytest.raises(SystemExit, match="handover.from_run=.*holds no run"):
        host(f"handover.from_run={tmp_path / 'nothing'}")


def test_the_guest_takes_the_lock_of_the_run(host, tmp_path):
    from zaya_plugin.checkpoint.run_lock import RunLock

    lock = RunLock.take({"run_dir": tmp_path / "run"})
    with pytest.raises(SystemExit, match=f"zaya: run_dir={tmp_path / 'run'}: a run is writing there: process "):
        host()
    lock.release()
    _, spec = host()
    with pytest.raises(ValueError, match="a run is writing there"):
        RunLock.take({"run_dir": tmp_path / "run"})
    saved = []
    spec.guest.lifecycle.after_save = saved.append
    spec.guest.save_and_prune(lambda *unused: saved.append("host"), 3)
    for file in (tmp_path / "run").glob("run.lock.*"):
        file.unlink()  # another start has taken over
    spec.guest.lifecycle.lock._checked = 0.0
    with pytest.raises(SystemExit, match="its lock was removed"):
        spec.guest.save_and_prune(lambda *unused: saved.append("host"), 4)
    assert saved == ["host", 3]


def test_the_guest_refuses_another_recipe_than_its_checkpoints(host, tmp_path, monkeypatch):
    from tests.checkpoint_files import pretend_checkpoint
    from zaya_plugin.checkpoint import on_disk
    from zaya_plugin.config.resume import values_of

    pretend_checkpoint(tmp_path / "run", 5)
    before = compose([*MICRO, "data.path=x", f"run_dir={tmp_path / 'run'}", "seed=5"])
    facts = {"run_id": "one", "recipe_values": values_of(before)}
    monkeypatch.setattr(on_disk, "check_same_model", lambda *unused: None)
    monkeypatch.setattr(on_disk, "saved_arguments", lambda *unused: type("Saved", (), {"zaya": facts}))
    with pytest.raises(SystemExit, match="zaya: seed=1234: the run in .* was trained with 5; .* Fix: seed=5"):
        host()
