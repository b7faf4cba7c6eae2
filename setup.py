"""Builds what pyproject.toml can't say: the pages go into the package, and tinygrad's finder beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PAGES = sorted(
    str(path) for suffix in ("html", "js", "css", "svg") for path in Path("browser").glob(f"*.{suffix}")
)  # fmt: skip
FINDER = "_wsgrad_tinygrad.pth"
FINDER_TEXT = "import _wsgrad_tinygrad\n"


class Build(build_py):
    """Builds the package with `browser/` inside it; an editable install finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._pages():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target, preserve_mode=False)
            Path(self.build_lib, FINDER).write_text(FINDER_TEXT)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        finder = str(Path(self.build_lib, FINDER))
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._pages()), finder]

    def get_output_mapping(self) -> dict[str, str]:
        return super().get_output_mapping() | {target: source for source, target in self._pages()}

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *PAGES]

    def _pages(self) -> list[tuple[str, str]]:
        return [(page, str(Path(self.build_lib, "wsgrad", page))) for page in PAGES]


class Editable(editable_wheel):
    """An editable install has the finder too: its own .pth file only names the checkout."""

    def _select_strategy(self, *args: Any) -> Any:
        return WithFinder(super()._select_strategy(*args))


class WithFinder:
    """Writes the finder's file beside what an editable install writes."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def __call__(self, wheel: Any, files: list[str], mapping: dict[str, str]) -> None:
        self._strategy(wheel, files, mapping)
        wheel.writestr(FINDER, FINDER_TEXT)

    def __enter__(self) -> WithFinder:
        self._strategy.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._strategy.__exit__(*error)


setup(cmdclass={"build_py": Build, "editable_wheel": Editable})
