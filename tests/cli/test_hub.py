"""Uploads and downloads by huggingface_hub with a Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.program import fail, succeed
from tests.docs.pages import ROOT
from tests.kit.hub import FakeHub, serve_hub
from tests.kit.minutes import takes_minutes


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_hub() as found:
        yield found


def spawn(
    hub: FakeHub, tmp_path: Path, *command: object, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a program whose huggingface_hub knows only this Hub, with its own home."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_TOKEN": hub.token,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=tmp_path,
        env=environment | changes,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "fp8"
    succeed("quantize", model, "--scheme", "fp8-dynamic", "--out", folder)
    (folder / ".hidden").write_text("not for others")
    return folder


def test_a_push_is_a_list_until_it_is_asked_for(checkpoint: Path) -> None:
    base = ("card", checkpoint, "--base-model", "org/name", "--force", "--push", "me/tiny")
    outcome = succeed(*base)
    assert "nothing is uploaded; --upload would send" in outcome.out
    assert "model.safetensors" in outcome.out
    assert ".hidden" not in outcome.out
    report = succeed(*base, "--json").json
    assert report["push"]["commit"] == ""
    sizes = {each["name"]: each["size_bytes"] for each in report["push"]["files"]}
    assert sizes["model.safetensors"] == (checkpoint / "model.safetensors").stat().st_size
    assert "fp8calib" not in os.environ.get("HF_TOKEN", "")
    fail(2, *base[:-1], "no id")
    fail(2, *base[:-2], "--upload")


@takes_minutes
def test_card_uploads_the_folder_to_a_private_repository(
    hub: FakeHub, checkpoint: Path, tmp_path: Path
) -> None:
    command = ("-m", "fp8calib", "card", checkpoint, "--base-model", "org/name", "--force")
    done = spawn(hub, tmp_path, *command, "--push", "me/tiny", "--upload")
    assert done.returncode == 0, done.stderr
    assert f"uploaded to me/tiny: {hub.url}/me/tiny/commit/" in done.stdout
    assert hub.private == {"me/tiny"}
    names = {path.name for path in checkpoint.iterdir()} - {".hidden"}
    held = hub.repos["me/tiny"]
    assert held.keys() == names
    assert all(held[name] == (checkpoint / name).read_bytes() for name in names)
    # a second time it is there already
    assert spawn(hub, tmp_path, *command, "--push", "me/tiny", "--upload").returncode == 0


@pytest.mark.parametrize("name", ["org", "org/a.git", "org/a--b", "örg/a", "org/a/b"])
def test_a_name_that_the_hub_refuses_is_refused_before(checkpoint: Path, name: str) -> None:
    command = ("card", checkpoint, "--base-model", "org/base", "--force")
    assert "no Hub id" in fail(2, *command, "--push", name)


@takes_minutes
def test_an_upload_without_a_token_or_with_a_wrong_one_says_so(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    scheme = ("--scheme", "w8a16", "--out", tmp_path / "out", "--push", "me/tiny", "--upload")
    command = ("-m", "fp8calib", "quantize", model, *scheme)
    done = spawn(hub, tmp_path, *command, HF_TOKEN="")
    assert (done.returncode, hub.asked) == (2, [])
    assert "there is no token of the Hub" in done.stderr
    assert not (tmp_path / "out").exists()
    done = spawn(hub, tmp_path, *command, "--json", HF_TOKEN="wrong")  # noqa: S106
    assert done.returncode == 7
    assert "me/tiny: the upload failed" in done.stderr
    assert hub.repos == {}
    assert (tmp_path / "out" / "config.json").is_file()  # the work of hours stays
    done = spawn(hub, tmp_path, *command, "--resume")
    assert done.returncode == 0, done.stderr
    assert "has no model card" in done.stderr
    assert "model.safetensors" in hub.repos["me/tiny"]


@takes_minutes
def test_a_download_continues_where_it_was_interrupted(
    hub: FakeHub, checkpoint: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    hub.repos["org/tiny"] = files
    hub.breaks = "model.safetensors"
    check = ("-m", "fp8calib", "check", "org/tiny", "--engine", "vllm")
    done = spawn(hub, tmp_path, *check)
    assert done.returncode == 0, done.stderr
    assert hub.breaks == ""  # it did break
    assert "org/tiny: ok" in done.stdout
    (tmp_path / "hf").rename(tmp_path / "whole")
    # killed after some files: only the others are fetched
    spawn(hub, tmp_path, *check)
    blobs = [path for path in (tmp_path / "hf").rglob("model.safetensors") if path.exists()]
    for blob in {path.resolve() for path in blobs}:
        blob.unlink()
    hub.asked.clear()
    assert spawn(hub, tmp_path, *check).returncode == 0
    fetched = [each.rpartition("/")[2] for each in hub.asked if each.startswith("GET /org/")]
    assert fetched == ["model.safetensors"]
