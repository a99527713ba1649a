"""Without a GPU the kernels run under Triton's interpreter, which is chosen when they are decorated: before the first import of kernels.triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
