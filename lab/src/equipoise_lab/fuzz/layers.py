"""Layers with parameters for random programs: dense, convolution, pooling, normalisation, attention, our own."""

from torch import Tensor

from equipoise_lab.fuzz.writing import Bench, Row

#: layers of our own with a weight
CONVOLUTIONS = ("SN", "AOL", "SR", "RKO", "BCOP", "SOC", "Cayley", "BRO")
DENSE = ("SN", "AOL", "SR", "Bjorck", "Cayley", "BRO", "RKO", "SOC")


def _linear(b: Bench, v: str, t: Tensor) -> str:
    n, out = t.shape[-1], b.choose(t.shape[-1], 3, 5)
    bias = b.choose(True, False)
    return b.choose(
        lambda: f"{b.module(f'nn.Linear({n}, {out}, bias={bias})')}({v})",
        lambda: f"{v} @ {b.constant((n, out))}",
        lambda: f"F.linear({v}, {b.constant((out, n))}, {b.constant((out,))})",
        lambda: f"{v}.matmul({b.constant((n,))})",
        lambda: f"{b.constant((3, t.shape[-2] if t.dim() > 1 else n))} @ {v}",
        lambda: (
            f"torch.addmm({b.constant((out,))}, {v}, {b.constant((n, out))}, alpha={b.choose(1, 2.0, -0.5)})"
        ),
        lambda: f"torch.bmm({v}, {b.constant((t.shape[0], n, out))})",
        lambda: f"torch.einsum('bi,ij->bj', {v}, {b.constant((n, out))})",
        lambda: f"torch.mv({b.constant((out, n))}, {v})",
    )()


def _tied(b: Bench, v: str, t: Tensor) -> str:
    """Residual branches with shared weights: `h ± φ(hWᵀ)W`."""
    n = t.shape[-1]
    W = b.constant((b.choose(n, 2 * n, 2), n), scale=float(b.choose(0.3, 0.5, 1.0)))
    act = b.choose("F.relu", "torch.tanh", "F.gelu", "F.silu", "torch.sin", "")
    branch, c = f"{act}({v} @ {W}.t() + {b.choose(0, 0.5)}) @ {W}", b.number()
    return b.choose(
        f"{v} + {branch}",
        f"{v} - {branch}",
        f"{branch} - {v}",
        f"{v} - 2 * {branch}",
        f"torch.add({v}, {branch}, alpha={c})",
        f"torch.sub({v}, {branch}, alpha={c})",
        f"{v} + {c} * ({branch})",
    )


def _tied_in_place(b: Bench, v: str, t: Tensor) -> str:
    n = t.shape[-1]
    W = b.constant((b.choose(n, 2 * n), n), scale=float(b.choose(0.5, 1.0)))
    branch = f"{b.choose('F.relu', 'torch.tanh', 'F.gelu')}({v} @ {W}.t()) @ {W}"
    return b.choose(
        f"{v} += {branch}",
        f"{v} -= {branch}",
        f"{v}.add_({branch}, alpha={b.number()})",
        f"{v}.sub_({branch})",
    )


def _residual_layers(b: Bench, v: str, t: Tensor) -> str:
    """A block `x ± f(x)` of layers that keep the shape, or the same layer twice."""
    if t.dim() >= 3:
        d, c = t.dim() - 2, t.shape[1]
        layer = b.module(f"nn.Conv{d}d({c}, {c}, 3, padding=1, bias={b.choose(True, False)})")
    else:
        layer = b.module(f"nn.Linear({t.shape[-1]}, {t.shape[-1]})")
    act = b.choose("F.relu", "torch.tanh", "F.gelu", "F.mish")
    return b.choose(
        f"{v} + {act}({layer}({v}))",
        f"{layer}({act}({layer}({v}))) - {v}",
        f"{v} + {layer}({v})",
        f"{v} - {layer}({act}({v}))",
        f"{act}({layer}({v}) + {v})",
        f"{layer}({v}) - {layer}({act}({v}))",
    )


def _conv(b: Bench, v: str, t: Tensor) -> str:
    d, c = t.dim() - 2, t.shape[1]
    groups = b.choose(1, 1, c if c < 5 else 1, 2 if c % 2 == 0 else 1)
    out, k = groups * b.choose(1, 2), b.choose(1, 2, 3, 3)
    stride, dilation = b.choose(1, 1, 2), b.choose(1, 1, 2)
    mode = b.choose("zeros", "zeros", "circular", "reflect", "replicate")
    padding = b.choose(0, 1, 1, 2) if stride > 1 or b.rng.random() < 0.8 else "'same'"
    bias = b.choose(True, False)
    text = (
        f"nn.Conv{d}d({c}, {out}, {k}, stride={stride}, padding={padding}, dilation={dilation}, groups={groups}, "
        f"bias={bias}, padding_mode={mode!r})"
    )
    layer = f"{b.module(text)}({v})"
    if b.rng.random() < 0.3:
        return f"{b.module(f'nn.BatchNorm{d}d({out}, affine={bias})')}({layer})"
    return layer


