"""The layer Mamba3 beside mamba_ssm's, written down token by token, with one and with several writes and reads."""

import math

import pytest
import torch
import torch.nn.functional as F

import dsf
from dsf import mixers
from dsf.mixers import layer_for


def turned(x, angle, halves):
    """Rotary positions: entry i turns with its neighbour, or with the entry half the keys further on."""
    one, other = (x.chunk(2, -1)) if halves else (x[..., 0::2], x[..., 1::2])
    pair = one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()
    return torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)


def by_tokens(layer, x):
    """y of [B, T, d_model] by the recurrence of the released code, whose keys and queries turn by the sum of angles."""
    (heads, n, p), rank, batch = layer.dims, layer.rank, x.shape[0]
    widths = [heads * p, heads * p, *[rank * layer.n_groups * n] * 2, heads, heads, heads, layer.angles]
    z, u, b, c, dt, a, lam, angle = layer.in_proj(x).split(widths, -1)
    one = torch.ones(heads, 1, p, dtype=x.dtype)
    to_x, to_z, to_y = (getattr(layer, f"mimo_{k}", one).transpose(0, 1) for k in "xzo")
    u, z = (part.unflatten(-1, (1, heads, p)) * weight for part, weight in ((u, to_x), (z, to_z)))
    rows = [part.unflatten(-1, (rank, -1, n)) for part in (b, c)]
    rows = [
        part.repeat_interleave(heads // layer.n_groups, 3) for part in (layer.B_norm(rows[0]), layer.C_norm(rows[1]))
    ]
    b, c = (part + bias.transpose(0, 1) for part, bias in zip(rows, (layer.B_bias, layer.C_bias), strict=True))
    step, share = F.softplus(dt + layer.dt_bias), torch.sigmoid(lam)
    decay = torch.exp(-F.softplus(a).clamp(min=1e-4) * step)
    angles = (F.pad(angle.tanh(), (0, n // 2 - layer.angles)).unsqueeze(2) * step.unsqueeze(-1) * math.pi).cumsum(1)
    b, c = (turned(part, angles.unsqueeze(2), layer.is_mimo) for part in (b, c))
    state, before, out = x.new_zeros(batch, heads, n, p), 0, []
    for t in range(x.shape[1]):
        write = torch.einsum("brhn,brhp->bhnp", b[:, t], u[:, t])
        late, own, kept = ((y[:, t, :, None, None]) for y in ((1 - share) * step * decay, share * step, decay))
        state, before = kept * state + late * before + own * write, write
        y = torch.einsum("brhn,bhnp->brhp", c[:, t], state) + layer.D[:, None] * u[:, t]
        gate = z[:, t]
        y = y * F.silu(gate) if layer.norm is None else layer.norm(y.flatten(-2), gate.flatten(-2)).view_as(y)
        out.append((y * to_y).sum(1).flatten(1))
    return layer.out_proj(torch.stack(out, 1))


@pytest.mark.parametrize("options", [{}, {"is_outproj_norm": True}, {"is_mimo": True, "mimo_rank": 3}], ids=str)
@pytest.mark.parametrize("sizes", [{"n_groups": 1}, {"n_groups": 2, "rope_fraction": 1.0}], ids=str)
def test_the_layer_is_mamba_ssms(options, sizes):
    torch.manual_seed(0)
    layer = mixers.Mamba3(32, d_state=8, headdim=16, **options, **sizes).double()
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    expected, (found, _) = by_tokens(layer, x), layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    dy, wanted = torch.randn_like(found), list(layer.parameters())
    pairs = zip(*(torch.autograd.grad(y, wanted, dy) for y in (found, expected)), strict=True)
    for (name, _), (a, b) in zip(layer.named_parameters(), pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=name)


def test_several_writes_and_reads_go_on_in_pieces_packed_and_token_by_token():
    torch.manual_seed(0)
    for bare in (False, True):
        layer = mixers.Mamba3(32, d_state=8, headdim=16, is_mimo=True, mimo_rank=2, bare=bare).double()
        x = torch.randn(1, 11, 32, dtype=torch.float64)
        y, state = layer(x)
        first, carried = layer(x[:, :4])
        rest, after = layer(x[:, 4:], carried)
        torch.testing.assert_close(torch.cat([first, rest], 1), y)
        torch.testing.assert_close(after.recurrent, state.recurrent)
        packed, _ = layer(x, cu_seqlens=torch.tensor([0, 4, 11]))
        torch.testing.assert_close(packed, torch.cat([first, layer(x[:, 4:])[0]], 1))
        carried, tokens = None, []
        for t in range(11):
            out, carried = layer.step(x[:, t], carried)
            tokens.append(out)
        torch.testing.assert_close(torch.stack(tokens, 1), y)


def test_names_shapes_and_starts_are_mamba_ssms():
    layer = layer_for("mamba3_mimo", 32, d_state=8, headdim=16)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters() if "bias" in name or "mimo" in name}
    assert shapes == {
        "dt_bias": (4,), "B_bias": (4, 4, 8), "C_bias": (4, 4, 8), "mimo_x": (4, 4, 16), "mimo_z": (4, 4, 16),
        "mimo_o": (4, 4, 16),
    }  # fmt: skip
    assert layer.in_proj.out_features == 2 * 64 + 2 * 4 * 8 + 3 * 4 + 2
    assert (layer.mimo_x == 0.25).all() and (layer.mimo_z == 1).all() and (layer.mimo_o == 0.25).all()
    with pytest.raises(dsf.InputError, match="is_outproj_norm"):
        mixers.Mamba3(32, d_state=8, headdim=16, is_mimo=True, is_outproj_norm=True)
