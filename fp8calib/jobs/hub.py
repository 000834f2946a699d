"""Upload a folder to the Hub by huggingface_hub, with the user's own token, if asked for."""

from __future__ import annotations

import re
from pathlib import Path

from fp8calib.checkpoint.disk import format_size
from fp8calib.errors import ExportError, UsageError, first_line
from fp8calib.jobs.reporter import Reporter
from fp8calib.results.push import PushedFile, PushResult

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_CARD = "README.md"


def check_push(repo: str | None, *, uploads: bool) -> None:
    """Refuse what cannot be uploaded, before hours of work.

    Raises:
        UsageError: there is no repository, or no token.
    """
    if repo is None:
        if uploads:
            raise UsageError("--upload has no effect without --push", hint="add --push ORG/NAME")
        return
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # noqa: PLC0415

    try:
        validate_repo_id(repo)
        is_id = HUB_ID.fullmatch(repo) is not None
    except HFValidationError:
        is_id = False
    if not is_id:
        raise UsageError(f"--push {repo}: no Hub id, such as org/name")
    if uploads:
        from huggingface_hub import get_token  # noqa: PLC0415

        if get_token() is None:
            hint = "log in with `hf auth login`, or set HF_TOKEN"
            raise UsageError(f"--push {repo}: there is no token of the Hub", hint=hint)


def push_folder(folder: Path, repo: str, reporter: Reporter, *, uploads: bool) -> PushResult:
    """List the files of a folder that go to a repository, and upload them if asked.

    A repository that does not exist is created, and private.

    Raises:
        ExportError: the Hub refuses it, or cannot be reached.
    """
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
    files = tuple(
        PushedFile(name=name, size_bytes=size)
        for name, size in names
        if not any(part.startswith(".") for part in name.split("/"))
    )
    if _CARD not in (each.name for each in files):
        reporter.warn(f"{folder} has no model card: `fp8calib card {folder}` writes one")
    if not uploads:
        return PushResult(repo=repo, files=files)
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    size = format_size(sum(each.size_bytes for each in files))
    reporter.say(f"uploading {len(files)} files ({size}) to {repo}")
    api = HfApi(library_name="fp8calib")
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=[".*", "**/.*"],
            commit_message="Upload with fp8calib",
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ExportError(
            f"{repo}: the upload failed: {first_line(error)}",
            hint="the same command again uploads what is missing",
        ) from error
    return PushResult(repo=repo, files=files, commit=str(getattr(done, "commit_url", done)))
