"""Models whose config transformers does not know."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.errors import ModelError
from fp8calib.model.load import build_skeleton, open_source
from tests import zoo
from tests.kit.checkpoints import change_config
from tests.kit.multimodal import save_multimodal


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"auto_map": {"AutoConfig": "own.Own"}}, "needs the Python code of the checkpoint"),
        ({}, "cannot use it"),
    ],
)
def test_a_type_that_transformers_lacks_is_refused_by_what_helps(
    tmp_path: Path, own: dict[str, Any], says: str
) -> None:
    zoo.save("llama", tmp_path)
    change_config(tmp_path, model_type="own", **own)
    with pytest.raises(ModelError, match=says) as error:
        open_source(str(tmp_path))
    assert ("--trust-remote-code" in error.value.hint) is bool(own)


def test_trust_changes_no_class_where_the_checkpoint_has_no_code(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path)
    source = open_source(str(tmp_path), trust_remote_code=True)
    skeleton = build_skeleton(source, dtype=torch.float32)
    assert type(skeleton).__name__ == "LlavaForConditionalGeneration"
