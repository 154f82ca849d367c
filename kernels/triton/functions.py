"""Elementwise functions of printed kernels, float32 in and out.

They run compiled and in Triton's interpreter, so none calls libdevice.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TURN = tl.constexpr(6.283185307179586)
PER_TURN = tl.constexpr(0.15915494309189535)
PER_TURN_HIGH = tl.constexpr(0.15915493667125702)  # PER_TURN in float32, and what is left of it
PER_TURN_LOW = tl.constexpr(6.4206382432985265e-09)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 · 2^23: a float32 sum with it is a whole number, in its last binary digits
# Of four x: h = (1 + 2^-|x|) / 2, r = 1 / (h h h h), then 1 / h - 1 of each, with its sign.
FOUR_TANH = tl.constexpr("""{
    .reg .f32 a, b, c, d, p, q, r;
    abs.f32 a, $4;  abs.f32 b, $5;  abs.f32 c, $6;  abs.f32 d, $7;
    neg.f32 a, a;  neg.f32 b, b;  neg.f32 c, c;  neg.f32 d, d;
    ex2.approx.ftz.f32 a, a;  ex2.approx.ftz.f32 b, b;  ex2.approx.ftz.f32 c, c;  ex2.approx.ftz.f32 d, d;
    fma.rn.f32 a, a, 0f3F000000, 0f3F000000;  fma.rn.f32 b, b, 0f3F000000, 0f3F000000;
    fma.rn.f32 c, c, 0f3F000000, 0f3F000000;  fma.rn.f32 d, d, 0f3F000000, 0f3F000000;
    mul.f32 p, a, b;  mul.f32 q, c, d;  mul.f32 r, p, q;  rcp.approx.ftz.f32 r, r;
    mul.f32 q, r, q;  mul.f32 p, r, p;
    fma.rn.f32 b, q, b, 0fBF800000;  fma.rn.f32 a, q, a, 0fBF800000;
    fma.rn.f32 d, p, d, 0fBF800000;  fma.rn.f32 c, p, c, 0fBF800000;
    copysign.f32 $0, $4, b;  copysign.f32 $1, $5, a;  copysign.f32 $2, $6, d;  copysign.f32 $3, $7, c;
}""")


@triton.jit
def exp(x):
    """e^x as a power of two, which is one instruction, without exp's treatment of denormal results."""
    return tl.exp2(x * LOG2E)


@triton.jit
def log(x):
    """Natural logarithm."""
    return tl.log2(x) * LN2


@triton.jit
def log1p(x):
    """log(1 + x); a series where 1 + x would round x away."""
    series = x * (1.0 - x * (0.5 - x * (0.33333333 - x * (0.25 - x * (0.2 - x * 0.16666667)))))
    return tl.where(tl.abs(x) < 0.05, series, log(1.0 + x))


@triton.jit
def expm1(x):
    """e^x - 1; a series where e^x would round x away."""
    return tl.where(tl.abs(x) < 0.1, _expm1_series(x), exp(x) - 1.0)


@triton.jit
def _expm1_series(x):
    return x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334))))


@triton.jit
def expm1_of(x, root):
    """e^x - 1, given e^(x / 2)."""
    return tl.where(tl.abs(x) < 0.1, _expm1_series(x), root * root - 1.0)


@triton.jit
def phi1(x):
    """(e^x - 1) / x; a series where e^x would round x away."""
    series = 0.008333334 + x * (0.001388889 + x * 0.00019841270)
    series = 1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * series)))
    return tl.where(tl.abs(x) < 0.3, series, (exp(x) - 1.0) / tl.where(tl.abs(x) < 0.3, 1.0, x))


