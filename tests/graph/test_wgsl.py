"""The reader of WGSL against the vectors that `browser/wgsl.js` is held to as well."""

import json
from pathlib import Path

import pytest

from wsgrad.errors import CompileError
from wsgrad.graph.wgsl import entry_points, overrides, parse_bindings, parse_module, without_comments

VECTORS = json.loads((Path(__file__).parent.parent / "wgsl_vectors.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_source_is_read_as_its_vector_says(vector):
    source = vector["source"]
    if "error" in vector:
        with pytest.raises(CompileError) as caught:
            parse_module(source)
        assert str(caught.value) == vector["error"]
        return
    bindings = [[b.index, b.space, b.access, b.type_text, b.name] for b in parse_bindings(source)]
    assert bindings == vector["bindings"]
    assert [[e.name, e.stage, list(e.workgroup_size)] for e in entry_points(source)] == vector["entry_points"]
    assert [[o.name, o.id, o.type_text, o.has_default] for o in overrides(source)] == vector["overrides"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_comments_leave_every_other_character_in_its_place(vector):
    source = vector["source"]
    bare = without_comments(source)
    assert len(bare) == len(source)
    assert all(new == old or new == " " for new, old in zip(bare, source, strict=True))
    assert "/*" not in bare


@pytest.mark.parametrize("piece", ["/*", "/*/", "@group(0)", "@binding(0", "var<", "fn a(", "{", "(", "//\n", "a<"])
def test_hostile_repetition_is_read_to_its_end(piece):
    assert parse_module(piece * 100_000).bindings == ()  # what takes the square of the time would not come back
