"""Puts the pages into the package: they lie beside it in the source, where a browser opens them as files."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PAGES = sorted(
    str(path) for suffix in ("html", "js", "css", "svg") for path in Path("browser").glob(f"*.{suffix}")
)  # fmt: skip


class BuildWithPages(build_py):
    """Builds the package with `browser/` inside it; an editable install finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._pages():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._pages())]

    def get_output_mapping(self) -> dict[str, str]:
        return super().get_output_mapping() | {target: source for source, target in self._pages()}

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *PAGES]

    def _pages(self) -> list[tuple[str, str]]:
        return [(page, str(Path(self.build_lib, "wsgrad", page))) for page in PAGES]


setup(cmdclass={"build_py": BuildWithPages})
