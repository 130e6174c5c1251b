"""One compute thread a test process: several of them share the machine, and OpenMP barriers suffer from company."""

import torch

torch.set_num_threads(1)
