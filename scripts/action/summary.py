"""Write the job summary, the annotations and the outputs of action.yml; fail as the commands did.

It runs in GitHub Actions, with the Python that has fp8calib, and imports nothing of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CANNOT_TELL = 9


def main(folder: Path, receipt: Path) -> int:
    """Tell what `check` and `verify` found; give the larger exit code."""
    found = {path.stem: _load(path) for path in sorted(folder.glob("*.json"))}
    codes = {name: int((folder / f"{name}.code").read_text()) for name in found}
    lines = [text for name, result in found.items() for text in _describe(name, result)]
    lines += [f"The receipt: `{receipt}`", ""] if receipt.is_file() else []
    _append("GITHUB_STEP_SUMMARY", "\n".join(["## fp8calib", "", *lines]))
    for name, result in found.items():
        for level, text in _list_messages(result, failed=codes[name] != 0):
            print(f"::{level} title=fp8calib {name}::{_escape(text)}")
    worst = max(codes.values(), default=1)
    only_unknown = all(code in (0, CANNOT_TELL) for code in codes.values())
    verdict = "pass" if not worst else "cannot-tell" if only_unknown else "fail"
    shown = receipt if receipt.is_file() else ""
    _append("GITHUB_OUTPUT", f"verdict={verdict}\nreceipt={shown}")
    return worst


def _load(path: Path) -> dict[str, Any]:
    """Load what a command printed; nothing, if it crashed."""
    text = path.read_text()
    loaded: dict[str, Any] = json.loads(text) if text.strip() else {}
    return loaded


def _describe(name: str, result: dict[str, Any]) -> Iterator[str]:
    """Write a result as Markdown."""
    if "engines" in result:
        yield from (
            "| engine | release | loads it | layers with their KV scales |",
            "|---|---|---|---|",
        )
        for key, each in result["engines"].items():
            used = sum(_is_used(layer) for layer in each["layers"])
            loads = "yes" if each["ok"] else each["status"] or "no"
            yield f"| {key} | {each['version']} | {loads} | {used} of {len(each['layers'])} |"
    elif "candidates" in result:
        yield from ("| candidate | verdict | KLD | ratio |", "|---|---|---|---|")
        for each in result["candidates"]:
            kld = _spell(each["kld_mean"], each["kld_se"])
            ratio = _spell(each["ppl_ratio"], each["ppl_ratio_se"])
            yield f"| {Path(each['name']).name} | {each['verdict']} | {kld} | {ratio} |"
        yield from ("", result["advice"])
    else:
        yield f"`fp8calib {name}` failed: {result.get('error', {}).get('message', 'see the log')}"
    yield ""


def _list_messages(result: dict[str, Any], *, failed: bool) -> Iterator[tuple[str, str]]:
    """List the annotations: what made the job fail as errors, all else as warnings."""
    level = "error" if failed else "warning"
    for key, each in result.get("engines", {}).items():
        if not each["ok"]:
            whys = [layer[role]["why"] for layer in each["layers"] for role in ("k", "v")
                    if layer[role]["status"] != "used"]  # fmt: skip
            weights = [each["weights"]["why"]] if each["weights"] else []
            texts = [*weights, *each["suspicious"], *each["unknown"], *whys[:1]]
            yield from (("error", f"{key} {each['version']}: {text}") for text in texts[:3])
    for each in result.get("candidates", ()):
        if each["verdict"] in ("fail", "cannot-tell", "warn"):
            name = Path(each["name"]).name
            kind = level if each["verdict"] != "warn" else "warning"
            yield kind, f"{name}: {each['verdict']}: {each['verdict_why']}"
    yield from (("warning", text) for text in result.get("warnings", ()))
    if "error" in result or not result:
        yield "error", result.get("error", {}).get("message", "the command ended without a result")


def _is_used(layer: dict[str, Any]) -> bool:
    return all(layer[role]["status"] == "used" for role in ("k", "v"))


def _spell(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g} ± {'?' if error is None else f'{error:.2g}'}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _append(variable: str, text: str) -> None:
    with Path(os.environ[variable]).open("a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
