"""Run `fp8calib card`: write the model card, print the command that uploads it."""

from __future__ import annotations

from fp8calib.api.card.page import card
from fp8calib.cli.console import print_json, print_text, prints_json, warn
from fp8calib.cli.setup import quiet_libraries
from fp8calib.requests.card import CardRequest


def run_card(settings: CardRequest) -> None:
    """Write the card of a folder."""
    quiet_libraries()
    written = card(
        settings.folder,
        verify_reports=settings.verify_reports or (),
        base_model=settings.base_model,
        repo=settings.repo,
        quantized_by=settings.quantized_by,
        model=settings.model,
        force=settings.force,
    )
    for text in written.warnings:
        warn(text)
    if prints_json():
        print_json({"path": str(written.path), "upload": written.upload})
        return
    print_text(f"written to {written.path}")
    print_text(f"publish it with:\n    {written.upload}")
