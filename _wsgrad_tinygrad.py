"""Lets tinygrad find its device "WS" (`DEV=WS`); runs at every start of Python, so it imports as little as it can.

`_wsgrad_tinygrad.pth` imports it. tinygrad looks for a device by importing `tinygrad.runtime.ops_NAME`; the finder
knows that one name and no other.
"""

import sys


class Finder:
    """Finds `tinygrad.runtime.ops_ws`, which is `wsgrad.tinygrad` under the name that tinygrad asks for."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        """The module's spec, or None for every other name."""
        if name != "tinygrad.runtime.ops_ws":
            return None
        from importlib.util import spec_from_loader

        return spec_from_loader(name, Loader)


class Loader:
    """Loads it."""

    @staticmethod
    def create_module(spec):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        """The usual kind of module."""

    @staticmethod
    def exec_module(module):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        """Give it the device's class."""
        from wsgrad.tinygrad import WSDevice

        module.WSDevice = WSDevice


sys.meta_path.append(Finder)
