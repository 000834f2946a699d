"""What commands do before a model runs: silence libraries, and say where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fp8calib.api.models import Placement


class PlacementSettings(Protocol):
    """The options of a command that say where the model runs."""

    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def device_map(self) -> str | None: ...  # noqa: D102
    @property
    def memory(self) -> float | None: ...  # noqa: D102


def make_placement(settings: PlacementSettings) -> Placement:
    """Say where the model of a command runs."""
    from fp8calib.api.models import Placement  # noqa: PLC0415 -- imports transformers

    return Placement(
        device=settings.device,
        dtype=settings.dtype,
        device_map=settings.device_map,
        memory=settings.memory,
    )


def quiet_libraries() -> None:
    """Turn off the progress bars and messages of transformers."""
    import transformers  # noqa: PLC0415

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
