"""Compiling a stranger's source: what it may contain, what its messages show, and what it can't get at."""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import struct
import time

import pytest

from wsgrad.devices import linux, sandbox
from wsgrad.devices.compiler import ProgramCache, cache_key, compile_source, find_compiler, full_source
from wsgrad.devices.sandbox import Profile, probe_compiler_confinement
from wsgrad.devices.toolchain import Compiler
from wsgrad.errors import CompileError, DeviceError

SECRET = "wsgrad-secret-5d41402abc4b2a76"
COMPILERS = ["default", *(name for name in ("clang", "gcc") if shutil.which(name))]


@pytest.fixture(params=COMPILERS)
def compiler(request, toolbox):
    if request.param == "default":
        return toolbox.compiler
    return find_compiler({"WSGRAD_CC": request.param})


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text(SECRET)
    return path


def build(compiler, source, entry="entry", signature="", profile=Profile.NAMESPACES, **keywords):
    return compile_source(compiler, profile, full_source(source, entry, signature, **keywords), seconds=5)


@pytest.mark.parametrize("profile", Profile)
def test_every_compiler_works_in_every_profile(compiler, profile):
    source = "#include <math.h>\n#include <string.h>\n#include <stdint.h>\nvoid entry(float *x) { *x = sinf(*x); }"
    assert build(compiler, source, signature="p", profile=profile).startswith(b"\x7fELF")


def test_the_freestanding_headers_are_there(compiler):
    names = ["stdint", "stddef", "stdbool", "stdarg", "stdalign", "float", "limits", "iso646", "math", "string"]
    source = "".join(f"#include <{name}.h>\n" for name in names)
    source += "void entry(float *x) { *x = FLT_MAX > INT_MAX ? M_PI : NAN; bool b = isnan(*x); *x += b; }"
    build(compiler, source, signature="p")


def test_errors_keep_line_and_column_and_show_no_path_of_this_machine(compiler):
    with pytest.raises(CompileError) as raised:
        build(compiler, "void entry(void)\n{\n    return x;\n}")
    text = str(raised.value)
    assert "source.c:3:12: error:" in text
    assert "    return x;" in text
    assert not re.search(r"/(usr|home|work|root|tmp|dev|zig)\b", text)


def test_errors_in_headers_show_only_their_names(compiler):
    with pytest.raises(CompileError) as raised:
        build(compiler, "#define int8_t %%\n#include <stdint.h>\nvoid entry(void) { int8_t x; }")
    assert str(toolbox_directory(compiler)) not in str(raised.value)
    assert not re.search(r"/(usr|home|work|root|tmp|zig)/", str(raised.value))


def toolbox_directory(compiler):
    return os.path.dirname(compiler.command[0])


@pytest.mark.parametrize(
    ("source", "signature", "words"),
    [
        ("void entry(float *a) { }", "pi", "too many arguments"),
        ("void entry(float *a, int n) { }", "p", "too few arguments"),
        ("void entry(float *a) { }", "i", "pointer"),
        ("void entry(int n) { }", "p", "pointer"),
        ("void other(void) { }", "", "entry"),
    ],
)
def test_arguments_that_do_not_fit_the_entry_are_an_error(compiler, source, signature, words):
    with pytest.raises(CompileError) as raised:
        build(compiler, source, signature=signature)
    assert words in str(raised.value)
    assert re.match(
        "'entry' can't be called with these arguments: |the source defines no function 'entry'$", str(raised.value)
    )
    assert "wsgrad_call" not in str(raised.value)


@pytest.mark.parametrize("entry", ["", "1a", "../x", "/etc/passwd", "a b", "a;b", "a" * 200, "f\n", "ü"])
def test_an_entry_that_is_no_c_name_is_refused(entry):
    with pytest.raises(CompileError, match="not the name of a C function"):
        full_source("", entry, "")


@pytest.mark.parametrize("signature", ["z", "p" * 65, "p p", "é"])
def test_a_signature_of_other_letters_is_refused(signature):
    with pytest.raises(CompileError, match="signature"):
        full_source("", "entry", signature)


@pytest.mark.parametrize("source", ["a\0b", "\ud800"])
def test_a_source_that_is_no_text_is_refused(source):
    with pytest.raises(CompileError, match="not valid text"):
        full_source(source, "entry", "")


