"""vLLM's file of scales for vision towers: numbers by hand, and what vLLM would take silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8calib.dialects.vision import (
    VisionScale,
    VisionScales,
    compute_vision_scales,
    read_vision_scales,
    write_vision_scales,
)
from fp8calib.errors import ExportError, ModelError
from fp8calib.fp8.formats import E4M3FNUZ
from fp8calib.stats.calibration_origin import CalibrationOrigin
from tests import zoo
from tests.cli.program import fail, succeed

NAMES = ("visual.blocks.0.attn.attn", "visual.blocks.1.attn.attn")
FIRST = {"q": 0.5, "k": 0.25, "v": 1.0}
SECOND = {"q": 2.0, "k": 0.125, "v": 0.0625}
LAYERS = {NAMES[0]: VisionScale(**FIRST), NAMES[1]: VisionScale(**SECOND)}
DOCUMENT = {NAMES[0]: FIRST, NAMES[1]: SECOND}


def save(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_the_amax_is_the_largest_value_that_is_not_clamped() -> None:
    made = compute_vision_scales({NAMES[0]: (224.0, 112.0, 448.0), NAMES[1]: (896.0, 56.0, 28.0)})

    assert made == LAYERS


def test_headroom_and_the_range_of_amd_widen_the_scales() -> None:
    amaxes = {NAMES[0]: (224.0, 112.0, 448.0)}

    assert compute_vision_scales(amaxes, headroom=1.5)[NAMES[0]] == VisionScale(
        q=0.75, k=0.375, v=1.5
    )
    assert compute_vision_scales(amaxes, fmt=E4M3FNUZ)[NAMES[0]] == VisionScale(q=1.0, k=0.5, v=2.0)


@pytest.mark.parametrize("amax", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_amax_is_refused_by_layer_and_role(amax: float) -> None:
    with pytest.raises(ExportError, match=rf"{NAMES[0]}: {amax} is no amax of k"):
        compute_vision_scales({NAMES[0]: (1.0, amax, 1.0)})


def test_the_smallest_scale_has_a_finite_reciprocal() -> None:
    made = compute_vision_scales({NAMES[0]: (1e-40, 1.0, 1.0)})

    assert made[NAMES[0]].q == 2.0**-126


def test_the_written_file_is_that_of_vllm_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "vision.json"

    write_vision_scales(path, VisionScales(layers=LAYERS))

    assert json.loads(path.read_text()) == DOCUMENT
    assert read_vision_scales(path, layers=NAMES) == VisionScales(layers=LAYERS)


def test_the_origin_is_recorded_where_vllm_skips_it(tmp_path: Path) -> None:
    path = tmp_path / "vision.json"
    origin = CalibrationOrigin.of_model("a" * 64)

    write_vision_scales(path, VisionScales(layers=LAYERS, origin=origin))

    assert json.loads(path.read_text()) == {"_fp8calib": {"model": "a" * 64}, **DOCUMENT}
    found = read_vision_scales(path)
    assert found.layers == LAYERS
    assert found.origin is not None
    assert found.origin.model == "a" * 64


@pytest.mark.parametrize(
    "document",
    [
        {"layers": DOCUMENT},
        {"layers": DOCUMENT, "_comment": "by hand"},
        {name: {f"{role}_scale": v for role, v in each.items()} for name, each in DOCUMENT.items()},
    ],
    ids=["nested", "comment", "long keys"],
)
def test_the_other_forms_that_vllm_takes_are_read(document: Any, tmp_path: Path) -> None:
    assert read_vision_scales(save(tmp_path / "s.json", document)).layers == LAYERS


def edit(**changes: Any) -> dict[str, Any]:
    return {NAMES[0]: {**FIRST, **changes}, NAMES[1]: SECOND}


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({NAMES[0]: {"q": 1.0, "k": 1.0}, NAMES[1]: SECOND}, "0.attn.attn: there is no scale of v"),
        (edit(q=None), "q is None, not a number"),
        (edit(q="0.5"), "q is '0.5', not a number"),
        (edit(q=True), "q is True, not a number"),
        (edit(q=[0.5]), r"q is \[0.5\], not a number"),
        (edit(q=0), "q: 0.0 is not a scale"),
        (edit(q=-1.0), "q: -1.0 is not a scale"),
        (edit(q=float("nan")), "q: nan is not a scale"),
        (edit(q=float("inf")), "q: inf is not a scale"),
        (edit(q=1e-40), "q: 1e-40 is too small for a scale"),
        (edit(q=1e39), "q: inf is not a scale"),
        (edit(q=10**400), "q is too large for a scale"),
        (edit(p=1.0), "unknown keys: 'p'"),
        (edit(q_scale=1.0), "q and q_scale say the same"),
        ({**DOCUMENT, "visual.blocks.2.attn.attn": 1.0}, "2.attn.attn: 1.0 is not an object"),
        ({"layers": DOCUMENT, **DOCUMENT}, "vLLM reads `layers` alone"),
        ({"kv_cache": {}}, "there are no scales of a vision tower"),
        (f'{{"{NAMES[0]}": {json.dumps(FIRST)}, "{NAMES[0]}": {{}}}}', "occurs twice"),
        ({**DOCUMENT, "_fp8calib": {"model": "short"}}, "_fp8calib"),
    ],
)
def test_what_is_wrong_is_refused_with_its_layer(document: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=fault):
        read_vision_scales(save(tmp_path / "s.json", document))


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ([*NAMES, "visual.blocks.2.attn.attn"], "no scales for visual.blocks.2.attn.attn"),
        (NAMES[:1], f"the model has no attention layer {NAMES[1]}"),
    ],
)
def test_the_layers_are_those_of_the_model(names: list[str], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=fault):
        read_vision_scales(save(tmp_path / "s.json", DOCUMENT), layers=names)


def test_show_lists_the_scales_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "vision.json"
    origin = CalibrationOrigin.of_model("a" * 64)
    write_vision_scales(path, VisionScales(layers=LAYERS, origin=origin))

    assert succeed("show", path, "--json").json["scales"] == {
        f"{name}.{role}": [value]
        for name, each in DOCUMENT.items()
        for role, value in sorted(each.items())
    }


def test_where_kv_scales_are_asked_for_the_file_is_known(tmp_path: Path) -> None:
    path = save(tmp_path / "vision.json", DOCUMENT)

    zoo.save("llama", tmp_path / "model")

    message = fail(4, "check", path, "--model", tmp_path / "model")

    assert "there are no KV scales" in message
    assert "--mm-encoder-fp8-scale-path" in message
