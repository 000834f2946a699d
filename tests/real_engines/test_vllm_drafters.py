"""Drafters that vLLM runs beside a model: their attention layers are sites of their own."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fp8calib.calibration.calibration_stats import RunStats, load_stats_file
from fp8calib.model.geometry import Role, Site
from tests.kit.checkpoints import change_config
from tests.plugins.vllm.vllm_cases import CASES, SEQ_LEN, make_rows
from tests.real_engines.test_vllm_calibration import save_served
from tests.real_engines.vllm_job import Calibrator

ROWS = [torch.tensor([row["input_ids"]]) for row in make_rows()]
Tensors = dict[str, torch.Tensor]


def run(calibrate: Calibrator, model: Path, data: Path, drafter: str) -> RunStats:
    """Calibrate with a drafter of vLLM; it is to draft three tokens, and drafts one."""
    out, option = (
        model.with_name("out"),
        f"speculative_config={{num_speculative_tokens: 3, {drafter}}}",
    )
    size = ["--data", data, "--seq-len", SEQ_LEN, "--no-pack", "--dtype", "float32"]
    code, printed = calibrate(model, out, *size, "--format", "kv-scales", "--engine-option", option)
    assert code == 0, printed
    return load_stats_file(out)


def save(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_eagle_sees_the_successor_of_each_token(
    calibrate: Calibrator, data: Path, tmp_path: Path
) -> None:
    model, folder = CASES["llama"].save_model(tmp_path / "model"), tmp_path / "eagle"
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    tensors["fc.weight"] = torch.randn(width, 2 * width) * 0.05
    folder.mkdir()
    save(folder, tensors)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    change_config(folder, num_hidden_layers=1)

    stats = run(calibrate, model, data, f"method: eagle, model: {folder}")

    assert stats.header.engine.endswith(", drafter eagle")
    for role, expected in compute_eagle(model, tensors).items():
        found = stats.sites[Site("layers.0.self_attn", role)]
        assert found.count == sum(ids.numel() for ids in ROWS)
        torch.testing.assert_close(found.amax, expected, rtol=1e-5, atol=0.0)


@torch.no_grad()
def compute_eagle(folder: Path, tensors: Tensors) -> dict[Role, torch.Tensor]:
    """Compute the amax of K and V with transformers' parts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[Role, list[torch.Tensor]] = {Role.K: [], Role.V: []}
    for ids in ROWS:
        hidden = model.model(ids).last_hidden_state
        following = torch.cat([ids[:, 1:], model.lm_head(hidden[:, -1:]).argmax(-1)], 1)
        both = torch.cat([model.model.embed_tokens(following), hidden], -1)
        x = both @ tensors["fc.weight"].T
        k, v = (
            (x @ tensors[f"layers.0.self_attn.{role}_proj.weight"].T).unflatten(-1, (-1, 32))
            for role in "kv"
        )
        places = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
        _, k = apply_rotary_pos_emb(k, k, *places, unsqueeze_dim=2)
        seen[Role.K].append(k.abs().amax((0, 1, 3)))
        seen[Role.V].append(v.abs().amax((0, 1, 3)))
    return {role: torch.stack(each).amax(0) for role, each in seen.items()}


def test_the_layer_for_multi_token_prediction_has_its_name_in_the_checkpoint(
    calibrate: Calibrator, data: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_served("glm4_moe", model)
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    width, layer = embedding.shape[1], "model.layers.2."
    last = {name: each for name, each in tensors.items() if name.startswith("model.layers.1.")}
    tensors |= {name.replace(".1.", ".2.", 1): each.clone() for name, each in last.items()}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{norm}.weight"] = torch.ones(width)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{layer}{name}.weight"] = embedding.clone()
    tensors[f"{layer}eh_proj.weight"] = torch.randn(width, 2 * width) * 0.05
    save(model, tensors)
    change_config(model, num_nextn_predict_layers=1)

    stats = run(calibrate, model, data, "method: mtp")

    for role in (Role.K, Role.V, Role.Q):
        assert stats.sites[Site(f"{layer}self_attn", role)].count == sum(map(torch.numel, ROWS))
    assert not any(each.site.startswith("model.layers.2") for each in stats.header.skipped)
