"""The kinds of servers that can be asked, by name."""

from __future__ import annotations

from typing import TypeAlias

from fp8calib.plugins.server.kinds.sglang import SglangServer
from fp8calib.plugins.server.kinds.vllm import VllmServer

ServerKind: TypeAlias = VllmServer | SglangServer
KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (VllmServer(), SglangServer())}