def _conv_transpose(b: Bench, v: str, t: Tensor) -> str:
    d, c = t.dim() - 2, t.shape[1]
    k, s = b.choose(1, 2, 3), b.choose(1, 2)
    settings = f"stride={s}, padding={b.choose(0, 0, 1)}, output_padding={b.choose(0, s - 1)}"
    text = f"nn.ConvTranspose{d}d({c}, {b.choose(1, 2)}, {k}, {settings})"
    return f"{b.module(text)}({v})"


def _pool(b: Bench, v: str, t: Tensor) -> str:
    d = t.dim() - 2
    k, s, p = b.choose(2, 3), b.choose(1, 2, 3), b.choose(0, 1)
    average = f"ceil_mode={b.choose(True, False)}, count_include_pad={b.choose(True, False)}"
    average += "" if d == 1 else f", divisor_override={b.choose(None, None, 3)}"
    return b.choose(
        f"F.max_pool{d}d({v}, {k}, {s}, {p})",
        f"F.max_pool{d}d({v}, {k}, {s}, {p}, dilation=2)",
        f"F.max_pool{d}d({v}, 2, ceil_mode=True)",
        f"F.avg_pool{d}d({v}, {k}, {s}, {p}, {average})",
        f"F.adaptive_avg_pool{d}d({v}, {b.choose(1, 2, 3)})",
        f"F.adaptive_max_pool{d}d({v}, {b.choose(1, 2, 3)})",
        f"F.adaptive_avg_pool{d}d({v}, 1).flatten(1)",
    )


def _resample(b: Bench, v: str, t: Tensor) -> str:
    modes = {
        3: ("nearest", "linear", "nearest-exact"),
        4: ("nearest", "bilinear", "bicubic", "nearest-exact"),
        5: ("nearest", "trilinear"),
    }
    mode = b.choose(*modes[t.dim()])
    aligned = "" if "nearest" in mode else f", align_corners={b.choose(True, False)}"
    smooth = ", antialias=True" if mode in ("bilinear", "bicubic") and b.rng.random() < 0.3 else ""
    size = b.choose(
        "scale_factor=2",
        "scale_factor=0.5",
        f"size={tuple(b.choose(2, 3, 5) for _ in range(t.dim() - 2))}",
    )
    return f"F.interpolate({v}, {size}, mode={mode!r}{aligned}{smooth})"


def _padded(b: Bench, v: str, t: Tensor) -> str:
    axes = b.choose(1, max(1, t.dim() - 2))
    amounts = tuple(b.choose(0, 1, 1, 2, -1) for _ in range(2 * axes))
    mode = b.choose("constant", "constant", "reflect", "replicate", "circular")
    value = f", value={b.number()}" if mode == "constant" and b.rng.random() < 0.3 else ""
    return f"F.pad({v}, {amounts}, mode={mode!r}{value})"


def _normalised(b: Bench, v: str, t: Tensor) -> str:
    n, eps, affine = t.shape[-1], b.choose(1e-5, 1e-2, 0.5), b.choose(True, False)
    c = t.shape[1] if t.dim() > 1 else n
    d = max(1, t.dim() - 2)
    settings = f"{c}, eps={eps}, affine={affine}"
    tracked = f"track_running_stats={b.choose(True, False)}"
    return b.choose(
        lambda: f"{b.module(f'nn.LayerNorm({n}, eps={eps}, elementwise_affine={affine})')}({v})",
        lambda: f"{b.module(f'nn.LayerNorm({list(t.shape[1:])}, eps={eps})')}({v})",
        lambda: f"{b.module(f'nn.RMSNorm({n}, eps={eps})')}({v})",
        lambda: (
            f"{b.module(f'nn.GroupNorm({b.choose(1, c)}, {c}, eps={eps}, affine={affine})')}({v})"
        ),
        lambda: f"{b.module(f'nn.InstanceNorm{d}d({settings}, {tracked})')}({v})",
        lambda: f"{b.module(f'nn.BatchNorm{d}d({settings})')}({v})",
        lambda: f"{b.module(f'nn.PReLU({b.choose(1, c)})')}({v})",
        lambda: f"F.layer_norm({v}, ({n},), None, {b.constant((n,))}, {eps})",
    )()


