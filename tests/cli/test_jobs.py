"""The templates of scripts/jobs: their commands run as schedulers run them, and give one result.

Stand-ins take the place of Slurm, Ray, SkyPilot and Kubernetes. Where a scheduler's own parser is
installed, it reads the file too.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.program import succeed
from tests.docs.pages import DOCS, ROOT
from tests.kit.minutes import takes_minutes

FOLDER = ROOT / "scripts" / "jobs"
QUICK = ("--samples", "8", "--seq-len", "16", "--dtype", "float32")
PROGRAM = f"""#!/usr/bin/env bash
exec {shlex.quote(sys.executable)} -m fp8calib "$@" $EXTRA
"""
RAY = """#!/usr/bin/env bash
# Stands for `ray job`: runs what is submitted at once, in the order of submission.
[ "$1" = job ] || exit 2
case $2 in
submit)
    while [ "$1" != -- ]; do shift; done
    shift
    "$@" >>"$LOG" 2>&1 ;;
logs) ;;
status) echo "Job '$3' succeeded" ;;
*) exit 2 ;;
esac
"""
SCONTROL = '#!/usr/bin/env bash\necho "$@" >>"$LOG"\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in (("fp8calib", PROGRAM), ("ray", RAY), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def make_environment(place: Path, **values: object) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "LOG": str(place / "log"),
        "EXTRA": "",
        **{name: str(value) for name, value in values.items()},
    }


def start(place: Path, *command: object, **values: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        env=make_environment(place, **values),
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def whole(model: Path, data: Path, tmp_path: Path) -> bytes:
    """Give the statistics of one run."""
    out = tmp_path / "whole"
    succeed("calibrate", model, "--data", data, *QUICK, "--out", out)
    return (out / "stats.safetensors").read_bytes()


@takes_minutes
def test_slurm_runs_an_array_of_shards_and_joins_them(
    place: Path, whole: bytes, model: Path, data: Path
) -> None:
    given = {"MODEL": model, "DATA": data, "OUT": place / "out"}
    options = _read_directives("slurm-shards.sbatch")
    assert (options["array"], options["signal"]) == ("1-4", "B:TERM@120")
    for part in (1, 2, 1):  # the first one is requeued, and has nothing left to do
        task = {"SLURM_ARRAY_TASK_ID": part, "SLURM_ARRAY_TASK_COUNT": 2}
        start(place, "bash", FOLDER / "slurm-shards.sbatch", *QUICK, **given, **task)
    done = start(place, "bash", FOLDER / "slurm-merge.sbatch", **given)
    assert "kv-overlay: ok" in done.stdout
    assert (place / "out" / "stats.safetensors").read_bytes() == whole


@takes_minutes
def test_slurm_saves_and_requeues_a_task_whose_time_ends(
    place: Path, whole: bytes, model: Path, data: Path
) -> None:
    given = {"MODEL": model, "DATA": data, "OUT": place / "out"}
    task = {"SLURM_ARRAY_TASK_ID": 1, "SLURM_ARRAY_TASK_COUNT": 1, "SLURM_ARRAY_JOB_ID": 77}
    program = place / "bin" / "fp8calib"
    # It waits after a batch, so that the signal arrives in the middle of a run.
    program.write_text(PROGRAM.replace("-m fp8calib", "-m tests.cli.program_paused"))
    shell = subprocess.Popen(
        ["bash", str(FOLDER / "slurm-shards.sbatch"), *QUICK],
        env=make_environment(place, **given, **task),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _wait_for_checkpoint(place / "out" / "shard-1.partial", shell)
    shell.send_signal(signal.SIGTERM)  # Slurm signals the shell alone: B:TERM
    printed, _ = shell.communicate(timeout=60)
    assert shell.returncode == 130, printed
    assert (place / "log").read_text() == "requeue 77_1\n"
    program.write_text(PROGRAM)
    done = start(place, "bash", FOLDER / "slurm-shards.sbatch", *QUICK, **given, **task)
    assert "no interrupted run found" not in done.stderr
    start(place, "bash", FOLDER / "slurm-merge.sbatch", **given)
    assert (place / "out" / "stats.safetensors").read_bytes() == whole


def _wait_for_checkpoint(partial: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if any(partial.glob("*.safetensors")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(list(partial.parent.iterdir()))


def _read_directives(name: str) -> dict[str, str]:
    text = (FOLDER / name).read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.M))


def test_slurm_gives_vllm_all_gpus_of_the_node(place: Path) -> None:
    (place / "bin" / "fp8calib").write_text('#!/usr/bin/env bash\necho "$@" >"$LOG"\n')
    given = {"MODEL": "org/name", "DATA": "calib.jsonl", "OUT": "out", "SLURM_GPUS_ON_NODE": 8}
    start(place, "bash", FOLDER / "slurm-vllm.sbatch", **given)
    said = (place / "log").read_text().split()
    assert said == shlex.split(
        "calibrate org/name --data calib.jsonl --engine vllm --tensor-parallel-size 8 --out out "
        "--resume"
    )
    assert _read_directives("slurm-vllm.sbatch")["gpus-per-node"] == "8"


@takes_minutes
def test_ray_runs_a_job_a_shard_and_joins_them(
    place: Path, whole: bytes, model: Path, data: Path
) -> None:
    given = {"MODEL": model, "DATA": data, "OUT": place / "out", "SHARDS": 2}
    for _ in range(2):  # again, as after a failure
        start(place, "bash", FOLDER / "ray-jobs.sh", *QUICK, **given)
    assert (place / "out" / "stats.safetensors").read_bytes() == whole


@takes_minutes
def test_skypilot_runs_a_shard_a_node(place: Path, whole: bytes, model: Path, data: Path) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    values = {**task["envs"], "MODEL": model, "DATA": data, "OUT": place / "out"}
    for rank in range(task["num_nodes"]):
        node = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_NODES": task["num_nodes"]}
        start(place, "bash", "-c", task["run"], **values, **node, EXTRA=" ".join(QUICK))
    start(place, "bash", FOLDER / "slurm-merge.sbatch", **values)
    assert (place / "out" / "stats.safetensors").read_bytes() == whole


@takes_minutes
def test_kubernetes_runs_a_shard_a_pod_and_joins_them(
    place: Path, whole: bytes, model: Path, data: Path
) -> None:
    job = _load_job("kubernetes.yaml")
    assert job["spec"]["completions"] == int(_list_env(job)["SHARDS"])
    given = {"MODEL": model, "DATA": data, "OUT": place / "out", "SHARDS": 2}
    for index in (0, 1, 1):
        extra = {"JOB_COMPLETION_INDEX": index, "EXTRA": " ".join(QUICK)}
        start(place, *_list_words(job), **{**_list_env(job), **given, **extra})
    merge = _load_job("kubernetes-merge.yaml")
    start(place, *_list_words(merge), **{**_list_env(merge), **given})
    assert (place / "out" / "stats.safetensors").read_bytes() == whole
    assert (place / "out" / "scales" / "kv-overlay" / "config.json").is_file()


def _load_job(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def _list_words(job: Any) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def _list_env(job: Any) -> dict[str, str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="kubernetes-validate: absent")
@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-merge.yaml"])
def test_kubernetes_accepts_the_jobs(name: str) -> None:
    import kubernetes_validate  # noqa: PLC0415

    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(_load_job(name), version, strict=True)
    job = _load_job(name)
    job["spec"]["parallel"] = 4
    with pytest.raises(Exception, match="parallel"):
        kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.skipif(find_spec("sky") is None, reason="skypilot is not installed")
def test_skypilot_accepts_the_task() -> None:
    import sky  # noqa: PLC0415

    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    assert (task.name, task.num_nodes) == ("fp8calib", 2)


def test_the_page_names_every_template() -> None:
    page = (DOCS / "ci.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if f"`{path.name}`" not in page] == []
