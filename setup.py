"""Ship the recipes, a folder at the top of the repository."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


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


setup(cmdclass={"build_py": BuildWithRecipes})