def test_a_function_that_nothing_defines_is_named(compiler):
    with pytest.raises(CompileError, match="the program uses puts, which nothing defines"):
        build(compiler, "int puts(const char *);\nvoid entry(void) { puts(0); }")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("static _Thread_local int x; void entry(int *a) { *a = x++; }", "thread-local"),
        (
            "static volatile int x; __attribute__((constructor)) void c(void) { x = 1; } void entry(int *a) { }",
            "construct",
        ),
    ],
)
def test_what_the_loader_does_not_do_is_an_error_and_not_ignored(compiler, source, words):
    with pytest.raises(CompileError, match=f"{words}|__tls_get_addr"):
        build(compiler, source, signature="p")


@pytest.mark.parametrize("profile", [Profile.NAMESPACES, Profile.LANDLOCK])
@pytest.mark.parametrize(
    "template",
    [
        '#include "{path}"\nvoid entry(void) {{ }}',
        '__asm__(".incbin \\"{path}\\"");\nvoid entry(void) {{ }}',
        '__asm__(".include \\"{path}\\"");\nvoid entry(void) {{ }}',
        'const char x[] = {{\n#embed "{path}"\n}};\nvoid entry(void) {{ }}',
        '#include_next "{path}"\nvoid entry(void) {{ }}',
        '#pragma GCC dependency "{path}"\n#include "{path}"\nvoid entry(void) {{ }}',
    ],
    ids=["include", "incbin", "asm include", "embed", "include_next", "dependency"],
)
def test_files_of_this_machine_can_not_be_read(compiler, secret, profile, template):
    for path in (secret, "/etc/passwd", "/proc/self/environ", "/proc/1/cmdline"):
        with pytest.raises(CompileError) as raised:
            build(compiler, template.format(path=path), profile=profile)
        assert SECRET not in str(raised.value)
        assert "root:" not in str(raised.value)


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/cpuinfo", "/bin/sh"])
def test_not_even_the_existence_of_a_file_shows(compiler, path):
    build(compiler, f'#if __has_include("{path}")\n#error it shows\n#endif\nvoid entry(void) {{ }}')


