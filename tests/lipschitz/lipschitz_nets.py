"""The networks of these tests: what an audit meets, one of each family of the docs, and random ones with weights that hurt."""

# ruff: noqa: E501 - a table of networks, one to a line
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import nn as own


class Op(nn.Module):
    """A function of the input as a module; where it uses modules, of them and the input."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(modules)

    def forward(self, x):
        return self.function(self.parts, x) if self.parts else self.function(x)


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random batch-norm statistics and affine parameters, so that nothing is accidentally the identity; evaluation mode."""
    g = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.copy_(torch.randn(module.num_features, generator=g))
            module.running_var.copy_(torch.rand(module.num_features, generator=g) + 0.3)
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.LayerNorm):
            module.weight.data.copy_(torch.rand(module.weight.shape, generator=g) + 0.5)
            module.bias.data.copy_(torch.randn(module.bias.shape, generator=g) * 0.3)
    return model.eval().requires_grad_(False)


class Block(nn.Module):
    """A basic residual block; `shortcut` is identity, projection or A (subsample and pad channels)."""

    def __init__(self, i, o, stride=1, shortcut="identity"):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.kind, self.extra = shortcut, o - i
        if shortcut == "projection":
            self.down = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.kind == "projection":
            x = self.down(x)
        elif self.kind == "A":
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))
        return F.relu(x + y, inplace=True)


def dense_block(i, growth=3):
    bn, conv = nn.BatchNorm2d(i), nn.Conv2d(i, growth, 3, padding=1)
    return Op(lambda m, x: torch.cat([x, m.conv(F.relu(m.bn(x)))], 1), bn=bn, conv=conv)


def mlp(i, hidden, o):
    return nn.Sequential(nn.Linear(i, hidden), nn.GELU(), nn.Linear(hidden, o))


def _mixer(m, x):
    x = x + m.tokens(m.n1(x).transpose(1, 2)).transpose(1, 2)
    return x + m.channels(m.n2(x))


def _encoder(weights):
    def run(m, x):
        y = m.n1(x)
        x = x + m.attention(y, y, y, need_weights=weights)[0]
        return x + m.mlp(m.n2(x))

    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    return Op(run, n1=nn.LayerNorm(6, eps=0.1), n2=nn.LayerNorm(6, eps=0.1), attention=attention, mlp=mlp(6, 8, 6))


def mixer_block():
    norms = {"n1": nn.LayerNorm(6, eps=0.1), "n2": nn.LayerNorm(6, eps=0.1)}
    return Op(_mixer, **norms, tokens=mlp(4, 6, 4), channels=mlp(6, 6, 6))


def on_patches(*blocks):
    """Tokens of an image, blocks, and the mean of the tokens."""
    patches = Op(lambda m, x: m.conv(x).flatten(2).transpose(1, 2), conv=nn.Conv2d(3, 6, 4, 4))
    return nn.Sequential(patches, *blocks, Op(lambda x: x.mean(1)), nn.Linear(6, 3))


def squeeze_excite(c):
    def run(m, x):
        return x * torch.sigmoid(m.b(F.silu(m.a(F.adaptive_avg_pool2d(x, 1)))))

    return Op(run, a=nn.Conv2d(c, 2, 1), b=nn.Conv2d(2, c, 1))


def inverted(c=4, wide=8):
    body = nn.Sequential(
        nn.Conv2d(c, wide, 1), nn.BatchNorm2d(wide), nn.SiLU(),
        nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide), nn.SiLU(),
        squeeze_excite(wide), nn.Conv2d(wide, c, 1), nn.BatchNorm2d(c),
    )  # fmt: skip
    return Op(lambda m, x: x + m.body(x), body=body)


def rep_vgg(c=3):
    a, b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 1, bias=False)
    return Op(lambda m, x: F.relu(m.a(x) + m.b(x) + m.bn(x)), a=a, b=b, bn=nn.BatchNorm2d(c))


class Normalised(nn.Module):
    """Input normalisation, then a network."""

    def __init__(self, net):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.25, 0.3]).reshape(1, 3, 1, 1))
        self.net = net

    def forward(self, x):
        return self.net((x - self.mean) / self.std)


def _twice(m, x):
    """One module called twice, and a tuple as output."""
    y = torch.tanh(m.layer(x))
    return y, {"again": F.gelu(m.layer(y))}


def hooked():
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    net[0].register_forward_hook(lambda module, args, output: output * 10)
    return net


