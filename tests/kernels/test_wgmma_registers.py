"""The check of what assemblers do to registers that a wgmma reads finds what it is there for."""

import pytest

from tests.kernels.wgmma_registers import overwritten

# The loop of a kernel: the product of P in registers 40 to 43 is under way while the next P is computed.
LOOP = """
        /*0000*/                   MOV R40, R1 ;
.L_x_1:
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, R40, gdesc[UR16].tnspB, R88, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   {first} ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   F2FP.BF16.F32.PACK_AB R40, R25, R24 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
"""


@pytest.mark.parametrize(
    "harmless",
    [
        "F2FP.BF16.F32.PACK_AB R44, R25, R24",
        "FMUL R39, R40, R2",
        "ISETP.GE.AND P0, PT, R40, R41, PT",
        "STS.128 [R40], R40",
        "LDS.128 R36, [R41]",
        "R2UR UR4, R40",
    ],
)
def test_what_writes_elsewhere_overwrites_nothing(harmless):
    assert overwritten(LOOP.replace("{first}", harmless)) == []


@pytest.mark.parametrize(
    "writing",
    [
        "F2FP.BF16.F32.PACK_AB R40, R25, R24",
        "@P3 FMUL R43, R40, R2",
        "LDS.128 R40, [R2]",
        "LDS.64 R42, [R2]",
        "LDSM.16.M88.4 R40, [R2]",
        "CS2R R42, SRZ",
        "IMAD.WIDE.U32 R42, R2, R3, RZ",
        "SHFL.BFLY PT, R41, R2, 0x1, 0x1f",
        "LOP3.LUT P1, R41, R2, 0x1, RZ, 0xc0, !PT",
    ],
)
def test_a_write_before_the_wait_is_found(writing):
    [found] = overwritten(LOOP.replace("{first}", writing))
    assert writing in found


def test_a_write_in_the_next_round_is_found_where_the_wait_is_too_weak():
    weak = LOOP.replace("{first}", "MOV R2, R3").replace("gsb0, 0x0", "gsb0, 0x1")
    [found] = overwritten(weak)
    assert "F2FP.BF16.F32.PACK_AB R40" in found


def test_a_group_that_is_still_open_is_read_too():
    code = LOOP.replace("R88, R40, gdesc[UR16].tnspB, R88, gsb0", "R88, R40, gdesc[UR16].tnspB, R88")
    assert len(overwritten(code.replace("{first}", "MOV R41, R3"))) == 2  # here, and behind the last wait
