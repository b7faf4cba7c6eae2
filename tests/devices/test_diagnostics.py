"""What becomes of a compiler's messages; the compilers themselves are asked in `test_compiler`."""

import pytest

from wsgrad.devices.diagnostics import readable

SHIM = "the launch's arguments"
OWN = """source.c:1:18: error: use of undeclared identifier 'y'
    1 | void f(float*x){ y=1; }
      |                  ^"""


@pytest.mark.parametrize(
    "said",
    [
        f"{SHIM}:1:78: error: call to undeclared function 'g'; ISO C99 [-Wimplicit-function-declaration]"
        '\n    1 | __attribute__((visibility("default"))) void wsgrad_call(\n      |     ^\n1 error generated.',
        f"{SHIM}: In function 'wsgrad_call':\n{SHIM}:1:78: error: implicit declaration of function 'g' [-Werror=x]\n"
        "cc1: some warnings being treated as errors",
        f"{SHIM}:1:79: error: called object type 'int' is not a function or function pointer",
        f"{SHIM}:1:46: error: use of undeclared identifier 'g'",
        f"{SHIM}:1:46: error: indirection requires pointer operand ('int' invalid)",
        f"{SHIM}:1:46: error: invalid type argument of unary '*' (have 'int')",
    ],
)
def test_a_function_that_is_not_there_is_named(said):
    assert readable(said, "g") == "the source defines no function 'g'"


def test_arguments_that_do_not_fit_are_told_with_the_users_own_lines():
    note = "source.c:1:6: note: 'f' declared here\n    1 | void f(float *x, int n) {}\n      |      ^ ~~~"
    said = f"{SHIM}:1:84: error: too few arguments, expected 2, have 1 [-Wx]\n    1 | shim\n{note}\n1 error generated."
    assert (
        readable(said, "f")
        == f"'f' can't be called with these arguments: too few arguments, expected 2, have 1\n{note}"
    )


def test_the_users_own_errors_stay_and_those_of_the_call_go_with_their_notes():
    call = f"{SHIM}:1:80: error: argument type 'struct s' is incomplete\nsource.c:1:15: note: forward declaration"
    assert readable(f"{OWN}\n{call}\n2 errors generated.", "f") == OWN
    warning = f"{SHIM}:1:16: warning: attribute\n   1 | shim\nsource.c:1:6: note: previous definition is here"
    assert readable(f"{warning}\n{OWN}", "f") == OWN


def test_a_name_that_the_call_needs_is_told():
    said = f"{SHIM}:1:45: error: redefinition of 'wsgrad_call'\nsource.c:1:6: note: previous definition is here"
    assert readable(said, "f").splitlines()[0] == (
        "the source may not use the name wsgrad_call, which the call of the program has"
    )


@pytest.mark.parametrize("name", ["/tmp/cckpFvRp.s", "cckpFvRp.o", "/dev/shm/x/source-1a2b3c4d.o"])
def test_names_of_temporary_files_and_summaries_go(name):
    said = f"{name}: Assembler messages:\n{name}:5: Error: unknown pseudo-op: `.bogus'\ncompilation terminated."
    assert readable(said, "f") == "the assembler's input:5: Error: unknown pseudo-op: `.bogus'"
    said = "PLEASE submit a bug report to https://x/ and so on\nStack dump:\n0. Program arguments: /a/b\n#1 0x00"
    assert readable(f"{OWN}\n{said}", "f") == OWN


def test_the_same_is_said_once():
    assert readable(f"{OWN}\n{OWN}\n2 errors generated.", "f") == OWN
