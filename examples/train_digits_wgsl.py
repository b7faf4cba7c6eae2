"""train_digits.py with its network in WGSL: it trains on browser tabs, phones included, and on native WebGPU."""

from train_digits import MOMENTUM, UNITS, Network, Rows, main

import wsgrad

KERNELS = """
const INPUTS = 65u;
const HIDDEN = 128u;
const UNITS = 129u; // the last unit is a constant 1: the bias
const CLASSES = 10u;
"""

FORWARD = """
@group(0) @binding(0) var<storage, read_write> hidden: array<f32>;
@group(0) @binding(1) var<storage, read_write> probability: array<f32>;
@group(0) @binding(2) var<storage, read_write> loss: array<f32>;
@group(0) @binding(3) var<storage, read> image: array<f32>;
@group(0) @binding(4) var<storage, read> label: array<i32>;
@group(0) @binding(5) var<storage, read> w1: array<f32>;
@group(0) @binding(6) var<storage, read> w2: array<f32>;

// A workgroup is one image: its threads share the units, and the first of them does the ten classes.
@compute @workgroup_size(64)
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let row = group.x;
    for (var j = local.x; j < HIDDEN; j += 64u) {
        var sum = 0.0;
        for (var i = 0u; i < INPUTS; i++) { sum += w1[j * INPUTS + i] * image[row * INPUTS + i]; }
        hidden[row * UNITS + j] = max(sum, 0.0);
    }
    if local.x == 0u { hidden[row * UNITS + HIDDEN] = 1.0; }
    storageBarrier();
    if local.x > 0u { return; }

    var score: array<f32, CLASSES>;
    for (var j = 0u; j < UNITS; j++) {
        let h = hidden[row * UNITS + j];
        for (var k = 0u; k < CLASSES; k++) { score[k] += h * w2[j * CLASSES + k]; }
    }
    var highest = score[0];
    for (var k = 1u; k < CLASSES; k++) { highest = max(highest, score[k]); }
    var total = 0.0;
    for (var k = 0u; k < CLASSES; k++) { total += exp(score[k] - highest); }
    for (var k = 0u; k < CLASSES; k++) { probability[row * CLASSES + k] = exp(score[k] - highest) / total; }
    loss[row] = highest + log(total) - score[u32(label[row])];
}
"""

BACKWARD = """
@group(0) @binding(0) var<storage, read_write> g1: array<f32>;
@group(0) @binding(1) var<storage, read_write> g2: array<f32>;
@group(0) @binding(2) var<storage, read> image: array<f32>;
@group(0) @binding(3) var<storage, read> label: array<i32>;
@group(0) @binding(4) var<storage, read> hidden: array<f32>;
@group(0) @binding(5) var<storage, read> probability: array<f32>;
@group(0) @binding(6) var<storage, read> w2: array<f32>;

// A thread is one hidden unit: the gradients of the weights into it and out of it, averaged over the batch.
@compute @workgroup_size(32)
fn backward(@builtin(global_invocation_id) at: vec3<u32>) {
    let unit = at.x;
    if unit >= UNITS { return; }
    let rows = arrayLength(&label);
    var into: array<f32, INPUTS>;
    var out: array<f32, CLASSES>;
    for (var row = 0u; row < rows; row++) {
        let h = hidden[row * UNITS + unit];
        var slope = 0.0;
        for (var k = 0u; k < CLASSES; k++) {
            let right = select(0.0, 1.0, i32(k) == label[row]);
            let error = (probability[row * CLASSES + k] - right) / f32(rows);
            out[k] += h * error;
            slope += w2[unit * CLASSES + k] * error;
        }
        if h > 0.0 {
            for (var i = 0u; i < INPUTS; i++) { into[i] += slope * image[row * INPUTS + i]; }
        }
    }
    for (var k = 0u; k < CLASSES; k++) { g2[unit * CLASSES + k] = out[k]; }
    if unit < HIDDEN {
        for (var i = 0u; i < INPUTS; i++) { g1[unit * INPUTS + i] = into[i]; }
    }
}
"""

SGD = """
@group(0) @binding(0) var<storage, read_write> weight: array<f32>;
@group(0) @binding(1) var<storage, read_write> velocity: array<f32>;
@group(0) @binding(2) var<storage, read> gradient: array<f32>;
@group(0) @binding(3) var<uniform> rate: f32;
@group(0) @binding(4) var<uniform> momentum: f32;

// Stochastic gradient descent with momentum.
@compute @workgroup_size(64)
fn sgd(@builtin(global_invocation_id) at: vec3<u32>) {
    if at.x >= arrayLength(&weight) { return; }
    velocity[at.x] = momentum * velocity[at.x] - rate * gradient[at.x];
    weight[at.x] += velocity[at.x];
}
"""


class WgslNetwork(Network):
    """The same network; the sources say themselves what each program writes."""

    batch = 64
    """Rows of a batch: views of so many begin at multiples of 256 bytes, which WebGPU binds without a copy."""

    def compile(self, device: wsgrad.Device) -> None:
        """Send the three programs, which are compiled there."""
        self._forward = device.program(KERNELS + FORWARD, "forward", dialect="wgsl")
        self._backward = device.program(KERNELS + BACKWARD, "backward", dialect="wgsl")
        self._sgd = device.program(SGD, "sgd", dialect="wgsl")

    def forward(self, rows: Rows) -> None:
        """Fill in `hidden`, `probability` and `loss`: a workgroup per row."""
        outputs = rows.hidden, rows.probability, rows.loss
        self._forward(*outputs, rows.image, rows.label, self.w1, self.w2, grid=len(rows.image))

    def step(self, rows: Rows, rate: float) -> None:
        """Train on one batch: a thread per hidden unit, then a thread per weight."""
        self.forward(rows)
        inputs = rows.image, rows.label, rows.hidden, rows.probability
        self._backward(self.g1, self.g2, *inputs, self.w2, grid=-(-UNITS // 32))
        self._sgd(self.w1, self.v1, self.g1, rate, MOMENTUM, grid=-(-self.w1.size // 64))
        self._sgd(self.w2, self.v2, self.g2, rate, MOMENTUM, grid=-(-self.w2.size // 64))


if __name__ == "__main__":
    main(WgslNetwork, device="browser")
