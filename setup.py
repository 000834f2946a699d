"""Ship the recipes, a folder at the top of the repository; make archives that do not vary."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


class BuildWithRecipes(build_py):
    """Copy `recipes/*.yaml` to `fp8calib/recipes/`; an editable install reads them in place."""

    def run(self) -> None:
        """Build the package, then copy the recipes into it."""
        super().run()
        if not self.editable_mode:
            for target, source in self.recipes().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def recipes(self) -> dict[str, str]:
        """Return built path -> source path."""
        folder = Path(self.build_lib, "fp8calib", "recipes")
        return {str(folder / path.name): str(path) for path in Path("recipes").glob("*.yaml")}

    def get_source_files(self) -> list[str]:
        """Name the recipes as sources too, so that a source distribution contains them."""
        return [*super().get_source_files(), *self.recipes().values()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Name the copies among the built files."""
        return [*super().get_outputs(include_bytecode), *self.recipes()]


class ReproducibleArchive(sdist):
    """With SOURCE_DATE_EPOCH, write the same bytes for the same files."""

    def make_archive(
        self,
        base_name: str,
        format: str,  # noqa: A002 -- distutils' name
        root_dir: Any = None,
        base_dir: Any = None,
        **owner: Any,
    ) -> str:
        """Write the archive in a fixed order, with one time, and without an owner."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar" or base_dir is None:
            return str(super().make_archive(base_name, format, root_dir, base_dir, **owner))
        target = Path(f"{base_name}.tar.gz")
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            target.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            for path in [Path(base_dir), *sorted(Path(base_dir).rglob("*"))]:
                info = tar.gettarinfo(path)
                info.mtime, info.uid, info.gid, info.uname, info.gname = int(epoch), 0, 0, "", ""
                info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
                if info.isdir():
                    tar.addfile(info)
                else:
                    info.type = tarfile.REGTYPE  # a hard link of sdist
                    info.size = path.stat().st_size
                    with path.open("rb") as content:
                        tar.addfile(info, content)
        return str(target)


setup(cmdclass={"build_py": BuildWithRecipes, "sdist": ReproducibleArchive})
