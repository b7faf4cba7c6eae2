"""Turns the C source of one program into a checked shared object: adds the call shim and compiles; loads nothing.

The shim is `void wsgrad_call(void **p)`: it calls the user's entry with arguments that the C compiler converts, so one
native loop can call every program. `p` is an array of 8-byte slots, little endian, each scalar at its slot's start in
its own type.
"""

from __future__ import annotations

import hashlib
import re
import signal
from typing import TYPE_CHECKING, Final

from wsgrad.devices import diagnostics, elf, mathlib
from wsgrad.devices.program_cache import ProgramCache as ProgramCache
from wsgrad.devices.program_cache import processor
from wsgrad.devices.sandbox import Outcome, Profile, run
from wsgrad.devices.toolchain import find_compiler as find_compiler
from wsgrad.errors import CompileError

if TYPE_CHECKING:
    from wsgrad.devices.toolchain import Compiler

CALL: Final = diagnostics.CALLER
MAX_ARGUMENTS: Final = 64
_VERSION: Final = 1
_MAX_MESSAGE: Final = 16 << 10
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# What a translation unit's end calls, or a client's probe before it takes the address of.
_CALLED: Final = re.compile(
    r"wsgrad_entry = (\w+); \(void\)wsgrad_entry; }\n+#line[^\n]*\n[^\n]*\n\Z|\(void\)p; (\w+)\([^\n]*\n\Z"
)
# Signature letters: how C reads a slot. `x` is the index of a grid's call, a 64-bit value that C converts.
_SLOTS: Final = {
    "p": "p[{}]",
    "i": "*(__INT32_TYPE__ *)(p + {})",
    "I": "*(__UINT32_TYPE__ *)(p + {})",
    "q": "*(__INT64_TYPE__ *)(p + {})",
    "Q": "*(__UINT64_TYPE__ *)(p + {})",
    "f": "*(float *)(p + {})",
    "d": "*(double *)(p + {})",
    "x": "*(__INT64_TYPE__ *)(p + {})",
}


def full_source(source: str, entry: str, signature: str, *, alias: bool = False) -> str:
    """The user's source with the call shim appended; line numbers stay the user's.

    Args:
        entry: the name of the function to call.
        signature: one letter per argument: `p` a buffer, `i I q Q` integers of 32 and 64 bits, `f d` floats, `x` the
            index of a grid's call.
        alias: the program was declared to take the same buffer twice, so `restrict` means nothing in it.

    Raises:
        CompileError: the entry is no C name, or the signature has letters that do not exist.
    """
    if not _IDENTIFIER.match(entry):
        raise CompileError(f"the entry {entry[:80]!r} is not the name of a C function")
    if len(signature) > MAX_ARGUMENTS or any(letter not in _SLOTS for letter in signature):
        raise CompileError(f"the signature {signature[:80]!r} is not made of at most {MAX_ARGUMENTS} of piIqQfdx")
    if "\0" in source or _SURROGATE.search(source):
        raise CompileError("the source holds a zero byte or is not valid text")
    arguments = ", ".join(_SLOTS[letter].format(index) for index, letter in enumerate(signature))
    # Without need no line stands before the source: gcc reads the lines that it shows from the file by their number.
    before = '#define restrict\n#define __restrict\n#define __restrict__\n#line 1 "source.c"\n' if alias else ""
    return (
        f'{before}{source}\n#line 1 "{diagnostics.SHIM_FILE}"\n'
        f'__attribute__((visibility("default"))) void {CALL}(void **p) {{ (void)p; {entry}({arguments}); }}\n'
    )


def cache_key(compiler: Compiler, text: str) -> str:
    """The name under which a compiled translation unit is kept: everything that its machine code depends on."""
    job = compiler.job(text.encode(), Profile.NONE)
    parts = (_VERSION, compiler.identity, processor(), sorted(job.files.items()))
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).hexdigest()


def compile_source(compiler: Compiler, profile: Profile, text: str, *, seconds: int = 5) -> bytes:
    """Compile a whole translation unit (`full_source`) into a shared object that has passed every check.

    Forks, and blocks until the compiler has ended.

    Args:
        seconds: the processor time it may take; the wall clock may show four times as much.

    Raises:
        CompileError: with the compiler's messages, line and column, and no path of this machine.
        SandboxError: this system can't confine the compiler as `profile` asks.
    """
    outcome = run(compiler.job(text.encode(), profile, cpu_seconds=seconds, wall_seconds=4.0 * seconds), profile)
    if outcome.status != 0 or outcome.output is None:
        called = _CALLED.search(text)
        entry = (called[1] or called[2]) if called else CALL
        said = diagnostics.readable(compiler.clean(outcome.messages), entry)
        raise CompileError(_explain(said, outcome, seconds))
    elf.check_externs(elf.parse(outcome.output), mathlib.ALLOWED)
    return outcome.output


def _explain(text: str, outcome: Outcome, seconds: int) -> str:
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]}\n… ({len(text) - _MAX_MESSAGE} more characters)"
    if outcome.timed_out or outcome.status in (-signal.SIGKILL, -signal.SIGXCPU):
        return f"compiling took longer than {seconds} s of processor time (--compile-seconds)\n{text}".rstrip()
    if outcome.status < 0 or not text:
        return f"the compiler gave up (status {outcome.status}), perhaps for lack of memory\n{text}".rstrip()
    return text
