"""A release does not know a type of model that the transformers it demands does not know."""

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import fp8calib
from fp8calib.engines.facts.release import NEWER_TYPES, explain_type
from fp8calib.engines.registry import find_replayed
from tests import zoo
from tests.architectures import families
from tests.kit.checkpoints import change_config
from tests.truth.test_ranks import FAMILIES

CASES = [  # of transformers' and the engines' own files, read
    ("vllm", "inkling2_text", "<5.21.0,>=5.16.1"),
    ("vllm==0.32", "inkling2_text", "<5.20.0,>=5.16.1"),
    ("sglang", "inkling2_text", "==5.19.0"),
    ("vllm==0.30", "inkling2_text", ""),  # any transformers from 5.10.4 on
    ("vllm", "granitemoe_swa", ""),
    ("sglang==0.5.21", "granitemoe_swa", "==5.12.1"),
    ("sglang", "granitemoe_swa", ""),
    ("vllm==0.31", "hy_v4", ""),
    ("vllm==0.31", "gte", "<5.18.0,>=5.10.4"),
    ("sglang==0.5.20", "hy_v4", ""),  # it has the config itself
    ("sglang==0.5.19", "hy_v4", "==5.12.1"),
    ("sglang==0.5.16", "llama", ""),
    ("sglang==0.5.16", "of_nobody", ""),
]


@pytest.mark.parametrize(("engine", "model_type", "demanded"), CASES)
def test_what_a_release_demands_decides(engine: str, model_type: str, demanded: str) -> None:
    why = explain_type(find_replayed(engine).facts, model_type)
    assert (f" demands transformers {demanded}, " in why) == bool(demanded)
    assert bool(why) == bool(demanded)


def test_the_installed_transformers_knows_the_types_that_it_should() -> None:
    installed = [int(each) for each in transformers.__version__.split(".")[:2]]
    for name, minor in NEWER_TYPES.items():
        is_known = [int(each) for each in minor.split(".")] <= installed
        assert (name in CONFIG_MAPPING_NAMES) == is_known, name


@pytest.mark.parametrize(
    ("family", "name"),
    [("minimax_m2", "scoring_func"), ("lfm2", "block_dim"), ("deepseek_v3", "topk_method")],
)
def test_a_field_that_the_class_reads_without_a_default_is_missed(
    tmp_path: Path, family: str, name: str
) -> None:
    """VLLM 0.32.0 ends in an AttributeError, or in a KeyError (run)."""
    zoo.save(family, tmp_path / "model")
    engines = ["vllm", "vllm==0.32", "sglang"]
    whole = fp8calib.check(tmp_path / "model", engine=engines).engines
    assert "refused" not in {
        each.status for report in whole.values() for each in report.slots.values()
    }
    change_config(tmp_path / "model", lambda config: config.pop(name))
    lacking = fp8calib.check(tmp_path / "model", engine=engines).engines
    for engine in ("vllm", "vllm==0.32"):
        assert {each.status for each in lacking[engine].slots.values()} == {"refused"}
        assert f"config.json lacks {name}, " in lacking[engine].layers[0].k.why
    assert "refused" not in {each.status for each in lacking["sglang"].slots.values()}


def test_a_config_of_transformers_that_vllms_class_does_not_read_is_refused(
    tmp_path: Path,
) -> None:
    """VLLM 0.32.0 builds InklingForCausalLM from a config class of its own (run)."""
    families.save("inkling_text", FAMILIES["inkling_text"], tmp_path / "model")
    reports = fp8calib.check(tmp_path / "model", engine=["vllm", "vllm==0.32"]).engines
    for report in reports.values():
        assert "config.json lacks padded_vocab_size, " in report.layers[0].k.why


def test_a_field_without_which_the_class_was_not_built_is_missed(tmp_path: Path) -> None:
    """VLLM 0.32.0 ends in an AttributeError; transformers' config class has no such field."""
    layers = {"num_dense_layers": 1, "layer_types": ["sliding_attention", "full_attention"]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    families.save("afmoe", {"head_dim": 8, **layers, **experts}, tmp_path / "model")
    lacking = fp8calib.check(tmp_path / "model", engine="vllm==0.32").engines["vllm==0.32"]
    assert "config.json lacks n_group, " in lacking.layers[0].k.why
    change_config(tmp_path / "model", lambda config: config.update(n_group=1))
    whole = fp8calib.check(tmp_path / "model", engine="vllm==0.32").engines["vllm==0.32"]
    assert whole.layers[0].k.status == "defaulted"
