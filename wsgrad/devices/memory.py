"""Hands out zeroed private memory to the buffers of one session; knows no ids and no views.

Small blocks are cut from slabs, because a process may have only some 65,000 mappings (`vm.max_map_count`); large ones
are mappings of their own, on huge pages where the system has them. Freed blocks are kept for reuse up to a bound, since
touching fresh pages costs several times as much as zeroing used ones.
"""

from __future__ import annotations

import ctypes
from typing import Final

from wsgrad.devices import linux
from wsgrad.errors import OutOfMemory

ALIGNMENT: Final = 256
_HUGE_PAGE: Final = 2 << 20
_SLAB: Final = 4 << 20
_LARGEST_IN_SLAB: Final = 512 << 10
_KEEP_BYTES: Final = 512 << 20


def _size_class(nbytes: int) -> int:
    """The bytes a block really takes: a quarter more at most, in pages from 4 KiB and huge pages from 2 MiB up."""
    if nbytes <= ALIGNMENT:
        return ALIGNMENT
    if nbytes <= _LARGEST_IN_SLAB:
        step = max(ALIGNMENT, 1 << max(0, (nbytes - 1).bit_length() - 3))
    elif nbytes < _HUGE_PAGE:
        step = 16 * linux.PAGE
    else:
        step = _HUGE_PAGE
    return -(-nbytes // step) * step


class Memory:
    """The memory of one device in one session.

    Attributes:
        used_bytes: what the blocks in use were asked for.
    """

    def __init__(self, *, limit_bytes: int | None = None, keep_bytes: int = _KEEP_BYTES) -> None:
        self.used_bytes = 0
        self._limit_bytes = limit_bytes
        self._keep_bytes = keep_bytes
        self._kept_bytes = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        # Kept blocks by size, and large ones in the order in which they were freed.
        self._free: dict[int, list[int]] = {}
        self._kept_large: dict[int, int] = {}
        self._kept_small_bytes = 0
        self._slabs: list[int] = []
        self._slab_at = 0
        self._slab_end = 0

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` zeroed bytes, aligned to `ALIGNMENT`; a block of no bytes has an address too.

        Raises:
            OutOfMemory: the limit or the system allows no more.
        """
        if self._limit_bytes is not None and self.used_bytes + nbytes > self._limit_bytes:
            raise OutOfMemory(
                f"{nbytes} bytes don't fit: {self.used_bytes} of the device's {self._limit_bytes} bytes are in use",
                details={"nbytes": nbytes, "used": self.used_bytes, "limit": self._limit_bytes},
            )
        size = _size_class(nbytes)
        kept = self._free.get(size)
        if kept:
            address = kept.pop()
            if size > _LARGEST_IN_SLAB:
                del self._kept_large[address]
                self._kept_bytes -= size
            else:
                self._kept_small_bytes -= size
            ctypes.memset(address, 0, nbytes)
        else:
            try:
                address = self._fresh(size)
            except OSError as error:
                raise OutOfMemory(
                    f"the system has no room for {nbytes} bytes on top of {self.used_bytes}",
                    details={"nbytes": nbytes, "used": self.used_bytes},
                ) from error
        self._sizes[address] = size, nbytes
        self.used_bytes += nbytes
        return address

    def free(self, address: int) -> None:
        """Give a block back; its bytes are gone for everybody."""
        size, nbytes = self._sizes.pop(address)
        self.used_bytes -= nbytes
        if size > _LARGEST_IN_SLAB:
            if size > self._keep_bytes:
                linux.munmap(address, size)
                return
            while self._kept_bytes + size > self._keep_bytes:
                self._release(next(iter(self._kept_large)))
            self._kept_large[address] = size
            self._kept_bytes += size
        else:
            if self._kept_small_bytes > self._keep_bytes:
                # The block stays in its slab; its whole pages go back to the system.
                first = -(-address // linux.PAGE) * linux.PAGE
                last = (address + size) // linux.PAGE * linux.PAGE
                if last > first:
                    linux.madvise(first, last - first, linux.MADV_DONTNEED)
            self._kept_small_bytes += size
        self._free.setdefault(size, []).append(address)

    def close(self) -> None:
        """Unmap everything; no block may be used any more."""
        self._release_kept()
        for address, (size, _) in self._sizes.items():
            if size > _LARGEST_IN_SLAB:
                linux.munmap(address, size)
        for slab in self._slabs:
            linux.munmap(slab, _SLAB)
        self._sizes.clear()
        self._free.clear()
        self._slabs.clear()
        self._slab_at = self._slab_end = 0
        self.used_bytes = 0

    def _fresh(self, size: int) -> int:
        if size > _LARGEST_IN_SLAB:
            return self._map(size)
        if self._slab_at + size > self._slab_end:
            slab = self._map(_SLAB, huge=False)
            self._slabs.append(slab)
            self._slab_at, self._slab_end = slab, slab + _SLAB
        address = self._slab_at
        self._slab_at += size
        return address

    def _map(self, size: int, *, huge: bool = True) -> int:
        try:
            return self._map_once(size, huge=huge)
        except OSError:
            # What is kept for reuse in other sizes may be what is missing.
            self._release_kept()
            return self._map_once(size, huge=huge)

    @staticmethod
    def _map_once(size: int, *, huge: bool) -> int:
        access, flags = linux.PROT_READ | linux.PROT_WRITE, linux.MAP_PRIVATE | linux.MAP_ANONYMOUS
        if size < _HUGE_PAGE or not huge:
            return linux.mmap(0, size, access, flags)
        # Huge pages need the alignment that mmap itself does not promise: cut it out of a larger piece.
        start = linux.mmap(0, size + _HUGE_PAGE, access, flags)
        address = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        if address > start:
            linux.munmap(start, address - start)
        rest = start + _HUGE_PAGE - address
        if rest:
            linux.munmap(address + size, rest)
        linux.madvise(address, size, linux.MADV_HUGEPAGE)
        return address

    def _release(self, address: int) -> None:
        size = self._kept_large.pop(address)
        self._free[size].remove(address)
        self._kept_bytes -= size
        linux.munmap(address, size)

    def _release_kept(self) -> None:
        while self._kept_large:
            self._release(next(iter(self._kept_large)))
