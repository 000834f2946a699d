"""Where `check` says that transformers uses a family's scales, and nowhere else, it holds them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.check import check_folder
from fp8calib.engines.replay.folder import open_folder
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.formats.write import write_table
from fp8calib.model.geometry import Role
from fp8calib.model.geometry_from_config import read_geometry
from fp8calib.numerics.formats import E4M3FN
from tests.architectures.families import FAMILIES, save
from tests.kit.minutes import in_minutes

pytest.importorskip("compressed_tensors")

ATTACHED = ("cohere2", "jamba", "llama4_text", "nemotron_h", "olmo2", "phi", "phimoe")
UNATTACHED = ("bloom", "dbrx", "gpt_bigcode", "gptj", "mpt", "persimmon")
FEW = ("jamba", "llama4_text", "nemotron_h", "bloom", "dbrx", "gpt_bigcode")


def _export(family: str, folder: Path) -> Path:
    """Write an overlay in which every layer's k is a quarter and its v a half of its number."""
    save(family, FAMILIES[family], folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    geometry = read_geometry(folder / "model", config)
    scales = {
        attention.site(role): Scale(
            values=torch.tensor([part * (layer.index + 1)]), source="observed"
        )
        for layer, attention in geometry.attentions()
        for role, part in ((Role.K, 0.25), (Role.V, 0.5))
    }
    table = ScaleTable(geometry=geometry, fmt=E4M3FN, tp=1, per_head=False, scales=scales)
    with Checkpoint.open(folder / "model") as source:
        write_table(table, "kv-overlay", folder / "out", source=source)
    return folder / "out"


@pytest.mark.parametrize(
    "family", [*FEW, *in_minutes(*(each for each in ATTACHED + UNATTACHED if each not in FEW))]
)
def test_what_is_said_of_a_family_is_what_transformers_does(family: str, tmp_path: Path) -> None:
    folder = _export(family, tmp_path)
    opened = open_folder(folder)
    geometry = read_geometry(folder, opened.config)
    report = check_folder(opened, geometry, ["transformers"], 1)["transformers"]

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )

    held = {}
    for layer, attention in geometry.attentions():
        module = model.get_submodule(attention.module)
        if hasattr(module, "k_scale"):
            held[layer.index] = (module.k_scale.item(), module.v_scale.item())
    used = {row.layer: (row.k.value, row.v.value) for row in report.layers if row.ok}
    assert held == used
    assert all(layer.ok for layer in report.layers) is (family in ATTACHED)
    is_broken = any("experts" in name for name in loading["missing_keys"])
    assert is_broken is (report.weights is not None and "reports it MISSING" in report.weights.why)
    assert is_broken is (family == "llama4_text")
    assert report.allow_suspicious().ok is (family in ATTACHED and not is_broken)
