"""How an engine reads the linears of a checkpoint folder by its quantization config."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from fp8calib.dialects.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.dialects.fp8.quantization_config import StoredScheme
from fp8calib.dialects.fp8.registry import FP8_DIALECTS, load_finder
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.weights.expected import Expected, OtherScheme, list_expected
from fp8calib.engines.weights.linears import GroupKind, LinearGroup, StoredLinear
from fp8calib.engines.weights.schemes import Found, GroupSchemes
from fp8calib.errors import ModelError

_CONFIG_KEYS = (
    "quantization_config",
    "modelopt",
    "text_config.quantization_config",
    "compression_config",
)


class LinearReader:
    """The linears that an engine creates by a folder's config; engines override what differs."""

    def __init__(
        self, folder: ScaleFolder, schemes: GroupSchemes, *, joins_experts: bool = True
    ) -> None:
        self.schemes = schemes
        self._joins_experts = joins_experts
        dialects = FP8_DIALECTS.values()
        own = next((each for each in dialects if each.has_method(schemes.method)), None)
        self._dialect = own or COMPRESSED_TENSORS
        with suppress(ModelError):  # a config that the methods with rules here may still read
            dialect, schemes.find_stored = load_finder(folder.path, folder.config)
            self._dialect = own or dialect

    def require_judged(self, folder: ScaleFolder) -> None:
        """Raise `Unjudged` where more than the stored linears tells what the engine does."""

    def joins(self, group: LinearGroup) -> bool:
        """Tell whether the engine joins a group; otherwise each linear is a group of its own."""
        return self._joins_experts or group.kind is not GroupKind.EXPERTS

    def find_scheme(self, group: LinearGroup) -> Found:
        """Find the scheme by which the engine creates a group.

        Raises:
            Refusal: the engine does not start, or that cannot be told.
        """
        return self.schemes.find(group)

    def creates(self, group: LinearGroup) -> bool:
        """Tell whether the engine creates a group by the config, whatever is stored."""
        return group.is_known

    def list_expected(
        self, group: LinearGroup, linear: StoredLinear, scheme: StoredScheme | OtherScheme
    ) -> Mapping[str, Expected]:
        """List the tensors that a linear quantized by this scheme has to have."""
        return list_expected(group, linear, scheme, self._dialect)


def make_plain_reader(folder: ScaleFolder, *, joins_experts: bool = True) -> LinearReader:
    """Make the reader of an engine without rules of its own: it takes the config as it is meant.

    Raises:
        Refusal: the config is no object.
    """
    section = find_quantization(folder, keys=_CONFIG_KEYS) or {}
    schemes = GroupSchemes(section, folder.config)
    return LinearReader(folder, schemes, joins_experts=joins_experts)
