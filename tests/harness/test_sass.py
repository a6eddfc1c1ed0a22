"""What nvdisasm and cuobjdump print, read: most lines as they came for real kernels, a few made by hand."""

from __future__ import annotations

import pytest

from harness import sass
from harness.sass import MIX, ToolError, Usage, instructions, mix, usage

LINES = {
    "mma": ["HMMA.16816.F32 R44, R72.reuse, R60, RZ", "IMMA.16832.S8.S8 R4, R8.ROW, R2.COL, RZ"],
    "wgmma": [
        "HGMMA.64x64x16.F32 R24, gdesc[UR12], RZ, !UPT",
        "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ",
    ],
    "tcgen05": [
        "UTCHMMA gdesc[UR34], gdesc[UR28], tmem[UR32], tmem[UR54], idesc[UR55], !UPT",
        "UTCQMMA gdesc[UR34], gdesc[UR28], tmem[UR32], tmem[UR54], idesc[UR55], !UPT",
    ],
    "fp32_multiply_add": ["FFMA R88, R24, UR28, -R16.reuse", "FFMA2 R4, R8.F32x2.HI_LO, R6.F32x2.HI_LO, R2"],
    "fp32_other": [
        "FADD R41, -R16, R123",
        "FMUL R16, R91, UR28",
        "FMNMX R89, R24, R25, !PT",
        "FMNMX3 R4, R4, R10, R11, !PT",
        "FSEL R59, R6, R59, P6",
        "FSETP.GT.AND P6, PT, |R5|, 8.50705917302346158658e+37, PT",
    ],
    "fp16_arithmetic": [
        "HFMA2 R3, -RZ, RZ, 0, 1.5199184417724609375e-05",
        "HADD2.F32 R4, R8.reuse.H0_H0, -RZ.H0_H0",
    ],
    "special_function": ["MUFU.EX2 R160, R160", "MUFU.RCP R5, R5"],
    "global_load": ["@!P1 LDG.E.128 R12, desc[UR18][R18.64]", "LD.E R0, desc[UR4][R2.64]"],
    "global_store": [
        "@!P0 STG.E.128 desc[UR18][R2.64], R12",
        "@P0 RED.E.ADD.STRONG.GPU [UR4], R0",
        "REDG.E.ADD.STRONG.GPU desc[UR4][R2.64], R5",
        "ATOMG.E.ADD.STRONG.GPU PT, R4, desc[UR30][R2.64], R5",
    ],
    "shared_load": ["@!PT LDS RZ, [RZ]", "LDSM.16.M88.4 R12, [R26]"],
    "shared_store": [
        "STS.128 [R5+UR6+0xc800], R12",
        "STSM.16.M88 [R58+0x10000], R59",
        "ATOMS.OR RZ, [UR5+0x14], R3",
    ],
    "local_load": ["LDL.LU R2, [R1+0x30]"],
    "local_store": ["STL.64 [R1+0x1a0], R12"],
    "async_copy": ["LDGSTS.E.BYPASS.128 [R27], desc[UR18][R28.64], P4"],
    "tma_load": ["UTMALDG.4D [UR8], [UR46]", "UBLKCP.S.G [UR8], [UR46], UR5"],
    "tma_store": [
        "@UP0 UTMASTG.4D [UR8], [UR18]",
        "UBLKRED.G.S.ADD [UR6], [UR4], UR5",
        "UBLKCP.G.S [UR6], [UR4], UR5",
    ],
    "tensor_memory": ["LDTM.16dp32bit_t0_t15.x32 R8, tmem[UR15+0x40]", "STTM.x32 tmem[UR40], RZ"],
    "shuffle": ["SHFL.BFLY PT, R89, R88, 0x2, 0x1f", "REDUX.SUM UR8, R7"],
    "barrier": [
        "BAR.SYNC.DEFER_BLOCKING 0x0",
        "@UP4 SYNCS.EXCH.64 URZ, [UR10+0x10200], UR26",
        "WARPGROUP.ARRIVE",
        "DEPBAR.LE SB0, 0x2",
        "LDGDEPBAR",
        "MEMBAR.ALL.CTA",
        "UTCBAR [UR4], URZ",
        "WARPSYNC.ALL",
    ],
}
IN_NO_GROUP = (
    *("IMAD.MOV.U32 R2, RZ, RZ, RZ", "LDC R1, c[0x0][0x28]", "ULDC.64 UR6, c[0x0][0x230]"),
    *("S2R R7, SR_CTAID.X", "F2FP.F16.F32.PACK_AB R92, R29, R28", "R2UR UR6, R3", "UTMACMDFLUSH", "@P3 EXIT"),
)


def printed(*lines):
    """A function of these instructions, as nvdisasm prints it; a label stands as it is."""
    shown = [
        line if line.endswith(":") else f"        /*{16 * place:04x}*/                   {line} ;"
        for place, line in enumerate(lines)
    ]
    return "\n".join([".text._attention_forward:", *shown])


def groups_of(*lines):
    counts = mix(instructions(printed(*lines)))
    assert counts.pop("instructions") == len(lines)
    return {group: count for group, count in counts.items() if count}


@pytest.mark.parametrize(
    ("group", "line"), [(group, line) for group, lines in LINES.items() for line in lines]
)
def test_an_instruction_is_counted_in_its_group_and_in_no_other(group, line):
    assert groups_of(line) == {group: 1}


def test_a_whole_text_has_all_groups_and_each_of_its_instructions_once():
    every_line = [line for lines in LINES.values() for line in lines]
    assert groups_of(*every_line, *IN_NO_GROUP) == {group: len(lines) for group, lines in LINES.items()}
    assert LINES.keys() == MIX.keys()


def test_moves_conversions_and_control_are_in_no_group():
    assert groups_of(*IN_NO_GROUP) == {}


@pytest.mark.parametrize("branch", ["@P0 BRA `(.L_x_0)", "BRA.U !UP0, `(.L_x_0)", "JMP `(.L_x_0)"])
def test_whatever_branches_back_closes_a_loop_and_a_branch_forward_none(branch):
    loop = (".L_x_0:", "MUFU.EX2 R4, R4", branch)
    code = instructions(printed("MOV R2, RZ", *loop, "BRA `(.L_x_1)", "STG.E [R2], R4", ".L_x_1:", "EXIT"))
    assert [one.in_loop for one in code] == [False, True, True, False, False, False]


def test_a_branch_by_a_register_closes_a_loop_where_one_of_its_targets_lies_before_it():
    for targets, looped in ((".L_x_1,.L_x_0", True), (".L_x_1", False)):
        branch = f'BRX R6 -0x130 (*"BRANCH_TARGETS {targets}"*)'
        code = instructions(printed("MOV R2, RZ", ".L_x_0:", "MUFU.EX2 R4, R4", branch, ".L_x_1:", "EXIT"))
        assert [one.in_loop for one in code] == [False, looped, looped, False]


USAGE = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function _decode_splits:
  REG:136 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _decode:
  REG:32 STACK:1024 SHARED:0 LOCAL:0 CONSTANT[0]:472 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_of_several_functions_registers_and_stack_are_those_of_the_one_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(sass, "_run", lambda *words: USAGE)
    assert usage(b"", "_decode_splits") == Usage(136, 0)
    assert usage(b"", "_decode") == Usage(32, 1024)


def test_a_function_of_which_nothing_is_said_has_no_registers_of_another(monkeypatch):
    monkeypatch.setattr(sass, "_run", lambda *words: USAGE)
    with pytest.raises(ToolError, match="says nothing of _dec:"):
        usage(b"", "_dec")
