"""What random programs are written with: one line is one way to write an operation.

`{v}` is the tensor it works on, `{w}` another one of the same shape, `{c}` a factor of either sign and `{p}` a positive one.
"""

ACTIVATIONS = """
F.relu({v})
F.relu6({v})
torch.tanh({v})
torch.sigmoid({v})
F.silu({v})
F.mish({v})
F.selu({v})
F.hardswish({v})
F.hardsigmoid({v})
F.logsigmoid({v})
{v}.abs()
-{v}
torch.sin({v})
torch.cos({v})
torch.atan({v})
torch.erf({v})
torch.asinh({v})
F.gelu({v})
F.gelu({v}, approximate='tanh')
F.leaky_relu({v}, {c})
F.rrelu({v}, 0.125, 0.375)
F.elu({v}, {p})
F.celu({v}, {p})
F.softplus({v}, {p})
F.hardtanh({v}, -{p}, {p})
{v}.clamp(-{p}, 0.25)
{v}.clamp(min={c})
{v}.clamp_max({c})
{v}.clamp_min({c})
F.softshrink({v}, {p})
F.softsign({v})
F.softmin({v}, -1)
"""

IN_PLACE = """
{v}.relu_()
{v}.tanh_()
{v}.sigmoid_()
F.silu({v}, inplace=True)
F.mish({v}, inplace=True)
{v}.neg_()
{v}.abs_()
{v}.clamp_(-{p}, {p})
{v}.mul_({c})
{v}.add_({c})
{v}.div_({p})
{v} *= {c}
{v} += {c}
{v} -= {c}
{v} /= {p}
F.leaky_relu({v}, {c}, inplace=True)
F.elu({v}, {p}, inplace=True)
{v}.sin_()
F.hardtanh({v}, -{p}, {p}, inplace=True)
F.selu({v}, inplace=True)
F.celu({v}, {p}, inplace=True)
{v}.erf_()
F.hardswish({v}, inplace=True)
F.relu6({v}, inplace=True)
{v} *= {v}.sigmoid()
{v}.square_()
"""

THROUGH_VIEWS = """
{v}[..., :1] += {c}
{v}[..., 1:] *= {c}
{v}[..., 0].mul_({c})
{v}.flatten().mul_({c})
{v}[..., :1].relu_()
{v}[..., ::2] = 0.0
{v}.view(-1)[1:].neg_()
{v}.transpose(0, -1).tanh_()
{v}[..., :1] += {v}[..., 1:2]
{v}[..., 0] = {v}[..., 1]
{v}[:, :1].add_({v}[:, 1:2], alpha={c})
{v}.unsqueeze(0).mul_({c})
"""

REFUSED = """
F.hardshrink({v}, {p})
F.threshold({v}, 0.125, 0.0)
{v}.sign() * {v}
{v}.round()
{v}.floor()
F.softplus({v}, 1, 3)
{v} * (3.0 if torch.compiler.is_compiling() else {c})
{v}.abs().sqrt()
{v}.reciprocal()
{v}.log()
({v} if {v}.sum() > 0 else 2 * {v})
{v} / ({v}.abs() + 0.0009765625)
torch.where({v} > 0, {v}, {c})
"""

PRODUCTS = """
torch.sqrt({v}.square() + {p})
{v}.abs() ** 1.5
torch.expm1({v})
torch.log({p} + {v}.exp())
{v}.var(-1)
{v} / ({p} + {v}.square())
F.cosine_similarity({v}, {v}.tanh(), -1, {p})
torch.einsum('...i,...i->...', {v}, torch.tanh({v}))
torch.addcmul({v}, {v}, {v}.sigmoid(), value={c})
{v}.square()
{v}.exp()
{v} ** 2
{v} * torch.sigmoid({v})
{v} * {v}.mean()
{v} * {v}
F.glu(torch.cat([{v}, {v}], -1), -1)
torch.tanh({v}) * torch.sigmoid({v})
{v} * torch.softmax({v}, -1)
torch.pow({v}, 3)
{v}.tanh().pow_(2)
{v}.sigmoid().float_power_(3)
torch.tanh({v}).unbind(-1)[0] * {v}[..., 0]
torch.softmax({v}, -1).unbind(-1)[0] @ {v}.unbind(-1)[0].mT
torch.view_as_real((lambda z: z * z)(torch.complex({v}.tanh(), {v}.sin())))
torch.view_as_real((lambda z: z * z)(torch.view_as_complex(torch.stack([{v}, {v}.tanh()], -1))))
torch.fft.fft({v}).conj().imag
"""

