"""KV scales and quantization configs that vLLM is asked about, in a whole Llama of two layers.

`goldens/vllm-0.32.0.json` has what vLLM held after loading each, or its error;
`scripts/test-engines --record` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import zoo
from tests.engines.check_handmade import INDEX, MODELOPT, PER_HEAD, PER_TENSOR, QUARK

GOLDENS = Path(__file__).with_name("goldens") / "vllm-0.32.0.json"
"""By case: `error`, or k and v as the two layers hold them; null for what is not finite."""
FILE, LATE_FILE = "model.safetensors", "kv_scales.safetensors"
# vLLM's CPU kernels want FP8 heads of a multiple of 32 elements: 4 heads of 32.
WIDTH = {"hidden_size": 128}
PATH = "model.layers.{}.self_attn"
NAN, INF = float("nan"), float("inf")
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
IGNORED = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]

Scales = Mapping[str, object]
"""By name in the attention layer, or whole with a leading `/`: a number, or a list of any depth."""
PAIR: Scales = {"k_scale": 0.25, "v_scale": 0.5}
PROJECTIONS: Scales = {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}
JOINED: Scales = {"qkv_proj.k_scale": 0.25, "qkv_proj.v_scale": 0.5}
OUTPUTS: Scales = {"k_proj.output_scale": 0.25, "v_proj.output_scale": 0.5}
HEADS = [[[0.25]], [[0.5]]]
PER_HEAD_PAIR: Scales = {"k_scale": HEADS, "v_scale": HEADS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint, and what `check` is to say of k and v in layers 0 and 1."""

    quantization: object = None
    """The `quantization_config`; none where None."""
    scales: Scales = field(default_factory=dict)
    later: Scales | None = None
    """The scales of layer 1, where they are others."""
    status: tuple[str, str] = ("used", "used")
    """Of k and v; `unknown` where `check` does not judge the config."""
    later_status: tuple[str, str] | None = None
    why: str = ""
    """A part of the reason, or of a fix."""
    side: object = None
    """ModelOpt's own file, hf_quant_config.json."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """More of config.json."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """More of the safetensors header."""
    index: str = ""
    """`without scales`: the scales are in a file that the index does not name; `without file`: the
    index names a file that does not exist."""
    dtype: torch.dtype = torch.float32
    """Of the scales."""

    def write(self, folder: Path) -> Path:
        """Write the checkpoint."""
        zoo.save("llama", folder, **WIDTH)
        scales = self.make_scales()
        tensors = load_file(folder / FILE)
        stored = tensors if self.index == "without scales" else tensors | scales
        save_file(stored, folder / FILE, metadata={"format": "pt", **self.metadata})
        if self.index:
            weight_map = dict.fromkeys(tensors, FILE)
            if self.index == "without scales":
                save_file(scales, folder / LATE_FILE, metadata={"format": "pt"})
            else:
                weight_map |= dict.fromkeys(scales, LATE_FILE)
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        config = json.loads((folder / "config.json").read_text()) | dict(self.config)
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        (folder / "config.json").write_text(json.dumps(config))
        if self.side is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.side))
        return folder

    def make_scales(self) -> dict[str, torch.Tensor]:
        """Make the tensors of the scales."""
        made = {}
        for index, scales in enumerate((self.scales, self.later)):
            for name, number in (self.scales if scales is None else scales).items():
                value = torch.tensor(number, dtype=torch.float32)
                whole = name[1:] if name.startswith("/") else f"{PATH.format(index)}.{name}"
                made[whole] = value.reshape(value.shape or (1,)).to(self.dtype)
        return made


FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": IGNORED}
UNQUANTIZED = {**MODELOPT, "ignore": ["*"]}
LISTED = {
    **QUARK,
    "exclude": [*IGNORED, "lm_head"],
    "export": {**QUARK["export"], "pack_method": "reorder"},
}
METHODS: Mapping[str, dict[str, Any]] = {
    "ct": dict(PER_TENSOR),
    "fp8": FP8,
    "modelopt": UNQUANTIZED,
    "quark": LISTED,
}
USED, REFUSED, DROPPED = (("used",) * 2, ("refused",) * 2, ("dropped",) * 2)
DEFAULTED, MISREAD, BAD, UNKNOWN = (
    (each,) * 2 for each in ("defaulted", "misread", "bad", "unknown")
)
TEXT_TARGETS = {"g": {"targets": "Linear", "weights": PER_TENSOR["kv_cache_scheme"]}}
SCHEME = {"type": "float", "num_bits": 8}
LAYERS = {"lm_head": {"quant_algo": "FP8"}}
MIXED = {**UNQUANTIZED, "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": None}
MIXED["quantized_layers"] = LAYERS
ROUNDED = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
ROUNDED |= {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "none"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
NO_GROUPS = {key: value for key, value in PER_HEAD.items() if key != "config_groups"}
ODD: Scales = {"k_scale": 0.0123456, "v_scale": 0.5}
STRAY_NAMES = (
    *("/model.layers.2.self_attn.k_scale", "/mtp.layers.0.self_attn.k_scale"),
    *("q_proj.q_scale", "k_proj.k_zero_point", "attn.kv_scale", "K_scale", "key_scale"),
    *("_k_scale", "k_cache_scale", "k_scales", "/model.layers.0.mlp.k_scale", "/k_scale"),
    *("/layers.0.self_attn.k_scale", "o_proj.input_scale", "o_proj.weight_scale", "input_scale"),
)
"""Names without a parameter."""
TRUTH_TABLE: Mapping[tuple[float, float], tuple[str, str]] = {
    (0.5, 0.25): ("used", "used"),
    (0.5, 0.0): ("used", "misread"),
    (0.5, -1.0): ("used", "misread"),
    (-0.5, -0.25): DEFAULTED,
    (0.0, 0.0): REFUSED,
    (0.0, 0.5): REFUSED,
    (-0.5, 0.5): REFUSED,
    (NAN, NAN): REFUSED,
    (INF, 0.25): ("bad", "used"),
    (2.0**-127, 2.0**-126): ("bad", "used"),
}
"""Of methods other than compressed-tensors (`quantization/kv_cache.py`)."""


def _list_cases() -> Iterator[tuple[str, Case]]:
    yield "plain", Case(status=DEFAULTED)
    bare = {"status": REFUSED, "why": "without a quantization_config"}
    for name in ("k_scale", "kv_scale", "q_scale"):
        yield f"bare {name}", Case(scales={name: 0.25}, **bare)
    yield "bare pair", Case(scales=PAIR, **bare)
    yield from _list_names()
    yield from _list_numbers()
    yield from _list_configs()
    yield from _list_files()


def _list_names() -> Iterator[tuple[str, Case]]:
    for method, config in METHODS.items():
        alone = "defaulted" if method == "ct" else "misread"
        maps_outputs = USED if method in ("fp8", "quark") else REFUSED
        v_alone = ("defaulted", "used") if method == "ct" else REFUSED
        for name, scales, status, why in (
            ("pair", PAIR, USED, ""),
            ("nothing", {}, DEFAULTED, ""),
            ("names of the inside", {"attn.k_scale": 0.25, "attn.v_scale": 0.5}, USED, ""),
            ("names of projections", PROJECTIONS, USED, ""),
            ("names of the joined projection", JOINED, USED, ""),
            ("names of outputs", OUTPUTS, maps_outputs, ""),
            ("kv_scale", {"kv_scale": 0.25}, ("used", "defaulted") if method == "ct" else USED, ""),
            ("k alone", {"k_scale": 0.25}, ("used", alone), ""),
            ("v alone", {"v_scale": 0.5}, v_alone, "" if method == "ct" else "asserts k_scale > 0"),
            ("probabilities", {**PAIR, "prob_output_scale": 0.5}, maps_outputs, ""),
            ("two names for one place", {**PAIR, "attn.k_scale": 0.25}, USED, ""),
        ):
            yield (
                f"{method} {name}",
                Case(quantization=config, scales=scales, status=status, why=why),
            )
    ct = {"quantization": PER_TENSOR}
    yield "ct names of hunyuan", Case(**ct, scales={"k_cache.scale": 0.25, "v_cache.scale": 0.5})
    yield "ct q", Case(**ct, scales={**PAIR, "q.scale": 2.0})
    for method in ("ct", "fp8", "modelopt"):
        for name in STRAY_NAMES:
            stray = {**PAIR, name: 0.5}
            why = name.lstrip("/").rpartition(".")[2]
            yield (
                f"{method} {name}",
                Case(quantization=METHODS[method], scales=stray, status=REFUSED, why=why),
            )


def _list_numbers() -> Iterator[tuple[str, Case]]:
    for method, config in METHODS.items():
        of = {"quantization": config}
        if method != "ct":
            for (k, v), status in TRUTH_TABLE.items():
                yield f"{method} k {k:g}, v {v:g}", Case(**of, scales=_pair(k, v), status=status)
        yield f"{method} heads", Case(**of, scales=PER_HEAD_PAIR, status=REFUSED, why="[2, 1, 1]")
        yield f"{method} rounded", Case(**of, scales=ODD)
        yield f"{method} shape []", Case(**of, scales=_pair(0.25))
        yield f"{method} shape [1, 1, 1]", Case(**of, scales=_pair([[[0.25]]]))
    ct, fp8 = {"quantization": PER_TENSOR}, {"quantization": FP8}
    for number in (NAN, 0.0, -0.5, INF):
        yield f"ct {number:g}", Case(**ct, scales=_pair(number, 0.5), status=("bad", "used"))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield f"fp8 scales in {dtype}", Case(**fp8, scales=PAIR, dtype=dtype)
    yield "ct by layer", Case(**ct, scales=PAIR, later=_pair(2.0, 4.0))
    alone = {"later": {}, "later_status": DEFAULTED, "why": "no k_scale"}
    yield "ct one layer of two", Case(**ct, scales=PAIR, **alone)
    points = {"k_zero_point": [0.0, 0.0], "v_zero_point": [0.0, 0.0]}
    for name, quantization, scales, status, why in (
        ("per head", PER_HEAD, PER_HEAD_PAIR, USED, ""),
        ("per head, one number", PER_HEAD, PAIR, USED, ""),
        ("per head, three heads", PER_HEAD, _pair([0.25, 0.5, 0.75]), MISREAD, ""),
        ("per head, NaN", PER_HEAD, _pair([[[0.25]], [[NAN]]]), BAD, ""),
        ("per head without groups", NO_GROUPS, PER_HEAD_PAIR, REFUSED, "config_groups"),
        *(
            (
                f"per head, {count} of q",
                PER_HEAD,
                {**PER_HEAD_PAIR, "q_scale": [[[0.5]]] * count},
                REFUSED if count == 3 else USED,
                "",
            )
            for count in (2, 3, 4)
        ),
        ("ct q per head", PER_TENSOR, {**PAIR, "q_scale": [[[0.5]]] * 4}, REFUSED, ""),
        ("ct zero points per head", PER_TENSOR, {**PAIR, **points}, REFUSED, ""),
        ("fp8 zero points", FP8, {**PAIR, "k_zero_point": 0.0}, USED, ""),
    ):
        yield name, Case(quantization=quantization, scales=scales, status=status, why=why)
    for value, served, status in (
        (2e-8, "float16", REFUSED),
        (7e4, "float16", BAD),
        (0.1, "float32", USED),
    ):
        name, config = f"fp8 {value:g} in {served}", {"dtype": served}
        yield name, Case(**fp8, scales=_pair(value), status=status, config=config)


def _pair(k: object, v: object = None) -> Scales:
    return {"k_scale": k, "v_scale": k if v is None else v}


def _list_configs() -> Iterator[tuple[str, Case]]:
    def ct(**changes: object) -> dict[str, Any]:
        return {**PER_TENSOR, **changes}

    def scheme(**changes: object) -> dict[str, Any]:
        return ct(kv_cache_scheme={**PER_TENSOR["kv_cache_scheme"], **changes})

    sparsity = {"format": "sparse-24-bitmask", "targets": ["Linear"]}
    one_group = {"group_0": {"targets": ["re:^none$"], "weights": None}}
    of_attention = {"group_0": {"targets": ["LlamaAttention"], "weights": None}}
    int_outputs = {
        **LISTED,
        "layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "int8"}}},
    }
    layers_in_quark = {**LISTED, "exclude": [*LISTED["exclude"], "model.layers.0.self_attn.attn"]}
    rows: tuple[tuple[str, object, Scales, tuple[str, str], str], ...] = (
        ("ct with an underscore", ct(quant_method="compressed_tensors"), PAIR, USED, ""),
        ("ct in capitals", ct(quant_method="Compressed-Tensors"), PAIR, USED, ""),
        ("ct in a format for TGI", ct(format="naive-quantized"), PAIR, USED, ""),
        ("ct empty groups", ct(config_groups={}), PAIR, USED, ""),
        ("ct no groups", ct(config_groups=None), PAIR, UNKNOWN, ""),
        ("ct group without a match", ct(config_groups=one_group), PAIR, UNKNOWN, ""),
        ("ct group of attention", ct(config_groups=of_attention), PAIR, USED, ""),
        ("ct targets numbers", ct(config_groups={"g": {"targets": [7]}}), PAIR, UNKNOWN, ""),
        ("ct empty group", ct(config_groups={"g": {}}), PAIR, UNKNOWN, ""),
        ("ct targets a text", ct(config_groups=TEXT_TARGETS), PAIR, UNKNOWN, ""),
        ("ct sparse", ct(sparsity_config=sparsity), PAIR, REFUSED, ""),
        ("ct no sparsity", ct(sparsity_config={}), PAIR, USED, ""),
        ("ct ignore null", ct(ignore=None), PAIR, UNKNOWN, ""),
        ("ct ignore a number", ct(ignore=7), PAIR, UNKNOWN, ""),
        ("ct ignore numbers", ct(ignore=[7]), PAIR, UNKNOWN, ""),
        ("ct ignore a text", ct(ignore="re:.*"), PAIR, UNKNOWN, ""),
        ("ct without a scheme", ct(kv_cache_scheme=None), PAIR, USED, ""),
        ("ct scheme a text", ct(kv_cache_scheme="static"), PAIR, REFUSED, ""),
        ("ct scheme of integers", scheme(type="int"), PAIR, REFUSED, "kv_cache_scheme.type"),
        ("ct scheme of 4 bits", scheme(num_bits=4), PAIR, REFUSED, "kv_cache_scheme.num_bits"),
        ("ct scheme per channel", scheme(strategy="channel"), PAIR, REFUSED, "scheme.strategy"),
        ("ct scheme without", scheme(strategy=None), PAIR, REFUSED, "scheme.strategy"),
        ("fp8 in capitals", {**FP8, "quant_method": "FP8"}, PAIR, USED, ""),
        ("fp8 of deepseek_v4", {**FP8, "quant_method": "deepseek_v4_fp8"}, ODD, USED, ""),
        ("fp8 static in blocks", BLOCKS, PAIR, UNKNOWN, ""),
        ("fp8 nothing ignored", {**FP8, "ignored_layers": IGNORED, "ignore": None}, PAIR, USED, ""),
        ("modelopt in small letters", {**UNQUANTIZED, "quant_algo": "fp8"}, PROJECTIONS, USED, ""),
        ("modelopt mixed", {**MIXED, "kv_cache_scheme": SCHEME}, PROJECTIONS, USED, ""),
        ("modelopt mixed without kv", MIXED, PROJECTIONS, DROPPED, ""),
        (
            "modelopt mixed without layers",
            {**MIXED, "quantized_layers": {}, "kv_cache_scheme": SCHEME},
            PROJECTIONS,
            REFUSED,
            "",
        ),
        ("modelopt ignore null", {**UNQUANTIZED, "ignore": None}, PROJECTIONS, UNKNOWN, ""),
        ("modelopt ignore a text", {**UNQUANTIZED, "ignore": "*"}, PROJECTIONS, UNKNOWN, ""),
        ("modelopt ignore numbers", {**UNQUANTIZED, "ignore": [7]}, PROJECTIONS, UNKNOWN, ""),
        (
            "modelopt kv only",
            {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
            PROJECTIONS,
            REFUSED,
            "Missing 'quant_algo'",
        ),
        (
            "modelopt without an algorithm",
            {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
            PROJECTIONS,
            REFUSED,
            "Missing 'quant_algo'",
        ),
        (
            "modelopt cache of 4 bits",
            {**UNQUANTIZED, "kv_cache_scheme": {"type": "float", "num_bits": 4}},
            PROJECTIONS,
            MISREAD,
            "4 bits of 'float'",
        ),
        ("quark excludes null", {**LISTED, "exclude": None}, OUTPUTS, REFUSED, ""),
        ("quark excludes attention", {**LISTED, "exclude": ["re:.*"]}, OUTPUTS, DROPPED, ""),
        ("quark outputs of integers", int_outputs, OUTPUTS, REFUSED, ""),
        ("no method", {}, PAIR, REFUSED, ""),
        ("empty method", {"quant_method": ""}, PAIR, REFUSED, ""),
        ("method a number", {"quant_method": 8}, PAIR, REFUSED, ""),
        ("unknown method", {"quant_method": "no-such-method"}, PAIR, REFUSED, ""),
        ("config a text", "compressed-tensors", PAIR, REFUSED, ""),
        ("config a list", ["compressed-tensors"], PAIR, REFUSED, ""),
        (
            "fbgemm",
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            PAIR,
            REFUSED,
            "",
        ),
        ("auto-round", ROUNDED, PAIR, DROPPED, ""),
    )
    for name, quantization, scales, status, why in rows:
        yield name, Case(quantization=quantization, scales=scales, status=status, why=why)
    yield (
        "quark excludes one attention",
        Case(
            quantization=layers_in_quark,
            scales=OUTPUTS,
            status=DROPPED,
            later_status=USED,
        ),
    )


def _list_files() -> Iterator[tuple[str, Case]]:
    late = {"quantization": PER_TENSOR, "scales": PAIR}
    yield (
        "an index without the scales",
        Case(**late, index="without scales", status=DEFAULTED, why=LATE_FILE),
    )
    missing = "an index with a file that is missing"
    yield missing, Case(**late, index="without file", status=REFUSED)
    yield (
        "scales for fnuz",
        Case(
            **late,
            metadata={"fp8calib.kv_cache_dtype": "float8_e4m3fnuz"},
            status=MISREAD,
            why="right on AMD gfx94x alone",
        ),
    )
    yield from _list_own_files()


def _list_own_files() -> Iterator[tuple[str, Case]]:
    """List cases with the file that ModelOpt before 0.31 wrote beside config.json."""

    def own(algorithm: str | None, **section: object) -> dict[str, object]:
        quantization = {"quant_algo": algorithm, **section}
        return {"producer": {"name": "modelopt"}, "quantization": quantization}

    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    of_layers = own("MIXED_PRECISION", quantized_layers=LAYERS)
    nobody = {"quantization": of_layers["quantization"]}
    whole = {"kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}
    for name, quantization, side, status, why in (
        *(
            (
                f"modelopt's own file: {algorithm}, cache {cache}",
                None,
                own(algorithm, kv_cache_quant_algo=cache, exclude_modules=["*"]),
                status,
                "",
            )
            for algorithm, cache, status in (
                ("FP8", "FP8", USED),
                ("FP8", "fp8", USED),
                ("FP8", "NVFP4", USED),
                ("FP8", "INT8", MISREAD),
                ("NVFP4", "FP8", REFUSED),
                ("MXFP8", "FP8", REFUSED),
                (None, "FP8", REFUSED),
            )
        ),
        ("modelopt's layers nowhere", mixed, None, REFUSED, ""),
        *(
            (
                f"modelopt's layers in its own file, cache {cache}",
                mixed,
                own("MIXED_PRECISION", quantized_layers=LAYERS, kv_cache_quant_algo=cache),
                status,
                "",
            )
            for cache, status in (("FP8", USED), (None, DROPPED))
        ),
        (
            "modelopt's own file by nobody",
            mixed,
            nobody,
            REFUSED,
            "does not name modelopt as its producer",
        ),
        ("modelopt's own file: NVFP4, whole", None, own("NVFP4", **whole, group_size=16), USED, ""),
    ):
        yield (
            name,
            Case(quantization=quantization, scales=PROJECTIONS, side=side, status=status, why=why),
        )


CASES: Mapping[str, Case] = dict(_list_cases())
