"""A kernel's name fits on a line."""

from __future__ import annotations

import pytest

from harness.kernel_names import element_operation, short_kernel_name

# As Nsight Compute 2025 writes them for PyTorch 2.11 (tests/data/h200/ncu).
MASKED_FILL = (
    "void at::elementwise_kernel<128, 4, void at::gpu_kernel_impl_nocast<at::<unnamed>::masked_fill_kernel("
    "at::TensorIterator &, const c10::Scalar &)::[lambda() (instance 1)]::operator ()() const::[lambda() "
    "(instance 12)]::operator ()() const::[lambda(c10::BFloat16, bool) (instance 1)]>"
    "(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
)
MULTIPLY = (
    "void at::vectorized_elementwise_kernel<8, at::AUnaryFunctor<c10::Half, c10::Half, c10::Half, "
    "binary_internal::MulFunctor<float>>, std::array<char *, 2>>(int, T2, T3)"
)
COPY = (
    "void at::vectorized_elementwise_kernel<8, at::float16_copy_kernel_cuda(at::TensorIteratorBase &)::"
    "[lambda(float) (instance 1)], std::array<char *, 2>>(int, T2, T3)"
)
SOFTMAX = (
    "void at::<unnamed>::cunn_SoftMaxForwardReg<float, float, float, at::<unnamed>::SoftMaxForwardEpilogue, "
    "long, 4>(T3 *, const T1 *, T5)"
)
CUDNN = (
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (CUDNN, CUDNN),
        ("_flash_forward", "_flash_forward"),
        ("Memset (Device)", "Memset (Device)"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN", "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN"),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<8, long>(float*, long)",
            "at::native::cunn_SoftMaxForwardSmem",
        ),
        (SOFTMAX, "at::cunn_SoftMaxForwardReg"),
        (MASKED_FILL, "at::elementwise_kernel"),
        (COPY, "at::vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 10>(float*, int)", "softmax_warp_forward"),
        ("void <unnamed>::copy<float>(T1 *)", "copy"),
        ("void {anonymous}::copy<float>(T1 *)", "copy"),
        ("void flash::flash_fwd_kernel(flash::Flash_fwd_params)", "flash::flash_fwd_kernel"),
        # A class template's member; a return type with template arguments of its own, as cuBLAS has them.
        ("void fmha::Kernel<128, (bool)1>::run<(3 > 2)>(Params)", "fmha::Kernel::run"),
        ("std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int>(T13)", "internal::gemvx::kernel"),
        # A kernel that is a lambda or a call operator.
        (
            "void scale(float *)::{lambda(int)#1}::operator()(int) const",
            "scale::[lambda]::operator()",
        ),
        ("void Scale<float>::operator ()(int) const", "Scale::operator()"),
        ("void cut_off<float, std::array<char", "cut_off"),
        ("(no name)", "(no name)"),
    ],
)
def test_a_kernel_is_named_without_its_templates(name: str, short: str) -> None:
    assert short_kernel_name(name) == short


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        (MULTIPLY, "MulFunctor"),
        (COPY, "float16_copy_kernel_cuda"),
        (MASKED_FILL, "masked_fill_kernel"),
        (SOFTMAX, None),
        ("_flash_forward", None),
        ("void flash::flash_fwd_kernel(flash::Params<some_kernel>)", None),
    ],
)
def test_kernels_of_one_template_are_told_apart_by_what_they_apply(name: str, operation: str | None) -> None:
    assert element_operation(name) == operation