SHAPES = """
{v}.reshape(-1).view_as({v})
{v}.flatten().reshape_as({v})
{v}[..., :1].expand_as({v})
{v} + {v}.new_zeros({v}.shape)
{v} * {v}.new_ones({v}.shape)
F.alpha_dropout({v}, 0.5, False)
torch.feature_dropout({v}, 0.5, False)
F.feature_alpha_dropout({v}, 0.5, False)
{v}.movedim((0, -1), (-1, 0))
{v}.squeeze((0, -1))
{v}.sort(-1, stable=True).values
torch.concat([{v}, -{v}], 1)
torch.cat({v}.split([1, {v}.shape[1] - 1], 1)[::-1], 1)
{v}.flatten(1)
{v}.reshape(1, -1)
{v}.reshape({v}.shape[0], 2, -1)
{v}.transpose(-1, -2)
{v}.mT
{v}.contiguous()
{v}.clone()
{v}.detach()
{v}.flip(-1)
{v}.roll(1, -1)
{v}.unsqueeze(1)
{v}.squeeze(-1)
{v}.squeeze()
{v}.swapaxes(1, -1)
{v}.movedim(1, -1)
{v}.unflatten(-1, (2, -1))
{v}.unflatten(-1, (-1, 3))
F.pixel_shuffle({v}, 2)
F.pixel_unshuffle({v}, 2)
F.channel_shuffle({v}, 2)
{v}[..., 1:]
{v}[:, ::2]
{v}[:, -1]
{v}[..., 0]
{v}.narrow(-1, 0, 2)
{v}.diagonal(0, -2, -1)
{v}.tril()
{v}.triu()
{v} - torch.zeros_like({v})
{v} + torch.ones_like({v})
{v}.expand(1, 2, *{v}.shape[1:])
{v}.repeat(1, *[1] * ({v}.dim() - 2), 2)
{v}.tile((2,))
{v}.repeat_interleave(2, -1)
{v}[..., [0, 0, 1]]
{v}.index_select(-1, torch.tensor([1, 0, 1]))
F.dropout({v}, 0.5, False)
{v}.to(torch.float64)
{v}.type_as(x0)
{v}.sort(-1).values
{v}.sort(1).values
torch.cat({v}.chunk(2, 1)[::-1], 1)
torch.cat([p * {c} for p in {v}.split(1, -1)], -1)
torch.stack({v}.unbind(-1)[:2], 1)
{v}.tensor_split(2, -1)[0]
{v}.split([1, {v}.shape[-1] - 1], -1)[1]
torch.cat([{v}, {c} * {v}], -1)
torch.stack([{v}, {v}.flip(-1)], 1)
torch.cat([torch.maximum(*{v}.chunk(2, -1)), torch.minimum(*{v}.chunk(2, -1))], -1)
{v}.T
{v}.ravel()
{v}.permute(*range({v}.dim())[::-1])
{v}.view(-1)
torch.cat([{v}[..., :1], {v}], -1)
{v}[..., :1] + {v}
{v}.broadcast_to(2, *{v}.shape).reshape(1, -1)
"""

