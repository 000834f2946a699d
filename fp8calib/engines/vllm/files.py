"""Which weights files of a folder vLLM opens, and in which order.

vLLM 0.26.0 to 0.33.0 `model_loader/default_loader.py` (`_prepare_weights`),
`model_loader/weight_utils.py` (`_natural_sort_key`), `transformers_utils/repo_utils.py`
(`list_filtered_repo_files`); read, and 0.32.0 run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch

from fp8calib.checkpoint.weight_index import read_index
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.errors import ModelError, cut_list, shorten

_PREFERRED = "consolidated*.safetensors"
_INDEX = "consolidated.safetensors.index.json"


def open_as_vllm(folder: ScaleFolder) -> ScaleFolder:
    """Give a folder as vLLM opens it: 2 before 10, and of `consolidated*` files nothing else.

    Such a file in a folder below is enough for vLLM to look for them, but it is not opened.
    """
    ordered = sorted(
        folder.files,
        key=lambda file: [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file)
        ],
    )
    found = folder.path.rglob(_PREFERRED)
    causes = sorted(str(each.relative_to(folder.path)) for each in found if each.is_file())
    if not causes:
        return replace(folder, files=ordered)
    chosen = {file for file in folder.files if fnmatch(file, _PREFERRED)}
    why = fix = ""
    if not chosen:
        why = f"because of {shorten(causes[0])} vLLM looks for {_PREFERRED} alone, and finds none"
        why, fix = f"{why} beside config.json (RuntimeError)", "move it out of the folder"
    elif (folder.path / _INDEX).is_file():
        try:
            listed = set(read_index(folder.path / _INDEX)["weight_map"].values())
        except ModelError as error:
            raise Refusal(error.message, fix="write it again") from error
        if missing := sorted(listed - chosen):
            why = f"{_INDEX} names {cut_list(missing, 3)}: FileNotFoundError"
            fix = "complete the download"
        chosen = listed
    if why:
        raise Refusal(why, fix=fix)
    return replace(
        folder,
        files=[file for file in ordered if file in chosen],
        tensors={file: each for file, each in folder.tensors.items() if file in chosen},
        faults={file: each for file, each in folder.faults.items() if file in chosen},
        preferred=f"vLLM opens {cut_list(sorted(chosen), 3)} and no other file",
        has_index=False,
        index=None,
        indexed=None,
    )
