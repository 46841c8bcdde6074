"""Builds the native CPU kernels when the package is installed; everything else is in pyproject.toml.

Without a C++ compiler the package installs all the same and runs on torch's kernels.
"""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Hands the work to paceline/ops/native/build.py, which gives each source its own instruction set."""

    def build_extension(self, ext: Extension) -> None:
        path = Path(__file__).parent / "paceline" / "ops" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("paceline_native_build", path)
        assert spec is not None and spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            native.build(Path(self.get_ext_fullpath(ext.name)))
        except native.BuildError as error:
            print(f"paceline: native CPU kernels were not built, torch's will be used instead: {error}")


setup(
    ext_modules=[Extension("paceline.ops.native._kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