INDEXED = """
{v}.diff(dim=-1)
{v}.unfold(-1, 2, 1)
F.unfold({v}, 2, padding=1)
F.fold(F.unfold({v}, 2), {v}.shape[-2:], 2)
{v}.rot90(1, (-2, -1))
{v}.gather(-1, torch.zeros({v}.shape, dtype=torch.int64))
{v}.gather(-1, torch.zeros([1] * {v}.dim(), dtype=torch.int64).expand_as({v}))
{v}.take_along_dim(torch.zeros([1] * {v}.dim(), dtype=torch.int64), -1)
{v}.scatter(-1, torch.zeros({v}.shape, dtype=torch.int64)[..., :1], {c} * {v})
{v}.scatter_add(-1, torch.zeros({v}.shape, dtype=torch.int64), {c} * {v})
{v}.index_add(-1, torch.tensor([0, 0]), {v}[..., :2], alpha={c})
{v}.index_copy(-1, torch.tensor([1]), {c} * {v}[..., :1])
{v}.index_fill(-1, torch.tensor([0, 0]), {c})
torch.select_scatter({v}, {c} * {v}[..., 0], -1, 1)
torch.slice_scatter({v}, {c} * {v}[..., :1], -1, 1, 2)
{v}.diag_embed()
{v}.cumsum(-1)
{v}.cumsum(1)
{v}.cummax(-1).values
{v}.logcumsumexp(-1)
{v}.topk(2, -1).values
{v}.median(-1).values
{v}.kthvalue(1, -1).values
{v}.quantile(0.4, dim=-1)
torch.logaddexp({v}, {c} * {v}.flip(-1))
torch.hypot({v}, {v}.flip(-1))
torch.cdist({v}, {c} * {v})
torch.kron({v}, torch.tensor([[-1.5, 1.0]], dtype={v}.dtype))
torch.einsum('...i->...', {v})
torch.einsum('...i,i->...i', {v}, torch.full(({v}.shape[-1],), -1.5, dtype={v}.dtype))
torch.addcmul({v}, {v}, torch.full(({v}.shape[-1],), -1.5, dtype={v}.dtype), value={c})
torch.addcdiv({v}, {v}, torch.full(({v}.shape[-1],), 0.75, dtype={v}.dtype), value={c})
torch.lerp({v}, {v}.flip(-1), torch.full(({v}.shape[-1],), -1.5, dtype={v}.dtype))
torch.broadcast_tensors({v}, torch.ones(2, *[1] * {v}.dim(), dtype={v}.dtype))[0].reshape(1, -1)
torch.fft.rfft({v}).abs()
torch.view_as_real(torch.fft.fft({v}, norm='ortho'))
torch.fft.irfft(torch.fft.rfft({v}) * {c}, n={v}.shape[-1])
torch.fft.irfft2(torch.fft.rfft2({v}), s={v}.shape[-2:])
torch.fft.fft2({v}).real
torch.stack([{v}[..., ::2].maximum({v}[..., 1::2]), {v}[..., ::2].minimum({v}[..., 1::2])], -1)
torch.cat([{v}.amax(-1, True), {v}.amin(-1, True)], -1)
torch.log1p({v}.abs())
1 / ({p} + torch.sigmoid({v}))
({p} + F.relu({v})) ** -0.5
torch.sqrt({p} + F.softplus({v}))
F.normalize({v}, dim=-1, eps={p})
{v} * torch.rsqrt({v}.pow(2).mean(-1, keepdim=True) + {p})
{v} / ({v}.norm(dim=-1, keepdim=True) + {p})
torch.sigmoid({v}) * ({v}.tanh() - {v}.sin()) + {v}.sin()
"""

REDUCTIONS = """
{v}.min()
{v}.std(-1, keepdim=True)
{v}.norm(float('inf'), -1)
{v}.mean(-1)
{v}.sum(-1)
{v}.mean(-1, keepdim=True)
{v}.mean()
{v}.sum()
{v}.sum((-1, -2))
{v}.mean(tuple(range(1, {v}.dim())))
{v} - {v}.mean(-1, keepdim=True)
{v} + {v}.sum(-1, keepdim=True)
{v}.amax(-1)
{v}.amin(-1, keepdim=True)
{v}.max(-1).values
{v}.min(1).values
{v}.max()
{v}.max(-1)[0]
torch.linalg.vector_norm({v}, dim=-1)
torch.linalg.vector_norm({v}, 1, dim=-1)
torch.linalg.vector_norm({v}, float('inf'), dim=-1)
torch.linalg.vector_norm({v}, 1.5, dim=-1, keepdim=True)
{v}.norm()
{v}.norm(2, -1)
{v}.norm(3, -1)
{v}.std(-1)
{v}.std(-1, unbiased=False)
torch.std({v}, -1, correction=0)
{v}.std()
torch.softmax({v}, -1)
torch.softmax({v} / {p}, -1)
torch.softmax({v}, -1)[..., 0]
F.log_softmax({v}, -1)
torch.logsumexp({v}, -1)
torch.softmax({v}, 1)
F.log_softmax({v}, 1)
"""

JOINS = """
torch.min({v}, {w})
{v} + {w}
{v} - {w}
torch.add({v}, {w}, alpha={c})
torch.sub({v}, {w}, alpha={c})
torch.rsub({v}, {w}, alpha={c})
torch.maximum({v}, {w})
torch.minimum({v}, {w})
torch.cat([{v}, {w}], -1)
torch.stack([{v}, {w}], 1)
torch.lerp({v}, {w}, {c})
torch.cat([torch.maximum({v}, {w}), torch.minimum({v}, {w})], -1)
{c} * {v} - {w} / {p}
{v} + {w}.mean(-1, keepdim=True)
{c} - {v} - {w}
torch.max({v}, {w})
"""

JOINS_IN_PLACE = """
{v} += {w}
{v} -= {w}
{v}.add_({w}, alpha={c})
{v}.sub_({w}, alpha={c})
{v}.copy_({w})
{v}[..., :1] += {w}[..., :1]
{v} += {c} * {w}
{v}.lerp_({w}, {c})
{v}[..., 1:] = {w}[..., 1:]
"""
