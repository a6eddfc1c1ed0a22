"""What is compiled ahead, without a GPU, is what a launch on that GPU then finds in Triton's cache."""

import json

import pytest

from tests.kernels.compiler import output_of

# A process that takes itself to be on a Hopper GPU, as far as compiling goes: it compiles the units of
# each kernel, and then asks for the launch's own compilation. The listener hears whether the cache had it.
PROCESS = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from harness.plugin import load_kernel
from harness.problem import Problem
from harness.target import Target

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Hopper())
heard = []
triton.knobs.compilation.listener = lambda **said: heard.append(said["cache_hit"])
target = Target("cuda", "Hopper", (9, 0), 132, 227 * 1024)
name, head_dim, causal, dtype, seq_len, described = json.loads(sys.argv[1])
problem = Problem(
    batch=1, heads=2, kv_heads=2, seq_len_q=seq_len, seq_len_k=seq_len, head_dim=head_dim, causal=causal,
    dtype=dtype,
)
kernel = load_kernel(name, {})
options = next(
    options for options in kernel.candidates(problem, target)
    if bool(options.get("tensor_descriptors")) == described
)
[compiled] = kernel.with_options(options).compile_for(problem, target)
assert compiled.asm["cubin"]
tensor = torch.zeros(1, 2, seq_len, head_dim, dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
module = kernel.module
if name == "gluon_hopper":
    descriptors = [module._descriptor(tensor, rows) for rows in (64, *2 * [options["tile_k"]], 64)]
    counter = torch.zeros(1, dtype=torch.int32)
    module._attention_forward.warmup(
        *descriptors, counter, 2, 1, 2, 5, 7, seq_len, 0.3,
        **module._constants(options, seq_len, causal), **module._launch_options(options), grid=(1,),
    )
else:
    constants = module._constants(options, head_dim, seq_len, causal, 0.3, [head_dim, 640, 6400], described)
    source = module._descriptor(tensor, constants) if described else tensor
    module._flash_forward.warmup(
        *(tensor, source, source, tensor), *range(12), 2, 2, 1, seq_len, seq_len, 0.3,
        **constants, **module._launch_options(options), grid=(1,),
    )
print(json.dumps(heard))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        ("gluon_hopper", 64, False, "fp16", 1000, False),
        ("triton_flash", 64, True, "bf16", 1024, False),
        ("triton_flash", 128, False, "fp16", 1000, True),
    ],
    ids=["gluon_hopper", "triton_flash", "triton_flash by descriptors"],
)
def test_a_launch_finds_in_the_cache_what_was_compiled_without_a_gpu(cell, tmp_path):
    printed = output_of(PROCESS, cell, tmp_path)
    assert json.loads(printed) == [False, True]
