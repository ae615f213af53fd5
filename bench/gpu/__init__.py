"""`sh bench/gpu.sh`: everything that a machine with GPUs can show, in one command; see docs/GPU.md.

`__main__` runs the parts (`parts`, `plans`) one after the other, each command in a process of its own with a time limit
(`commands`); `sizes` says how large things are; `facts`, `emulated` and `traced` are such processes; `page` writes what
was found. Only these three import torch.
"""
