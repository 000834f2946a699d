"""Build vLLM's model classes and see what they create: `vllm_classes.py LOADER JOBS RESULT [all]`.

Runs in vLLM's own environment, in a process of its own. LOADER is the plug-in's script of the
loader, JOBS a JSON list of configs (`{"type": ..., "architecture": ..., "changes": {...}}`), and
RESULT gets one JSON object a line; with `all` those that vLLM and transformers have follow. Nothing
is computed: tensors of some size are on the meta device, and no method quantizes.

A linear is created by the quantization config if the class asks the config for its method: the
config here notes who asks, and under which path. Which tensors of a checkpoint fill it is asked of
the class's own `load_weights`, one tensor at a time.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

Shape = tuple[int, ...]
_ABSENT = ("cutlass", "vllm.model_executor.kernels.linear.cute_dsl")
"""What some classes import, and what a CPU's environment cannot import."""
_TIMEOUT_S = 90
_MOST_ON_CPU = 4096
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$)")
_FIELDS: dict[str, Any] = {
    "attn_qk_norm": False,
    "block_auto_adjust_ff_dim": False,
    "block_dim": "hidden_size",
    "block_ff_dim": "intermediate_size",
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_dim": "hidden_size",
    "expert_hidden_dim": 1024,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "mla_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "original_rope": True,
    "rotary_dim": "head_dim",
    "use_conv_bias": False,
    "use_qk_norm": True,
    "zero_expert_type": "identity",
    "route_norm": True,
    "score_func": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""What vLLM reads in configs, real ones have, and the classes' defaults lack: a number, or the name
of a field with the same one."""
_ALWAYS = {"mla_use_nope": True}
_PROMISES = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
_DRAFTED = ("model.", "mtp.", "model.mtp.", "model.mtp_")
"""How the names of a drafter begin in checkpoints, instead of `model.` in vLLM's classes."""
_MTP = {"method": "mtp", "num_speculative_tokens": 1}
_OWN_LAYER = re.compile(r"model\.layers\.(\d+)\.(mtp_\w+)")
"""What Ernie's checkpoints have under `model`."""
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What classes of drafters join; not all of them tell the config."""
_BLOCK = ".mtp_block."
"""What vLLM's classes of drafters have in names where their checkpoints have a dot."""
_LEFT_OUT = "left out"
_ALIAS = "was skipped because it is tied to"
_LACKS = re.compile(r"no attribute '(\w+)'|(\w+) not exist")
_FOLDER_NAME = re.compile(r"/\S*/tmp\w+")
_POSITIONS = "max_position_embeddings"
_MOST_POSITIONS = 32768
_NESTED_ONLY = ("_name_or_path", "output_attentions")
"""What `to_dict` adds to nested configs and some classes refuse."""
_LAYER = re.compile(r"(.*?)\.(\d+)\.")
_ROOTS = (
    ("vision_tower.", "vision_tower.vision_model."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.vision_tower.", "model.vision_tower.vision_model."),
    ("language_model.model.model.", "language_model.model."),
    ("model.language_model.", "language_model.model."),
    ("language_model.model.", "model.language_model."),
)
"""How names begin that transformers writes, and that checkpoints on the Hub have."""
_MATRIX = 2
_STACK = 3
_SPELLINGS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_SPELLINGS |= {other: name for name, other in _SPELLINGS.items()}
"""The two ways of naming the projections of an expert."""


def main() -> None:
    """Write what the classes of all jobs create; go on where an earlier run stopped."""
    loader, jobs, result = map(Path, sys.argv[1:4])
    result.touch()
    done = [json.loads(line)["job"] for line in result.read_text().splitlines()]
    recorder = Recorder(loader)
    more = list_jobs() if sys.argv[4:] == ["all"] else ()
    wanted = [*json.loads(jobs.read_text()), *more]
    for job in [*wanted, *list_drafters(wanted)]:
        if job not in done:
            _record(recorder, job, result)


def _record(recorder: Recorder, job: dict[str, Any], result: Path) -> None:
    """Build a class in a process of its own, which may not end: some compute large tables."""
    child = os.fork()
    if not child:
        with result.open("a") as out:
            print(json.dumps({"job": job, **_build(recorder, job)}), file=out)
        os._exit(0)  # vLLM's threads may not end
    end = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with result.open("a") as out:
        error = f"TimeoutError: it was not built within {_TIMEOUT_S} s"
        print(json.dumps({"job": job, "error": error}), file=out)


def _build(recorder: Recorder, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return recorder.build(job)
    except Exception as error:  # noqa: BLE001 -- whatever vLLM says is the reason
        frames = traceback.extract_tb(error.__traceback__)
        _, _, package = frames[-1].filename.rpartition("/site-packages/")
        file = package if package != frames[-1].filename else Path(package).name
        place = f"{file}:{frames[-1].name}"
        text = _FOLDER_NAME.sub("FOLDER", " ".join(str(error).split()))
        return {"error": f"{type(error).__name__}: {text[:160]} ({place})"}


def list_jobs() -> Iterator[dict[str, Any]]:
    """List the architectures whose configs transformers or vLLM can make from defaults."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415
    from vllm.model_executor.models import registry  # noqa: PLC0415
    from vllm.transformers_utils.config import _CONFIG_REGISTRY  # noqa: PLC0415

    served = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    served |= registry._TRANSFORMERS_SUPPORTED_MODELS
    made = {each: name for name, each in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    for table, mapping in vars(modeling_auto).items():
        for model_type, name in mapping.items() if table.endswith("_MAPPING_NAMES") else ():
            if isinstance(name, str) and name in served:
                made.setdefault(name, model_type)
    for model_type, config in dict.items(_CONFIG_REGISTRY):
        stem = str(config).removesuffix("Config")
        for name in served:
            if re.fullmatch(rf"{stem}(For\w+|LMHeadModel|Model)", name, re.IGNORECASE):
                made.setdefault(name, model_type)
    for name in sorted({*made, *served}):
        job = {"architecture": name, "type": made.get(name, "")}
        yield job
        if job["type"]:
            try:
                text = make_config(job).get_text_config()
            except Exception:  # noqa: BLE001, S112 -- the job above tells why
                continue
            tied = getattr(text, "tie_word_embeddings", False)
            yield {**job, "changes": {"tie_word_embeddings": not tied}}
            if hasattr(text, "mlp_only_layers"):
                yield {**job, "changes": {"mlp_only_layers": [0]}}


def list_drafters(jobs: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """List the jobs whose models vLLM gives a drafter out of their own checkpoint."""
    from vllm.config.speculative import SpeculativeConfig  # noqa: PLC0415

    names = re.findall(r'"(\w+)"', inspect.getsource(SpeculativeConfig.hf_config_override))
    for job in jobs:
        is_first = "tie_word_embeddings" not in job.get("changes", {})
        if is_first and not {job["type"], job["architecture"]}.isdisjoint(names):
            yield {**job, "is_drafter": True}


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets packages be imported that are not there."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        is_absent = any(f"{name}.".startswith(f"{each}.") for each in _ABSENT)
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _make_stub  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def _make_stub(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (MagicMock,), {})


class Recorder:
    """Builds classes.

    Args:
        loader: the plug-in's script.
    """

    def __init__(self, loader: Path) -> None:
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL")
        os.environ.update(VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")
        spec = importlib.util.spec_from_file_location("loader_script", loader)
        assert spec is not None
        assert spec.loader is not None
        self._script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._script)
        sys.meta_path.insert(0, _Stubs())
        self.asked: dict[int, tuple[str, Mapping[str, Sequence[str]]]] = {}
        """By the ids of modules: the path under which one asked the config, and what the config
        knew then of joined linears. The text model of some classes tells it after the tower."""
        self.mappers: list[Any] = []
        """What renamed the lists of the config."""
        self._change_vllm()

    def _change_vllm(self) -> None:
        """Note what is asked of configs, and import classes in this process."""
        from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method  # noqa: PLC0415
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # noqa: PLC0415
        from vllm.model_executor.layers.quantization import fp8  # noqa: PLC0415
        from vllm.model_executor.models import registry  # noqa: PLC0415

        torch.cuda.Stream = torch.cuda.Event = MagicMock
        experts = unquantized_fused_moe_method.UnquantizedFusedMoEMethod

        def get(config: Any, layer: Any, prefix: str) -> Any:
            self.asked[id(layer)] = prefix, dict(config.packed_modules_mapping or {})
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            return experts(layer.moe_config) if hasattr(layer, "moe_config") else None

        fp8.Fp8Config.get_quant_method = get
        fp8.Fp8Config.apply_vllm_mapper = lambda _, mapper: self.mappers.append(mapper)
        choose = unquantized_fused_moe_method.select_unquantized_moe_backend

        def choose_backend(moe_config: Any) -> Any:
            try:
                return choose(moe_config)
            except NotImplementedError:  # no kernel for a CPU
                return unquantized_fused_moe_method.UnquantizedMoeBackend.TRITON, None

        unquantized_fused_moe_method.select_unquantized_moe_backend = choose_backend
        registry._try_inspect_model_cls = lambda _, model: model.inspect_model_cls()
        registry._LazyRegisteredModel.inspect_model_cls = lambda model: (
            registry._ModelInfo.from_model_cls(model.load_model_cls())
        )

    def build(self, job: dict[str, Any]) -> dict[str, Any]:
        """Build one class, and describe it; complete its config where vLLM reads more of it."""
        if not job["type"]:
            raise LookupError("no config class of this release has its name")
        fields = make_config(job).to_dict() | _ALWAYS
        for value in fields.values():
            for name in _NESTED_ONLY if isinstance(value, dict) else ():
                value.pop(name, None)
        parts = [each for each in (fields, fields.get("text_config")) if isinstance(each, dict)]
        for each in parts:
            each.update(_PROMISES if job.get("is_drafter") else {})
            # The tables of positions are computed on the CPU.
            if isinstance(each.get(_POSITIONS), int):
                each[_POSITIONS] = min(each[_POSITIONS], _MOST_POSITIONS)
        lacking: list[str] = []
        while True:
            try:
                return {"lacking": lacking, **self._build(job, fields)}
            except (AttributeError, ValueError) as error:
                lacks = _LACKS.search(str(error))
                name = (lacks[1] or lacks[2]) if lacks is not None else ""
                if name in _FIELDS and name not in fields:
                    lacking.append(name)
                    for part in parts:
                        part[name] = part.get(_FIELDS[name], _FIELDS[name])
                else:
                    raise

    def _build(self, job: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as dist  # noqa: PLC0415
        from vllm.config import set_current_vllm_config  # noqa: PLC0415
        from vllm.distributed import parallel_state  # noqa: PLC0415
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
        from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415

        self.asked.clear()
        self.mappers.clear()
        fields |= {"architectures": [job["architecture"]], "dtype": "bfloat16"}
        fields["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        with tempfile.TemporaryDirectory() as folder:
            if "processor" in job:
                shutil.copytree(job["processor"], folder, dirs_exist_ok=True)
            Path(folder, "config.json").write_text(json.dumps(fields, default=str))
            config = EngineArgs(
                model=folder,
                enforce_eager=True,
                skip_tokenizer_init="processor" not in job,
                load_format="dummy",
                enable_prefix_caching=False,
                speculative_config=dict(_MTP) if job.get("is_drafter") else None,
            ).create_engine_config()
            chosen = config.model_config
            if config.speculative_config is not None:
                chosen = config.speculative_config.draft_model_config
            self._script._leave_out_kernels()
            torch.set_default_dtype(torch.bfloat16)
            try:
                with (
                    set_current_vllm_config(config),
                    self._script._join_groups(0, 1),
                    self._script._make_mode([]),
                ):
                    model = initialize_model(config, model_config=config.model_config)
                    if chosen is not config.model_config:  # it has the config that the model had
                        model = initialize_model(config, model_config=chosen)
                    found = self._describe(model, config, job)
                    return {**found, "architecture": chosen.hf_config.architectures[0]}
            finally:
                torch.set_default_dtype(torch.float32)
                if dist.is_initialized():
                    parallel_state.destroy_model_parallel()
                    parallel_state.destroy_distributed_environment()

    def _describe(self, model: Any, config: Any, job: dict[str, Any]) -> dict[str, Any]:
        modules = dict(model.named_modules())
        is_drafter = job.get("is_drafter", False)
        try:
            if is_drafter:
                names, source = list_drafted(model, config), "guessed: drafter"
            else:
                names, source = list_stored(job), "transformers"
        except Exception as error:  # noqa: BLE001 -- such as a class that only vLLM has
            names, source = guess_stored(model, config), f"guessed: {type(error).__name__}"
        unfilled: dict[str, str] = {}
        linears, patterns = {}, set()
        for spelled in ({**names, **dict(_spell_experts(names))}, *_spell_roots(names)):
            filled: dict[str, list[tuple[str, str, str]]] = {}
            chosen = choose_layers(spelled, modules)
            for name, (parameters, why) in fill(model, chosen, is_part=is_drafter).items():
                if why and (name in names or why == _LEFT_OUT):
                    unfilled.setdefault(_NUMBER.sub("*", name), why)
                for parameter, shard in parameters:
                    path = parameter.rpartition(".")[0]
                    filled.setdefault(path, []).append((name, parameter.rpartition(".")[2], shard))
            for path, held in filled.items():
                found = self._describe_linear(modules[path], path, held)
                linears[json.dumps(found)] = found
            patterns |= {_NUMBER.sub("*", path) for path in filled}
        for path, module in modules.items():
            is_other = _NUMBER.sub("*", path) not in patterns
            is_linear = is_other and hasattr(module, "quant_method")
            if is_linear and next(module.parameters(recurse=False), None) is not None:
                found = self._describe_linear(module, path, [])
                linears[json.dumps(found)] = found
        return {
            "class": type(model).__name__,
            "names": source,
            "linears": list(linears.values()),
            "unfilled": unfilled,
        }

    def _describe_linear(
        self,
        module: Any,
        path: str,
        held: Sequence[tuple[str, str, str]],
    ) -> dict[str, Any]:
        """Describe a module: its class, whether it asked the config, and what fills it."""
        prefix, packed = self.asked.get(id(module), (None, {}))
        ordered = sorted(held, key=lambda each: (each[1], "qkv".find(each[2]), each[2].strip("(")))
        names = list(dict.fromkeys(name for name, _, _ in ordered))
        own = (prefix or path).rpartition(".")[2]
        found = {
            "class": type(module).__name__,
            "path": _NUMBER.sub("*", path),
            "names": [_NUMBER.sub("*", name) for name in names],
            "parameters": list(dict.fromkeys(leaf for _, leaf, _ in ordered)),
        }
        if prefix is not None:
            found["prefix"] = _NUMBER.sub("*", prefix)
            found["moved"] = _NUMBER.findall(prefix) != _NUMBER.findall(path)
            found["packed"] = list(packed.get(own, ()))
            parts = [self._rename(name.removesuffix(".weight")) for name in names]
            found["renamed"] = [_NUMBER.sub("*", part) for part in parts]
        return found

    def _rename(self, path: str) -> str:
        """Rename a path as the lists of the config are."""
        for mapper in self.mappers:
            renamed = mapper.apply_list([path])
            path = renamed[0] if renamed else path
        return path


def make_config(job: dict[str, Any]) -> Any:
    """Make the config of a model type: the defaults of its class, and the changes of the job."""
    from transformers.models.auto import configuration_auto  # noqa: PLC0415
    from vllm.transformers_utils.config import _CONFIG_REGISTRY  # noqa: PLC0415

    name, changes = job["type"], job.get("changes", {})
    if name not in configuration_auto.CONFIG_MAPPING_NAMES:
        return _CONFIG_REGISTRY[name](**changes)
    # Not CONFIG_MAPPING, in which vLLM puts classes of its own.
    module = configuration_auto.model_type_to_module_name(name)
    own = importlib.import_module(f"transformers.models.{module}")
    return getattr(own, configuration_auto.CONFIG_MAPPING_NAMES[name])(**changes)


def list_stored(job: dict[str, Any]) -> dict[str, Shape]:
    """List the tensors that `save_pretrained` writes of transformers' class, with their shapes."""
    import transformers  # noqa: PLC0415
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    config = make_config(job)
    with torch.device("meta"):
        model = getattr(transformers, job["architecture"])(config)
    stored = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def _spell_experts(stored: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """List the linears of the first expert as other tools write them: one by one, or renamed."""
    for name, shape in stored.items():
        above, _, leaf = name.rpartition(".")
        expert, _, projection = above.rpartition(".")
        if expert.endswith("experts.0") and projection in _SPELLINGS:
            yield f"{expert}.{_SPELLINGS[projection]}.{leaf}", shape
        if len(shape) == _STACK and leaf == "gate_up_proj":
            down = stored[f"{above}.down_proj"]
            out, hidden = shape[1:] if shape[2] == down[1] else shape[:0:-1]
            for part in ("gate_proj", "up_proj"):
                yield f"{above}.0.{part}.weight", (out // 2, hidden)
            yield f"{above}.0.down_proj.weight", (hidden, out // 2)


def _spell_roots(stored: Mapping[str, Shape]) -> Iterator[dict[str, Shape]]:
    """Give the names of a model with towers as other releases of transformers write them."""
    for old, new in _ROOTS:
        found = {name: shape for name, shape in stored.items() if name.startswith(old)}
        spelled = {f"{new}{name.removeprefix(old)}": shape for name, shape in found.items()}
        if found and spelled.keys().isdisjoint(stored):
            yield spelled


def guess_stored(
    model: Any, config: Any, joined: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, Shape]:
    """Guess names of a checkpoint from the parameters: joined ones by the names of their parts."""
    packed = {**joined, **(getattr(config.quant_config, "packed_modules_mapping", None) or {})}
    found: dict[str, Shape] = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        parent, _, own = path.rpartition(".")
        shape = tuple(parameter.shape)
        if leaf in ("w13_weight", "w2_weight"):
            experts = path.removesuffix(".routed_experts")
            both = ("gate_proj", "up_proj", "w1", "w3")
            for part in both if leaf == "w13_weight" else ("down_proj", "w2"):
                rows = shape[1] // 2 if leaf == "w13_weight" else shape[1]
                found[f"{experts}.0.{part}.weight"] = (rows, *shape[2:])
            continue
        parts = packed.get(own, [own])
        sizes = _split(model.get_submodule(path), parts, shape)
        for part, rows in zip(parts, sizes, strict=False):
            found[f"{parent}.{part}.{leaf}".lstrip(".")] = (rows, *shape[1:])
    return found


def list_drafted(model: Any, config: Any) -> dict[str, Shape]:
    """Guess names of a drafter in a checkpoint; those that it does not have, the loader leaves."""
    found: dict[str, Shape] = {}
    for name, shape in guess_stored(model, config, _JOINED).items():
        spelled = name.replace(_BLOCK, ".").removeprefix("model.")
        found |= {f"{start}{spelled}": shape for start in _DRAFTED}
        found[_OWN_LAYER.sub(r"model.\2.0", name)] = shape
    return found


def _split(module: Any, parts: Sequence[str], shape: Shape) -> list[int]:
    """List the rows of the parts of a joined weight."""
    if len(parts) == 1 or not shape:
        return [shape[0] if shape else 1] * len(parts)
    sizes = getattr(module, "output_sizes", None)
    return list(sizes or [shape[0] // len(parts)] * len(parts))


def choose_layers(names: Mapping[str, Shape], modules: Iterable[str]) -> dict[str, Shape]:
    """Leave out layers that are like an earlier one, by the names of tensors and modules in it."""
    contents: dict[tuple[str, str], set[str]] = {}
    for name in (*names, *modules):
        if (found := _LAYER.match(name)) is not None:
            contents.setdefault((found[1], found[2]), set()).add(name[found.end() :])
    kinds: dict[tuple[str, frozenset[str], frozenset[str]], str] = {}
    kept: dict[str, Shape] = {}
    created: dict[str, set[str]] = {}
    for (root, number), own in contents.items():
        created.setdefault(number, set()).update(f"{root} {each}" for each in own)
    for name, shape in names.items():
        if (found := _LAYER.match(name)) is not None:
            root, number = found[1], found[2]
            kind = (root, frozenset(contents[root, number]), frozenset(created[number]))
            if kinds.setdefault(kind, number) != number:
                continue
        kept[name] = shape
    return kept


def fill(
    model: Any, names: Mapping[str, Shape], *, is_part: bool = False
) -> dict[str, tuple[list[tuple[str, str]], str]]:
    """Give each matrix to the class's loader: the parameters and shards that it fills, or why none.

    Of the experts of a layer the first stands for all. Where `is_part`, the loader stops in the end
    because the others are missing (vLLM 0.32.0 models/deepseek_mtp.py).
    """
    calls: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters():
        if (loader := getattr(parameter, "weight_loader", None)) is not None:
            parameter.weight_loader = _note_calls(name, loader, calls)
    found: dict[str, tuple[list[tuple[str, str]], str]] = {}
    for name, shape in names.items():
        expert = re.search(r"experts\.(\d+)\.", name)
        is_other = len(shape) < _MATRIX or name.endswith("bias")
        if is_other or (expert is not None and int(expert[1])):
            continue
        number = 1
        for size in shape:
            number *= size
        device = "meta" if number > _MOST_ON_CPU else "cpu"
        tensor = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        calls.clear()
        try:
            loaded = set(model.load_weights(iter([(name, tensor)])) or ())
        except AssertionError:  # of the shape: configs of defaults are not always consistent
            found[name] = (list(dict.fromkeys(calls)), "" if calls else "another shape")
            continue
        except Exception as error:  # noqa: BLE001 -- whatever the loader says is the reason
            is_alias = _ALIAS in str(error)  # of the embedding, which was not given beside it
            found[name] = ([], _LEFT_OUT if is_alias else type(error).__name__)
            if is_part and calls:
                found[name] = (list(dict.fromkeys(calls)), "")
            continue
        filled = list(dict.fromkeys(calls)) or [(each, "") for each in sorted(loaded)]
        found[name] = (filled, "" if filled else _LEFT_OUT)
    return found


def _note_calls(name: str, loader: Any, calls: list[tuple[str, str]]) -> Any:
    def load(*arguments: Any, **named: Any) -> Any:
        shards = [each for each in arguments if not isinstance(each, torch.Tensor)]
        shard = named.get("shard_id", named.get("loaded_shard_id", shards[-1] if shards else ""))
        calls.append((name, str(shard)))
        return loader(*arguments, **named)

    return load


if __name__ == "__main__":
    main()