def head(c, classes=4):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...], float | None]]:
    torch.manual_seed(0)
    image = (3, 8, 8)
    spectral = nn.utils.parametrizations.spectral_norm
    table = {
        "mlp": (nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)), (6,), None),
        "gelu mlp": (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3)), (6,), None),
        "cnn": (nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ELU(), nn.Conv2d(6, 6, 3, groups=2), nn.Flatten(), nn.LazyLinear(4)), image, None),
        "vgg": (nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 10), nn.Dropout(), nn.Linear(10, 4)), image, None),
        "resnet identity": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Block(4, 4), Block(4, 4), head(4)), image, None),
        "resnet projection": (nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Block(4, 6, 2, "projection"), head(6)), (3, 16, 16), None),
        "resnet option A": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Block(4, 8, 2, "A"), head(8)), image, None),
        "densenet": (nn.Sequential(dense_block(3), dense_block(6), nn.Conv2d(9, 4, 1), nn.AvgPool2d(2), head(4)), image, None),
        "mixer": (on_patches(mixer_block()), image, None),
        "efficientnet": (nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.SiLU(), inverted(), head(4)), image, 2.0),
        "vit": (on_patches(_encoder(False)), image, 2.0),
        "vit weights": (on_patches(_encoder(True)), image, None),
        "repvgg": (nn.Sequential(rep_vgg(), rep_vgg(), head(3)), image, None),
        "normalised": (Normalised(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), head(4))), image, None),
        "reflect": (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), head(4)), image, None),
        "bottleneck linear": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), head(4)), image, None),
        "hook": (hooked(), (6,), None),
        "parametrised": (nn.Sequential(spectral(nn.Linear(6, 8)), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))), (6,), None),
        "shared, tuple": (Op(_twice, layer=nn.Linear(6, 6)), (6,), None),
        "autoencoder": (nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Sigmoid()), image, None),
    }  # fmt: skip
    table["cnn"][0](torch.zeros(1, *image))
    return {name: (randomise(net, i), shape, ball) for i, (name, (net, shape, ball)) in enumerate(table.items())}


def _u_net(m, x):
    low = F.max_pool2d(m.a(x), 2)
    return m.b(torch.cat([F.interpolate(F.relu(low), scale_factor=2), x], 1))


def _attention(norm):
    def run(m, x):
        y = norm(x)
        return F.scaled_dot_product_attention(m.q(y), m.k(y), m.v(y))

    return run


def _attends():
    return {name: nn.Linear(4, 4) for name in "qkv"}


def _rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)


def _operator(x):
    z = torch.fft.rfft(x)
    return torch.fft.irfft(z * torch.tensor([1.0, 0.5, 0.25, 0.0]), n=6) + x


def _coupling(m, x):
    a, b = x.chunk(2, 1)
    return torch.cat([a, b * torch.exp(torch.tanh(m.s(a)))], 1)


def _mixture(m, x):
    weights = torch.softmax(m.g(x), -1)
    return weights[:, :1] * m.a(x) + weights[:, 1:] * m.b(x)


ADJACENCY = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]])
IMAGE = (2, 8, 8)
torch.manual_seed(0)
# family: (network, shape of a sample, ball it needs or None)
BOUNDED = {
    "dense networks": (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,), None),
    "convolutional networks": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 3)), IMAGE, None),
    "residual networks": (Block(2, 2), IMAGE, None),
    "autoencoders": (nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.ELU(), nn.ConvTranspose2d(3, 2, 4, 2, 1)), IMAGE, None),
    "U-Nets": (Op(_u_net, a=nn.Conv2d(2, 2, 3, padding=1), b=nn.Conv2d(4, 1, 3, padding=1)), IMAGE, None),
    "1-Lipschitz layers": (nn.Sequential(own.AOLLinear(4, 4), own.GroupSort(2), own.BjorckLinear(4, 3)), (4,), None),
    "activations written out": (
        nn.Sequential(nn.Linear(4, 5), Op(lambda x: x * torch.sigmoid(x)), nn.Linear(5, 3)), (4,), None),
    "MaxMin written by hand": (
        Op(lambda x: torch.cat([torch.max(*x.chunk(2, 1)), torch.min(*x.chunk(2, 1))], 1)), (6,), None),
    "sets and point clouds": (Op(lambda m, x: F.relu(m.a(x)).amax(1), a=nn.Linear(3, 4)), (5, 3), None),
    "graph convolutions": (Op(lambda m, x: F.relu(ADJACENCY @ m.a(x)), a=nn.Linear(4, 4)), (3, 4), None),
    "RNNs": (Op(lambda m, x: m.r(x)[0], r=nn.RNN(2, 3, batch_first=True)), (3, 2), None),
    "LSTMs": (Op(lambda m, x: m.r(x)[0], r=nn.LSTM(2, 2, batch_first=True)), (2, 2), None),
    "GRUs": (Op(lambda m, x: m.r(x)[0], r=nn.GRU(2, 2, batch_first=True)), (2, 2), None),
    "Fourier operators": (Op(_operator), (6,), None),
    "attention after a layer norm": (
        Op(_attention(lambda x: F.layer_norm(x, (4,), eps=1e-2)), **_attends()), (3, 4), None),
    "attention after an RMS norm": (Op(_attention(_rms), **_attends()), (3, 4), None),
    "attention on raw inputs": (Op(_attention(lambda x: x), **_attends()), (3, 4), 1.0),
    "L2 attention": (own.L2Attention(4, 2, 3), (3, 4), None),
    "attention from a convex potential": (own.ConvexAttention(4, heads=2), (3, 4), None),
    "normalized embeddings": (Op(lambda m, x: F.normalize(m.a(x), eps=0.1), a=nn.Linear(4, 4)), (4,), None),
    "squeeze and excitation": (squeeze_excite(2), IMAGE, 1.0),
    "gated units": (Op(lambda m, x: F.glu(m.a(x), -1), a=nn.Linear(4, 6)), (4,), 1.0),
    "mixtures of experts, soft": (Op(_mixture, g=nn.Linear(4, 2), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), (4,), 1.0),
    "coupling flows": (Op(_coupling, s=nn.Linear(2, 2)), (4,), 1.0),
}  # fmt: skip
# family: (network, example, words of the refusal)
REFUSED = {
    "tokens": (nn.Embedding(5, 3), torch.zeros(1, 4, dtype=torch.int64), "real-valued"),
    "quantized networks": (Op(lambda x: torch.round(x * 8) / 8), torch.zeros(1, 4), "discontinuous"),
    "hard attention": (Op(lambda x: x.argmax(1).to(x.dtype)), torch.zeros(1, 4), "narrow|jumps|no Lipschitz rule"),
    "branches on the data": (Op(lambda x: x if x.sum() > 0 else 2 * x), torch.zeros(1, 4), "depends on the data"),
    "training mode": (nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), torch.zeros(1, 4), "training mode"),
    "random layers": (Op(lambda x: x + torch.randn(4)), torch.zeros(1, 4), "random"),
    "half precision": (Op(lambda x: x.half().float()), torch.zeros(1, 4), "narrow"),
    "division by a norm without ε": (Op(lambda x: x / x.norm(dim=1, keepdim=True)), torch.zeros(1, 4), "near 0"),
    "mixing of samples": (Op(lambda x: x - x.mean(0)), torch.zeros(2, 4), "other samples"),
}


