"""The loops that oneemb compiles ahead, and which of them are held to the resources of another.

CASES: name -> (loop with its constants, types of its arguments)
"""

import re

from oneemb.kernels.cuda_signatures import cases, updates
from oneemb.kernels.row_update_cuda import element_loop

CASES = cases()

OF_ADAM = {}
"""The same form of Adam's loop for each form of an update that looks at one weight at a time, as Adam's does."""
for name, (loop, _) in CASES.items():
    of = re.fullmatch(r"((?:fused, scaled |fused )?)(.+?)( (?:float32|float16|bfloat16) x\d)", name)
    if of is not None and of[2] in updates() and loop.function is element_loop.function:
        OF_ADAM[name] = f"{of[1]}adam{of[3]}"
