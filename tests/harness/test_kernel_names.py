"""A kernel's name fits on a line."""

from __future__ import annotations

import pytest

from harness.kernel_names import short_kernel_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_flash_forward", "_flash_forward"),
        ("Memset (Device)", "Memset (Device)"),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<8, long>(float*, long)",
            "at::native::cunn_SoftMaxForwardSmem",
        ),
        ("void flash::flash_fwd_kernel(flash::Flash_fwd_params)", "flash::flash_fwd_kernel"),
    ],
)
def test_a_kernel_is_named_without_its_templates(name: str, short: str) -> None:
    assert short_kernel_name(name) == short
