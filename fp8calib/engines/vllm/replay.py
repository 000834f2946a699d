"""What vLLM does with the KV scales of a checkpoint folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from fp8calib.engines.facts.release import BFLOAT16_TYPES, PLACELESS, QUERY_GPUS, VLLM_RUN, Release
from fp8calib.engines.replay.declared import (
    CONFIG_KEYS,
    METHODS_FIX,
    amend_for_dtype,
    find_quantization,
    matches_target,
    note_drafter,
)
from fp8calib.engines.replay.folder import FoundScale, ScaleFolder
from fp8calib.engines.replay.loaded_scales import match_to_layers, open_indexed, require_scalar
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Slot,
    is_scale,
    judge_number,
)
from fp8calib.engines.served_dtype import find_served_dtype
from fp8calib.engines.status import Status
from fp8calib.engines.vllm.kv_method import KvMethod, find_kv_method
from fp8calib.engines.vllm.names import LOADER, NAMES_FIX, WRAPPERS, WeightLoader
from fp8calib.errors import shorten
from fp8calib.formats.kv.config import SCHEME_HINT, find_scheme_fault
from fp8calib.formats.kv.validate import is_query_scale
from fp8calib.model.geometry import KV_ROLES, Attention, ModelGeometry, Role
from fp8calib.model.tensor_parallel import rank_range
from fp8calib.numerics.formats import NVFP4_CACHE

_CLASS = "class"
_BACKEND_PLACES = "transformers' classes have parameters for KV scales"
_UNSTARTED = "model type that it does not start"
_PLAIN_CACHES = "attention of this model type caches 16 bits without a kv_cache_scheme"
_EXPANDING = "latent attention of this model type is cached expanded to heads"
_NO_QUARK_STACKS = "loader of this model type finds no experts of Quark in one tensor"
_BASES_WITH_HEAD = ("Gemma2Model", "LlamaModel", "Qwen2Model")
"""Base classes that the registry has as the class with an output layer."""
_BASES_OF_OTHERS = ("MistralModel",)
"""Base classes that the registry has as another model's class."""
_IGNORED = (
    "vLLM's model has no parameter of that name and ignores it without a warning, so it uses 1.0",
    NAMES_FIX,
)
"""Why a scale is not used that is in a file, and what to do."""
_PLAIN_KV_FIX = "write the scales as compressed-tensors does (kv-overlay)"
_NO_GROUPS = "attn_head without config_groups: vLLM does not know the number of heads, and stops"
_NEEDS_FLASH_ATTENTION = (
    "per-head scales need FlashAttention 3 or later; on a backend that takes one number, the "
    "largest of a layer serves all its heads"
)
# Run: vLLM 0.26.0 on an H100, "For FP8 input, output must have dtype BF16".
_STOPS_IN_HALF = "in float16 FlashAttention 3 stops at an FP8 cache: serve it with --dtype bfloat16"
_NOT_ON = "the cache is FP8 only with --kv-cache-dtype fp8: auto does not turn it on"
_CALCULATES_EXISTS = "--calculate-kv-scales exists: the scales are then those of the first batch"
_CALCULATES = "with --calculate-kv-scales the scales are those of the first batch, not of the file"
_EXPANDED = "vLLM caches this model's K and V expanded to heads, but the scales are for the latents"
_EXPANDED_FIX = "serve it with --kv-cache-dtype auto, or without scales"
_POOLING = LoadVerdict(
    status=Status.MISREAD,
    why="config.json names no class with an output layer, so vLLM takes it for a model of kind "
    "pooling, which generates no text",
    fix="name the model's class under architectures in config.json",
)
_DRAFTER_GETS_SCALES = "drafter that reads the model's KV cache is given its scales by"
_NVFP4 = (
    "these are global scales of --kv-cache-dtype nvfp4, used as they are; TRT-LLM's kernel on B200 "
    "expects amax / 448, and smaller ones may overflow there (read)"
)
_TOO_LARGE = "vLLM uses it as a scale for e4m3fn: twice too large"
_E5M2 = "vLLM refuses an fp8_e5m2 cache for a checkpoint with scales (ValueError)"
_DOUBLED = "vLLM uses it as a scale for e4m3fn, and doubles it on AMD gfx94x"
_UNCHANGED = "vLLM uses it unchanged: right on AMD gfx94x alone, else twice too large"
_LARGEST = "{}: on a CPU the largest of a layer's scales serves all heads of a rank"
_LARGEST_FIX = "write a kv-overlay, with one scale per layer"
_DOUBLING = (KvMethod.FP8, KvMethod.MODELOPT, KvMethod.QUARK)
"""Methods that are `BaseKVCacheMethod`, which doubles what it loaded where FP8 is e4m3fnuz."""