BOMBS = {
    "recursive include": '#include "source.c"\nvoid entry(void) { }',
    "macros": f"#define A(x) {'x ' * 16}\nvoid entry(void) {{ {'A(' * 8};{')' * 8} }}",
    "a huge array": "char x[1ul << 40] = {1}; void entry(void) { }",
    "a large file": '__attribute__((visibility("default"))) char x[1ul << 29] = {1}; void entry(void) { }',
    "repeated assembly": '__asm__(".rept 1000000000\\n.quad 1\\n.endr"); void entry(void) { }',
    "endless reading": '#include "/dev/zero"\nvoid entry(void) { }',
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_compiler_bomb_ends_within_its_limits(toolbox, bomb):
    start = time.monotonic()
    text = full_source(BOMBS[bomb], "entry", "")
    with pytest.raises(CompileError):
        compile_source(toolbox.compiler, Profile.NAMESPACES, text, seconds=1)
    assert time.monotonic() - start < 10


def test_nothing_is_left_behind(toolbox):
    processes = set(os.listdir("/proc"))
    mounts = text_of("/proc/self/mounts")
    directories = {name: set(os.listdir(name)) for name in ("/tmp", "/dev/shm") if os.path.isdir(name)}
    descriptors = len(os.listdir("/proc/self/fd"))
    for profile in Profile:
        build(toolbox.compiler, "void entry(void) { }", profile=profile)
        with pytest.raises(CompileError):
            build(toolbox.compiler, "void entry(void) {", profile=profile)
    assert text_of("/proc/self/mounts") == mounts
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for name, before in directories.items():
        assert not [new for new in set(os.listdir(name)) - before if new.startswith("wsgrad-compile")]
    ours = [pid for pid in set(os.listdir("/proc")) - processes if pid.isdigit() and parent_of(pid) == os.getpid()]
    assert not ours


def text_of(path):
    with open(path) as file:
        return file.read()


def parent_of(pid):
    try:
        return int(text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_this_machine_confines_compilers():
    # The development machines can; elsewhere the profile without namespaces is used and named.
    assert probe_compiler_confinement() == []


def test_a_missing_program_is_an_error_of_the_sandbox():
    job = sandbox.Job(command=("/nothing",), files={}, output="x", mounts=(), environment={})
    with pytest.raises(sandbox.SandboxError, match="No such file"):
        sandbox.run(job, Profile.NAMESPACES)


def test_what_the_system_lacks_is_named(monkeypatch):
    def refuse(flags):
        raise OSError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(linux, "unshare", refuse)
    (missing,) = probe_compiler_confinement()
    assert "namespaces" in missing
    assert "not permitted" in missing
    assert sandbox.detect_profile() is Profile.LANDLOCK


# -- choosing a compiler


def test_a_compiler_that_is_not_there_is_named():
    with pytest.raises(DeviceError, match="WSGRAD_CC is 'nothing-like-it', but there is no such program"):
        find_compiler({"WSGRAD_CC": "nothing-like-it"})


def test_a_program_that_is_no_compiler_is_refused():
    with pytest.raises(DeviceError, match=r"neither clang, gcc nor zig|does not work"):
        find_compiler({"WSGRAD_CC": "true"})


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("wsgrad.devices.toolchain.shutil.which", lambda name: None)
    monkeypatch.setattr("wsgrad.devices.toolchain._zig_of_wheel", lambda: None)
    with pytest.raises(DeviceError, match=r"pip install wsgrad\[cpu\]"):
        find_compiler({})


def test_a_compiler_survives_the_way_to_another_process(compiler):
    assert Compiler.from_map(compiler.to_map()) == compiler


def test_the_key_depends_on_text_and_compiler(toolbox):
    text = full_source("void entry(void) { }", "entry", "")
    key = cache_key(toolbox.compiler, text)
    assert key == cache_key(toolbox.compiler, text)
    assert key != cache_key(toolbox.compiler, text + " ")
    other = Compiler.from_map(toolbox.compiler.to_map() | {"identity": "another"})
    assert key != cache_key(other, text)


# -- what a program gets


@pytest.mark.parametrize(
    ("letter", "parameter", "packed", "expected"),
    [
        ("i", "int", struct.pack("<i4x", -7), -7.0),
        ("I", "unsigned", struct.pack("<I4x", 4_000_000_000), 4e9),
        ("q", "long long", struct.pack("<q", -(1 << 40)), -float(1 << 40)),
        ("Q", "unsigned long long", struct.pack("<Q", 1 << 63), float(1 << 63)),
        ("f", "float", struct.pack("<f4x", 0.5), 0.5),
        ("d", "double", struct.pack("<d", 1e300), 1e300),
        ("f", "double", struct.pack("<f4x", 0.5), 0.5),
        ("d", "float", struct.pack("<d", 0.25), 0.25),
        ("i", "double", struct.pack("<i4x", -7), -7.0),
        ("i", "long long", struct.pack("<i4x", -7), -7.0),
        ("i", "unsigned char", struct.pack("<i4x", 257), 1.0),
        ("q", "int", struct.pack("<q", (1 << 32) + 5), 5.0),
        ("f", "int", struct.pack("<f4x", 3.9), 3.0),
        ("x", "int", struct.pack("<q", 12), 12.0),
        ("x", "float", struct.pack("<q", 12), 12.0),
        ("x", "unsigned long", struct.pack("<q", 1 << 40), float(1 << 40)),
        ("i", "_Bool", struct.pack("<i4x", 2), 1.0),
    ],
)
def test_c_converts_every_scalar_by_its_own_rules(mapped, letter, parameter, packed, expected):
    entry = mapped(f"void entry(double *out, {parameter} value) {{ *out = value; }}", "p" + letter)
    out = ctypes.c_double()
    slots = ctypes.create_string_buffer(struct.pack("<Q", ctypes.addressof(out)) + packed)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)(ctypes.addressof(slots))
    assert out.value == expected


def test_the_math_functions_compute_what_they_should(mapped):
    calls = {
        "sin(x)": math.sin, "cos(x)": math.cos, "tan(x)": math.tan, "exp(x)": math.exp, "log(x)": math.log,
        "sqrt(x)": math.sqrt, "fabs(-x)": lambda x: x, "floor(x)": math.floor, "ceil(x)": math.ceil,
        "tanh(x)": math.tanh, "pow(x, 1.5)": lambda x: x**1.5, "fmod(x, 0.3)": lambda x: math.fmod(x, 0.3),
        "erf(x)": math.erf, "log2(x)": math.log2, "atan2(x, 2)": lambda x: math.atan2(x, 2),
        "fmax(x, 1)": lambda x: max(x, 1), "fma(x, x, 1)": lambda x: x * x + 1, "round(x)": round,
        "trunc(x)": math.trunc, "copysign(x, -1)": lambda x: -x, "hypot(x, 1)": lambda x: math.hypot(x, 1),
    }  # fmt: skip
    body = "".join(f"o[{i}] = {call};\n" for i, call in enumerate(calls))
    singles = [call.replace("(", "f(", 1) for call in calls]
    single = "".join(f"o[{len(calls) + i}] = {call};\n" for i, call in enumerate(singles))
    entry = mapped(f"#include <math.h>\nvoid entry(double *o, double x) {{ {body} {single} }}", "pd")
    out = (ctypes.c_double * (2 * len(calls)))()
    slots = ctypes.create_string_buffer(struct.pack("<Qd", ctypes.addressof(out), 0.7))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)(ctypes.addressof(slots))
    for index, (call, function) in enumerate(calls.items()):
        assert out[index] == pytest.approx(function(0.7), rel=1e-14), call
        assert out[len(calls) + index] == pytest.approx(function(0.7), rel=1e-5), call


