from __future__ import annotations

import pytest

from benchmarks.gpu.sass import local_accesses

CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;              /* 0x00000a0000017a02 */
        /*0010*/              @P0  STL.64 [R1], R8 ;                   /* 0x0000000801007387 */
        /*0020*/                   LDG.E R2, [R4.64] ;                 /* 0x0000000404027381 */
        /*0030*/                   {inside} ;                          /* 0x0000000404027381 */
        /*0040*/              @!P1 BRA 0x20 ;                          /* 0xfffffa0000009947 */
        /*0050*/                   LDL.LU R161, [R1] ;                 /* 0x0000000001a17983 */
        /*0060*/                   EXIT ;                              /* 0x000000000000794d */
        /*0070*/                   BRA 0x70;                           /* 0xfffffff000007947 */
"""


@pytest.mark.parametrize(("inside", "found"), [("LDL R3, [R1]", (3, 1)), ("LDS R3, [R1]", (2, 0))])
def test_local_accesses_are_counted_in_loops(inside: str, found: tuple[int, int]) -> None:
    assert local_accesses(CODE.format(inside=inside)) == found
