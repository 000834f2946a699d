"""The site's page on engines shows every record, and each has a meaning and a source."""

from dataclasses import fields

from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.facts.release import SGLANG_FACTS, VLLM_FACTS
from fp8calib.engines.registry import ENGINES
from fp8calib.engines.weights.rules import read_weight_rules
from scripts.engine_page import list_facts, make_page, read_meanings

RELEASES = [release for each in ENGINES.values() for release in (each, *each.releases)]


def test_the_page_shows_every_engine_and_every_rule() -> None:
    page = make_page()
    for engine in ENGINES.values():
        assert not engine.version or f"| {engine.title} | `{engine.key}` |" in page, engine.key
    for rule in (rule for engine in RELEASES for rule in read_weight_rules(engine.facts)):
        assert rule.why.replace("<", "&lt;") in page
    for numerics in filter(None, (engine.numerics for engine in RELEASES)):
        assert [name for name in numerics.sources if f"| `{name}` = " not in page] == []


def test_a_fact_is_shown_with_its_releases_and_its_source() -> None:
    rows = [row for row in list_facts(VLLM_FACTS) if row[1].startswith("own-file-algorithm")]
    place = "transformers_utils/model_arch_config_convertor.py _normalize_quantization_config"
    older = "own-file-algorithm: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4"
    assert rows == [
        ("vLLM", older, "", "", "run", place),
        ("vLLM", "own-file-algorithm: MIXED_PRECISION", "0.33.0", "", "run", place),
    ]


def test_every_row_of_a_table_has_the_columns_of_its_head() -> None:
    for table in make_page().split("\n\n"):
        rows = [line for line in table.splitlines() if line.startswith("| ")]
        assert len({line.count(" | ") for line in rows}) <= 1, rows[:1]


def test_every_field_and_rule_has_a_meaning_and_a_source() -> None:
    assert read_meanings(Numerics).keys() >= {each.name for each in fields(Numerics)}
    for path in (VLLM_FACTS, SGLANG_FACTS):
        assert all(source for *_, source in list_facts(path))
    assert all(rule.source for engine in RELEASES for rule in read_weight_rules(engine.facts))
    numerics = filter(None, (engine.numerics for engine in RELEASES))
    assert all(all(each.sources.values()) for each in numerics)
