"""Zoom into the Mandelbrot set on any device that speaks WGSL, a browser tab on a phone included, and save a PNG.

The picture is made in bands: the progress bar moves, and no launch keeps a device's screen waiting for long. A point
of the deepest zoom needs more digits than a float32 has: each coordinate is a sum of two of them (Dekker, 1971).
"""

import argparse
import time
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import wsgrad

KERNEL = """
// What stays the same for the whole picture; the host sends it as one structured NumPy scalar.
struct Frame {
    x: vec2<f32>, // real part of the left edge: the nearest float32, and what that leaves
    y: vec2<f32>, // imaginary part of the top edge, the same way
    step: f32,    // from a pixel to the next
    width: u32,
    iterations: u32,
}

override ROWS: u32 = 8; // rows of a workgroup: a constant of the pipeline, given by keyword at the launch

@group(0) @binding(0) var<storage, read_write> pixels: array<u32>;
@group(0) @binding(1) var<uniform> frame: Frame;
@group(0) @binding(2) var<uniform> first_row: u32;

// A shader compiler may simplify (a + b) - a to b. It can't see through a multiplication by a number that it doesn't
// know to be one, so the errors of additions stay what they are.
fn one() -> f32 { return f32(frame.width > 0u); }

fn quick_sum(a: f32, b: f32) -> vec2<f32> {
    let sum = (a + b) * one();
    return vec2(sum, b - (sum - a) * one());
}

fn sum(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    let s = (a.x + b.x) * one();
    let v = (s - a.x) * one();
    let error = (a.x - (s - v) * one()) + (b.x - v);
    return quick_sum(s, error + a.y + b.y);
}

fn split(a: f32) -> vec2<f32> {
    let scaled = a * 4097.0 * one();
    let high = scaled - (scaled - a) * one();
    return vec2(high, a - high);
}

fn product(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    let p = a.x * b.x * one();
    let s = split(a.x);
    let t = split(b.x);
    let error = ((s.x * t.x - p) * one() + s.x * t.y + s.y * t.x) + s.y * t.y;
    return quick_sum(p, error + a.x * b.y + a.y * b.x);
}

fn colour(steps: f32) -> u32 {
    let phase = 6.2831853 * (vec3(0.55, 0.62, 0.72) + 0.021 * steps);
    let rgb = vec3<u32>(255.0 * (0.5 + 0.5 * cos(phase)));
    return rgb.x | (rgb.y << 8u) | (rgb.z << 16u) | 0xff000000u;
}

@compute @workgroup_size(8, ROWS)
fn mandelbrot(@builtin(global_invocation_id) at: vec3<u32>) {
    let index = at.y * frame.width + at.x;
    if at.x >= frame.width || index >= arrayLength(&pixels) { return; }
    let offset = vec2(f32(at.x), f32(first_row + at.y)) * frame.step;
    let c_re = sum(frame.x, vec2(offset.x, 0.0));
    let c_im = sum(frame.y, vec2(-offset.y, 0.0));
    var re = vec2(0.0, 0.0);
    var im = vec2(0.0, 0.0);
    for (var i = 0u; i < frame.iterations; i++) {
        let re2 = product(re, re);
        let im2 = product(im, im);
        if re2.x + im2.x > 256.0 {
            // The fraction of a step by which it escaped makes the colours smooth.
            pixels[index] = colour(f32(i) + 1.0 - log2(0.5 * log2(re2.x + im2.x)));
            return;
        }
        let both = product(re, im);
        im = sum(both + both, c_im);
        re = sum(sum(re2, -im2), c_re);
    }
    pixels[index] = 0xff000000u;
}
"""

FRAME = np.dtype(
    [("x", "<f4", 2), ("y", "<f4", 2), ("step", "<f4"), ("width", "<u4"), ("iterations", "<u4"), ("pad", "<u4")]
)
CENTRE = -0.743643887037151 + 0.131825904205330j  # in the seahorse valley
BAND = 64
ROWS = 8


def two_floats(value: float) -> tuple[float, float]:
    """A number as a float32 and what that leaves of it."""
    high = np.float32(value)
    return float(high), float(np.float32(value - float(high)))


def render(
    device: wsgrad.Device, *, width: int, height: int, zoom: float, iterations: int, console: Console
) -> np.ndarray:
    """Render one picture on the device; returns its pixels, uint8 of shape (height, width, 4)."""
    step = 3.0 / (zoom * width)
    left, top = CENTRE.real - step * width / 2, CENTRE.imag + step * height / 2
    frame = np.array((two_floats(left), two_floats(top), step, width, iterations, 0), FRAME)[()]
    program = device.program(KERNEL, "mandelbrot", dialect="wgsl")
    picture = np.empty((height, width), np.uint32)
    columns = TextColumn("rendering on {task.fields[device]}"), BarColumn(), TextColumn("{task.percentage:3.0f} %")
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("rendering", total=height, device=device.id)
        for first in range(0, height, BAND):
            rows = min(BAND, height - first)
            # A buffer of its own for each band, freed with its last reference: memory on the device stays small.
            pixels = device.empty((rows, width), np.uint32)
            program(pixels, frame, first, grid=(-(-width // 8), -(-rows // ROWS)), ROWS=ROWS)
            pixels.copy_to(picture[first : first + rows])
            progress.advance(task, rows)
    return picture.view(np.uint8).reshape(height, width, 4)


def find_device(server: wsgrad.Server, wanted: str | None) -> wsgrad.Device:
    """The device asked for, or the first that speaks WGSL."""
    if wanted is not None:
        return server.devices[wanted]
    for device in server.devices:
        if "wgsl" in device.dialects:
            return device
    raise SystemExit(
        "no device of this server speaks WGSL: open its page in a browser with WebGPU, or serve one with "
        "`wsgrad-serve --device webgpu`"
    )


def main() -> None:
    """Connect, render, save."""
    parser = argparse.ArgumentParser(description="Render a zoom into the Mandelbrot set on a device with WGSL.")
    parser.add_argument("--url", help="a running server, as wsgrad-serve prints it (default: WSGRAD_URL)")
    parser.add_argument("--device", help="id, label or kind of the device (default: the first with WGSL)")
    parser.add_argument("--size", default="2048x1536", help="width x height in pixels (default: %(default)s)")
    parser.add_argument("--zoom", type=float, default=2e4, help="how deep (default: %(default)g)")
    parser.add_argument("--iterations", type=int, default=1000, help="at most, for a point (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("mandelbrot.png"))
    args = parser.parse_args()
    try:
        width, height = (int(number) for number in args.size.lower().split("x"))
    except ValueError:
        parser.error(f"--size is WIDTHxHEIGHT, not {args.size!r}")
    if min(width, height, args.iterations) < 1 or args.zoom <= 0:
        parser.error("--size, --zoom and --iterations are positive")

    console = Console()
    try:
        with wsgrad.connect(args.url) as server:
            device = find_device(server, args.device)
            start = time.perf_counter()
            picture = render(
                device, width=width, height=height, zoom=args.zoom, iterations=args.iterations, console=console
            )
            seconds = time.perf_counter() - start
    except (wsgrad.WsgradError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    Image.fromarray(picture, "RGBA").convert("RGB").save(args.output)
    print(f"{args.output}: {width}×{height} in {seconds:.1f} s")


if __name__ == "__main__":
    main()
