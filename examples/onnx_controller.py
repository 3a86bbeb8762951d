"""A controller from an ONNX file in a loop with its plant: a proved gain from disturbances to the state.

Plant: s' = A·s + B·u + d, a damped oscillator. Controller: u = π(s), a network in an ONNX file. If the loop s → A·s + B·π(s)
has a Lipschitz constant q < 1, disturbances of at most δ at every step move the state by at most δ/(1 − q), for ever.

Run: python examples/onnx_controller.py   (needs onnx and matplotlib: pip install 'equipoise[onnx,figures]')
"""

import numpy as np
import torch
from matplotlib import pyplot as plt
from onnx import TensorProto, helper, numpy_helper, save
from torch import Tensor, nn

import equipoise as eq
from equipoise.onnx import load_onnx

rng = np.random.default_rng(0)

# 1. Somebody gives us controller.onnx (here we write one: two hidden layers that push against fast motion).
shapes = [(2, 16), (16, 16), (16, 1)]
weights = [(rng.normal(size=s) / np.sqrt(s[0]) * 0.42).astype(np.float32) for s in shapes]
nodes, value = [], "state"
for i in range(3):
    nodes.append(helper.make_node("Gemm", [value, f"w{i}"], [f"h{i}"], name=f"layer{i}"))
    value = f"h{i}" if i == 2 else f"a{i}"
    if i < 2:
        nodes.append(helper.make_node("Relu", [f"h{i}"], [value], name=f"relu{i}"))
ends = [
    helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", d])
    for n, d in (("state", 2), (value, 1))
]
constants = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
graph = helper.make_graph(nodes, "controller", ends[:1], ends[1:], constants)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "controller.onnx")


class Loop(nn.Module):
    """One step of plant and controller together."""

    def __init__(self, controller: nn.Module) -> None:
        super().__init__()
        self.controller = controller
        turn = torch.tensor([[0.9848, 0.1736], [-0.1736, 0.9848]])  # ten degrees a step …
        self.register_buffer("A", 0.85 * turn)  # … and 15 % damping
        self.register_buffer("B", torch.tensor([[0.0], [0.2]]))

    def forward(self, state: Tensor) -> Tensor:
        return state @ self.A.T + self.controller(state) @ self.B.T


# 2. The proof: a bound of the whole loop, with the controller's nodes under their ONNX names.
loop = Loop(load_onnx("controller.onnx")).eval()
report = eq.lipschitz_bound(loop, torch.zeros(1, 2))
print(report)
q = report.upper
assert q < 1, "no guarantee: the loop may amplify"
gain = 1 / (1 - q)
print(f"\nproved: q = {q:.4f}, disturbances are amplified at most {gain:.1f} times")

# 3. The other side: the worst disturbance we find, kicking always the way the state drifts apart.
delta, quiet, kicked, path = 0.1, torch.ones(1, 2), torch.ones(1, 2), []
with torch.no_grad():
    for _ in range(300):
        quiet, kicked = loop(quiet), loop(kicked)
        apart = kicked - quiet
        kicked = kicked + delta * (apart / apart.norm() if path else torch.tensor([[1.0, 0.0]]))
        path.append(float((kicked - quiet).norm()))
print(f"reached by 300 greedy kicks of {delta}: {max(path):.3f}, proved at most {delta * gain:.3f}")
assert max(path) <= delta * gain

# 4. The picture.
plt.figure(figsize=(5, 3))
plt.plot(path, label="reached by greedy kicks")
plt.axhline(delta * gain, color="black", linestyle="--", label="proved, for every disturbance")
(
    plt.xlabel("step"),
    plt.ylabel("distance of the states"),
    plt.ylim(0, 1.1 * delta * gain),
    plt.legend(loc="center right"),
)
plt.tight_layout(), plt.savefig("onnx_controller.png", dpi=150)
