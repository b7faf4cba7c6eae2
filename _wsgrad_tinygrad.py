"""Lets tinygrad find its device "WS" (`DEV=WS`); runs at every start of Python, so it imports as little as it can.

`_wsgrad_tinygrad.pth` imports it. tinygrad looks for a device by importing `tinygrad.runtime.ops_NAME`; the finder
knows that name and one more.
"""

import sys


class Finder:
    """Finds `tinygrad.runtime.ops_ws`, which is `wsgrad.tinygrad` under the name that tinygrad asks for."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        """The module's spec, and that of the one with tinygrad's limits; None for every other name."""
        if name == "tinygrad.schedule.rangeify":
            from importlib.machinery import PathFinder

            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = Limited(spec.loader)
            return spec
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


class Limited:
    """Loads tinygrad's own module, whose table of limits then asks our devices for theirs.

    tinygrad cuts kernels to a device's number of buffers before it opens the device.
    """

    def __init__(self, loader):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self._loader = loader

    def __getattr__(self, name):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return getattr(self._loader, name)

    def exec_module(self, module):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """Run it, then put the table in place of the dictionary."""
        self._loader.exec_module(module)
        limits = getattr(module, "DEVICE_MAX_BUFS", None)
        if type(limits) is dict:
            module.DEVICE_MAX_BUFS = Limits(limits)


class Limits(dict):  # type: ignore[type-arg]
    """The most buffers of a kernel, by device."""

    def get(self, device, default=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """As of every dictionary; a device of ours is opened first, which adds its limit."""
        if device not in self and (device == "WS" or device.startswith("WS:")):
            from tinygrad.device import Device

            Device[device]
        return super().get(device, default)


# Before the usual ones: they would find tinygrad's module first.
sys.meta_path.insert(0, Finder)
