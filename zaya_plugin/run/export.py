# SPDX-License-Identifier: Apache-2.0
"""The command `zaya export`: a recipe in the form of another host. No torch import but for Megatron's own parser."""

from __future__ import annotations

EXPORT_HELP = """\
zaya export: a recipe in the form of another host, docs/hosts.md

  zaya export megatron experiment=<name> [key=value ...] [--config-dir DIR]
  zaya export primus   experiment=<name> [key=value ...] [--curriculum] [--spec] [--config-dir DIR]

megatron writes <run_dir>/megatron.args, the words for Megatron-LM's own pretrain_gpt.py; primus writes <run_dir>/primus.yaml, an
experiment for primus-cli: for the stage zaya_pretrain or, with --spec, for stock Primus. --curriculum writes one for each stage, in
<run_dir>/<stage>. recipe.yaml goes beside each; the plugin reads it when the host has started. What the host does not carry out is
printed, and what it cannot do is refused. `megatron` asks the parser of the Megatron that is installed: use the host's Python.

EXAMPLES
  zaya export megatron experiment=cpu_demo run_dir=runs/guest
  zaya export primus experiment=zaya1_base cluster=mi300x_8 data.path=data/corpus run_dir=runs/zaya1
  zaya export primus --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/corpus run_dir=runs/zaya1
"""
HOSTS = ("megatron", "primus")


def main(argv: list[str]) -> int:
    """Returns the exit code; raises ValueError for what a user can mend."""
    if not argv or any(flag in argv for flag in ("-h", "--help")):
        print(EXPORT_HELP, end="")
        return 0 if argv else 2
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.run import megatron_export
    from zaya_plugin.run.commands import overrides_of, without_flag

    host, argv = argv[0], argv[1:]
    if host not in HOSTS:
        raise ValueError(f"zaya export {host}: allowed: {', '.join(HOSTS)}")
    argv, whole = without_flag(argv, "--curriculum")
    argv, spec = without_flag(argv, "--spec")
    if host == "megatron" and (whole or spec):
        raise ValueError(
            "zaya export megatron: --curriculum and --spec are for primus; export each stage by its experiment"
        )
    overrides = overrides_of(argv, f"export {host}")
    if whole:
        from zaya_plugin.run.curriculum import compose_curriculum

        recipes = [stage.recipe for stage in compose_curriculum(overrides).stages]
    else:
        recipes = [compose(overrides)]
    world_sizes = [recipe.nproc or recipe.cluster.num_nodes * recipe.cluster.gpus_per_node for recipe in recipes]
    for recipe, ranks in zip(recipes, world_sizes, strict=True):  # all, before anything is written
        validate(recipe, ranks)
    for recipe, ranks in zip(recipes, world_sizes, strict=True):
        if host == "megatron":
            print(megatron_export.instructions(recipe, ranks, megatron_export.export_megatron(recipe)))
        else:
            from zaya_plugin.run.primus_export import export_primus

            print(export_primus(recipe, ranks, spec))
    return 0
