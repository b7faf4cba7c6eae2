"""The process of one session on one of tinygrad's devices: confines itself and opens it; the rest is `driver.py`'s.

Compilers are programs that it has to start, and they write files: it may start what the system has, and write to a
directory of its own. Where kernels run on the processor they are machine code of the client's, which is held back by
what drivers bear and by no more, so a server that others can reach offers these devices only with `--unconfined`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from wsgrad.devices import confine
from wsgrad.devices.driver import be_node
from wsgrad.devices.scratch import Scratch
from wsgrad.devices.tinygrad.library import load_tinygrad, open_wrapped
from wsgrad.devices.tinygrad.runtime import TinygradRuntime

if TYPE_CHECKING:
    from wsgrad.devices.driver import Opening

_DIRECTORIES: Final = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "POCL_CACHE_DIR", "CUDA_CACHE_PATH")


def _open(opening: Opening) -> TinygradRuntime:
    load_tinygrad(opening.place)  # Python's own files may be anywhere
    scratch = Scratch()
    for variable in _DIRECTORIES:
        os.environ[variable] = scratch.path
    confine.confine_driver(keep=(opening.keep, scratch.descriptor), scratch=scratch.path)
    return TinygradRuntime(
        open_wrapped(opening.place),
        memory_bytes=opening.memory_bytes,
        launch_seconds=opening.launch_seconds,
        report=opening.report,
        lost=opening.lost,
        scratch=scratch,
    )


if __name__ == "__main__":
    be_node(_open)