@triton.jit
def sqrt(x):
    """Square root."""
    return tl.sqrt(x)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x)."""
    return tl.rsqrt(x)


@triton.jit
def reciprocal(x):
    """1 / x to one ulp, for normal x up to 2^126: one instruction, where division also handles all other x."""
    if INTERPRETED:
        found = 1.0 / x
    else:
        found = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return sigmoid2(x * -LOG2E)


@triton.jit
def sigmoid2(x):
    """1 / (1 + 2^x)."""
    return reciprocal(1.0 + tl.exp2(x))


@triton.jit
def complement(x):
    """1 - sigmoid(x) without cancellation; to be multiplied with sigmoid(x)."""
    return complement2(x * -LOG2E)


@triton.jit
def complement2(x):
    """1 - sigmoid2(x) as 2^x sigmoid2(x), which shares its factors with sigmoid2(x).

    0 where 2^x is infinite: it is only used times sigmoid2(x) = 0, which would otherwise be NaN.
    """
    power = tl.exp2(x)
    s = reciprocal(1.0 + power)
    if INTERPRETED:
        found = tl.where(power < float("inf"), power, 0.0) * s
    else:
        found = tl.inline_asm_elementwise(
            "mul.sat.f32 $0, $1, $2;", "=r,r,r", [power, s], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def tanh_slope(x):
    """1 - tanh(x)² without cancellation."""
    return tanh_slope2(x * (2.0 * LOG2E))


@triton.jit
def tanh_slope2(x):
    """tanh_slope for the argument of tanh2."""
    return 4.0 * sigmoid2(x) * complement2(x)


@triton.jit
def log1p_power(x):
    """log(1 + 2^x) for x ≤ 0: z P(z) with z = 2^x and the best polynomial P of degree 8; relative error 3e-8."""
    z = tl.exp2(x)
    p = -0.029505193 + z * 0.005232683
    p = -0.13663239 + z * (0.078225875 + z * p)
    p = -0.24842981 + z * (0.19106003 + z * p)
    p = -0.49999493 + z * (0.33319097 + z * p)
    return z * (0.99999997 + z * p)


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.maximum(x, 0.0) + log1p_power(tl.abs(x) * -LOG2E)


@triton.jit
def logsigmoid(x):
    """log(sigmoid(x)) without underflow."""
    return tl.minimum(x, 0.0) - log1p_power(tl.abs(x) * -LOG2E)


@triton.jit
def rough_log1p_power(x):
    """log1p_power by a polynomial of degree 5; relative error 9e-6."""
    z = tl.exp2(x)
    p = -0.21004179 + z * (0.10121538 + z * -0.023866645)
    return z * (0.9999916 + z * (-0.49936083 + z * (0.32520366 + z * p)))


@triton.jit
def rough_softplus(x):
    """softplus with a relative error of 9e-6, for 16-bit inputs."""
    return tl.maximum(x, 0.0) + rough_log1p_power(tl.abs(x) * -LOG2E)


@triton.jit
def rough_logsigmoid(x):
    """logsigmoid with the error of rough_softplus."""
    return tl.minimum(x, 0.0) - rough_log1p_power(tl.abs(x) * -LOG2E)


@triton.jit
def tanh(x):
    """Hyperbolic tangent."""
    return tanh2(x * (2.0 * LOG2E))


@triton.jit
def tanh2(x):
    """(2^x - 1) / (2^x + 1), which is tanh(x / (2 log2 e)); the best odd polynomial where 2^x would round x away."""
    w = x * x
    p = 0.34657356 + w * (-0.013875224 + w * (0.00066360221 + w * -2.858495e-5))
    return tl.where(tl.abs(x) < 1.15, x * p, 1.0 - 2.0 * sigmoid2(x))


@triton.jit
def rough_tanh(x):
    """tanh with a relative error of 3e-5, for 16-bit inputs."""
    return rough_tanh2(x * (2.0 * LOG2E))


@triton.jit
def rough_tanh2(x):
    """tanh2 with the error of rough_tanh."""
    return tl.where(tl.abs(x) < 0.026, x * 0.3465689, 1.0 - 2.0 * sigmoid2(x))


@triton.jit
def near_tanh(x):
    """tanh with an absolute error of 2e-7, 0 at 0, for decays from 16-bit inputs."""
    return near_tanh2(x * (2.0 * LOG2E))


@triton.jit
def near_tanh2(x):
    """tanh2 like near_tanh; where four state entries of a token share a reciprocal, the absolute error is 5e-7."""
    if INTERPRETED or len(x.shape) < 3 or x.shape[0] > 1 or x.shape[1] % 4 > 0:
        found = 1.0 - 2.0 * sigmoid2(x)
    else:
        found = tl.inline_asm_elementwise(FOUR_TANH, "=r,=r,=r,=r,r,r,r,r", [x], dtype=tl.float32, is_pure=True, pack=4)
    return found


@triton.jit
def abs(x):
    """|x|."""
    return tl.abs(x)


@triton.jit
def minimum(a, b):
    """The smaller."""
    return tl.minimum(a, b)


@triton.jit
def maximum(a, b):
    """The larger."""
    return tl.maximum(a, b)


@triton.jit
def power(x, y):
    """x^y for x ≥ 0 (x^0 = 1), NaN for x < 0; small integer powers are printed as products instead."""
    return tl.where(y == 0.0, 1.0, exp(y * log(x)))


@triton.jit
def round_to(x, kind: tl.constexpr):
    """float32 x rounded to `kind`, in float32."""
    return x.to(kind).to(tl.float32)


@triton.jit
def rest_of(x, kind: tl.constexpr):
    """The rounding error of x in bfloat16 or float16 as int8: eight, or five, more binary digits of x.

    Its unit is 2^-15 of the power of two of x's first digit.
    """
    bits = x.to(tl.int32, bitcast=True)
    if kind == tl.bfloat16:
        down = (bits & 0x1FFFF) == 0x8000  # a tie, rounded to even
        rest = tl.where(down, 127, bits >> 8)
    else:  # beyond float16's exponents the difference is larger, and is cut
        apart = bits - round_to(x, kind).to(tl.int32, bitcast=True)
        rest = tl.minimum(tl.maximum((apart + 128) >> 8, -127), 127)
    return rest.to(tl.int8)


@triton.jit
def with_rest(x, rest):
    """The float32 number of which x is the rounded value and rest the rest_of."""
    return (x.to(tl.int32, bitcast=True) + rest.to(tl.int32) * 256).to(tl.float32, bitcast=True)


@triton.jit
def circle(part):
    """cos and sin of 2π part, float32, for a float64 part. Of the nearest quarter turn's rest, by their series."""
    quarter = tl.floor(4.0 * part + 0.5)
    a = ((part - 0.25 * quarter) * TURN).to(tl.float32)  # at most π/4 and a rounding error
    return _from_quarter(a, (quarter - 4.0 * tl.floor(0.25 * quarter)).to(tl.int32))


