"""From a scheme, or an FP8 checkpoint, to what an engine does with weights and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from fp8calib.dialects.fp8_checkpoint import Activation, ActivationKind, Fp8Checkpoint
from fp8calib.errors import VerificationError
from fp8calib.fp8 import Fp8Format
from fp8calib.geometry import Linear, ModelGeometry
from fp8calib.model.weights import WeightSource
from fp8calib.scales import ScaleTable, compute_linear_scales, scale_of
from fp8calib.sites import Role, Site
from fp8calib.stats import CalibrationStats
from fp8calib.verify.profiles import EngineProfile
from fp8calib.verify.quantizer import Dynamic, Quantizer
from fp8calib.verify.schemes import Scheme
from fp8calib.verify.weights import (
    Requantized,
    Stored,
    WeightChange,
    WeightParameter,
    find_parameters,
)