def test_memory_functions_and_large_locals_work(mapped):
    source = """
    #include <string.h>
    void entry(unsigned char *out) {
        volatile unsigned char big[200000];
        for (int i = 0; i < 200000; i++) big[i] = i;
        memset(out, big[77], 8); memcpy(out + 8, out, 4); memmove(out + 9, out + 8, 4);
    }"""
    entry = mapped(source, "p")
    out = (ctypes.c_ubyte * 16)()
    slots = ctypes.create_string_buffer(struct.pack("<Q", ctypes.addressof(out)))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)(ctypes.addressof(slots))
    assert bytes(out) == bytes([77] * 13 + [0] * 3)


# -- the cache


def test_a_kept_program_comes_back_whole(tmp_path):
    cache = ProgramCache(tmp_path / "programs")
    assert cache.get("ab") is None
    cache.put("ab", b"program")
    assert cache.get("ab") == b"program"
    assert os.stat(tmp_path / "programs").st_mode & 0o777 == 0o700
    assert os.stat(tmp_path / "programs" / "ab").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 39, None])
def test_a_damaged_entry_counts_as_absent(tmp_path, damage):
    cache = ProgramCache(tmp_path / "programs")
    cache.put("ab", b"program")
    path = tmp_path / "programs" / "ab"
    path.write_bytes(path.read_bytes()[:-1] + b"!" if damage is None else damage)
    assert cache.get("ab") is None
    assert not path.exists()


def test_a_link_in_the_cache_is_not_followed(tmp_path, secret):
    cache = ProgramCache(tmp_path / "programs")
    os.symlink(secret, tmp_path / "programs" / "ab")
    assert cache.get("ab") is None
    assert secret.exists()


def test_the_least_recently_used_leave_first(tmp_path):
    cache = ProgramCache(tmp_path / "programs", max_bytes=3 * 132)
    for index, key in enumerate("abc"):
        cache.put(key, bytes(100))
        os.utime(tmp_path / "programs" / key, (index, index))
    assert cache.get("a") is not None
    cache.put("d", bytes(100))
    assert sorted(os.listdir(tmp_path / "programs")) == ["a", "c", "d"]


def test_a_directory_that_others_may_write_is_not_used(tmp_path):
    directory = tmp_path / "programs"
    directory.mkdir()
    directory.chmod(0o777)
    cache = ProgramCache(directory)
    cache.put("ab", b"program")
    assert cache.get("ab") is None
    assert not os.listdir(directory)


def test_a_cache_that_can_not_be_made_harms_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    cache = ProgramCache(tmp_path / "file" / "programs")
    cache.put("ab", b"program")
    assert cache.get("ab") is None