def find_base(config: Mapping[str, object], geometry: ModelGeometry) -> str:
    """Find the class without an output layer that vLLM takes a config for; empty if it does not.

    Without a name vLLM takes the base class of the model type (`transformers_utils/config.py`,
    get_config; 0.26.0 to 0.33.0, read).
    """
    base = re.sub("(ForCausalLM|LMHeadModel)$", "Model", geometry.architecture)
    is_named = config.get("architectures") in (None, [], "", [base])
    return base if is_named and base not in (geometry.architecture, *_BASES_OF_OTHERS) else ""


def _has_class(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release has the class of a model; if not, it may run transformers'."""
    name = geometry.architecture
    if name in release.begins[_CLASS]:
        return release.has(_CLASS, name)
    is_native = bool(release.find_value(LOADER, geometry.model_type))
    return is_native or release.has(WRAPPERS, name)


def replay_vllm(
    release: Release,
    folder: ScaleFolder,
    geometry: ModelGeometry,
    tp: int,
    *,
    on_gpus: bool = True,
) -> EngineReport:
    """Replay vLLM's loading of a folder, with `--kv-cache-dtype fp8` on `tp` ranks.

    Conditions of GPUs and their backends do not apply to other devices. `Refusal` is raised where
    vLLM does not start.
    """
    # Since its backend for transformers' classes has parameters for KV scales, a release may run a
    # model whose own class came later.
    first = release.begins[_CLASS].get(geometry.architecture)
    is_later = bool(first) and not release.has(_BACKEND_PLACES)
    is_dropped = release.has(_UNSTARTED, geometry.model_type)
    if (is_later or is_dropped) and not _has_class(geometry, release):
        if not first:
            why = f"{release.title} does not run {geometry.model_type}"
            raise Refusal(why, fix="use another engine", is_final=True)
        why = f"{release.title} has no class for {shorten(geometry.architecture)}"
        raise Refusal(why, fix=f"use vLLM {first} or later", is_final=True)
    replay = _Replay(folder, geometry, tp, release)
    report = replay.report(on_gpus=on_gpus)
    if replay.method is None:
        return report
    if replay.expands:
        report = report.mark(dict.fromkeys(report.slots, _EXPANDED), _EXPANDED_FIX)
    if replay.method is KvMethod.QUARK:
        report = replay.amend_quark(report)
    given_by = release.values[_DRAFTER_GETS_SCALES]
    report = note_drafter(report, geometry, release, given_by=given_by)
    if not on_gpus:
        return amend_for_dtype(report, folder, fnuz=_TOO_LARGE, e5m2=_E5M2)
    is_compressed = replay.method is KvMethod.COMPRESSED_TENSORS
    return amend_for_dtype(
        report,
        folder,
        nvfp4=_NVFP4 if release.has("--kv-cache-dtype", NVFP4_CACHE) else "",
        fnuz=_UNCHANGED if is_compressed else _DOUBLED,
        e5m2=_E5M2,
        fnuz_device="AMD gfx94x" if is_compressed else "",
    )


class _Replay:
    """The loading of a folder by a release, on `tp` ranks."""

    def __init__(
        self, folder: ScaleFolder, geometry: ModelGeometry, tp: int, release: Release
    ) -> None:
        self._geometry, self._tp, self._release = geometry, tp, release
        self._context = open_indexed(folder, geometry, error="FileNotFoundError")
        self._quantization = find_quantization(folder, keys=CONFIG_KEYS) or {}
        self.method = find_kv_method(self._quantization, release, beside=folder.modelopt)
        self._is_compressed = self.method is KvMethod.COMPRESSED_TENSORS
        self._scheme = scheme = self._quantization.get("kv_cache_scheme")
        strategy = scheme.get("strategy") if isinstance(scheme, dict) else None
        self._per_head = self._is_compressed and strategy == "attn_head"
        excluded = self._quantization.get("exclude")
        self.expands = release.has(_EXPANDING, geometry.model_type)
        """Latents are cached expanded to heads."""
        has_class = _has_class(geometry, release)
        # ModelOpt's method alone is for MLAAttention too (`get_quant_method`), whose path ends in
        # `.attn` in transformers' classes; 0.32.0, run.
        is_scaled = not has_class and self.method is KvMethod.MODELOPT
        self._scales_latents = self.expands or (is_scaled and release.has(_BACKEND_PLACES))
        self._excluded = excluded if isinstance(excluded, list) else []
        """The list `exclude` of a Quark config."""
        self._has_places = has_class or release.has(_BACKEND_PLACES)
        """The class of the model, vLLM's or transformers', has parameters for scales."""
        has_none = release.has(PLACELESS, geometry.model_type) or not self._has_places
        has_none = has_none or self.method in (None, KvMethod.NONE)
        # an expression in the list of a Quark config can match some
        targets = self._excluded if self.method is KvMethod.QUARK else []
        self._places = {
            path: layer.index
            for layer, attention in (() if has_none else geometry.attentions())
            if attention.kind == "heads" or self._scales_latents
            for path in (f"{attention.checkpoint_module}.attn",)
            if not any(matches_target(target, path) for target in targets)
        }
        """The layers of the `Attention` modules that have parameters for scales, by path."""
        # vLLM runs a model without an output layer to embed text: `config/model.py`
        # (_get_default_runner_type, _SUFFIX_TO_DEFAULTS) and `models/registry.py`; 0.26.0 to
        # 0.33.0 read, 0.32.0 run with 10 types.
        self._is_pooling = find_base(folder.config, geometry) not in ("", *_BASES_WITH_HEAD)
        self._dtype = find_served_dtype(
            geometry,
            bfloat16_types=release.values[BFLOAT16_TYPES],
            # config/model.py of 0.32.0 (_resolve_auto_dtype, run)
            half_instead_of=("float16", "float32") if self._is_pooling else ("float16",),
        )

    def report(self, *, on_gpus: bool) -> EngineReport:
        """Report on every layer with scales for e4m3fn."""
        context, method, places = self._context, self.method, self._places
        # vLLM makes `CompressedTensorsKVCacheMethod` only for an `Attention` with a config: not for
        # latent attention (`get_quant_method`; the same in 0.26.0 to 0.33.0, read).
        if self._is_compressed and places and (fault := find_scheme_fault(self._scheme)):
            has_scheme = isinstance(self._scheme, dict)
            fix = SCHEME_HINT if has_scheme else "write the scheme of kv-overlay"
            raise Refusal(f"{fault}: NotImplementedError at start", fix=fix)
        loader = WeightLoader(context, method, places, self._release)
        loader.refuse_faults()
        context.load(lambda name: loader.look_up(name)[0])
        if method is not None and any([*context.optional.values(), context.zero_points]):
            self._check_shapes()
        has_groups = isinstance(self._quantization.get("config_groups"), dict)
        if self._per_head and context.loaded and not has_groups:
            raise Refusal(_NO_GROUPS, fix="add config_groups, with a group that matches nothing")
        layers: list[LayerVerdict] = []
        held: dict[Slot, tuple[float, ...]] = {}
        doubled: set[Slot] = set()
        for layer, attention in self._geometry.attentions():
            slots = [(layer.index, role) for role in KV_ROLES]
            bare = self._explain_bare(attention)
            if bare is None and not self._is_compressed:
                verdict = context.judge_pair(layer.index, "vLLM", _IGNORED, dtype=self._dtype)
            else:
                k, v = (
                    self._judge_compressed(slot, attention)
                    if bare is None
                    else context.judge_absent(slot, *bare)
                    for slot in slots
                )
                verdict = LayerVerdict(layer=layer.index, k=k, v=v)
            layers.append(verdict)
            for slot, numbers, is_loaded in self._list_held(verdict, attention, bare is not None):
                held[slot] = numbers
                doubled |= {slot} if is_loaded and method in _DOUBLING else set()
        is_scaled = method is not None and bool(context.scales)
        turns_on = self._is_compressed or method is KvMethod.MODELOPT
        conditions = {
            _NOT_ON: is_scaled and not (turns_on and isinstance(self._scheme, dict)),
            _NEEDS_FLASH_ATTENTION: on_gpus and self._per_head,
            _STOPS_IN_HALF: is_scaled and on_gpus and self._dtype == "float16",
            _CALCULATES: is_scaled and self._release.has(_CALCULATES_EXISTS),
        }
        context.problems += (text for text, holds in conditions.items() if holds)
        has_places = method not in (None, KvMethod.NONE)
        suspicious = [*self._note_loaded(on_gpus=on_gpus)] if has_places else []
        weights = _POOLING if self._is_pooling else None
        report = context.report(layers).add(suspicious=suspicious)
        update = {"held": held, "doubled": frozenset(doubled), "weights": weights}
        return report.model_copy(update=update)

    def _judge_compressed(self, slot: Slot, attention: Attention) -> LoadVerdict:
        """Judge a k or v by what `CompressedTensorsKVCacheMethod` makes of it.

        A scale that was not loaded is 1.0, and none is rounded: the parameters are fp32
        (`quantization/compressed_tensors/compressed_tensors.py`; 0.32.0 run, 0.33.0 read).
        """
        loaded = self._context.loaded
        stored, k = loaded.get(slot), loaded.get((slot[0], Role.K))
        if stored is not None and self._per_head:
            return self._judge_heads(stored, attention.num_kv_heads)
        if stored is not None:
            return judge_number(require_scalar(stored, "vLLM"), str(stored))
        if k is not None and k.name.endswith(".kv_scale"):
            why = f"{k} becomes k_scale, and compressed-tensors' method uses 1.0 for v"
            fix = "store it as k_scale and as v_scale"
            return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=fix)
        return self._context.judge_absent(slot, *_IGNORED)

    def _judge_heads(self, stored: FoundScale, num_heads: int) -> LoadVerdict:
        """Judge per-head scales: each rank takes its slice; one rank repeats a single number."""
        count = len(stored.values)
        if count < num_heads and not (count == 1 and self._tp == 1):
            why = f"{stored} has shape {list(stored.shape)} for {num_heads} KV heads: RuntimeError"
            fix = f"store [{num_heads}, 1, 1], or strategy tensor with one number"
            raise Refusal(why, fix=fix)
        used = stored.values[:num_heads]
        if bad := [value for value in used if not is_scale(value)]:
            return judge_number(bad[0], str(stored))
        if count > num_heads:
            why = f"{stored} has {count} numbers, of which vLLM uses the first {num_heads}"
            fix = "write one number per KV head"
            return LoadVerdict(status=Status.MISREAD, value=max(used), why=why, fix=fix)
        if count < num_heads:
            self._context.problems.append(
                "attn_head with one number per layer: it is used for all heads"
            )
        return judge_number(max(used), f"the largest of {count} heads, {stored}")

    def _list_held(
        self, layer: LayerVerdict, attention: Attention, is_bare: bool
    ) -> Iterator[tuple[Slot, tuple[float, ...], bool]]:
        """List the numbers that a layer holds after loading, and whether they were loaded.

        A q without a scale is 1.0: `BaseKVCacheMethod` copies k to it, and then overwrites that
        (vLLM 0.32.0 `quantization/kv_cache.py`, run).
        """
        doubles = self.method in _DOUBLING
        for role, verdict in ((Role.Q, None), (Role.K, layer.k), (Role.V, layer.v)):
            scale = None if is_bare else self._context.loaded.get((layer.layer, role))
            value = 1.0 if verdict is None else verdict.value
            numbers: tuple[float, ...] = () if value is None else (value,)
            if scale is not None and self._per_head:
                size = attention.num_heads // attention.num_kv_heads if role is Role.Q else 1
                starts = range(0, len(scale.values), size)
                groups = (scale.values[start : start + size] for start in starts)
                numbers = tuple(map(max, islice(groups, attention.num_kv_heads)))
            elif scale is not None and role is Role.Q and (not doubles or scale.values[0] > 0):
                numbers = scale.values
            is_loaded = (
                scale is not None if verdict is None else verdict.status is not Status.DEFAULTED
            )
            if numbers:
                yield (layer.layer, role), numbers, is_loaded

    def _explain_bare(self, attention: Attention) -> tuple[str, str] | None:
        """Say why no scale of a layer is used, and what to do; None where scales are used."""
        if attention.kind == "latent" and not self._scales_latents:
            why = "no KV scale reaches multi-head latent attention in vLLM, so it uses 1.0"
            return why, "serve it without scales: latents are cached with 1.0"
        if self.method is None:
            return "the quantization method has no parameters for KV scales", "write a kv-overlay"
        if self.method is KvMethod.NONE:
            name = shorten(str(self._quantization.get("quant_method")))
            why = f"vLLM's quant_method {name} has no parameters for KV scales, so it uses 1.0"
            return why, METHODS_FIX
        if not self._has_places:
            owner = f"{self._release.title} runs transformers' class"
            why = f"{owner}, which has no parameters for scales, so it uses 1.0"
            return why, "use vLLM 0.30 or later"
        turns_on = self._is_compressed and isinstance(self._scheme, dict)
        model_type = self._geometry.model_type
        if self._release.has(_PLAIN_CACHES, model_type) and not turns_on:
            why = f"vLLM's {model_type} caches 16 bits whatever --kv-cache-dtype says"
            return why, "write a kv-overlay: its kv_cache_scheme makes the cache FP8"
        return None

    def _check_shapes(self) -> None:
        """Refuse scales of q and zero points whose shape fits no parameter."""
        for stored in self._context.optional["q_scale"]:
            if not self._per_head:
                require_scalar(stored, "vLLM")
                continue
            for _, attention in self._geometry.attentions():
                # vLLM reduces it to one maximum per KV head
                num_heads = attention.num_kv_heads
                groups, rest = divmod(len(stored.values), attention.num_heads // num_heads)
                if not rest and (groups == 1 or groups >= num_heads):
                    break
            else:
                why = f"{stored} has shape {list(stored.shape)}, which fits no number of heads"
                fix = "store one number per head of q, or leave it out"
                raise Refusal(f"{why}: RuntimeError", fix=fix)
        if self._is_compressed and not self._per_head:
            for stored in self._context.zero_points:
                require_scalar(stored, "vLLM")

    def _note_loaded(self, *, on_gpus: bool) -> Iterator[str]:
        """Note what vLLM does with scales of q and of probabilities; give what is suspicious."""
        users = "only backends of GPUs use it"
        if on_gpus:
            gpus = ", and ".join(self._release.values[QUERY_GPUS])
            users = f"used if q is quantized (FlashAttention 3, FlashInfer, Triton on {gpus})"
        for what, found in self._context.optional.items():
            bad = [stored for stored in found if not all(map(is_query_scale, stored.values))]
            used = [
                stored
                for stored in bad
                if self._is_compressed or any(value > 0 for value in stored.values)
            ]
            if bad:
                first = (used or bad)[0]
                value = next(each for each in first.values if not is_query_scale(each))
                fault = f"{first} ({value:.4g}) is not a scale"
                if used and what == "q_scale" and on_gpus:
                    yield f"{fault}, but {users}"
                else:
                    effect = ", but vLLM uses it" if used else ": vLLM uses 1.0"
                    self._context.problems.append(f"{fault}{effect}")
            elif found:
                loaded = f"{what} is loaded ({len(found)}, such as {found[0]})"
                self._context.problems.append(f"{loaded}: {users}")

    def amend_quark(self, report: EngineReport) -> EngineReport:
        """Judge what the loader of Quark's checkpoints may not load: stacks, convolutions."""
        names = self._context.tensors
        stacks = (name for name in names if name.endswith("experts.gate_up_proj"))
        loads_none = self._release.has(_NO_QUARK_STACKS, self._geometry.model_type)
        if loads_none and (stack := next(stacks, None)) is not None:
            what = f"vLLM does not load {shorten(stack)} with this quant_method"
            why = f"{what}: it is uninitialised memory"
            verdict = LoadVerdict(status=Status.MISREAD, why=why, fix=_PLAIN_KV_FIX)
            report = report.model_copy(update={"weights": verdict})
        for path in (name.removesuffix(".weight") for name in names if "conv" in name):
            if not any(matches_target(target, path) for target in self._excluded):
                why = f"Quark's config excludes no {shorten(path)}: vLLM has no such convolution"
                return report.add(unknown=[f"{why}; `fp8calib vllm check` asks its loader"])
        return report


def replay_cpu(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay loading on CPUs (0.32.0 `v1/attention/backends/cpu_attn.py`, run).

    The largest per-head scale of a layer's heads on a rank serves all of them.
    """
    stored = match_to_layers(
        geometry, (each for held in folder.scales.values() for each in held.values())
    )
    heads = {layer.index: attention.num_kv_heads for layer, attention in geometry.attentions()}
    report = replay_vllm(VLLM_RUN, folder, geometry, tp, on_gpus=False)
    whys = {}
    for slot, scale in stored.items():
        ranks = (rank_range(heads[slot[0]], tp, rank) for rank in range(tp))
        is_alike = all(len(set(scale.values[each.start : each.stop])) == 1 for each in ranks)
        if slot in report.slots and len(scale.values) != 1 and not is_alike:
            whys[slot] = _LARGEST.format(scale)
    return report.mark(whys, _LARGEST_FIX)