def _attention(b: Bench, v: str, t: Tensor) -> str:
    n, d = t.shape[-2:]
    q, k, w = (b.constant((d, d), scale=float(b.choose(0.3, 1.0))) for _ in range(3))
    z = v if b.rng.random() < 0.3 else f"F.layer_norm({v}, ({d},), eps=0.1)"
    causal = b.choose(True, False)
    mask = f".masked_fill(torch.ones({n}, {n}).triu(1).bool(), float('-inf'))" if causal else ""
    return b.choose(
        f"F.scaled_dot_product_attention({z} @ {q}, {z} @ {k}, {z} @ {w}, is_causal={causal})",
        f"torch.softmax((({z} @ {q}) @ ({z} @ {k}).transpose(-1, -2) / {round(8 * d**0.5) / 8}){mask}, -1) @ ({z} @ {w})",
        f"({z} @ {q}) @ ({z} @ {k}).transpose(-1, -2)",
        f"torch.einsum('bij,bkj->bik', {z}, torch.tanh({v}))",
    )


def _squeeze_excite(b: Bench, v: str, t: Tensor) -> str:
    c = t.shape[1]
    W = b.constant((c, c))
    means = ", ".join(str(i) for i in range(2, t.dim()))
    return f"{v} * torch.sigmoid({v}.mean(({means},)) @ {W}).reshape({t.shape[0]}, {c}{', 1' * (t.dim() - 2)})"


def _hooked(b: Bench, v: str, t: Tensor) -> str:
    n = t.shape[-1]
    layer = b.module(f"nn.Linear({n}, {n})")
    name = layer.removeprefix("self.")
    hook = f"lambda module, given, out: {b.number()} * out"
    b.setup[-1] = (
        f"{name} = (lambda m: (m.register_forward_hook({hook}), m)[1])({b.setup[-1].split(' = ', 1)[1]})"
    )
    exec(f"self.{b.setup[-1]}", b.space)
    return f"{layer}({v})"


def _own(b: Bench, v: str, t: Tensor) -> str | None:
    """Layers of `equipoise.nn`, in float64, where the copy that is attacked is the network that is bounded."""
    if b.dtype != "float64":
        return None
    n, c = t.shape[-1], t.shape[1] if t.dim() > 1 else t.shape[-1]
    if t.dim() == 4:
        k, s = b.choose(1, 3), b.choose(1, 1, 2)
        mode = b.choose("circular", "zeros")
        kind = f"{b.choose(*CONVOLUTIONS)}Conv2d"
        text = b.choose(
            f"{kind}({c}, {b.choose(c, 2)}, {k}, padding={k // 2}, stride={s}, padding_mode={mode!r})",
            f"{kind}({c}, {c}, {k}, padding={k // 2})",
            f"{b.choose('SOC', 'Cayley')}ConvTranspose2d({c}, {b.choose(c, 2)}, {k}, {s}, {k // 2}, {s - 1})",
            f"{b.choose('SLLConv2d', 'CPLConv2d')}({c}, {2 * c}, 3, padding=1)",
            "MaxMin()",
            "ScaledAvgPool2d(2)",
            "SpaceToDepth(2)",
            "BatchCentering()",
            "LayerCentering()",
            "MaxPool2d(2)",
        )
    else:
        kind = f"{b.choose(*DENSE)}Linear"
        text = b.choose(
            f"{kind}({n}, {b.choose(n, 3, 7)})",
            f"{b.choose('SLLLinear', 'CPLLinear')}({n}, {2 * n})",
            "MaxMin()",
            f"HouseholderActivation({c})",
            "LayerCentering()",
            "GroupSort(2)",
        )
    return f"{b.module(f'equipoise.nn.{text}')}({v})"


def _recurrent(b: Bench, v: str, t: Tensor) -> str:
    kind = b.choose("LSTM", "GRU", "RNN", "RNN")
    both = ", bidirectional=True" if b.rng.random() < 0.3 else ""
    if t.dim() == 2:
        cell = b.choose("RNNCell", "GRUCell")
        return f"{b.module(f'nn.{cell}({t.shape[-1]}, {b.choose(1, 3)})')}({v})"
    return (
        f"{b.module(f'nn.{kind}({t.shape[-1]}, {b.choose(1, 2)}, batch_first=True{both})')}({v})[0]"
    )


LAYERS: tuple[Row, ...] = (
    Row(_recurrent, (2, 3), weight=1),
    Row(_linear, weight=6),
    Row(_tied, (1, 2, 3, 4), weight=2.5),
    Row(_tied_in_place, (1, 2, 3, 4), weight=1.0, in_place=True),
    Row(_residual_layers, (1, 2, 3, 4, 5), weight=2),
    Row(_conv, (3, 4, 5), weight=6),
    Row(_conv_transpose, (3, 4, 5), weight=1.5),
    Row(_pool, (3, 4, 5), weight=2.5),
    Row(_resample, (3, 4, 5), weight=1.5),
    Row(_padded, (2, 3, 4, 5), weight=1.5),
    Row(_normalised, weight=2),
    Row(_attention, (3, 4), weight=1.5),
    Row(_squeeze_excite, (3, 4, 5), weight=0.4, bounded=True),
    Row(_hooked, (1, 2, 3), weight=0.4),
    Row(_own, (2, 4), weight=2.5),
)
