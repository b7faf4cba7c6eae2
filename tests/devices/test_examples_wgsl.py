"""The examples in WGSL, run as a person runs them, on native WebGPU; `scripts/demo --browser` runs them on a tab."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contract_kinds import KINDS
from PIL import Image

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def url():
    with KINDS["webgpu"]() as offer:
        yield offer.url


def run(url, name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"WSGRAD_URL": url},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mandelbrot_is_the_set(url, tmp_path):
    picture = tmp_path / "set.png"
    run(url, "mandelbrot.py", "--size", "96x72", "--zoom", "1", "--iterations", "60", "--output", str(picture))
    pixels = np.asarray(Image.open(picture)).sum(axis=2)
    step = 3.0 / 96
    left, top = -0.743643887037151 - step * 48, 0.131825904205330 + step * 36
    c = (left + step * np.arange(96))[None, :] + 1j * (top - step * np.arange(72))[:, None]
    z, inside = np.zeros_like(c), np.ones(c.shape, bool)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(60):
            inside &= np.abs(z) ** 2 <= 256
            z = np.where(inside, z * z + c, z)
    assert ((pixels == 0) == inside).mean() > 0.995
    assert 0.05 < inside.mean() < 0.5


def test_digits_are_learned_in_wgsl(url):
    output = run(url, "train_digits_wgsl.py", "--device", "webgpu", "--epochs", "4")
    accuracy = re.search(r"^accuracy (\d+\.\d) %$", output, re.MULTILINE)
    assert accuracy, output
    assert float(accuracy[1]) > 85


def test_a_sweep_spreads_over_the_devices_of_a_kind(url):
    output = run(url, "classroom.py", "--kind", "webgpu", "--rates", "0.001", "0.1", "--seeds", "1", "--epochs", "2")
    assert "best learning rate 0.1" in output
