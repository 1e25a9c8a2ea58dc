# SPDX-License-Identifier: Apache-2.0
"""The model card of an export: what the model is, the run that trained it, what was changed and what was verified."""

from __future__ import annotations

from pathlib import Path

from zaya_plugin.ground.whole_file import write_whole

NAME = "README.md"
VERIFIED, NOTHING = "## Verified", "Nothing: the export ran without --verify."
READ_BY = {
    "native": "transformers 5.13 and later, and vLLM with its ZAYA class",
    "legacy": "SGLang 0.5.23; transformers 5.13 and later do not read this layout",
    "smoe": "Zyphra's SMoE classes, whose router's norm takes 1e-6 for epsilon; their converter to native drops it",
}

LIBRARY = {"native": "library_name: transformers", "legacy": "library_name: sglang", "smoe": "library_name: vllm"}


def text(export) -> str:
    """Return the card of an export (exporting.Export) that is not verified."""
    model, arguments = export.trained.model, export.trained.arguments
    run = getattr(arguments, "zaya", {})
    lineage = run.get("lineage")
    lines = [
        "---",
        LIBRARY[export.layout],
        "pipeline_tag: text-generation",
        "---",
        f"# {run.get('recipe') or 'ZAYA1'}",
        "",
        f"A ZAYA1 model in the {export.layout} layout, read by {READ_BY[export.layout]}.",
        "",
        "| | |",
        "|---|---|",
        f"| layers, width | {model.num_layers}, {model.hidden_size} |",
        f"| query heads, key/value heads, channels | {model.num_attention_heads}, {model.num_query_groups}, "
        f"{model.kv_channels} |",
        f"| experts, width | {model.num_experts}, {model.moe_ffn_hidden_size} |",
        f"| rows of the vocabulary | {model.vocab_size} |",
        f"| positions, RoPE base | {model.max_position_embeddings}, {model.rotary_base} |",
        f"| weights | {len(export.tensors)} tensors, {export.config['dtype']} |",
        "",
        "## Lineage",
        "",
        f"- checkpoint {export.trained.folder.name}, written by zaya_plugin {run.get('version', 'unknown')}",
        f"- recipe {run.get('recipe')}, run {run.get('run_id')}",
    ]
    if imported := export.trained.imported:
        lines.append(f"- imported from {imported['source']} ({imported['layout']})")
    if lineage:
        lines.append("- stage before: " + ", ".join(f"{name} {value}" for name, value in lineage.items()))
    lines += ["", "## What the export did", "", f"- {export.skip}", f"- {export.biases}"]
    lines += [f"- {change}" for change in export.changes] or [
        "- The weights are those of the checkpoint, in the dtype above."
    ]
    return "\n".join([*lines, "", VERIFIED, "", NOTHING]) + "\n"


def add_verified(folder: Path, results: list[str]) -> None:
    """Write the results of a verification into the card of `folder`."""
    path = folder / NAME
    write_whole(
        path,
        path.read_text().partition(VERIFIED)[0] + "\n".join([VERIFIED, "", *(f"- {line}" for line in results)]) + "\n",
    )
