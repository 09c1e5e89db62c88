"""A library that looks for GPUs at its import."""

import torch

FOUND = torch.cuda.is_available(), torch.cuda.device_count()