ACTIVATIONS = {
    "relu": nn.ReLU, "leaky": lambda: nn.LeakyReLU(0.2), "steep leaky": lambda: nn.LeakyReLU(1.5), "prelu": nn.PReLU,
    "elu": nn.ELU, "selu": nn.SELU, "celu": lambda: nn.CELU(0.7), "gelu": nn.GELU, "gelu tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU, "mish": nn.Mish, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softplus": lambda: nn.Softplus(2.0),
    "softsign": nn.Softsign, "logsigmoid": nn.LogSigmoid, "hardtanh": nn.Hardtanh, "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid, "softshrink": nn.Softshrink,
    "abs": lambda: Op(torch.abs),
}  # fmt: skip


def picture(act, pool):
    """A small residual convolutional network with batch norm, and max or average pooling."""

    def run(m, x):
        x = m.act(m.norm(m.first(x)))
        return m.last(m.pool(x + F.relu(m.inner(x))).flatten(1))

    first, inner = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    last = nn.Linear(2 * 4, 3)
    return randomise(Op(run, first=first, norm=nn.BatchNorm2d(2), act=act, inner=inner, pool=pool, last=last))


def residual(width, act):
    return Op(lambda m, x: x + m.b(m.act(m.a(x))), a=nn.Linear(width, width), act=act, b=nn.Linear(width, width))


def concatenated(width, act):
    run = lambda m, x: m.b(torch.cat([x, m.act(m.a(x))], 1))  # noqa: E731
    return Op(run, a=nn.Linear(width, 3), b=nn.Linear(width + 3, width), act=act)


#: weights chosen to hurt: what each does to a dense layer
HARM = {
    "plain": lambda layer: None,
    "large": lambda layer: layer.weight.data.mul_(1e8),
    "small": lambda layer: layer.weight.data.mul_(1e-8),
    "twins": lambda layer: layer.weight.data.copy_(layer.weight.data[:1].expand_as(layer.weight)),
    "zero": lambda layer: layer.weight.data.zero_(),
    "dead": lambda layer: layer.bias.data.fill_(-100.0),
    "at the kink": lambda layer: layer.bias.data.zero_(),
}


def random_network(seed):
    """A network with its input shape; every seed another shape, activation, architecture and precision."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda n: int(torch.randint(n, (1,), generator=g))  # noqa: E731
    torch.manual_seed(seed)
    names = list(ACTIVATIONS)
    act = lambda: ACTIVATIONS[names[pick(len(names))] if pick(2) else "relu"]()  # noqa: E731
    kind = pick(5)
    if kind == 0:
        pools = (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(3, 2, 1))
        net, shape = picture(act(), pools[pick(3)]), (1, 4, 4)
    else:
        width, depth = 3 + pick(10), 1 + pick(4)
        layers = [nn.Linear(4, width), act()]
        for _ in range(depth):
            layers += [
                nn.Sequential(nn.Linear(width, width), act()),
                residual(width, act()),
                concatenated(width, act()),
            ][pick(3) if kind > 2 else 0 : 3][:1]
        net, shape = nn.Sequential(*layers, nn.Linear(width, 3)), (4,)
        harm = HARM[list(HARM)[pick(len(HARM))] if pick(2) else "plain"]
        dense = [m for m in net.modules() if isinstance(m, nn.Linear)]
        harm(dense[pick(len(dense))])
    if pick(2):
        net = net.double()
    return net.eval().requires_grad_(False), shape
