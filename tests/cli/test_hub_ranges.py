"""Check and extract-kv-scales with a Hub id: they download what they read, and notice lies."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8calib.checkpoint.hub import RANGED_FILES, RangedFile
from fp8calib.checkpoint.tensor_file import TensorFile
from tests import zoo
from tests.cli.program import Outcome, fail, run, succeed
from tests.kit.checkpoints import change_quantization
from tests.kit.hub import COMMIT, Answer, FakeHub, serve_hub

ID = "org/tiny"
SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a model whose embeddings are most of its bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    zoo.save("llama", folder, vocab_size=30_000)
    return folder


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the model in FP8 with KV scales, in two shards."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", folder)
    first = folder / "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").rename(first)
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor([0.002 + layer / 1000])
        for layer in range(2)
        for name in "kv"
    }
    stored = load_file(first)
    moved = scales | {"lm_head.weight": stored.pop("lm_head.weight")}
    save_file(stored, first, {"format": "pt"})
    save_file(moved, folder / SHARD, {"format": "pt"})
    files = dict.fromkeys(stored, first.name) | dict.fromkeys(moved, SHARD)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return change_quantization(folder, kv_cache_scheme=KV_SCHEME)


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as found:
        found.repos[ID] = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        constants = {
            "ENDPOINT": found.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": found.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        http = "huggingface_hub.utils._http.time"
        monkeypatch.setattr(http, SimpleNamespace(sleep=_add_wait, time=time.time))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        yield found
        assert not list(tmp_path.glob("fp8calib-*"))  # nothing is left


WAITED: list[float] = []


def _add_wait(seconds: float) -> None:
    WAITED.append(seconds)


def check(*options: object) -> Outcome:
    return run("check", ID, "--engine", "vllm", "--engine", "sglang", "--json", *options)


def extract(model: Path, out: Path, source: object = ID) -> Outcome:
    return succeed(
        *("extract-kv-scales", "--quantized-model", source, "--model", model, "--out", out),
        *("--source-dtype", "e4m3fn", "--other-weights"),
    )


def test_read_weights_downloads_all_and_a_downloaded_model_is_not_read_again(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(map(len, hub.repos[ID].values()))
    first = check("--read-weights")
    assert hub.sent_bytes >= whole
    hub.sent_bytes = 0
    second = check()
    assert (second.code, second.json) == (first.code, first.json)
    assert hub.sent_bytes == 0
    assert "read" not in second.err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert check().json == first.json


def test_only_the_scales_are_read_of_a_quantized_model(
    hub: FakeHub, model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    found = extract(model, tmp_path / "hub")
    extract(model, tmp_path / "local", checkpoint)
    for name in ("config.json", INDEX, SHARD):
        one, two = (tmp_path / each / name for each in ("hub", "local"))
        assert one.read_bytes() == two.read_bytes()
    assert f"{ID}: read " in found.err
    assert hub.sent_bytes < 500_000


def test_revision_and_token_are_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert check("--revision", "v2").code == 0
    assert f"GET /api/models/{ID}/revision/v2" in hub.asked
    assert set(hub.tokens) == {"Bearer hf_secret"}
    parts = [each for each in hub.asked if each.startswith("GET /org/")]
    assert all(f"/resolve/{COMMIT}/" in each for each in parts)  # one commit, also if v2 moves


def cut(answer: Answer) -> None:
    """Send half; HTTP notices."""
    answer.headers["Content-Length"] = str(len(answer.data))
    answer.data = answer.data[: len(answer.data) // 2]
    answer.headers["Connection"] = "close"


def shorten(answer: Answer) -> None:
    answer.data = answer.data[:-1]


def send_all(answer: Answer) -> None:
    answer.status = 200
    del answer.headers["Content-Range"]


def send_elsewhere(answer: Answer) -> None:
    answer.headers["Content-Range"] = answer.headers["Content-Range"].replace("-", "1-")


def give_status(status: int) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        answer.status, answer.data = status, b"no"
        del answer.headers["Content-Range"]

    return change


def stall(answer: Answer) -> None:
    answer.pause_s = 0.4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, "reading it from the hub failed: peer closed"),
        (shorten, "bytes, not"),
        (send_all, "the whole file"),
        (send_elsewhere, "not a part of the file"),
        (stall, "timed out"),
        (give_status(401), "HF_TOKEN"),
        (give_status(404), "check the name"),
        (give_status(500), "500"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_named(
    hub: FakeHub,
    change: Callable[[Answer], None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if change is stall:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.change = change
    message = fail(4, "check", ID)
    assert words in message
    assert f"{ID}/model-0000" in message
    assert "/fp8calib-" not in message


def test_a_failure_after_the_headers_is_no_fault_of_the_file(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def change(answer: Answer) -> None:
        seen.append(0)
        if len(seen) > 2:
            give_status(403)(answer)

    hub.change = change
    assert "HF_TOKEN" in fail(4, "check", ID)
    seen.clear()
    command = ("extract-kv-scales", "--quantized-model", ID, "--model", model)
    assert "HF_TOKEN" in fail(4, *command, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_whatever_is_read_is_downloaded_first(hub: FakeHub, tmp_path: Path) -> None:
    """Tensors larger than one request, in any order and several at once, and no byte twice."""
    generator = torch.Generator().manual_seed(0)
    stored = {
        f"w{number:03}": torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        for number, size in enumerate([20_000_000, *[7, 70_000] * 40, 9_000_000])
    }
    save_file(stored, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "part.safetensors"
    hub.repos["org/raw"] = {path.name: data}
    with RangedFile(path, "org/raw", COMMIT, len(data)) as ranged, TensorFile(path) as file:
        few = [name for name in stored if len(stored[name]) == 7]
        before = len(hub.asked)
        file.fetch(few)
        assert len(hub.asked) - before < 4  # what lies between them is read along
        for name in [*few, *reversed(stored)]:
            assert torch.equal(file.read(name), stored[name])
        assert ranged.read_bytes == hub.sent_bytes < len(data) * 1.05
    assert path not in RANGED_FILES


def test_a_hub_that_gives_no_sizes_and_names_out_of_the_folder(hub: FakeHub) -> None:
    hub.repos[ID] |= {"../../escape.json": b"{}", "/etc/escape.json": b"{}", "a/b/c.json": b"{}"}
    assert check().code == 0
    assert not [each for each in hub.asked if "escape" in each]
    hub.has_sizes = False
    assert "how large" in fail(4, "check", ID)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_repository_that_cannot_be_listed(hub: FakeHub, status: int) -> None:
    hub.fails = status
    message = fail(4, "check", ID)
    assert str(status) in message
    assert "check the name" in message
