"""Codes of quantized weights to bfloat16 or float16 in registers, four bytes at a time.

Device functions for Triton kernels.

Compiled code does it in PTX on 32-bit words, one to three instructions a weight; Triton's own
conversions take one weight at a time. All of them are exact (NF4's table is rounded to the dtype).
fp8 is taken apart as bits, so that it needs no hardware that supports it: sm_80 and sm_90 give the
same bits. In Triton's interpreter (`WIDEN`), which has no PTX, the same numbers are made in
float32. The tests run the PTX text on every code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraserve_kernels.common.quantized import NF4_CODE

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _bits(value: float, dtype: str) -> int:
    """Encode a number in 16 bits."""
    return int(torch.tensor([value], dtype=_DTYPES[dtype]).view(torch.int16)[0]) & 0xFFFF


def _pair(value: float, dtype: str) -> str:
    """Format a number twice in 32 bits."""
    return f"0x{_bits(value, dtype):04X}{_bits(value, dtype):04X}"


def _suffix(dtype: str) -> str:
    return {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]


# A byte under this byte is a whole number of 16 bits plus `_OFFSET`: its ulp there is one
_HIGH = {"bf16": 0x43, "fp16": 0x64}
_OFFSET = {"bf16": 128, "fp16": 1024}


def int4_ptx(dtype: str, *, has_zeros: bool) -> str:
    """Write the PTX that unpacks eight codes of 4 bits.

    $0, $1: the values of four low nibbles; $2, $3: of the high ones; $4: four bytes; $5, $6:
    `_OFFSET` plus the zeros of the four, negated.
    """
    word, suffix = f"0x{f'{_HIGH[dtype]:02X}' * 4}", _suffix(dtype)
    shift = _pair(-(_OFFSET[dtype] + 8), dtype)
    zeros = ("$5", "$6") if has_zeros else ("s", "s")
    return f"""{{
        .reg .b32 lo, hi, one, s;
        mov.b32 one, {_pair(1.0, dtype)};
        mov.b32 s, {shift};
        and.b32 lo, $4, 0x0F0F0F0F;
        shr.u32 hi, $4, 4;
        and.b32 hi, hi, 0x0F0F0F0F;
        prmt.b32 $0, lo, {word}, 0x4140;
        prmt.b32 $1, lo, {word}, 0x4342;
        prmt.b32 $2, hi, {word}, 0x4140;
        prmt.b32 $3, hi, {word}, 0x4342;
        fma.rn.{suffix} $0, $0, one, {zeros[0]};
        fma.rn.{suffix} $1, $1, one, {zeros[1]};
        fma.rn.{suffix} $2, $2, one, {zeros[0]};
        fma.rn.{suffix} $3, $3, one, {zeros[1]};
    }}"""


def nf4_ptx(dtype: str) -> str:
    """$0, $1: the values of four low nibbles; $2, $3: of the high ones; $4: four bytes.

    A selector of `prmt` picks four bytes of eight by three bits each; the fourth bit chooses
    between two picks, made into a mask of whole bytes.
    """
    bits = [_bits(value, dtype) for value in NF4_CODE]
    halves = []
    for shift in (0, 8):
        numbers = [b >> shift & 0xFF for b in bits]
        halves.append([f"0x{int.from_bytes(bytes(numbers[i : i + 4]), 'little'):08X}" for i in range(0, 16, 4)])
    body = []
    # two bytes hold four codes: the low and high nibble of the first, then of the second
    for first, (low_out, high_out) in enumerate((("$0", "$2"), ("$1", "$3"))):
        body += [
            "mov.b32 c, $4;" if first == 0 else "shr.u32 c, $4, 16;",
            "and.b32 i, c, 0x7777;",
            # a selector with the fourth bit gives the sign of the byte that it picks, eight times:
            # 0xFF, and else the byte, 0x80
            "prmt.b32 m, 0x80808080, 0x80808080, c;",
            "shl.b32 n, m, 1;",
            "and.b32 m, m, 0x7F7F7F7F;",
            "and.b32 n, n, 0x80808080;",
            "or.b32 m, m, n;",
        ]
        for name, words in zip(("l", "h"), halves, strict=True):
            body += [
                f"prmt.b32 a, {words[0]}, {words[1]}, i;",
                f"prmt.b32 b, {words[2]}, {words[3]}, i;",
                # a where the mask is 0, b where it's 1
                f"lop3.b32 {name}, m, b, a, 0xCA;",
            ]
        body += [f"prmt.b32 {low_out}, l, h, 0x6240;", f"prmt.b32 {high_out}, l, h, 0x7351;"]
    return "{\n.reg .b32 c, i, m, n, a, b, l, h;\n" + "\n".join(body) + "\n}"


def int8_ptx(dtype: str, *, has_zeros: bool) -> str:
    """Write the PTX that unpacks four codes of 8 bits.

    $0, $1: the values of four bytes; $2: the bytes; $3, $4, with zeros: what is to be added: 128
    less the zeros of the four, in float16 less 1152 more.
    """
    if dtype == "fp16":
        shifts = ("$3", "$4") if has_zeros else ("s", "s")
        return f"""{{
            .reg .b32 u, one, s;
            mov.b32 one, {_pair(1.0, dtype)};
            mov.b32 s, {_pair(-(1024 + 128), dtype)};
            xor.b32 u, $2, 0x80808080;
            prmt.b32 $0, u, 0x64646464, 0x4140;
            prmt.b32 $1, u, 0x64646464, 0x4342;
            fma.rn.f16x2 $0, $0, one, {shifts[0]};
            fma.rn.f16x2 $1, $1, one, {shifts[1]};
        }}"""
    # the difference of two whole numbers below 256 is exact
    shifted = "fma.rn.bf16x2 $0, $0, one, $3;\nfma.rn.bf16x2 $1, $1, one, $4;" if has_zeros else ""
    # seven bits fit under 128.0; the eighth makes what is taken away 256.0 instead of 128.0
    return f"""{{
        .reg .b32 p, q, c, d, minus, one;
        mov.b32 minus, {_pair(-1.0, dtype)};
        mov.b32 one, {_pair(1.0, dtype)};
        prmt.b32 p, $2, 0, 0x4140;
        prmt.b32 q, $2, 0, 0x4342;
        lop3.b32 c, p, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 d, q, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 p, p, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 q, q, 0x007F007F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, c, minus, p;
        fma.rn.bf16x2 $1, d, minus, q;
        {shifted}
    }}"""


def fp8_ptx(dtype: str) -> str:
    """$0, $1: the values of four bytes of float8_e4m3fn, save for NaN; $2: the bytes."""
    # its exponent and mantissa at the place of the wider ones, then the difference of the two
    # biases; smallest numbers stay right
    shift, factor = (4, 2.0**120) if dtype == "bf16" else (1, 2.0**8)
    return f"""{{
        .reg .b32 p, q, f, z;
        mov.b32 f, {_pair(factor, dtype)};
        mov.b32 z, 0x80008000;
        prmt.b32 p, $2, 0, 0x1404;
        prmt.b32 q, $2, 0, 0x3424;
        and.b32 $0, p, 0x7F007F00;
        and.b32 $1, q, 0x7F007F00;
        shr.u32 $0, $0, {shift};
        shr.u32 $1, $1, {shift};
        lop3.b32 $0, p, z, $0, 0xEA;
        lop3.b32 $1, q, z, $1, 0xEA;
        fma.rn.{_suffix(dtype)} $0, $0, f, z;
        fma.rn.{_suffix(dtype)} $1, $1, f, z;
    }}"""


# outputs are written before the last input is read
PACKED_CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,r")
PACKED_CONSTRAINTS_ZEROS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
BYTE_CONSTRAINTS = tl.constexpr("=&r,=&r,r")
BYTE_CONSTRAINTS_ZEROS = tl.constexpr("=&r,=&r,r,r,r")
INT4_BF16 = tl.constexpr(int4_ptx("bf16", has_zeros=False))
INT4_FP16 = tl.constexpr(int4_ptx("fp16", has_zeros=False))
INT4_BF16_ZEROS = tl.constexpr(int4_ptx("bf16", has_zeros=True))
INT4_FP16_ZEROS = tl.constexpr(int4_ptx("fp16", has_zeros=True))
NF4_BF16 = tl.constexpr(nf4_ptx("bf16"))
NF4_FP16 = tl.constexpr(nf4_ptx("fp16"))
INT8_BF16 = tl.constexpr(int8_ptx("bf16", has_zeros=False))
INT8_FP16 = tl.constexpr(int8_ptx("fp16", has_zeros=False))
INT8_BF16_ZEROS = tl.constexpr(int8_ptx("bf16", has_zeros=True))
INT8_FP16_ZEROS = tl.constexpr(int8_ptx("fp16", has_zeros=True))
FP8_BF16 = tl.constexpr(fp8_ptx("bf16"))
FP8_FP16 = tl.constexpr(fp8_ptx("fp16"))
# the low halves of two words, and the high ones
HALVES = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410;\nprmt.b32 $1, $2, $3, 0x7632;")
HALVES_CONSTRAINTS = tl.constexpr("=&r,=&r,r,r")
_TABLE = tl.constexpr(tuple(NF4_CODE))


@triton.jit  # type: ignore[untyped-decorator]
def unpack_bytes(  # type: ignore[no-untyped-def]
    codes, zeros, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_BF16: tl.constexpr, WIDEN: tl.constexpr
):
    """Decode int8 or fp8 codes (both as uint8) to bf16 or fp16.

    They are float32 with WIDEN. `zeros`, float32 of codes' shape, is read with HAS_ZEROS.
    """
    if WIDEN:
        if FORMAT == "int8":
            value = codes.to(tl.int8, bitcast=True).to(tl.float32)
            if HAS_ZEROS:
                value += 128.0 - zeros
            return value
        else:
            wide = codes.to(tl.int32)
            number = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            return tl.where(wide > 127, -number, number)
    elif HAS_ZEROS:
        if IS_BF16:
            args = [codes, (128.0 - zeros).to(tl.bfloat16)]
            return tl.inline_asm_elementwise(
                INT8_BF16_ZEROS, BYTE_CONSTRAINTS_ZEROS, args, dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            args = [codes, (-(zeros + 1024.0)).to(tl.float16)]
            return tl.inline_asm_elementwise(
                INT8_FP16_ZEROS, BYTE_CONSTRAINTS_ZEROS, args, dtype=tl.float16, is_pure=True, pack=4
            )
    elif IS_BF16:
        ASM: tl.constexpr = INT8_BF16 if FORMAT == "int8" else FP8_BF16
        return tl.inline_asm_elementwise(ASM, BYTE_CONSTRAINTS, [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        ASM_FP16: tl.constexpr = INT8_FP16 if FORMAT == "int8" else FP8_FP16
        return tl.inline_asm_elementwise(ASM_FP16, BYTE_CONSTRAINTS, [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_nibbles(  # type: ignore[no-untyped-def]
    codes, zeros, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_BF16: tl.constexpr, WIDEN: tl.constexpr
):
    """Decode the low nibbles and the high ones to bf16 or fp16.

    They are float32 with WIDEN. `zeros`, float32 of codes' shape, is read with HAS_ZEROS.
    """
    if WIDEN:
        lo = codes & 15
        hi = codes >> 4
        if FORMAT == "nf4":
            return nf4_value(lo), nf4_value(hi)
        elif HAS_ZEROS:
            return lo.to(tl.float32) - zeros, hi.to(tl.float32) - zeros
        else:
            return lo.to(tl.float32) - 8.0, hi.to(tl.float32) - 8.0
    elif IS_BF16:
        if FORMAT == "nf4":
            return tl.inline_asm_elementwise(
                NF4_BF16, PACKED_CONSTRAINTS, [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        elif HAS_ZEROS:
            args = [codes, (-(zeros + 128.0)).to(tl.bfloat16)]
            return tl.inline_asm_elementwise(
                INT4_BF16_ZEROS, PACKED_CONSTRAINTS_ZEROS, args, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                INT4_BF16, PACKED_CONSTRAINTS, [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    elif FORMAT == "nf4":
        return tl.inline_asm_elementwise(
            NF4_FP16, PACKED_CONSTRAINTS, [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    elif HAS_ZEROS:
        args = [codes, (-(zeros + 1024.0)).to(tl.float16)]
        return tl.inline_asm_elementwise(
            INT4_FP16_ZEROS, PACKED_CONSTRAINTS_ZEROS, args, dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            INT4_FP16, PACKED_CONSTRAINTS, [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit  # type: ignore[untyped-decorator]
def zeros_of(words, channels, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unpack the zeros of some channels, [WIDTH, channels] float32, from their words."""
    zeros = ((words >> (channels % 4 * 8)) & 0xFF).to(tl.float32)
    return tl.broadcast_to(zeros[None, :], (WIDTH, channels.shape[0]))


@triton.jit
def nf4_value(code):  # type: ignore[no-untyped-def]
    """NF4's number of each code, float32: for the interpreter."""
    value = tl.zeros(code.shape, tl.float32)
    for i in tl.static_range(16):
        value = tl.where(code == i, _TABLE[i], value)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def split_words(words, IS_BF16: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Split int32 words into their low and high halves as bf16 or fp16; float32 with WIDEN."""
    if WIDEN:
        if IS_BF16:
            return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
        else:
            lo = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
            hi = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
            return lo.to(tl.float32), hi.to(tl.float32)
    elif IS_BF16:
        return tl.inline_asm_elementwise(
            HALVES, HALVES_CONSTRAINTS, [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            HALVES, HALVES_CONSTRAINTS, [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