@triton.jit
def _from_quarter(a, place):
    """cos and sin of a + place π/2, for |a| up to π/4 and place 0 to 3."""
    z = a * a
    sine = a + a * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880))))
    cosine = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 - z * (1.0 / 3628800)))))
    odd, back = (place & 1) == 1, place >= 2
    first, second = tl.where(odd, -sine, cosine), tl.where(odd, cosine, sine)
    return tl.where(back, -first, first), tl.where(back, -second, second)


@triton.jit
def cos_sin(x):
    """cos and sin of a float32 angle, with the digits that its part of a turn has in float64.

    Products with 1 / 2π in two parts are exact, as they are added before they are rounded; NumPy rounds both.
    """
    if INTERPRETED:
        found = circle(tl.cast(x, tl.float64) * PER_TURN)  # of a number, too, which has no .to here
    else:
        turns = tl.floor(x * PER_TURN + 0.5)
        part = tl.fma(x, PER_TURN_LOW, tl.fma(x, PER_TURN_HIGH, -turns))
        part -= (part + ROUNDING) - ROUNDING  # turns that the product of a large angle had rounded away
        quarter = 4.0 * part + ROUNDING
        a = (part - 0.25 * (quarter - ROUNDING)) * TURN
        found = _from_quarter(a, quarter.to(tl.int32, bitcast=True) & 3)
    return found


@triton.jit
def cos(x):
    """cos x."""
    return cos_sin(x)[0]


@triton.jit
def sin(x):
    """sin x."""
    return cos_sin(x)[1]
