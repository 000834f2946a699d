"""Make candidates of statistics and files for a model, and of rules; see what the engine loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fp8calib.calibration.calibration_stats import RunStats, load_stats_file
from fp8calib.calibration.job import RunModel
from fp8calib.calibration.origin import STATS_NAME, calibrate_first, is_stats_file
from fp8calib.checkpoint.locations import refuse_external_links, require_path
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.engine import Engine
from fp8calib.engines.status import Status
from fp8calib.errors import Fp8CalibError, ModelError, UsageError, VerificationError, shorten
from fp8calib.formats.compute import compute_kv_scales
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.table import ScaleTable
from fp8calib.model.device import DTYPES
from fp8calib.model.geometry import ModelGeometry, Role, Site
from fp8calib.model.geometry_from_config import is_plain, read_geometry
from fp8calib.numerics.rules import Rule, ScaleRules
from fp8calib.numerics.schemes import find_scheme
from fp8calib.verification.candidates import (
    Target,
    build_kv_candidate,
    build_scheme,
    check_model,
    fit_to_model,
    list_defaulted,
    make_unscaled_table,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import SCALE_ONE, RefusedCandidate

if TYPE_CHECKING:  # statistics for a common model need no replay
    from fp8calib.engines.replay.verdicts import EngineReport

Scales = str | Path | RunStats
"""A candidate: statistics in memory, or the path of statistics, scales or an FP8 checkpoint."""


def require_head(model: RunModel) -> None:
    """Refuse a model that predicts no tokens."""
    if model.prepared.model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model.prepared.model).__name__} has no output head, so it predicts no tokens "
            "whose divergence could be measured",
            hint="verify the model with its language-model head (a ...ForCausalLM class)",
        )


def make_candidates(
    target: Target, scales: Iterable[Scales], scheme: str | None
) -> tuple[list[Candidate], list[Candidate], tuple[RefusedCandidate, ...]]:
    """Read and make candidates; some may be refused.

    Statistics are for the weights and inputs of `scheme`, or for the KV cache. If no candidate is
    left, the fault of the first is raised.

    Returns:
        Those of `scales`; those, a scheme without statistics, and scale 1.0; what is refused.
    """
    opened: list[Candidate] = []
    faults: dict[str, Fp8CalibError] = {}

    for index, item in enumerate(scales):
        name = str(item)
        if isinstance(item, RunStats):
            name = f"statistics-{index}" if index else "statistics"
        try:
            made = open_candidate(item, target, name=name, scheme=scheme)
            table = made.table
            # e4m3fn and e4m3fnuz differ in range
            if table is not None and not made.weights and table.fmt is not target.fmt:
                raise ModelError(
                    f"{name}: the scales are for {table.fmt.name}, but the KV cache is emulated in "
                    f"{target.fmt.name}",
                    hint=f"use --fp8-dtype {table.fmt.name}",
                )
            opened.append(made)
        except (ModelError, VerificationError) as error:
            faults[name] = error
    if faults and not opened:
        raise next(iter(faults.values()))
    others = [open_candidate(None, target)]
    if scheme is not None and not opened:
        others.insert(0, open_candidate(None, target, scheme=scheme))
    refused = (
        RefusedCandidate(name=name, why=error.message, hint=error.hint)
        for name, error in faults.items()
    )
    return opened, [*opened, *others], tuple(refused)


def make_rules(
    target: Target, rules: Iterable[Rule], opened: Sequence[Candidate]
) -> Mapping[str, Candidate]:
    """Make a candidate for each rule, from the first statistics."""
    first = next((each for each in opened if each.stats is not None), None)
    found = {}
    for rule in rules:
        if first is None or first.stats is None or first.table is None:
            raise UsageError(
                "--rules needs statistics, and no --scales holds any",
                hint=calibrate_first("--scales"),
            )
        has_query = any(site.role is Role.Q for site in first.table.scales)
        own = ScaleRules(rule=rule)
        table = compute_kv_scales(first.stats, target.fmt, rules=own, query=has_query)
        made = build_kv_candidate(str(rule), table, target.numerics, origin=str(rule))
        found[str(rule)] = fit_to_model(made, target)
    return found


def find_candidate(name: str) -> Path:
    """Find the file or folder of a candidate; in the output of a calibration, its statistics."""
    path = Path(name)
    require_path(path, option="--scales")
    if not path.is_dir():
        return path
    refuse_external_links(path)
    return path / STATS_NAME if is_stats_file(path / STATS_NAME) else path


def open_candidate(
    given: Scales | ScaleTable | None,
    target: Target,
    *,
    name: str = "statistics",
    scheme: str | None = None,
) -> Candidate:
    """Read what is compared with the model, check that it belongs to it, and emulate it.

    It is statistics, called `name`, or a path: of a stats file, of the output folder of a
    calibration, of scales of any dialect, or of an FP8 checkpoint, which is read as the engine
    reads it. Without any it is `scheme`, or an FP8 KV cache at scale 1.0. Statistics are for the
    weights and inputs of `scheme`, or for the KV cache: with the scales that `export` writes, of q
    as well if q needs a scale, or that are in their overlay.
    """
    return fit_to_model(_open(given, target, name, scheme), target)


def _open(
    given: Scales | ScaleTable | None, target: Target, name: str, scheme: str | None
) -> Candidate:
    if isinstance(given, ScaleTable):
        return build_kv_candidate("scales", given, target.numerics, origin="given")
    if given is None and scheme is not None:
        return build_scheme(scheme, scheme, target)
    if given is None:
        table = make_unscaled_table(target.prepared.geometry, target.fmt)
        return build_kv_candidate(SCALE_ONE, table, target.numerics)
    folder = None
    if not isinstance(given, RunStats):
        name, path = str(given), find_candidate(str(given))
        if is_stats_file(path):
            given, folder = load_stats_file(path), path.parent
        elif scheme is not None:
            raise UsageError(
                f"--scheme {scheme} needs statistics, and {name} holds none",
                hint="leave out --scheme to verify the scales of the file",
            )
        else:
            # most candidates are statistics
            from fp8calib.verification.open_files import open_file  # noqa: PLC0415

            return open_file(name, path, target)
    check_model(name, given.origin, target)
    stats = _rename_sites(given, target.prepared.geometry)
    if scheme is not None:
        made = build_scheme(name, scheme, target, stats)
    else:
        has_query = bool(stats.list_unfit_queries())
        overlay = None if folder is None else folder / find_dialect("kv-overlay").path()
        if has_query and overlay is not None and overlay.is_dir():
            files = map(TensorFile, overlay.glob("*.safetensors"))
            has_query = any(key.endswith(".q_scale") for each in files for key in each.tensors)
        table = compute_kv_scales(stats, target.fmt, query=has_query)
        made = build_kv_candidate(name, table, target.numerics, origin="statistics, amax")
    return replace(made, stats=stats, origin=stats.origin)


def _rename_sites(stats: RunStats, geometry: ModelGeometry) -> RunStats:
    """Rename the sites to the paths of `geometry`, which is of the same checkpoint.

    A multimodal model in memory has its text decoder at another path than the decoder alone that is
    loaded from its folder. Layers correspond by index, and modules by their order in a layer.
    """
    sizes = {"out_features", "in_features", "num_experts"}  # of linears
    own, other = (
        [
            (part.module, part.model_dump(include=sizes))
            for layer in each.layers
            for part in (layer.attention, *layer.linears)
            if part is not None
        ]
        for each in (stats.geometry, geometry)
    )
    if [size for _, size in own] != [size for _, size in other]:
        raise ModelError(
            "the layers of the statistics are not those of the model", hint="calibrate this model"
        )
    paths = {old: new for (old, _), (new, _) in zip(own, other, strict=True)}
    if all(old == new for old, new in paths.items()):
        return stats
    sites = {
        Site(paths.get(site.module, site.module), site.role): found
        for site, found in stats.sites.items()
    }
    renamed = stats.header.model_copy(update={"geometry": geometry})
    return replace(stats, header=renamed, sites=sites)


# --- whether the emulated engine loads them and uses their KV scales: its loader is replayed ------


def judge_loading(
    engine: Engine, model: RunModel, opened: Sequence[Candidate], scheme: str | None
) -> tuple[list[str], list[str]]:
    """Find the candidates that the engine cannot load, or whose KV scales it does not use.

    Returns:
        Their names, and warnings: of them, of those that it may not load, and of a version of the
        engine that the rules are not of.
    """
    warnings = [f"{engine.title}: {engine.note}"] if engine.note else []
    if engine.replay_folder is None:
        return [], warnings
    release, figures = engine.release, "the figures are those of its arithmetic"
    reports = dict(_replay_all(engine, model, opened, scheme))
    candidates = {each.name: each for each in opened}
    unusable: list[str] = []
    for name in reports | candidates:
        report, found, text = reports.get(name), candidates.get(name), ""
        if report is not None and report.load_fault:
            text = f"{release} cannot load it ({report.load_fault}); {figures} alone"
        elif found is not None and (why := _find_unused(found, report, model, engine)):
            text = f"{release} does not use its KV scales ({why}); {figures} with them"
        if text:
            unusable.append(name)
        elif report is not None and report.unknown:
            text = f"whether {release} loads it is unknown ({report.unknown[0]})"
        if text:
            warnings.append(f"{'the unquantized model' if name == SCALE_ONE else name}: {text}")
    return unusable, warnings


def _replay_all(
    engine: Engine, model: RunModel, opened: Sequence[Candidate], scheme: str | None
) -> Iterator[tuple[str, EngineReport]]:
    """Replay the loader on the folders of candidates and the model, and on what a scheme writes.

    What is no checkpoint, or of a model that is not known, is left out.
    """
    places = {each.name: find_candidate(each.name) for each in opened if each.stats is None}
    has_folder = not model.is_live and model.checkpoint.has_weights
    is_unquantized = has_folder and not model.checkpoint.form
    if is_unquantized and (engine.make_reader is None or not is_common(model)):
        places[SCALE_ONE] = model.source.folder
    for name, path in places.items():
        if (report := _replay(path, engine)) is not None:
            yield name, report
    if scheme is None or not is_unquantized or find_scheme(scheme).has_static_inputs:
        return  # static scales would need statistics
    # most candidates have no scheme
    from fp8calib.quantization.plan import make_plan  # noqa: PLC0415
    from fp8calib.quantization.select import find_selection  # noqa: PLC0415
    from fp8calib.quantization.settings import make_settings  # noqa: PLC0415
    from fp8calib.quantization.write import write_outline  # noqa: PLC0415

    try:
        selection = find_selection(model.checkpoint)
        plan = make_plan(model.checkpoint, make_settings(scheme), selection)
    except Fp8CalibError:  # verify names what it cannot emulate itself
        return
    with TemporaryDirectory(prefix="fp8calib-") as folder:
        write_outline(plan, Path(folder))
        if (report := _replay(Path(folder), engine)) is not None:
            yield from dict.fromkeys([each.name for each in opened] or [scheme], report).items()


def is_common(model: RunModel) -> bool:
    """Whether vLLM and SGLang load a folder as transformers does, in all of their releases.

    It is of a common class, its config has no odd setting, and its files hold the parameters of
    this class in 16 or 32 bits, and nothing else.
    """
    folder, stored = model.source.folder, model.checkpoint
    return (
        is_plain(folder, model.source.raw_config)
        and stored.tensors.keys() == {name for name, _ in model.prepared.model.named_parameters()}
        and all(TORCH_DTYPES.get(each.dtype) in DTYPES.values() for each in stored.tensors.values())
        and {each.path for each in stored.files} == set(folder.rglob("*.safetensors"))
        and not stored.unlisted
    )


def _replay(folder: Path, engine: Engine) -> EngineReport | None:
    from fp8calib.engines.check import check_folder  # noqa: PLC0415 -- most of the code
    from fp8calib.engines.replay.folder import open_folder  # noqa: PLC0415

    if not (folder / CONFIG_NAME).is_file():
        return None
    found = open_folder(folder)
    try:
        geometry = read_geometry(found.path, found.config)
    except ModelError:
        return None
    return check_folder(found, geometry, [engine.key], 1)[engine.key]


def _find_unused(
    opened: Candidate, report: EngineReport | None, model: RunModel, engine: Engine
) -> str:
    """Say why an engine does not use KV scales; empty if it does, or if there are none.

    What it does with those of latents, and with a checkpoint's that it misreads, is emulated.
    """
    table, path = opened.table, Path(opened.name)
    if table is None or opened.stats is not None or model.is_live:
        return ""
    if table.geometry.has_latent_attention:
        return ""
    unused = {Status.DROPPED, Status.DEFAULTED}
    if path.suffix == ".json":
        from fp8calib.engines.check import check_folder  # noqa: PLC0415 -- most of the code
        from fp8calib.engines.replay.folder import open_folder  # noqa: PLC0415

        unused |= {Status.MISREAD, Status.BAD, Status.REFUSED}
        folder = open_folder(model.source.folder)
        checked = check_folder(folder, table.geometry, [engine.key], table.tp, file=path)
        report = checked[engine.key]
    emulated = list_defaulted(table)
    layers = () if report is None else report.layers
    verdicts = (v for each in layers if each.layer not in emulated for v in (each.k, each.v))
    return next((shorten(each.why) for each in verdicts if each.status in unused), "")
