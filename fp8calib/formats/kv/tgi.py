"""`tgi`: the checkpoint of TGI's pull request #2028, one `kv_scale` a layer.

Merged TGI reads `kv_scale` if a layer has no `k_scale` and `v_scale`; only the branch of the pull
request reads the config key.
"""

from __future__ import annotations

from pathlib import Path

from fp8calib.formats.dialect import Dialect, WriteJob
from fp8calib.formats.kv.kv_scales import read_kv_scales


def _write(job: WriteJob, folder: Path) -> None:
    """Write the model with one scale for k and v of every layer, fp32 0-dim."""
    import torch  # noqa: PLC0415 -- the names of dialects must cost nothing

    table = job.table
    scales = {
        f"{attention.checkpoint_module}.kv_scale": torch.tensor(table.kv(attention))
        for _, attention in table.geometry.attentions()
    }
    updates = {"kv_cache_torch_dtype": table.fmt.dtype_name}
    job.save_checkpoint(folder, scales, config_updates=updates, fmt=None)


TGI_CHECKPOINT = Dialect(
    name="tgi",
    description="an overlay with `kv_scale` and `kv_cache_torch_dtype`, the format of TGI's pull "
    "request 2028",
    path_pattern="tgi",
    write=_write,
    recognise=lambda files: bool(files.spellings),
    read=read_kv_scales,
    needs_model=True,
    joins_kv=True,
)
